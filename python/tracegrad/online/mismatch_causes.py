"""Search for the cause of a failed weight check: wrong weights, or sampling settings that the run did not request.

Wrong weights are tried on the trainer's own model. A temperature, truncation or penalties are fitted to the servers'
logprobs.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tracegrad.model import head_of
from tracegrad.model.forward import read_states
from tracegrad.model.lm_head import logits_of
from tracegrad.online.logprob_gap import (
    BF16_MEDIAN,
    FP32_NATS,
    MAX_TOKEN_NATS,
    Floats,
    WeightSyncBounds,
    explained_share,
    explains,
    mean_excess,
)
from tracegrad.online.options import OnlineConfig
from tracegrad.online.servers import base_parameter_name, previous_weights_file
from tracegrad.online.weight_sample import Sample
from tracegrad.packing import Batch
from tracegrad.packing.support import Support
from tracegrad.trainer import Trainer
from tracegrad.trainer.lora import adapters_off, has_adapters

SENT = (
    "Make sure that nothing changes requests between the run and the servers, and start vLLM with --generation-config "
    "vllm, which ignores the defaults in the model's folder."
)
TOKENS = 512
"""Maximum number of tokens whose distributions are computed: [TOKENS, V] floats are in memory."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_Counts = list[tuple[NDArray[np.int64], NDArray[np.int64]]]


@dataclass(frozen=True)
class MismatchHypothesis:
    """A mistake that would explain a gap.

    Args:
        words: description and fix; complete once `logprobs` was called.
        logprobs: returns the [M] logprobs that the servers would have under this mistake. Every rank must call it.
    """

    words: str
    logprobs: Callable[[], Floats]


@dataclass(frozen=True)
class Distributions:
    """The trainer's logits at the tokens of a sample. M tokens, a vocabulary of V.

    Args:
        logits: [M, V] float64, before any temperature. They include the penalties of the requests, and are -inf for ids
            outside of the sampler's support.
        target: [M], the tokens.
        inv_temperature: [M].
        rollout: [M], the servers' logprobs, nats.
        prompt, output: for each token, the ids of the prompt and the ids sampled before it in the same answer.
    """

    logits: NDArray[np.float64]
    target: NDArray[np.int64]
    inv_temperature: NDArray[np.float64]
    rollout: NDArray[np.float64]
    prompt: list[NDArray[np.int64]]
    output: list[NDArray[np.int64]]
    ordered: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]] = field(init=False)

    def __post_init__(self) -> None:
        scores = self.logits * self.inv_temperature[:, None]
        probabilities = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        target_probability = np.take_along_axis(probabilities, self.target[:, None], -1)
        descending = -np.sort(-probabilities, -1)
        object.__setattr__(
            self, "ordered", (descending, np.cumsum(descending, -1), (probabilities > target_probability).sum(-1))
        )

    @cached_property
    def logprobs(self) -> NDArray[np.float64]:
        """[M] logprobs with the requested settings."""
        return _logprobs(self.logits, self.target, self.inv_temperature)

    def at(self, temperature: float) -> NDArray[np.float64]:
        """Return [M] logprobs at another temperature."""
        return _logprobs(self.logits, self.target, np.full(len(self.target), 1 / temperature))

    def kept(self, count: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return [M] logprobs if only the `count` likeliest tokens of each distribution remain; -inf for others."""
        _, mass, rank = self.ordered
        kept_mass = mass[np.arange(len(count)), np.clip(count, 1, mass.shape[1]) - 1]
        return np.where(rank < count, self.logprobs - np.log(kept_mass), -np.inf)

    def top_k(self, value: float) -> NDArray[np.float64]:
        """Return [M] logprobs under top_k."""
        return self.kept(np.full(len(self.target), int(value)))

    def top_p(self, value: float) -> NDArray[np.float64]:
        """Return [M] logprobs under top_p: the smallest set of likeliest tokens with at least this mass."""
        return self.kept(1 + (self.ordered[1][:, :-1] < value).sum(-1))

    def min_p(self, value: float) -> NDArray[np.float64]:
        """Return [M] logprobs under min_p: tokens with at least this share of the likeliest token's probability."""
        descending = self.ordered[0]
        return self.kept((descending >= value * descending[:, :1]).sum(-1))

    def frequency_penalty(self, value: float) -> NDArray[np.float64]:
        """Return [M] logprobs if each logit is lowered by `value` for each time its token was sampled before."""
        return self._with_changed_logits(lambda logit, times: logit - value * times, self._in_output)

    def presence_penalty(self, value: float) -> NDArray[np.float64]:
        """Return [M] logprobs if the logit of each token that was sampled before is lowered by `value`."""
        return self._with_changed_logits(lambda logit, _: logit - value, self._in_output)

    def repetition_penalty(self, value: float) -> NDArray[np.float64]:
        """Return [M] logprobs if logits of earlier tokens, of prompt and output, are penalised by the factor `value`.

        Positive logits are divided by it, negative ones multiplied.
        """
        return self._with_changed_logits(
            lambda logit, _: np.where(logit > 0, logit / value, logit * value), self._in_context
        )

    @cached_property
    def _in_output(self) -> _Counts:
        """The ids sampled before each token, and how often."""
        return [np.unique(ids, return_counts=True) for ids in self.output]

    @cached_property
    def _in_context(self) -> _Counts:
        """The ids before each token in prompt and output, and how often."""
        return [
            np.unique(np.concatenate(both), return_counts=True) for both in zip(self.prompt, self.output, strict=True)
        ]

    def _with_changed_logits(self, change: Callable[..., NDArray[np.float64]], earlier: _Counts) -> NDArray[np.float64]:
        logits = self.logits.copy()
        for row, (ids, times) in zip(logits, earlier, strict=True):
            row[ids] = change(row[ids], times)
        return _logprobs(logits, self.target, self.inv_temperature)


def _logprobs(
    logits: NDArray[np.float64], target: NDArray[np.int64], inv_temperature: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return [M] logprobs of the targets from [M, V] logits and [M] inverse temperatures."""
    scores = logits * inv_temperature[:, None]
    scores -= scores.max(-1, keepdims=True)
    return np.take_along_axis(scores, target[:, None], -1)[:, 0] - np.log(np.exp(scores).sum(-1))


def sampling_causes(trainer: Trainer, sample: Sample) -> Iterator[MismatchHypothesis]:
    """Yield a temperature, truncations and penalties, each with the value that fits best. Every rank must call this."""
    policy = distributions(trainer, sample)
    count = len(policy.target)

    def miss(logprobs: NDArray[np.float64]) -> float:
        return float(np.minimum(np.abs(logprobs - policy.rollout), 5.0).mean())

    def pad(logprobs: NDArray[np.float64]) -> Floats:
        return np.r_[logprobs, np.full(len(sample.step) - count, np.nan)].astype(np.float32)

    fit = float(np.exp(_minimize(lambda log: miss(policy.at(np.exp(log))), np.log(np.geomspace(0.05, 5.0, 47)))))
    note = ", or they return raw logprobs (no --logprobs-mode processed_logprobs)" if abs(fit - 1) < 1e-3 else ""
    at_temperature = policy.at(fit)
    unpenalized = [replace(row, penalties=None) for row in sample.rows]
    is_penalized = any(row.penalties is not None for row in sample.rows)
    if is_penalized:
        yield MismatchHypothesis(
            f"They sample without the penalties or logit_bias that the requests set. {SENT}",
            lambda: Sample.of(trainer, unpenalized).logprobs,
        )
    more = " in addition to its penalties" if is_penalized else ""
    yield MismatchHypothesis(
        f"Their logprobs match temperature {fit:.3g}, which the run did not request{note}. Record the temperature with "
        f"each request. {SENT}",
        lambda: pad(at_temperature),
    )
    candidates: list[tuple[str, Callable[[float], NDArray[np.float64]], NDArray[np.float64], bool]] = [
        ("top_k", policy.top_k, np.arange(1.0, min(policy.logits.shape[1], 201)), False),
        ("top_p", policy.top_p, np.r_[np.linspace(0.01, 0.99, 99), 0.995, 0.999], True),
        ("min_p", policy.min_p, np.r_[np.linspace(0.001, 0.009, 9), np.linspace(0.01, 1, 100)], True),
        ("frequency_penalty", policy.frequency_penalty, np.linspace(-2, 2, 41), True),
        ("presence_penalty", policy.presence_penalty, np.linspace(-2, 2, 41), True),
        ("repetition_penalty", policy.repetition_penalty, np.linspace(0.5, 2, 31), True),
    ]
    for name, logprobs_at, grid, continuous in candidates:
        value = _minimize(lambda at, logprobs_at=logprobs_at: miss(logprobs_at(at)), grid, continuous)
        logprobs = logprobs_at(value)
        yield MismatchHypothesis(
            f"They sample with {name} {value:.3g}{more}, which the run did not request. {SENT}",
            lambda logprobs=logprobs: pad(logprobs),
        )


def _minimize(function: Callable[[float], float], grid: NDArray[np.float64], continuous: bool = True) -> float:
    """Return the argument with the smallest value: on a grid, then between its neighbours by golden-section search."""
    values = [function(float(candidate)) for candidate in grid]
    # Several may fit equally well, since truncation is a step function; a round number is most likely to have been set.
    alike = np.flatnonzero(np.array(values) <= min(values) + 1e-9)
    index = min(alike, key=lambda candidate: len(f"{grid[candidate]:g}"))
    best, least = float(grid[index]), values[index]
    low, high = float(grid[max(index - 1, 0)]), float(grid[min(index + 1, len(grid) - 1)])
    for _ in range(40 if continuous else 0):
        left, right = high - _GOLDEN_RATIO * (high - low), low + _GOLDEN_RATIO * (high - low)
        below, above = function(left), function(right)
        for argument, value in ((left, below), (right, above)):
            if value < least - 1e-9:
                best, least = argument, value
        low, high = (low, right) if below <= above else (left, high)
    return best


def distributions(trainer: Trainer, sample: Sample) -> Distributions:
    """Return the trainer's distributions at the first `TOKENS` tokens of a sample. Every rank must call this."""
    parts, terms = [], []
    with torch.no_grad():
        for batch in sample.step.batches:
            logits = trainer.target.policy(_logits, batch.to(trainer.target.device), trainer.precision)
            row = np.asarray(batch.logit_row)
            changed = logits.astype(np.float64) if batch.support is None else _as_sampled(logits, batch.support)
            parts.append(changed[row] if len(row) else np.zeros((0, logits.shape[-1])))
            terms.append(np.asarray(batch.term))
    trainer.target.reshard()
    order = np.argsort(np.concatenate(terms))[:TOKENS]
    logits = np.concatenate(parts)[order]
    prompt, output, target, inv_temperature = [], [], [], []
    starts = np.cumsum([0, *(len(row.ids) for row in sample.rows)])
    for origin, trace in zip(sample.step.origin[:TOKENS], sample.step.trace[:TOKENS], strict=True):
        row, at = sample.rows[trace], int(origin - starts[trace])
        sampled = ~np.isnan(row.rollout[:at])
        answer_start = at if not at or not sampled[-1] else at - int(np.argmin(np.r_[sampled[::-1], False]))
        prompt.append(row.ids[:answer_start])
        output.append(row.ids[answer_start:at])
        target.append(row.ids[at])
        inv_temperature.append(row.inv_temperature[at])
    return Distributions(
        logits,
        np.array(target),
        np.array(inv_temperature, np.float64),
        sample.rollout[:TOKENS].astype(np.float64),
        prompt,
        output,
    )


def _as_sampled(logits: NDArray[np.float32], support: Support) -> NDArray[np.float64]:
    """Return [U, V] logits with the penalties of their rows, and -inf outside of the support of restricted rows."""
    result = logits.astype(np.float64)
    row = np.repeat(np.arange(len(logits)), np.diff(support.offsets))
    scores = result[row, support.ids]
    if support.changes is not None:
        before, factor, after = (column.astype(np.float64) for column in support.changes)
        scores = scores + before
        scores = np.where(scores > 0, scores / factor, scores * factor) + after
    result[support.restricted] = -np.inf
    result[row, support.ids] = scores
    return result


def _logits(model: torch.nn.Module, batch: Batch, precision: torch.dtype) -> NDArray[np.float32]:
    """Return [U, V] logits of a batch, before any temperature."""
    head = head_of(model)
    is_low_precision = precision != torch.float32
    with torch.autocast(batch.ids.device.type, precision, enabled=is_low_precision):
        hidden = read_states(model, batch)
    cast = {
        name: None if value is None else value.to(hidden.dtype)
        for name, value in (("weight", head.weight), ("bias", head.bias))
    }
    return logits_of(hidden, head._replace(**cast)).cpu().numpy()


MOST = 0.95
"""Minimum share of tokens that a cause must explain within the bounds of a correct sync."""
UNKNOWN = (
    "No known mistake explains these numbers: the servers may run other weights, another model, another precision or "
    "other sampling settings than the run requested."
)
ROUNDING = (
    "The difference is as small as rounding, and no other mistake explains it: they most likely compute in bfloat16 or "
    "float16, and the trainer in float32. Start them with --dtype float32, or set train.dtype to bf16."
)
ADAPTER_BEFORE = (
    "They answer with the previous step's adapter{zero}. Look in their logs for the adapter that was loaded last, and "
    "request the model by the name of that adapter."
)
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


def explain(
    trainer: Trainer, sample: Sample, options: OnlineConfig, weight_bounds: WeightSyncBounds, initial_model: Path | None
) -> str:
    """Return the description of the cause that explains the servers' logprobs; without one, describe the difference.

    Args:
        trainer: trainer with the policy.
        sample: tokens outside of the bounds.
        options: options of the run.
        weight_bounds: bounds of a correct sync.
        initial_model: folder of the initial model.
    """
    policy_miss, tried = _miss(sample, sample.logprobs, weight_bounds.bf16), []
    for cause in causes(trainer, sample, options, initial_model):
        logprobs = cause.logprobs()
        if not weight_bounds.bf16 and _share(sample, logprobs, FP32_NATS) == 1:
            return cause.words
        tried.append((_miss(sample, logprobs, weight_bounds.bf16), cause, logprobs))
    tried.sort(key=lambda entry: entry[0])
    if weight_bounds.bf16:
        for _, cause, logprobs in tried:
            if explains(sample.logprobs, logprobs, sample.rollout):
                return cause.words
    elif tried and tried[0][0] < policy_miss / 2 and _share(sample, tried[0][2], FP32_NATS) >= MOST:
        # If most tokens are almost certain, a wrong cause explains most of them too, so take the nearest one.
        return tried[0][1].words
    if not weight_bounds.bf16 and WeightSyncBounds(bf16=True).holds(sample.gap()):
        return ROUNDING
    likelier = sample.rollout >= sample.logprobs - (BF16_MEDIAN if weight_bounds.bf16 else FP32_NATS)
    if likelier.mean() > MOST and (not weight_bounds.bf16 or mean_excess(sample.logprobs, sample.rollout)):
        return (
            "Every token is at least as likely to them as to the trainer: they sample from only the likeliest tokens, "
            "by top_p, top_k or min_p or several of them, which the run did not request. " + SENT
        )
    near = f" The nearest one: {tried[0][1].words}" if tried and tried[0][0] < policy_miss * 0.8 else ""
    return UNKNOWN + near


def causes(trainer: Trainer, sample: Sample, options: OnlineConfig, first: Path | None) -> list[MismatchHypothesis]:
    """List the known causes: wrong weights, the likeliest first, then wrong sampling settings.

    Args:
        trainer: trainer with the policy.
        sample: tokens that are compared.
        options: options of the run.
        first: folder of the initial model.
    """
    return [*_weight_causes(trainer, sample, options, first), *sampling_causes(trainer, sample)]


def _miss(sample: Sample, logprobs: Floats, bf16: bool) -> float:
    """Return the mean difference from the servers' logprobs in nats, at most `MAX_TOKEN_NATS` per token.

    In bf16, return the unexplained share of the squared difference instead.
    """
    if bf16:
        return 1 - explained_share(sample.logprobs, logprobs, sample.rollout)[0]
    differences = np.abs(np.asarray(logprobs, np.float64) - sample.rollout)
    differences = np.minimum(differences[~np.isnan(differences)], MAX_TOKEN_NATS)
    return float(differences.mean()) if len(differences) else MAX_TOKEN_NATS


def _share(sample: Sample, logprobs: Floats, nats: float) -> float:
    """Return the share of tokens whose logprobs are within `nats` of the servers'; unknown tokens are left out."""
    is_known = ~np.isnan(logprobs)
    return float((np.abs(logprobs - sample.rollout)[is_known] <= nats).mean()) if is_known.any() else 0.0


def _weight_causes(
    trainer: Trainer, sample: Sample, options: OnlineConfig, first: Path | None
) -> list[MismatchHypothesis]:
    """List causes with weights that are not the current ones, all of them or a part; the likeliest first."""
    candidates = []
    pushed = previous_weights_file(trainer, options)
    if pushed is not None and trainer.ranks.sum(pushed[0].is_file()) == trainer.ranks.world:
        path, name_of = pushed
        if options.weight_sync == "lora":
            zero = ", or without an adapter: the first adapter changes nothing" if trainer.steps_done == 1 else ""
            words = ADAPTER_BEFORE.format(zero=zero)
            candidates.append(MismatchHypothesis(words, lambda: _with(trainer, sample, _read(path), name_of)))
        else:
            candidates += _whole_causes(trainer, sample, path, name_of)
    if has_adapters(trainer.model):
        no_adapter = "They answer without the adapter. Request the model by the adapter's name."
        candidates.append(MismatchHypothesis(no_adapter, lambda: _without_adapters(trainer, sample)))
        candidates += _scaled_adapters(trainer, sample)
    if first is not None and list(first.glob("*.safetensors")) and not has_adapters(trainer.model):
        candidates.append(
            MismatchHypothesis(
                "They run the initial weights of the run, which are older than the previous version: they received no "
                "weight sync. A restarted server has these weights, and so has a second server at the same address. "
                "Pass a separate address for each server.",
                lambda: _with(trainer, sample, _read_folder(first), base_parameter_name),
            )
        )
    return candidates


def _whole_causes(
    trainer: Trainer, sample: Sample, path: Path, name_of: Callable[[str], str]
) -> Iterator[MismatchHypothesis]:
    """Yield causes with weights of the previous version: all of them, only the head, or those of one layer."""
    yield MismatchHypothesis(
        "They still run the previous version's weights: the weight sync did not reach them. Look for the update in "
        "their logs, and start them with the flags of tracegrad.weight_sync.vllm_arguments.",
        lambda: _with(trainer, sample, _read(path), name_of, merged=True),
    )
    yield MismatchHypothesis(
        "Their output head is the previous version's: it is tied to the embedding, and the update did not reach it. "
        "Start them with --worker-extension-cls tracegrad.weight_sync.worker.Worker, which packs it again.",
        lambda: _with_head(trainer, sample, _read(path), name_of),
    )
    weights = _read(path)
    parts: dict[str, dict[str, Any]] = {}
    for name, value in weights.items():
        layer = _LAYER.search(name)
        parts.setdefault(f"layer {layer[1]}" if layer else name.rpartition(".")[0], {})[name] = value
    for part, old in parts.items():
        yield MismatchHypothesis(
            f"The weights of {part} are the previous version's, and the others are new: the weight sync was "
            "incomplete. Look for the update in their logs, and start them with the flags of "
            "tracegrad.weight_sync.vllm_arguments.",
            lambda old=old: _with(trainer, sample, old, name_of, merged=True),
        )


def _scaled_adapters(trainer: Trainer, sample: Sample) -> Iterator[MismatchHypothesis]:
    """Yield causes in which adapters are added with another factor than lora_alpha / r."""
    layers = [module for module in trainer.model.modules() if isinstance(getattr(module, "scaling", None), dict)]
    local = next((scale for layer in layers for scale in layer.scaling.values()), None)
    if local is None:
        return
    config = trainer.model.peft_config[trainer.model.active_adapter]
    alpha, rank = float(config.lora_alpha), float(config.r)
    for scale in sorted({1.0, alpha, 1 / rank, alpha / rank, alpha / rank**0.5, local / 2, local * 2} - {local}):
        yield MismatchHypothesis(
            f"They add the adapter with the factor {scale:g}, and the trainer with {local:g}, which is lora_alpha / r. "
            "Make sure that the servers read the adapter_config.json of the weight sync.",
            lambda scale=scale: _with_scale(trainer, sample, layers, scale / local),
        )


def _with_scale(trainer: Trainer, sample: Sample, layers: list[Any], factor: float) -> Floats:
    original = [dict(layer.scaling) for layer in layers]
    try:
        for layer in layers:
            layer.scaling.update({name: scale * factor for name, scale in layer.scaling.items()})
        return _compute_logprobs(trainer, sample)
    finally:
        for layer, scaling in zip(layers, original, strict=True):
            layer.scaling.update(scaling)


def previous_logprobs(trainer: Trainer, options: OnlineConfig, sample: Sample) -> Floats | None:
    """Return [M] logprobs of the previous version as it was pushed; None if it is not stored.

    Every rank must call this.
    """
    with previous_weights(trainer, options) as is_stored:
        return _compute_logprobs(trainer, sample) if is_stored else None


@contextmanager
def previous_weights(trainer: Trainer, options: OnlineConfig) -> Iterator[bool]:
    """Load the previous version into the policy while entered; yield whether it is stored.

    Every rank must call this.
    """
    pushed = previous_weights_file(trainer, options)
    if pushed is None or trainer.ranks.sum(pushed[0].is_file()) != trainer.ranks.world:
        yield False
        return
    path, name_of = pushed
    with (
        _swap(trainer.model, _read(path), name_of),
        nullcontext() if options.weight_sync == "lora" else adapters_off(trainer.model),
    ):
        yield True


def _compute_logprobs(trainer: Trainer, sample: Sample) -> Floats:
    """Return [M] logprobs of the model in its current state."""
    return trainer.compute_logprobs(sample.step)


def _read_folder(folder: Path) -> Mapping[str, Any]:
    """Return all weights in a model folder."""
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in _read(path).items()}


def _read(path: Path) -> Mapping[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)


@contextmanager
def _swap(model: Any, weights: Mapping[str, Any], name_of: Callable[[str], str]) -> Iterator[None]:
    """Replace the parameters that `weights` names, and restore them on exit."""
    parameters = [(parameter, name_of(name)) for name, parameter in model.named_parameters(remove_duplicate=False)]
    parameters = [(parameter, parameter.detach().clone(), name) for parameter, name in parameters if name in weights]
    try:
        for parameter, _, name in parameters:
            _fill(parameter, weights[name])
        yield
    finally:
        for parameter, original, _ in parameters:
            _fill(parameter, original)


def _fill(parameter: Any, value: Any) -> None:
    """Set a parameter to a complete value or a shard of the same layout. Every rank must call this."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        value = value.to(parameter.device, parameter.dtype)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    with torch.no_grad():
        parameter.copy_(value)


def _with(
    trainer: Trainer, sample: Sample, weights: Mapping[str, Any], name_of: Callable[[str], str], merged: bool = False
) -> Floats:
    """Return logprobs with weights that were pushed before; adapters are merged into them, or are these weights."""
    with _swap(trainer.model, weights, name_of), adapters_off(trainer.model) if merged else nullcontext():
        return _compute_logprobs(trainer, sample)


def _with_head(trainer: Trainer, sample: Sample, weights: Mapping[str, Any], name_of: Callable[[str], str]) -> Floats:
    """Return logprobs with only the output head of the previous version; a tied head is untied for this.

    Return NaN if the head is not tied, is sharded, or its old weights are missing.
    """
    from torch import nn
    from torch.distributed.tensor import DTensor

    model = trainer.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = [
        name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is embedding.weight
    ]
    old = next((weights[name_of(name)] for name in names if name_of(name) in weights), None)
    if old is None or head.weight is not embedding.weight or isinstance(embedding.weight, DTensor):
        return np.full(len(sample.step), np.nan, np.float32)
    try:
        head.weight = nn.Parameter(old.to(embedding.weight.device, embedding.weight.dtype), requires_grad=False)
        return _compute_logprobs(trainer, sample)
    finally:
        head.weight = embedding.weight


def _without_adapters(trainer: Trainer, sample: Sample) -> Floats:
    with adapters_off(trainer.model):
        return _compute_logprobs(trainer, sample)
