"""What a loss can say: ratios, levels, gates, weights, a surrogate, penalties and a reduction, as frozen values.

No arithmetic is done here, and no array is seen: `correction` evaluates what is detached, `objective` what carries a
gradient. Presets are values of `Objective`; `override` changes their fields by name.
"""

from tracegrad import _core
from tracegrad.algebra.detached import Clamp, Gate, Identity, Level, Ratio, Shape, Weight, When, Window
from tracegrad.algebra.loss import (
    Clip,
    Missing,
    Needs,
    Objective,
    Penalty,
    PolicyGradient,
    Reduce,
    Surrogate,
    with_kl,
)
from tracegrad.algebra.override import override, override_all

LOG_RATIO_LIMIT: float = _core.LOG_RATIO_LIMIT
"""Log-ratios are clamped to plus or minus this many nats before they are exponentiated."""

__all__ = [
    "LOG_RATIO_LIMIT",
    "Clamp",
    "Clip",
    "Gate",
    "Identity",
    "Level",
    "Missing",
    "Needs",
    "Objective",
    "Penalty",
    "PolicyGradient",
    "Ratio",
    "Reduce",
    "Shape",
    "Surrogate",
    "Weight",
    "When",
    "Window",
    "override",
    "override_all",
    "with_kl",
]
