"""Peers' metrics: their own functions called beside `tracegrad.metrics.peers`, every key they return compared.

Inputs are padded arrays with tool holes, outliers beyond every bound, single terms, empty rows. Ours are measured in
two parts, cut between rows, and merged: equal to the peer's whole.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tracegrad.algebra import Clip, Level, Objective, Ratio
from tracegrad.metrics import Rows, peers
from tracegrad.objective import Terms

FIRED: dict[str, bool] = {}
"""Name of a share to whether it was between 0 and 1 in any case."""
KINDS = ("random", "outliers", "empty rows", "single terms", "one row", "equal")


def drawn(kind, seed=0, shape=(9, 23)):
    """[B, T] float64 logprobs of the four policies, a mask with holes, advantages [B] of both signs and 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = 1 if kind == "one row" else shape[0]

    def noise(scale):
        return scale * torch.randn(rows, shape[1], generator=generator, dtype=torch.float64)

    rollout = -noise(1.0).abs() - 0.05
    old = rollout + noise(0.0 if kind == "equal" else 0.15)
    mask = torch.rand(rows, shape[1], generator=generator) > 0.3
    if kind == "outliers":
        old[0, 0], old[1, 1], old[2, :] = rollout[0, 0] + 24.0, rollout[1, 1] - 24.0, rollout[2, :] + 0.5
        mask[0, 0] = mask[1, 1] = True
    if kind == "empty rows":
        mask[0], mask[-1] = False, False
    if kind == "single terms":
        mask[:] = False
        mask[:, 3] = True
    theta, ref = old + noise(0.2), old + noise(0.3)
    if kind == "outliers":
        theta[1, 2:4], theta[-1, 4] = old[1, 2:4] + 1.5, old[-1, 4] + 2.0
        mask[1, 2:4] = mask[-1, 4] = True
    advantages = torch.linspace(-1.5, 2.0, rows, dtype=torch.float64)
    if rows > 1:
        advantages[rows // 3] = 0.0
    return SimpleNamespace(
        theta=theta, old=old, rollout=rollout, ref=ref, mask=mask, advantages=advantages[:, None].expand_as(old)
    )


def merged(data, measure):
    """measure(rows, part) of the two halves of the rows, merged: part(name) gives the terms of an array."""
    cut = len(data.mask) // 2
    parts = [slice(0, cut), slice(cut, None)] if cut else [slice(None)]
    found = [
        measure(Rows.padded(data.mask[here]), lambda x, here=here: np.asarray(x[here][data.mask[here]]))
        for here in parts
    ]
    return sum(found[1:], start=found[0]).named()


def compare(close, subject, ours, theirs, rtol=1e-6):
    """The same names, and the same numbers."""
    assert set(ours) == set(theirs), f"{subject}: {sorted(set(ours) ^ set(theirs))}"
    for name, value in theirs.items():
        if re.search("frac|clip|masked|mask_ratio|over_high|under_low|oob", name):
            FIRED[f"{subject}: {name}"] = FIRED.get(f"{subject}: {name}", False) or 0 < value < 1
        if not math.isfinite(value):
            assert ours[name] == value or (math.isnan(ours[name]) and math.isnan(value)), f"{subject} {name}"
        else:
            # A deviation of equal values is the rounding of a difference of squares, in the peers as here.
            away = 1.0 if name.endswith("std") else 0.0
            close(subject, ours[name] + away, value + away, rtol)


class TestVerl:
    """rollout_corr_helper and core_algos of verl 0.9.1."""

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
    def test_rollout_corr(self, close, kind, level, bounds, rs, normalize):
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
            lambda rows, part: peers.as_verl(
                part(data.old), part(data.rollout), rows, batch_normalize=normalize, **options
            ),
        )
        compare(close, "verl rollout_corr", ours, theirs)

    def test_where_icepop_drops_all_verl_divides_by_zero_and_ours_is_0(self):
        helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
        data = drawn("random")
        with pytest.raises(ZeroDivisionError):
            helper.compute_rollout_correction_weights(data.old - data.rollout + 9.0, data.mask, "token", "0.5_2.0")
        rows, mask = Rows.padded(data.mask), data.mask
        ours = peers.as_verl(
            data.old[mask] + 9.0, data.rollout[mask], rows, rollout_is="token", rollout_is_bounds=(0.5, 2.0)
        )
        assert ours.named()["rollout_corr/rollout_is_eff_sample_size"] == 0.0

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "loss", ["vanilla", "gspo", "sapo", "cispo", "dppo_tv", "dppo_kl", "geo_mean", "dro", "kl_cov", "clip_cov"]
    )
    def test_actor(self, close, loss, kind):
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
        flags = self.flags(loss, data, advantages, logprobs.grad, config)
        ours = merged(
            data,
            lambda rows, part: peers.as_verl_actor(
                part(data.theta), part(data.old), rows, loss=loss, **{k: part(v) for k, v in flags.items()}
            ),
        )
        if loss == "clip_cov":
            theirs.pop("actor/pg_clipfrac")  # of a random choice
        compare(close, f"verl actor, {loss}", ours, theirs)

    def flags(self, loss, data, advantages, gradient, config):
        """Which terms the loss clips: by our objective, by verl's own gradient, or by its ratio."""
        never = torch.zeros_like(data.mask)
        log = (data.theta - data.old).clamp(-20, 20)
        ratio = log.exp()
        if loss in ("dro", "kl_cov", "clip_cov"):
            return {}
        if loss in ("vanilla", "gspo"):
            level = Level("trace", "mean", grad="token") if loss == "gspo" else Level()
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


def evaluated(objective, data):
    """Per-term values of our objective, [B, T]."""
    trace = torch.arange(len(data.mask))[:, None].expand_as(data.mask)
    terms = Terms(
        old=data.old, ref=data.ref, advantages=data.advantages, scale=data.mask.double(), trace=trace, keep=data.mask
    )
    return objective(data.theta, None, terms).per_term


class TestSkyRL:
    """off_policy_correction_utils, ppo_utils, worker_utils and the trainer of skyrl 0.3.0."""

    CASES = (
        {"tis_ratio_type": "token"},
        {"tis_ratio_type": "sequence", "tis_high": 5.0},
        {"sequence_mask_metric": "geometric", "sequence_mask": (0.98, 1.02)},
        {"sequence_mask_metric": "product", "sequence_mask": (0.5, 2.0)},
        {"outlier": (1e-4, 100.0)},
        {"outlier": (None, 1.4)},
        {"token_mask": (0.8, 1.25)},
        {
            "outlier": (1e-4, 100.0),
            "token_mask": (0.8, 1.25),
            "tis_ratio_type": "sequence",
            "tis_high": 1.5,
            "sequence_mask_metric": "geometric",
            "sequence_mask": (0.98, 1.02),
        },
    )

    @pytest.mark.parametrize("case", CASES, ids=lambda case: "+".join(case))
    @pytest.mark.parametrize("kind", KINDS)
    def test_off_policy_correction(self, close, kind, case):
        module = pytest.importorskip("skyrl.backends.skyrl_train.utils.off_policy_correction_utils")
        data = drawn(kind)
        told = defaultdict(lambda: None, case)
        low, high = told["sequence_mask"] or (None, None)
        settings = SimpleNamespace(
            tis_ratio_type=told["tis_ratio_type"],
            token_tis_ratio_clip_high=told["tis_high"] or 2.0,
            sequence_tis_ratio_clip_high=told["tis_high"],
            sequence_mask_metric=told["sequence_mask_metric"],
            geo_mask_low=low,
            geo_mask_high=high,
            product_mask_low=low,
            product_mask_high=high,
            outlier_token_is_threshold_low=(told["outlier"] or (None, None))[0],
            outlier_token_is_threshold_high=(told["outlier"] or (None, None))[1],
            token_mask_is_threshold_low=(told["token_mask"] or (None, None))[0],
            token_mask_is_threshold_high=(told["token_mask"] or (None, None))[1],
        )
        _, theirs, _ = module.compute_off_policy_correction(data.old, data.rollout, data.mask.double(), settings)
        ours = merged(data, lambda rows, part: peers.as_skyrl(part(data.old), part(data.rollout), rows, **case))
        compare(close, "SkyRL off-policy correction", ours, theirs, 1e-5)  # its ratios are float32

    @pytest.mark.parametrize("kind", KINDS)
    def test_minibatch_differences(self, close, kind):
        module = pytest.importorskip("skyrl.backends.skyrl_train.workers.worker_utils")
        data = drawn(kind)
        theirs = module.compute_minibatch_rollout_logprob_diff_metrics(data.theta, data.rollout, data.mask.double())
        prefix = "minibatch_rollout_logprobs_abs_diff_"
        mean, square = theirs[prefix + "mean"], theirs[prefix + "sq_mean"]
        theirs[prefix + "std"] = math.sqrt(max(0.0, square - mean**2))  # as finalised where the moments are merged
        ours = merged(
            data, lambda rows, part: peers.as_skyrl_policy(part(data.theta), part(data.rollout), rows, minibatch=True)
        )
        compare(close, "SkyRL minibatch differences", ours, theirs)

    @pytest.mark.parametrize("kind", KINDS)
    def test_policy_differences(self, close, kind):
        data = drawn(kind)
        given = {"loss_mask": data.mask.double(), "rollout_logprobs": data.rollout}
        scope = {
            "training_input": given,
            "action_log_probs": data.old,
            "self": SimpleNamespace(all_metrics={}),
        }
        run_statement("skyrl.train.trainer", "if training_input.get('rollout_logprobs', None) is not None", scope)
        ours = merged(data, lambda rows, part: peers.as_skyrl_policy(part(data.old), part(data.rollout), rows))
        compare(close, "SkyRL policy differences", ours, scope["self"].all_metrics)

    @pytest.mark.parametrize("loss", ["regular", "gspo", "cispo", "importance_sampling"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_policy_losses(self, close, kind, loss):
        module = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
        data = drawn(kind)
        config = SimpleNamespace(
            policy_loss_type=loss,
            eps_clip_low=0.05,
            eps_clip_high=0.2,
            clip_ratio_c=3.0,
            loss_reduction="sequence_mean",
            cispo=SimpleNamespace(cispo_eps_clip_low=0.05, cispo_eps_clip_high=0.2),
            off_policy_correction=SimpleNamespace(),
        )
        function = module.PolicyLossRegistry.get(loss)
        _, theirs = function(data.theta, data.old, data.advantages, config, data.mask.double(), None)
        ratio = (data.theta - data.old).exp()
        level = Level("trace", "mean", grad="token") if loss == "gspo" else Level()
        clipped = evaluated(Objective(Clip(0.05, 0.2, level=level), Ratio("theta", "old")), data).clipped
        if loss == "cispo":
            clipped = (ratio < 0.95) | (ratio > 1.2)
        given = {"ratio": ratio} if loss == "importance_sampling" else {"clipped": clipped}
        ours = merged(
            data,
            lambda rows, part: peers.as_skyrl_policy(
                part(data.old), part(data.rollout), rows, **{name: part(value) for name, value in given.items()}
            ),
        )
        ours = {name: value for name, value in ours.items() if "abs_diff" not in name}
        compare(close, f"SkyRL {loss}", ours, theirs, 1e-5)


def run_statement(module, first, scope):
    """Executes the one statement of an installed module's source that starts with `first`."""
    import ast
    import importlib.util
    from pathlib import Path

    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        pytest.skip(f"{module} is not installed")
    tree = ast.parse(Path(spec.origin).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and ast.unparse(node).startswith(first)]
    assert len(found) == 1, f"{len(found)} statements of {module} start with {first!r}"
    exec(compile(ast.Module(found, []), module, "exec"), scope)


class TestTRL:
    """GRPOTrainer of TRL 1.16: `_compute_loss` as it is, and statements of its generation step."""

    @pytest.fixture
    def reported(self, monkeypatch):
        """reported(logprobs, inputs, **config): what `_compute_loss` puts into the trainer's metrics."""
        pytest.importorskip("trl")
        from peer_code import GRPOTrainer, trl_loss

        seen = {}
        original = GRPOTrainer._compute_loss

        def spied(self, *args):
            out = original(self, *args)
            seen.update(self._metrics["train"])
            return out

        monkeypatch.setattr(GRPOTrainer, "_compute_loss", spied)

        def run(logprobs, inputs, **config):
            seen.clear()
            trl_loss(logprobs, inputs, **config)
            return {name: values[0] for name, values in seen.items()}

        return run

    @pytest.mark.parametrize("level", ["token", "sequence"])
    @pytest.mark.parametrize("loss", ["grpo", "dapo", "bnpo", "luspo", "cispo"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_loss(self, close, reported, kind, loss, level):
        data = drawn(kind)
        data.mask = data.mask.int()
        theirs = reported(
            data.theta,
            {
                "completion_mask": data.mask,
                "advantages": data.advantages[:, 0],
                "old_per_token_logps": data.old,
                "ref_per_token_logps": data.ref,
            },
            loss_type=loss,
            importance_sampling_level=level,
            beta=0.1,
            epsilon=0.05,
            epsilon_high=1.1 if loss == "cispo" else 0.2,
        )
        data.mask = data.mask.bool()
        levels = Level("trace", "mean") if level == "sequence" else Level()
        clip = Clip(0.05, 0.1 if loss == "cispo" else 0.2, level=levels)  # cispo's epsilon_high is the cap itself
        clipped = evaluated(Objective(clip, Ratio("theta", "old")), data).clipped
        ours = merged(
            data,
            lambda rows, part: peers.as_trl_loss(
                rows,
                loss_type=loss,
                clipped=part(clipped),
                advantages=part(data.advantages),
                sequence=level == "sequence",
                theta=part(data.theta),
                ref=part(data.ref),
                entropy=part(torch.zeros_like(data.theta)),
            ),
        )
        compare(close, f"TRL {loss} at {level} level", ours, theirs)

    def test_kl_is_multiplied_by_the_ratio(self, close, reported, monkeypatch):
        import peer_code

        config = peer_code.GRPOConfig
        monkeypatch.setattr(peer_code, "GRPOConfig", lambda **told: config(**{**told, "use_bias_correction_kl": True}))
        data = drawn("random")
        inputs = {
            "completion_mask": data.mask.int(),
            "advantages": data.advantages[:, 0],
            "old_per_token_logps": data.old,
            "ref_per_token_logps": data.ref,
        }
        theirs = reported(data.theta, inputs, loss_type="dapo", beta=0.1)
        ours = merged(
            data,
            lambda rows, part: peers.as_trl_loss(
                rows, theta=part(data.theta), ref=part(data.ref), kl_weight=part((data.theta - data.old).exp())
            ),
        )
        close("TRL kl, bias corrected", ours["kl"], theirs["kl"], 1e-6)

    def test_vespo(self, close, reported):
        data = drawn("random")
        inputs = {"completion_mask": data.mask.int(), "advantages": data.advantages[:, 0]}
        inputs["old_per_token_logps"] = data.old
        from trl import GRPOTrainer

        phi = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
        weights = GRPOTrainer.get_gamma_weights(
            data.advantages[:, :1], data.theta - data.old, data.mask.int(), None, **phi
        )
        theirs = reported(data.theta, inputs, loss_type="vespo")
        ours = peers.as_trl_loss(Rows.padded(data.mask), phi=weights[:, 0].numpy()).named()
        close("TRL vespo/phi_seq_mean", ours["vespo/phi_seq_mean"], theirs["vespo/phi_seq_mean"], 1e-6)

    @pytest.mark.parametrize("missing", [False, True])
    @pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_sampling(self, close, kind, mode, missing):
        pytest.importorskip("trl")
        from trl.trainer.utils import nanmax, nanmin

        from peer_code import _run, trl_importance_ratio

        data = drawn(kind)
        rollout = data.rollout.clone()
        if missing:
            rollout[0, 0], rollout[:, 5] = math.nan, math.nan
        mask = data.mask.int()
        ratio = trl_importance_ratio(data.old, rollout, mask, mode, clip_min=0.5, clip_max=3.0)
        sequence = mode.startswith("sequence")
        scope = {
            "self": SimpleNamespace(
                use_vllm=True,
                vllm_importance_sampling_correction=True,
                accelerator=SimpleNamespace(gather=lambda value: value.reshape(1)),
                _metrics={"train": defaultdict(list)},
            ),
            "mode": "train",
            "device": "cpu",
            "old_per_token_logps": data.old,
            "sampling_per_token_logps": rollout,
            "completion_mask": mask,
            "tool_mask": None,
            "sequence_level_is": sequence,
            "vllm_importance_sampling_ratio": ratio,
            "nanmin": nanmin,
            "nanmax": nanmax,
        }
        _run("if self.use_vllm and self.vllm_importance_sampling_correction:\n    delta =", scope)
        theirs = {name: values[0] for name, values in scope["self"]._metrics["train"].items()}
        weights = ratio[:, 0] if sequence else ratio
        cut = len(mask) // 2

        def measure(here):
            weight = weights[here] if sequence else weights[here][data.mask[here]]
            inside = data.mask[here]
            return peers.as_trl_sampling(data.old[here][inside], rollout[here][inside], weight)

        ours = (measure(slice(0, cut)) + measure(slice(cut, None))).named()
        compare(close, "TRL sampling", ours, theirs)

    @pytest.mark.parametrize("scale", ["group", "none", "batch"])
    @pytest.mark.parametrize("kind", ["random", "flat groups", "unscorable", "all equal"])
    def test_rewards(self, close, kind, scale):
        pytest.importorskip("trl")
        from peer_code import _run, grpo_trainer

        generator = torch.Generator().manual_seed(0)
        rewards = torch.rand(24, 2, generator=generator)
        if kind == "flat groups":
            rewards[:8] = 0.25
        if kind == "unscorable":
            rewards[1], rewards[5, 0], rewards[8:12] = math.nan, math.nan, math.nan
        if kind == "all equal":
            rewards[:] = 0.5
        weights = torch.tensor([1.0, 0.5])
        scope = {
            "self": SimpleNamespace(
                multi_objective_aggregation="sum_then_normalize",
                reward_weights=weights,
                scale_rewards=scale,
                reward_func_names=["first", "second"],
                _metrics={"train": defaultdict(list)},
            ),
            "mode": "train",
            "device": "cpu",
            "rewards_per_func": rewards,
            "num_generations": 4,
            "unscorable_mask": rewards.isnan().all(1),
            "nanstd": grpo_trainer.nanstd,
        }
        scope |= _run("if self.multi_objective_aggregation == 'sum_then_normalize':", scope)
        append = "self._metrics[mode]"
        for first in (
            "for i, reward_func_name in enumerate(self.reward_func_names):\n    mean_rewards",
            f"{append}['reward'].append",
            f"{append}['reward_std'].append",
            f"{append}['frac_reward_zero_std'].append",
        ):
            _run(first, scope)
        theirs = {name: values[0] for name, values in scope["self"]._metrics["train"].items()}
        group = np.repeat(np.arange(6), 4)
        told = {"names": ["first", "second"], "weights": weights, "scale_rewards": scale}
        parts = (slice(0, 8), slice(8, None))
        a, b = (peers.as_trl_rewards(rewards[here], group[here], **told) for here in parts)
        compare(close, "TRL rewards", (a + b).named(), theirs, 2e-6)  # its rewards are float32


class TestART:
    """loss_fn of openpipe-art 0.5.18, and the diagnostics that later releases have."""

    @pytest.fixture
    def loss(self):
        return pytest.importorskip("art.loss")

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("missing", [False, True])
    def test_loss(self, close, loss, kind, missing):
        data = drawn(kind)
        recorded = torch.where(data.mask, data.rollout, math.nan)
        if missing:
            recorded[:, 3:7] = math.nan

        inputs, theta, ref = self.inputs(loss, data, recorded)
        theirs = loss.loss_fn(inputs, theta, ref, None, {"kl_penalty_coef": 0.1})
        ours = merged(
            data,
            lambda rows, part: peers.as_art(
                part(data.theta), part(recorded), rows, advantages=part(data.advantages), ref=part(data.ref)
            ),
        )
        close("ART kl_policy_ref", ours["kl_policy_ref"], theirs.kl_policy_ref, 1e-6)
        if math.isnan(ours["probs_corr"]):  # no known logprob: NaN in 0.5.18 as here, 0 in later releases
            assert missing
            assert math.isnan(theirs.probs_corr) or theirs.probs_corr == 0
        else:
            close("ART probs_corr", ours["probs_corr"], theirs.probs_corr, 1e-6)

    def inputs(self, loss, data, recorded):
        """The loss's inputs and logprobs: shifted by one token, or aligned where the release takes them so."""
        given = {
            "logprobs": recorded,
            "advantages": data.advantages,
            "assistant_mask": data.mask,
            "weights": torch.ones_like(data.theta),
            "group_ids": torch.zeros(data.mask.shape, dtype=torch.long),
        }
        if hasattr(loss, "AlignedLossInputs"):
            given["old_logprobs"] = given.pop("logprobs")
            return loss.AlignedLossInputs(**given | {"assistant_mask": data.mask.double()}), data.theta, data.ref
        pad = torch.nn.functional.pad
        shifted = {
            name: pad(values, (1, 0), value=math.nan if name == "logprobs" else 0) for name, values in given.items()
        }
        return shifted, pad(data.theta, (0, 1)), pad(data.ref, (0, 1))

    @pytest.mark.parametrize("ppo", [False, True])
    @pytest.mark.parametrize("kind", KINDS)
    def test_diagnostics(self, close, loss, kind, ppo):
        if not hasattr(loss, "LossOffPolicyDiagnostics"):
            pytest.skip("this release of openpipe-art has no off-policy diagnostics")
        data = drawn(kind)
        diagnostics = loss.LossOffPolicyDiagnostics.from_tensors(
            prob_ratio=(data.theta - data.rollout).exp(),
            advantages=data.advantages,
            assistant_mask=data.mask.double(),
            weights=torch.ones_like(data.theta),
            ppo=ppo,
            epsilon=0.2 if ppo else 1.0,
            epsilon_high=0.2 if ppo else 4.0,
        )
        gathered = loss.LossOffPolicyDiagnosticsAccumulator()
        gathered.add(diagnostics)
        ours = merged(
            data,
            lambda rows, part: peers.as_art(
                part(data.theta), part(data.rollout), rows, advantages=part(data.advantages), ppo=ppo
            ),
        )
        ours = {name: value for name, value in ours.items() if name.startswith("loss/")}
        compare(close, "ART diagnostics", ours, gathered.to_metrics(), 1e-5)  # its ratios are float32


class TestNeMo:
    """ClippedPGLossFn of NVIDIA-NeMo/RL, where its package can be imported."""

    @pytest.mark.parametrize("sequence", [False, True])
    @pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
    @pytest.mark.parametrize(
        ("truncation", "bounds"),
        [(None, (None, 2.0)), ("tis", (None, 1.2)), ("icepop", (0.8, 1.25)), ("seq-mask-tis", (0.98, 1.02))],
    )
    @pytest.mark.parametrize("kind", KINDS)
    def test_clipped_policy_gradient(self, close, kind, truncation, bounds, kl_type, sequence):
        module = pytest.importorskip("nemo_rl.algorithms.loss.loss_functions")
        if sequence and truncation == "seq-mask-tis":
            pytest.skip("NeMo-RL refuses the two together")
        data = drawn(kind)
        config = module.ClippedPGLossConfig(
            reference_policy_kl_penalty=0.0,
            reference_policy_kl_type=kl_type,
            use_importance_sampling_correction=truncation is not None,
            truncated_importance_sampling_type=truncation,
            truncated_importance_sampling_ratio=bounds[1] if truncation else None,
            truncated_importance_sampling_ratio_min=bounds[0],
            sequence_level_importance_ratios=sequence,
            token_level_loss=not sequence,
        )

        def padded(values):
            return torch.nn.functional.pad(values, (1, 0))

        batch = {
            "token_mask": padded(data.mask.double()),
            "sample_mask": torch.ones(len(data.mask), dtype=torch.float64),
            "advantages": padded(data.advantages),
            "prev_logprobs": padded(data.old),
            "generation_logprobs": padded(data.rollout),
        }
        counts = torch.tensor(float(len(data.mask))), data.mask.sum()
        _, theirs = module.ClippedPGLossFn(config)(data.theta, batch, *counts)
        theirs = {name: value for name, value in theirs.items() if name in {row.name for row in peers.NEMO}}
        options = {"kl_type": kl_type, "truncation": truncation, "bounds": bounds, "sequence_level": sequence}
        ours = merged(
            data,
            lambda rows, part: peers.as_nemo(part(data.theta), part(data.old), part(data.rollout), rows, **options),
        )
        if sequence:  # [B, 1] * [B] in its masked mean: the sum over rows, where the mean is meant
            theirs["sampling_importance_ratio"] /= len(data.mask)
        compare(close, "NeMo-RL", ours, theirs, 1e-6)


def test_every_bound_was_crossed_in_some_case():
    """Of the cases above: a share that is 0 or 1 in all of them would compare nothing."""
    if len(FIRED) < 80:
        pytest.skip("only some of the cases ran")
    never = {name for name, fired in FIRED.items() if not fired}
    constant = r"k[23]_fraction_low|actor, (gspo|sapo|cispo): .*lower|actor, sapo"  # verl's zeros
    one_row = r"sequence level: .*_m(in|ax)"  # of 0 or 1
    assert {name for name in never if not re.search(f"{constant}|{one_row}", name)} == set()
