"""What a difference is divided by: the deviation of its group, of the batch, or of everything in it.

Called by the baselines of `outcome` and `several`; `whiten` is also the last step of REINFORCE++, GAE and GDPO.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import arrays
from tracegrad.advantage.groups import Floats, Grouped
from tracegrad.errors import ArgumentError

Scale = Literal["none", "std", "batch_std"]
EpsIn = Literal["variance", "deviation"]

_EPS = 1e-4


def check_scale(scale: str, ddof: int | None, eps: float | None) -> float:
    """The eps to use.

    Raises:
        ArgumentError: for an unknown scale, a ddof that is missing, or a ddof or eps without effect.
    """
    if not isinstance(scale, str) or scale not in ("none", "std", "batch_std"):
        raise ArgumentError(
            f"scale is {arrays.described(scale)}. It says what a difference is divided by. "
            "It must be 'none' or 'std' (of the group) or 'batch_std'."
        )
    if scale == "none" and (ddof is not None or eps is not None):
        raise ArgumentError(
            "ddof and eps have no effect with scale='none': nothing is divided. An option that does nothing hides a "
            "mistake. Leave them out, or pass scale='std'."
        )
    if scale != "none":
        check_ddof(ddof, f"scale={scale!r}")
    return _EPS if eps is None else eps


def check_ddof(ddof: int | None, where: str) -> None:
    """Raises ArgumentError unless ddof is 0 or 1."""
    if ddof not in (0, 1):
        raise ArgumentError(
            f"ddof is {ddof} with {where}. Peers differ here, by a factor of sqrt(n / (n - 1)): "
            "pass 1 (TRL, verl, SkyRL) or 0 (ART)."
        )


def scaled(advantage: Floats, group: Grouped, scale: str, ddof: int | None, eps: float) -> Floats:
    """[R] float64: advantage / (deviation of the rewards + eps); a group of one counts as deviation 1."""
    if scale == "none":
        return advantage
    assert ddof is not None
    if scale == "batch_std":
        spread = np.full(len(group.names), _deviation(group.reward[group.known], ddof))
    else:
        square = group.sum((group.reward - group.mean[group.index]) ** 2)
        spread = np.where(group.count == 1, 1.0, np.sqrt(square / np.maximum(group.count - ddof, 1)))
    return divided(advantage, (spread + eps)[group.index])


def whiten(values: ArrayLike, *, ddof: int, eps: float, eps_in: EpsIn) -> NDArray[np.float32]:
    """All values minus their mean, divided by their deviation.

    Over traces this is a batch normalisation; over terms (`advantages[trace]`) a trace counts once per term, as verl's
    and SkyRL's `masked_whiten` have it. NaN stands outside and becomes 0; where all values are equal all are 0.

    Args:
        values: [R] or [M].
        ddof: 1 divides the squares by n - 1, 0 by n.
        eps: what keeps the quotient finite.
        eps_in: "variance": (x - mean) / sqrt(variance + eps), verl and SkyRL with 1e-8; "deviation":
            (x - mean) / (deviation + eps), TRL with 1e-4.

    Returns:
        The shape of `values`, float32.

    Raises:
        ArgumentError: if exactly one value is known, as its deviation is not defined; for infinities.

    >>> whiten([3.0, 1.0, float("nan")], ddof=0, eps=0.0, eps_in="variance").tolist()
    [1.0, -1.0, 0.0]
    """
    return whitened(arrays.real(values, "values"), ddof, eps, eps_in).astype(np.float32)


def whitened(values: Floats, ddof: int, eps: float, eps_in: str) -> Floats:
    """`whiten` in float64."""
    if eps_in not in ("variance", "deviation"):
        raise ArgumentError(
            f"eps_in is {eps_in!r}. Peers differ in where eps stands. "
            "It must be 'variance' (verl, SkyRL) or 'deviation' (TRL)."
        )
    check_ddof(ddof, "whiten")
    known = ~np.isnan(values)
    present = values[known]
    if len(present) == 1 or np.isinf(present).any():
        raise ArgumentError(
            f"{len(present)} of {values.size} values are known and {int(np.isinf(present).sum())} of these are "
            "infinite. Their deviation is not defined. Whiten two or more finite values."
        )
    if not len(present) or present.min() == present.max():
        return np.zeros_like(values)
    spread = _deviation(present, ddof)
    spread = np.sqrt(spread**2 + eps) if eps_in == "variance" else spread + eps
    return np.where(known, (values - present.mean()) / spread, 0.0)


def by_mean_size(
    advantages: ArrayLike, *, weights: ArrayLike | None = None, balance: float = 0.0
) -> NDArray[np.float32]:
    """Advantages of terms divided by their mean size, so that the rate means the same whatever the rewards' spread.

    Args:
        advantages: [M] of all terms of a batch.
        weights: [M] that the terms count with in the mean, which is over the sum of the weights; None is alike.
        balance: from 0 to 1 takes that share off negative advantages first, from 0 to -1 off positive ones.

    Returns:
        [M] float32; all 0 where all are.

    Raises:
        ArgumentError: for values that are not finite, weights below 0, shapes that differ, a balance beyond 1.

    Source: ART's packing of tensors, with its weights of 1 / length and its advantage_balance.

    >>> by_mean_size([3.0, -1.0]).tolist(), by_mean_size([3.0, -1.0], balance=1.0).tolist()
    ([1.5, -0.5], [2.0, 0.0])
    """
    if not -1 <= balance <= 1:
        raise ArgumentError(f"balance is {balance}. More than all of one sign cannot be taken off. Pass -1 to 1.")
    value = arrays.real(advantages, "advantages")
    weight = np.ones_like(value) if weights is None else arrays.real(weights, "weights")
    if weight.shape != value.shape or not np.isfinite(value + weight).all() or (weight < 0).any():
        raise ArgumentError(
            f"advantages have shape {value.shape} and weights {weight.shape}; a value may not be finite, or a weight "
            "is below 0. Their mean size would mean nothing. Pass one of each for every term."
        )
    factor = np.where(value > 0, 1 + min(balance, 0.0), 1 - max(balance, 0.0))
    value = value * factor + 0.0
    size = float((np.abs(value) * weight).sum())
    return (value * weight.sum() / size if size > 0 else value * 0.0).astype(np.float32)


def divided(numerator: Floats, denominator: Floats) -> Floats:
    """The quotient, 0 where the denominator is not above 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


def _deviation(values: Floats, ddof: int) -> float:
    if not len(values):
        return 0.0
    return float(np.sqrt(((values - values.mean()) ** 2).sum() / max(len(values) - ddof, 1)))
