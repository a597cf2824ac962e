"""Search for the cause of a failed weight check: wrong weights, or sampling settings that the run did not request.

Wrong weights are tried on the trainer's own model. A temperature, truncation or penalties are fitted to the servers'
logprobs.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
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
from tracegrad.trainer import Trainer
from tracegrad.trainer.lora import adapters_off, has_adapters

SENT = (
    "Let requests reach the servers as the run sends them, and start vLLM with --generation-config vllm, so that "
    "defaults of the model's folder do not apply."
)
TOKENS = 512
"""Maximum number of tokens whose distributions are computed: [TOKENS, V] floats are in memory."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2


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
        logits: [M, V] float64, before any temperature.
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

    @property
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
        return self._with_changed_logits(lambda logit, times: logit - value * times, self.output)

    def presence_penalty(self, value: float) -> NDArray[np.float64]:
        """Return [M] logprobs if the logit of each token that was sampled before is lowered by `value`."""
        return self._with_changed_logits(lambda logit, _: logit - value, self.output)

    def repetition_penalty(self, value: float) -> NDArray[np.float64]:
        """Return [M] logprobs if logits of earlier tokens, of prompt and output, are penalised by the factor `value`.

        Positive logits are divided by it, negative ones multiplied.
        """
        seen = [np.concatenate(both) for both in zip(self.prompt, self.output, strict=True)]
        return self._with_changed_logits(lambda logit, _: np.where(logit > 0, logit / value, logit * value), seen)

    def _with_changed_logits(
        self, change: Callable[..., NDArray[np.float64]], earlier: list[NDArray[np.int64]]
    ) -> NDArray[np.float64]:
        logits = self.logits.copy()
        for row, ids_before in zip(logits, earlier, strict=True):
            ids, times = np.unique(ids_before, return_counts=True)
            row[ids] = change(row[ids], times)
        return _logprobs(logits, self.target, self.inv_temperature)


def _logprobs(
    logits: NDArray[np.float64], target: NDArray[np.int64], inv_temperature: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return [M] logprobs of the targets from [M, V] logits and [M] inverse temperatures."""
    scores = logits * inv_temperature[:, None]
    scores -= scores.max(-1, keepdims=True)
    return np.take_along_axis(scores, target[:, None], -1)[:, 0] - np.log(np.exp(scores).sum(-1))


def sampling_causes(driven: Trainer, sample: Sample) -> Iterator[MismatchHypothesis]:
    """Yield a temperature, truncations and penalties, each with the value that fits best. Every rank must call this."""
    trainer = distributions(driven, sample)
    count = len(trainer.target)

    def miss(logprobs: NDArray[np.float64]) -> float:
        return float(np.minimum(np.abs(logprobs - trainer.rollout), 5.0).mean())

    def pad(logprobs: NDArray[np.float64]) -> Floats:
        return np.r_[logprobs, np.full(len(sample.step) - count, np.nan)].astype(np.float32)

    fit = float(np.exp(_minimize(lambda log: miss(trainer.at(np.exp(log))), np.log(np.geomspace(0.05, 5.0, 47)))))
    note = " or that gives raw logprobs, without --logprobs-mode processed_logprobs" if abs(fit - 1) < 1e-3 else ""
    at_temperature = trainer.at(fit)
    yield MismatchHypothesis(
        f"Their logprobs are those of temperature {fit:.3g}, which nobody told{note}. Record the temperature with "
        f"each request. {SENT}",
        lambda: pad(at_temperature),
    )
    candidates: list[tuple[str, Callable[[float], NDArray[np.float64]], NDArray[np.float64], bool]] = [
        ("top_k", trainer.top_k, np.arange(1.0, min(trainer.logits.shape[1], 201)), False),
        ("top_p", trainer.top_p, np.r_[np.linspace(0.01, 0.99, 99), 0.995, 0.999], True),
        ("min_p", trainer.min_p, np.r_[np.linspace(0.001, 0.009, 9), np.linspace(0.01, 1, 100)], True),
        ("frequency_penalty", trainer.frequency_penalty, np.linspace(-2, 2, 41), True),
        ("presence_penalty", trainer.presence_penalty, np.linspace(-2, 2, 41), True),
        ("repetition_penalty", trainer.repetition_penalty, np.linspace(0.5, 2, 31), True),
    ]
    for name, logprobs_at, grid, continuous in candidates:
        value = _minimize(lambda at, logprobs_at=logprobs_at: miss(logprobs_at(at)), grid, continuous)
        logprobs = logprobs_at(value)
        yield MismatchHypothesis(
            f"They sample with {name} {value:.3g}, which the run did not ask for. {SENT}",
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


def distributions(driven: Trainer, sample: Sample) -> Distributions:
    """Return the trainer's distributions at the first `TOKENS` tokens of a sample. Every rank must call this."""
    parts, terms = [], []
    with torch.no_grad():
        for batch in sample.step.batches:
            logits = driven.target.policy(_logits, batch.to(driven.target.device), driven.precision)
            row = np.asarray(batch.row)
            parts.append(logits[row].astype(np.float64) if len(row) else np.zeros((0, logits.shape[-1])))
            terms.append(np.asarray(batch.term))
    driven.target.rest()
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
    "None of the known mistakes gives these numbers: the servers run other weights, another model, another precision "
    "or another sampling than they were told."
)
ROUNDING = (
    "It is as small as rounding makes it, and no other mistake gives it: they most likely compute in bfloat16 or "
    "float16, and the trainer in float32. Start them with --dtype float32, or train in theirs: train.dtype bf16."
)
ADAPTER_BEFORE = (
    "They answer with the adapter of the step before{zero}. Look at their logs for the one that was loaded last, and "
    "ask for the model by that adapter's name."
)
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


def explain(driven: Trainer, sample: Sample, told: OnlineConfig, proof: WeightSyncBounds, first: Path | None) -> str:
    """Return the description of the cause that explains the servers' logprobs, or of what is known without a cause.

    Args:
        driven: trainer with the policy.
        sample: tokens outside of the bounds.
        told: options of the run.
        proof: bounds of a correct sync.
        first: folder of the initial model.
    """
    policy_miss, tried = _miss(sample, sample.logprobs, proof.bf16), []
    for cause in causes(driven, sample, told, first):
        logprobs = cause.logprobs()
        if not proof.bf16 and _share(sample, logprobs, FP32_NATS) == 1:
            return cause.words
        tried.append((_miss(sample, logprobs, proof.bf16), cause, logprobs))
    tried.sort(key=lambda entry: entry[0])
    if proof.bf16:
        for _, cause, logprobs in tried:
            if explains(sample.logprobs, logprobs, sample.rollout):
                return cause.words
    elif tried and tried[0][0] < policy_miss / 2 and _share(sample, tried[0][2], FP32_NATS) >= MOST:
        # If most tokens are almost certain, a wrong cause explains most of them too, so take the nearest one.
        return tried[0][1].words
    if not proof.bf16 and WeightSyncBounds(bf16=True).holds(sample.gap()):
        return ROUNDING
    likelier = sample.rollout >= sample.logprobs - (BF16_MEDIAN if proof.bf16 else FP32_NATS)
    if likelier.mean() > MOST and (not proof.bf16 or mean_excess(sample.logprobs, sample.rollout)):
        return (
            "No token is less likely to them than to the trainer: they sample from the likeliest tokens alone, by "
            "top_p, top_k or min_p or several of them, which the run did not ask for. " + SENT
        )
    near = f" Nearest: {tried[0][1].words}" if tried and tried[0][0] < policy_miss * 0.8 else ""
    return UNKNOWN + near


def causes(driven: Trainer, sample: Sample, told: OnlineConfig, first: Path | None) -> list[MismatchHypothesis]:
    """List the known causes: wrong weights, the likeliest first, then wrong sampling settings.

    Args:
        driven: trainer with the policy.
        sample: tokens that are compared.
        told: options of the run.
        first: folder of the initial model.
    """
    return [*_weight_causes(driven, sample, told, first), *sampling_causes(driven, sample)]


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
    driven: Trainer, sample: Sample, options: OnlineConfig, first: Path | None
) -> list[MismatchHypothesis]:
    """List causes with weights that are not the current ones, all of them or a part; the likeliest first."""
    candidates = []
    pushed = previous_weights_file(driven, options)
    if pushed is not None and driven.ranks.sum(pushed[0].is_file()) == driven.ranks.world:
        path, name_of = pushed
        if options.sync == "lora":
            zero = ", or with none: the first adapter changes nothing" if driven.taken == 1 else ""
            words = ADAPTER_BEFORE.format(zero=zero)
            candidates.append(MismatchHypothesis(words, lambda: _with(driven, sample, _read(path), name_of)))
        else:
            candidates += _whole_causes(driven, sample, path, name_of)
    if has_adapters(driven.model):
        no_adapter = "They answer without the adapter. Ask for the model by the adapter's name."
        candidates.append(MismatchHypothesis(no_adapter, lambda: _without_adapters(driven, sample)))
        candidates += _scaled_adapters(driven, sample)
    if first is not None and list(first.glob("*.safetensors")) and not has_adapters(driven.model):
        candidates.append(
            MismatchHypothesis(
                "They run the weights that the run began with, older than the version before: no push has reached "
                "them. A server that was started again, or one behind the same address that nobody pushes to, has "
                "these. Name each server by an address of its own.",
                lambda: _with(driven, sample, _read_folder(first), base_parameter_name),
            )
        )
    return candidates


def _whole_causes(
    driven: Trainer, sample: Sample, path: Path, name_of: Callable[[str], str]
) -> Iterator[MismatchHypothesis]:
    """Yield causes with weights of the previous version: all of them, only the head, or those of one layer."""
    yield MismatchHypothesis(
        "They still run the weights of the version before: the push did not reach them. Look at their logs for "
        "the update, and start them with the flags of tracegrad.weight_sync.vllm_arguments.",
        lambda: _with(driven, sample, _read(path), name_of, merged=True),
    )
    yield MismatchHypothesis(
        "Their output head is that of the version before: it is tied to the embedding, and the update did not "
        "reach it. Start them with --worker-extension-cls tracegrad.weight_sync.worker.Worker, which packs it again.",
        lambda: _with_head(driven, sample, _read(path), name_of),
    )
    weights = _read(path)
    parts: dict[str, dict[str, Any]] = {}
    for name, value in weights.items():
        layer = _LAYER.search(name)
        parts.setdefault(f"layer {layer[1]}" if layer else name.rpartition(".")[0], {})[name] = value
    for part, old in parts.items():
        yield MismatchHypothesis(
            f"The weights of {part} are those of the version before, and the others are new: the push reached them in "
            "part. Look at their logs for the update, and start them with the flags of "
            "tracegrad.weight_sync.vllm_arguments.",
            lambda old=old: _with(driven, sample, old, name_of, merged=True),
        )


def _scaled_adapters(driven: Trainer, sample: Sample) -> Iterator[MismatchHypothesis]:
    """Yield causes in which adapters are added with another factor than lora_alpha / r."""
    layers = [module for module in driven.model.modules() if isinstance(getattr(module, "scaling", None), dict)]
    local = next((scale for layer in layers for scale in layer.scaling.values()), None)
    if local is None:
        return
    config = driven.model.peft_config[driven.model.active_adapter]
    alpha, rank = float(config.lora_alpha), float(config.r)
    for scale in sorted({1.0, alpha, 1 / rank, alpha / rank, alpha / rank**0.5, local / 2, local * 2} - {local}):
        yield MismatchHypothesis(
            f"They add the adapter with the factor {scale:g}, and the trainer with {local:g}, which is lora_alpha / r. "
            "Let the servers read the adapter_config.json that is pushed.",
            lambda scale=scale: _with_scale(driven, sample, layers, scale / local),
        )


def _with_scale(driven: Trainer, sample: Sample, layers: list[Any], factor: float) -> Floats:
    original = [dict(layer.scaling) for layer in layers]
    try:
        for layer in layers:
            layer.scaling.update({name: scale * factor for name, scale in layer.scaling.items()})
        return _compute_logprobs(driven, sample)
    finally:
        for layer, scaling in zip(layers, original, strict=True):
            layer.scaling.update(scaling)


def previous_logprobs(driven: Trainer, told: OnlineConfig, sample: Sample) -> Floats | None:
    """Return [M] logprobs of the previous version as it was pushed; None if it is not stored.

    Every rank must call this.
    """
    with previous_weights(driven, told) as is_stored:
        return _compute_logprobs(driven, sample) if is_stored else None


@contextmanager
def previous_weights(driven: Trainer, told: OnlineConfig) -> Iterator[bool]:
    """Load the previous version into the policy while entered; yield whether it is stored.

    Every rank must call this.
    """
    pushed = previous_weights_file(driven, told)
    if pushed is None or driven.ranks.sum(pushed[0].is_file()) != driven.ranks.world:
        yield False
        return
    path, name_of = pushed
    with (
        _swap(driven.model, _read(path), name_of),
        nullcontext() if told.sync == "lora" else adapters_off(driven.model),
    ):
        yield True


def _compute_logprobs(driven: Trainer, sample: Sample) -> Floats:
    """Return [M] logprobs of the model in its current state."""
    return driven.measure(sample.step)


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
    driven: Trainer, sample: Sample, weights: Mapping[str, Any], name_of: Callable[[str], str], merged: bool = False
) -> Floats:
    """Return logprobs with weights that were pushed before; adapters are merged into them, or are these weights."""
    with _swap(driven.model, weights, name_of), adapters_off(driven.model) if merged else nullcontext():
        return _compute_logprobs(driven, sample)


def _with_head(driven: Trainer, sample: Sample, weights: Mapping[str, Any], name_of: Callable[[str], str]) -> Floats:
    """Return logprobs with only the output head of the previous version; a tied head is untied for this.

    Return NaN if the head is not tied, is sharded, or its old weights are missing.
    """
    from torch import nn
    from torch.distributed.tensor import DTensor

    model = driven.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = [
        name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is embedding.weight
    ]
    old = next((weights[name_of(name)] for name in names if name_of(name) in weights), None)
    if old is None or head.weight is not embedding.weight or isinstance(embedding.weight, DTensor):
        return np.full(len(sample.step), np.nan, np.float32)
    try:
        head.weight = nn.Parameter(old.to(embedding.weight.device, embedding.weight.dtype), requires_grad=False)
        return _compute_logprobs(driven, sample)
    finally:
        head.weight = embedding.weight


def _without_adapters(driven: Trainer, sample: Sample) -> Floats:
    with adapters_off(driven.model):
        return _compute_logprobs(driven, sample)
