"""Every field of the algebra does something: two values of it, and the two numbers they give, worked by hand.

A row is a function of the field's value, and what it gives for two values. The walk fails where a field has no row; the
last test has each field ignored, one by one, and sees its row fail.

Unless a row says otherwise theta's logprob is -3 at every term, A is 1, the policies agree and terms are summed: then
PolicyGradient gives 3 w at a term of weight w, Importance -r at one of ratio r.
"""

from dataclasses import fields, is_dataclass, replace
from math import e, exp, isclose, log
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tracegrad as tg
from ignored_fields import ignored
from tracegrad import objective as algebra
from tracegrad.alignment.ragged import Ragged
from tracegrad.errors import ArgumentError
from tracegrad.model import policy_loss
from tracegrad.objective import (
    AdaptiveEntropy,
    AdvantageShift,
    Aggregation,
    Clip,
    DropCovariance,
    EntropyBonus,
    Function,
    FutureClip,
    Gamma,
    Gaussian,
    GeoClip,
    Identity,
    Importance,
    Inverse,
    MaskOutside,
    Objective,
    Penalty,
    PolicyGradient,
    Ratio,
    Reduce,
    Regression,
    Rejection,
    RejectionBudget,
    Sigmoid,
    TopCovariance,
    TopEntropy,
    Truncate,
    Weight,
    presets,
)
from tracegrad.objective.correction import correct
from tracegrad.objective.torch_loss import Terms
from tracegrad.trainer.optim import EntropyController

SUM = Reduce("constant", norm=1.0)
OLD, DIRECT, MISMATCH, REF = (
    Ratio(*pair.split("/")) for pair in ("theta/old", "theta/rollout", "old/rollout", "theta/ref")
)
PRODUCT, MEAN, PLAIN = Aggregation("trace", "sum"), Aggregation("trace", "mean"), PolicyGradient()
MEANS = {"reduce": Reduce("trace", "mean")}
UNEVEN = {"a": (2.0, 4.0, 0.0, 0.0), "theta": (-1.0, -2.0, -3.0, -4.0), "trace": (0, 1, 1, 1)}
FALLS = Rejection(MISMATCH, high=2.0)
"""Drops terms of old/rollout above 2 before the step."""


def evaluated(
    objective: Objective,
    a: Any = 1.0,
    *,
    theta: Any = -3.0,
    to_old: Any = 0.0,
    of_old: Any = 0.0,
    to_ref: Any = 0.0,
    entropy: Any = 0.0,
    trace: Any = 0,
    turn: Any = 0,
) -> tuple[Any, Any]:
    """(loss, gradient by theta's logprobs) of terms given by their log-ratios: theta/old, old/rollout, theta/ref."""
    given = [
        torch.as_tensor(each, dtype=torch.float64) for each in (a, theta, to_old, of_old, to_ref, entropy, trace, turn)
    ]
    a, theta, to_old, of_old, to_ref, entropy, trace, turn = torch.broadcast_tensors(
        *(torch.atleast_1d(each) for each in given)
    )
    old, ref = theta - to_old, theta - to_ref
    terms = {"trace": trace.long(), "turn": turn.long(), "group": trace.long(), "advantages": a}
    rollout = old - of_old
    parts = {"weights": objective.weights, "rejections": objective.rejections, "reductions": objective.reductions}
    found = correct(old, rollout, ref=ref, reduce=objective.reduce, **parts, **terms)
    detached = {"weight": found.weight, "keep": found.keep, "scale": found.scale, "scales": found.scales}
    leaf = theta.clone().requires_grad_()
    done = objective(leaf, entropy.clone(), Terms(old=old, rollout=rollout, ref=ref, **detached, **terms))
    done.loss.backward()
    return done, leaf.grad


def loss(
    surrogate: Any = PLAIN, ratio: Ratio | None = None, *, reduce: Reduce = SUM, parts: Any = None, **terms: Any
) -> float:
    return evaluated(Objective(surrogate, ratio, reduce=reduce, **(parts or {})), **terms)[0].loss.item()


def clip(a: float, r: float, **fields: Any) -> float:
    return loss(Clip(**fields), OLD, a=a, to_old=log(r))


def future(a: float = 1.0, r: Any = (1.1, 1.1), **fields: Any) -> float:
    return loss(FutureClip(**fields), OLD, a=a, to_old=torch.log(torch.as_tensor(r, dtype=torch.float64)))


def gate(ratio: Ratio = MISMATCH, *before: Any, surrogate: Any = None, given: Any, **fields: Any) -> float:
    """-A at each kept term."""
    return loss(surrogate or Importance(), OLD, parts={"rejections": (*before, Rejection(ratio, **fields))}, **given)


def budget(*before: Any, ratio: Ratio = MISMATCH, given: Any, **fields: Any) -> float:
    return loss(Importance(), OLD, parts={"rejections": (*before, RejectionBudget(ratio, **fields))}, **given)


def weight(
    log_w: Any = 0.0, ratio: Ratio = MISMATCH, *others: Weight, a: Any = 1.0, to_old: Any = 0.0, **fields: Any
) -> float:
    return loss(parts={"weights": (*others, Weight(ratio, **fields))}, a=a, of_old=log_w, to_old=to_old)


def penalty(
    to_ref: Any,
    *,
    ratio: Ratio = REF,
    kind: str = "k1",
    coef: float = 1.0,
    terms: Any = None,
    parts: Any = None,
    **fields: Any,
) -> Any:
    """(loss, gradient) of a penalty alone: A is 0."""
    told = {"masked": False, "weighted": False, **fields}
    objective = Objective(PLAIN, penalties=(Penalty(ratio, kind, coef, **told),), **{"reduce": SUM, **(parts or {})})
    done, gradient = evaluated(objective, **{"a": 0.0, "to_ref": to_ref, **(terms or {})})
    return done.loss.item(), gradient[0].item(), done.per_term.penalty.sum().item()


def bonus(
    parts: Any = None, entropy: Any = (1.0, 2.0), coef: float = 1.0, *, masked: bool = False, **fields: Any
) -> float:
    told = {"entropy": EntropyBonus(coef, masked=masked, **fields), **(parts or {})}
    return loss(parts=told, a=0.0, entropy=entropy, of_old=(0.0, log(3)))


def of_support(**parts: Any) -> float:
    """The loss of one token with advantage 0 that was drawn from two of eight ids, all equally probable."""
    rows = Ragged(np.array([0, 0, 2]), np.array([6, 7], np.int32))
    sequences = tg.Sequences.from_arrays([5, 6], [0, 2], [np.nan, -0.5], [False, True], support=rows)
    [step] = tg.pack(sequences, [0.0], tokens_per_row=2)
    step = step.with_logprobs(ref=np.full(1, -1.0))
    terms = step.terms(step.batches[0], correct(None, step.rollout_logprobs, trace=step.trace))
    objective = Objective(PolicyGradient(), **parts)
    hidden, weight = torch.zeros(1, 4), torch.zeros(8, 4)
    return policy_loss(hidden, weight, step.batches[0], terms, objective).loss.item()


def kept(gate_: Any, reduce: Reduce = SUM, **terms: Any) -> float:
    """How many of four terms are left, each of covariance 1: A and logp lie 1 from their means, on one side."""
    objective = Objective(Clip(), OLD, rejections=(gate_,), reduce=reduce)
    given = {"a": (1.0, -1.0, 1.0, -1.0), "theta": (-2.0, -4.0, -2.0, -4.0), **terms}
    return evaluated(objective, **given)[0].per_term.keep.sum().item()


def selected(**fields: Any) -> float:
    """Penalised terms of four, l = 1 at each, of covariances 4, 2, 0 and -6 (theta -3 + 1, 0, -1, 0; A -+2 about 0)."""
    where = TopCovariance(**fields)
    told = {"a": (2.0, -2.0, 1.0, -1.0), "theta": (-1.0, -2.0, -3.0, -4.0)}
    return penalty(1.0, where=where, terms=told)[2]


def control(told: float, entropy: float = 0.3, coef: float = 0.1, **fields: Any) -> float:
    """The coefficient after a step of that entropy."""
    seen = EntropyController(
        replace(presets.DAPO, entropy=EntropyBonus(coef, masked=False, adapt=AdaptiveEntropy(**fields)))
    )
    seen.update(entropy)
    return seen.coef


def refused(make: Any) -> Any:
    try:
        return make()
    except ArgumentError:
        return "refused"


def lengths(reduce: Reduce) -> float:
    """Traces of three terms with A = 1 and of one with A = 5, r = 1."""
    return loss(Importance(), OLD, reduce=reduce, a=(1.0, 1.0, 1.0, 5.0), trace=(0, 0, 0, 1))


def shift(centre_or_coef: Any = 0.5, *, ratio: Ratio = REF, center: Any = None, terms: Any = None) -> float:
    told = {"to_ref": 1.0, "to_old": 0.5, **(terms or {})}
    gates = (FALLS,) if "of_old" in told else ()
    return loss(parts={"shifts": (AdvantageShift(ratio, centre_or_coef, center),), "rejections": gates}, **told)


def imitated(view: Any) -> Any:
    return -view.logprobs


def doubled(view: Any) -> Any:
    return -2 * view.logprobs


ABSORBED = Weight(MISMATCH)
TWO = {"to_old": (log(2), log(3))}
THREE_FALLS = {"of_old": (0.0, log(3))}
KL = Penalty(REF, "k1", 1.0, masked=False, weighted=False)

ROWS: dict[str, tuple[Any, tuple[Any, Any], tuple[Any, Any]]] = {
    "Ratio.num": (lambda v: weight(log(2), Ratio(v, "rollout"), to_old=log(3)), ("old", 6), ("theta", 18)),
    "Ratio.den": (
        lambda v: loss(Importance(), Ratio("theta", v), to_old=log(3), of_old=log(2)),
        ("old", -3),
        ("rollout", -6),
    ),
    "Aggregation.over": (
        lambda v: loss(Importance(Aggregation(v, "sum")), OLD, turn=(0, 1), **TWO),
        ("turn", -5),
        ("trace", -12),
    ),
    "Aggregation.reduce": (
        lambda v: loss(Importance(Aggregation("trace", v)), OLD, to_old=(log(2), log(8))),
        ("mean", -8),
        ("sum", -32),
    ),
    # Only the first term has an advantage, -4 of loss: through the mean both terms share its gradient.
    "Aggregation.grad": (
        lambda v: evaluated(
            Objective(Importance(Aggregation("trace", "mean", v)), OLD, reduce=SUM), (1.0, 0.0), to_old=(log(2), log(8))
        )[1][0].item(),
        ("through", -2),
        ("token", -4),
    ),
    "Aggregation.terms": (
        lambda v: loss(
            Importance(Aggregation("trace", "sum", terms=v)), OLD, parts={"rejections": (FALLS,)}, **TWO, **THREE_FALLS
        ),
        ("all", -6),
        ("kept", -2),
    ),
    # (4 + 2) / 2 and (4 + 8) / 2.
    "Aggregation.blend": (
        lambda v: loss(Importance(Aggregation("trace", "mean", blend=v)), OLD, to_old=(log(2), log(8))),
        (None, -8),
        ("arithmetic", -9),
    ),
    "Aggregation.scope": (
        lambda v: refused(lambda: weight((log(2), log(8)), DIRECT, level=Aggregation("batch", "mean", scope=v))),
        ("step", "refused"),
        ("microbatch", 24),
    ),
    "PolicyGradient.when": (lambda v: loss(PolicyGradient(v), a=(1.0, -1.0)), ("always", 0), ("A>0", 3)),
    "Importance.level": (lambda v: loss(Importance(v), OLD, **TWO), (Aggregation(), -5), (PRODUCT, -12)),
    "Clip.low": (lambda v: clip(-1, 0.5, low=v), (0.2, 0.8), (0.4, 0.6)),
    "Clip.high": (lambda v: clip(1, 2, high=v), (0.2, -1.2), (0.5, -1.5)),
    "Clip.dual": (lambda v: clip(-1, 5, dual=v), (None, 5), (3.0, 3)),
    "Clip.delta": (lambda v: clip(-1, 5, delta=v), (None, 5), (2.0, 2)),
    "Clip.level": (
        lambda v: loss(Clip(level=v), OLD, to_old=(log(1.1), log(1.1))),
        (Aggregation(), -2.2),
        (PRODUCT, -2.4),
    ),
    "Sigmoid.tau_pos": (lambda v: loss(Sigmoid(tau_pos=v), OLD), (1.0, -2), (2.0, -1)),
    "Sigmoid.tau_neg": (lambda v: loss(Sigmoid(tau_neg=v), OLD, a=-1.0), (1.05, 2 / 1.05), (2.0, 1)),
    "Sigmoid.level": (
        lambda v: loss(Sigmoid(level=v), OLD, to_old=(log(3), -log(3))),
        (Aggregation(), -4 / (1 + exp(-2)) - 4 / (1 + exp(2 / 3))),
        (MEAN, -4),
    ),
    "GeoClip.low": (lambda v: loss(GeoClip(low=v), OLD, a=-1.0, to_old=-1.0), (0.4, exp(-0.4)), (0.2, exp(-0.2))),
    "GeoClip.high": (lambda v: loss(GeoClip(high=v), OLD, to_old=1.0), (0.4, -exp(0.4)), (0.2, -exp(0.2))),
    # Of entropies 1 and 2 the quantile 0.75 is 1.75: the second is left, whose log-ratio is then that of both.
    "GeoClip.where": (
        lambda v: loss(GeoClip(where=v), OLD, to_old=(0.3, 0.1), entropy=(1.0, 2.0)),
        (None, -2 * exp(0.2)),
        (TopEntropy(0.25, "microbatch"), -2 * exp(0.1)),
    ),
    "Regression.beta": (
        lambda v: loss(Regression(v), OLD, to_old=(1.0, 1.0), a=(1.0, 1.0)) / 2,
        (1e-3, 0.998**2),
        (2.0, 9),
    ),
    "Function.function": (lambda v: loss(Function(v)), (imitated, 3), (doubled, 6)),
    "Function.locality": (lambda v: Objective(Function(imitated, v)).locality, ("batch", "batch"), ("term", "term")),
    "Function.times_advantage": (
        lambda v: bool(Objective(Function(imitated, "term", v)).requirements.zero_advantage_reason),
        (False, True),
        (True, False),
    ),
    "Function.reads": (
        lambda v: Objective(Function(imitated, reads=v)).requirements.ref,
        ((), False),
        (("ref",), True),
    ),
    "Rejection.ratio": (lambda v: gate(v, high=1.5, given={"to_old": log(2)}), (MISMATCH, -2), (OLD, 0)),
    "Rejection.stat": (lambda v: gate(stat=v, high=1.5, given={"of_old": -2.0}), ("ratio", -1), ("abs", 0)),
    "Rejection.level": (
        lambda v: gate(level=v, high=1.5, given={"of_old": (log(1.2), log(1.3))}),
        (Aggregation(), -2),
        (PRODUCT, 0),
    ),
    "Rejection.low": (lambda v: gate(low=v, high=2.0, given={"of_old": log(0.25)}), (None, -1), (0.5, 0)),
    "Rejection.high": (lambda v: gate(low=0.1, high=v, given={"of_old": log(3)}), (None, -1), (2.0, 0)),
    "Rejection.when": (
        lambda v: gate(high=2.0, when=v, given={"of_old": log(3), "a": (1.0, -1.0)}),
        ("always", 0),
        ("A>0", 1),
    ),
    "Rejection.drops": (lambda v: gate(high=2.0, drops=v, given=THREE_FALLS), (None, -1), ("trace", 0)),
    # The mean of both is e^(log 5 / 2) = 2.2, of the one that the first gate left 1.
    "Rejection.terms": (
        lambda v: gate(
            MISMATCH, Rejection(MISMATCH, high=4.0), level=MEAN, high=1.5, terms=v, given={"of_old": (0.0, log(5))}
        ),
        ("all", 0),
        ("kept", -1),
    ),
    "RejectionBudget.ratio": (
        lambda v: budget(ratio=v, given={"of_old": (0.0, 1.0)}),
        (MISMATCH, -1),
        (Ratio("old", "ref"), -2),
    ),
    # (0 + 0.2^2) / 2 = 0.02 and (0 + 0.2) / 2 = 0.1 against 0.04.
    "RejectionBudget.stat": (lambda v: budget(stat=v, given={"of_old": (0.0, 0.2)}), ("square", -2), ("abs", -1)),
    "RejectionBudget.mean": (lambda v: budget(mean=v, given={"of_old": (0.0, 0.2)}), (0.04, -2), (0.01, -1)),
    # 0.3^2 / 4 = 0.0225 over all, 0.3^2 / 2 = 0.045 over the two that the gate on old/ref left.
    "RejectionBudget.terms": (
        lambda v: budget(
            Rejection(Ratio("old", "ref"), high=2.0),
            terms=v,
            given={"of_old": (0.0, 0.0, 0.0, 0.3), "to_ref": (log(3), log(3), 0.0, 0.0)},
        ),
        ("all", -2),
        ("kept", -1),
    ),
    # (0.3^2 + 0.2^2) / 2 = 0.065 over all, 0.2^2 over the one with A < 0 and a ratio below 1.
    "RejectionBudget.quadrants": (
        lambda v: budget(quadrants=v, given={"of_old": (0.3, -0.2), "a": -1.0}),
        ("all", 1),
        ("active", 2),
    ),
    # Quantiles of 1, 2, 3, 4: 2.5 and 3.25.
    "TopEntropy.share": (
        lambda v: kept(TopEntropy(v, "microbatch"), entropy=(1.0, 2.0, 3.0, 4.0)),
        (0.5, 2),
        (0.25, 1),
    ),
    "TopEntropy.scope": (
        lambda v: refused(lambda: kept(TopEntropy(0.5, v), entropy=(1.0, 2.0, 3.0, 4.0))),
        ("step", "refused"),
        ("microbatch", 2),
    ),
    "DropCovariance.share": (lambda v: kept(DropCovariance(v, 0.5, 2.0, "microbatch")), (0.25, 3), (0.5, 2)),
    "DropCovariance.low": (lambda v: kept(DropCovariance(0.5, v, 2.0, "microbatch")), (0.5, 2), (1.5, 4)),
    "DropCovariance.high": (lambda v: kept(DropCovariance(0.5, 0.5, v, "microbatch")), (2.0, 2), (0.9, 4)),
    "DropCovariance.scope": (
        lambda v: refused(lambda: kept(DropCovariance(0.5, 0.5, 2.0, v))),
        ("step", "refused"),
        ("microbatch", 2),
    ),
    # The scale of each of the four is a quarter, and so is its covariance.
    "DropCovariance.scaled": (
        lambda v: kept(DropCovariance(0.5, 0.5, 2, "microbatch", v), Reduce()),
        (False, 2),
        (True, 4),
    ),
    "TopCovariance.share": (lambda v: selected(share=v, scope="microbatch"), (0.25, 1), (0.5, 2)),
    "TopCovariance.scope": (
        lambda v: refused(lambda: selected(share=0.25, scope=v)),
        ("step", "refused"),
        ("microbatch", 1),
    ),
    # Of covariances 0.75, 1.25, 0.75, 2.25 the last; with the scales 1/2, 1/6, 1/6, 1/6 it is 0.88, 0.13, 0.21, 0.63.
    "TopCovariance.scaled": (
        lambda v: penalty((1.0, 2.0, 3.0, 4.0), where=TopCovariance(0.25, "microbatch", v), parts=MEANS, terms=UNEVEN)[
            2
        ],
        (False, 4),
        (True, 1),
    ),
    "Weight.ratio": (lambda v: weight(log(2), v, to_old=log(3)), (MISMATCH, 6), (DIRECT, 18)),
    "Weight.level": (lambda v: weight((log(2), log(3)), level=v), (Aggregation(), 15), (PRODUCT, 36)),
    "Weight.transform": (lambda v: weight(log(3), transform=v), (Identity(), 9), (Truncate(0, 2), 6)),
    "Weight.when": (lambda v: weight(log(3), when=v), ("always", 9), ("A<0", 3)),
    "Weight.normalize": (lambda v: weight((0.0, log(3)), normalize=v), (False, 12), (True, 6)),
    # gamma(1) times 2, or gamma(2) = e 2 e^-2.
    "Weight.absorbs": (
        lambda v: weight(log(2), OLD, ABSORBED, transform=Gamma(1, 1), absorbs=v),
        (False, 6),
        (True, 6 / e),
    ),
    "Truncate.low": (lambda v: weight(log(0.25), transform=Truncate(low=v)), (0.0, 0.75), (0.5, 1.5)),
    "Truncate.below_one": (
        lambda v: weight(log(3), transform=Truncate(0, 0.5 if v else 2, v)),
        (False, 6),
        (True, 1.5),
    ),
    "Truncate.high": (lambda v: weight(log(3), transform=Truncate(high=v)), (2.0, 6), (4.0, 9)),
    "MaskOutside.low": (lambda v: weight(log(0.6), transform=MaskOutside(low=v)), (0.5, 1.8), (0.8, 0)),
    "MaskOutside.high": (lambda v: weight(log(3), transform=MaskOutside(high=v)), (5.0, 9), (2.0, 0)),
    "MaskOutside.strict": (lambda v: weight(0.0, transform=MaskOutside(1.0, 2.0, strict=v)), (False, 3), (True, 0)),
    "Gamma.power": (lambda v: weight(log(2), transform=Gamma(v, 1)), (1, 6 / e), (2, 12 / e)),
    "Gamma.rate": (lambda v: weight(log(2), transform=Gamma(1, v)), (1, 6 / e), (2, 6 / e**2)),
    "Inverse.high": (lambda v: weight(0.0, OLD, to_old=log(0.25), transform=Inverse(v)), (3.0, 9), (5.0, 12)),
    # Two terms at r = 1.1: f is 1.1^(1 + 1/2) and 1.1 with a half-life of one term, 1.1^(1 + 1/4) with half of it.
    "FutureClip.half_life": (lambda v: future(half_life=v), (1.0, -(1.1**2.5) - 1.21), (0.5, -(1.1**2.25) - 1.21)),
    "FutureClip.max_factor": (lambda v: future(half_life=1.0, max_factor=v), (1.2, -(1.1**2.5) - 1.21), (1.05, -2.31)),
    "FutureClip.low": (lambda v: future(-1.0, 0.5, low=v), (0.2, 0.8), (0.4, 0.6)),
    "FutureClip.high": (lambda v: future(1.0, 2.0, high=v), (0.28, -1.28 * 1.2), (0.5, -1.5 * 1.2)),
    # Above `dual` a term is no sign of the future either.
    "FutureClip.dual": (lambda v: future(-1.0, 2.0, dual=v), (10.0, 2.4), (1.5, 1.5)),
    "Gaussian.sigma": (lambda v: weight(1.0, transform=Gaussian(v)), (1.0, 3 * exp(-0.5)), (0.5, 3 * exp(-2))),
    "Penalty.ratio": (lambda v: penalty(2.0, ratio=v, terms={"to_old": 1.0})[0], (REF, 2), (OLD, 1)),
    "Penalty.kind": (lambda v: penalty(-2.0, kind=v)[0], ("k1", -2), ("k3", e**2 - 3)),
    "Penalty.coef": (lambda v: penalty(2.0, coef=v)[0], (1.0, 2), (3.0, 6)),
    "Penalty.masked": (
        lambda v: penalty(2.0, masked=v, parts={"rejections": (FALLS,)}, terms=THREE_FALLS)[0],
        (False, 4),
        (True, 2),
    ),
    "Penalty.weighted": (
        lambda v: penalty(2.0, weighted=v, parts={"weights": (Weight(MISMATCH),)}, terms={"of_old": log(3)})[0],
        (False, 2),
        (True, 6),
    ),
    "Penalty.straight_through": (
        lambda v: penalty(1.0, kind="k3", straight_through=v)[1],
        (False, 1 - 1 / e),
        (True, 1),
    ),
    "Penalty.importance": (lambda v: penalty(2.0, importance=v, terms={"to_old": log(3)})[0], (None, 2), (OLD, 6)),
    "Penalty.importance_level": (
        lambda v: penalty((1.0, 0.0), importance=OLD, importance_level=v, terms=TWO)[0],
        (Aggregation(), 2),
        (PRODUCT, 6),
    ),
    # -2 + 5, and -1 + 1: it is held on both sides.
    "Penalty.cap": (lambda v: penalty((-2.0, 5.0), cap=v)[0], (None, 3), (1.0, 0)),
    "Penalty.where": (
        lambda v: penalty(1.0, where=v, terms={"a": (2.0, -2.0, 1.0, -1.0), "theta": (-1.0, -2.0, -3.0, -4.0)})[2],
        (None, 4),
        (TopCovariance(0.25, "microbatch"), 1),
    ),
    "Penalty.reduce": (lambda v: penalty(2.0, reduce=v)[0], (None, 2), (Reduce("constant", norm=4.0), 0.5)),
    # log theta - log ref, and log ref is -1.
    "Penalty.over": (
        lambda v: of_support(penalties=(replace(KL, over=v),)),
        ("support", -log(2) + 1),
        ("vocabulary", -log(8) + 1),
    ),
    "AdaptiveEntropy.target": (lambda v: control(v, target=v), (0.2, 0.095), (0.5, 0.105)),
    "AdaptiveEntropy.delta": (lambda v: control(v, delta=v), (0.005, 0.095), (0.05, 0.05)),
    "AdaptiveEntropy.low": (lambda v: control(v, delta=0.5, low=v), (0.0, 0), (0.05, 0.05)),
    "AdaptiveEntropy.high": (lambda v: control(v, entropy=0.1, delta=5.0, high=v), (1.0, 1), (0.3, 0.3)),
    "EntropyBonus.coef": (lambda v: bonus(coef=v), (1.0, -3), (2.0, -6)),
    "EntropyBonus.masked": (lambda v: bonus({"rejections": (FALLS,)}, masked=v), (False, -3), (True, -1)),
    "EntropyBonus.reduce": (lambda v: bonus(reduce=v), (None, -3), (Reduce("token"), -1.5)),
    "EntropyBonus.over": (
        lambda v: of_support(entropy=EntropyBonus(1.0, masked=False, over=v)),
        ("vocabulary", -log(8)),
        ("support", -log(2)),
    ),
    "EntropyBonus.adapt": (
        lambda v: (
            EntropyController(replace(presets.DAPO, entropy=EntropyBonus(0.1, masked=False, adapt=v))).applied().entropy
            is None
        ),
        (None, False),
        (AdaptiveEntropy(), True),
    ),
    "AdvantageShift.ratio": (lambda v: shift(ratio=v), (REF, 1.5), (OLD, 2.25)),
    "AdvantageShift.coef": (lambda v: shift(v), (0.5, 1.5), (0.25, 2.25)),
    # l is 1 and 3, and 11 at a term that fell: A - l / 2 sums to 0, less the mean of the kept, 2, to 2.
    "AdvantageShift.center": (
        lambda v: shift(center=v, terms={"to_ref": (1.0, 3.0, 11.0), "of_old": (0.0, 0.0, log(3))}),
        (None, 0),
        ("microbatch", 6),
    ),
    "Reduce.per": (lambda v: lengths(Reduce(v, None if v == "token" else "mean")), ("token", -2), ("trace", -3)),
    "Reduce.inner": (lambda v: lengths(Reduce("trace", v)), ("mean", -3), ("sum", -4)),
    "Reduce.norm": (lambda v: lengths(Reduce("trace", "sum", norm=v)), (None, -4), (2.0, -2)),
    "Reduce.denominator": (
        lambda v: gate(high=2.0, given={**THREE_FALLS, "reduce": Reduce(denominator=v)}),
        ("all", -0.5),
        ("kept", -1),
    ),
    "Objective.surrogate": (lambda v: loss(v, OLD, to_old=log(2)), (Clip(), -1.2), (Importance(), -2)),
    "Objective.ratio": (lambda v: loss(Importance(), v, to_old=log(3), of_old=log(2)), (OLD, -3), (DIRECT, -6)),
    "Objective.weights": (lambda v: loss(parts={"weights": v}, of_old=log(2)), ((), 3), ((Weight(MISMATCH),), 6)),
    "Objective.rejections": (lambda v: loss(parts={"rejections": v}, of_old=log(3)), ((), 3), ((FALLS,), 0)),
    "Objective.penalties": (lambda v: loss(parts={"penalties": v}, to_ref=2.0), ((), 3), ((KL,), 5)),
    "Objective.reduce": (lambda v: loss(reduce=v, a=(1.0, 1.0)), (SUM, 6), (Reduce(), 3)),
    "Objective.shifts": (lambda v: loss(parts={"shifts": v}, to_ref=1.0), ((), 3), ((AdvantageShift(REF, 0.5),), 1.5)),
    "Objective.entropy": (
        lambda v: loss(parts={"entropy": v}, entropy=1.0),
        (None, 3),
        (EntropyBonus(2.0, masked=False), 1),
    ),
}
DERIVED = {algebra.Requirements}
"""Made by an objective, not said by anybody."""


def parts() -> list[type]:
    """The dataclasses of the algebra."""
    return [
        each for each in vars(algebra).values() if isinstance(each, type) and is_dataclass(each) and each not in DERIVED
    ]


def agrees(found: Any, expected: Any) -> bool:
    if isinstance(expected, (str, bool)):
        return found == expected
    return not isinstance(found, str) and isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9)


def test_every_field_of_the_algebra_has_a_row():
    assert {f"{cls.__name__}.{each.name}" for cls in parts() for each in fields(cls)} == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_field_does_what_it_says(name):
    found, *pairs = ROWS[name]
    assert [agrees(found(value), expected) for value, expected in pairs] == [True, True], [found(v) for v, _ in pairs]


@pytest.mark.parametrize("name", ROWS)
def test_a_field_that_is_ignored_fails_its_row(name):
    found, (value, _), (other, expected) = ROWS[name]
    cls, field = name.split(".")
    with ignored(getattr(algebra, cls), field, value):
        try:
            seen = found(other)
        except Exception:  # it does not even come to a number
            return
        assert not agrees(seen, expected)
