"""The value of recorded logprobs on the bundled example: four ways to train on the same traces, over seeds.

    python examples/quickstart/study.py --page docs/explanation/benchmarks.md

Every figure of the page is from this run. Called by `make docs`; it needs about a quarter of an hour per seed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import rollout
import tracegrad as tg
from page_table import put_table
from tracegrad.config import Config, load

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Way:
    """One way to train: its use of rewards and logprobs."""

    name: str
    objective: object
    baseline: str = "group_mean"
    rewards: str = "recorded"


WAYS = (
    Way("DAPO on the recorded logprobs", tg.presets.DAPO),
    Way("recorded logprobs discarded (ratio 1)", tg.presets.WEIGHTED_SFT),
    Way("control: rewards shuffled within groups", tg.presets.DAPO, rewards="shuffled"),
    Way("control: unweighted fine-tuning", tg.presets.WEIGHTED_SFT, baseline="none", rewards="one"),
)


def with_rewards(sequences: tg.Sequences, kind: str, seed: int) -> tg.Sequences:
    """The same sequences with their rewards as recorded, permuted within each group, or all 1."""
    rewards = sequences.rewards.copy()
    if kind == "one":
        rewards[:, 0] = 1.0
    elif kind == "shuffled":
        random = np.random.default_rng(seed)
        for group in np.unique(sequences.group):
            rows = np.flatnonzero(sequences.group == group)
            rewards[rows, 0] = rewards[random.permutation(rows), 0]
    return replace(sequences, rewards=rewards)


def configure(way: Way, path: Path, seed: int, epochs: int) -> Config:
    """The demo's options, with this way's baseline."""
    changes = [("train.seed", seed), ("train.epochs", epochs), ("checkpoint.keep", epochs)]
    changes += [("advantage.baseline", way.baseline), ("eval.ope_per_epoch", 1)]
    return load(path, changes)


def run(way: Way, sequences: tg.Sequences, options: argparse.Namespace, seed: int) -> list[float]:
    """Success after the first and after the last epoch."""
    config = configure(way, options.config, seed, options.epochs)
    model, _ = rollout.load(options.model)
    with tempfile.TemporaryDirectory() as folder:
        data = with_rewards(sequences, way.rewards, seed)
        tg.trainer.train(
            data, model, objective=way.objective, out=folder, config=config, tokenizer=options.model, sinks=(),
            log=lambda _: None,
        )  # fmt: skip
        saved = sorted(Path(folder, "checkpoints").iterdir())
        return [rollout.success(*rollout.load(path), options.prompts, seed)[0] for path in (saved[0], saved[-1])]


def percent(values: list[float]) -> str:
    if not values:
        return "not run"
    return f"{100 * np.mean(values):.1f} ({', '.join(f'{100 * v:.0f}' for v in values)})"


def table(before: list[float], results: dict[str, list[list[float]]], options: argparse.Namespace) -> list[str]:
    """Return the lines of the table."""
    rows = [f"| before training | {percent(before)} | |"]
    for name, runs in results.items():
        first, last = zip(*runs, strict=True) if runs else ([], [])
        rows.append(f"| {name} | {percent(list(first))} | {percent(list(last))} |")
    return [
        f"| success in %, mean (each seed) | after 1 epoch | after {options.epochs} epochs |",
        "|---|---|---|",
        *rows,
    ]


def jobs(seeds: int) -> list[tuple[int, Way]]:
    """Every way on the first seed, then the first way on all seeds, then the rest; the page grows with each."""
    every = [(seed, way) for seed in range(seeds) for way in WAYS]
    return sorted(every, key=lambda job: (job[0] > 0, job[1] is not WAYS[0], job[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--traces", type=Path, default=HERE / "traces.jsonl.zst")
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--config", type=Path, default=HERE / "run.toml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=512)
    options = parser.parse_args()
    sequences = tg.align(tg.read(options.traces), tg.Tokenizer.from_pretrained(options.model))
    seeds = range(options.seeds)
    before = [rollout.success(*rollout.load(options.model), options.prompts, seed)[0] for seed in seeds]
    print("before", percent(before), flush=True)
    results: dict[str, list[list[float]]] = {way.name: [] for way in WAYS}
    for seed, way in jobs(options.seeds):
        results[way.name].append(run(way, sequences, options, seed))
        print(json.dumps({"seed": seed, "way": way.name, "success": results[way.name][-1]}), flush=True)
        put_table(options.page, "study", table(before, results, options))


if __name__ == "__main__":
    main()
