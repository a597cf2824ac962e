"""Gather the full parameters of a model for inference servers, with LoRA adapters merged or separate.

peft is imported on use.
"""

from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tracegrad.errors import ArgumentError
from tracegrad.trainer.checkpoint import full_state_dict
from tracegrad.trainer.distributed import Ranks, full_tensor
from tracegrad.trainer.lora import has_adapters

Adapters = Literal["merged", "alone"]
_PEFT = "base_model.model."


def full_weights(
    model: nn.Module, ranks: Ranks, adapters: Adapters = "merged", device: Any = "cpu"
) -> dict[str, Tensor]:
    """Gather the parameters and buffers of a model by name on the first rank; other ranks get {}. Every rank calls it.

    Args:
        model: a transformers or peft model, sharded or not.
        ranks: the ranks that share the model.
        adapters: "merged" or "alone" (adapters only), for a model with adapters.
        device: target device; None keeps the device of each tensor.

    Raises:
        ArgumentError: for any other value, or for "alone" if the model has no adapters.
    """
    if adapters not in ("merged", "alone"):
        raise ArgumentError(f"TG-TRAIN-028: adapters is {adapters!r}. Pass 'merged' or 'alone' (adapters only).")
    if not has_adapters(model):
        if adapters == "alone":
            raise ArgumentError(
                f"TG-TRAIN-029: adapters is 'alone', but {type(model).__name__} has no adapters. Leave the argument "
                f"out."
            )
        return full_state_dict(model, ranks, device)
    return _adapters_only(model, ranks, device) if adapters == "alone" else _merged(model, ranks, device)


def _adapters_only(model: Any, ranks: Ranks, device: Any) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = full_state_dict(model, ranks, device, lambda name: name in trained)
    return get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False) if ranks.first else {}


@torch.no_grad()
def _merged(model: nn.Module, ranks: Ranks, device: Any) -> dict[str, Tensor]:
    """Return the weights by the names of the base model. peft merges a copy of each layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    layers: dict[str, Any]
    layers = {
        n: module for n, module in model.named_modules() if isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper))
    }
    inside = tuple(f"{name}." for name in layers)
    out = full_state_dict(model, ranks, device, lambda name: not name.startswith(inside))
    for name, module in layers.items():
        full_layer = _full_copy(module, ranks)
        if full_layer is not None:
            trained = isinstance(full_layer, ModulesToSaveWrapper)  # A layer trained in full, next to its original.
            if not trained:
                full_layer.merge()
            base = full_layer.modules_to_save[full_layer.active_adapters[0]] if trained else full_layer.get_base_layer()
            for key, value in base.state_dict().items():
                out[f"{name}.{key}"] = value.to(device or value.device)
    return {name.removeprefix(_PEFT): value for name, value in out.items()}


def _full_copy(module: nn.Module, ranks: Ranks) -> Any:
    """Copy a layer without shards and gradients on the first rank; other ranks get None. Every rank calls this."""
    memo: dict[int, Any] = {}  # `deepcopy` uses these entries as the copies.
    for parameter in module.parameters():
        full = full_tensor(parameter.detach())
        if ranks.first:
            memo[id(parameter)] = nn.Parameter(full.clone(), requires_grad=False)
    return deepcopy(module, memo) if ranks.first else None
