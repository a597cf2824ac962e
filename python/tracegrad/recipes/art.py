"""Import ART's training options as a recipe: those of `backend.train(...)` and dev.TrainConfig. ART is not imported."""

from collections.abc import Mapping
from typing import Any

from tracegrad.config import Advantage
from tracegrad.objective import (
    AdvantageShift,
    Aggregation,
    Clip,
    MaskOutside,
    Objective,
    PolicyGradient,
    Ratio,
    Reduce,
    Truncate,
    Weight,
)
from tracegrad.recipes.import_config import Peer, PeerConfig, UnsupportedOption, flat, read
from tracegrad.recipes.recipe import Recipe

_OLD, _DIRECT, _MISMATCH = Ratio("theta", "old"), Ratio("theta", "rollout"), Ratio("old", "rollout")
_MEAN = Aggregation("trace", "mean")
_CAP = "max_negative_advantage_importance_sampling_weight"


def from_art(config: Any) -> Recipe:
    """Convert ART's options to a recipe: the arguments of `backend.train`, a TrainConfig, or a dev.TrainConfig.

    Raises:
        ArgumentError: for options without a counterpart, by name and with a fix.

    >>> print(from_art({"epsilon_high": 3.0}).objective.weights[0].transform)
    clamp(w, 0, 4)
    """
    return read(ART, flat(config.model_dump() if hasattr(config, "model_dump") else config, max_depth=0))


def _build(o: PeerConfig) -> Recipe:
    ppo = o["ppo"] or o.lookup("loss_fn", {"cispo": False, "ppo": True})
    low = (0.2 if ppo else 1.0) if o["epsilon"] is None else o["epsilon"]
    high = (low if ppo else 4.0) if o["epsilon_high"] is None else o["epsilon_high"]
    ratio, cap = _OLD if o["precalculate_logprobs"] else _DIRECT, o[_CAP] or None
    bound, most = o["truncated_importance_sampling"] or None, high if cap is None else min(high, cap - 1)
    levels: dict[str, Aggregation] = {"token": Aggregation(), "sequence": _MEAN}
    levels["average"] = Aggregation("trace", "mean", blend="arithmetic")
    levels["geometric_average"] = Aggregation("trace", "mean", blend="geometric")
    level, weights, shifts = o.lookup("importance_sampling_level", levels), (), ()
    if bound is not None:
        weights = (Weight(_MISMATCH, transform=Truncate(0.0, bound)),)
        if not o["precalculate_logprobs"]:
            o.refuse("truncated_importance_sampling", "without precalculate_logprobs ART squares the ratio", "set both")
    if o["kimi_k2_tau"]:
        shifts = (AdvantageShift(ratio, o["kimi_k2_tau"]),)
    if o["kl_penalty_coef"]:
        shifts = (*shifts, AdvantageShift(Ratio("theta", "ref"), o["kl_penalty_coef"], center="microbatch"))
    if o["mask_prob_ratio"] and (ppo or low < 1):
        reason = (
            "masked tokens keep the weight 1 - epsilon in ART, and a constant loss with ppo; here they have no loss"
        )
        o.refuse("mask_prob_ratio", reason, "epsilon 1, or a Rejection")
    if ppo:
        objective = Objective(Clip(low, most, delta=cap, level=level), ratio, weights, (), (), _TRACES, shifts)
    else:  # a ratio that the cap limits below 1 + epsilon_high is within the window
        masked = o["mask_prob_ratio"] and most == high
        least = max(0.0, 1 - low)
        shape = MaskOutside(least, 1 + high, strict=True) if masked else Truncate(least, 1 + most)
        objective = Objective(PolicyGradient(), None, (*weights, Weight(ratio, level, shape)), (), (), _TRACES, shifts)
    scaled = o["scale_rewards"] and o["normalize_advantages"]
    advantage = Advantage(scale="std" if scaled else "none", ddof=0 if scaled else 1, single_sample_group="zero")
    for name in ("mean size of advantages", "AdamW", "missing logprobs"):
        o.differs(name)
    if scaled:
        o.differs("epsilon of the deviation")
    return Recipe(objective, advantage, None, (("optimizer.lr", float(o["learning_rate"])),))


_TRACES = Reduce("trace", "mean")
_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "loss_fn": ("cispo", "ppo"),
    "ppo": (False, True),
    "epsilon": (None, 0.3),
    "epsilon_high": (None, 0.5),
    "importance_sampling_level": ("token", "sequence", "average", "geometric_average"),
    _CAP: (None, 3.0),
    "mask_prob_ratio": (False, True),
    "kimi_k2_tau": (None, 0.1),
    "kl_penalty_coef": (0.0, 0.05),
    "precalculate_logprobs": (False, True),
    "truncated_importance_sampling": (None, 2.0),
    "scale_rewards": (True, False),
    "normalize_advantages": (True, False),
    "learning_rate": (5e-6, 1e-5),
}

ART = Peer(
    name="art",
    version="0.5.18",
    options=_OPTIONS,
    build=_build,
    with_options={"truncated_importance_sampling": {"precalculate_logprobs": True}},
    unsupported={
        "advantage_balance": UnsupportedOption(
            (0.0, 0),
            "advantages of both signs have the same weight",
            "advantage.divide_by_mean_abs in your own training loop",
            run_only=True,
        ),
        "adam_params": UnsupportedOption((None,), "it is a class of another backend", "optimizer.*", run_only=True),
        "loss_fn_config": UnsupportedOption((None,), "ART's local backend does not accept it either", "remove it"),
        "scale_learning_rate_by_reward_std_dev": UnsupportedOption(
            (False,), "the learning rate follows a schedule", "schedule.name", run_only=True
        ),
        "num_trajectories_learning_rate_multiplier_power": UnsupportedOption(
            (0.0, 0), "the learning rate follows a schedule", "schedule.name", run_only=True
        ),
        "allow_training_without_logprobs": UnsupportedOption(
            (False,), "a missing logprob would silently become a ratio of 1", "objective TOPR_POSITIVE, --text-only"
        ),
        "kl_penalty_reference_step": UnsupportedOption(
            (None,), "the reference is a folder", "train.ref_model", run_only=True
        ),
        "kl_ref_adapter_path": UnsupportedOption(
            (None,), "the reference is a folder of full weights", "train.ref_model", run_only=True
        ),
    },
    ignored=(
        "grad_accumulation_sequences plot_tensors logprob_calculation_chunk_size packed_sequence_length "
        "save_checkpoint verbose moe_routing_* batch_size"
    ),
    correction="truncated_importance_sampling: 2.0",
    differs={
        "mean size of advantages": (
            "ART divides the advantages of a batch by their mean size, without an option. Here, call "
            "advantage.divide_by_mean_abs in your own training loop. A step of AdamW is nearly the same without it"
        ),
        "AdamW": (
            "ART always uses 8-bit AdamW with weight decay 0.1 and gradients clipped to a norm of 0.1; here the "
            "defaults are optimizer.weight_decay 0 and optimizer.grad_clip 1"
        ),
        "missing logprobs": "a missing logprob is a ratio of 1 in ART; here its token is dropped and counted",
        "epsilon of the deviation": "ART adds 1e-6 to the standard deviation of a group, tracegrad 1e-4",
    },
)
