"""integrations.gives: one comparison of what an objective takes with what a trainer gives."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import tracegrad as tg
from tracegrad import objective as algebra
from tracegrad.errors import ArgumentError
from tracegrad.integrations._common import INPUTS, TrainerInputs, required_inputs, same_scale
from tracegrad.objective import (
    Aggregation,
    EntropyBonus,
    Function,
    Objective,
    Ratio,
    Reduce,
    Rejection,
    Weight,
    presets,
    with_kl,
)

OLD, MISMATCH = Ratio("theta", "old"), Ratio("old", "rollout")


def plain(view):
    return -view.advantages * view.ratio


MINE = Objective(Function(plain, "term", times_advantage=True), OLD)
TAKEN = [
    (MINE, set()),
    (replace(MINE, surrogate=plain), {"advantages"}),
    (replace(MINE, surrogate=Function(plain, "term", True, reads=("ref", "entropy"))), {"ref", "entropy"}),
    (with_kl(MINE, 0.1), {"ref", "advantages"}),
    (replace(MINE, weights=(Weight(MISMATCH, Aggregation("turn", "sum")),)), {"rollout", "turn"}),
    (replace(MINE, weights=(Weight(MISMATCH, normalize=True),)), {"rollout", "step"}),
    (replace(MINE, rejections=(Rejection(MISMATCH, low=0.5, drops="group"),)), {"rollout", "group", "step"}),
    (replace(MINE, rejections=(Rejection(OLD, low=0.5, level=Aggregation("turn", "mean")),)), {"turn"}),
    (replace(MINE, rejections=(algebra.TopEntropy(0.2, "microbatch"),)), {"entropy"}),
    (replace(MINE, entropy=EntropyBonus(0.1, masked=False)), {"entropy"}),
    (replace(MINE, entropy=EntropyBonus(0.1, masked=False, reduce=Reduce("trace", "mean"))), {"entropy", "reductions"}),
    (replace(MINE, reduce=Reduce("prompt", "mean")), {"group_counts"}),
    (replace(MINE, reduce=Reduce("token", denominator="kept")), {"kept"}),
    (presets.A3PO, {"rollout", "proximal"}),
]


@pytest.mark.parametrize("place", range(len(TAKEN)))
def test_each_part_takes_what_it_reads(place):
    objective, expected = TAKEN[place]
    assert {thing for thing, _ in required_inputs(objective)} - {"old"} == expected
    TrainerInputs(frozenset(expected | {"old"}), "", "").check(objective)
    for lacking in expected:
        with pytest.raises(ArgumentError, match=rf"TG-INTEG-029.*{INPUTS[lacking]}"):
            TrainerInputs(frozenset(expected | {"old"}) - {lacking}, "why.", "", {lacking: "cure"}).check(objective)


def test_what_is_known_before_the_step_is_not_asked_for_where_it_is_corrected_elsewhere():
    weighed = replace(MINE, weights=(Weight(MISMATCH, normalize=True),))
    assert {thing for thing, _ in required_inputs(weighed, detached=False)} == {"old"}
    assert ("rollout", str(weighed.weights[0])) in set(required_inputs(weighed))


def test_all_that_is_lacking_is_said_at_once_with_each_cure():
    bare = TrainerInputs(frozenset(), "It gives no more.", "Take another.", {"ref": "Load one."})
    with pytest.raises(ArgumentError, match=r"TG-INTEG-029.*plain\(view.*0\.1.*\*.*k3\(theta/ref"):
        bare.check(with_kl(MINE, 0.1))


def test_denominators_are_compared_by_their_kind():
    modes = {"token-mean": ("token", None)}
    same_scale("mode", "token-mean", modes, MINE)
    for mode, objective in (("token-mean", presets.GRPO), ("other", MINE)):
        with pytest.raises(ArgumentError, match=rf"TG-INTEG-003.*{mode}"):
            same_scale("mode", mode, modes, objective)


def test_no_integration_asks_a_part_for_its_class():
    kinds = {name for name in dir(algebra) if isinstance(getattr(algebra, name), type)}
    for path in (Path(tg.__file__).parent / "integrations").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                assert not kinds & set(ast.unparse(node.args[1]).replace("|", " ").split()), path
