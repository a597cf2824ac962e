"""What a transformers model is made of: its body, its head, the kinds of its layers.

Reads configurations and modules, changes none. `forward` and `loss` call it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from tracegrad.errors import ArgumentError
from tracegrad.kernels.head import Head, logits_of

ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds of layers whose reach a mask says."""
_WITHOUT_NEIGHBOURS = {"mlp", "moe"}  # each token for itself
_checked: WeakSet[nn.Module] = WeakSet()  # models whose head was found to be what `head_of` says


def head_of(model: nn.Module) -> Head:
    """The head of a causal LM, as its configuration says; compared once with the model's own logits.

    Raises:
        ArgumentError: if the head is not a plain linear layer, or does something to the logits that is not known here.
    """
    linear = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(linear, nn.Linear) or hasattr(linear, "base_layer"):
        raise ArgumentError(
            f"the head of {type(model).__name__} is {type(linear).__name__}, not a linear layer. "
            "Its logits cannot be computed a chunk at a time. Take adapters and wrappers off the head."
        )
    config = config_of(model)
    head = Head(
        weight=linear.weight,
        bias=linear.bias,
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=float(getattr(config, "logit_scale", None) or 1.0)
        / (getattr(config, "logits_scaling", None) or 1.0),
    )
    if model not in _checked:
        _check_head(model, head)
        _checked.add(model)
    return head


@torch.no_grad()
def _check_head(model: nn.Module, head: Head) -> None:
    training = model.training
    model.eval()
    try:
        ids = torch.tensor([[0, 1]], device=head.weight.device)
        theirs = model(input_ids=ids, use_cache=False).logits.float()
        ours = logits_of(body_of(model)(input_ids=ids, use_cache=False).last_hidden_state, head, None).float()
    finally:
        model.train(training)
    gap = (theirs - ours).abs().max().item()
    if not gap <= 0.02 * theirs.abs().max().clamp(min=1.0).item():
        raise ArgumentError(
            f"{type(model).__name__} does something to its logits that is not known here: they differ by {gap:.3g}. "
            "Logprobs computed without it would be wrong. Pass its hidden states and head to token_logprobs."
        )


def config_of(model: nn.Module) -> Any:
    return model.config.get_text_config()  # type: ignore[union-attr,operator]


def body_of(model: nn.Module) -> nn.Module:
    body = model.get_decoder()  # type: ignore[operator]
    if body is None or body is model:
        raise ArgumentError(f"{type(model).__name__} has no decoder below its head. Pass a causal LM of transformers.")
    return body


def attention_of(model: nn.Module) -> str:
    return getattr(config_of(model), "_attn_implementation", None) or "eager"


def keeps_all_keys(model: nn.Module) -> bool:
    """Whether every layer attends to all earlier tokens, so that a prefix's keys and values say all of it."""
    config = config_of(model)
    kinds = set(getattr(config, "layer_types", None) or ())
    windowed = not kinds and getattr(config, "sliding_window", None) is not None
    return kinds <= {"full_attention"} and not windowed and getattr(model, "_supports_sdpa", False)


def states_along_the_row(model: nn.Module) -> set[str]:
    """Kinds of layers that carry something from token to token which no mask cuts: recurrent, convolutional, hybrid.

    Read from `layer_types`, where the family has them; from the model's own word that it is stateful elsewhere.
    """
    named: list[str] = list(getattr(config_of(model), "layer_types", None) or ())
    kinds = set(named) - ATTENTION - _WITHOUT_NEIGHBOURS
    if not kinds and getattr(model, "_is_stateful", False):
        return {"recurrent state"}
    return kinds


def recomputes(model: nn.Module) -> bool:
    """Whether activations are checkpointed: transformers then returns no keys and values."""
    newer = hasattr(type(model), "is_activation_checkpointing")
    return bool(getattr(model, "is_activation_checkpointing" if newer else "is_gradient_checkpointing", False))
