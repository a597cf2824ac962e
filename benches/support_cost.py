"""Measure the cost of the sampler's support at the head: forward and backward of `policy_loss` with and without it.

    python benches/support_cost.py --out benches/results/support.json

Hidden states, weight and targets are the same in all variants:

- `none`: no token has a support, so the code path is that of untruncated sampling;
- `half`: the first half of the rows has one;
- `all`: every row has one, of the sizes in kept_sets.py.

Variants follow one another in one process of one thread. The figure is the median over rounds of the CPU seconds of a
round over those of `none` in the same round. Other processes still disturb it by some percent, so the operations of
`SupportChunk` are also measured by themselves: on a chunk whose tables are made before, over the seconds of `none`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from kept_sets import VOCABULARY, kept_sets, sources, unigrams

from tracegrad import Sequences, pack, presets
from tracegrad.alignment.ragged import Ragged
from tracegrad.model import policy_loss
from tracegrad.model.lm_head_chunked import Chunk, Head, Rows, Statistics, SupportChunk, slices
from tracegrad.objective import EntropyBonus, Objective
from tracegrad.objective.torch_loss import Terms
from tracegrad.packing import Batch
from tracegrad.trainer.step import correct_step

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "quickstart"))
from page_table import put_table

COMMAND = "python benches/support_cost.py --out benches/results/support.json"
BONUS = EntropyBonus(0.01, masked=False, over="support")
OBJECTIVES = {"DAPO": presets.DAPO, "DAPO, entropy bonus": replace(presets.DAPO, entropy=BONUS)}
VARIANTS = ("none", "half", "all")
LIMIT = 0.05
CHUNK = 64  # rows of a chunk on CPU for a vocabulary of this size


def batch_of(sets: Ragged, restricted: int, objective: Objective) -> tuple[Batch, Terms]:
    """Return one row of one answer whose first `restricted` tokens have a support; the prompt is one token."""
    count = len(sets)
    lengths = np.where(np.arange(count) < restricted, np.diff(sets.offsets), 0)
    offsets = np.concatenate([[0, 0], np.cumsum(lengths)])
    support = Ragged(offsets, sets.values[: offsets[-1]]) if restricted else None
    trainable = np.arange(count + 1) > 0
    ids = np.concatenate([[0], sets.values[sets.offsets[:-1]]])
    logprobs = np.where(trainable, -2.0, np.nan)
    sequences = Sequences.from_arrays(ids, [0, count + 1], logprobs, trainable, support=support)
    [step] = pack(sequences, [1.0], tokens_per_row=count + 1)
    step = step.with_logprobs(old=step.rollout_logprobs)
    [batch] = step.batches
    return batch.to("cpu"), step.terms(batch, correct_step(step, objective, "mask"))


class Prepared(Chunk):
    """A chunk whose statistics and gradient cost nothing: what is left is the cost of its support."""

    def statistics(self) -> Statistics:
        """Return numbers of the right shape."""
        return Statistics(*(self._z[:, column] for column in range(3)))

    def gradient(self, statistics: Statistics, d_logp: torch.Tensor, d_entropy: torch.Tensor | None) -> torch.Tensor:
        """Return a table of the right shape."""
        return self._z


def own_seconds(batch: Batch, over_support: bool, plan: str, repeat: int = 50) -> float:
    """Return the median CPU seconds of the operations of `SupportChunk` over all rows of a batch."""
    assert batch.support is not None
    rows = Rows(batch.target, None, batch.support, over_support)
    table = torch.randn(CHUNK, VOCABULARY)
    spent = []
    for _ in range(repeat):
        total = 0.0
        for here in slices(len(batch.target), CHUNK):
            of_chunk = rows.at(here)
            count = here.stop - here.start
            chunk = Prepared.of_raw(table[:count], Head(table), of_chunk._replace(support=None))
            ones = torch.ones(count)
            began = time.process_time()
            for _ in range(1 + (plan == "recompute")):  # this plan makes each chunk twice
                support = SupportChunk(chunk, rows.at(here))
                statistics = support.statistics()
            support.gradient(statistics, ones, ones if over_support else None)
            total += time.process_time() - began
        spent.append(total)
    return float(np.median(spent))


def measure(plan: str, objective: str, rows: int, hidden: int, rounds: int) -> dict:
    """Measure all variants by one plan."""
    random = np.random.default_rng(0)
    sets = kept_sets(rows, unigrams(sources()[0]), random)
    torch.manual_seed(0)
    states = torch.randn(rows, hidden)
    weight = (torch.randn(VOCABULARY, hidden) / hidden**0.5).requires_grad_()
    trained = OBJECTIVES[objective]
    inputs = {name: batch_of(sets, count, trained) for name, count in zip(VARIANTS, (0, rows // 2, rows), strict=True)}
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(rounds + 1):
        for name in VARIANTS if number % 2 else VARIANTS[::-1]:
            leaf = states.clone().requires_grad_()
            began = time.process_time()
            policy_loss(leaf, weight, *inputs[name], trained, plan=plan).loss.backward()
            spent = time.process_time() - began
            weight.grad = None
            if number:  # the first round only warms up
                seconds[name].append(spent)
    own = own_seconds(inputs["all"][0], trained.entropy is not None, plan)
    ratios = {name: np.array(seconds[name]) / np.array(seconds["none"]) for name in VARIANTS}
    return {
        "plan": plan,
        "objective": objective,
        "rows": rows,
        "hidden": hidden,
        "ids": len(sets.values),
        "seconds": {name: float(np.median(values)) for name, values in seconds.items()},
        "own": own / float(np.median(seconds["none"])),
        "more": {name: float(np.median(values) - 1) for name, values in ratios.items()},
        "quartiles": {name: np.percentile(values - 1, [25, 75]).tolist() for name, values in ratios.items()},
    }


def table(rows: list[dict]) -> list[str]:
    """Return the share that the support adds."""
    lines = [
        f"| objective | plan | without, CPU s | its operations | all rows (limit {LIMIT:.0%}) | quartiles "
        "| half of the rows |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["quartiles"]["all"]
        figures = f"{row['seconds']['none']:.2f} | {row['own']:.2%} | {row['more']['all']:+.1%}"
        quartiles = f"{low:+.1%} to {high:+.1%}"
        lines.append(f"| {row['objective']} | {row['plan']} | {figures} | {quartiles} | {row['more']['half']:+.1%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(plan, objective, options.rows, options.hidden, options.rounds)
        for objective in OBJECTIVES
        for plan in ("one-pass", "recompute")
    ]
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    options.out.write_text(json.dumps({**kept, "cost": {"command": COMMAND, "rows": rows}}, indent=1) + "\n")
    lines = table(rows)
    print("\n".join(lines))
    if options.page is not None:
        put_table(options.page, "support-cost", lines)


if __name__ == "__main__":
    main()
