"""Where the log-linear proximal policy lies, by version numbers: what stands in for a forward pass for `old`.

Called by the learner, or by any trainer with an objective on the proximal.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import arrays


def proximal_alpha(version: ArrayLike, proximal: int, current: int) -> NDArray[np.float32]:
    """(proximal - version) / (current - version): 0 at the recorded policy, 1 at the trained one.

    Held within [0, 1]; 1 where a token is as new as the trained policy.

    Args:
        version: [m] integers, the policy version that sampled each token.
        proximal: the version of the proximal policy: the trained one when `old` would last have been measured.
        current: the version of the policy being trained.

    Returns:
        [m] float32, for `Terms.alpha`.

    Source: A-3PO, arXiv 2512.06547; AReaL's prox_logp_method="loglinear".

    >>> proximal_alpha([0, 2, 4], 3, 4).tolist()
    [0.75, 0.5, 1.0]
    """
    recorded = arrays.integers(version, "version")
    proximal, current = (
        arrays.integer(value, name, least=-1) for name, value in (("proximal", proximal), ("current", current))
    )
    apart = current - recorded
    alpha = (proximal - recorded) / np.maximum(apart, 1)
    return np.where(apart > 0, alpha.clip(0.0, 1.0), 1.0).astype(np.float32)
