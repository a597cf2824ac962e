"""Define the options of a run as frozen dataclasses, each with its default, bounds and docstring.

`parse` sets them from TOML and from the command line. `FieldMap` (`[map]`) names the fields of records that
contain the reward, group, session and so on.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tracegrad.config.dotted_keys import Scalar, did_you_mean
from tracegrad.errors import ArgumentError

MOST_CHARACTERS = 1000


@dataclass(frozen=True)
class FieldMap:
    """Field map: the paths in records of the reward, group, session and other fields of a trace.

    >>> FieldMap(reward="metadata.score", group="prompt").paths()
    {'reward': 'metadata.score', 'group': 'prompt'}
    """

    reward: str = ""
    """Path of the reward: a number, a boolean, either of these as text, a word such as pass, or an object of named
    rewards."""
    group: str = ""
    """Path of the group id, shared by all traces of one prompt. The value "prompt" groups traces with equal first
    messages."""
    session: str = ""
    """Path of the session id, shared by all calls of one conversation. The value "prefix" joins a call to the call
    whose messages are its prefix."""
    order: str = ""
    """Path of a number or time that orders the calls of a session. Empty uses their order in the file."""
    id: str = ""
    """Path of the trace id."""
    logprob_kind: str = ""
    """Path of the kind of logprobs of a record: raw, processed or unknown."""
    temperature: str = ""
    """Path of the sampling temperature."""
    sampling: str = ""
    """Path of an object of sampling options: temperature, top_p, top_k, min_p, penalties, logit_bias."""
    version: str = ""
    """Path of the policy version: an integer, or text such as v7."""
    token_ids: str = ""
    """Path of the ids of the sampled tokens: a list, or one list per sampled turn (messages.*.meta.ids, with * for each
    item of a list)."""
    logprobs: str = ""
    """Path of the logprobs of the sampled tokens, in nats: one number per id of map.token_ids, in the same shape."""
    prompt_token_ids: str = ""
    """Path of the ids of the prompt, for records of ids without messages, or one list per sampled turn."""
    loss_mask: str = ""
    """Path of a mask with one entry per id of map.token_ids: 1 for a sampled token, 0 for a token of the prompt or of a
    tool."""

    def __post_init__(self) -> None:
        for name, path in self.paths().items():
            if not isinstance(path, str) or len(path) > MOST_CHARACTERS or not all(path.split(".")):
                raise ArgumentError(
                    f"TG-CONFIG-008: map.{name} is {path!r:.80}, which is not a valid path. Set a dotted path such "
                    f"as metadata.score."
                )
        if self.order and not self.session:
            raise ArgumentError(
                "TG-CONFIG-009: map.order is set without map.session. It orders the calls of a session. Set both, "
                "or leave map.order out."
            )
        if self.loss_mask and not self.token_ids:
            raise ArgumentError(
                "TG-CONFIG-011: map.loss_mask is set without map.token_ids. It marks which of these ids were sampled. "
                "Set both, or leave map.loss_mask out."
            )

    def paths(self) -> dict[str, str]:
        """Return the paths that are set, by field."""
        return {option.name: path for option in fields(self) if (path := getattr(self, option.name)) != ""}


DASHBOARDS = ("tensorboard", "wandb", "trackio")
"""Dashboards that can receive metrics in addition to metrics.jsonl."""


@dataclass(frozen=True)
class Data:
    """Options of reading, alignment and selection of traces.

    >>> from tracegrad.config import load
    >>> data = load(overrides=[("data.reward", "exact, format"), ("data.reward_weights", "1, 0.5")]).data
    >>> data.reward, data.reward_weights, data.holdout
    (('exact', 'format'), (1.0, 0.5), -1.0)
    """

    on_error: Literal["raise", "skip", "quarantine"] = "raise"
    """Handling of records that cannot be read or aligned. raise stops, skip drops and counts them, quarantine also
    writes them to a file with the reason."""
    logprob_kind: Literal["recorded", "raw", "processed", "unknown"] = "recorded"
    """Kind of the recorded logprobs. recorded uses the kind in each record. vLLM's default is raw (before temperature
    and top-p)."""
    sampling_defaults: Literal["neutral", "model"] = "neutral"
    """Sampling options that a request leaves out: neutral assumes none, model reads them from the model's
    generation_config.json."""
    accept_truncated_sampling: bool = False
    """Allow importance ratios for traces sampled with top_p, top_k, penalties or similar. The ratio is then biased by
    the kept probability mass S."""
    server_profile: Literal["recorded", "vllm", "sglang", "llama.cpp", "tgi", "openai"] = "recorded"
    """Server that rendered prompts without recorded ids. recorded uses the server in each record, and vLLM if a record
    has none."""
    text_only: bool = False
    """Treat the traces as text of another model. Only objectives without an importance ratio can train on them."""
    allow_unknown_ids: bool = False
    """After a token id that cannot be determined, continue with the canonical tokens of the text. They are not trained,
    and they are counted."""
    reward: tuple[str, ...] = ()
    """Names of the reward to train on. Of several names, each trace uses the first that it has. Empty uses the total,
    or the only reward."""
    reward_weights: tuple[float, ...] = ()
    """Weights for a sum of several rewards: one per name in data.reward. If data.reward is empty, one per reward except
    the total."""
    holdout: float = -1.0
    """Fraction of the groups that are held out from training for off-policy estimates. 0 disables the estimates. -1 is
    0.05, or 0 if there can be no estimate: with data.text_only, or if no trace has a logprob for each trained token."""

    def __post_init__(self) -> None:
        is_valid = self.holdout == -1 or 0 <= self.holdout < 1
        _require(is_valid, "data.holdout", self.holdout, "it must be at least 0 and below 1, or -1")

    def holdout_share(self, *, has_logprobs: bool) -> float:
        """Return the fraction of the groups to hold out.

        Args:
            has_logprobs: whether a trace has a logprob for each trained token, which an off-policy estimate needs.

        >>> Data().holdout_share(has_logprobs=True), Data().holdout_share(has_logprobs=False)
        (0.05, 0.0)
        """
        if self.holdout >= 0:
            return self.holdout
        return 0.05 if has_logprobs and not self.text_only else 0.0


@dataclass(frozen=True)
class Mixture:
    """Mixture of several prepared folders.

    >>> from tracegrad.config import load
    >>> # A quarter of the second folder's groups per epoch.
    >>> load(overrides=[("mixture.weights", "1, 0.25")]).mixture
    Mixture(weights=(1.0, 0.25))
    """

    weights: tuple[float, ...] = ()
    """One number per folder. An epoch uses the fraction (number / largest number) of the groups of a folder."""


@dataclass(frozen=True)
class Filter:
    """Filters that drop or mask aligned traces, or change their reward.

    >>> from tracegrad.config import load
    >>> chosen = load(overrides=[("filter.max_staleness", "4"), ("filter.mask_truncated", "true")]).filter
    >>> chosen.max_staleness, chosen.mask_truncated, chosen.drop_zero_std_groups
    (4, True, False)
    """

    drop_zero_std_groups: bool = False
    """Drop groups in which all rewards are equal, as in DAPO's dynamic sampling but without refilling. Denominators do
    not count them."""
    mask_zero_std_groups: bool = False
    """Mask groups in which all rewards are equal. Denominators of traces and groups still count them, as in SkyRL's
    zero_variance_filter."""
    zero_std_tolerance: float = 0.0
    """Largest reward difference within a group that counts as equal, for drop_zero_std_groups and mask_zero_std_groups.
    """
    mask_truncated: bool = False
    """Mask traces whose last generation was truncated. Baselines and denominators of traces still count them, as in
    TRL."""
    zero_truncated: bool = False
    """Set the reward of truncated traces to 0 before advantages are computed, as SkyRL's zero_reward_on_non_stop."""
    min_reward: float = -1e38
    """Drop traces with a lower reward before advantages are computed. Like the filters below, it does not apply to
    held-out traces."""
    max_reward: float = 1e38
    """Drop traces with a higher reward."""
    min_turns: int = 0
    """Drop traces with fewer generations."""
    max_turns: int = 0
    """Drop traces with more generations. 0 means no limit."""
    worst_level: Literal["T0", "T1", "T2", "T3", "T4", "T5", "T6", "T7"] = "T7"
    """Drop traces that contain a trained token of a later alignment level. T7 means no limit. T6 drops traces with
    logprobs that `tracegrad fill` measured (T7)."""
    max_staleness: int = -1
    """Drop traces with a token sampled more than this many policy versions before the newest, or with an unknown
    version. -1 means no limit."""

    def __post_init__(self) -> None:
        _require(
            0 <= self.zero_std_tolerance < float("inf"),
            "filter.zero_std_tolerance",
            self.zero_std_tolerance,
            "it must be finite, 0 or more",
        )
        _require(self.min_reward <= self.max_reward, "filter.max_reward", self.max_reward, "it is below min_reward")
        _require(self.min_turns == 0 or self.min_turns > 1, "filter.min_turns", self.min_turns, "use 0 or at least 2")
        _require(self.max_turns >= 0, "filter.max_turns", self.max_turns, "it must not be negative")
        fits = self.max_turns == 0 or self.min_turns <= self.max_turns
        _require(fits, "filter.max_turns", self.max_turns, "it is below min_turns")
        _require(self.max_staleness >= -1, "filter.max_staleness", self.max_staleness, "it must be at least 0, or -1")


@dataclass(frozen=True)
class Pack:
    """Packing of traces into steps and rows.

    >>> from tracegrad.config import load
    >>> load(overrides=[("pack.tokens_per_row", "4096"), ("pack.too_long", "truncate")]).pack
    Pack(tokens_per_row=4096, too_long='truncate', share_prefixes=False, skip_zero_weight=False)
    """

    tokens_per_row: int = 8192
    """Tokens per row, which is one forward pass. Lower it if memory runs out, and on CPU, where the cost of attention
    is quadratic."""
    too_long: Literal["error", "drop", "truncate"] = "error"
    """Handling of branches longer than tokens_per_row: stop with an error, drop the trace, or truncate the branch.
    Dropped and truncated ones are counted, and
    their rewards still count in baselines."""
    share_prefixes: bool = False
    """Compute a prefix that traces of a row share only once, if the cost model predicts a gain. Gradients do not
    change."""
    skip_zero_weight: bool = False
    """Skip traces whose advantage or weight is 0 and which change no gradient. Metrics then cover the remaining traces.
    """

    def __post_init__(self) -> None:
        _require(self.tokens_per_row > 1, "pack.tokens_per_row", self.tokens_per_row, "it must be at least 2")


@dataclass(frozen=True)
class Advantage:
    """Computation of advantages from rewards.

    >>> from tracegrad.config import load
    >>> load(overrides=[("advantage.scale", "std")]).advantage == Advantage("group_mean", scale="std", ddof=1)
    True
    """

    baseline: Literal["group_mean", "batch_mean", "rloo", "opo", "max_rl", "a_star", "none"] = "group_mean"
    """Baseline: mean of the group, of the batch, of the other traces (rloo), or weighted by length (opo). max_rl also
    divides by the mean; a_star is OAPL's."""
    scale: Literal["none", "std", "batch_std"] = "none"
    """Divisor of centred rewards: std of the group (GRPO as published), none (Dr. GRPO, arXiv 2503.20783), or std of
    the batch."""
    ddof: int = 1
    """Degrees of freedom of the standard deviation: 1 divides by n - 1 (TRL, verl, SkyRL), 0 by n (ART)."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Order for several rewards: normalize their weighted sum, or normalize each in its group and then their sum over
    the batch (GDPO)."""
    single_sample_group: Literal["error", "zero", "keep"] = "error"
    """Handling of groups of one trace, which have no baseline: stop with an error, set advantage 0, or keep the reward
    as advantage."""

    def __post_init__(self) -> None:
        _require(self.ddof in (0, 1), "advantage.ddof", self.ddof, "it must be 0 or 1")


@dataclass(frozen=True)
class RewardKl:
    """KL penalty in the reward: subtracted from a trace's reward for its divergence from the reference.

    It is applied before advantages are computed. For tokens that were sampled with top_p, top_k, min_p or penalties,
    both logprobs are over the ids that the sampler kept, with its penalties.

    >>> from tracegrad.config import load
    >>> load(overrides=[("reward_kl.coef", "0.01"), ("reward_kl.kind", "k3")]).reward_kl
    RewardKl(coef=0.01, kind='k3', cap=0.0, target_kl=0.0, horizon=10000.0)
    """

    coef: float = 0.0
    """Penalty per nat of KL divergence from the reference, subtracted from the reward. 0 disables it; otherwise old and
    reference logprobs are computed."""
    kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """KL estimate per token from l = log old - log ref: l (k1), l^2 / 2 (k2), exp(-l) - 1 + l (k3), or the absolute
    value of l (abs)."""
    cap: float = 0.0
    """Bound on the size of the per-token estimate (10 with k3 in verl and SkyRL). 0 means no bound."""
    target_kl: float = 0.0
    """Target KL per token, averaged over traces. coef is adapted to it after each batch of
    train.updates_per_old_logprobs steps. 0 keeps coef constant."""
    horizon: float = 10_000.0
    """Number of traces after which a relative error of 1 would double coef. The error is clamped to +-0.2."""

    def __post_init__(self) -> None:
        for name in ("coef", "cap", "target_kl"):
            value = getattr(self, name)
            _require(0 <= value < float("inf"), f"reward_kl.{name}", value, "it must be finite, 0 or more")
        _require(0 < self.horizon < float("inf"), "reward_kl.horizon", self.horizon, "it must be finite and above 0")


@dataclass(frozen=True)
class Optimizer:
    """Options of AdamW.

    >>> from tracegrad.config import load
    >>> optimizer = load(overrides=[("optimizer.lr", "1e-5")]).optimizer
    >>> optimizer.lr, optimizer.beta1, optimizer.grad_clip
    (1e-05, 0.9, 1.0)
    """

    lr: float = 1e-6
    """Learning rate. 1e-6 suits models with at least a billion parameters; the 0.7 M model of the quickstart uses 2e-4.
    """
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.999
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Constant added to the square root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    grad_clip: float = 1.0
    """Maximum gradient norm. 0 disables clipping."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optimizer.lr", self.lr, "it must be above 0")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "it must be in [0, 1)")
        for name in ("eps", "weight_decay", "grad_clip"):
            _require(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "it must not be negative")


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule, with the values of transformers' get_scheduler under the same name.

    >>> from tracegrad.config import load
    >>> schedule = load(overrides=[("schedule.name", "cosine"), ("schedule.warmup_steps", "10")]).schedule
    >>> schedule.name, schedule.warmup_steps
    ('cosine', 10)
    """

    name: Literal[
        "constant",
        "linear",
        "cosine",
        "wsd",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ] = "constant"
    """Shape after warm-up: constant; a line (TRL's default) or half a cosine to min_lr_ratio; wsd decays late; other
    names as in transformers."""
    warmup_steps: int = 0
    """Optimizer steps of warm-up. The rate starts at 0; with wsd it starts at min_lr_ratio times lr."""
    warmup_ratio: float = 0.0
    """Warm-up as a fraction of all optimizer steps, rounded up. Set either this or warmup_steps."""
    kwargs: str = ""
    """Further arguments of transformers' scheduler as JSON, such as {"num_cycles": 2}. If set, transformers computes
    the rates."""
    decay_ratio: float = 0.1
    """Final fraction of all optimizer steps during which wsd (warmup_stable_decay in transformers) decays."""
    min_lr_ratio: float = 0.0
    """Final rate of linear, cosine and wsd as a fraction of lr."""

    def __post_init__(self) -> None:
        _require(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "it must not be negative")
        ratio = self.warmup_ratio
        _require(0 <= ratio < 1, "schedule.warmup_ratio", ratio, "it must be at least 0 and below 1")
        _require(not (ratio and self.warmup_steps), "schedule.warmup_ratio", ratio, "warmup_steps is set too")
        _require(
            0 < self.decay_ratio <= 1, "schedule.decay_ratio", self.decay_ratio, "it must be above 0 and at most 1"
        )
        _require(
            0 <= self.min_lr_ratio < 1, "schedule.min_lr_ratio", self.min_lr_ratio, "it must be at least 0 and below 1"
        )


@dataclass(frozen=True)
class Train:
    """Options of the training loop.

    >>> from tracegrad.config import load
    >>> train = load(overrides=[("train.groups_per_step", "32"), ("train.lora_rank", "16")]).train
    >>> train.groups_per_step, train.lora_rank, train.epochs
    (32, 16, 1)
    """

    epochs: int = 1
    """Number of passes over the groups."""
    groups_per_step: int = 16
    """Number of groups per optimizer step, which is the batch size."""
    max_steps: int = 0
    """Number of optimizer steps of the run. If set, it overrides epochs, and passes repeat as needed. 0 uses epochs."""
    iterations: int = 1
    """Number of times each batch of train.updates_per_old_logprobs steps is trained before the next one (TRL's
    num_iterations)."""
    seed: int = 0
    """Seed for the choice of held-out groups and for the order of groups."""
    updates_per_old_logprobs: int = 0
    """Optimizer steps per computation of old logprobs. 0 means 1 in a run of one epoch, otherwise one epoch. With 1,
    nothing is clipped."""
    missing_logprobs: Literal["mask", "ratio_one", "error"] = "mask"
    """Handling of tokens without a rollout logprob: mask them, assume ratio 1 (not if the surrogate itself uses rollout
    logprobs), or stop with an error."""
    device: str = "auto"
    """Device: auto (cuda if available, otherwise cpu) or any torch device."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the forward pass. auto uses bf16 autocast on cuda and fp32 on cpu. Parameters and optimizer states
    stay fp32."""
    report_to: tuple[str, ...] = ()
    """Dashboards that also receive the rows of metrics.jsonl: tensorboard, wandb, trackio."""
    memory_mode: Literal["speed", "balanced", "low"] = "speed"
    """Trade-off of time and memory. balanced recomputes layers in the backward pass and uses smaller logit chunks; low
    saves more and is slower."""
    compile: bool = False
    """Compile each layer with torch.compile. Requires a C++ or CUDA compiler on the machine."""
    lora_rank: int = 0
    """Rank of LoRA adapters (peft) on all linear layers except the head. If above 0, only the adapters are trained."""
    ref_sync_steps: int = 0
    """Optimizer steps between updates of the reference model from the policy. 0 keeps the reference fixed."""
    ref_mixup_alpha: float = 1.0
    """Fraction of the policy in an updated reference: ref = alpha * policy + (1 - alpha) * ref. TRL's default is 0.6.
    """
    ref_model: str = ""
    """Folder of the reference model. Empty uses the starting model, without its adapters if it has any."""
    timeout_s: float = 1800.0
    """Seconds that ranks wait for each other. After that the run ends and reports the missing rank and its last
    position."""

    def __post_init__(self) -> None:
        _require(self.epochs > 0, "train.epochs", self.epochs, "it must be at least 1")
        _require(self.groups_per_step > 0, "train.groups_per_step", self.groups_per_step, "it must be at least 1")
        _require(self.iterations > 0, "train.iterations", self.iterations, "it must be at least 1")
        for name in ("max_steps", "seed", "updates_per_old_logprobs", "lora_rank", "ref_sync_steps"):
            _require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "it must not be negative")
        alpha = self.ref_mixup_alpha
        _require(0 < alpha <= 1, "train.ref_mixup_alpha", alpha, "it must be above 0 and at most 1")
        _require(0 < self.timeout_s <= 1e7, "train.timeout_s", self.timeout_s, "it must be above 0 and at most 1e7")
        unknown = [name for name in self.report_to if name not in DASHBOARDS]
        hint = did_you_mean(unknown[0], DASHBOARDS) if unknown else ""
        rule = f"the dashboards are {', '.join(DASHBOARDS)}" if not hint else f"{hint[1:]} It is none of the dashboards"
        _require(not unknown, "train.report_to", self.report_to, rule)


@dataclass(frozen=True)
class Eval:
    """Evaluation on held-out traces."""

    ope_per_epoch: int = 4
    """Off-policy estimates per epoch, including one at its end. One more is always made before the first step."""

    def __post_init__(self) -> None:
        _require(self.ope_per_epoch > 0, "eval.ope_per_epoch", self.ope_per_epoch, "it must be at least 1")


@dataclass(frozen=True)
class Stop:
    """Conditions for early stopping. The run then ends with a checkpoint.

    >>> from tracegrad.config import load
    >>> # Stop if the effective sample size falls below a tenth.
    >>> load(overrides=[("stop.min_ope_ess", "0.1")]).stop
    Stop(min_ope_ess=0.1, ope_falls=False)
    """

    min_ope_ess: float = 0.0
    """Stop if the effective sample size of the off-policy estimate falls below this fraction of the held-out traces."""
    ope_falls: bool = False
    """Stop if the off-policy estimate falls below its best value by more than the 95 % interval of the difference."""

    def __post_init__(self) -> None:
        _require(0 <= self.min_ope_ess < 1, "stop.min_ope_ess", self.min_ope_ess, "it must be in [0, 1)")


@dataclass(frozen=True)
class Parallel:
    """Distribution over several processes started by torchrun.

    >>> from tracegrad.config import load
    >>> load(overrides=[("parallel.mode", "fsdp")]).parallel
    Parallel(mode='fsdp')
    """

    mode: Literal["auto", "fsdp", "ddp", "none"] = "auto"
    """fsdp shards parameters, gradients and optimizer states; ddp replicates them. auto is fsdp on CUDA, ddp on CPU,
    and none for one process."""


@dataclass(frozen=True)
class Checkpoint:
    """Interval and number of checkpoints.

    >>> from tracegrad.config import load
    >>> load(overrides=[("checkpoint.every_steps", "50")]).checkpoint
    Checkpoint(every_steps=50, keep=2)
    """

    every_steps: int = 0
    """Optimizer steps between checkpoints. 0 writes one at the end of each epoch."""
    keep: int = 2
    """Number of the newest checkpoints to keep."""

    def __post_init__(self) -> None:
        _require(self.every_steps >= 0, "checkpoint.every_steps", self.every_steps, "it must not be negative")
        _require(self.keep > 0, "checkpoint.keep", self.keep, "it must be at least 1")


@dataclass(frozen=True)
class TokenLogConfig:
    """Log of the trained tokens of each step, stored in the run directory for `tracegrad view`."""

    mode: Literal["sampled", "all", "none"] = "sampled"
    """Traces to log: complete groups sampled by name within token_log.max_mb, all traces of every step, or none."""
    max_mb: int = 256
    """Maximum disk space of the sampled log over all steps, MB."""

    def __post_init__(self) -> None:
        _require(self.max_mb > 0, "token_log.max_mb", self.max_mb, "it must be at least 1")


@dataclass(frozen=True)
class Images:
    """Options of images in traces."""

    vision_encoder: Literal["frozen", "trained"] = "frozen"
    """Whether the vision encoder is frozen or trained. With train.lora_rank, it is trained through adapters."""

    def __post_init__(self) -> None:
        _require(
            self.vision_encoder in ("frozen", "trained"),
            "images.vision_encoder",
            self.vision_encoder,
            "it is frozen or trained",
        )


@dataclass(frozen=True)
class Attention:
    """Options of attention."""

    implementation: Literal["auto", "sdpa"] = "auto"
    """auto uses compiled flex_attention on cuda, and stops with an error if it cannot run there. sdpa uses padded
    batches and dense masks."""

    def __post_init__(self) -> None:
        name = "attention.implementation"
        _require(self.implementation in ("auto", "sdpa"), name, self.implementation, "it is auto or sdpa")


@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective: name of a preset, and changes to its fields.

    >>> from tracegrad.config import load
    >>> load(overrides=[("objective", "GRPO"), ("objective.surrogate.high", "0.28")]).objective
    ObjectiveConfig(preset='GRPO', overrides=(('surrogate.high', 0.28),))
    """

    preset: str = "DAPO"
    """Name of a preset in tracegrad.objective.presets, or module:NAME for your own objective."""
    overrides: tuple[tuple[str, Scalar], ...] = ()
    """Fields of the preset to change, by name: objective.surrogate.high = 0.28."""


@dataclass(frozen=True)
class Config:
    """All options of a run.

    >>> Config().optimizer.lr
    1e-06
    """

    data: Data = field(default_factory=Data)
    map: FieldMap = field(default_factory=FieldMap)
    mixture: Mixture = field(default_factory=Mixture)
    filter: Filter = field(default_factory=Filter)
    pack: Pack = field(default_factory=Pack)
    advantage: Advantage = field(default_factory=Advantage)
    reward_kl: RewardKl = field(default_factory=RewardKl)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    stop: Stop = field(default_factory=Stop)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    token_log: TokenLogConfig = field(default_factory=TokenLogConfig)
    images: Images = field(default_factory=Images)
    attention: Attention = field(default_factory=Attention)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)


SECTIONS = tuple(f.name for f in fields(Config))
FEATURES = ("map", "mixture", "filter", "reward_kl", "schedule", "stop", "token_log", "images", "attention")
"""Sections of optional features. They can be left out completely: their defaults change no gradient."""


def _require(is_valid: bool, name: str, value: Any, rule: str) -> None:
    if not is_valid:
        raise ArgumentError(f"TG-CONFIG-010: {name} is {value!r}: {rule}. Correct it or leave it out.")
