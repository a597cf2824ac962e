"""Lengths of what was sampled and outcomes of tool calls, by the names and definitions of TRL 1.16's GRPOTrainer.

Here are `completions` and `tools`. Called by the learner and the online loop; tests/parity/test_trl_metrics.py runs
TRL's statements next to them.
"""

import numpy as np
from numpy.typing import ArrayLike

from tracegrad import arrays
from tracegrad.metrics.sums import Moments, Sums, largest_of, mean_of, moments, per, smallest_of
from tracegrad.metrics.table import Measured, Metric, Reading


def completions(prompts: ArrayLike, sampled: ArrayLike, cut: ArrayLike) -> Measured:
    """Measure `num_tokens` and `completions/*` of R traces.

    Args:
        prompts: [R] integers: tokens before the first sampled one.
        sampled: [R] integers: tokens that the policy sampled; those of tool results and of the template are not.
        cut: [R] bool: whether a limit cut the trace off, so that it did not end by itself.

    Raises:
        ArgumentError: if an array is not flat, of another type or of another length.

    >>> found = completions([10, 10, 12], [4, 8, 6], [False, True, False]).named()
    >>> found["num_tokens"], found["completions/mean_length"], found["completions/max_terminated_length"]
    (50.0, 6.0, 6.0)
    """
    before = arrays.integers(prompts, "prompts")
    lengths = arrays.integers(sampled, "sampled", length=len(before))
    flags = arrays.flags(cut, "cut", length=len(before))
    counts = {"tokens": before.sum() + lengths.sum(), "cut": np.count_nonzero(flags)}
    sums = moments("length", lengths) | moments("ended", lengths[~flags]) | Sums.of(counts=counts)
    return Measured(sums.at("completions/"), (Reading(COMPLETIONS, "completions/"),))


def tools(calls: ArrayLike, failed: ArrayLike) -> Measured:
    """Measure `tools/*` of R traces.

    Args:
        calls: [R] integers: tool calls of each.
        failed: [R] integers: those of them that were answered by an error.

    >>> tools([2, 0, 2], [1, 0, 0]).named()
    {'tools/call_frequency': 1.3333333333333333, 'tools/failure_frequency': 0.25}
    """
    called = arrays.integers(calls, "calls")
    wrong = arrays.integers(failed, "failed", length=len(called))
    counts = {"traces": len(called), "calls": called.sum(), "failed": wrong.sum()}
    return Measured(Sums.of(counts=counts).at("tools/"), (Reading(TOOLS, "tools/"),))


def _ended(how: str) -> Metric:
    """Of the traces that ended by themselves; TRL has 0 where there is none."""
    word, row = {"mean": ("Mean", mean_of), "min": ("Smallest", smallest_of), "max": ("Largest", largest_of)}[how]
    return Metric(
        f"completions/{how}_terminated_length",
        "tokens",
        "",
        "traces that ended by themselves" if how == "mean" else "",
        f"{word} length of the traces that no limit cut off; 0 if there is none.",
        lambda s: row("ended")(s) if Moments(s, "ended").n else 0.0,
    )


COMPLETIONS: tuple[Metric, ...] = (
    Metric(
        "num_tokens",
        "tokens",
        "",
        "",
        "Tokens of prompts and sampled tokens, tool results left out, of all steps so far: a trace counts in each step "
        "that trains on it.",
        lambda s: s["tokens"],
    ),
    Metric(
        "completions/mean_length",
        "tokens",
        "",
        "traces",
        "Mean number of sampled tokens of a trace; tool results are not counted.",
        mean_of("length"),
    ),
    Metric("completions/min_length", "tokens", "", "", "Smallest such number.", smallest_of("length")),
    Metric("completions/max_length", "tokens", "", "", "Largest such number.", largest_of("length")),
    Metric(
        "completions/clipped_ratio",
        "share",
        "",
        "traces",
        "Traces whose last turn was cut off by a limit.",
        lambda s: per(s["cut"], s["length.n"]),
    ),
    *map(_ended, ("mean", "min", "max")),
)
TOOLS: tuple[Metric, ...] = (
    Metric(
        "tools/call_frequency", "calls", "", "traces", "Tool calls of a trace.", lambda s: per(s["calls"], s["traces"])
    ),
    Metric(
        "tools/failure_frequency",
        "share",
        "",
        "tool calls",
        "Tool calls that were answered by an error; 0 if nothing was called.",
        lambda s: s["failed"] / max(s["calls"], 1),
    ),
)
