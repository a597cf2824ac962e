"""recipes.for_data: the recipe for a recording, by what is measured on it."""

from dataclasses import replace

import numpy as np
import pytest

import tracegrad as tg
from tracegrad.errors import ArgumentError
from tracegrad.objective import presets
from tracegrad.recipes.recommendation import Measurements, advise, for_data, measure

TERMS = 40


def recorded(lost=0, kind="processed", temperature=1.0, version=None):
    """10 traces of 4 terms; logprobs from -0.1 to -4 nats, `lost` of them missing."""
    trainable = np.tile([False, True, True, True, True], 10)
    logprobs = np.full(50, np.nan, np.float32)
    logprobs[trainable] = -np.linspace(0.1, 4.0, TERMS)
    logprobs[np.flatnonzero(trainable)[:lost]] = np.nan
    s = tg.Sequences.from_arrays(
        np.arange(50), np.arange(0, 51, 5), logprobs, trainable, logprob_kind=kind, version=version
    )
    return replace(s, temperature=np.full(10, temperature, np.float32))


def test_what_is_measured_by_hand():
    # 40 terms, 10 lost. Of the 30 known, 3 have old = rollout - 1 (ratio 0.37), the others old = rollout.
    # KL = 3 / 30 = 0.1; outside 3 / 30; weights 27 of 1 and 3 of e^-1: (27 + 3 e^-1)^2 / (27 + 3 e^-2) / 30.
    s = recorded(lost=10)
    old = np.nan_to_num(s.rollout_logprobs[s.terms], nan=-1.0)
    old[-3:] -= 1.0
    found = measure(s, old)
    assert (found.terms, found.missing, found.kinds, found.raw_temperature, found.staleness) == (
        40,
        0.25,
        ("processed",),
        False,
        None,
    )
    kish = (27 + 3 * np.exp(-1)) ** 2 / (27 + 3 * np.exp(-2)) / 30
    assert (found.kl, found.outside, found.ess) == pytest.approx((0.1, 0.1, kish), rel=1e-6)
    by_token = np.full(s.tokens, np.nan)
    by_token[s.terms] = old
    assert measure(s, by_token) == found


def test_the_lag_is_of_the_middle_term_and_only_what_is_hot_beside_raw_logprobs_counts():
    version = np.repeat([100, 90], 25)
    assert measure(recorded(version=version)).staleness == 5.0  # 20 terms 0 behind, 20 terms 10 behind
    assert [measure(recorded(kind=kind, temperature=1.3)).raw_temperature for kind in ("processed", "raw")] == [
        False,
        True,
    ]
    assert not measure(recorded(kind="raw")).raw_temperature
    assert not measure(recorded(kind="raw", temperature=np.nan)).raw_temperature


CLEAN = Measurements(1000, 0.0, ("processed",), False, kl=0.001, outside=0.004, ess=0.98, staleness=0.0)
RULES = [
    (CLEAN, "DAPO", "outside"),
    (replace(CLEAN, outside=0.02, ess=0.97), "DAPO", "up to 16 versions"),
    (replace(CLEAN, outside=0.2, ess=0.7), "DAPO", "differ more than in any"),
    (replace(CLEAN, outside=0.6, ess=0.3), "TOPR_POSITIVE", "another model"),
    (replace(CLEAN, outside=0.3, ess=0.1), "M2PO", "ESS"),
    (replace(CLEAN, staleness=200.0), "OAPL", "versions"),
    (replace(CLEAN, missing=1.0, kl=None, outside=None, ess=None), "TOPR_POSITIVE", "recorded logprobs"),
    (replace(CLEAN, kl=None, outside=None, ess=None), "DAPO", "not compared"),
    (replace(CLEAN, raw_temperature=True, kinds=("raw",)), "DAPO", "record processed logprobs"),
]


@pytest.mark.parametrize("place", range(len(RULES)))
def test_each_rule_says_its_recipe_two_sentences_and_the_figure_that_decided(place):
    measured, name, told = RULES[place]
    found = advise(measured)
    assert (found.name, found.recipe.objective) == (name, getattr(presets, name))
    assert told in f"{found.reason} {found.evidence}"
    assert found.reason.count(". ") == 1
    assert found.reason.endswith(".")
    assert found.measured is measured
    assert dict(found.options)["objective"] == name
    assert str(found).startswith(f"{name}: ")


def test_missing_logprobs_are_neutral_only_where_the_policies_are_seen_to_agree():
    half = replace(CLEAN, missing=0.5)
    for measured, expected in (
        (half, "ratio_one"),
        (replace(half, outside=0.02), "mask"),
        (replace(half, outside=None), "mask"),
    ):
        found = advise(measured)
        assert (found.name, found.recipe.missing_logprobs) == ("DAPO", expected)
        assert "missing: 50.0%" in found.evidence
    assert advise(replace(CLEAN, missing=0.04)).recipe.missing_logprobs is None


def test_it_refuses_what_it_cannot_measure():
    s = recorded()
    with pytest.raises(ArgumentError, match=r"TG-RECIPE-013.*3.*40.*50"):
        for_data(s, old=[-1.0, -1.0, -1.0])
    nothing = replace(s, trainable=np.zeros(50, bool))
    with pytest.raises(ArgumentError, match="TG-RECIPE-012"):
        for_data(nothing)
