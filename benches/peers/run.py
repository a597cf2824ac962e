"""The data path compared with its peers, stage by stage: `make bench-peers`.

    python benches/peers/run.py --out benches/results/data_path.json

Makes the workload, runs each measurement in a separate process, prints a table, and writes a list of rows: stage,
peer, peer_rate, rate, unit, ratio, limit, cores, machine, command, and the goals of the stage (`must`, `reached`).
A row without a peer has null there. The limit is a property of the machine, if memory bounds a stage.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure

HERE = Path(__file__).parent
Found = dict[str, Any]
MEGA, GIGA = 1e6, 1e9

# Reasons why a stage misses its goal, by the start of its name: from profiles of that stage.
CAUSES = {
    "load a tokenizer, first": "fastokens builds its tables on one thread (two thirds of it); a later load reads ours",
    "ingest, text-heavy": "each message is a map of strings: a third of the time is taking and first touching memory",
    "ingest, logprob-heavy": "a third is the kernel's copy, the kept record and memory touched for the first time",
    "memory after reading": "below 128 MiB threads keep what they freed, as taking it again costs more",
    "render": "half is the template engine's own evaluation, a quarter JSON to values",
    "tokenize": "page faults of caches that a thread meets for the first time",
    "align, byte remap": "all of align, 300 instructions a token: a third render each turn's prompt, a tenth tokenize",
    "align, ids recorded": "all of align, 330 instructions a token: renders tell given text from the template's",
    "the whole road, two cores": "packing is one thread's work, and both wait for fresh memory while they read",
    "parse, two cores": "cutting records is one thread's work, and both wait for fresh memory",
    "logprob-heavy JSON": "a third is reading, 10 instructions a byte; half is align, as its rows say",
}


@dataclass
class Bench:
    """Runs measurements and keeps the rows."""

    folder: Path
    rounds: int
    tokens_per_row: int
    shown: str
    alone: bool = True
    out: Path | None = None
    note: str | None = None
    rows: list[Found] = field(default_factory=list)
    kept: dict[tuple[str, str, int], Found] = field(default_factory=dict)

    def measure(self, task: str, file: str = "-", cores: int = 1, rounds: int | None = None) -> Found:
        """What `measure.py` found; each measurement is made once."""
        key = (task, file, cores)
        # Memory that other tasks freed would hide the memory of a file, so it is measured in a separate process.
        if key not in self.kept and not self.alone and task != "memory":
            self.kept[key] = measure.measure(task, file, self.folder, 1, self.tokens_per_row)
        elif key not in self.kept:
            command = [sys.executable, str(HERE / "measure.py"), task, file, "--folder", str(self.folder)]
            options = {"cores": cores, "rounds": rounds or self.rounds, "tokens-per-row": self.tokens_per_row}
            command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
            print(f"  {task} {file} on {cores or 'all'} cores", file=sys.stderr, flush=True)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} failed; its error stands above.")
            self.kept[key] = json.loads(done.stdout.splitlines()[-1])
        return self.kept[key]

    def row(self, stage: str, rate: float, unit: str, *, peer: str | None = None, **more: Any) -> None:
        """Add a row; `must` is the required rate, `must_ratio` the required ratio."""
        theirs, cores = more.pop("peer_rate", None), more.pop("cores", 1)
        ratio = rate / theirs if theirs else None
        must, least = more.get("must"), more.get("must_ratio")
        reached = None if must is None and least is None else rate >= (must or 0) and (ratio or 0) >= (least or 0)
        found = {"stage": stage, "peer": peer, "peer_rate": theirs, "rate": rate, "unit": unit, "ratio": ratio}
        found |= {"limit": more.pop("limit", None), "cores": cores or os.cpu_count(), "machine": machine()}
        note = {"note": self.note} if self.note else {}
        if reached is False:
            note["cause"] = next((text for begins, text in CAUSES.items() if stage.startswith(begins)), "not known")
        self.rows.append({**found, "command": self.shown, "reached": reached, **more, **note})
        if self.out:
            # An interrupted run keeps its results so far.
            self.out.write_text(json.dumps(self.rows, indent=1) + "\n")


def machine() -> str:
    """The processor by name, and how many cores there are."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def ingest(bench: Bench) -> None:
    """Files to traces compared with orjson."""
    text, logprobs = {"stream": (0.8, 1.0), "read": (0.65, 0.9)}, {"stream": (1.0, 1.4), "read": (1.0, 1.4)}
    wanted = {
        "text.jsonl": ("ingest, text-heavy", text),
        "chat-ids.jsonl": ("ingest, logprob-heavy, compact", logprobs),
        "chat-ids-python.jsonl": ("ingest, logprob-heavy, Python's layout", logprobs),
        "chat-ids-spaced.jsonl": ("ingest, logprob-heavy, another layout", logprobs),
    }
    for file, (stage, reach) in wanted.items():
        theirs = bench.measure("orjson", file)
        # orjson's dicts are freed line by line; `read` keeps its results, `stream` does not.
        for task, kept in (("stream", ""), ("read", ", all kept")):
            must, stretch = reach[task]
            mine = bench.measure(task, file)
            rates = [found["bytes"] / found["seconds"] / GIGA for found in (mine, theirs)]
            more = {"must": must, "stretch": stretch, "cpu_rate": mine["bytes"] / mine["cpu_s"] / GIGA}
            bench.row(stage + kept, rates[0], "GB/s", peer="orjson", peer_rate=rates[1], **more)
    for cores in (1, 2):
        found = bench.measure("memory", "chat-ids.jsonl", cores, 1)
        more = {"cores": cores, "must": 1 / 0.4, "stretch": 4.0, "memory_per_file": found["memory"] / found["bytes"]}
        bench.row("memory after reading", found["bytes"] / found["memory"], "of the file a byte", **more)


def render(bench: Bench) -> None:
    """Qwen3's template compared with jinja2; the texts are the same."""
    mine, theirs = bench.measure("render", "text.jsonl"), bench.measure("jinja2", "text.jsonl")
    if mine["texts"] != theirs["texts"]:
        raise SystemExit("render: the texts differ from jinja2's.")
    count, size = mine["conversations"], mine["bytes"]
    slow = count / theirs["seconds"]
    told = {"must": 1e6 / 50, "stretch": 1e6 / 25, "bytes_per_conversation": size / count}
    for name, seconds in (("from dicts", mine["seconds"]), ("from JSON", mine["json_s"])):
        gigabytes = size / seconds / GIGA
        micro = seconds / count * 1e6
        more = {**told, "gigabytes_per_second": gigabytes, "microseconds": micro, "peer_microseconds": 1e6 / slow}
        bench.row(f"render, Qwen3, 13 messages, {name}", count / seconds, "/s", peer="jinja2", peer_rate=slow, **more)
    shared = bench.measure("prompts", "text.jsonl")
    rates = [shared["traces"] / shared[name] for name in ("seconds", "own_s")]
    note = "align of traces with one short answer: a prompt of each group of 8, beside a prompt of each trace"
    bench.row("prompts shared by 8", rates[0], "traces/s", peer="own prompts", peer_rate=rates[1], note=note)


def tokenize(bench: Bench) -> None:
    """Two tokenizers compared with the tokenizers package; the ids are the same."""
    for model in ("deepseek", "qwen"):
        mine, theirs = bench.measure("tokenize", model), bench.measure("tokenizers", model)
        if mine["ids"] != theirs["ids"]:
            raise SystemExit(f"tokenize, {model}: ids differ from those of tokenizers.")
        slow = theirs["tokens"] / theirs["seconds"] / MEGA
        each = mine["bytes"] / mine["tokens"]
        for name, must, stretch in (("cold", 40, 60), ("warm", 60, 100)):
            rate = mine["tokens"] / mine[f"{name}_s"] / MEGA
            more = {
                "must": must,
                "stretch": stretch,
                "gigabytes_per_second": rate * each / 1e3,
                "bytes_per_token": each,
            }
            more |= {"initialised_s": mine["init_s"]} if name == "cold" else {}
            bench.row(f"tokenize {name}, {model}", rate, "Mtok/s", peer="tokenizers", peer_rate=slow, **more)
        rate = mine["memo_tokens"] / mine["memo_s"] / MEGA
        bench.row(f"tokenize, chunk-memo hit, {model}", rate, "Mtok/s", must=250, stretch=500)


def load(bench: Bench) -> None:
    """A tokenizer from its folder, by a process that has kept nothing of it, and by one that has."""
    for model in ("deepseek", "qwen"):
        found = bench.measure("load", model)
        for name, must, stretch in (("first", 1 / 0.8, 1 / 0.4), ("kept", 1 / 0.08, 1 / 0.02)):
            more = {
                "must": must,
                "stretch": stretch,
                "load_s": found[f"{name}_s"],
                "encode_s": found[f"{name}_encode_s"],
            }
            bench.row(f"load a tokenizer, {name}, {model}", 1 / found[f"{name}_s"], "/s", **more)


def align(bench: Bench) -> None:
    """Only aligning: tokens recorded as bytes, and as ids; the second compared with copying its output."""
    pace = bench.measure("bandwidth")
    for stage, file, must in (
        ("align, byte remap", "chat-text.jsonl", 20),
        ("align, completion ids", "chat-ids.jsonl", None),
        ("align, ids recorded", "ids.jsonl", 40),
    ):
        found = bench.measure("align", file)
        rate = found["tokens"] / found["seconds"] / MEGA
        each = found["bytes"] / found["tokens"]
        more: Found = {"must": must, "gigabytes_per_second": rate * each / 1e3, "bytes_per_token": each}
        more |= {"levels": found["levels"], "cpu_rate": found["tokens"] / found["cpu_s"] / MEGA}
        more |= {"again_rate": found["tokens"] / found["again_s"] / MEGA}
        if file == "ids.jsonl":
            limit = pace["copy"] / each / MEGA
            more |= {"limit": limit, "copy_gigabytes_per_second": pace["copy"] / GIGA}
        bench.row(stage, rate, "Mtok/s", **more)


def roads(bench: Bench, peers: list[str]) -> None:
    """The complete pipeline on the same bytes, on one core and on all; tensors compared row by row."""
    for file, told in (("chat-ids.jsonl", "token_id:N"), ("chat-text.jsonl", "texts")):
        for cores in (1, 0):
            # TRL's ids are in the tokens' names: it cannot read texts.
            here = [peer for peer in peers if peer != "trl" or told == "token_id:N"]
            road(bench, file, f"logprob-heavy JSON to packed batch, tokens by {told}", cores, here)


def road(bench: Bench, file: str, stage: str, cores: int, peers: list[str]) -> None:
    """A row for each peer, and three compared with the best of them: counting sampled tokens, all tokens, and bytes."""
    mine = bench.measure("chat", file, cores)
    size, seconds = mine["bytes"], mine["seconds"]
    own = {
        "gigabytes_per_second": size / seconds / GIGA,
        "bytes_per_sampled_token": size / mine["sampled"],
        "bytes_per_token": size / mine["tokens"],
        "parts_s": mine["parts_s"],
        "again_rate": mine["sampled"] / mine["again_s"] / MEGA,
        "peak_bytes": mine["peak_bytes"],
    }
    best: tuple[float, str] = (float("inf"), "")
    for peer in peers:
        theirs = bench.measure(peer, file, cores, min(bench.rounds, 2 if cores else 1))
        check(peer, file, theirs)
        best = min(best, (theirs["seconds"], peer))
        names = ("traces", "rows", "equal", "refused", "other_ids", "other_mask", "other_logprobs")
        more = {f"peer_{name}": theirs[name] for name in (*names, "version", "peak_bytes")}
        rates = [mine["sampled"] / found / MEGA for found in (seconds, theirs["seconds"])]
        more |= {"peer_rate": rates[1], "cores": cores, "cpu_ratio": theirs["cpu_s"] / mine["cpu_s"]}
        bench.row(stage, rates[0], "M sampled tok/s", peer=peer, **own, **more)
    if cores != 1:
        return
    named = file == "chat-ids.jsonl"
    ratios = {"must_ratio": 65, "stretch_ratio": 100} if named else {"must_ratio": 45, "stretch_ratio": 75}
    rates = {"must": 2.6, "stretch": 4.0} if named else {"must": 1.8, "stretch": 3.0}
    for what, count, unit, least in (
        ("sampled", mine["sampled"] / MEGA, "M sampled tok/s", {**ratios, **rates}),
        ("all", mine["tokens"] / MEGA, "Mtok/s", {}),
        ("bytes", size / GIGA, "GB/s", {"must": 0.5, "stretch": 0.8} if named else {}),
    ):
        more = {"peer_rate": count / best[0], **least}
        bench.row(f"{stage}, {what}", count / seconds, unit, peer=f"the best: {best[1]}", **more)


def check(peer: str, file: str, found: Found) -> None:
    """The same tensors wherever the peer is right. The allowed differences are listed here."""
    wrong = found["other_mask"] + found["other_logprobs"]
    if peer == "art" and file == "chat-text.jsonl":
        # It looks the decoded text up in the vocabulary, which has other spellings: no row has its ids.
        return
    if wrong or not found["equal"]:
        raise SystemExit(f"{peer} on {file}: {found}. Its tensors differ from ours where they have to be equal.")


def cores(bench: Bench) -> None:
    """Two cores compared with one."""
    if (os.cpu_count() or 1) < 2:
        return
    for stage, task, file, name in (
        ("the whole road", "chat", "chat-ids.jsonl", "seconds"),
        ("parse", "read", "chat-ids.jsonl", "seconds"),
        ("align: render, tokenize, splice", "align", "chat-text.jsonl", "seconds"),
        ("tokenize", "tokenize", "qwen", "batch_s"),
    ):
        one, two = bench.measure(task, file, 1)[name], bench.measure(task, file, 2)[name]
        told = {"cores": 2, "must_ratio": 1.8 if task == "chat" else 1.7}
        bench.row(f"{stage}, two cores", 1 / two, "passes/s", peer="one core", peer_rate=1 / one, **told)


def python(bench: Bench) -> None:
    """What Python adds to the Rust call, and what stays in memory for a token."""
    found = bench.measure("python", "chat-ids.jsonl")
    rates = [found["tokens"] / found[name] / MEGA for name in ("seconds", "rust_s")]
    more = {"blocks_per_token": found["blocks"] / found["tokens"], "must_ratio": 1 / 1.1}
    bench.row("read, Python over Rust", rates[0], "M sampled tok/s", peer="the Rust calls", peer_rate=rates[1], **more)


def large(bench: Bench, gigabytes: float) -> None:
    """Peak memory while a large file streams."""
    command = [sys.executable, str(HERE.parent / "large_file.py"), "--gigabytes", str(gigabytes)]
    print(f"  {gigabytes} GB streamed", file=sys.stderr, flush=True)
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    more = {"peak_bytes": found["peak_bytes"], "gigabytes": found["gigabytes"], "must_peak_bytes": 1e9, "cores": 0}
    more |= {"reached": found["peak_bytes"] < 1e9}
    bench.row("a large file streams", found["gigabytes_per_second"], "GB/s", **more)


def show(rows: list[Found]) -> None:
    """The table."""
    heads = ("stage", "cores", "peer", "peer's rate", "ours", "unit", "ratio", "limit", "must", "reached")
    table = [heads]
    for row in rows:
        must = f"{row['must']:.3g}" if row.get("must") else f"{row['must_ratio']:.3g}x" if row.get("must_ratio") else ""
        numbers = [
            f"{row[name]:.3g}" if row[name] is not None else "" for name in ("peer_rate", "rate", "ratio", "limit")
        ]
        reached = {True: "yes", False: "no", None: ""}[row["reached"]]
        theirs, own, ratio, limit = numbers
        cells = (
            row["stage"],
            str(row["cores"]),
            row["peer"] or "",
            theirs,
            own,
            row["unit"],
            ratio,
            limit,
            must,
            reached,
        )
        table.append(cells)
    widths = [max(len(cells[at]) for cells in table) for at in range(len(heads))]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, default=HERE.parent.parent / "target" / "peers", help="for the workload")
    parser.add_argument("--groups", type=int, default=16, help="of eight traces; about 1.5 MB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens-per-row", type=int, default=32768)
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of the large file; 0 leaves it out")
    parser.add_argument("--peers", default="trl,art,skyrl")
    parser.add_argument("--note", help="kept in every row: say so where the machine was busy")
    parser.add_argument("--smoke", action="store_true", help="all of it once in this process, two groups: no figures")
    told = parser.parse_args()
    if told.smoke:
        told.groups, told.gigabytes = 2, 0.0
        measure.pin(0)
    from models import make as make_models
    from workload import make as make_workload

    began = time.perf_counter()
    folder = told.folder / str(told.groups)
    counts = make_workload(folder, make_models(told.folder)["qwen"], told.groups)
    print(f"workload {counts}, made in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    shown = " ".join(["python benches/peers/run.py", *(arg for arg in sys.argv[1:])])
    bench = Bench(folder, told.rounds, told.tokens_per_row, shown, not told.smoke, told.out, told.note)
    for part in (load, ingest, render, tokenize, align, python, cores):
        part(bench)
    roads(bench, told.peers.split(","))
    if told.gigabytes:
        large(bench, told.gigabytes)
    show(bench.rows)


if __name__ == "__main__":
    main()
