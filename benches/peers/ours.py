"""The stages of the data pipeline by tracegrad's public Python names, each a function of a workload's folder."""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

import tracegrad as tg
from timing import fastest
from tracegrad import _core
from tracegrad.alignment.tokenizer import Template
from tracegrad.data.read_options import CHUNK_BYTES, MAX_RECORD_BYTES

Found = dict[str, Any]
# Bytes that `Sequences` stores for a token: ids, turn, version, logprob and inverse temperature of 4, three of 1.
TOKEN_BYTES = 23
# Longer than the tokenizer's cached texts, so that warm is not a cache hit.
PIECE = 96 << 10
# As many pieces are compared with the reference, which is slow.
SOME = 12
OPENERS = {"qwen": "<|im_start|>user\n", "deepseek": "<｜User｜>"}


def read(folder: Path, file: str, rounds: int) -> Found:
    """A file to `Traces`."""
    took = fastest(lambda: tg.read(folder / file), 4 * rounds)
    return {"seconds": took.seconds, "cpu_s": took.cpu_s, "bytes": (folder / file).stat().st_size}


def load(folder: Path, file: str, rounds: int) -> Found:
    """A folder to a `Tokenizer` and its first ids, with nothing kept of it and with what an earlier load kept."""
    import os
    import tempfile

    found = dict.fromkeys(("first_s", "first_encode_s", "kept_s", "kept_encode_s"), float("inf"))
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRACEGRAD_CACHE"] = cache
        for name in ["first"] * rounds + ["none"] + ["kept"] * 2 * rounds:
            began = time.perf_counter()
            tokenizer = tg.Tokenizer.from_pretrained(folder.parent / file, cache=name != "first")
            loaded = time.perf_counter()
            tokenizer.encode("2+2?")
            for key, took in ((f"{name}_s", loaded - began), (f"{name}_encode_s", time.perf_counter() - loaded)):
                found[key] = min(found.get(key, took), took)
    return found


def memory(folder: Path, file: str, rounds: int) -> Found:
    """Additional memory of the process after it has read eight files of the size, as one; no round is warm."""
    del rounds
    path = folder / f"memory-{file}"
    with path.open("wb") as all_of_it:
        for _ in range(8):
            all_of_it.write((folder / file).read_bytes())
    tg.read(folder / "other.jsonl")
    before = held()
    traces = tg.read(path)
    more = max(held() - before, resource.getpagesize())
    found = {"memory": more, "bytes": path.stat().st_size, "traces": len(traces)}
    path.unlink()
    return found


def held() -> int:
    """Bytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def stream(folder: Path, file: str, rounds: int) -> Found:
    """A file to `Traces` that are let go, sixteen at a time."""
    took = fastest(lambda: deque(tg.stream(folder / file, batch=16), maxlen=0), 4 * rounds)
    return {"seconds": took.seconds, "cpu_s": took.cpu_s, "bytes": (folder / file).stat().st_size}


def fresh(folder: Path) -> tg.Tokenizer:
    """A tokenizer that has met none of the workload's text: it aligned another recording, which initialises it."""
    tokenizer = tg.Tokenizer.from_pretrained(folder.parent / "qwen")
    tg.align(tg.read(folder / "other.jsonl"), tokenizer)
    return tokenizer


def align(folder: Path, file: str, rounds: int) -> Found:
    """`Traces` to `Sequences`, by a tokenizer that has not met the text, and by one that has."""
    traces = tg.read(folder / file)
    took = fastest(lambda tokenizer: tg.align(traces, tokenizer), rounds, lambda: fresh(folder))
    sequences = took.result
    tokenizer = fresh(folder)
    again = fastest(lambda: tg.align(traces, tokenizer), rounds + 1)
    levels = {name: row["tokens"] for name, row in sequences.levels().items()}
    counts = {"tokens": sequences.tokens, "sampled": len(sequences.terms), "levels": levels}
    told = {"seconds": took.seconds, "cpu_s": took.cpu_s, "again_s": again.seconds}
    return {**told, **counts, "bytes": sequences.tokens * TOKEN_BYTES}


def chat(folder: Path, file: str, rounds: int, tokens_per_row: int) -> Found:
    """The complete pipeline, a file to packed tensors with shared prefixes; the share of each part; a second pass."""
    parts = dict.fromkeys(("read", "align", "pack", "tensors"), float("inf"))

    def run(tokenizer: tg.Tokenizer) -> Any:
        at = [time.perf_counter()]
        traces = tg.read(folder / file)
        at.append(time.perf_counter())
        sequences = tg.align(traces, tokenizer)
        at.append(time.perf_counter())
        advantages = tg.advantage.group_mean(sequences.reward, sequences.group)
        steps = tg.pack(sequences, advantages, tokens_per_row=tokens_per_row, share_prefixes=True)
        at.append(time.perf_counter())
        tensors = [batch.to("cpu") for step in steps for batch in step.batches]
        at.append(time.perf_counter())
        for name, seconds in zip(parts, np.diff(at), strict=True):
            parts[name] = min(parts[name], float(seconds))
        return sequences, steps, tensors

    took = fastest(run, rounds + 1, lambda: fresh(folder))
    sequences, first = took.result[0], dict(parts)
    tokenizer = fresh(folder)
    again = fastest(lambda: run(tokenizer), rounds + 1)
    return {
        "seconds": took.seconds,
        "cpu_s": took.cpu_s,
        "again_s": again.seconds,
        "parts_s": first,
        "tokens": sequences.tokens,
        "sampled": len(sequences.terms),
        "bytes": (folder / file).stat().st_size,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def render(folder: Path, file: str, rounds: int) -> Found:
    """Conversations of 13 messages with 14 tools to text by Qwen3's template; messages as dicts, and as JSON."""
    template = Template((folder.parent / "qwen3" / "chat_template.jinja").read_text())
    chats = conversations(folder / file)
    dumped = [(json.dumps(chat["messages"]), json.dumps(chat["tools"]), False, "{}") for chat in chats]
    whole = fastest(lambda: [template.render_text(chat["messages"], chat["tools"]) for chat in chats], 4 * rounds)
    bare = fastest(lambda: [template._core.render_text(*one) for one in dumped], 4 * rounds)
    texts = whole.result
    size = sum(len(text.encode()) for text in texts)
    return {
        "seconds": whole.seconds,
        "cpu_s": whole.cpu_s,
        "json_s": bare.seconds,
        "conversations": len(chats),
        "bytes": size,
        "texts": [hash_of(text) for text in texts],
    }


def conversations(path: Path) -> list[dict[str, Any]]:
    """Some conversations with tools."""
    with path.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return [record for record in records if "tools" in record][:48]


def hash_of(text: str) -> str:
    """A text's digest: two processes compare their results."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def prompts(folder: Path, file: str, rounds: int) -> Found:
    """Groups of eight that share a prompt of 20 KB, and eight prompts of their own: the saving by a rendered prompt."""
    chats = conversations(folder / file)
    seconds = {}
    for name, pick in {"shared": lambda at: at // 8, "own": lambda at: at}.items():
        records = [prompted(chats[pick(at)], at) for at in range(len(chats) // 8 * 8)]
        traces = tg.data.trace.Traces.from_records(records)
        run = lambda tokenizer, traces=traces: tg.align(traces, tokenizer)  # noqa: E731
        seconds[name] = fastest(run, rounds, lambda: fresh(folder)).seconds
    return {"seconds": seconds["shared"], "own_s": seconds["own"], "traces": len(records)}


def prompted(chat: dict[str, Any], at: int) -> dict[str, Any]:
    """A trace of one short answer after a conversation in which nothing else was sampled."""
    given = [{**message, "sampled": False} for message in chat["messages"][:-1]]
    answer = {"role": "assistant", "content": "4", "generation": {"token_ids": [19, 151645], "logprobs": [-0.5, -0.1]}}
    return {"format": "tracegrad/1", "id": str(at), "reward": at, "tools": chat["tools"], "messages": [*given, answer]}


def tokenize(folder: Path, file: str, rounds: int) -> Found:
    """Text to ids by one tokenizer: a thread's first call, new text, text that was used once, and cached chunks."""
    tokenizer = tg.Tokenizer.from_pretrained(folder.parent / file)
    pieces = texts(12 << 20)
    began = time.perf_counter()
    tokenizer.encode("initialised")
    found: Found = {"init_s": time.perf_counter() - began, "cold_s": float("inf")}
    counts: list[int] = []

    def cold() -> None:
        tokenizer.encode("initialised")
        at = time.perf_counter()
        counts.append(sum(len(tokenizer.encode(piece)) for piece in pieces))
        found["cold_s"] = min(found["cold_s"], time.perf_counter() - at)

    for _ in range(rounds):
        # Caches are a thread's own: each thread is cold.
        thread = threading.Thread(target=cold)
        thread.start()
        thread.join()
    run = lambda: sum(len(tokenizer.encode(piece)) for piece in pieces)  # noqa: E731
    found["warm_s"] = fastest(run, rounds + 1).seconds
    found["batch_s"] = fastest(lambda: tokenizer.encode_batch(pieces), rounds + 1).seconds
    found["ids"] = hash(tuple(token for piece in pieces[:SOME] for token in tokenizer.encode(piece).tolist()))
    found |= {"tokens": counts[0], "bytes": sum(len(piece.encode()) for piece in pieces)}
    lines = "".join(pieces[:20]).splitlines()
    messages = [OPENERS[file] + "\n".join(lines[at : at + 20]) + "\n" for at in range(0, len(lines), 20)]
    chats = ["".join(messages[at : at + 8]) for at in range(0, len(messages), 8)]
    memo = fastest(lambda: sum(len(tokenizer.encode(chat)) for chat in chats), 4 * rounds)
    return {**found, "memo_s": memo.seconds, "memo_tokens": memo.result}


def texts(size: int) -> list[str]:
    """Pieces of the corpus, no two alike."""
    from workload import corpus

    text = corpus(size)
    return [text[at : at + PIECE] for at in range(0, len(text) - PIECE, PIECE)]


def python(folder: Path, file: str, rounds: int) -> Found:
    """Reading through the public name, and by the Rust calls beneath it; and the objects that stay for a token."""
    path = folder / file

    def rust() -> Any:
        reader = _core.TraceReader(str(path), "raise", None, None, MAX_RECORD_BYTES, CHUNK_BYTES, "auto")
        parts = []
        while len(part := reader.batch(1024)):
            parts.append(part)
        return _core.Traces.concatenate(parts), reader.report()

    found = {"seconds": float("inf"), "rust_s": float("inf")}
    for _ in range(rounds + 2):
        found["seconds"] = min(found["seconds"], fastest(lambda: tg.read(path), 1).seconds)
        found["rust_s"] = min(found["rust_s"], fastest(rust, 1).seconds)
    tokenizer = tg.Tokenizer.from_pretrained(folder.parent / "qwen")
    kept = tg.read(path), tg.align(tg.read(path), tokenizer)
    before = sys.getallocatedblocks()
    kept = (*kept, tg.read(path), tg.align(kept[0], tokenizer))
    blocks = sys.getallocatedblocks() - before
    tokens = kept[0].read_report.tokens
    return {**found, "tokens": tokens, "traces": len(kept[0]), "blocks": blocks, "bytes": path.stat().st_size}


def bandwidth(folder: Path, file: str, rounds: int) -> Found:
    """Bytes a second that one core copies, and reads, of arrays beyond the cache."""
    del folder, file
    source, target = np.ones(1 << 28, np.uint8), np.ones(1 << 28, np.uint8)
    wide = source.view(np.float32)
    copy = fastest(lambda: np.copyto(target, source), rounds + 6).seconds
    return {"copy": source.size / copy, "read": source.size / fastest(lambda: wide.sum(), rounds + 6).seconds}
