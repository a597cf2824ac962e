"""Define losses from components, correct for off-policy data, and evaluate in Rust and torch. Arrays in, arrays out.

An `Objective` combines ratios, weights, rejections, a surrogate, penalties and a normalisation, as frozen values. Each
formula is written once, next to the fields of its component, in tensor methods that do not import torch.
`correction.correct` evaluates in Rust what is known before the step; `evaluate` evaluates in torch what has a gradient.
`presets` has published methods as values, and `override` changes fields by name. Your own loss is a `Surrogate` or a
function (docs/how-to/extend.md).

In this package a *token* is a trained token: one that the policy sampled in one trace. `Terms` has their arrays.

    >>> import torch
    >>> from tracegrad.objective import LOG_RATIO_LIMIT, Clip, Objective, PolicyGradient, Ratio, padded_loss
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([[1.0, -1.0]])}
    >>> logprobs = torch.tensor([[-1.0, -3.0]])
    >>> # "A>0" is a value of `When`.
    >>> padded_loss(Objective(PolicyGradient(when="A>0")), logprobs, **step).per_term.surrogate
    tensor([[1., 0.]])
    >>> far = padded_loss(Objective(Clip(), Ratio("theta", "old")), logprobs, **step, old=logprobs - 100.0)
    >>> # The log-ratio is not 100, whose exp overflows in float32.
    >>> far.per_term.ratio.log().round(), LOG_RATIO_LIMIT
    (tensor([[20., 20.]]), 20.0)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tracegrad.objective import presets
from tracegrad.objective.component import LossInputs
from tracegrad.objective.objective import MissingLogprobs, Objective, Requirements, with_beta, with_entropy, with_kl
from tracegrad.objective.penalty import AdaptiveEntropy, AdvantageShift, EntropyBonus, Penalty
from tracegrad.objective.ratio import LOG_RATIO_LIMIT, Aggregation, Ratio, Reduce, When
from tracegrad.objective.rejection import (
    AnyRejection,
    DropCovariance,
    Rejection,
    RejectionBudget,
    TopCovariance,
    TopEntropy,
)
from tracegrad.objective.serialize import override, override_all
from tracegrad.objective.surrogate import (
    Clip,
    CrossEntropy,
    Function,
    FutureClip,
    GeoClip,
    Importance,
    PolicyGradient,
    Regression,
    Sigmoid,
    Surrogate,
)
from tracegrad.objective.weight import Gamma, Gaussian, Identity, Inverse, MaskOutside, Shape, Truncate, Weight

if TYPE_CHECKING:
    from tracegrad.objective.torch_loss import Loss, PerTerm, Terms, build_terms, evaluate, padded_loss

_WITH_TORCH = ("Loss", "PerTerm", "Terms", "evaluate", "padded_loss", "build_terms")

__all__ = [
    "LOG_RATIO_LIMIT",
    "AdaptiveEntropy",
    "AdvantageShift",
    "Aggregation",
    "AnyRejection",
    "Clip",
    "CrossEntropy",
    "DropCovariance",
    "EntropyBonus",
    "Function",
    "FutureClip",
    "Gamma",
    "Gaussian",
    "GeoClip",
    "Identity",
    "Importance",
    "Inverse",
    "Loss",
    "LossInputs",
    "MaskOutside",
    "MissingLogprobs",
    "Objective",
    "Penalty",
    "PerTerm",
    "PolicyGradient",
    "Ratio",
    "Reduce",
    "Regression",
    "Rejection",
    "RejectionBudget",
    "Requirements",
    "Shape",
    "Sigmoid",
    "Surrogate",
    "Terms",
    "TopCovariance",
    "TopEntropy",
    "Truncate",
    "Weight",
    "When",
    "build_terms",
    "evaluate",
    "override",
    "override_all",
    "padded_loss",
    "presets",
    "with_beta",
    "with_entropy",
    "with_kl",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module("tracegrad.objective.torch_loss"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
