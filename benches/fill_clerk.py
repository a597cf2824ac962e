"""Train on the bundled traces with filled logprobs, beside their recorded ones: success after two passes, no clip.

    python benches/fill_clerk.py --out benches/results/fill_clerk.json --page docs/explanation/benchmarks.md

The recorded logprobs are removed from a copy of the bundled traces, `tracegrad fill` measures them with the bundled
model, and the first arm of benches/passes.py trains on both files: the same seeds, options and 512 fresh prompts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import passes
import torch

import tracegrad as tg
from page_table import put_table  # on the path that passes adds

ARM = "no clip, recorded logprobs"
COMMAND = "python benches/fill_clerk.py --out benches/results/fill_clerk.json"


def without_logprobs(value: object) -> object:
    """A record whose logprobs are null."""
    if isinstance(value, dict):
        return {key: None if key == "logprob" else without_logprobs(item) for key, item in value.items()}
    return [without_logprobs(item) for item in value] if isinstance(value, list) else value


def table(result: dict) -> str:
    """Success with recorded and filled logprobs, by seed."""
    lines = ["| seed | recorded | 95 % interval | filled |", "|---|---|---|---|"]
    for row in result["runs"]:
        low, high = row["interval"]
        lines.append(
            f"| {row['seed']} | {100 * row['recorded']:.1f} % | {100 * low:.1f} to {100 * high:.1f} % | "
            f"{100 * row['filled']:.1f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Fill, train three seeds on both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="page whose table is replaced")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = passes.QUICKSTART / "model"
    tokenizer = tg.Tokenizer.from_pretrained(model)
    traces = tg.read(passes.QUICKSTART / "traces.jsonl.zst")
    recorded = tg.align(traces, tokenizer)
    with tempfile.TemporaryDirectory() as temporary:
        bare, filled_file = Path(temporary) / "bare.jsonl", Path(temporary) / "filled.jsonl"
        bare.write_text("".join(json.dumps(without_logprobs(trace.to_dict())) + "\n" for trace in traces))
        report = tg.fill(bare, model, out=filled_file)
        filled = tg.align(tg.read(filled_file), tokenizer)
    both = recorded.trainable & filled.trainable if recorded.tokens == filled.tokens else np.zeros(1, bool)
    gap = np.abs(recorded.rollout_logprobs - filled.rollout_logprobs)[both] if both.any() else np.array([np.nan])
    result = {
        "command": COMMAND,
        "p_value": report.test.p_value,
        "filled": report.filled,
        "missing": report.tokens - report.recorded,
        "gap": {"p99.9": float(np.nanquantile(gap, 0.999)), "largest": float(np.nanmax(gap))},
        "runs": [],
    }
    for seed in range(options.seeds):
        success = {
            name: passes.run(ARM, seed, sequences, options.prompts)["after"][-1]
            for name, sequences in (("recorded", recorded), ("filled", filled))
        }
        interval = passes.rollout.wilson(success["recorded"] * options.prompts, options.prompts)
        result["runs"].append({"seed": seed, **success, "interval": interval})
        print(json.dumps(result["runs"][-1]), flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{report.filled:,} of {result['missing']:,} tokens filled; gap in nats: {result['gap']}")
    print(table(result))
    if options.page:
        put_table(options.page, "fill-clerk", table(result).splitlines())


if __name__ == "__main__":
    main()
