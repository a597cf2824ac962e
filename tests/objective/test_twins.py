"""The torch twin of gates and weights against the core: the same statistic, level, bound and shape on the same numbers.

A part on theta/rollout evaluated in torch, with the old logprobs in the place of those being trained, must do what the
same part on old/rollout does in Rust. The tables below are the algebra's own lists.
"""

import itertools

import pytest
import torch

from tracegrad.objective import (
    Aggregation,
    Gamma,
    Gaussian,
    Identity,
    MaskOutside,
    Objective,
    PolicyGradient,
    Ratio,
    Rejection,
    Truncate,
    Weight,
)
from tracegrad.objective.correction import correct
from tracegrad.objective.ratio import CONDITION_SIGNS
from tracegrad.objective.rejection import STATS
from tracegrad.objective.torch_loss import Terms, evaluate

SIZE = 150
AGGS = ("sum", "mean", "max", "prefix_sum", "prefix_min")
LEVELS = [("token", None)] + [
    (over, agg)
    for over, agg in itertools.product(("turn", "trace", "group", "batch"), AGGS)
    if over in ("turn", "trace") or not agg.startswith("prefix")
]
BOUNDS = {
    "ratio": (0.8, 1.3),
    "k1": (-0.2, 0.3),
    "k2": (None, 0.05),
    "k3": (None, 0.05),
    "abs": (None, 0.3),
    "square": (None, 0.1),
    "dprob": (-0.05, 0.06),
    "binary_kl": (-0.01, 0.01),
}
assert BOUNDS.keys() == set(STATS), "each statistic of a gate has bounds here at which some terms fall and some stay"
SHAPES = [
    Identity(),
    Truncate(0.5, 2.0),
    MaskOutside(0.8, 1.25),
    MaskOutside(0.8, 1.25, strict=True),
    Gamma(2.0, 3.0),
    Gaussian(0.5),
]


def arrays(seed, dtype=torch.float64):
    """Terms of 12 interleaved traces in 4 groups, with missing rollout logprobs, outliers and a trace without any."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(SIZE, generator=generator, dtype=torch.float64) * 3 - 0.01
    spread = torch.tensor([0.02, 0.1, 0.4, 1.0], dtype=torch.float64)
    trace = torch.randint(0, 12, (SIZE,), generator=generator)
    old = rollout + spread[trace % 4] * torch.randn(SIZE, generator=generator, dtype=torch.float64)
    rollout[3], old[3] = -30.0, -0.1  # beyond the limit of 20
    rollout[torch.rand(SIZE, generator=generator) < 0.1] = float("nan")
    rollout[trace == 11] = float("nan")
    advantages = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    advantages[::9] = 0.0
    return {
        "old": old.clamp(max=-1e-3).to(dtype),
        "rollout": rollout.to(dtype),
        "advantages": advantages.to(dtype),
        "trace": trace,
        "turn": torch.randint(0, 3, (SIZE,), generator=generator),
        "group": trace // 3,
    }


def level_of(over, agg, theta, **options):
    """The level; a statistic of the trained policy says that it reaches over a micro-batch only."""
    wide = {"scope": "microbatch"} if theta and over in ("group", "batch") else {}
    return Aggregation(over, agg, **wide, **options)


def both(data, missing, rejections=((), ()), weights=((), ())):
    """(keep, weight) of the torch twin and of the core; the parts are given on theta/rollout and on old/rollout."""
    given = {name: data[name] for name in ("trace", "turn", "group", "advantages")}
    ids = {name: value.numpy() for name, value in given.items()}
    old, rollout = data["old"].numpy(), data["rollout"].numpy()
    plain = correct(old, rollout, missing_logprobs=missing, **ids)
    core = correct(old, rollout, missing_logprobs=missing, rejections=rejections[1], weights=weights[1], **ids)
    terms = Terms(rollout=data["rollout"], scale=torch.ones(SIZE), keep=plain.keep, **given)
    objective = Objective(PolicyGradient(), weights=weights[0], rejections=rejections[0])
    twin = evaluate(objective, data["old"], None, terms).per_term
    return (twin.keep, twin.weight), (torch.from_numpy(core.keep.copy()), torch.from_numpy(core.weight.copy()))


def gate_of(theta, stat, over, agg, when, drops, kept):
    low, high = BOUNDS[stat]
    ratio = Ratio("theta" if theta else "old", "rollout")
    return Rejection(ratio, stat, level_of(over, agg, theta), low, high, when, drops, "kept" if kept else "all")


def possible(over, agg, drops, kept):
    reach = ("token", "turn", "trace", "group", "batch")
    return not (drops and reach.index(drops) <= reach.index(over)) and not (kept and over == "token")


GATES = [
    case
    for case in itertools.product(STATS, LEVELS, (None, "turn", "trace"), (False, True))
    if possible(*case[1], *case[2:])
]
SIGNS = list(CONDITION_SIGNS)


@pytest.mark.parametrize("missing", ["mask", "ratio_one"])
@pytest.mark.parametrize("stat", STATS)
def test_gates_keep_the_same_terms(stat, missing):
    outcomes = set()
    for place, (name, (over, agg), drops, kept) in enumerate(GATES):
        if name != stat:
            continue
        data = arrays(place % 7)
        before = [(Rejection(Ratio(num, "rollout"), low=0.9, high=1.6),) if kept else () for num in ("theta", "old")]
        gates = [before[at] + (gate_of(at == 0, stat, over, agg, SIGNS[place % 5], drops, kept),) for at in (0, 1)]
        twin, core = both(data, missing, rejections=gates)
        assert torch.equal(twin[0], core[0]), f"{gates[1][-1]}: {int((twin[0] != core[0]).sum())} terms differ"
        dropped = int((~core[0] & ~data["rollout"].isnan()).sum())
        outcomes.add((over, agg, 0 < dropped < 0.9 * SIZE))
    assert {(over, agg, True) for over, agg in LEVELS if over not in ("group", "batch")} <= outcomes


WEIGHTS = [
    case
    for case in itertools.product(SHAPES, LEVELS, (False, True), (None, "arithmetic", "geometric"))
    if case[1][0] != "token" or not (case[2] or case[3])
]


@pytest.mark.parametrize("missing", ["mask", "ratio_one"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_are_the_same(shape, missing):
    values = set()
    for place, (each, (over, agg), kept, blend) in enumerate(WEIGHTS):
        if each != shape:
            continue
        data, options = arrays(place % 7), {"terms": "kept" if kept else "all", "blend": blend}
        gates = [(Rejection(Ratio(num, "rollout"), low=0.9, high=1.6),) if kept else () for num in ("theta", "old")]
        weights = [
            (Weight(Ratio(num, "rollout"), level_of(over, agg, num == "theta", **options), shape, SIGNS[place % 5]),)
            for num in ("theta", "old")
        ]
        twin, core = both(data, missing, gates, weights)
        assert torch.equal(twin[0], core[0])
        said = f"{weights[1][0]} ({missing})"
        torch.testing.assert_close(
            twin[1][twin[0]], core[1][twin[0]], rtol=1e-12, atol=1e-30, msg=lambda m, s=said: s + m
        )
        values.update(core[1][twin[0]].tolist())
    assert len(values) > 10


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("level", [("token", None), ("trace", "sum"), ("trace", "mean"), ("turn", "prefix_sum")])
def test_weights_are_the_same_in_float32(level, shape):
    data = arrays(1, torch.float32)
    weights = [(Weight(Ratio(num, "rollout"), Aggregation(*level), shape),) for num in ("theta", "old")]
    twin, core = both(data, "mask", weights=weights)
    assert twin[1].dtype == core[1].dtype == torch.float32
    torch.testing.assert_close(twin[1][twin[0]], core[1][twin[0]], rtol=2e-5, atol=1e-30)


def test_gates_of_the_reference_and_of_old_against_ref_are_the_same():
    data = arrays(2)
    ref = data["old"] - 0.1 * torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).double()
    ref = ref.clamp(max=-1e-3)
    ids = {name: data[name].numpy() for name in ("trace", "advantages")}
    for stat in STATS:
        low, high = BOUNDS[stat]
        core = correct(
            data["old"].numpy(),
            None,
            ref=ref.numpy(),
            rejections=[Rejection(Ratio("old", "ref"), stat, Aggregation(), low, high)],
            **ids,
        )
        given = {name: data[name] for name in ("trace", "advantages")}
        objective = Objective(
            PolicyGradient(), rejections=(Rejection(Ratio("theta", "ref"), stat, Aggregation(), low, high),)
        )
        twin = evaluate(objective, data["old"], None, Terms(ref=ref, scale=torch.ones(SIZE), **given)).per_term
        assert twin.keep.tolist() == core.keep.tolist()
        assert 0 < core.keep.sum() < SIZE
