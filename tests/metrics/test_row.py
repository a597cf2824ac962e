"""The row of a step: what it says does not depend on how the step was cut into rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from forked import forked
from tracegrad import metrics
from tracegrad.alignment.sequences import Sequences
from tracegrad.objective import presets
from tracegrad.objective.correction import Correction
from tracegrad.packing import pack
from tracegrad.trainer.step import StepResult
from tracegrad.trainer.step_metrics import step_metrics

SHARES = {row.name for row in metrics.METRICS if row.unit == "share"} - {"device_idle"}
"""Metrics that are a part of a whole."""
OF_THE_HELD_OUT = {"ope_ess_fraction"}
OF_A_CELL = {"gradient_share"}
OF_A_RUN = {"completions/clipped_ratio", "tools/failure_frequency"}
"""Made of the sequences of a step, and of what was played; `metrics.completions` and `metrics.tools` have tests."""


def outcome_of(step, tokens, seed):
    """What a step saw: numbers drawn for each token of the sequences, so that they are those of any other cut."""
    rng = np.random.default_rng(seed)
    drawn = {name: rng.normal(-1, 1, tokens).astype(np.float32) for name in ("logprobs", "old", "gradient")}
    drawn = {name: values[step.origin] for name, values in drawn.items()}
    keep, clipped = (rng.random(tokens)[step.origin] < share for share in (0.8, 0.3))
    weight = np.exp(drawn["old"] - np.nan_to_num(step.rollout_logprobs, nan=-1.0)).astype(np.float32)
    corrected = Correction(weight, keep, np.ones(len(step), np.float32), {}, {})
    ratio = np.exp(drawn["logprobs"] - drawn["old"]).astype(np.float32)
    arrays = {"logprobs": drawn["logprobs"], "entropy": -drawn["logprobs"], "gradient": drawn["gradient"]}
    arrays |= {"ratio": ratio, "weight": weight, "keep": keep, "clipped": clipped & keep}
    return step.with_logprobs(old=drawn["old"]), StepResult(0.0, 1.0, corrected, **arrays)


def shares(sequences, advantages, rewards, seed, **how):
    """Each share of the only step."""
    [step] = pack(sequences, advantages, per="trace", **how)
    step, outcome = outcome_of(step, sequences.tokens, seed)
    row = step_metrics(step, outcome, presets.DAPO, newest=3, rewards=rewards)
    return {name: value for name, value in row.items() if name.partition("/")[0] in SHARES}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), more=st.integers(0, 6), budget=st.integers(49, 200))
def test_every_share_lies_between_0_and_1_and_does_not_depend_on_the_cut(seed, more, budget):
    case = forked(seed, more)
    s, advantages = case.sequences, case.advantages
    rewards = np.random.default_rng(seed).integers(0, 2, s.traces).astype(np.float32)
    whole = shares(s, advantages, rewards, seed, tokens_per_row=4096)
    assert {name for name in whole if "/" not in name} == SHARES - OF_THE_HELD_OUT - OF_A_CELL - OF_A_RUN
    cuts = [{"tokens_per_row": budget}, {"tokens_per_row": budget, "pad_to_multiple_of": 8}]
    cuts += [{**cut, "share_prefixes": True} for cut in ({"tokens_per_row": 4096}, *cuts)]
    for cut in cuts:
        found = shares(s, advantages, rewards, seed, **cut)
        assert found.keys() == whole.keys()
        for name, value in found.items():
            assert np.isnan(value) or 0 <= value <= 1, (name, value, cut)
            assert value == pytest.approx(whole[name], rel=1e-9, nan_ok=True), (name, cut)


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_tokens_of_all_kinds_are_those_of_the_branches_however_many_rows_hold_once(share_prefixes):
    # Four equal traces of 2 prompt and 4 sampled tokens: 16 of 24 have a logprob; as a tree they are 6 tokens.
    ids, trainable = [1, 2, 3, 4, 5, 6] * 4, [False, False, True, True, True, True] * 4
    s = Sequences.from_arrays(ids, np.arange(5) * 6, np.full(24, -1.0), trainable, group=[0] * 4)
    [step] = pack(s, [1.0, -1.0, 1.0, -1.0], tokens_per_row=64, share_prefixes=share_prefixes)
    assert sum(batch.tokens for batch in step.batches) == (6 if share_prefixes else 24)
    assert step.branch_tokens == 24
    step, outcome = outcome_of(step, 24, 0)
    row = step_metrics(step, outcome, presets.DAPO)
    assert row["rollout_logprob_coverage_all"] == pytest.approx(16 / 24)
    assert row["rollout_logprob_coverage"] == 1.0


def test_tokens_of_all_kinds_end_with_the_last_term_of_a_branch():
    # Branches of 4 and 3 tokens whose last terms are their third and second: 5 tokens. Of 3 terms 2 have a logprob.
    ids, trainable = [1, 2, 3, 9, 1, 4, 9], [False, True, True, False, False, True, False]
    s = Sequences.from_arrays(ids, [0, 4, 7], [np.nan, -1, np.nan, np.nan, np.nan, -1, np.nan], trainable, group=[0, 0])
    [step] = pack(s, [1.0, -1.0], tokens_per_row=64)
    step, outcome = outcome_of(step, 7, 0)
    assert step_metrics(step, outcome, presets.DAPO)["rollout_logprob_coverage_all"] == pytest.approx(2 / 5)
