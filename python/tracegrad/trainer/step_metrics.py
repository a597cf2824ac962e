"""The row of a step: what metrics.jsonl says of it, by the names of `tracegrad.metrics`.

Arrays in, names and numbers out; no data set, no model and no files. Called by `Run.update`.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import _validation
from tracegrad.data.codes import CUT
from tracegrad.errors import ArgumentError
from tracegrad.metrics import Measured, OffPolicy, Rewards, Tally, completions
from tracegrad.objective import Objective
from tracegrad.packing import Step
from tracegrad.trainer.distributed import Ranks
from tracegrad.trainer.step import Outcome


def row_of(
    step: Step,
    outcome: Outcome,
    objective: Objective,
    *,
    version: int | None = None,
    newest: int | None = None,
    rewards: NDArray[np.float32] | None = None,
    endings: NDArray[np.uint8] | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """All that is known of a step from its arrays: who takes it adds what it alone knows (number, rate, time).

    Args:
        step: with the logprobs it was taken with; of this rank.
        outcome: of the step.
        objective: that it was taken by.
        version: of the policy that is trained, which lags count from; None where it is not known.
        newest: what the breakdown by lag counts from where it is not.
        rewards: [R], which `step.trace` counts into; None says nothing of rewards.
        endings: [R] `codes.ENDINGS`, likewise; None says nothing of lengths.
        ranks: with whom the step is shared; every one of them calls this.
    """
    ranks = ranks or Ranks()
    own = sum(batch.tokens for batch in step.batches if len(batch.read))
    terms, tokens = (int(n) for n in ranks.all_reduce(np.array([len(step), own]), "sum"))
    return {
        "loss": outcome.loss,
        "grad_norm": outcome.grad_norm,
        "terms": terms,
        "traces": step.totals.traces - step.skipped.traces,
        "tokens": tokens,
        **({} if ranks.alone else {"imbalance": step.imbalance}),
        **tally(step, outcome, objective, ranks.first, version).all_reduce(ranks.all_reduce).means(),
        **({} if rewards is None else rewards_of(step, rewards, ranks).named()),
        **({} if endings is None else completions_of(step, endings).all_reduce(ranks.all_reduce).named()),
        **off_policy(step, outcome, newest if version is None else version).all_reduce(ranks.all_reduce).named(),
        **{f"correction/{name}": float(value) for name, value in outcome.corrected.metrics.items()},
    }


def checked_rewards(rewards: NDArray[np.float32], step: Step) -> NDArray[np.float32]:
    """Return rewards of all traces as [R] float32.

    Raises:
        ArgumentError: if a trace with a term in the step has none.
    """
    rewards = _validation.floats(rewards, "rewards", np.float32)
    if len(rewards) <= (last := int(np.max(step.trace, initial=-1))):
        raise ArgumentError(
            f"rewards has {len(rewards)} entries, and trace {last} has a term in the step. Its reward is not known. "
            "Pass those of all traces that were packed: sequences.rewards[:, 0]."
        )
    return rewards


def rewards_of(step: Step, rewards: NDArray[np.float32], ranks: Ranks) -> Rewards:
    """Of the traces that have a term in the step, on any rank: a group's traces may lie on several."""
    group = np.full(len(rewards), -np.inf)
    group[step.trace] = step.group
    group = ranks.all_reduce(group, "max")
    has_terms = np.isfinite(group)
    return Rewards.of(rewards[has_terms], group[has_terms].astype(np.int64))


def completions_of(step: Step, endings: NDArray[np.uint8]) -> Measured:
    """Lengths of the step's traces on this rank. What is before the first term of a trace is its prompt.

    Args:
        endings: as in `row_of`.
    """
    traces, owner = np.unique(step.trace, return_inverse=True)
    prompts = np.full(len(traces), np.iinfo(np.int64).max)
    for batch in step.batches:
        np.minimum.at(prompts, owner[batch.term], batch.positions[batch.read[batch.row]].astype(np.int64) + 1)
    sampled = np.bincount(owner, minlength=len(traces))
    laid_out = prompts < np.iinfo(np.int64).max
    return completions(np.where(laid_out, prompts, 0), sampled, endings[traces] == CUT)


def tally(step: Step, outcome: Outcome, objective: Objective, first: bool = True, version: int | None = None) -> Tally:
    """Sums of the step with their denominators, as far as the learner alone knows them.

    Args:
        first: this rank alone adds what the step knows of all ranks.
        version: as in `row_of`.
    """
    sums = Tally()
    terms, seen = len(step), ~np.isnan(outcome.logprobs)
    computed = int(np.count_nonzero(seen))
    keep = outcome.keep & seen
    sums.add("entropy", outcome.entropy[seen].sum(dtype=np.float64), computed)
    known = int(np.count_nonzero(~np.isnan(step.rollout_logprobs)))
    sums.add("frac_old_logprobs_valid", known, terms)
    sums.add("frac_old_logprobs_valid_all", known, step.branch_tokens)
    if objective.ratio is not None:
        ratio = outcome.ratio[keep].astype(np.float64)
        sums.add("ratio_mean", ratio.sum(), len(ratio))
        sums.maximum("ratio_max", ratio.max(initial=-math.inf))
        if objective.surrogate.clips:
            sums.add("clip_fraction", (outcome.clipped & keep).sum(), computed)
        if objective.surrogate.bounds is not None:
            low, high = objective.surrogate.bounds
            sums.add("clip_fraction_any", ((ratio < low) | (ratio > high)).sum(), computed)
    if version is not None:
        lag = step.lag(version)
        sums.add("staleness_mean", lag[lag >= 0].sum(), int(np.count_nonzero(lag >= 0)))
        sums.maximum("staleness_max", lag.max(initial=-1) if (lag >= 0).any() else -math.inf)
    one = np.unique(step.trace, return_index=True)[1]
    skipped = step.skipped.traces if first else 0
    sums.add("frac_zero_advantage", (step.advantages[one] == 0).sum() + skipped, len(one) + skipped)
    return sums


def off_policy(step: Step, outcome: Outcome, version: int | None = None) -> OffPolicy:
    """How far the step's policies are apart, by turn, tier and version lag; theta stands in for an old there is not."""
    # An objective that takes no rollout logprobs trains on infinite ones; one that takes them has refused them.
    rollout = np.where(np.isfinite(step.rollout_logprobs), step.rollout_logprobs, np.nan)
    old = outcome.logprobs if step.old_logprobs is None else step.old_logprobs
    return OffPolicy.of(
        old,
        rollout,
        trace=step.trace,
        keep=outcome.keep,
        weight=outcome.weight,
        theta=outcome.logprobs,
        ref=step.ref_logprobs,
        advantages=step.advantages,
        gradient=outcome.gradient,
        turn=step.turn,
        tier=step.tier,
        lag=step.lag(version),
    )
