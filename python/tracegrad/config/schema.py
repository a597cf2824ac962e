"""Define the options of a run as frozen dataclasses, each with its default, bounds and docstring.

`parse` sets them from TOML and from the command line. `FieldMap` (`[data.map]`) names the fields of records that
contain the reward, group, session and so on.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tracegrad.config.dotted_keys import Scalar, split_names
from tracegrad.errors import ArgumentError

MOST_CHARACTERS = 1000


@dataclass(frozen=True)
class FieldMap:
    """Field map: the paths in records of the reward, group, session and other fields of a trace.

    >>> FieldMap(reward="metadata.score", group="prompt").told()
    {'reward': 'metadata.score', 'group': 'prompt'}
    """

    reward: str = ""
    """Path of the reward: a number, a boolean, either as text, a word such as pass, or an object of these by name."""
    group: str = ""
    """Path of what the traces of one prompt share, or prompt: traces whose first messages are equal share a group."""
    session: str = ""
    """Path of what the calls of one conversation share, or prefix: a call goes on the one that it begins with."""
    order: str = ""
    """Path of a number or time that orders the calls of a session; empty: their order in the file."""
    id: str = ""
    """Path of the trace's id."""
    logprob_kind: str = ""
    """Path of raw, processed or unknown: what the logprobs of a record are of."""
    temperature: str = ""
    """Path of the sampling temperature."""
    sampling: str = ""
    """Path of an object with the sampling options: temperature, top_p, top_k, min_p, penalties, logit_bias."""
    version: str = ""
    """Path of the policy version: a whole number, also as text such as v7."""

    def __post_init__(self) -> None:
        for name, path in self.told().items():
            if not isinstance(path, str) or len(path) > MOST_CHARACTERS or not all(path.split(".")):
                raise ArgumentError(
                    f"TG-CONFIG-008: map.{name} is {path!r:.80}. It would name nothing. Give a dotted path such "
                    f"as metadata.score."
                )
        if self.order and not self.session:
            raise ArgumentError(
                "TG-CONFIG-009: map.order is told and map.session is not. Without sessions there is nothing to "
                "order. Tell both."
            )

    def told(self) -> dict[str, str]:
        """Return the paths that are set, by field."""
        return {option.name: path for option in fields(self) if (path := getattr(self, option.name)) != ""}


DASHBOARDS = ("tensorboard", "wandb", "trackio")
"""Dashboards that can receive metrics in addition to metrics.jsonl."""


@dataclass(frozen=True)
class Data:
    """How traces are read, aligned and selected."""

    on_error: Literal["raise", "skip", "quarantine"] = "raise"
    """A record that cannot be read or aligned: stop, leave it out and count it, or write it aside with the reason."""
    logprob_kind: Literal["recorded", "raw", "processed", "unknown"] = "recorded"
    """What the logprobs are of: as each record says, or this. vLLM's default is raw, before temperature and top-p."""
    sampling_defaults: Literal["neutral", "model"] = "neutral"
    """What a server took if a request leaves a sampling option out: nothing, or the model's generation_config.json."""
    accept_truncated_sampling: bool = False
    """Train with a ratio on traces sampled with top_p, top_k, penalties or the like: it is off by the kept mass S."""
    server_profile: Literal["recorded", "vllm", "sglang", "llama.cpp", "tgi", "openai"] = "recorded"
    """Which server rendered the prompts that are not recorded as ids: as each record says, else vLLM; or this."""
    text_only: bool = False
    """Take the traces as text of another model: only objectives without a ratio can train on them."""
    lenient: bool = False
    """After an id that cannot be known go on with the canonical tokens of the text, untrained and counted."""
    reward: str = ""
    """Name of the reward to train on, or several with commas: of each trace the first that it has; empty: the first."""
    reward_weights: str = ""
    """Train on several rewards: a weight for each that data.reward names (empty: all but the total), with commas."""
    holdout: float = 0.05
    """Share of the groups kept out of training to measure value; 0 measures none."""

    def __post_init__(self) -> None:
        _require(0 <= self.holdout < 1, "data.holdout", self.holdout, "it must be at least 0 and below 1")


@dataclass(frozen=True)
class Mixture:
    """Mixture of several prepared folders."""

    weights: str = ""
    """A number for each folder, with commas: an epoch takes number / largest of its groups."""


@dataclass(frozen=True)
class Filter:
    """Filters: aligned traces that are left out or masked, or whose reward is changed."""

    even_groups: bool = False
    """Leave out groups in which all rewards are equal, from denominators too: DAPO's dynamic sampling, not refilled."""
    mask_even: bool = False
    """Mask them instead: denominators of traces and groups still count them (as SkyRL's zero_variance_filter)."""
    tolerance: float = 0.0
    """For the two above: rewards of a group within so much of one another are equal."""
    truncated: bool = False
    """Mask traces whose last generation was cut off: rewards and denominators of traces still count them (as TRL)."""
    zero_truncated: bool = False
    """Give such traces reward 0, before any is compared (as SkyRL's zero_reward_on_non_stop)."""
    min_reward: float = -1e38
    """Leave out traces with a lower reward, before any is compared. This and those below leave held-out traces be."""
    max_reward: float = 1e38
    """Leave out traces with a higher reward."""
    min_turns: int = 0
    """Leave out traces of fewer generations."""
    max_turns: int = 0
    """Leave out traces of more generations; 0 leaves out none."""
    worst_tier: Literal["T0", "T1", "T2", "T3", "T4", "T5", "T6"] = "T6"
    """Leave out traces with a trained token of a worse tier; T6 leaves out none."""
    max_lag: int = -1
    """Leave out traces with a term that is more versions older than the newest, or of no known one; -1 leaves none."""

    def __post_init__(self) -> None:
        _require(0 <= self.tolerance < float("inf"), "filter.tolerance", self.tolerance, "it must be finite, 0 or more")
        _require(self.min_reward <= self.max_reward, "filter.max_reward", self.max_reward, "it is below min_reward")
        _require(self.min_turns == 0 or self.min_turns > 1, "filter.min_turns", self.min_turns, "each trace has one")
        _require(self.max_turns >= 0, "filter.max_turns", self.max_turns, "it must not be negative")
        fits = self.max_turns == 0 or self.min_turns <= self.max_turns
        _require(fits, "filter.max_turns", self.max_turns, "it is below min_turns")
        _require(self.max_lag >= -1, "filter.max_lag", self.max_lag, "it must be at least 0, or -1")


@dataclass(frozen=True)
class Pack:
    """Packing of traces into steps and rows."""

    token_budget: int = 8192
    """Tokens of a row, one forward pass. Lower where memory runs out, and on CPU, where attention costs its square."""
    step_groups: int = 16
    """Groups in one optimizer step."""
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    """A branch longer than token_budget: stop, leave its trace out, or cut its end. Both are counted."""
    share_prefixes: bool = False
    """Compute what traces of a row begin with alike once, where that is predicted to pay; no gradient changes."""
    skip_zero_weight: bool = False
    """Leave out what has advantage or weight 0 and changes no gradient; metrics are then of the rest."""

    def __post_init__(self) -> None:
        _require(self.token_budget > 1, "pack.token_budget", self.token_budget, "it must be at least 2")
        _require(self.step_groups > 0, "pack.step_groups", self.step_groups, "it must be at least 1")


@dataclass(frozen=True)
class Advantage:
    """Computation of advantages from rewards."""

    baseline: Literal["group_mean", "batch_mean", "rloo", "opo", "max_rl", "a_star", "none"] = "group_mean"
    """The mean of the group, the batch, the others (rloo), by length (opo); max_rl divides by it; a_star is OAPL's."""
    scale: Literal["none", "std", "batch_std"] = "none"
    """A mean's divisor: std of the group is GRPO as published, none Dr. GRPO (arXiv 2503.20783), batch_std of all."""
    ddof: int = 1
    """With a scale: 1 divides by n - 1 (TRL, verl, SkyRL), 0 by n (ART)."""
    several: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """With data.reward_weights: compare the sum, or each reward in its group and then their sum over all (GDPO)."""
    singleton: Literal["refuse", "zero", "keep"] = "refuse"
    """A group of one trace has no baseline: stop, give it advantage 0, or let it keep its reward."""

    def __post_init__(self) -> None:
        _require(self.ddof in (0, 1), "advantage.ddof", self.ddof, "it must be 0 or 1")


@dataclass(frozen=True)
class RewardKl:
    """KL penalty in the reward: subtracted from a trace's reward for its divergence from the reference.

    It is applied before advantages are computed.
    """

    coef: float = 0.0
    """Reward that each nat of divergence from the reference costs a trace; 0 is without. Measures old and reference."""
    kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """The estimate of it at a term, of l = log old - log ref: l, l^2 / 2, exp(-l) - 1 + l, or the size of l."""
    cap: float = 0.0
    """It is held within this on both sides, 10 with k3 in verl and SkyRL; 0 leaves it."""
    target: float = 0.0
    """Divergence of a trace that coef is adapted to from batch to batch of train.updates_per_old steps; 0 keeps it."""
    horizon: float = 10_000.0
    """Traces over which an error of 1 would double coef; the error is held within 0.2."""

    def __post_init__(self) -> None:
        for name in ("coef", "cap", "target"):
            value = getattr(self, name)
            _require(0 <= value < float("inf"), f"reward_kl.{name}", value, "it must be finite, 0 or more")
        _require(0 < self.horizon < float("inf"), "reward_kl.horizon", self.horizon, "it must be finite and above 0")


@dataclass(frozen=True)
class Optimizer:
    """Options of AdamW."""

    lr: float = 1e-6
    """Learning rate. 1e-6 suits models of a billion parameters and more; the quickstart's 0.7 M take 2e-4."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    grad_clip: float = 1.0
    """The gradient is scaled down to this norm; 0 leaves it as it is."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optimizer.lr", self.lr, "it must be above 0")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "it must be in [0, 1)")
        for name in ("eps", "weight_decay", "grad_clip"):
            _require(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "it must not be negative")


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule, with the values of transformers' get_scheduler under the same name."""

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
    """After the warm-up: lr as it is, a line (TRL's) or half cosine to the floor, late (wsd), or transformers' own."""
    warmup_steps: int = 0
    """Optimizer steps over which lr rises, from 0 at the first one; wsd begins at its floor."""
    warmup_ratio: float = 0.0
    """The same as a share of all optimizer steps, rounded up; one of the two is set."""
    kwargs: str = ""
    """JSON: further arguments of transformers' scheduler, such as {"num_cycles": 2}, which then computes the rates."""
    decay: float = 0.1
    """Share of all optimizer steps, the last ones, over which wsd (transformers' warmup_stable_decay) goes down."""
    floor: float = 0.0
    """Share of lr that linear, cosine and wsd go down to."""

    def __post_init__(self) -> None:
        _require(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "it must not be negative")
        ratio = self.warmup_ratio
        _require(0 <= ratio < 1, "schedule.warmup_ratio", ratio, "it must be at least 0 and below 1")
        _require(not (ratio and self.warmup_steps), "schedule.warmup_ratio", ratio, "warmup_steps is set too")
        _require(0 < self.decay <= 1, "schedule.decay", self.decay, "it must be above 0 and at most 1")
        _require(0 <= self.floor < 1, "schedule.floor", self.floor, "it must be at least 0 and below 1")


@dataclass(frozen=True)
class Train:
    """Options of the training loop."""

    epochs: int = 1
    """Passes over the groups."""
    max_steps: int = 0
    """Optimizer steps after which the run ends, in place of epochs: as many passes as they take; 0: epochs decides."""
    iterations: int = 1
    """Times that a batch of train.updates_per_old steps is trained on before the next one (TRL's num_iterations)."""
    seed: int = 0
    """Of the held-out choice and of the order of the groups."""
    updates_per_old: int = 0
    """Optimizer steps between two refreshes of `old`; 0: 1 in a run of one epoch, else an epoch. At 1 nothing clips."""
    missing: Literal["mask", "neutral", "refuse"] = "mask"
    """A term without a rollout logprob: leave it out, weigh it 1 (not where the surrogate takes rollout), stop."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu; or any torch device."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the forward pass. auto: bf16 autocast on cuda, fp32 on cpu. Parameters and optimizer stay fp32."""
    off_policy_value_per_epoch: int = 4
    """Measurements of the off-policy value in an epoch, its end included; one is always before the first step."""
    log_to: str = ""
    """Dashboards that get the rows of metrics.jsonl as well, with commas between: tensorboard, wandb, trackio."""
    memory: Literal["speed", "balanced", "low"] = "speed"
    """Memory or time: balanced recomputes layers and cuts the head's chunks, low shrinks more and takes longer."""
    compile: bool = False
    """Compile each layer by torch.compile; needs a C++ or CUDA compiler on the machine."""
    lora_rank: int = 0
    """Rank of LoRA adapters on all linear layers but the head, which alone are then trained (peft); 0: none."""
    ref_every: int = 0
    """Optimizer steps after which the policy becomes its own reference again; 0: the reference stays as it began."""
    ref_mixup_alpha: float = 1.0
    """Share of the policy in a renewed reference: ref = alpha * policy + (1 - alpha) * ref (TRL's default is 0.6)."""
    ref_model: str = ""
    """Folder of another model as reference; empty: the starting model, with adapters the model without them."""
    timeout: float = 1800.0
    """Seconds that ranks wait for one another; then the run ends and says which rank did not come, and where it was."""

    def __post_init__(self) -> None:
        _require(self.epochs > 0, "train.epochs", self.epochs, "it must be at least 1")
        _require(self.iterations > 0, "train.iterations", self.iterations, "it must be at least 1")
        for name in ("max_steps", "seed", "updates_per_old", "lora_rank", "ref_every"):
            _require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "it must not be negative")
        alpha = self.ref_mixup_alpha
        _require(0 < alpha <= 1, "train.ref_mixup_alpha", alpha, "it must be above 0 and at most 1")
        _require(0 < self.timeout <= 1e7, "train.timeout", self.timeout, "it must be above 0 and at most 1e7")
        unknown = [name for name in split_names(self.log_to) if name not in DASHBOARDS]
        _require(not unknown, "train.log_to", self.log_to, f"no dashboard but {', '.join(DASHBOARDS)} is known")
        _require(
            self.off_policy_value_per_epoch > 0,
            "train.off_policy_value_per_epoch",
            self.off_policy_value_per_epoch,
            "it must be at least 1",
        )


@dataclass(frozen=True)
class Stop:
    """Conditions for early stopping. The run then ends with a checkpoint."""

    below_ess: float = 0.0
    """The off-policy value's effective sample size falls below this share of the held-out traces."""
    worse: bool = False
    """The off-policy value is below the best before it, by more than the 95 % interval of the difference."""

    def __post_init__(self) -> None:
        _require(0 <= self.below_ess < 1, "stop.below_ess", self.below_ess, "it must be in [0, 1)")


@dataclass(frozen=True)
class Parallel:
    """Distribution over several processes started by torchrun."""

    mode: Literal["auto", "fsdp", "ddp", "none"] = "auto"
    """fsdp shards parameters, gradients and optimizer; ddp copies them; auto: fsdp on CUDA, ddp on CPU, none alone."""


@dataclass(frozen=True)
class Checkpoint:
    """When checkpoints are written, and how many are kept."""

    every: int = 0
    """Optimizer steps between checkpoints; 0: at the end of each epoch."""
    keep: int = 2
    """How many of the newest checkpoints stay."""

    def __post_init__(self) -> None:
        _require(self.every >= 0, "checkpoint.every", self.every, "it must not be negative")
        _require(self.keep > 0, "checkpoint.keep", self.keep, "it must be at least 1")


@dataclass(frozen=True)
class TokenLogConfig:
    """Log of the trained tokens of each step, stored in the run directory for `tracegrad view`."""

    keep: Literal["sampled", "all", "none"] = "sampled"
    """Whole groups chosen by their names, within terms.megabytes; every trace of every step; or nothing."""
    megabytes: int = 256
    """Bound on the disk that sampled terms take, all steps together."""

    def __post_init__(self) -> None:
        _require(self.megabytes > 0, "terms.megabytes", self.megabytes, "it must be at least 1")


@dataclass(frozen=True)
class Images:
    """Options of images in traces."""

    tower: Literal["frozen", "trained"] = "frozen"
    """What turns pictures into features: left as it is, or trained too, by adapters with train.lora_rank."""

    def __post_init__(self) -> None:
        _require(self.tower in ("frozen", "trained"), "images.tower", self.tower, "it is frozen or trained")


@dataclass(frozen=True)
class Attention:
    """Options of attention."""

    implementation: Literal["auto", "sdpa"] = "auto"
    """auto: on cuda compiled flex_attention, an error where it cannot run; sdpa: padded batches and dense masks."""

    def __post_init__(self) -> None:
        name = "attention.implementation"
        _require(self.implementation in ("auto", "sdpa"), name, self.implementation, "it is auto or sdpa")


@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective: name of a preset, and changes to its fields."""

    preset: str = "DAPO"
    """Attribute of tracegrad.objective.presets, or module:NAME."""
    overrides: tuple[tuple[str, Scalar], ...] = ()
    """Fields of the preset by their own names: objective.surrogate.high = 0.28."""


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
    stop: Stop = field(default_factory=Stop)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    terms: TokenLogConfig = field(default_factory=TokenLogConfig)
    images: Images = field(default_factory=Images)
    attention: Attention = field(default_factory=Attention)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)


SECTIONS = tuple(f.name for f in fields(Config))
FEATURES = ("map", "mixture", "filter", "reward_kl", "schedule", "stop", "terms", "images", "attention")
"""Sections of optional features. They can be left out completely: their defaults change no gradient."""


def _require(is_valid: bool, name: str, value: Any, rule: str) -> None:
    if not is_valid:
        raise ArgumentError(
            f"TG-CONFIG-010: {name} is {value!r}: {rule}. A run with it would mean nothing. Correct it or leave it out."
        )
