"""verl's metrics beside ours: rollout_corr_helper and the policy losses of core_algos, every key they return."""

import pytest
import torch

from metric_cases import KINDS, assert_every_bound_was_crossed, compare, drawn, evaluated, merged
from tracegrad.integrations import metrics
from tracegrad.metrics import Rows
from tracegrad.objective import Aggregation, Clip, Objective, Ratio

IS = (
    (None, (None, 2.0)),
    ("token", (None, 2.0)),
    ("token", (0.8, 1.25)),
    ("sequence", (None, 2.0)),
    ("sequence", (0.5, 5.0)),
)
RS = (
    {},
    {"token_k1": (0.6, 1.2)},
    {"token_k1": (None, 1.1), "token_k2": (None, 0.02), "token_k3": (None, 0.02)},
    {"seq_sum_k1": (0.5, 2.0), "seq_sum_k2": (None, 0.5), "seq_sum_k3": (None, 0.5)},
    {"seq_mean_k1": (0.98, 1.02), "seq_mean_k2": (None, 0.01), "seq_mean_k3": (None, 0.01)},
    {"seq_max_k2": (None, 0.06), "seq_max_k3": (None, 0.06), "seq_mean_k1": (None, 1.05)},
)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("rs", RS, ids=lambda rs: "+".join(rs) or "none")
@pytest.mark.parametrize(("level", "bounds"), IS)
@pytest.mark.parametrize("kind", KINDS)
def test_rollout_corr(close, fired, kind, level, bounds, rs, normalize):
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    data = drawn(kind)
    low, high = bounds
    _, _, theirs = helper.compute_rollout_correction_and_rejection_mask(
        data.old,
        data.rollout,
        data.mask,
        rollout_is=level,
        rollout_is_threshold=high if low is None else f"{low}_{high}",
        rollout_is_batch_normalize=normalize,
        rollout_rs=",".join(rs) or None,
        rollout_rs_threshold=",".join(f"{b}" if a is None else f"{a}_{b}" for a, b in rs.values()) or None,
    )
    options = {"rollout_is": level, "rollout_is_bounds": bounds, "rollout_rs": rs}
    ours = merged(
        data,
        lambda rows, part: metrics.as_verl(
            part(data.old), part(data.rollout), rows, batch_normalize=normalize, **options
        ),
    )
    compare(close, fired, "verl", ours, theirs)


def test_where_icepop_drops_all_verl_divides_by_zero_and_ours_is_0():
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    data = drawn("random")
    with pytest.raises(ZeroDivisionError):
        helper.compute_rollout_correction_weights(data.old - data.rollout + 9.0, data.mask, "token", "0.5_2.0")
    rows, mask = Rows.padded(data.mask), data.mask
    ours = metrics.as_verl(
        data.old[mask] + 9.0, data.rollout[mask], rows, rollout_is="token", rollout_is_bounds=(0.5, 2.0)
    )
    assert ours.values()["rollout_corr/rollout_is_eff_sample_size"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "loss", ["vanilla", "gspo", "sapo", "cispo", "dppo_tv", "dppo_kl", "geo_mean", "dro", "kl_cov", "clip_cov"]
)
def test_actor(close, fired, loss, kind):
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    workers = pytest.importorskip("verl.workers.config")
    data = drawn(kind)
    config = workers.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=False,
        clip_ratio_low=0.05,
        policy_loss=workers.PolicyLossConfig(dro_beta=0.1),
    )
    logprobs = data.theta.clone().requires_grad_()
    advantages = data.advantages + (0.25 if loss.startswith("dppo") else 0.0)
    theirs_loss, theirs = core_algos.get_policy_loss_fn(loss)(
        data.old, logprobs, advantages, data.mask, loss_agg_mode="token-sum", config=config
    )
    theirs_loss.backward()
    flags = flags_of(loss, data, advantages, logprobs.grad, config)
    ours = merged(
        data,
        lambda rows, part: metrics.as_verl_actor(
            part(data.theta), part(data.old), rows, loss=loss, **{k: part(v) for k, v in flags.items()}
        ),
    )
    if loss == "clip_cov":
        theirs.pop("actor/pg_clipfrac")  # of a random choice
    compare(close, fired, "verl", ours, theirs)


def flags_of(loss, data, advantages, gradient, config):
    """Which terms the loss clips: by our objective, by verl's own gradient, or by its ratio."""
    never = torch.zeros_like(data.mask)
    log = (data.theta - data.old).clamp(-20, 20)
    ratio = log.exp()
    if loss in ("dro", "kl_cov", "clip_cov"):
        return {}
    if loss in ("vanilla", "gspo"):
        level = Aggregation("trace", "mean", grad="token") if loss == "gspo" else Aggregation()
        clip = Clip(0.05, 0.2, dual=3.0 if loss == "vanilla" else None, level=level)
        per_term = evaluated(Objective(clip, Ratio("theta", "old")), data)
        dual = per_term.clipped & (data.advantages < 0) & (per_term.ratio > 1)
        return {"clipped": per_term.clipped & ~dual, "clipped_lower": dual}
    if loss == "cispo":
        return {"clipped": (ratio < 1 - 0.05) | (ratio > 1 + config.clip_ratio_high), "clipped_lower": never}
    if loss.startswith("dppo"):
        dropped = (gradient == 0) & (advantages != 0)
        return {"clipped": dropped, "clipped_lower": (ratio > config.clip_ratio_c) & ~dropped}
    if loss == "geo_mean":
        outside = (data.theta - data.old < -0.05) | (data.theta - data.old > config.clip_ratio_high)
        return {"clipped": outside & (data.advantages > 0), "clipped_lower": outside & (data.advantages < 0)}
    return {"clipped": never, "clipped_lower": never}


def test_every_bound_was_crossed_in_some_case(fired):
    assert_every_bound_was_crossed(fired("verl metrics"), r"k[23]_fraction_low")  # a constant 0 in verl
