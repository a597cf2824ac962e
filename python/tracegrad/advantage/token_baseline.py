"""The optimal token baseline: at every step the group's mean return, weighed by the length of each trace's gradient.

Apart from `tokens`, as it compares terms of different traces that stand at the same step.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import arrays
from tracegrad.advantage.groups import Floats, Grouped, Singleton
from tracegrad.advantage.runs import accumulated, discounted, rows, terms
from tracegrad.advantage.scale import divided
from tracegrad.errors import ArgumentError

Tail = Literal["keep", "zero"]


def optimal_token_baseline(
    rewards: ArrayLike,
    groups: ArrayLike,
    trace: ArrayLike,
    *,
    logprobs: ArrayLike,
    sum_pi_squared: ArrayLike,
    tail: Tail,
    weights: ArrayLike | None = None,
    position: ArrayLike | None = None,
    eps: float = 1e-8,
    singleton: Singleton = "refuse",
) -> NDArray[np.float32]:
    """G_t - B_t, where B_t = sum(G_t * W_t) / (sum(W_t) + eps) over the traces of the group that have a term at step t.

    G_t is the undiscounted return. W_t sums w_j = 1 - 2 * p_j + sum_v p_v**2 over the terms up to t: the squared norm
    of the gradient of the logprob with respect to the logits, so that B_t is the baseline of least variance.

    Args:
        rewards: [M] per term, 0 where a term has none; a trace with a NaN is unscorable.
        groups: [R] ids.
        trace: [M] row of each term's trace in `groups`.
        logprobs: [M] nats, of the policy that is trained, at the time of sampling.
        sum_pi_squared: [M] sum over the vocabulary of p squared.
        tail: at a step where one trace of a larger group is left: "keep" the return (verl's handle_zero_tail=True), or
            "zero", as there is nothing to compare with (False).
        weights: [M] importance weights; w_j is multiplied by their square.
        position: [M] step of each term, rising within a trace; default its number among the terms of the trace (verl's
            tir_optimal_token_baseline). Pass offsets within the response for verl's optimal_token_baseline.
        eps: added to the denominator.
        singleton: a group in which one scorable trace has terms; verl keeps the return.

    Returns:
        [M] float32.

    Raises:
        ArgumentError: for values that are not finite, steps that do not rise, a group of one under "refuse", shapes
            that contradict one another.

    Source: verl 0.9.1, `compute_optimal_token_baseline_advantage`; the baseline of least variance: Greensmith,
    Bartlett and Baxter 2004, JMLR 5, section 4.

    >>> sure = dict(logprobs=[-0.5, -0.5], sum_pi_squared=[0.5, 0.5])
    >>> optimal_token_baseline([1.0, 0.0], [0, 0], [0, 1], tail="keep", **sure).round(3).tolist()
    [0.5, -0.5]
    """
    if tail not in ("keep", "zero"):
        raise ArgumentError(
            f"tail is {tail!r}. It says what the last trace of a group keeps. It must be 'keep' or 'zero'."
        )
    reward, owner = terms(trace, rewards=rewards)
    group = arrays.labels(groups, "groups")
    index = np.unique(group, return_inverse=True)[1].reshape(-1)
    rows(owner, len(index))
    known = ~np.isnan(reward)
    lost = np.isin(owner, owner[~known])
    total = np.where(lost, np.nan, discounted(np.where(known, reward, 0.0), owner, 1.0))
    energy = accumulated(_energy(owner, logprobs, sum_pi_squared, weights), owner)
    step = _steps(owner, position)
    cells = Grouped.of(total, index[owner] * (step.max(initial=0) + 1) + step)
    baseline = divided(cells.sum(cells.reward * energy), cells.sum(energy) + eps)
    advantage = cells.settle(cells.reward - baseline[cells.index], tail)
    return _with_lone_traces(advantage, total, owner, group, singleton).astype(np.float32)


def _energy(owner: NDArray[np.int64], logprobs: ArrayLike, squares: ArrayLike, weights: ArrayLike | None) -> Floats:
    logprob, square = terms(owner, logprobs=logprobs)[0], terms(owner, sum_pi_squared=squares)[0]
    energy = 1.0 - 2.0 * np.exp(logprob) + square
    if weights is not None:
        energy = energy * terms(owner, weights=weights)[0] ** 2
    bad = np.flatnonzero(np.isnan(energy))
    if len(bad):
        raise ArgumentError(
            f"term {bad[0]} of trace {owner[bad[0]]}: a logprob, sum_pi_squared or weight is NaN. All later steps of "
            "its group would have no baseline. Compute them for every term."
        )
    return energy


def _steps(owner: NDArray[np.int64], position: ArrayLike | None) -> NDArray[np.int64]:
    if position is None:
        return accumulated(np.ones(len(owner)), owner).astype(np.int64)
    step, order = arrays.integers(position, "position"), np.argsort(owner, kind="stable")
    if step.shape == owner.shape and step.min(initial=0) >= 0:
        bad = order[1:][(np.diff(owner[order]) == 0) & (np.diff(step[order]) <= 0)]
        if not len(bad):
            return step
        where = f"term {bad[0]} of trace {owner[bad[0]]}: the position {step[bad[0]]} does not rise"
    else:
        where = f"position has shape {step.shape} for {len(owner)} terms, or is negative"
    raise ArgumentError(
        f"{where}. Terms would be compared at the wrong step. Pass the offset of each term within its trace."
    )


def _with_lone_traces(
    advantage: Floats, total: Floats, owner: NDArray[np.int64], group: NDArray, singleton: str
) -> Floats:
    """The advantages, where a trace is the only scorable one of its group with what `singleton` says."""
    present, first = np.unique(owner, return_index=True)
    traces = Grouped.of(total[first], group[present])
    traces.settle(traces.reward, singleton)
    lone = np.isin(owner, present[traces.alone])
    return np.where(lone, total if singleton == "keep" else 0.0, advantage)
