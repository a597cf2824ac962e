"""presets: each value says what its paper says, in both forms, and is found by its name."""

import pytest

from tracegrad import presets
from tracegrad.algebra import Clamp, Clip, Needs, Objective, Ratio, Reduce
from tracegrad.errors import ArgumentError


@pytest.mark.parametrize(
    ("name", "clip", "reduce"),
    [
        ("GRPO", Clip(0.2, 0.2), Reduce("trace", "mean")),
        ("DAPO", Clip(0.2, 0.28), Reduce("token")),
        ("DR_GRPO", Clip(0.2, 0.2), Reduce("trace", "sum", norm=1024.0)),
    ],
)
def test_each_method_has_a_decoupled_and_a_direct_form(name, clip, reduce):
    decoupled, direct = presets.find(name), presets.find(f"{name}_DIRECT")
    assert decoupled.surrogate == direct.surrogate == clip
    assert decoupled.reduce == direct.reduce == reduce
    assert decoupled.ratio == Ratio("theta", "old")
    assert [(w.ratio, w.level.over, w.shape) for w in decoupled.weights] == [
        (Ratio("old", "rollout"), "token", Clamp(0.0, 2.0))
    ]
    assert direct.ratio == Ratio("theta", "rollout")
    assert direct.weights == ()
    assert direct.needs == Needs(old=False, rollout=True, ref=False, trace_ratio=False)


def test_weighted_sft_needs_no_logprob_at_all():
    assert presets.WEIGHTED_SFT.needs == Needs(old=False, rollout=False, ref=False, trace_ratio=False)


def test_a_name_is_an_attribute_or_module_and_name():
    assert presets.find("tracegrad.presets.grpo:DAPO") is presets.DAPO
    with pytest.raises(ArgumentError, match="Did you mean DAPO"):
        presets.find("DAPPO")
    with pytest.raises(ArgumentError, match="no module 'no_such_module'"):
        presets.find("no_such_module:X")
    with pytest.raises(ArgumentError, match="no objective is called 'find'"):
        presets.find("find")


def test_everything_exported_is_an_objective_or_a_function():
    values = [getattr(presets, name) for name in presets.__all__]
    assert all(isinstance(value, Objective) or callable(value) for value in values)
