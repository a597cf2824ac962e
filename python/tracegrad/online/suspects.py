"""What would explain that servers sample from something else than the policy that is trained: each as logprobs.

Asked only where a proof has failed, and answered by the trainer's own model with the mistake put into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad.batch import Step
from tracegrad.learner import Run
from tracegrad.learner.adapters import adapters_off, has_adapters
from tracegrad.online.proof import Suspect

TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)
WEIGHTS = "weights"


def suspects(driven: Run, step: Step) -> list[Suspect]:
    """The mistakes that can be tried on this run, the likeliest first."""
    found = []
    before = driven.out / WEIGHTS / f"weights-{driven.taken - 1:08d}.safetensors"
    if driven.ranks.alone and before.is_file():
        found.append(
            Suspect(
                "They still run the weights of the version before: the push did not reach them. Look at their logs for "
                "the update, and start them with the flags of tracegrad.sync.vllm_arguments.",
                lambda: _with(driven, step, _read(before)),
            )
        )
        found.append(
            Suspect(
                "Their output head is that of the version before: it is tied to the embedding, and the update did not "
                "reach it. Start them with --worker-extension-cls tracegrad.sync.worker.Worker, which packs it again.",
                lambda: _with_head(driven, step, _read(before)),
            )
        )
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


def _read(path: Path) -> Mapping[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)


@contextmanager
def _swapped(model: Any, weights: Mapping[str, Any]) -> Iterator[None]:
    """The model with other values in the parameters that have these names; its own are put back."""
    held = {name: each for name, each in model.named_parameters(remove_duplicate=False) if name in weights}
    own = {name: each.data for name, each in held.items()}
    try:
        for name, each in held.items():
            each.data = weights[name].to(each.device, each.dtype)
        yield
    finally:
        for name, each in held.items():
            each.data = own[name]


def _with(driven: Run, step: Step, weights: Mapping[str, Any]) -> Any:
    with _swapped(driven.model, weights):
        return driven.measure(step)


def _with_head(driven: Run, step: Step, weights: Mapping[str, Any]) -> Any:
    """The policy with the output head alone as it was; a tied one is untied for the question."""
    from torch import nn

    model = driven.model
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    old = next((weights[name] for name in _names_of(model, table.weight) if name in weights), None)
    if old is None or head.weight is not table.weight:
        return np.full(len(step), np.nan, np.float32)
    try:
        head.weight = nn.Parameter(old.to(table.weight.device, table.weight.dtype), requires_grad=False)
        return driven.measure(step)
    finally:
        head.weight = table.weight


def _names_of(model: Any, weight: Any) -> list[str]:
    return [name for name, each in model.named_parameters(remove_duplicate=False) if each is weight]


def _without_adapters(driven: Run, step: Step) -> Any:
    with adapters_off(driven.model):
        return driven.measure(step)


def _at(driven: Run, step: Step, temperature: float) -> Any:
    """The policy's logprobs at another temperature than the one recorded."""
    batches = tuple(replace(b, inv_temperature=b.inv_temperature / np.float32(temperature)) for b in step.batches)
    return driven.measure(replace(step, batches=batches))
