"""Success before, training on only the recorded traces, success after; and the same with shuffled pictures.

    python examples/images/demo.py --out out/images

Uses the library as `tracegrad train` does, and evaluate.py for the success rate. Called by `make images`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import evaluate
import tracegrad as tg
from tracegrad.cli import main as tracegrad

HERE = Path(__file__).parent


def measure(label: str, folder: Path, count: int, seed: int) -> dict:
    """Success rate of a model's folder on fresh pictures, as summary.json has it."""
    rate, (low, high), total = evaluate.success(*evaluate.load(folder), count=count, seed=seed)
    print(f"{label}: success {rate:.1%} [{low:.1%}, {high:.1%}] on {total} fresh pictures", flush=True)
    return {"success": rate, "ci95": [low, high], "n": total}


def shuffled(traces: Path, path: Path, seed: int) -> Path:
    """The same traces, each with the picture of another trace, so that nothing can be learnt from pixels."""
    tg.write(tg.read(traces), path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    pictures = [record["calls"][0]["request"]["messages"][0]["content"][0] for record in records]
    urls = [picture["image_url"]["url"] for picture in pictures]
    random.Random(seed).shuffle(urls)
    for picture, url in zip(pictures, urls, strict=True):
        picture["image_url"]["url"] = url
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for a run of each seed, and summary.json")
    parser.add_argument("--traces", type=Path, default=HERE / "traces.jsonl.zst")
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--config", type=Path, default=HERE / "run.toml")
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=1, help="runs from the recorded traces; one more is shuffled")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = {"before": measure("before", options.model, options.pictures, 0)}
    runs = [(f"seed{seed}", options.traces, seed) for seed in range(options.seeds)]
    runs.append(("shuffled", shuffled(options.traces, options.out / "shuffled.jsonl", 0), 0))
    for name, traces, seed in runs:
        folder = options.out / name
        arguments = ["train", traces, "--model", options.model, "--out", folder]
        arguments += ["--config", options.config, "--seed", seed]
        if code := tracegrad([str(each) for each in arguments]):
            return code
        found[name] = measure(f"after, {name}", folder / "checkpoint", options.pictures, 0)
    path = options.out / "summary.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(f"summary: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
