"""verl's rollout correction and actor options as values of the algebra, and the objects its functions ask for."""

from typing import Any

from tracegrad.objective import Aggregation, MaskOutside, Ratio, Reduce, Rejection, Truncate, Weight
from tracegrad.recipes.verl import REJECTIONS

OLD, MISMATCH = Ratio("theta", "old"), Ratio("old", "rollout")
IS_LEVELS = {"token": Aggregation(), "sequence": Aggregation("trace", "sum")}
RS_LEVELS = {
    "token": Aggregation(),
    "seq_sum": Aggregation("trace", "sum"),
    "seq_mean": Aggregation("trace", "mean"),
    "seq_max": Aggregation("trace", "max"),
}
# At these some terms or rows of `padded.hard` fall and some stay.
THRESHOLDS = {option: threshold for option, threshold in REJECTIONS.items() if "," not in option}
REDUCTIONS = {
    "token-mean": Reduce("token"),
    "token-sum": Reduce("constant", norm=1.0),
    "seq-mean-token-sum": Reduce("trace", "sum"),
    "seq-mean-token-sum-norm": Reduce("trace", "sum", norm=64.0),
    "seq-mean-token-mean": Reduce("trace", "mean"),
}


def weights_of(rollout_is: str | None, threshold: float | str = 2.0, normalize: bool = False, ratio: Ratio = MISMATCH):
    """rollout_is and its threshold."""
    if rollout_is is None:
        return ()
    low, _, high = str(threshold).rpartition("_")
    shape = MaskOutside(float(low), float(high)) if low else Truncate(0.0, float(high))
    return (Weight(ratio, IS_LEVELS[rollout_is], shape, normalize=normalize),)


def gates_of(rollout_rs: str | None, threshold: Any = None, ratio: Ratio = MISMATCH) -> tuple[Rejection, ...]:
    """rollout_rs, a comma list, and its thresholds."""
    options = rollout_rs.split(",") if rollout_rs else []
    thresholds = str(threshold).split(",") if options else []
    if len(thresholds) == 1:
        thresholds = thresholds * len(options)
    return tuple(_gate(option, each, ratio) for option, each in zip(options, thresholds, strict=True))


def _gate(option: str, threshold: str, ratio: Ratio) -> Rejection:
    level, stat = option.rsplit("_", 1)
    if stat != "k1":
        return Rejection(ratio, stat, RS_LEVELS[level], high=float(threshold))
    low, _, high = threshold.rpartition("_")
    # verl's k1 is -log(old/rollout), so its bounds are those of rollout/old.
    return Rejection(ratio, level=RS_LEVELS[level], low=1 / float(high), high=1 / float(low or 1 / float(high)))


def thresholds_of(rollout_rs: str) -> str:
    """The thresholds of a comma list."""
    return ",".join(str(THRESHOLDS[option]) for option in rollout_rs.split(","))


def actor_config(**options: Any) -> Any:
    """verl's ActorConfig as its YAML ships, with `options` in place; `policy_loss` entries by their names."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, **options}
    policy = {key: options.pop(key) for key in list(options) if key in PolicyLossConfig.__dataclass_fields__}
    info = options.pop("global_batch_info", {})
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=False,
        policy_loss=PolicyLossConfig(**policy),
        **options,
    )
    config.global_batch_info.update({"loss_scale_factor": 64, **info})
    return config
