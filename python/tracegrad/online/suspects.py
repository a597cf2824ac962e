"""What would explain that servers sample from something else than the policy that is trained: each as logprobs.

Asked only where a check has failed. Causes in the weights are tried on the trainer's own model with the mistake put
into it; causes in the sampling by the distribution that it gives (`causes`).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad.learner import Run
from tracegrad.learner.adapters import adapters_off, has_adapters
from tracegrad.online.canary import Sample
from tracegrad.online.causes import SENT, Cause, sampling_causes
from tracegrad.online.options import Online
from tracegrad.online.proof import BF16_MEDIAN, FARTHEST, FP32_NATS, Floats, Proof, above, explains, share_given
from tracegrad.online.ways import before, of_whole

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
        "the update, and start them with the flags of tracegrad.sync.vllm_arguments.",
        lambda: _with(driven, sample, _read(path), named, merged=True),
    )
    yield Cause(
        "Their output head is that of the version before: it is tied to the embedding, and the update did not "
        "reach it. Start them with --worker-extension-cls tracegrad.sync.worker.Worker, which packs it again.",
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
            "part. Look at their logs for the update, and start them with the flags of tracegrad.sync.vllm_arguments.",
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
