"""What would explain that servers sample from something else than the policy that is trained: each as logprobs.

Asked only where a proof has failed, and answered by the trainer's own model with the mistake put into it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad.batch import Step
from tracegrad.learner import Run
from tracegrad.learner.adapters import adapters_off, has_adapters
from tracegrad.online.options import Online
from tracegrad.online.proof import Floats, Suspect
from tracegrad.online.ways import before

TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)
ADAPTER_BEFORE = (
    "They answer with the adapter of the step before{zero}. Look at their logs for the one that was loaded last, and "
    "ask for the model by that adapter's name."
)


def suspects(driven: Run, step: Step, told: Online) -> list[Suspect]:
    """The mistakes that can be tried on this run, the likeliest first; over ranks all of them try each together."""
    found = []
    pushed = before(driven, told)
    if pushed is not None and driven.ranks.sum(pushed[0].is_file()) == driven.ranks.world:
        path, named = pushed
        if told.sync == "lora":
            zero = ", or with none: the first adapter changes nothing" if driven.taken == 1 else ""
            cause = ADAPTER_BEFORE.format(zero=zero)
            found.append(Suspect(cause, lambda: _with(driven, step, _read(path), named)))
        else:
            found += _whole_suspects(driven, step, path, named)
    if has_adapters(driven.model):
        found.append(
            Suspect(
                "They answer without the adapter. Ask for the model by the adapter's name.",
                lambda: _without_adapters(driven, step),
            )
        )
    found += [
        Suspect(
            f"Their logprobs are those of temperature {heat:g}, which nobody told. Record the temperature with each "
            "request, or start vLLM with --generation-config vllm so that its own defaults do not apply.",
            lambda heat=heat: _at(driven, step, heat),
        )
        for heat in TEMPERATURES
    ]
    return found


def _whole_suspects(driven: Run, step: Step, path: Path, named: Callable[[str], str]) -> list[Suspect]:
    """Weights that stayed as they were, all of them or the head alone."""
    return [
        Suspect(
            "They still run the weights of the version before: the push did not reach them. Look at their logs for "
            "the update, and start them with the flags of tracegrad.sync.vllm_arguments.",
            lambda: _with(driven, step, _read(path), named, merged=True),
        ),
        Suspect(
            "Their output head is that of the version before: it is tied to the embedding, and the update did not "
            "reach it. Start them with --worker-extension-cls tracegrad.sync.worker.Worker, which packs it again.",
            lambda: _with_head(driven, step, _read(path), named),
        ),
    ]


def _measured(driven: Run, step: Step) -> Floats:
    """[M] logprobs of the model as it stands now, of the terms of all ranks."""
    return driven.ranks.joined(driven.measure(step))


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
    driven: Run, step: Step, weights: Mapping[str, Any], named: Callable[[str], str], merged: bool = False
) -> Floats:
    """The policy with weights that were pushed before; adapters are merged into them or are these weights."""
    with _swapped(driven.model, weights, named), adapters_off(driven.model) if merged else nullcontext():
        return _measured(driven, step)


def _with_head(driven: Run, step: Step, weights: Mapping[str, Any], named: Callable[[str], str]) -> Floats:
    """The policy with the output head alone as it was; a tied one is untied for the question."""
    from torch import nn
    from torch.distributed.tensor import DTensor

    model = driven.model
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    names = [name for name, each in model.named_parameters(remove_duplicate=False) if each is table.weight]
    old = next((weights[named(name)] for name in names if named(name) in weights), None)
    if old is None or head.weight is not table.weight or isinstance(table.weight, DTensor):
        return driven.ranks.joined(np.full(len(step), np.nan, np.float32))
    try:
        head.weight = nn.Parameter(old.to(table.weight.device, table.weight.dtype), requires_grad=False)
        return _measured(driven, step)
    finally:
        head.weight = table.weight


def _without_adapters(driven: Run, step: Step) -> Floats:
    with adapters_off(driven.model):
        return _measured(driven, step)


def _at(driven: Run, step: Step, temperature: float) -> Floats:
    """The policy's logprobs at another temperature than the one recorded."""
    batches = tuple(replace(b, inv_temperature=b.inv_temperature / np.float32(temperature)) for b in step.batches)
    return _measured(driven, replace(step, batches=batches))
