"""verl's rollout correction beside ours: importance weights and rejection masks, alone and together."""

import itertools

import pytest
import torch

from padded import hard, spoilt
from tracegrad.objective import Reduce
from tracegrad.objective.correction import correct
from verl_plan import THRESHOLDS, gates_of, thresholds_of, weights_of

helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")

LISTS = (
    "token_k1,seq_mean_k3",
    "token_k3,seq_sum_k1,seq_max_k2",
    "seq_sum_k2,token_k2",
    "seq_max_k3,seq_mean_k1,token_k1",
)
IMPORTANCE = [(None, 2.0, False), *itertools.product(("token", "sequence"), (2.0, "0.5_5.0"), (False, True))]
REJECTION = [None, *THRESHOLDS, *LISTS]
SEEDS = range(3)


def theirs(data, importance, rejection):
    level, threshold, normalize = importance
    weights, mask, metrics = helper.compute_rollout_correction_and_rejection_mask(
        data["old"],
        data["rollout"],
        data["mask"],
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=normalize,
        rollout_rs=rejection,
        rollout_rs_threshold=thresholds_of(rejection) if rejection else None,
    )
    return None if weights is None else weights.batch["rollout_is_weights"], mask, metrics


def ours(data, importance, rejection, **options):
    gates = gates_of(rejection, thresholds_of(rejection)) if rejection else ()
    weights = weights_of(*importance)
    return correct(data["old"], data["rollout"], mask=data["mask"], weights=weights, rejections=gates, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("rejection", REJECTION)
@pytest.mark.parametrize("importance", IMPORTANCE, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_weights_and_masks_are_those_of_verl(close, fired, importance, rejection, dtype, seed):
    data = hard(seed, dtype)
    weights, mask, _ = theirs(data, importance, rejection)
    found = ours(data, importance, rejection)
    exact = dtype == torch.float64
    close("verl rejection masks", found.keep.double(), mask.double(), 0.0)
    told = {}
    if weights is not None:
        level, threshold, normalize = importance
        name = f"verl weights, {level}{'' if exact else ', float32'}"
        close(name, found.weight[mask], weights[mask], 1e-7 if exact else 1e-5)
        if not normalize:
            high, window = float(str(threshold).split("_")[-1]), isinstance(threshold, str)
            told[f"{level} {'IcePop' if window else 'truncate'}"] = weights[data["mask"]] == (0 if window else high)
        told["batch normalize"] = normalize
    for option in (rejection or "").split(",") if rejection in THRESHOLDS else ():
        fell = ~mask & data["mask"]
        told[f"RS {option}"] = fell
        assert fell.sum() < data["mask"].sum(), f"{option} left nothing"
    told["RS list"] = rejection in LISTS and not torch.equal(mask, data["mask"])
    told["empty row"] = ~data["mask"].any(1)
    fired("verl correction", told)


@pytest.mark.parametrize("rejection", [None, "token_k1", "seq_mean_k3"])
@pytest.mark.parametrize("importance", IMPORTANCE, ids=str)
def test_garbage_off_the_mask_reaches_no_weight_of_ours(fired, importance, rejection):
    data = hard(1)
    clean, found = ours(data, importance, rejection), ours(spoilt(data), importance, rejection)
    assert torch.equal(clean.weight, found.weight)
    assert torch.equal(clean.keep, found.keep)
    weights, mask, _ = theirs(spoilt(data), importance, rejection)
    assert torch.equal(found.keep, mask)
    if importance[:2] == ("token", 2.0):
        assert weights.isnan().any()  # off the mask: its loss is defined, its gradient there is not
    fired("verl correction", {"NaN": weights is not None and weights.isnan().any()})


class TestWhereVerlIsUndefined:
    def test_a_window_that_drops_everything_divides_by_zero_there_and_is_zero_here(self):
        data = hard(0)
        data["old"] = data["rollout"] - 3.0
        with pytest.raises(ZeroDivisionError):
            theirs(data, ("token", "0.5_5.0", False), None)
        found = ours(data, ("token", "0.5_5.0", False), None)
        assert (found.weight == 0).all()

    def test_a_batch_without_a_term_raises_there_and_is_empty_here(self):
        data = hard(0)
        data["mask"][:] = False
        with pytest.raises(ValueError, match="at least one valid token"):
            theirs(data, ("token", 2.0, False), None)
        found = ours(data, ("token", 2.0, True), "token_k1")
        assert not found.keep.any()
        assert (found.scale == 0).all()

    def test_a_missing_logprob_is_a_dropped_row_there_and_a_dropped_term_here(self):
        data = hard(2)
        data["rollout"][0, 0] = float("nan")
        weights, mask, _ = theirs(data, ("sequence", 2.0, False), "seq_mean_k3")
        assert weights[0].isnan().all()
        assert not mask[0].any()
        found = ours(data, ("sequence", 2.0, False), None, reduce=Reduce("token"))
        assert found.keep[0].tolist() == [False] + [True] * 13
        assert found.weight.isfinite().all()


def test_every_branch_has_fired(fired):
    counts = fired("verl correction")
    if counts["empty row"] < len(REJECTION) * len(IMPORTANCE):
        pytest.skip("the other tests of this file have not run")
    assert {name for name, count in counts.items() if count == 0} == set()
    assert {f"RS {option}" for option in THRESHOLDS} <= set(counts)
    assert {"token truncate", "token IcePop", "sequence truncate", "sequence IcePop", "NaN", "RS list"} <= set(counts)
