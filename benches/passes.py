"""How many passes over the same traces: success of the policy after each, on the bundled example.

    python benches/passes.py --out benches/results/passes.json

Every arm trains on the bundled traces (320 groups of 8) with the options of examples/quickstart/run.toml and is tested
after each pass, one sample of 512 fresh prompts at temperature 1. Arms differ in one thing:

- DAPO with `old` measured before each update, or once for an epoch;
- TOPR, which uses theta/rollout and no `old`;
- no clip, two passes: the ratio theta/rollout times A, by the recorded logprobs; or only A, as if theta had sampled.

Rows in the file are not run again. docs/explanation/benchmarks.md shows the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import tracegrad as tg
from tracegrad import trainer
from tracegrad.config import load
from tracegrad.objective import Importance, Objective, Ratio, presets
from tracegrad.trainer.checkpoint import list_checkpoints

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
import rollout  # noqa: E402


@dataclass(frozen=True)
class Arm:
    """The trained objective, the number of passes, and how many updates an `old` stays: 1, or 0 for an epoch."""

    objective: Objective
    passes: int = 4
    every: int = 0


ARMS = {
    "no clip, recorded logprobs": Arm(Objective(Importance(), Ratio("theta", "rollout")), passes=2),
    "no clip, no logprobs": Arm(presets.WEIGHTED_SFT, passes=2),
    "DAPO, old of each update": Arm(presets.DAPO, every=1),
    "DAPO, old of each epoch": Arm(presets.DAPO),
    "TOPR": Arm(presets.TOPR),
}


def run(name: str, seed: int, sequences: tg.Sequences, prompts: int) -> dict:
    """One run, tested after each pass."""
    arm, cpu = ARMS[name], time.process_time()
    model, _ = rollout.load(QUICKSTART / "model")
    changes = [("train.seed", seed), ("train.epochs", arm.passes), ("checkpoint.keep", arm.passes)]
    config = load(QUICKSTART / "run.toml", [*changes, ("train.updates_per_old_logprobs", arm.every)])
    with tempfile.TemporaryDirectory() as folder:
        told = {"objective": arm.objective, "config": config, "out": folder, "tokenizer": QUICKSTART / "model"}
        done = trainer.train(sequences, model, **told, sinks=(), log=lambda _: None)
        places = list_checkpoints(Path(folder))
        after = [rollout.success(*rollout.load(place), prompts, seed)[0] for place in places]
    names = ("step", "ope", "ope_low", "ope_high", "ope_ess")
    value = [{key: row[key] for key in names} for row in done.rows if "ope" in row]
    return {"arm": name, "seed": seed, "after": after, "value": value, "cpu_s": round(time.process_time() - cpu, 1)}


def main() -> None:
    """Run the rows that are not in the file, write each when it is done, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--arm", choices=ARMS, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    traces = tg.read(QUICKSTART / "traces.jsonl.zst")
    sequences = tg.align(traces, tg.Tokenizer.from_pretrained(QUICKSTART / "model"))
    for seed in range(options.seeds):
        for name in options.arm or ARMS:
            if not any((row["arm"], row["seed"]) == (name, seed) for row in rows):
                rows.append(run(name, seed, sequences, options.prompts))
                print(json.dumps({key: rows[-1][key] for key in ("arm", "seed", "after", "cpu_s")}), flush=True)
                told = {"command": "python benches/passes.py --out benches/results/passes.json", "runs": rows}
                options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(table(rows))


def table(rows: list[dict]) -> str:
    """Success in percent after each pass: mean, and each seed."""
    lines = ["| | after 1 pass | 2 | 3 | 4 |", "|---|---|---|---|---|"]
    for name in ARMS:
        found = [[100 * each for each in row["after"]] for row in rows if row["arm"] == name]
        cells = [
            f"{np.mean(seeds):.1f} ({', '.join(f'{each:.0f}' for each in seeds)})" for seeds in zip(*found, strict=True)
        ]
        if found:
            lines.append(f"| {name} | {' | '.join(cells + [''] * (4 - len(cells)))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
