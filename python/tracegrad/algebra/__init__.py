"""What a loss can say: ratios, levels, gates, weights, a surrogate, penalties and a reduction, as frozen values.

In come the fields that a user chose; out goes an `Objective`, whose parts evaluate themselves on a `View` of the
terms: each formula stands once, beside its fields and its words, in tensor methods without an import of torch.
`correction` has the core evaluate what is detached, `objective` sums the rest. Presets are values of `Objective`;
`override` changes fields by name; a loss of your own is a `Surrogate` or a function (docs/extending.md).

A *term* is one trained sampling event: one token that the policy drew in one trace.

Its files, each using those before it alone: `refuse`, `spell`; `ratio` (policies, statistics, levels), `reduce`;
`whole`, `view`, `part` (what parts see and say of themselves); `shape`, `weight`; `gate`, `selector` (what drops
terms); `surrogate`, `trace_clip`, `penalty`; `idle`; `loss` (the objective as a whole); `override`.
"""

from tracegrad.algebra.gate import AnyGate, Budget, Gate
from tracegrad.algebra.loss import Missing, Needs, Objective, with_beta, with_entropy, with_kl
from tracegrad.algebra.override import override, override_all
from tracegrad.algebra.penalty import Adapt, Entropy, Penalty, Shift
from tracegrad.algebra.ratio import LOG_RATIO_LIMIT, Level, Ratio, When
from tracegrad.algebra.reduce import Reduce
from tracegrad.algebra.selector import DropCovariance, TopCovariance, TopEntropy
from tracegrad.algebra.shape import Clamp, Gamma, Gaussian, Identity, Inverse, Shape, Window
from tracegrad.algebra.surrogate import (
    Clip,
    CrossEntropy,
    Function,
    Importance,
    PolicyGradient,
    Regress,
    Sigmoid,
    Surrogate,
)
from tracegrad.algebra.trace_clip import FutureClip, GeoClip
from tracegrad.algebra.view import View
from tracegrad.algebra.weight import Weight

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
    "Function",
    "FutureClip",
    "Gamma",
    "Gate",
    "Gaussian",
    "GeoClip",
    "Identity",
    "Importance",
    "Inverse",
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
    "View",
    "Weight",
    "When",
    "Window",
    "override",
    "override_all",
    "with_beta",
    "with_entropy",
    "with_kl",
]
