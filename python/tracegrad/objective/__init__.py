"""Define losses from components, correct for off-policy data, and evaluate in Rust and torch. Arrays in, arrays out.

An `Objective` combines ratios, weights, rejections, a surrogate, penalties and a normalisation, as frozen values. Each
formula is written once, next to the fields of its component, in tensor methods that do not import torch.
`correction.correct` evaluates in Rust what is known before the step; `evaluate` evaluates in torch what has a gradient.
`presets` has published methods as values, and `override` changes fields by name. Your own loss is a `Surrogate` or a
function (docs/extending.md).

A *term* is one trained token: one token that the policy sampled in one trace.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tracegrad.objective import presets
from tracegrad.objective.component import View
from tracegrad.objective.objective import Missing, Needs, Objective, with_beta, with_entropy, with_kl
from tracegrad.objective.penalty import Adapt, Entropy, Penalty, Shift
from tracegrad.objective.ratio import LOG_RATIO_LIMIT, Level, Ratio, Reduce, When
from tracegrad.objective.rejection import AnyGate, Budget, DropCovariance, Gate, TopCovariance, TopEntropy
from tracegrad.objective.serialize import override, override_all
from tracegrad.objective.surrogate import (
    Clip,
    CrossEntropy,
    Function,
    FutureClip,
    GeoClip,
    Importance,
    PolicyGradient,
    Regress,
    Sigmoid,
    Surrogate,
)
from tracegrad.objective.weight import Clamp, Gamma, Gaussian, Identity, Inverse, Shape, Weight, Window

if TYPE_CHECKING:
    from tracegrad.objective.torch_loss import Loss, PerTerm, Terms, evaluate, padded_loss, terms_of

_WITH_TORCH = ("Loss", "PerTerm", "Terms", "evaluate", "padded_loss", "terms_of")

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
    "Loss",
    "Missing",
    "Needs",
    "Objective",
    "Penalty",
    "PerTerm",
    "PolicyGradient",
    "Ratio",
    "Reduce",
    "Regress",
    "Shape",
    "Shift",
    "Sigmoid",
    "Surrogate",
    "Terms",
    "TopCovariance",
    "TopEntropy",
    "View",
    "Weight",
    "When",
    "Window",
    "evaluate",
    "override",
    "override_all",
    "padded_loss",
    "presets",
    "terms_of",
    "with_beta",
    "with_entropy",
    "with_kl",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module("tracegrad.objective.torch_loss"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
