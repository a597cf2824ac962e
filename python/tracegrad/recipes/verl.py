"""Import verl's configuration as a recipe. verl is not imported."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from tracegrad.config import Advantage
from tracegrad.errors import ArgumentError
from tracegrad.objective import (
    Aggregation,
    Clip,
    DropCovariance,
    EntropyBonus,
    GeoClip,
    Importance,
    MaskOutside,
    Objective,
    Penalty,
    PolicyGradient,
    Ratio,
    Reduce,
    Rejection,
    Sigmoid,
    TopCovariance,
    Truncate,
    Weight,
)
from tracegrad.recipes.import_config import Peer, PeerConfig, UnsupportedOption, flat, read, reward_kl, schedule_options
from tracegrad.recipes.recipe import Options, Recipe

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
_OVERLONG = UnsupportedOption(
    (False,), "rewards are recorded", "advantage.overlong, and write the sum as a reward", run_only=True
)
WITHOUT: Mapping[str, UnsupportedOption] = {
    f"{G}use_pf_ppo": UnsupportedOption(
        (False,), "traces are not resampled by their reward", "remove it", run_only=True
    ),
    f"{G}rollout_correction": UnsupportedOption((None,), "it is a table", "rollout_correction.rollout_is"),
    f"{G}filter_groups": UnsupportedOption((None,), "it is a table", "filter_groups.enable"),
    f"{A}ppo_epochs": UnsupportedOption(
        (1,),
        "it repeats one batch several times in a row; here an epoch is over all traces",
        "train.epochs, updates_per_old_logprobs 0",
        run_only=True,
    ),
    f"{A}optim.lr_warmup_steps_ratio": UnsupportedOption(
        (0.0,), "the warm-up is set in steps here", "optim.lr_warmup_steps", run_only=True
    ),
    f"{A}optim.min_lr_ratio": UnsupportedOption(
        (0.0, None), "it is schedule.min_lr_ratio", "--schedule.min_lr_ratio", run_only=True
    ),
    f"{A}optim.num_cycles": UnsupportedOption(
        (0.5,), "the cosine schedule decreases only once", "remove it", run_only=True
    ),
    f"{A}optim.optimizer": UnsupportedOption(("AdamW", "adam"), "the optimizer is AdamW", "remove it", run_only=True),
    f"{A}freeze_vision_tower": UnsupportedOption(
        (False,), "it is images.vision_encoder here", "--images.vision_encoder frozen, the default", run_only=True
    ),
    "reward_model.overlong_buffer.enable": _OVERLONG,
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": _OVERLONG,
    "reward.reward_kwargs.overlong_buffer_cfg.enable": _OVERLONG,
    "distillation.enabled": UnsupportedOption((False,), "distillation is not supported", "remove it"),
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
        "verl's trainer divides a mean over sequences by all rows, tracegrad by the rows with tokens after rejection: "
        "verl's mean is smaller by the share of these rows"
    ),
    "tokens of a rejected row": (
        "verl's bypass mode divides a row by its tokens after rejection, tracegrad by all its tokens: the result is "
        "the share of these tokens times verl's"
    ),
    "weights of geo_mean": (
        "verl weights a row by the geometric mean of its token weights; here each token has its own weight"
    ),
    "rejection within geo_mean": "verl's mean is over the tokens that pass rejection, tracegrad's over the full trace",
    "rate within a batch": (
        "verl's learning rate is constant for the {steps} optimizer steps of a training batch; here it changes at each"
    ),
    "norms and biases": (
        "verl also decays norms and biases, each step by a factor of 1 - lr * {decay:g}; tracegrad does not"
    ),
    "epsilon of the deviation": "verl adds 1e-6 to the standard deviation of a group, tracegrad 1e-4",
}


_OLD, _DIRECT, _MISMATCH = Ratio("theta", "old"), Ratio("theta", "rollout"), Ratio("old", "rollout")
_PRODUCT = Aggregation("trace", "sum")
_LEVELS = {
    "token": Aggregation(),
    "seq_sum": _PRODUCT,
    "seq_mean": Aggregation("trace", "mean"),
    "seq_max": Aggregation("trace", "max"),
}
_KINDS: dict[str, Any] = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_KINDS |= {f"{name}+": kind for name, kind in _KINDS.items()}
Terms = Literal["kept", "all"]
_GATED: dict[Terms, Any] = {"kept": "detached", "all": False}


def from_verl(config: Any) -> Recipe:
    """Convert verl's complete config, an ActorConfig, AlgoConfig or RolloutCorrectionConfig, or a dict, to a recipe.

    Raises:
        ArgumentError: for options without a counterpart, by name and with a fix.

    >>> print(from_verl({"algorithm": {"rollout_correction": {"rollout_is": "token"}}}).objective.weights[0].transform)
    clamp(w, 0, 2)
    """
    for key, prefix in (("rollout_is", C), ("adv_estimator", G), ("loss_agg_mode", A)):
        if key in set(config) if isinstance(config, Mapping) else hasattr(config, key):
            return read(VERL, flat(config, prefix))
    return read(VERL, flat(config))


def _build(o: PeerConfig) -> Recipe:
    loss, bypass = o[f"{A}policy_loss.loss_mode"], o[f"{C}bypass_mode"]
    bypassed = loss == "bypass_mode" or bypass
    objective = _bypassed(o) if bypassed else _decoupled(o, loss)
    advantage, estimator = None, f"{G}adv_estimator"
    if o[estimator] is not None:
        scale = "std" if o[f"{G}norm_adv_by_std_in_grpo"] else "none"
        advantage = o.lookup(
            estimator,
            {
                "grpo": Advantage(scale=scale, single_sample_group="keep"),
                "rloo": Advantage("rloo", single_sample_group="keep"),
                "opo": Advantage("opo", single_sample_group="keep"),
            },
            of_run=True,
        )
        if advantage is not None and advantage.scale == "std":
            o.differs("epsilon of the deviation")
    _record_rejection_differences(o, loss, bypassed)
    return Recipe(objective, advantage, None, _options(o, objective))


def _record_rejection_differences(o: PeerConfig, loss: str, bypassed: bool) -> None:
    """Record the configs whose loss after rejection differs from verl's."""
    rejections = o[f"{C}rollout_rs"] or ""
    of_tokens = any(rejection.strip().startswith("token_") for rejection in rejections.split(","))
    mode = "seq-mean-token-mean" if loss == "sapo" and not bypassed else o[f"{A}loss_agg_mode"]
    has_penalty = o[f"{A}use_kl_loss"] or o[f"{A}entropy_coeff"]
    if bypassed and of_tokens and mode == "seq-mean-token-mean":
        o.differs("tokens of a rejected row")
    if rejections and not bypassed and mode.startswith("seq-mean") and (loss != "geo_mean" or has_penalty):
        o.differs("rejected rows")
    if loss == "geo_mean" and not bypassed:
        if of_tokens:
            o.differs("rejection within geo_mean")
        if o[f"{C}rollout_is"] == "token":
            o.differs("weights of geo_mean")


def _bypassed(o: PeerConfig) -> Objective:
    """Return the objective of bypass mode, on theta/rollout: rejections, and a weight for reinforce.

    For ppo_clip, the clip itself bounds the ratio.
    """
    gates, reduce = _gates(o, _DIRECT), _reduce(o, "all")
    fields = {"penalties": _penalties(o, reduce, "all"), "reduce": reduce, "entropy": _bonus(o, reduce, "all")}
    if o.lookup(f"{C}loss_type", {"ppo_clip": True, "reinforce": False}):
        return Objective(Clip(*_bounds(o), dual=o[f"{A}clip_ratio_c"]), _DIRECT, (), gates, **fields)
    return Objective(PolicyGradient(), None, _weights(o, _DIRECT), gates, **fields)


def _decoupled(o: PeerConfig, loss: str) -> Objective:
    low, high = _bounds(o)
    weights, gates = _weights(o, _MISMATCH), _gates(o, _MISMATCH)
    bounds: tuple[dict[str, Any], ...] = ({"high": high, "when": "A>0"}, {"low": -low, "when": "A<=0"})
    reduce = Reduce("trace", "mean", denominator="kept") if loss in ("sapo", "geo_mean") else _reduce(o, "kept")
    reduce = Reduce("trace", "mean") if loss == "geo_mean" else reduce
    options: dict[str, Any] = {"masked": True, "weighted": bool(weights)}
    own_penalties: tuple[Penalty, ...] = ()
    surrogate, ratio = Clip(low, high), _OLD
    if loss == "vanilla":
        surrogate = Clip(low, high, dual=o[f"{A}clip_ratio_c"])
    elif loss in ("dppo_tv", "dppo_kl"):
        surrogate, ratio = PolicyGradient(), None
        weights = (*weights, Weight(_OLD, transform=Truncate(0.0, o[f"{A}clip_ratio_c"])))
        stat = "dprob" if loss == "dppo_tv" else "binary_kl"
        gates = (*gates, *(Rejection(_OLD, stat, **side) for side in bounds))
    elif loss == "gspo":
        surrogate = Clip(low, high, level=Aggregation("trace", "mean", "token", terms="kept"))
    elif loss == "sapo":
        surrogate = Sigmoid(o[f"{A}tau_pos"], o[f"{A}tau_neg"])
    elif loss == "gpg":
        surrogate, ratio = PolicyGradient(), None
    elif loss == "clip_cov":
        share, least, most = (o[f"{A}policy_loss.clip_cov_{name}"] for name in ("ratio", "lb", "ub"))
        gates = (*gates, DropCovariance(share, least, most, "microbatch"))
    elif loss == "kl_cov":
        selector = TopCovariance(o[f"{A}policy_loss.kl_cov_ratio"], "microbatch")
        surrogate, own_penalties = (
            Importance(),
            (Penalty(_OLD, "abs", o[f"{A}policy_loss.ppo_kl_coef"], where=selector, **options),),
        )
    elif loss == "geo_mean":
        surrogate = GeoClip(low, high)
    elif loss == "dro":
        surrogate, ratio = PolicyGradient(), None
        own_penalties = (Penalty(_OLD, "k2", o[f"{A}policy_loss.dro_beta"] or 0.0, **options),)
    elif loss == "cispo":
        surrogate, ratio = PolicyGradient(), None
        weights = (*weights, Weight(_OLD, transform=Truncate(1 - low, 1 + high)))
    else:
        o.lookup(f"{A}policy_loss.loss_mode", dict.fromkeys(LOSSES))
    penalties = (*own_penalties, *_penalties(o, reduce, "kept"))
    return Objective(surrogate, ratio, weights, gates, penalties, reduce, entropy=_bonus(o, reduce, "kept"))


def _bounds(o: PeerConfig) -> tuple[float, float]:
    default = o[f"{A}clip_ratio"]
    low, high = o[f"{A}clip_ratio_low"], o[f"{A}clip_ratio_high"]
    return (default if low is None else low, default if high is None else high)


def _weights(o: PeerConfig, ratio: Ratio) -> tuple[Weight, ...]:
    """Return the weight of rollout_is. One threshold truncates the weight; outside of two ("low_high") it is 0."""
    if o[f"{C}rollout_is"] is None:
        return ()
    level = o.lookup(f"{C}rollout_is", {"token": Aggregation(), "sequence": _PRODUCT})
    low, high = _threshold(o, f"{C}rollout_is_threshold", str(o[f"{C}rollout_is_threshold"]))
    shape = Truncate(0.0, high) if low is None else MaskOutside(low, high)
    return (Weight(ratio, level, shape, normalize=o[f"{C}rollout_is_batch_normalize"]),)


def _gates(o: PeerConfig, ratio: Ratio) -> tuple[Rejection, ...]:
    """Return the rejections of rollout_rs, a comma-separated list. verl's k1 is -log, so its bounds are inverted."""
    name, text = f"{C}rollout_rs_threshold", o[f"{C}rollout_rs"]
    rejections = [rejection.strip() for rejection in text.split(",")] if text else []
    thresholds = [rejection.strip() for rejection in str(o[name]).split(",")] if rejections else []
    if rejections and (o[name] is None or len(thresholds) not in (1, len(rejections))):
        o.refuse(name, f"{len(rejections)} rejections need one threshold, or one each", "such as 0.999_1.001")
        return ()
    gates = []
    for rejection, threshold in zip(
        rejections, thresholds * (len(rejections) if len(thresholds) == 1 else 1), strict=True
    ):
        level, _, stat = rejection.rpartition("_")
        if level not in _LEVELS or stat not in ("k1", "k2", "k3"):
            o.refuse(f"{C}rollout_rs", f"{rejection} is not a rejection", "for example token_k1 or seq_mean_k3")
            return ()
        low, high = _threshold(o, name, threshold)
        if stat == "k1":
            gates.append(Rejection(ratio, level=_LEVELS[level], low=1 / high, high=1 / (low or 1 / high)))
        else:
            gates.append(Rejection(ratio, stat, _LEVELS[level], high=high))
    return tuple(gates)


def _threshold(o: PeerConfig, name: str, text: str) -> tuple[float | None, float]:
    """Parse a bound, or two as "low_high"."""
    bounds = re.fullmatch(r"(?:([0-9.]+)_)?([0-9.]+(?:e[-+]?[0-9]+)?)", text)
    try:
        assert bounds is not None
        low, high = None if bounds[1] is None else float(bounds[1]), float(bounds[2])
        assert high > 0
        return low, high
    except (AssertionError, ValueError):
        o.refuse(name, "it is not a threshold", "write 2.0, or 0.5_2.0")
        return None, 2.0


def _reduce(o: PeerConfig, denominator: Any) -> Reduce:
    norm = o[f"{A}loss_scale_factor"]
    if norm is None and o[f"{A}loss_agg_mode"] == "seq-mean-token-sum-norm":
        o.refuse(f"{A}loss_scale_factor", "verl then divides by the padded width of a batch", "set the constant")
    return o.lookup(
        f"{A}loss_agg_mode",
        {
            "token-mean": Reduce("token", denominator=denominator),
            "token-sum": Reduce("constant", norm=1.0),
            "seq-mean-token-sum": Reduce("trace", "sum", denominator=denominator),
            "seq-mean-token-sum-norm": Reduce("trace", "sum", norm=float(norm or 1), denominator=denominator),
            "seq-mean-token-mean": Reduce("trace", "mean", denominator=denominator),
        },
    )


def _penalties(o: PeerConfig, reduce: Reduce, terms: Terms) -> tuple[Penalty, ...]:
    """Return the KL loss, on the mask that verl passes to the actor. The loss's own rejections do not change it.

    Rejection by old/rollout comes before it, so the tokens are "kept". In bypass mode, rejection is part of the loss,
    and the tokens are "all".
    """
    if not o[f"{A}use_kl_loss"]:
        return ()
    name = f"{A}kl_loss_type"
    kind = o.lookup(name, _KINDS)
    straight_through, own_reduce = o[name].endswith("+") and kind != "k2", _reduce(o, terms)
    cap = 10.0 if kind == "k3" else None
    ratio, coef = Ratio("theta", "ref"), o[f"{A}kl_loss_coef"]
    return (
        Penalty(
            ratio,
            kind,
            coef,
            masked=_GATED[terms],
            weighted=False,
            straight_through=straight_through,
            cap=cap,
            reduce=None if own_reduce == reduce else own_reduce,
        ),
    )


def _bonus(o: PeerConfig, reduce: Reduce, terms: Terms) -> EntropyBonus | None:
    """Return the entropy bonus, on the same tokens."""
    coef, own_reduce = o[f"{A}entropy_coeff"], _reduce(o, terms)
    return (
        EntropyBonus(coef, masked=_GATED[terms], reduce=None if own_reduce == reduce else own_reduce) if coef else None
    )


def _options(o: PeerConfig, objective: Objective) -> Options:
    batch_size, mini_batch_size = o["data.train_batch_size"], o[f"{A}ppo_mini_batch_size"]
    steps = max(1, batch_size // mini_batch_size) if batch_size and mini_batch_size else 0
    options = list(_rates(o, steps))
    beta1, beta2 = o[f"{A}optim.betas"]
    options += [("optimizer.beta1", float(beta1)), ("optimizer.beta2", float(beta2))]
    options += [("optimizer.weight_decay", o[f"{A}optim.weight_decay"]), ("optimizer.grad_clip", o[f"{A}grad_clip"])]
    if o[f"{A}optim.weight_decay"]:
        o.differs("norms and biases", decay=o[f"{A}optim.weight_decay"])
    uses_kl_in_reward = o[f"{G}use_kl_in_reward"]
    if steps and (objective.requirements.old or uses_kl_in_reward):
        options.append(("train.updates_per_old_logprobs", steps))
    if uses_kl_in_reward and o[f"{C}bypass_mode"]:
        reason = "with bypass_mode the penalty is on the recorded policy"
        o.refuse(f"{G}use_kl_in_reward", reason, "set one of them", of_run=True)
    if uses_kl_in_reward:
        target = o.lookup(f"{G}kl_ctrl.type", {"fixed": None, "adaptive": o[f"{G}kl_ctrl.target_kl"]})
        kind, horizon = o.lookup(f"{G}kl_penalty", _KINDS), o[f"{G}kl_ctrl.horizon"]
        options += reward_kl(o[f"{G}kl_ctrl.kl_coef"], kind, target, horizon)
    if o[f"{G}filter_groups.enable"]:
        options.append(("filter.drop_zero_std_groups", True))
        if o[f"{G}filter_groups.metric"] not in (None, "reward"):
            reason = "groups are filtered by the trained reward"
            o.refuse(f"{G}filter_groups.metric", reason, "reward", of_run=True)
    return tuple(options)


def _rates(o: PeerConfig, steps: int) -> Options:
    """Return the schedule. verl counts training batches of `steps` optimizer steps each; 0 if that is unknown."""
    scheduler, warmup = f"{A}optim.lr_scheduler_type", f"{A}optim.lr_warmup_steps"
    if o[warmup] > 0 and not steps:
        reason = "it counts training batches, whose number of optimizer steps is unknown"
        o.refuse(warmup, reason, f"set data.train_batch_size and {A}ppo_mini_batch_size", of_run=True)
    if steps > 1 and (o[warmup] > 0 or o[scheduler] != "constant"):
        o.differs("rate within a batch", steps=steps)
    return schedule_options(o, f"{A}optim.lr", scheduler, warmup, constant_warms=True, per_unit=max(1, steps))


_TRUNCATION = {
    f"actor_rollout_ref.rollout.{name}": (name, (default, None)) for name, default in (("top_p", 1.0), ("top_k", -1))
}
VERL = Peer(
    "verl",
    "0.9.1",
    OPTIONS,
    _build,
    BESIDE,
    WITHOUT,
    OWN,
    DIFFERS,
    correction="algorithm.rollout_correction.rollout_is: token",
    truncation=_TRUNCATION,
    instead={
        "actor_rollout_ref.model.path": "--model",
        "actor_rollout_ref.model.lora_rank": "train.lora_rank",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "train.memory_mode",
        "actor_rollout_ref.rollout.temperature": "the recorded temperature; online, rollout.temperature",
        "data.train_files": "the path of the traces",
        "data.seed": "train.seed",
        "trainer.default_local_dir": "--out",
        "trainer.save_freq": "checkpoint.every_steps",
        "trainer.logger": "train.report_to",
    },
    batch=(f"{A}ppo_mini_batch_size",),
    describe_batch=lambda values: f"{values[f'{A}ppo_mini_batch_size']:,} prompts",
    temperature="actor_rollout_ref.rollout.temperature",
)
NAMES = tuple(f"VERL_{name}" for name in CORRECTIONS)


def named(name: str) -> Recipe:
    """Return one of verl's nineteen corrections by name, with verl's vanilla loss and the advantages of its grpo.

    >>> named("VERL_BYPASS_PPO_CLIP").objective.ratio
    Ratio(num='theta', den='rollout')
    """
    if name not in NAMES:
        raise ArgumentError(f"TG-RECIPE-014: verl has no correction {name!r}. Choose one of {', '.join(NAMES)}.")
    correction = {f"{C}{key}": value for key, value in CORRECTIONS[name.removeprefix("VERL_")].items()}
    recipe = VERL.recipe({f"{G}adv_estimator": "grpo", **correction})
    return Recipe(recipe.objective, recipe.advantage)
