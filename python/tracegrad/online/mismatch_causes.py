"""Search for the cause of a failed weight check: faults in the weights or sampling settings nobody asked for.

Faults in the weights are tried on the trainer's own model; a temperature, truncation or penalties are fitted to the
logprobs that the servers returned.
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
from tracegrad.online.logprob_gap import BF16_MEDIAN, FARTHEST, FP32_NATS, Floats, Proof, above, explains, share_given
from tracegrad.online.options import Online
from tracegrad.online.servers import before, of_whole
from tracegrad.online.weight_sample import Sample
from tracegrad.packing import Batch
from tracegrad.trainer import Run
from tracegrad.trainer.lora import adapters_off, has_adapters

SENT = (
    "Let requests reach the servers as the run sends them, and start vLLM with --generation-config vllm, so that "
    "defaults of the model's folder do not apply."
)
TOKENS = 512
"""Tokens whose distributions are looked at, at most: [TOKENS, V] floats are held."""
_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Cause:
    """A mistake that would explain a gap.

    Args:
        words: what it is and how to cure it; known once `logprobs` was called.
        logprobs: gives the [M] logprobs that the servers would then have given. Every rank calls it.
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
        prompt, output: for each token, the ids before it: of the prompt, and sampled for the same answer.
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
        whole = np.exp(scores - scores.max(-1, keepdims=True))
        whole /= whole.sum(-1, keepdims=True)
        own = np.take_along_axis(whole, self.target[:, None], -1)
        kept = -np.sort(-whole, -1)
        object.__setattr__(self, "ordered", (kept, np.cumsum(kept, -1), (whole > own).sum(-1)))

    @property
    def logprobs(self) -> NDArray[np.float64]:
        """[M] as they are asked for."""
        return _logprobs(self.logits, self.target, self.inv_temperature)

    def at(self, temperature: float) -> NDArray[np.float64]:
        """[M] logprobs at another temperature."""
        return _logprobs(self.logits, self.target, np.full(len(self.target), 1 / temperature))

    def kept(self, count: NDArray[np.int64]) -> NDArray[np.float64]:
        """[M] logprobs where the `count` likeliest tokens of each distribution are left; -inf for one that is not."""
        _, mass, rank = self.ordered
        inside = mass[np.arange(len(count)), np.clip(count, 1, mass.shape[1]) - 1]
        return np.where(rank < count, self.logprobs - np.log(inside), -np.inf)

    def top_k(self, value: float) -> NDArray[np.float64]:
        """[M] logprobs under top_k."""
        return self.kept(np.full(len(self.target), int(value)))

    def top_p(self, value: float) -> NDArray[np.float64]:
        """[M] logprobs under top_p: the fewest likeliest tokens that hold so much."""
        return self.kept(1 + (self.ordered[1][:, :-1] < value).sum(-1))

    def min_p(self, value: float) -> NDArray[np.float64]:
        """[M] logprobs under min_p: tokens with at least this share of the likeliest one's probability."""
        kept = self.ordered[0]
        return self.kept((kept >= value * kept[:, :1]).sum(-1))

    def frequency_penalty(self, value: float) -> NDArray[np.float64]:
        """[M] logprobs where each logit is lowered by this much for each time its token was sampled before."""
        return self._changed(lambda logit, times: logit - value * times, self.output)

    def presence_penalty(self, value: float) -> NDArray[np.float64]:
        """[M] logprobs where the logit of each token that was sampled before is lowered by this much."""
        return self._changed(lambda logit, _: logit - value, self.output)

    def repetition_penalty(self, value: float) -> NDArray[np.float64]:
        """[M] logprobs where the logit of each token before, of the prompt too, is divided by this, or multiplied."""
        seen = [np.concatenate(both) for both in zip(self.prompt, self.output, strict=True)]
        return self._changed(lambda logit, _: np.where(logit > 0, logit / value, logit * value), seen)

    def _changed(
        self, change: Callable[..., NDArray[np.float64]], seen: list[NDArray[np.int64]]
    ) -> NDArray[np.float64]:
        found = self.logits.copy()
        for row, sampled in zip(found, seen, strict=True):
            ids, times = np.unique(sampled, return_counts=True)
            row[ids] = change(row[ids], times)
        return _logprobs(found, self.target, self.inv_temperature)


def _logprobs(
    logits: NDArray[np.float64], target: NDArray[np.int64], inv_temperature: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[M] of the targets, by [M, V] logits and [M] inverse temperatures."""
    scores = logits * inv_temperature[:, None]
    scores -= scores.max(-1, keepdims=True)
    return np.take_along_axis(scores, target[:, None], -1)[:, 0] - np.log(np.exp(scores).sum(-1))


def sampling_causes(driven: Run, sample: Sample) -> Iterator[Cause]:
    """Yield a temperature, truncations and penalties, each with the value that fits best. Every rank calls this."""
    seen = distributions(driven, sample)
    few = len(seen.target)

    def miss(logprobs: NDArray[np.float64]) -> float:
        return float(np.minimum(np.abs(logprobs - seen.rollout), 5.0).mean())

    def whole(logprobs: NDArray[np.float64]) -> Floats:
        return np.r_[logprobs, np.full(len(sample.step) - few, np.nan)].astype(np.float32)

    heat = float(np.exp(_least(lambda log: miss(seen.at(np.exp(log))), np.log(np.geomspace(0.05, 5.0, 47)))))
    plain = " or that gives raw logprobs, without --logprobs-mode processed_logprobs" if abs(heat - 1) < 1e-3 else ""
    found = seen.at(heat)
    yield Cause(
        f"Their logprobs are those of temperature {heat:.3g}, which nobody told{plain}. Record the temperature with "
        f"each request. {SENT}",
        lambda: whole(found),
    )
    ways: list[tuple[str, Callable[[float], NDArray[np.float64]], NDArray[np.float64], bool]] = [
        ("top_k", seen.top_k, np.arange(1.0, min(seen.logits.shape[1], 201)), False),
        ("top_p", seen.top_p, np.r_[np.linspace(0.01, 0.99, 99), 0.995, 0.999], True),
        ("min_p", seen.min_p, np.r_[np.linspace(0.001, 0.009, 9), np.linspace(0.01, 1, 100)], True),
        ("frequency_penalty", seen.frequency_penalty, np.linspace(-2, 2, 41), True),
        ("presence_penalty", seen.presence_penalty, np.linspace(-2, 2, 41), True),
        ("repetition_penalty", seen.repetition_penalty, np.linspace(0.5, 2, 31), True),
    ]
    for name, give, grid, between in ways:
        value = _least(lambda at, give=give: miss(give(at)), grid, between)
        logprobs = give(value)
        yield Cause(
            f"They sample with {name} {value:.3g}, which the run did not ask for. {SENT}",
            lambda logprobs=logprobs: whole(logprobs),
        )


def _least(of: Callable[[float], float], grid: NDArray[np.float64], between: bool = True) -> float:
    """The place of the smallest value: on a grid, and between its neighbours by golden sections."""
    values = [of(float(each)) for each in grid]
    # Several may fit alike, as truncation moves in steps: the roundest is the likeliest to have been set.
    alike = np.flatnonzero(np.array(values) <= min(values) + 1e-9)
    at = min(alike, key=lambda each: len(f"{grid[each]:g}"))
    best, least = float(grid[at]), values[at]
    low, high = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, len(grid) - 1)])
    for _ in range(40 if between else 0):
        left, right = high - _RATIO * (high - low), low + _RATIO * (high - low)
        below, above = of(left), of(right)
        for place, value in ((left, below), (right, above)):
            if value < least - 1e-9:
                best, least = place, value
        low, high = (low, right) if below <= above else (left, high)
    return best


def distributions(driven: Run, sample: Sample) -> Distributions:
    """The trainer's distributions at the first `TOKENS` tokens of a sample. Every rank calls this."""
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
    prompt, output, target, warmth = [], [], [], []
    starts = np.cumsum([0, *(len(row.ids) for row in sample.rows)])
    for origin, trace in zip(sample.step.origin[:TOKENS], sample.step.trace[:TOKENS], strict=True):
        row, at = sample.rows[trace], int(origin - starts[trace])
        sampled = ~np.isnan(row.rollout[:at])
        begins = at if not at or not sampled[-1] else at - int(np.argmin(np.r_[sampled[::-1], False]))
        prompt.append(row.ids[:begins])
        output.append(row.ids[begins:at])
        target.append(row.ids[at])
        warmth.append(row.inv_temperature[at])
    return Distributions(
        logits,
        np.array(target),
        np.array(warmth, np.float64),
        sample.rollout[:TOKENS].astype(np.float64),
        prompt,
        output,
    )


def _logits(model: torch.nn.Module, batch: Batch, precision: torch.dtype) -> NDArray[np.float32]:
    """[U, V] of a batch, before any temperature."""
    head = head_of(model)
    low = precision != torch.float32
    with torch.autocast(batch.ids.device.type, precision, enabled=low):
        hidden = read_states(model, batch)
    cast = {
        name: None if each is None else each.to(hidden.dtype)
        for name, each in (("weight", head.weight), ("bias", head.bias))
    }
    return logits_of(hidden, head._replace(**cast)).cpu().numpy()


MOST = 0.95
"""The share of tokens that a cause must give as closely as a clean sync."""
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


def explain(driven: Run, sample: Sample, told: Online, proof: Proof, first: Path | None) -> str:
    """Name the cause whose logprobs are the servers', or what is left where there is none.

    Args:
        sample: tokens that are off.
        first: folder of the model that the run began with.
    """
    own, tried = _miss(sample, sample.logprobs, proof.bf16), []
    for cause in causes(driven, sample, told, first):
        logprobs = cause.logprobs()
        if not proof.bf16 and _share(sample, logprobs, FP32_NATS) == 1:
            return cause.words
        tried.append((_miss(sample, logprobs, proof.bf16), cause, logprobs))
    tried.sort(key=lambda each: each[0])
    if proof.bf16:
        for _, cause, logprobs in tried:
            if explains(sample.logprobs, logprobs, sample.rollout):
                return cause.words
    elif tried and tried[0][0] < own / 2 and _share(sample, tried[0][2], FP32_NATS) >= MOST:
        # Where most tokens are certain, a wrong cause gives most of them too: the nearest one is it.
        return tried[0][1].words
    if not proof.bf16 and Proof(bf16=True).holds(sample.gap()):
        return ROUNDING
    likelier = sample.rollout >= sample.logprobs - (BF16_MEDIAN if proof.bf16 else FP32_NATS)
    if likelier.mean() > MOST and (not proof.bf16 or above(sample.logprobs, sample.rollout)):
        return (
            "No token is less likely to them than to the trainer: they sample from the likeliest tokens alone, by "
            "top_p, top_k or min_p or several of them, which the run did not ask for. " + SENT
        )
    near = f" Nearest: {tried[0][1].words}" if tried and tried[0][0] < own * 0.8 else ""
    return UNKNOWN + near


def causes(driven: Run, sample: Sample, told: Online, first: Path | None) -> list[Cause]:
    """List the known causes: mistakes in the weights, the likeliest first, then those in the sampling.

    Args:
        sample: tokens that are compared.
        first: folder of the model that the run began with.
    """
    return [*_weight_causes(driven, sample, told, first), *sampling_causes(driven, sample)]


def _miss(sample: Sample, logprobs: Floats, bf16: bool) -> float:
    """Mean nats between logprobs and the servers', at most `FARTHEST` of one token; in bf16 the share not given."""
    if bf16:
        return 1 - share_given(sample.logprobs, logprobs, sample.rollout)[0]
    apart = np.abs(np.asarray(logprobs, np.float64) - sample.rollout)
    apart = np.minimum(apart[~np.isnan(apart)], FARTHEST)
    return float(apart.mean()) if len(apart) else FARTHEST


def _share(sample: Sample, logprobs: Floats, nats: float) -> float:
    """The share of tokens whose logprobs are the servers'; those that nothing is known of are left out."""
    known = ~np.isnan(logprobs)
    return float((np.abs(logprobs - sample.rollout)[known] <= nats).mean()) if known.any() else 0.0


def _weight_causes(driven: Run, sample: Sample, told: Online, first: Path | None) -> list[Cause]:
    """Weights that are not those of now, all of them or a part; the likeliest first."""
    found = []
    pushed = before(driven, told)
    if pushed is not None and driven.ranks.sum(pushed[0].is_file()) == driven.ranks.world:
        path, named = pushed
        if told.sync == "lora":
            zero = ", or with none: the first adapter changes nothing" if driven.taken == 1 else ""
            words = ADAPTER_BEFORE.format(zero=zero)
            found.append(Cause(words, lambda: _with(driven, sample, _read(path), named)))
        else:
            found += _whole_causes(driven, sample, path, named)
    if has_adapters(driven.model):
        without = "They answer without the adapter. Ask for the model by the adapter's name."
        found.append(Cause(without, lambda: _without_adapters(driven, sample)))
        found += _scaled_adapters(driven, sample)
    if first is not None and list(first.glob("*.safetensors")) and not has_adapters(driven.model):
        found.append(
            Cause(
                "They run the weights that the run began with, older than the version before: no push has reached "
                "them. A server that was started again, or one behind the same address that nobody pushes to, has "
                "these. Name each server by an address of its own.",
                lambda: _with(driven, sample, _read_folder(first), of_whole),
            )
        )
    return found


def _whole_causes(driven: Run, sample: Sample, path: Path, named: Callable[[str], str]) -> Iterator[Cause]:
    """Weights that stayed as they were: all of them, the head alone, or those of one layer."""
    yield Cause(
        "They still run the weights of the version before: the push did not reach them. Look at their logs for "
        "the update, and start them with the flags of tracegrad.weight_sync.vllm_arguments.",
        lambda: _with(driven, sample, _read(path), named, merged=True),
    )
    yield Cause(
        "Their output head is that of the version before: it is tied to the embedding, and the update did not "
        "reach it. Start them with --worker-extension-cls tracegrad.weight_sync.worker.Worker, which packs it again.",
        lambda: _with_head(driven, sample, _read(path), named),
    )
    weights = _read(path)
    parts: dict[str, dict[str, Any]] = {}
    for name, value in weights.items():
        layer = _LAYER.search(name)
        parts.setdefault(f"layer {layer[1]}" if layer else name.rpartition(".")[0], {})[name] = value
    for part, old in parts.items():
        yield Cause(
            f"The weights of {part} are those of the version before, and the others are new: the push reached them in "
            "part. Look at their logs for the update, and start them with the flags of "
            "tracegrad.weight_sync.vllm_arguments.",
            lambda old=old: _with(driven, sample, old, named, merged=True),
        )


def _scaled_adapters(driven: Run, sample: Sample) -> Iterator[Cause]:
    """Adapters that are added with another factor than lora_alpha / r."""
    layers = [module for module in driven.model.modules() if isinstance(getattr(module, "scaling", None), dict)]
    own = next((scale for layer in layers for scale in layer.scaling.values()), None)
    if own is None:
        return
    config = driven.model.peft_config[driven.model.active_adapter]
    alpha, rank = float(config.lora_alpha), float(config.r)
    for scale in sorted({1.0, alpha, 1 / rank, alpha / rank, alpha / rank**0.5, own / 2, own * 2} - {own}):
        yield Cause(
            f"They add the adapter with the factor {scale:g}, and the trainer with {own:g}, which is lora_alpha / r. "
            "Let the servers read the adapter_config.json that is pushed.",
            lambda scale=scale: _with_scale(driven, sample, layers, scale / own),
        )


def _with_scale(driven: Run, sample: Sample, layers: list[Any], factor: float) -> Floats:
    held = [dict(layer.scaling) for layer in layers]
    try:
        for layer in layers:
            layer.scaling.update({name: scale * factor for name, scale in layer.scaling.items()})
        return _measured(driven, sample)
    finally:
        for layer, scaling in zip(layers, held, strict=True):
            layer.scaling.update(scaling)


def previous(driven: Run, told: Online, sample: Sample) -> Floats | None:
    """[M] logprobs of the version before, as it was pushed; None where it is not kept. Every rank calls this."""
    with previous_weights(driven, told) as there:
        return _measured(driven, sample) if there else None


@contextmanager
def previous_weights(driven: Run, told: Online) -> Iterator[bool]:
    """The policy as it was pushed before, while entered; whether that is kept. Every rank calls this."""
    pushed = before(driven, told)
    if pushed is None or driven.ranks.sum(pushed[0].is_file()) != driven.ranks.world:
        yield False
        return
    path, named = pushed
    with (
        _swapped(driven.model, _read(path), named),
        nullcontext() if told.sync == "lora" else adapters_off(driven.model),
    ):
        yield True


def _measured(driven: Run, sample: Sample) -> Floats:
    """[M] logprobs of the model as it stands now."""
    return driven.measure(sample.step)


def _read_folder(folder: Path) -> Mapping[str, Any]:
    """All weights of a model's folder."""
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in _read(path).items()}


def _read(path: Path) -> Mapping[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)


@contextmanager
def _swapped(model: Any, weights: Mapping[str, Any], named: Callable[[str], str]) -> Iterator[None]:
    """The model with other values in the parameters that the weights name; its own are put back."""
    held = [(each, named(name)) for name, each in model.named_parameters(remove_duplicate=False)]
    held = [(each, each.detach().clone(), name) for each, name in held if name in weights]
    try:
        for each, _, name in held:
            _fill(each, weights[name])
        yield
    finally:
        for each, own, _ in held:
            _fill(each, own)


def _fill(parameter: Any, value: Any) -> None:
    """Gives a parameter a value, which is whole; or a shard like itself. Every rank calls this."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        value = value.to(parameter.device, parameter.dtype)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    with torch.no_grad():
        parameter.copy_(value)


def _with(
    driven: Run, sample: Sample, weights: Mapping[str, Any], named: Callable[[str], str], merged: bool = False
) -> Floats:
    """The policy with weights that were pushed before; adapters are merged into them or are these weights."""
    with _swapped(driven.model, weights, named), adapters_off(driven.model) if merged else nullcontext():
        return _measured(driven, sample)


def _with_head(driven: Run, sample: Sample, weights: Mapping[str, Any], named: Callable[[str], str]) -> Floats:
    """The policy with the output head alone as it was; a tied one is untied for the question."""
    from torch import nn
    from torch.distributed.tensor import DTensor

    model = driven.model
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    names = [name for name, each in model.named_parameters(remove_duplicate=False) if each is table.weight]
    old = next((weights[named(name)] for name in names if named(name) in weights), None)
    if old is None or head.weight is not table.weight or isinstance(table.weight, DTensor):
        return np.full(len(sample.step), np.nan, np.float32)
    try:
        head.weight = nn.Parameter(old.to(table.weight.device, table.weight.dtype), requires_grad=False)
        return _measured(driven, sample)
    finally:
        head.weight = table.weight


def _without_adapters(driven: Run, sample: Sample) -> Floats:
    with adapters_off(driven.model):
        return _measured(driven, sample)
