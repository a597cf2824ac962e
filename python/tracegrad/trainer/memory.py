"""The memory modes of `train.memory_mode`, recomputation of activations, and compilation of a model's layers."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tracegrad.config import Config
from tracegrad.errors import ArgumentError
from tracegrad.model.attention import compile_lazily

Setting = Literal["speed", "balanced", "low"]
_RATE_WORDS = ("drop", "jitter", "noise")  # In transformers' names, such as attention_dropout, router_jitter_noise.


@dataclass(frozen=True)
class Memory:
    """The effects of one value of `train.memory_mode`. The gradient is the same for all values, up to rounding.

    Args:
        recompute: recompute a layer's activations in the backward pass, and store only its input.
        reshard: with FSDP, reshard a layer's parameters after its forward pass, and gather them again for backward.
        reduce_each: with FSDP, reduce gradients after each batch, so that no rank stores a full gradient; otherwise
            once per step.
        chunk_bytes: maximum bytes of a chunk of logits; None uses the LM head's default, up to 4 GiB on CUDA.
        foreach: False lets AdamW update parameters one by one, without a temporary copy of all; None is torch's
            default.

    >>> speed, low = Memory.of("speed"), Memory.of("low")
    >>> (speed.recompute, speed.chunk_bytes), (low.recompute, low.chunk_bytes)
    ((False, None), (True, 33554432))
    """

    recompute: bool
    reshard: bool
    reduce_each: bool
    chunk_bytes: int | None
    foreach: bool | None

    @classmethod
    def of(cls, setting: Setting) -> "Memory":
        """Return the options of a memory mode.

        >>> Memory.of("low").recompute
        True
        """
        return {
            "speed": cls(recompute=False, reshard=False, reduce_each=False, chunk_bytes=None, foreach=None),
            "balanced": cls(recompute=True, reshard=True, reduce_each=False, chunk_bytes=256 << 20, foreach=None),
            "low": cls(recompute=True, reshard=True, reduce_each=True, chunk_bytes=32 << 20, foreach=False),
        }[setting]

    def sentence(self, fsdp: bool) -> str:
        """Describe the effects in one sentence for the user.

        >>> Memory.of("balanced").sentence(fsdp=False)
        'layers are recomputed in the backward pass, logits use at most 256 MiB'
        """
        parts = ["layers are recomputed in the backward pass" if self.recompute else "activations are stored"]
        if fsdp:
            parts.append("parameters are gathered twice" if self.reshard else "parameters stay gathered in a pass")
            parts.append(
                "gradients are reduced for each row" if self.reduce_each else "gradients are reduced once per step"
            )
        if self.chunk_bytes is not None:
            parts.append(f"logits use at most {self.chunk_bytes >> 20} MiB")
        if self.foreach is False:
            parts.append("AdamW updates one parameter at a time")
        return ", ".join(parts)


SPEED = Memory.of("speed")
"""The default mode: no recomputation, no resharding, and the default chunk of logits."""


def out_of_memory(error: Exception, config: Config) -> str:
    """Return the error message for a device without free memory, with advice."""
    return (
        f"the device is out of memory ({str(error).split('.')[0]}). The step was not done. Lower pack.tokens_per_row "
        f"({config.pack.tokens_per_row}), or set train.memory_mode (now {config.train.memory_mode}) to balanced "
        f"or low. "
        "The gradient stays the same."
    )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a transformers model: its largest list of modules. Adapters do not matter.

    Raises:
        ArgumentError: if the model has no list of modules.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ArgumentError(
            f"TG-TRAIN-049: {type(model).__name__} has no list of layers, so single layers cannot be sharded, "
            "recomputed or compiled. Use parallel.mode ddp or none with train.memory_mode speed."
        )
    return list(max(lists, key=lambda module: sum(p.numel() for p in module.parameters())))


def recompute_layers(model: nn.Module) -> None:
    """Recompute each layer's activations in the backward pass. Parameters keep their names.

    transformers' own switch works only in training mode, which would enable dropout.
    """
    for layer in layers_of(model):
        layer.gradient_checkpointing = True  # type: ignore[assignment]  # The model package reads it for shared prefixes.
        layer.forward = _recomputed(layer, layer.forward)


def compile_layers(model: nn.Module) -> None:
    """Compile each layer's forward separately. Equal layers share one compilation, and hooks stay outside of it."""
    for layer in layers_of(model):
        layer.forward = compile_lazily(layer.forward)


def _recomputed(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recompute(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        # Saving the random states costs host time in each layer, and on CUDA for each device.
        draws = draws_random_numbers(layer)
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=draws, **keywords)

    return recompute


def draws_random_numbers(layer: nn.Module) -> bool:
    """Return whether a module of a layer is in training mode and has a rate of dropout, jitter or noise above 0.

    >>> draws_random_numbers(nn.Sequential(nn.Dropout(0.0))), draws_random_numbers(nn.Sequential(nn.Dropout(0.1)))
    (False, True)
    """
    for module in layer.modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        options = {**getattr(getattr(module, "config", None), "__dict__", {}), **vars(module)}
        rates = (value for name, value in options.items() if any(word in name for word in _RATE_WORDS))
        if any(isinstance(value, float) and value > 0 for value in rates):
            return True
    return False
