"""verl's options by name: what is read, what else they may say, what has no counterpart, and its own corrections."""

from collections.abc import Mapping
from typing import Any

from tracegrad.recipes.peer import Without

A, C, G = "actor_rollout_ref.actor.", "algorithm.rollout_correction.", "algorithm."
LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo")

REJECTIONS = {
    "token_k1": "0.6_1.2",
    "token_k2": 0.02,
    "token_k3": 0.02,
    "seq_sum_k1": "0.5_3.0",
    "seq_sum_k2": 0.5,
    "seq_sum_k3": 0.5,
    "seq_mean_k1": "0.95_1.02",
    "seq_mean_k2": 0.01,
    "seq_mean_k3": 0.01,
    "seq_max_k2": 0.06,
    "seq_max_k3": 0.06,
    "token_k1,seq_mean_k3": "0.6_1.2,0.01",
}
OPTIONS: Mapping[str, tuple[Any, ...]] = {
    f"{A}policy_loss.loss_mode": LOSSES,
    f"{A}clip_ratio": (0.2,),
    f"{A}clip_ratio_low": (0.2, 0.1),
    f"{A}clip_ratio_high": (0.2, 0.28),
    f"{A}clip_ratio_c": (3.0, 2.0),
    f"{A}tau_pos": (1.0, 1.5),
    f"{A}tau_neg": (1.05, 1.2),
    f"{A}policy_loss.clip_cov_ratio": (2e-4, 0.1),
    f"{A}policy_loss.clip_cov_lb": (1.0, 0.1),
    f"{A}policy_loss.clip_cov_ub": (5.0, 2.0),
    f"{A}policy_loss.kl_cov_ratio": (2e-4, 0.1),
    f"{A}policy_loss.ppo_kl_coef": (0.1, 0.3),
    f"{A}policy_loss.dro_beta": (None, 0.2),
    f"{A}loss_agg_mode": (
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "seq-mean-token-mean",
    ),
    f"{A}loss_scale_factor": (None,),
    f"{A}entropy_coeff": (0.0, 0.05),
    f"{A}use_kl_loss": (False, True),
    f"{A}kl_loss_coef": (0.001, 0.1),
    f"{A}kl_loss_type": ("low_var_kl", "kl", "abs", "mse", "k1+", "abs+", "k3+"),
    f"{C}rollout_is": (None, "token", "sequence"),
    f"{C}rollout_is_threshold": (2.0, 3.0, "0.5_5.0"),
    f"{C}rollout_is_batch_normalize": (False, True),
    f"{C}rollout_rs": (None, *REJECTIONS),
    f"{C}rollout_rs_threshold": (None,),
    f"{C}bypass_mode": (False, True),
    f"{C}loss_type": ("ppo_clip", "reinforce"),
    f"{G}adv_estimator": (None, "grpo", "rloo", "opo"),
    f"{G}norm_adv_by_std_in_grpo": (True, False),
    f"{G}use_kl_in_reward": (False, True),
    f"{G}kl_penalty": ("kl", "abs", "mse", "low_var_kl"),
    f"{G}kl_ctrl.type": ("fixed", "adaptive"),
    f"{G}kl_ctrl.kl_coef": (0.001, 0.1),
    f"{G}kl_ctrl.target_kl": (0.1, 0.05),
    f"{G}kl_ctrl.horizon": (10000, 500),
    f"{G}filter_groups.enable": (False, True),
    f"{G}filter_groups.metric": (None,),
    f"{A}optim.lr": (1e-6, 2e-6),
    f"{A}optim.lr_scheduler_type": ("constant", "cosine"),
    f"{A}optim.lr_warmup_steps": (-1, 10),
    f"{A}optim.weight_decay": (0.01, 0.0),
    f"{A}optim.betas": ((0.9, 0.999),),
    f"{A}grad_clip": (1.0, 0.2),
    f"{A}ppo_mini_batch_size": (256, 64),
    "data.train_batch_size": (0, 1024),
}
_CHARGED = {f"{G}use_kl_in_reward": True}

BESIDE: Mapping[str | tuple[str, Any], Mapping[str, Any]] = {
    (f"{A}policy_loss.loss_mode", "dro"): {f"{A}policy_loss.dro_beta": 0.2},
    f"{A}policy_loss.dro_beta": {f"{A}policy_loss.loss_mode": "dro"},
    **{f"{A}{name}": {f"{A}policy_loss.loss_mode": "sapo"} for name in ("tau_pos", "tau_neg")},
    **{f"{A}policy_loss.clip_cov_{name}": {f"{A}policy_loss.loss_mode": "clip_cov"} for name in ("ratio", "lb", "ub")},
    **{f"{A}policy_loss.{name}": {f"{A}policy_loss.loss_mode": "kl_cov"} for name in ("kl_cov_ratio", "ppo_kl_coef")},
    (f"{A}loss_agg_mode", "seq-mean-token-sum-norm"): {f"{A}loss_scale_factor": 64},
    **{f"{A}{name}": {f"{A}use_kl_loss": True} for name in ("kl_loss_coef", "kl_loss_type")},
    **{f"{C}{name}": {f"{C}rollout_is": "token"} for name in ("rollout_is_threshold", "rollout_is_batch_normalize")},
    **{(f"{C}rollout_rs", name): {f"{C}rollout_rs_threshold": value} for name, value in REJECTIONS.items()},
    f"{C}loss_type": {f"{C}bypass_mode": True, f"{C}rollout_is": "sequence"},
    f"{G}norm_adv_by_std_in_grpo": {f"{G}adv_estimator": "grpo"},
    **{f"{G}{name}": _CHARGED for name in ("kl_penalty", "kl_ctrl.type", "kl_ctrl.kl_coef")},
    **{f"{G}kl_ctrl.{name}": {**_CHARGED, f"{G}kl_ctrl.type": "adaptive"} for name in ("target_kl", "horizon")},
    f"{A}ppo_mini_batch_size": {"data.train_batch_size": 1024},
    f"{A}optim.lr_warmup_steps": {"data.train_batch_size": 1024},
}
_OVERLONG = Without((False,), "rewards are recorded", "advantage.overlong, and write the sum as a reward", of_run=True)
WITHOUT: Mapping[str, Without] = {
    f"{G}use_pf_ppo": Without((False,), "traces are not drawn again by their reward", "leave it out", of_run=True),
    f"{G}rollout_correction": Without((None,), "it is a table", "rollout_correction.rollout_is"),
    f"{G}filter_groups": Without((None,), "it is a table", "filter_groups.enable"),
    f"{A}ppo_epochs": Without(
        (1,),
        "one batch several times in a row; passes here are over all traces",
        "train.epochs, updates_per_old 0",
        of_run=True,
    ),
    f"{A}optim.lr_warmup_steps_ratio": Without(
        (0.0,), "warm-up is in steps here", "optim.lr_warmup_steps", of_run=True
    ),
    f"{A}optim.min_lr_ratio": Without((0.0, None), "it is schedule.floor", "--schedule.floor", of_run=True),
    f"{A}optim.num_cycles": Without((0.5,), "a cosine falls once", "leave it out", of_run=True),
    f"{A}optim.optimizer": Without(("AdamW", "adam"), "the optimizer is AdamW", "leave it out", of_run=True),
    f"{A}freeze_vision_tower": Without(
        (False,), "it is images.tower here", "--images.tower frozen, the default", of_run=True
    ),
    "reward_model.overlong_buffer.enable": _OVERLONG,
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": _OVERLONG,
    "reward.reward_kwargs.overlong_buffer_cfg.enable": _OVERLONG,
    "distillation.enabled": Without((False,), "there is no teacher", "leave it out"),
}
OWN = (
    f"{A}ppo_micro_* {A}ppo_max_* {A}ppo_infer_* {A}strategy {A}use_dynamic_bsz {A}rollout_n {A}calculate_* "
    f"{A}use_prefix_grouper {A}use_torch_compile {A}use_fused_kernels {A}use_remove_padding {A}shuffle "
    f"{A}data_loader_seed {A}checkpoint* {A}profiler* {A}engine* {A}model_config* {A}router_replay* "
    f"{A}global_batch_info* {A}qat* {A}fsdp_config* {A}megatron* {A}veomni* {A}torchtitan* "
    f"{A}entropy_from_* {A}entropy_checkpointing {A}pad_to_length {A}ulysses_* {A}use_rollout_log_probs "
    f"{A}profile* {A}load_* {A}ppo_batch_* {A}policy_loss.rollout_correction* {A}optim.* {A}mtp* "
    f"{A}extra* {A}nccl_timeout {A}tis_* {G}gamma {G}lam {G}pf_ppo* {G}filter_groups.* "
    f"{G}gdpo_* actor_rollout_ref.rollout* actor_rollout_ref.model* actor_rollout_ref.ref* "
    "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout model_engine data* trainer* critic* reward* "
    "custom_* global_profiler* ray_kwargs* transfer_queue* distillation* hydra* defaults skip* sandbox_fusion*"
)
_GEO, _K3 = (
    {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
    {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
)
_CLIP, _PG = {"bypass_mode": True}, {"bypass_mode": True, "loss_type": "reinforce"}
CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "DEFAULT": {},
    "DECOUPLED_TOKEN_IS": {"rollout_is": "token"},
    "DECOUPLED_SEQ_IS": {"rollout_is": "sequence"},
    "DECOUPLED_TOKEN_ICEPOP": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "DECOUPLED_SEQ_IS_RS": {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "DECOUPLED_GEO_RS": _GEO,
    "DECOUPLED_GEO_RS_SEQ_TIS": {"rollout_is": "sequence", **_GEO},
    "DECOUPLED_GEO_RS_TOKEN_TIS": {"rollout_is": "token", **_GEO},
    "DECOUPLED_K3_RS": _K3,
    "DECOUPLED_K3_RS_SEQ_TIS": {"rollout_is": "sequence", **_K3},
    "DECOUPLED_K3_RS_TOKEN_TIS": {"rollout_is": "token", **_K3},
    "BYPASS_PPO_CLIP": _CLIP,
    "BYPASS_PPO_CLIP_GEO_RS": {**_CLIP, **_GEO},
    "BYPASS_PPO_CLIP_K3_RS": {**_CLIP, **_K3},
    "BYPASS_PG_IS": {**_PG, "rollout_is": "sequence"},
    "BYPASS_PG_TOKEN_ICEPOP": {**_PG, "rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "BYPASS_PG_GEO_RS": {**_PG, **_GEO},
    "BYPASS_PG_GEO_RS_SEQ_TIS": {**_PG, "rollout_is": "sequence", **_GEO},
    "BYPASS_PG_GEO_RS_TOKEN_TIS": {**_PG, "rollout_is": "token", **_GEO},
}
DIFFERS: Mapping[str, str] = {
    "rejected rows": (
        "verl's trainer divides a mean over sequences by all rows, this by those of which rejection left something: "
        "verl's is smaller by the share of rows that are left"
    ),
    "terms of a rejected row": (
        "verl's bypass mode divides a row by what rejection left of it, this by all its terms: the share that is left "
        "times verl's"
    ),
    "weights of geo_mean": (
        "verl weighs a row by the geometric mean of its token weights, here each term carries its own"
    ),
    "rejection within geo_mean": "verl's mean is over the terms that rejection left, this over all terms of the trace",
    "rate within a batch": (
        "verl's learning rate stands still for the {steps} optimizer steps of a training batch, here it moves at each"
    ),
    "norms and biases": (
        "verl decays norms and biases too, each step by a factor of 1 - lr * {decay:g}; here they stay as they are"
    ),
    "epsilon of the deviation": "verl adds 1e-6 to the standard deviation of a group, this 1e-4",
}
