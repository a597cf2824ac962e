"""One optimizer step: forward, correction, objective, backward, clipping, update.

The gradient covers all tokens of the step, however they are divided into rows. On CUDA, `DeviceIdleMeter` measures
how long the device waits for the host.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tracegrad.errors import TracegradError
from tracegrad.metrics.aggregate import AllReduce
from tracegrad.model import PolicyLoss
from tracegrad.objective import Objective
from tracegrad.objective.correction import Correction, correct
from tracegrad.packing import Batch, Step, prefetch
from tracegrad.trainer.distributed import DistributedModel, as_distributed_model, check_exchanged, full_tensor
from tracegrad.trainer.verify_attention import verify_batches


class DeviceIdleMeter:
    """Measures the share of time in which the device had no queued work, between the first and the last piece of work.

    A piece is all work launched within one `busy()` block. Waits inside a piece are not measured, so the share is a
    lower bound.

    Args:
        device: the device that runs the work.

    >>> idle = DeviceIdleMeter(torch.device("cpu"))
    >>> with idle.busy():
    ...     pass
    >>> idle.share() is None
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pieces: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._idle_ms = self._total_ms = 0.0

    @property
    def measures(self) -> bool:
        """Whether the device has timing events, which only CUDA has here."""
        return self.device.type == "cuda"

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Wrap the launches of one piece of work."""
        if not self.measures:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(self.device))
        yield
        end.record(torch.cuda.current_stream(self.device))
        self._pieces.append((begin, end))

    def share(self) -> float | None:
        """Return the idle share of the time since the last call; None without timing events or without a piece.

        It synchronizes with the device. The last piece is kept as the start of the next interval.
        """
        if not self._pieces:
            return None
        torch.cuda.synchronize(self.device)
        pieces = self._pieces
        idle = sum(previous[1].elapsed_time(following[0]) for previous, following in pairwise(pieces))
        duration = pieces[0][0].elapsed_time(pieces[-1][1])
        self._pieces = pieces[-1:]
        self._idle_ms, self._total_ms = self._idle_ms + idle, self._total_ms + duration
        return idle / duration if duration > 0 else 0.0

    def total_share(self) -> float | None:
        """Return the idle share over all intervals that `share` measured; None if there are none."""
        return self._idle_ms / self._total_ms if self._total_ms > 0 else None


Floats = NDArray[np.float32]


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step. Arrays are [M] in the step's order, detached, on the CPU.

    For tokens whose logit row was left out, logprob, entropy and ratio are NaN and the gradient is 0;
    weight and keep come from the correction.

    Args:
        loss: loss of the step.
        grad_norm: norm of the full gradient, before clipping.
        corrected: weight, keep, scale and the metrics of the correction.
        logprobs, entropy: of the policy before the update, in nats.
        ratio: ratio of the surrogate, at its level; 1 if it uses none.
        clipped: whether clipping removed the token's gradient (`Surrogate.clip_mask`).
        gradient: d loss / d logprob, as in `PolicyLoss`.
        weight: product of all weights, including those that depend on the trained policy; 1 if `keep` is False.
        keep: whether all rejections keep the token, including those that depend on the trained policy.
        vocabulary_logprobs: of the policy before the update over the whole vocabulary, without penalties of the
            sampler; None if no penalty of the objective reads them.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tracegrad import Sequences, pack
    >>> from tracegrad.objective import PolicyGradient
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **size))
    >>> # Each of the 8 tokens gets probability 1 / 8.
    >>> _ = model.lm_head.weight.data.zero_()
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [float("nan"), -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> result = optimizer_step(model, step, Objective(PolicyGradient()), optimizer)
    >>> round(result.loss, 4), np.exp(result.logprobs).round(4).tolist()  # -log(1 / 8)
    (2.0794, [0.125, 0.125])
    >>> result.gradient.tolist(), result.keep.tolist()  # -A / 2 tokens
    ([-0.5, -0.5], [True, True])
    """

    loss: float
    grad_norm: float
    corrected: Correction
    logprobs: Floats
    entropy: Floats
    ratio: Floats
    clipped: NDArray[np.bool_]
    gradient: Floats
    weight: Floats
    keep: NDArray[np.bool_]
    vocabulary_logprobs: Floats | None = None


def optimizer_step(
    model: Any,
    step: Step,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    *,
    missing_logprobs: Literal["mask", "ratio_one", "error"] = "mask",
    grad_clip: float = 0.0,
    precision: torch.dtype = torch.float32,
    corrected: Correction | None = None,
    skip_tokens: NDArray[np.bool_] | None = None,
    idle: DeviceIdleMeter | None = None,
    check: Callable[[Floats], None] | None = None,
) -> StepResult:
    """Do one optimizer step, with gradients accumulated over the batches and summed over the ranks.

    Args:
        model: a transformers causal LM on its device, or a model from `distributed.prepare` or accelerate.
        step: this rank's step, with the old and reference logprobs that the objective needs.
        objective: the objective.
        optimizer: optimizer over the model's parameters.
        missing_logprobs: treatment of tokens without a rollout logprob, as in `correct`.
        grad_clip: maximum norm of the gradient; 0 disables clipping.
        precision: bfloat16 runs the forward pass under autocast.
        corrected: the result of `correct_step(step, ...)`; default computed here.
        skip_tokens: [M] bool, tokens that can change neither loss nor gradient (`Step.idle`); they get no logit row.
        idle: measures the device's idle time.
        check: called with the [M] logprobs of the policy before the update. If it raises on any rank, the parameters of
            all ranks stay unchanged.

    Raises:
        ArgumentError: for an unwrapped model if a process group is open, as its gradients would not be exchanged.
        TracegradError: if the gradient is not finite; the parameters then stay unchanged.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tracegrad import Sequences, pack
    >>> from tracegrad.objective import PolicyGradient
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **size))
    >>> # Each of the 8 tokens gets probability 1 / 8.
    >>> _ = model.lm_head.weight.data.zero_()
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [float("nan"), -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> losses = [optimizer_step(model, step, Objective(PolicyGradient()), optimizer).loss for _ in range(2)]
    >>> # -log(1 / 8), and less after the first step
    >>> round(losses[0], 4), losses[1] < losses[0]
    (2.0794, True)
    """
    target = as_distributed_model(model)
    ranks = target.ranks
    check_exchanged(target)
    verify_batches(target, step.batches)
    corrected = corrected or correct_step(
        step, objective, missing_logprobs, None if ranks.is_single else ranks.all_reduce
    )
    optimizer.zero_grad(set_to_none=True)
    batches = step.batches if skip_tokens is None else tuple(b.drop_tokens(skip_tokens[b.term]) for b in step.batches)
    losses = _accumulate(target, step, batches, objective, corrected, precision, idle or DeviceIdleMeter(target.device))
    arrays = losses.arrays(batches, _defaults(len(step), corrected, objective))
    if check is not None:
        ranks.raise_on_all(_refusal(check, arrays["logprobs"]))
    norm = _update(target, optimizer, grad_clip)
    return StepResult(loss=ranks.sum(losses.loss()), grad_norm=norm, corrected=corrected, **arrays)


def _refusal(check: Callable[[Floats], None], logprobs: Floats) -> TracegradError | None:
    try:
        check(logprobs)
    except TracegradError as error:
        return error
    return None


def _defaults(terms: int, corrected: Correction, objective: Objective) -> dict[str, NDArray[Any]]:
    """Return [M] default values for tokens that no batch includes."""
    nan = np.full(terms, np.nan, np.float32)
    more = ["vocabulary_logprobs"] if objective.requirements.ref_over == "vocabulary" else []
    return {
        **{name: nan.copy() for name in ("logprobs", "entropy", "ratio", *more)},
        "weight": np.asarray(corrected.weight, np.float32).copy(),
        "gradient": np.zeros(terms, np.float32),
        "clipped": np.zeros(terms, bool),
        "keep": np.asarray(corrected.keep, bool).copy(),
    }


@dataclass
class _Losses:
    """The losses of the batches of a step, kept on the device and copied to the host once, after the last batch."""

    results: list[PolicyLoss] = field(default_factory=list)

    def loss(self) -> float:
        return sum(float(result.loss.detach()) for result in self.results)

    def arrays(self, batches: Sequence[Batch], out: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Fill the arrays `out`, [M] each, in the step's order."""
        for name, values in out.items():
            for batch, result in zip(batches, self.results, strict=True):
                is_own = name in ("logprobs", "entropy", "gradient", "vocabulary_logprobs")
                value = getattr(result if is_own else result.per_term, name)
                # Without support, both kinds of logprobs are equal.
                values[batch.term] = (result.logprobs if value is None else value).cpu().numpy()
        return out


def _accumulate(
    target: DistributedModel,
    step: Step,
    batches: Sequence[Batch],
    objective: Objective,
    corrected: Correction,
    precision: torch.dtype,
    idle: DeviceIdleMeter,
) -> _Losses:
    """Run the forward and backward passes of all batches; the next batch is copied to the device in the meantime."""
    losses = _Losses()
    for number, batch in enumerate(prefetch(batches, target.device), start=1):
        with idle.busy(), target.gradient_sync(number == len(batches)):
            loss, loss_result = target.loss(batch, step.terms(batch, corrected), objective, precision)
            loss.backward()
        losses.results.append(replace(loss_result, loss=loss_result.loss.detach()))
    return losses


def correct_step(
    step: Step,
    objective: Objective,
    missing_logprobs: Literal["mask", "ratio_one", "error"],
    all_reduce: AllReduce | None = None,
    **other: Any,
) -> Correction:
    """Call `correct` with the arrays of a step and the plan of an objective; `other` replaces entries of the plan.

    Args:
        step: the step, with the logprobs that the objective needs.
        objective: the objective.
        missing_logprobs: treatment of tokens without a rollout logprob, as in `correct`.
        all_reduce: the reduction over ranks; None for one process.
        other: replacements of arguments that come from the objective.
    """
    needs = objective.requirements
    zeros = None if needs.rollout else np.zeros_like(step.advantages)  # Without a ratio, only keep and scale matter.
    return correct(
        step.old_logprobs if needs.old else zeros,
        step.rollout_logprobs if needs.rollout else None,
        ref=step.ref_logprobs if needs.ref else None,
        trace=step.trace,
        turn=step.turn,
        group=step.group,
        advantages=step.advantages,
        **{**objective.plan, **other},
        totals=step.totals,
        group_terms=step.group_terms,
        group_traces=step.group_traces,
        missing_logprobs=missing_logprobs,
        all_reduce=all_reduce,
    )


def compute_logprobs(model: Any, batches: Sequence[Batch], precision: torch.dtype = torch.float32) -> list[Floats]:
    """Compute the logprobs of the trained tokens of each batch under the current model, in nats, without gradient.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tracegrad import Sequences, pack
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **size))
    >>> # Each of the 8 tokens gets probability 1 / 8.
    >>> _ = model.lm_head.weight.data.zero_()
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [float("nan"), -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> [logprobs] = compute_logprobs(model, step.batches)
    >>> np.exp(logprobs).round(4).tolist()
    [0.125, 0.125]
    """
    target = as_distributed_model(model)
    verify_batches(target, batches)
    with torch.no_grad():
        logprobs = [target.forward(batch.to(target.device), precision)[0] for batch in batches]
    target.reshard()
    return [values.cpu().numpy() for values in logprobs]


def _update(target: DistributedModel, optimizer: torch.optim.Optimizer, grad_clip: float) -> float:
    trained = [parameter for parameter in target.model.parameters() if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained])  # type: ignore[misc]
    norm = float(full_tensor(total))
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        raise TracegradError(
            f"TG-TRAIN-068: the norm of the gradient is {norm}. The update would turn every parameter into NaN, so it "
            "was not done. Lower optimizer.lr or set optimizer.grad_clip, and continue from the last checkpoint with "
            "resume=True."
        )
    torch.nn.utils.clip_grads_with_norm_(trained, grad_clip or math.inf, full_tensor(total))
    optimizer.step()
    return norm
