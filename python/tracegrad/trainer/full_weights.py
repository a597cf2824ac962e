"""Gathers parameters for inference servers: sharded ones made whole, LoRA adapters merged or on their own.

Here is `whole_weights`. Files are `checkpoint`'s. peft is imported on use. Called by `Run.weights`.
"""

from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tracegrad.errors import ArgumentError
from tracegrad.trainer.checkpoint import whole_state
from tracegrad.trainer.distributed import Ranks, whole
from tracegrad.trainer.lora import has_adapters

Adapters = Literal["merged", "alone"]
_PEFT = "base_model.model."


def whole_weights(
    model: nn.Module, ranks: Ranks, adapters: Adapters = "merged", device: Any = "cpu"
) -> dict[str, Tensor]:
    """The parameters and buffers of a model by name, on the first rank; elsewhere empty. Every rank calls this.

    Args:
        model: a transformers or peft model, sharded or not.
        adapters: "merged" or "alone", where it has any.
        device: where to; None leaves each where it is.
    """
    if adapters not in ("merged", "alone"):
        raise ArgumentError(f"adapters is {adapters!r}. What is wanted of them is not known. Say merged or alone.")
    if not has_adapters(model):
        if adapters == "alone":
            raise ArgumentError(
                f"adapters is 'alone', and {type(model).__name__} has none. There is nothing to give. Leave it out."
            )
        return whole_state(model, ranks, device)
    return _alone(model, ranks, device) if adapters == "alone" else _merged(model, ranks, device)


def _alone(model: Any, ranks: Ranks, device: Any) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = whole_state(model, ranks, device, lambda name: name in trained)
    return get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False) if ranks.first else {}


@torch.no_grad()
def _merged(model: nn.Module, ranks: Ranks, device: Any) -> dict[str, Tensor]:
    """By the names of the model below the adapters; each layer is merged by peft itself, in a copy of its own."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    layers: dict[str, Any]
    layers = {n: each for n, each in model.named_modules() if isinstance(each, (BaseTunerLayer, ModulesToSaveWrapper))}
    inside = tuple(f"{name}." for name in layers)
    out = whole_state(model, ranks, device, lambda name: not name.startswith(inside))
    for name, module in layers.items():
        copy = _whole_copy(module, ranks)
        if copy is not None:
            trained = isinstance(copy, ModulesToSaveWrapper)  # a layer trained whole, beside the one that it replaces
            if not trained:
                copy.merge()
            base = copy.modules_to_save[copy.active_adapters[0]] if trained else copy.get_base_layer()
            for each, value in base.state_dict().items():
                out[f"{name}.{each}"] = value.to(device or value.device)
    return {name.removeprefix(_PEFT): value for name, value in out.items()}


def _whole_copy(module: nn.Module, ranks: Ranks) -> Any:
    """A copy of a layer whose parameters are no shards and have no gradient, on the first rank; every rank calls."""
    memo: dict[int, Any] = {}  # `deepcopy` takes what stands in it for the copy
    for parameter in module.parameters():
        full = whole(parameter.detach())
        if ranks.first:
            memo[id(parameter)] = nn.Parameter(full.clone(), requires_grad=False)
    return deepcopy(module, memo) if ranks.first else None
