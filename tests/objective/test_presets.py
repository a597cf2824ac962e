"""presets: each value says what its paper says, in both forms, and is found by its name."""

from pathlib import Path

import pytest

from generate_docs import PRESETS, families, losses_page
from tracegrad import objective
from tracegrad.errors import ArgumentError
from tracegrad.objective import Clip, Objective, Ratio, Reduce, Requirements, Truncate, presets
from tracegrad.objective.serialize import to_source

NAMES = [name for name in presets.__all__ if isinstance(getattr(presets, name), Objective)]


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
    assert [(w.ratio, w.level.over, w.transform) for w in decoupled.weights] == [
        (Ratio("old", "rollout"), "token", Truncate(0.0, 2.0))
    ]
    assert direct.ratio == Ratio("theta", "rollout")
    assert direct.weights == ()
    assert direct.requirements == Requirements(old=False, rollout=True, ref=False, trace_ratio=False)


def test_weighted_sft_needs_no_logprob_at_all():
    assert presets.WEIGHTED_SFT.requirements == Requirements(old=False, rollout=False, ref=False, trace_ratio=False)


def test_a_name_is_an_attribute_or_module_and_name():
    assert presets.find("tracegrad.objective.presets:DAPO") is presets.DAPO
    with pytest.raises(ArgumentError, match=r"TG-OBJ-027.*Did.*you"):
        presets.find("DAPPO")
    with pytest.raises(ArgumentError, match=r"TG-OBJ-026.*No.*named.*no_such_module"):
        presets.find("no_such_module:X")
    with pytest.raises(ArgumentError, match="TG-OBJ-027"):
        presets.find("find")


def test_everything_exported_is_an_objective_or_a_function():
    values = [getattr(presets, name) for name in presets.__all__]
    assert all(isinstance(value, Objective) or callable(value) for value in values)


def test_the_page_of_losses_is_the_one_that_the_code_makes():
    page = Path(__file__).parents[2] / "docs" / "reference" / "losses.md"
    assert page.read_text(encoding="utf-8") == losses_page()


def test_every_preset_stands_on_the_page_with_its_paper():
    told = {name: text for name, (_, text) in PRESETS.items()}
    assert set(told) == set(NAMES)
    assert sorted(name for _, _, names in families() for name in names) == sorted(NAMES)
    assert not [name for name, text in told.items() if "Paper:" not in text]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_what_its_code_and_its_formula_say(name):
    value = getattr(presets, name)
    assert eval(to_source(value), vars(objective)) == value
    text = str(value)
    assert text.startswith("loss = sum of scale * keep")
    assert text.count("\n  rejection: ") == len(value.rejections)
    assert text.endswith(f"\n  scale = {value.reduce}")
