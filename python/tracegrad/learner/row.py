"""The row of a step: what metrics.jsonl says of it, by the names of `tracegrad.metrics`.

Arrays in, names and numbers out; no model and no files. Called by `loop`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.algebra import Clip, Objective
from tracegrad.batch import Step
from tracegrad.learner.feed import Feed
from tracegrad.learner.ranks import Ranks
from tracegrad.learner.step import Outcome
from tracegrad.metrics import OffPolicy, Rewards, Tally
from tracegrad.sequence import Sequences


def row_of(step: Step, outcome: Outcome, feed: Feed, ranks: Ranks | None = None) -> dict[str, Any]:
    """All that is known of a step from its arrays: the loop adds what it alone knows (number, rate, time).

    Args:
        step: with the logprobs it was taken with; of this rank.
        outcome: of the step.
        feed: what the run trains on.
        ranks: with whom the step is shared; every one of them calls this.
    """
    ranks = ranks or Ranks()
    here = np.zeros(feed.sequences.traces)
    here[step.trace] = 1
    traces = np.flatnonzero(ranks.all_reduce(here, "max"))
    own = sum(batch.tokens for batch in step.batches if len(batch.read))
    terms, tokens = (int(n) for n in ranks.all_reduce(np.array([len(step), own]), "sum"))
    return {
        "loss": outcome.loss,
        "grad_norm": outcome.grad_norm,
        "terms": terms,
        "traces": len(traces),
        "tokens": tokens,
        **tally(step, outcome, feed.objective, own, ranks.first).all_reduce(ranks.all_reduce).means(),
        **Rewards.of(feed.rewards[traces], feed.sequences.group[traces]).named(),
        **off_policy(step, outcome, feed.sequences).all_reduce(ranks.all_reduce).named(),
        **{f"correction/{name}": float(value) for name, value in outcome.corrected.metrics.items()},
    }


def tally(step: Step, outcome: Outcome, objective: Objective, tokens: int, first: bool = True) -> Tally:
    """Sums of the step with their denominators, as far as the learner alone knows them.

    Args:
        tokens: laid out on this rank.
        first: this rank alone adds what the step knows of all ranks.
    """
    found = Tally()
    terms, seen = len(step), ~np.isnan(outcome.logprobs)
    computed = int(np.count_nonzero(seen))
    keep = outcome.keep & seen
    found.add("entropy", outcome.entropy[seen].sum(dtype=np.float64), computed)
    known = int(np.count_nonzero(~np.isnan(step.rollout_logprobs)))
    found.add("frac_old_logprobs_valid", known, terms)
    found.add("frac_old_logprobs_valid_all", known, tokens)
    if isinstance(objective.surrogate, Clip):
        ratio = outcome.ratio[keep].astype(np.float64)
        outside = (ratio < 1 - objective.surrogate.low) | (ratio > 1 + objective.surrogate.high)
        found.add("ratio_mean", ratio.sum(), len(ratio))
        found.maximum("ratio_max", ratio.max(initial=-math.inf))
        found.add("clip_fraction", (outcome.clipped & keep).sum(), computed)
        found.add("clip_fraction_any", outside.sum(), computed)
    one = np.unique(step.trace, return_index=True)[1]
    skipped = step.skipped.traces if first else 0
    found.add("frac_zero_advantage", (step.advantages[one] == 0).sum() + skipped, len(one) + skipped)
    return found


def off_policy(step: Step, outcome: Outcome, sequences: Sequences) -> OffPolicy:
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
        tier=np.asarray(sequences.tier)[step.origin],
        lag=version_lag(step, sequences),
    )


def version_lag(step: Step, sequences: Sequences) -> NDArray[np.int64]:
    """[M] policy versions between the newest one recorded in the sequences and the term's; -1 where it is unknown."""
    version = step.version.astype(np.int64)
    newest = int(np.max(sequences.version, initial=-1))
    return np.where(version < 0, -1, newest - version)
