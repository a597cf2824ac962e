"""correction: weights, gates and denominators in every layout, against hand-worked numbers and TRL's code."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegrad.errors import ArgumentError
from tracegrad.objective import Aggregation, Identity, MaskOutside, Ratio, Reduce, Rejection, Truncate, Weight, presets
from tracegrad.objective.correction import correct, proximal_alpha

NAN = float("nan")
MISMATCH = Ratio("old", "rollout")
TIS = Weight(MISMATCH, transform=Truncate(0.0, 2.0))
OLD = np.array([-1.0, -0.5, -2.0, -1.0, -0.3])
ROLLOUT = np.array([-1.2, -2.5, NAN, -1.0, -0.4])
TRACE = np.array([0, 0, 0, 1, 1])


def test_a_truncated_token_weight_by_hand():
    # e^0.2, e^2 -> 2, missing -> 0, e^0, e^0.1
    found = correct(OLD, ROLLOUT, trace=TRACE, weights=[TIS])
    np.testing.assert_allclose(found.weight, [np.exp(0.2), 2.0, 0.0, 1.0, np.exp(0.1)], rtol=1e-15)
    assert found.keep.tolist() == [True, True, False, True, True]
    assert found.weight.dtype == found.scale.dtype == np.float64


def test_metrics_by_hand():
    found = correct(OLD, ROLLOUT, trace=TRACE, weights=[TIS]).metrics
    # Log-ratios 0.2, 2, 0, 0.1: the second weight is held at 2.
    expected = {
        "terms": 5,
        "missing": 1,
        "frac_missing": 0.2,
        "kept": 4,
        "masked_fraction": 0.0,
        "truncated_fraction": 0.25,
        "clamped": 0,
        "clamped_levels": 0,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-12), name


def test_float32_is_computed_in_float32_and_close_to_float64():
    generator = np.random.default_rng(0)
    rollout = -generator.exponential(2.0, 5000)
    old = rollout + generator.normal(0, 1.5, 5000)
    trace = np.arange(5000) // 50
    weights = [TIS, Weight(MISMATCH, Aggregation("trace", "mean"), Identity())]
    wide = correct(old, rollout, trace=trace, weights=weights)
    found = correct(old.astype(np.float32), rollout.astype(np.float32), trace=trace, weights=weights)
    assert found.weight.dtype == np.float32
    np.testing.assert_allclose(found.weight, wide.weight, rtol=5e-6)
    for name, value in wide.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-4), name


class TestMissing:
    def test_masked_terms_stand_outside_level_means(self):
        # trace 0: mean of 0.2 and 2.0
        found = correct(OLD, ROLLOUT, trace=TRACE, weights=[Weight(MISMATCH, Aggregation("trace", "mean"))])
        np.testing.assert_allclose(found.weight[:3], [np.exp(1.1), np.exp(1.1), 0.0])

    def test_masked_terms_stand_inside_all_denominators_and_outside_kept_ones(self):
        every = correct(OLD, ROLLOUT, trace=TRACE, reduce=Reduce("trace", "mean"))
        np.testing.assert_allclose(every.scale, [1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4])
        kept = correct(OLD, ROLLOUT, trace=TRACE, reduce=Reduce("trace", "mean", denominator="kept"))
        np.testing.assert_allclose(kept.scale, [1 / 4] * 5)
        assert correct(OLD, ROLLOUT, trace=TRACE, reduce=Reduce("token")).scale[0] == 1 / 5
        assert correct(OLD, ROLLOUT, trace=TRACE, reduce=Reduce("token", denominator="kept")).scale[0] == 1 / 4

    def test_neutral_terms_have_weight_one_outside_sums_and_means(self):
        weights = [Weight(MISMATCH, normalize=True)]
        found = correct(OLD, ROLLOUT, trace=TRACE, weights=weights, missing_logprobs="ratio_one")
        ratio = np.exp([0.2, 2.0, 0.0, 0.1])
        np.testing.assert_allclose(found.weight, np.insert(ratio / ratio.mean(), 2, 1.0))
        assert found.keep.all()
        assert found.weight[[0, 1, 3, 4]].mean() == pytest.approx(1.0)

    def test_neutral_terms_fall_with_their_trace(self):
        gate = Rejection(MISMATCH, "k1", Aggregation("trace", "mean"), high=1.0)
        found = correct(OLD, ROLLOUT, trace=TRACE, rejections=[gate], missing_logprobs="ratio_one")
        assert found.keep.tolist() == [False, False, False, True, True]
        assert found.metrics["masked_fraction"] == pytest.approx(3 / 5)

    def test_refusing_names_the_term(self):
        with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*2.*0"):
            correct(OLD, ROLLOUT, trace=TRACE, missing_logprobs="error")
        with pytest.raises(ArgumentError, match=r"TG-ARGS-008.*missing.*drop"):
            correct(OLD, ROLLOUT, trace=TRACE, missing_logprobs="drop")

    def test_the_direct_form_masks_and_refuses_neutral(self):
        found = correct(None, ROLLOUT, trace=TRACE, reduce=Reduce("token"))
        assert found.keep.tolist() == [True, True, False, True, True]
        assert found.weight.tolist() == [1, 1, 0, 1, 1]
        assert found.metrics["frac_missing"] == 0.2
        assert "truncated_fraction" not in found.metrics
        with pytest.raises(ArgumentError, match="TG-OBJ-013"):
            correct(None, ROLLOUT, trace=TRACE, missing_logprobs="ratio_one")

    def test_an_objective_that_takes_no_ratio_of_rollout_keeps_everything(self):
        found = correct(OLD, None, trace=TRACE)
        assert found.keep.all()
        assert found.metrics["missing"] == 0
        with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*None"):
            correct(OLD, None, trace=TRACE, weights=[TIS])


class TestLayouts:
    mask = np.array([[1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    old = np.array([[-1.0, NAN, -2.0, -3.0], [9.0, 9.0, -0.5, NAN], [NAN] * 4])
    rollout = np.array([[-1.5, NAN, -2.0, -2.5], [9.0, 9.0, -2.5, NAN], [NAN] * 4])

    def test_padded_rows_are_traces_and_shape_comes_back(self):
        found = correct(self.old, self.rollout, mask=self.mask, weights=[TIS], reduce=Reduce("trace", "mean"))
        np.testing.assert_allclose(found.weight, [[np.exp(0.5), 0, 1, np.exp(-0.5)], [0, 0, 2, 0], [0] * 4])
        # two rows have terms; the empty one is no trace
        np.testing.assert_allclose(found.scale, [[1 / 6, 0, 1 / 6, 1 / 6], [0, 0, 1 / 2, 0], [0] * 4])
        assert (found.keep == self.mask).all()

    def test_rows_of_one_trace_are_grouped_by_their_id(self):
        found = correct(
            self.old,
            self.rollout,
            mask=self.mask,
            trace=np.array([5, 5, 7]),
            weights=[Weight(MISMATCH, Aggregation("trace", "sum"))],
        )
        np.testing.assert_allclose(found.weight[self.mask], np.exp(0.5 - 0.5 + 2.0))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_tensors_come_back_as_tensors(self, dtype):
        old, rollout = torch.tensor(self.old, dtype=dtype), torch.tensor(self.rollout, dtype=dtype)
        found = correct(old.requires_grad_(), rollout, mask=torch.tensor(self.mask), weights=[TIS])
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert found.weight.dtype == found.scale.dtype == wide
        assert found.keep.dtype == torch.bool
        assert found.weight.shape == (3, 4)
        assert not found.weight.requires_grad
        expected = correct(self.old, self.rollout, mask=self.mask, weights=[TIS]).weight
        np.testing.assert_allclose(found.weight, expected, rtol=1e-6)

    def test_flat_tensors_equal_padded_ones(self):
        flat = correct(
            torch.tensor(self.old[self.mask]),
            torch.tensor(self.rollout[self.mask]),
            trace=torch.tensor([0, 0, 0, 1]),
            weights=[TIS],
        )
        padded = correct(self.old, self.rollout, mask=self.mask, weights=[TIS])
        assert (flat.weight.numpy() == padded.weight[self.mask]).all()
        assert flat.metrics == pytest.approx(padded.metrics, rel=1e-14)

    def test_what_does_not_fit_is_named(self):
        with pytest.raises(ArgumentError, match="TG-OBJ-009"):
            correct(self.old, self.rollout)
        with pytest.raises(ArgumentError, match="TG-OBJ-010"):
            correct(OLD, ROLLOUT)
        with pytest.raises(ArgumentError, match=r"TG-OBJ-011.*4.*5"):
            correct(OLD, ROLLOUT, trace=TRACE, turn=np.zeros(4))
        with pytest.raises(ArgumentError, match=r"TG-OBJ-007.*2.*4"):
            correct(self.old, self.rollout, mask=self.mask[:2])
        with pytest.raises(ArgumentError, match=r"TG-OBJ-007.*3.*4.*2"):
            correct(self.old[:2], self.rollout[:2], mask=self.mask)
        with pytest.raises(ArgumentError, match="TG-OBJ-006"):
            correct(None, None, trace=TRACE)

    def test_the_proximal_of_an_unknown_version_is_that_of_the_rollout(self):
        assert proximal_alpha([0, 0], -1, 1).tolist() == [0.0, 0.0]
        with pytest.raises(ArgumentError, match=r"TG-ARGS-005.*proximal.*-2"):
            proximal_alpha([0], -2, 1)

    def test_no_terms_are_no_error(self):
        found = correct(np.zeros(0), np.zeros(0), trace=np.zeros(0, int), weights=[TIS])
        assert found.weight.shape == (0,)
        assert correct(self.old, self.rollout, mask=np.zeros_like(self.mask), weights=[TIS]).scale.sum() == 0


@pytest.mark.parametrize("bad", [0.3, float("inf"), -float("inf"), -9999.0])
def test_what_is_no_logprob_is_refused_by_term(bad):
    with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*1.*4"):
        correct(np.array([-1.0, -1.0]), np.array([-1.0, bad]), trace=[4, 4])


def test_an_old_logprob_that_overflowed_is_refused():
    with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*0"):
        correct(np.array([NAN]), np.array([-1.0]), trace=[0])


def test_results_do_not_depend_on_the_run():
    generator = np.random.default_rng(3)
    rollout = -generator.exponential(1.0, 5000).astype(np.float32)
    old = rollout + generator.normal(0, 1, 5000).astype(np.float32)
    runs = [correct(old, rollout, trace=np.arange(5000) // 7, weights=[TIS]) for _ in range(2)]
    assert (runs[0].weight == runs[1].weight).all()
    assert runs[0].metrics == runs[1].metrics


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    level=st.sampled_from([Aggregation("trace", "sum"), Aggregation("trace", "mean"), Aggregation("turn", "max")]),
)
def test_the_order_of_terms_does_not_matter(seed, level):
    generator = np.random.default_rng(seed)
    size = 40
    rollout = -generator.exponential(1.0, size)
    rollout[generator.random(size) < 0.2] = NAN
    columns = {
        "old": -generator.exponential(1.0, size),
        "rollout": rollout,
        "trace": generator.integers(0, 6, size),
        "turn": generator.integers(0, 3, size),
    }
    order = generator.permutation(size)
    plan = {
        "weights": [Weight(MISMATCH, level, Truncate(0.1, 3))],
        "rejections": [Rejection(MISMATCH, "k2", level, high=1.0)],
    }
    plan["reduce"] = Reduce("trace", "mean", denominator="kept")
    first = correct(**columns, **plan)
    second = correct(**{name: column[order] for name, column in columns.items()}, **plan)
    np.testing.assert_allclose(second.weight, first.weight[order], rtol=1e-12)
    assert (second.keep == first.keep[order]).all()
    np.testing.assert_allclose(second.scale, first.scale[order], rtol=1e-15)


TRL_MODES = {
    "token_truncate": (TIS, {"clip_max": 2.0}),
    "token_mask": (Weight(MISMATCH, transform=MaskOutside(0.5, 5.0)), {"clip_min": 0.5, "clip_max": 5.0}),
    "sequence_truncate": (
        Weight(MISMATCH, Aggregation("trace", "sum"), Truncate(0.1, 3.0)),
        {"clip_min": 0.1, "clip_max": 3.0},
    ),
    "sequence_mask": (Weight(MISMATCH, Aggregation("trace", "sum"), MaskOutside(0.0, 3.0)), {"clip_max": 3.0}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", list(TRL_MODES))
def test_weights_are_those_of_trls_importance_sampling(mode, dtype):
    from peer_code import trl_importance_ratio

    weight, bounds = TRL_MODES[mode]
    generator = torch.Generator().manual_seed(7)
    rollout = -torch.rand(16, 30, generator=generator, dtype=dtype) * 3
    old = rollout + 0.3 * torch.randn(16, 30, generator=generator, dtype=dtype)
    old[0, 3] = rollout[0, 3] + 8  # an outlier
    mask = torch.rand(16, 30, generator=generator) > 0.4
    mask[:, 0], mask[5, 1:] = True, False
    theirs = trl_importance_ratio(old, rollout, mask.long(), mode, **bounds).expand_as(old)
    found = correct(old, rollout, mask=mask, weights=[weight])
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found.weight[mask], theirs[mask], rtol=tolerance, atol=0)
    assert 0 < found.metrics["truncated_fraction"] < 1


def test_the_presets_are_taken_apart_by_name():
    found = correct(OLD, ROLLOUT, trace=TRACE, weights=presets.DR_GRPO.weights, reduce=presets.DR_GRPO.reduce)
    np.testing.assert_allclose(found.scale, 1 / 2048)
