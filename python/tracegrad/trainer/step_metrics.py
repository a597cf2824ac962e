"""Compute the metrics of a step, which metrics.jsonl logs under the names of `tracegrad.metrics`.

The inputs are arrays. No data set, model or file is needed.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import _validation
from tracegrad.data.codes import TRUNCATED
from tracegrad.errors import ArgumentError
from tracegrad.metrics import MetricAccumulator, MetricSums, OffPolicySums, Rewards, completions
from tracegrad.objective import Objective
from tracegrad.packing import Step
from tracegrad.trainer.distributed import Ranks
from tracegrad.trainer.step import StepResult


def step_metrics(
    step: Step,
    outcome: StepResult,
    objective: Objective,
    *,
    version: int | None = None,
    newest: int | None = None,
    rewards: NDArray[np.float32] | None = None,
    endings: NDArray[np.uint8] | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Compute all metrics of a step that follow from its arrays. The caller adds step number, rate and time.

    Args:
        step: this rank's step, with the logprobs that the update used.
        outcome: the result of the step.
        objective: the objective of the step.
        version: version of the trained policy, to which staleness is relative; None if unknown.
        newest: reference version of the breakdown by staleness if `version` is None.
        rewards: [R] rewards, indexed by `step.trace`; None omits reward metrics.
        endings: [R] `codes.ENDINGS`, indexed by `step.trace`; None omits length metrics.
        ranks: the ranks that share the step; each calls this.

    Returns:
        Values by metric name, reduced over the ranks.
    """
    ranks = ranks or Ranks()
    read_tokens = sum(batch.tokens for batch in step.batches if len(batch.read))
    traces_with_gradient = step.trace[outcome.gradient != 0]
    counts = [len(step), read_tokens, len(traces_with_gradient), len(np.unique(traces_with_gradient))]
    terms, tokens, *with_gradient = (int(n) for n in ranks.all_reduce(np.array(counts), "sum"))
    return {
        "loss": outcome.loss,
        "grad_norm": outcome.grad_norm,
        "tokens_trained": terms,
        "traces": step.totals.traces - step.skipped.traces,
        "tokens": tokens,
        "tokens_with_gradient": with_gradient[0],
        "traces_with_gradient": with_gradient[1],
        **({} if ranks.is_single else {"imbalance": step.imbalance}),
        **tally(step, outcome, objective, ranks.first, version).all_reduce(ranks.all_reduce).means(),
        **({} if rewards is None else rewards_of(step, rewards, ranks).values()),
        **({} if endings is None else completions_of(step, endings).all_reduce(ranks.all_reduce).values()),
        **off_policy(step, outcome, newest if version is None else version).all_reduce(ranks.all_reduce).values(),
        **{f"correction/{name}": float(value) for name, value in outcome.corrected.metrics.items()},
    }


def check_rewards(rewards: NDArray[np.float32], step: Step) -> NDArray[np.float32]:
    """Return rewards of all traces as [R] float32.

    Raises:
        ArgumentError: if a trace of the step has no entry.
    """
    rewards = _validation.floats(rewards, "rewards", np.float32)
    if len(rewards) <= (highest := int(np.max(step.trace, initial=-1))):
        raise ArgumentError(
            f"TG-TRAIN-069: rewards has {len(rewards)} entries, but trace {highest} has a trained token in the step. "
            "Pass the rewards of all packed traces: sequences.rewards[:, 0]."
        )
    return rewards


def rewards_of(step: Step, rewards: NDArray[np.float32], ranks: Ranks) -> Rewards:
    """Return reward metrics of the traces with a token in the step on any rank; a group can span ranks."""
    group = np.full(len(rewards), -np.inf)
    group[step.trace] = step.group
    group = ranks.all_reduce(group, "max")
    has_terms = np.isfinite(group)
    return Rewards.of(rewards[has_terms], group[has_terms].astype(np.int64))


def completions_of(step: Step, endings: NDArray[np.uint8]) -> MetricSums:
    """Return lengths of the step's traces on this rank. The tokens before the first trained token are the prompt.

    Args:
        endings: as in `step_metrics`.
    """
    traces, owner = np.unique(step.trace, return_inverse=True)
    prompts = np.full(len(traces), np.iinfo(np.int64).max)
    for batch in step.batches:
        np.minimum.at(prompts, owner[batch.term], batch.positions[batch.read[batch.logit_row]].astype(np.int64) + 1)
    sampled = np.bincount(owner, minlength=len(traces))
    laid_out = prompts < np.iinfo(np.int64).max
    return completions(np.where(laid_out, prompts, 0), sampled, endings[traces] == TRUNCATED)


def tally(
    step: Step, outcome: StepResult, objective: Objective, first: bool = True, version: int | None = None
) -> MetricAccumulator:
    """Return sums of the step with their denominators, before the reduction over ranks.

    Args:
        first: whether this rank is the first; only the first adds the counts that all ranks share.
        version: as in `step_metrics`.
    """
    sums = MetricAccumulator()
    terms, computed_mask = len(step), ~np.isnan(outcome.logprobs)
    computed = int(np.count_nonzero(computed_mask))
    keep = outcome.keep & computed_mask
    sums.add("entropy", outcome.entropy[computed_mask].sum(dtype=np.float64), computed)
    recorded = int(np.count_nonzero(~np.isnan(step.rollout_logprobs)))
    sums.add("rollout_logprob_coverage", recorded, terms)
    sums.add("rollout_logprob_coverage_all", recorded, step.branch_tokens)
    if objective.ratio is not None:
        ratio = outcome.ratio[keep].astype(np.float64)
        sums.add("ratio_mean", ratio.sum(), len(ratio))
        sums.maximum("ratio_max", ratio.max(initial=-math.inf))
        if objective.surrogate.clips:
            sums.add("clip_fraction", (outcome.clipped & keep).sum(), computed)
        if objective.surrogate.bounds is not None:
            low, high = objective.surrogate.bounds
            sums.add("clip_fraction_unsigned", ((ratio < low) | (ratio > high)).sum(), computed)
    if version is not None:
        staleness = step.staleness(version)
        sums.add("staleness_mean", staleness[staleness >= 0].sum(), int(np.count_nonzero(staleness >= 0)))
        sums.maximum("staleness_max", staleness.max(initial=-1) if (staleness >= 0).any() else -math.inf)
    first_of_trace = np.unique(step.trace, return_index=True)[1]
    skipped = step.skipped.traces if first else 0
    sums.add(
        "frac_zero_advantage", (step.advantages[first_of_trace] == 0).sum() + skipped, len(first_of_trace) + skipped
    )
    return sums


def off_policy(step: Step, outcome: StepResult, version: int | None = None) -> OffPolicySums:
    """Return off-policy metrics by turn, alignment level and staleness. Without `old`, theta is used in its place."""
    # Infinite rollout logprobs are possible only if the objective ignores them; otherwise `correct` rejects them.
    rollout = np.where(np.isfinite(step.rollout_logprobs), step.rollout_logprobs, np.nan)
    old = outcome.logprobs if step.old_logprobs is None else step.old_logprobs
    return OffPolicySums.of(
        old,
        rollout,
        trace=step.trace,
        keep=outcome.keep,
        weight=outcome.weight,
        theta=outcome.logprobs,
        ref=step.ref_logprobs,
        theta_of_ref=outcome.vocabulary_logprobs,
        advantages=step.advantages,
        gradient=outcome.gradient,
        turn=step.turn,
        alignment_level=step.alignment_level,
        staleness=step.staleness(version),
    )
