"""A histogram of log-ratios with fixed bins, so that percentiles merge: counts add up, whoever counted.

Bins are even in asinh(l / 0.001): narrow around l = 0, where mismatch lives, and proportional to l far out. No state,
no names. Called by `offpolicy`.
"""

import numpy as np
from numpy.typing import NDArray

LIMIT = 20.0
"""Log-ratios beyond plus or minus this many nats fall into the two open bins at the ends."""
FINE = 1e-3
"""Below this many nats bins are of one width; above, their width grows with |l|."""
HALF = 4096
"""Bins on either side of the one around l = 0."""
BINS = 2 * HALF + 3
"""Bins in all: 2 * HALF + 1 between the limits, and an open one at each end."""
_WIDTH = np.arcsinh(LIMIT / FINE) / HALF
RESOLUTION = _WIDTH / 2
"""A percentile is off by at most RESOLUTION * sqrt(l^2 + FINE^2) nats: 0.13 % of l, and 1.3e-6 near l = 0."""


def bins(log_ratios: NDArray[np.floating]) -> NDArray[np.intp]:
    """[M] the bin of each log-ratio; -inf (a weight of 0) is in the first.

    >>> bins(np.array([-np.inf, 0.0, 25.0])).tolist()
    [0, 4097, 8194]
    """
    place = np.rint(np.arcsinh(log_ratios / FINE) / _WIDTH)
    return (np.clip(place, -HALF - 1, HALF + 1) + HALF + 1).astype(np.intp)


def percentile(counts: NDArray[np.int64], share: float, low: float, high: float) -> float:
    """The smallest ratio with at least `share` of the counted ratios at or below it, up to `RESOLUTION`.

    Args:
        counts: [BINS].
        share: from 0 to 1.
        low, high: the smallest and the largest ratio, known exactly; the answer lies between them.

    Returns:
        the ratio, not its logarithm; NaN where nothing was counted.

    >>> counts = np.bincount(bins(np.log([0.5, 1.0, 1.0, 2.0])), minlength=BINS)
    >>> percentile(counts, 0.5, 0.5, 2.0), percentile(counts, 1.0, 0.5, 2.0)
    (1.0, 2.0)
    """
    total = int(counts.sum())
    if total == 0:
        return float("nan")
    rank = min(max(int(np.ceil(share * total)), 1), total)
    if rank == total:
        return high
    found = int(np.searchsorted(np.cumsum(counts), rank))
    if not 0 < found < BINS - 1:
        return low if found == 0 else high
    return float(np.clip(np.exp(FINE * np.sinh((found - HALF - 1) * _WIDTH)), low, high))
