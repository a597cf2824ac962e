"""Success before, training on only the recorded traces, success after: the main task in one run.

    python examples/quickstart/demo.py --out out/quickstart

Uses the library as `tracegrad train` does, and the example's own episodes for the success rate. Called by `make demo`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import rollout
from tracegrad.cli import main as tracegrad
from tracegrad.report import add_success

HERE = Path(__file__).parent


def measure(label: str, directory: Path, count: int, seed: int) -> dict:
    """Success rate of a model directory on fresh prompts, as summary.json has it."""
    rate, (low, high), total = rollout.success(*rollout.load(directory), count=count, seed=seed)
    print(f"{label}: success {rate:.1%} [{low:.1%}, {high:.1%}] on {total} fresh prompts", flush=True)
    return {"success": rate, "ci95": [low, high], "n": total}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for checkpoint, metrics, report, summary")
    parser.add_argument("--traces", type=Path, default=HERE / "traces.jsonl.zst")
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--config", type=Path, default=HERE / "run.toml")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    before = measure("before", options.model, options.prompts, options.seed)
    evaluated = time.perf_counter() - started
    arguments = ["train", options.traces, "--model", options.model, "--out", options.out]
    arguments += ["--config", options.config, "--seed", options.seed]
    code = tracegrad([str(each) for each in arguments])
    if code:
        return code
    started = time.perf_counter()
    after = measure("after", options.out / "checkpoint", options.prompts, options.seed)
    path = options.out / "summary.json"
    summary = json.loads(path.read_text())
    summary["seconds"] |= {"evaluate_before": evaluated, "evaluate_after": time.perf_counter() - started}
    path.write_text(json.dumps({"before": before, "after": after, **summary}, indent=2, ensure_ascii=False) + "\n")
    add_success(options.out / "report.html", before, after)
    print(f"summary: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
