"""Options of an online run in addition to the training options; a run.toml keeps them under [online] and [rollout]."""

from dataclasses import dataclass
from typing import Literal

from tracegrad.errors import ArgumentError

IN_PROCESS = "in-process"
"""Value of `servers=` that runs vLLM in the trainer's process: the string itself, or a list with only this entry."""


@dataclass(frozen=True)
class OnlineConfig:
    """Options of the online training loop.

    `train.groups_per_step` sets the groups per step. `checkpoint.every_steps` sets how often checkpoints are written.

    >>> OnlineConfig(steps=200, steps_ahead=0)  # rollout and training take turns
    OnlineConfig(steps=200, steps_ahead=0, max_resample_factor=3, eval_every=0, weight_sync='file')
    """

    steps: int = 100
    """Number of optimizer steps."""
    steps_ahead: int = 1
    """How many steps ahead of the trainer groups may be started; 0 alternates between rollout and training. It limits
    when groups start. It does not limit the age of a trained token: a group slower than others is trained on once it
    has finished, with its recorded logprobs, and `staleness_max` reports by how many versions."""
    max_resample_factor: int = 3
    """Upper bound on the groups that a step consumes, as a multiple of its size. Extra groups replace those whose
    rewards are all equal, which have no gradient."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates only before the first step and after the last."""
    weight_sync: Literal["file", "lora", "nccl"] = "file"
    """How weights reach the servers. "file" writes all weights to a file. "lora" loads an adapter (`train.lora_rank`)
    under a new name for each version. "nccl" sends all weights from CUDA to CUDA; it has not run on two GPUs yet."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("max_resample_factor", 1), ("steps_ahead", 0), ("eval_every", 0)):
            _require(getattr(self, name) >= least, f"online.{name}", getattr(self, name), f"at least {least}")


@dataclass(frozen=True)
class RolloutConfig:
    """Rollout options, with or without training.

    >>> options = RolloutConfig(group_size=4, max_tokens=256)
    >>> options.group_size, options.max_tokens, options.temperature
    (4, 256, 1.0)
    """

    group_size: int = 8
    """Trajectories per task; together they are one group."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Sample from the most probable tokens with this mass; 1 keeps all. It needs `rollout.top_logprobs`."""
    top_k: int = -1
    """Sample from this many most probable tokens; -1 keeps all. It needs `rollout.top_logprobs`."""
    min_p: float = 0.0
    """Sample from the tokens with at least this share of the highest probability. It needs `rollout.top_logprobs`."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that occur in the prompt or in the answer so far, and multiplies negative ones;
    1 changes none. The penalties need servers with --logprobs-mode processed_logprobs."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the answer so far."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that it occurs in the answer so far."""
    top_logprobs: int = 0
    """Number of most probable tokens that servers list with each token of a request with top_p, top_k or min_p. They
    show from which tokens the sampler drew, and logprobs are compared over these. Use more than top_k, or enough for
    what top_p keeps; tokens that need more have no logprob. If you start vLLM yourself, give it --max-logprobs of at
    least this number. If it is 0, requests with these options are refused."""
    input: Literal["messages", "token_ids"] = "messages"
    """How a turn is sent to the servers. "messages" renders the whole conversation again each turn and works with any
    agent. "token_ids" sends token ids, so no sampled token is tokenised again; it needs servers with --enable-scale-out
    and agents that call `policy.chat`."""
    max_tokens: int = 1024
    """Maximum number of sampled tokens in one call."""
    max_turns: int = 16
    """Maximum number of calls in one trajectory."""
    timeout_s: float = 600.0
    """Time limit of one trajectory, in seconds."""
    stall_timeout_s: float = 900.0
    """The run stops after this many seconds without a finished group, and the error names the oldest trajectory."""
    max_consecutive_failures: int = 32
    """The run stops after this many failed trajectories in a row, and the error contains the first traceback."""

    def __post_init__(self) -> None:
        for name in ("group_size", "max_tokens", "max_turns", "max_consecutive_failures"):
            _require(getattr(self, name) >= 1, f"rollout.{name}", getattr(self, name), "at least 1")
        _require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "above 0, and at most 1")
        _require(0 <= self.min_p < 1, "rollout.min_p", self.min_p, "at least 0, and below 1")
        _require(self.top_k == -1 or self.top_k > 0, "rollout.top_k", self.top_k, "-1, or at least 1")
        _require(
            0 < self.repetition_penalty < float("inf"),
            "rollout.repetition_penalty",
            self.repetition_penalty,
            "above 0, and finite",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, f"rollout.{name}", getattr(self, name), "from -2 to 2")
        _require(self.top_logprobs >= 0, "rollout.top_logprobs", self.top_logprobs, "at least 0")
        _require(self.input in ("messages", "token_ids"), "rollout.input", self.input, '"messages" or "token_ids"')
        for name in ("temperature", "timeout_s", "stall_timeout_s"):
            _require(
                0 < getattr(self, name) < float("inf"), f"rollout.{name}", getattr(self, name), "above 0, and finite"
            )


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ArgumentError(f"TG-ONLINE-021: {name} is {value!r}. It must be {rule}.")
