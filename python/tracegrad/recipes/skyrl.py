"""Import SkyRL's config as a recipe: its algorithm and off-policy correction. SkyRL is not imported."""

from collections.abc import Mapping
from typing import Any

from tracegrad.config import Advantage
from tracegrad.objective import (
    Aggregation,
    Clip,
    DropCovariance,
    EntropyBonus,
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

_OLD, _DIRECT, _MISMATCH = Ratio("theta", "old"), Ratio("theta", "rollout"), Ratio("old", "rollout")
_A, _C, _O = "trainer.algorithm.", "trainer.algorithm.off_policy_correction.", "trainer.policy.optimizer_config."
LOSSES = (
    "regular",
    "dual_clip",
    "gspo",
    "cispo",
    "rollout_is",
    "dppo",
    "sapo",
    "importance_sampling",
    "clip_cov",
    "kl_cov",
)


def from_skyrl(config: Any) -> Recipe:
    """Convert a SkyRLTrainConfig, an AlgorithmConfig, or a dict with their options, to a recipe.

    Raises:
        ArgumentError: for options without a counterpart, by name and with a fix.

    >>> from_skyrl({"trainer": {"algorithm": {"policy_loss_type": "sapo"}}}).objective.surrogate.tau_neg
    1.05
    """
    is_algorithm = "policy_loss_type" in config if isinstance(config, Mapping) else hasattr(config, "policy_loss_type")
    return read(SKYRL, flat(config, _A if is_algorithm else ""))


def _build(o: PeerConfig) -> Recipe:
    loss, low, high = o[f"{_A}policy_loss_type"], o[f"{_A}eps_clip_low"], o[f"{_A}eps_clip_high"]
    weights, gates = _weights(o), _gates(o)
    surrogate, ratio, covariance_gates, covariance_penalties = Clip(low, high), _OLD, (), ()
    if loss == "dual_clip":
        surrogate = Clip(low, high, dual=o[f"{_A}clip_ratio_c"])
    elif loss == "gspo":
        surrogate = Clip(low, high, level=Aggregation("trace", "mean", "token"))
    elif loss == "cispo":
        surrogate, ratio = PolicyGradient(), None
        bounds = (1 - o[f"{_A}cispo.cispo_eps_clip_low"], 1 + o[f"{_A}cispo.cispo_eps_clip_high"])
        weights = (*weights, Weight(_OLD, transform=Truncate(*bounds)))
    elif loss == "rollout_is":
        surrogate, ratio = PolicyGradient(), None
        weights = (*weights, Weight(_DIRECT, transform=MaskOutside(1 - low, 1 + high, strict=True)))
    elif loss == "dppo":
        surrogate, ratio = Importance(), _DIRECT
        stat = o.lookup(f"{_A}dppo.dppo_type", {"binary_tv": "dprob", "binary_kl": "binary_kl"})
        above = Rejection(_DIRECT, stat, high=o[f"{_A}dppo.delta_high"], when="A>0")
        gates = (*gates, above, Rejection(_DIRECT, stat, low=-o[f"{_A}dppo.delta_low"], when="A<0"))
    elif loss == "sapo":
        surrogate = Sigmoid(o[f"{_A}sapo.tau_pos"], o[f"{_A}sapo.tau_neg"])
    elif loss == "importance_sampling":
        surrogate = Importance()
    elif loss == "clip_cov":
        bounds = (o[f"{_A}clip_cov.clip_cov_lb"], o[f"{_A}clip_cov.clip_cov_ub"])
        covariance_gates = (DropCovariance(o[f"{_A}clip_cov.clip_ratio"], *bounds, "microbatch", scaled=True),)
    elif loss == "kl_cov":  # its penalty is a sum without a denominator
        surrogate, selector = Importance(), TopCovariance(o[f"{_A}kl_cov.kl_cov_frac"], "microbatch", scaled=True)
        covariance_penalties = (
            Penalty(
                _OLD,
                "abs",
                o[f"{_A}kl_cov.ppo_kl_coef"],
                masked=True,
                weighted=False,
                where=selector,
                reduce=Reduce("constant", norm=1.0),
            ),
        )
    else:
        o.lookup(f"{_A}policy_loss_type", dict.fromkeys(LOSSES))
    if loss in ("clip_cov", "kl_cov", "importance_sampling") and (weights or gates):
        o.refuse(
            f"{_A}policy_loss_type",
            "SkyRL does not correct this loss, so off_policy_correction has no effect",
            "remove off_policy_correction",
        )
    reduce = _reduce(o)
    penalties = (*covariance_penalties, *_penalties(o, reduce))
    objective = Objective(
        surrogate, ratio, weights, (*gates, *covariance_gates), penalties, reduce, entropy=_bonus(o, reduce)
    )
    scale = "std" if o[f"{_A}grpo_norm_by_std"] else "none"
    advantage = o.lookup(
        f"{_A}advantage_estimator",
        {
            "grpo": Advantage(scale=scale, single_sample_group="keep"),
            "rloo": Advantage("rloo", single_sample_group="zero"),
            "maxrl": Advantage("max_rl", single_sample_group="keep"),
        },
        of_run=True,
    )
    if advantage is not None and advantage.scale == "std":
        o.differs("epsilon of the deviation")
    if advantage is not None and advantage.baseline == "max_rl":
        o.differs("means below 0")
    if o[f"{_O}weight_decay"]:
        o.differs("norms and biases", decay=o[f"{_O}weight_decay"])
    return Recipe(objective, advantage, None, _options(o, objective))


def _weights(o: PeerConfig) -> tuple[Weight, ...]:
    if o[f"{_C}tis_ratio_type"] is None:
        return ()
    level = o.lookup(
        f"{_C}tis_ratio_type", {"token": Aggregation(), "sequence": Aggregation("trace", "sum", terms="kept")}
    )
    name = "token" if level == Aggregation() else "sequence"
    return (Weight(_MISMATCH, level, Truncate(0.0, o[f"{_C}{name}_tis_ratio_clip_high"])),)


def _gates(o: PeerConfig) -> tuple[Rejection, ...]:
    """Return the rejections in SkyRL's order: outliers, tokens, then rows by their remaining tokens."""
    gates: list[Rejection] = []
    low, high = (o[f"{_C}outlier_token_is_threshold_{side}"] for side in ("low", "high"))
    if low is not None or high is not None:
        gates.append(Rejection(_MISMATCH, low=low, high=high, drops="trace"))
    low, high = (o[f"{_C}token_mask_is_threshold_{side}"] for side in ("low", "high"))
    if low is not None and high is not None:
        gates.append(Rejection(_MISMATCH, low=low, high=high))
    elif low is not None or high is not None:
        side = "high" if low is None else "low"
        o.refuse(
            f"{_C}token_mask_is_threshold_{side}",
            "SkyRL silently ignores one bound without the other",
            "set both, or neither",
        )
    if o[f"{_C}sequence_mask_metric"] is not None:
        agg, name = o.lookup(f"{_C}sequence_mask_metric", {"geometric": ("mean", "geo"), "product": ("sum", "product")})
        low, high = o[f"{_C}{name}_mask_low"], o[f"{_C}{name}_mask_high"]
        gates.append(Rejection(_MISMATCH, level=Aggregation("trace", agg), terms="kept", low=low, high=high))
    return tuple(gates)


def _reduce(o: PeerConfig) -> Reduce:
    longest = o[f"{_A}max_seq_len"]
    if longest is None and o[f"{_A}loss_reduction"] == "seq_mean_token_sum_norm":
        o.refuse(f"{_A}max_seq_len", "the sum is divided by this constant", "set it")
    return o.lookup(
        f"{_A}loss_reduction",
        {
            "token_mean": Reduce("token"),
            "sequence_mean": Reduce("trace", "mean"),
            "prompt_mean": Reduce("prompt", "mean"),
            "seq_mean_token_sum_norm": Reduce("trace", "sum", norm=float(longest or 1)),
        },
    )


def _penalties(o: PeerConfig, reduce: Reduce) -> tuple[Penalty, ...]:
    """Return the KL loss: a mean over each trace, then over traces, for any reduction, with rejected tokens."""
    if not o[f"{_A}use_kl_loss"]:
        return ()
    kind = o.lookup(f"{_A}kl_estimator_type", {"k3": "k3", "k1": "k1", "k2": "k2", "abs": "abs"})
    own_reduce = Reduce("trace", "mean")
    return (
        Penalty(
            Ratio("theta", "ref"),
            kind,
            o[f"{_A}kl_loss_coef"],
            masked=False,
            weighted=False,
            cap=10.0 if kind == "k3" else None,
            reduce=None if own_reduce == reduce else own_reduce,
        ),
    )


def _bonus(o: PeerConfig, reduce: Reduce) -> EntropyBonus | None:
    if not o[f"{_A}use_entropy_loss"]:
        return None
    own_reduce = Reduce("token")
    return EntropyBonus(o[f"{_A}entropy_loss_coef"], masked=False, reduce=None if own_reduce == reduce else own_reduce)


def _options(o: PeerConfig, objective: Objective) -> Options:
    options = list(schedule_options(o, f"{_O}lr", f"{_O}scheduler", f"{_O}num_warmup_steps"))
    beta1, beta2 = o[f"{_O}adam_betas"]
    options += [("optimizer.beta1", float(beta1)), ("optimizer.beta2", float(beta2))]
    options += [("optimizer.weight_decay", o[f"{_O}weight_decay"]), ("optimizer.grad_clip", o[f"{_O}max_grad_norm"])]
    batch_size, mini_batch_size = o["trainer.train_batch_size"], o["trainer.policy_mini_batch_size"]
    uses_kl_in_reward = o[f"{_A}use_kl_in_reward"]
    if batch_size and mini_batch_size and (objective.requirements.old or uses_kl_in_reward):
        options.append(("train.updates_per_old_logprobs", max(1, batch_size // mini_batch_size)))
    if uses_kl_in_reward and o[f"{_A}use_kl_loss"]:
        o.refuse(
            f"{_A}use_kl_in_reward", "SkyRL accepts either this option or use_kl_loss", "use_kl_loss False", of_run=True
        )
    elif uses_kl_in_reward:
        target = o.lookup(f"{_A}kl_ctrl.type", {"fixed": None, "adaptive": o[f"{_A}kl_ctrl.kl_target"]})
        kind = o.lookup(f"{_A}kl_estimator_type", {name: name for name in ("k1", "k2", "k3", "abs")})
        options += reward_kl(o[f"{_A}kl_loss_coef"], kind, target, o[f"{_A}kl_ctrl.horizon"])
    return (*options, *_filters(o))


def _filters(o: PeerConfig) -> Options:
    """Return the filters. zero_variance_filter masks groups with equal rewards; two other options drop and refill them.

    These are dynamic_sampling.type and fully_async.sample_full_batch.
    """
    masks, refills = o[f"{_A}zero_variance_filter"], o["trainer.fully_async.sample_full_batch"]
    kind, truncated = o[f"{_A}dynamic_sampling.type"], o["generator.apply_overlong_filtering"]
    tolerance = o[f"{_A}zero_variance_filter_tol"] if masks else 0.0
    if kind == "replace":
        reason = "SkyRL then trains on copies of other groups, sampled at random"
        o.refuse(f"{_A}dynamic_sampling.type", reason, "filter", of_run=True)
    elif kind is not None and kind != "filter":
        o.refuse(f"{_A}dynamic_sampling.type", "this value is not supported", "filter", of_run=True)
    if masks and kind == "filter":
        reason = "dynamic_sampling.type already drops such groups"
        o.refuse(f"{_A}zero_variance_filter", reason, "set one of the two", of_run=True)
    if refills and (truncated or not masks):
        reason = (
            "it compares the traces that apply_overlong_filtering keeps"
            if masks
            else "SkyRL has it with zero_variance_filter"
        )
        fix = "remove one of them" if masks else "set both"
        o.refuse("trainer.fully_async.sample_full_batch", reason, fix, of_run=True)
    even_option = "filter.drop_zero_std_groups" if kind or refills else "filter.mask_zero_std_groups" if masks else ""
    options: list[tuple[str, Any]] = [(even_option, True)] if even_option else []
    options += [("filter.zero_std_tolerance", tolerance)] if tolerance else []
    options += [("filter.mask_truncated", True)] if truncated else []
    return (*options, *([("filter.zero_truncated", True)] if o["generator.zero_reward_on_non_stop"] else []))


_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    f"{_A}policy_loss_type": LOSSES,
    f"{_A}loss_reduction": ("token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm"),
    f"{_A}max_seq_len": (None,),
    f"{_A}eps_clip_low": (0.2, 0.1),
    f"{_A}eps_clip_high": (0.2, 0.28),
    f"{_A}clip_ratio_c": (3.0, 2.0),
    f"{_A}cispo.cispo_eps_clip_low": (0.0, 1.0),
    f"{_A}cispo.cispo_eps_clip_high": (5.0, 4.0),
    f"{_A}sapo.tau_pos": (1.0, 1.5),
    f"{_A}sapo.tau_neg": (1.05, 1.2),
    f"{_A}dppo.dppo_type": ("binary_tv", "binary_kl"),
    f"{_A}dppo.delta_low": (0.2, 0.1),
    f"{_A}dppo.delta_high": (0.2, 0.1),
    f"{_A}clip_cov.clip_ratio": (0.0002, 0.1),
    f"{_A}clip_cov.clip_cov_lb": (1.0, 0.001),
    f"{_A}clip_cov.clip_cov_ub": (5.0, 0.03),
    f"{_A}kl_cov.kl_cov_frac": (0.2, 0.4),
    f"{_A}kl_cov.ppo_kl_coef": (1.0, 0.5),
    f"{_A}use_kl_loss": (True, False),
    f"{_A}kl_loss_coef": (0.001, 0.1),
    f"{_A}kl_estimator_type": ("k3", "k1", "k2", "abs"),
    f"{_A}use_kl_in_reward": (False, True),
    f"{_A}kl_ctrl.type": ("fixed", "adaptive"),
    f"{_A}kl_ctrl.kl_target": (0.1, 0.05),
    f"{_A}kl_ctrl.horizon": (10000, 500),
    f"{_A}use_entropy_loss": (False, True),
    f"{_A}entropy_loss_coef": (0.01, 0.05),
    f"{_C}tis_ratio_type": (None, "token", "sequence"),
    f"{_C}token_tis_ratio_clip_high": (2.0, 3.0),
    f"{_C}sequence_tis_ratio_clip_high": (5.0, 1.2),
    f"{_C}sequence_mask_metric": (None, "geometric", "product"),
    f"{_C}geo_mask_high": (1.01, 1.1),
    f"{_C}geo_mask_low": (0.99, 0.95),
    f"{_C}product_mask_high": (2.0, 3.0),
    f"{_C}product_mask_low": (0.5, 0.3),
    f"{_C}outlier_token_is_threshold_low": (None, 1e-4),
    f"{_C}outlier_token_is_threshold_high": (None, 100.0),
    f"{_C}token_mask_is_threshold_low": (None, 0.6),
    f"{_C}token_mask_is_threshold_high": (None, 1.6),
    f"{_A}advantage_estimator": ("grpo", "rloo", "maxrl"),
    f"{_A}grpo_norm_by_std": (True, False),
    f"{_O}lr": (1e-6, 2e-6),
    f"{_O}scheduler": ("constant_with_warmup", "linear", "cosine"),
    f"{_O}num_warmup_steps": (0, 10),
    f"{_O}adam_betas": ((0.9, 0.999),),
    f"{_O}weight_decay": (0.01, 0.0),
    f"{_O}max_grad_norm": (1.0, 0.2),
    f"{_A}zero_variance_filter": (False, True),
    f"{_A}zero_variance_filter_tol": (1e-6, 0.0),
    f"{_A}dynamic_sampling.type": (None, "filter"),
    "trainer.fully_async.sample_full_batch": (False, True),
    "generator.apply_overlong_filtering": (False, True),
    "generator.zero_reward_on_non_stop": (False, True),
    "trainer.train_batch_size": (0, 1024),
    "trainer.policy_mini_batch_size": (256,),
}
_LOSS, _COV = f"{_A}policy_loss_type", f"{_A}clip_cov.clip_cov_lb"
_CHARGED = {f"{_A}use_kl_loss": False, f"{_A}use_kl_in_reward": True}

SKYRL = Peer(
    name="skyrl",
    version="0.3.0",
    options=_OPTIONS,
    build=_build,
    with_options={
        (f"{_A}loss_reduction", "seq_mean_token_sum_norm"): {f"{_A}max_seq_len": 40},
        f"{_A}clip_ratio_c": {_LOSS: "dual_clip"},
        **{f"{_A}cispo.cispo_eps_clip_{side}": {_LOSS: "cispo"} for side in ("low", "high")},
        **{f"{_A}sapo.tau_{sign}": {_LOSS: "sapo"} for sign in ("pos", "neg")},
        **{f"{_A}dppo.{name}": {_LOSS: "dppo"} for name in ("dppo_type", "delta_low", "delta_high")},
        **{f"{_A}clip_cov.{name}": {_LOSS: "clip_cov", _COV: 0.001} for name in ("clip_ratio", "clip_cov_ub")},
        _COV: {_LOSS: "clip_cov"},
        **{f"{_A}kl_cov.{name}": {_LOSS: "kl_cov"} for name in ("kl_cov_frac", "ppo_kl_coef")},
        f"{_A}use_kl_in_reward": {f"{_A}use_kl_loss": False},
        f"{_A}kl_ctrl.type": _CHARGED,
        **{f"{_A}kl_ctrl.{name}": {**_CHARGED, f"{_A}kl_ctrl.type": "adaptive"} for name in ("kl_target", "horizon")},
        f"{_A}entropy_loss_coef": {f"{_A}use_entropy_loss": True},
        **{f"{_C}{kind}_tis_ratio_clip_high": {f"{_C}tis_ratio_type": kind} for kind in ("token", "sequence")},
        **{f"{_C}geo_mask_{side}": {f"{_C}sequence_mask_metric": "geometric"} for side in ("high", "low")},
        **{f"{_C}product_mask_{side}": {f"{_C}sequence_mask_metric": "product"} for side in ("high", "low")},
        f"{_C}token_mask_is_threshold_low": {f"{_C}token_mask_is_threshold_high": 1.6},
        f"{_C}token_mask_is_threshold_high": {f"{_C}token_mask_is_threshold_low": 0.6},
        f"{_A}zero_variance_filter_tol": {f"{_A}zero_variance_filter": True},
        "trainer.fully_async.sample_full_batch": {f"{_A}zero_variance_filter": True},
    },
    unsupported={
        f"{_A}advantage_batch_normalize": UnsupportedOption(
            (False,),
            "advantages are computed within each group",
            "advantage.baseline batch_mean, or advantage.whiten",
            run_only=True,
        ),
        f"{_A}use_tis": UnsupportedOption(
            (False,), "it is deprecated in SkyRL", "off_policy_correction.tis_ratio_type"
        ),
        f"{_A}tis_imp_ratio_cap": UnsupportedOption(
            (-1.0, -1), "it is deprecated in SkyRL", "token_tis_ratio_clip_high"
        ),
        f"{_A}temperature": UnsupportedOption(
            (None, 1.0), "theta uses the recorded temperature of each trace", "remove it"
        ),
        "trainer.update_epochs_per_batch": UnsupportedOption(
            (1,),
            "it repeats one batch several times in a row; here an epoch is over all traces",
            "train.epochs, updates_per_old_logprobs 0",
            run_only=True,
        ),
        "generator.step_wise_trajectories": UnsupportedOption(
            (False,),
            "a row is a turn there, so that a sequence's ratio, mask or mean is a turn's; here a trace is whole",
            "leave it out, and Aggregation('turn', ...) where a turn is meant",
        ),
        "trainer.update_ref_every_epoch": UnsupportedOption(
            (False,), "it is in steps here", "train.ref_sync_steps", run_only=True
        ),
        "trainer.mtp.enabled": UnsupportedOption((False,), "draft heads are not trained", "leave it out"),
    },
    ignored=(
        f"{_A}dynamic_sampling.* {_A}lambd "
        f"{_A}gamma {_A}value_* {_O}offload_* trainer.algorithm.ppo_* trainer.placement* trainer.policy.* trainer.ref* "
        "trainer.critic* trainer.mtp* trainer.fully_async* trainer.use_* trainer.sequence_* trainer.strategy "
        "trainer.gradient_* trainer.seed trainer.resume_* trainer.*_path trainer.*_interval trainer.max_* trainer.bf16 "
        "trainer.epochs trainer.critic_* trainer.micro_* trainer.recompute_* trainer.remove_* trainer.eval_* "
        "trainer.flash_attn trainer.disable_* trainer.project_name trainer.run_name trainer.logger trainer.enable_* "
        "trainer.tags trainer.dump_* trainer.print_* trainer.num_* trainer.log* trainer.fused_* trainer.callbacks* "
        "generator* environment* data* hydra* defaults"
    ),
    correction="trainer.algorithm.off_policy_correction.tis_ratio_type: token",
    differs={
        "epsilon of the deviation": "SkyRL adds 1e-6 to the standard deviation of a group, tracegrad 1e-4",
        "means below 0": "SkyRL's maxrl flips the sign if the mean of a group is below 0; here the advantage is 0",
        "norms and biases": (
            "SkyRL also decays norms and biases, each step by a factor of 1 - lr * {decay:g}; tracegrad does not"
        ),
    },
    truncation={
        f"generator.sampling_params.{name}": (name, (default, None))
        for name, default in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0))
    },
    instead={
        "trainer.policy.model.path": "--model",
        "trainer.policy.model.lora.rank": "train.lora_rank",
        "trainer.gradient_checkpointing": "train.memory_mode",
        "generator.sampling_params.temperature": "the recorded temperature; online, rollout.temperature",
        "data.train_data": "the path of the traces",
        "trainer.seed": "train.seed",
        "trainer.ckpt_path": "--out",
        "trainer.ckpt_interval": "checkpoint.every_steps",
        "trainer.logger": "train.report_to",
    },
    batch=("trainer.policy_mini_batch_size",),
    describe_batch=lambda values: f"{values['trainer.policy_mini_batch_size']:,} prompts",
    temperature="generator.sampling_params.temperature",
)
