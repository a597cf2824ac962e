"""What a loss can say: ratios, levels, gates, weights, a surrogate, penalties and a reduction, as frozen values.

No arithmetic is done here, and no array is seen: `correction` evaluates what is detached, `objective` what carries a
gradient. Presets are values of `Objective`; `override` changes their fields by name.
"""

from tracegrad import _core
from tracegrad.algebra.gate import AnyGate, Budget, DropCovariance, Gate, TopCovariance, TopEntropy
from tracegrad.algebra.loss import Missing, Needs, Objective, with_beta, with_entropy, with_kl
from tracegrad.algebra.override import override, override_all
from tracegrad.algebra.penalty import Adapt, Entropy, Penalty, Shift
from tracegrad.algebra.ratio import Level, Ratio, When
from tracegrad.algebra.reduce import Reduce
from tracegrad.algebra.shape import Clamp, Gamma, Gaussian, Identity, Shape, Window
from tracegrad.algebra.surrogate import (
    Clip,
    CrossEntropy,
    GeoClip,
    Importance,
    PolicyGradient,
    Regress,
    Sigmoid,
    Surrogate,
)
from tracegrad.algebra.weight import Weight

LOG_RATIO_LIMIT: float = _core.LOG_RATIO_LIMIT
"""Log-ratios are clamped to plus or minus this many nats before they are exponentiated."""

__all__ = [
    "LOG_RATIO_LIMIT",
    "Adapt",
    "AnyGate",
    "Budget",
    "Clamp",
    "Clip",
    "CrossEntropy",
    "DropCovariance",
    "Entropy",
    "Gamma",
    "Gate",
    "Gaussian",
    "GeoClip",
    "Identity",
    "Importance",
    "Level",
    "Missing",
    "Needs",
    "Objective",
    "Penalty",
    "PolicyGradient",
    "Ratio",
    "Reduce",
    "Regress",
    "Shape",
    "Shift",
    "Sigmoid",
    "Surrogate",
    "TopCovariance",
    "TopEntropy",
    "Weight",
    "When",
    "Window",
    "override",
    "override_all",
    "with_beta",
    "with_entropy",
    "with_kl",
]
