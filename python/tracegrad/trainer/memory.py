"""The memory knob: what is kept, computed again or gathered anew, and the compilation of a model's layers.

Here are `Memory`, the three settings and what each does, and the changes they make to the layers of a transformers
model. No process groups. Called by `distributed`, the loop and the forecast.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tracegrad.config import Config
from tracegrad.errors import ArgumentError
from tracegrad.model.attention import compiled

Setting = Literal["speed", "balanced", "low"]
_RATES = ("drop", "jitter", "noise")  # how transformers' layers call theirs: attention_dropout, router_jitter_noise


@dataclass(frozen=True)
class Memory:
    """What a setting of `train.memory` does. The gradient is the same under all of them, to rounding.

    Args:
        recompute: activations of a layer are computed again in the backward pass, its input alone is kept.
        reshard: under FSDP, parameters of a layer are resharded after its forward pass and gathered again for the
            backward.
        reduce_each: under FSDP, gradients are reduced after each batch, so that no rank holds a whole one; else once
            a step.
        chunk_bytes: for logits, at most; None takes the head's own default, on CUDA up to 4 GiB.
        foreach: AdamW updates parameters together, with a copy of them in between, or one by one.
    """

    recompute: bool
    reshard: bool
    reduce_each: bool
    chunk_bytes: int | None
    foreach: bool | None

    @classmethod
    def of(cls, setting: Setting) -> "Memory":
        """The setting called so.

        >>> Memory.of("low").recompute
        True
        """
        return {
            "speed": cls(recompute=False, reshard=False, reduce_each=False, chunk_bytes=None, foreach=None),
            "balanced": cls(recompute=True, reshard=True, reduce_each=False, chunk_bytes=256 << 20, foreach=None),
            "low": cls(recompute=True, reshard=True, reduce_each=True, chunk_bytes=32 << 20, foreach=False),
        }[setting]

    def sentence(self, fsdp: bool) -> str:
        """What it does, for the one who reads the run.

        >>> Memory.of("balanced").sentence(fsdp=False)
        'layers are computed again in the backward pass, logits take 256 MiB at most'
        """
        said = ["layers are computed again in the backward pass" if self.recompute else "activations are kept"]
        if fsdp:
            said.append("parameters are gathered twice" if self.reshard else "parameters stay gathered in a pass")
            said.append("gradients are reduced each batch" if self.reduce_each else "gradients are reduced once a step")
        if self.chunk_bytes is not None:
            said.append(f"logits take {self.chunk_bytes >> 20} MiB at most")
        if self.foreach is False:
            said.append("AdamW goes parameter by parameter")
        return ", ".join(said)


SPEED = Memory.of("speed")
"""The default: everything is kept."""


def out_of_memory(error: Exception, config: Config) -> str:
    """What a device without memory left means for a run, and what to do."""
    return (
        f"the device has no memory left ({str(error).split('.')[0]}). It was not taken. Lower pack.token_budget "
        f"({config.pack.token_budget}) or set train.memory (now {config.train.memory}) to balanced or low; the "
        "gradient stays the same."
    )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a transformers model, adapters or not: the list of modules that holds most of it."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each)]
    if not lists:
        raise ArgumentError(
            f"{type(model).__name__} has no list of layers. They cannot be sharded, recomputed or compiled one by one. "
            "Use parallel.mode ddp or none with train.memory speed."
        )
    return list(max(lists, key=lambda each: sum(p.numel() for p in each.parameters())))


def recompute_layers(model: nn.Module) -> None:
    """Lets each layer compute its activations again in the backward pass; parameters keep their names.

    transformers' own switch works in training mode alone, which would turn dropout on.
    """
    for layer in layers_of(model):
        layer.gradient_checkpointing = True  # type: ignore[assignment]  # what policy asks before it shares a prefix
        layer.forward = _recomputed(layer, layer.forward)


def compile_layers(model: nn.Module) -> None:
    """Compiles each layer's forward by itself, so that equal layers share one compilation and hooks stay outside."""
    for layer in layers_of(model):
        layer.forward = compiled(layer.forward)


def _recomputed(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def again(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        # Keeping the state of the random generators costs host time in each layer, on CUDA for each device.
        drawing = draws_random_numbers(layer)
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=drawing, **named)

    return again


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
        rates = (value for name, value in options.items() if any(word in name for word in _RATES))
        if any(isinstance(value, float) and value > 0 for value in rates):
            return True
    return False
