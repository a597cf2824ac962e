"""Find the parts of a transformers model: body, head, vision tower, attention implementation and media ids.

The functions read configurations and modules. Only `attention_implementation` and `without_blocks` change a model,
while entered.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from tracegrad.errors import ArgumentError
from tracegrad.model.lm_head import Head, logits_of
from tracegrad.storage.files import read_json

BLOCK_ATTENTION = ("flex_attention", "tracegrad_flex")
"""Attention implementations that accept a `BlockMask`: the one of transformers, and the one of `attention`."""
_IDS, _LARGE_LOGIT = 8, 100.0  # the number of ids on which a head is compared, and the logits of the second comparison
_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")
_checked: WeakSet[nn.Module] = WeakSet()  # models whose logits `head_of` reproduces


_media: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()


def media_ids(model: nn.Module) -> tuple[int, ...]:
    """Return the placeholder ids of images, videos and audio, sorted.

    The features at these ids come from a tower, which does not run in a text forward pass. The ids are read from the
    configuration of the model and from the `config.json` of its folder, because the model may be the decoder of a
    larger one.
    """
    if model not in _media:
        config: Any = model.config
        mappings = [vars(config)]
        folder = getattr(config, "_name_or_path", None)
        if folder and (path := Path(folder) / "config.json").is_file():
            contents = read_json(path)
            mappings += [contents] if isinstance(contents, dict) else []
        values = (value for mapping in mappings for name, value in mapping.items() if _PLACEHOLDER.fullmatch(name))
        _media[model] = tuple(sorted({value for value in values if type(value) is int}))
    return _media[model]


def head_of(model: nn.Module) -> Head:
    """Return the head of a causal LM, as its configuration describes it.

    The first call for a model compares the logits of this head with the logits of the model.

    Raises:
        ArgumentError: if the head is not a plain linear layer, or changes the logits in an unsupported way.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> head = head_of(LlamaForCausalLM(LlamaConfig(vocab_size=16, **size)))
    >>> tuple(head.weight.shape), head.bias, head.softcap
    ((16, 8), None, None)
    """
    linear = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(linear, nn.Linear) or hasattr(linear, "base_layer"):
        raise ArgumentError(
            f"TG-MODEL-014: the head of {type(model).__name__} is {type(linear).__name__}, not a linear layer. "
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
    """Compare the logits of the model and of the head, for normal hidden states and for large ones.

    Large hidden states make a cap on the logits visible.
    """
    ids = torch.arange(_IDS, device=head.weight.device)[None] % len(head.weight)
    training, name = model.training, type(model).__name__
    model.eval()
    try:
        with without_blocks(model):  # each length would be compiled separately, and 8 ids do not need blocks
            expected = model(input_ids=ids, use_cache=False).logits.float()
            hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
            factor = (
                _LARGE_LOGIT / logits_of(hidden, head._replace(softcap=None), None).abs().max().clamp(min=1e-6).item()
            )
            gaps = [_gap(expected, logits_of(hidden, head, None))]
            linear = model.get_output_embeddings()  # type: ignore[operator]
            with linear.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factor, *inputs[1:])):
                large_logits = model(input_ids=ids, use_cache=False).logits.float()
            gaps.append(_gap(large_logits, logits_of(hidden * factor, head, None)))
    except (ArgumentError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the forward pass of a third-party model may raise anything
        raise ArgumentError(
            f"TG-MODEL-015: {name} cannot be run as body and head ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[:1]}). "
            "Its logits are not known without that. Pass its hidden states and head to token_logprobs."
        ) from error
    finally:
        model.train(training)
    if not max(gaps) <= 0.02:
        raise ArgumentError(
            f"TG-MODEL-016: {name} does something to its logits that is not known here: they differ by {max(gaps):.3g} "
            "of the largest. Logprobs computed without it would be wrong. Pass its hidden states and head to "
            "token_logprobs."
        )


def _gap(expected: Tensor, actual: Tensor) -> float:
    gap = (expected - actual.float()).abs().max() / expected.abs().max().clamp(min=1e-3)
    return gap.nan_to_num(float("inf")).item()


def config_of(model: nn.Module) -> Any:
    return model.config.get_text_config()  # type: ignore[union-attr,operator]


def body_of(model: nn.Module) -> nn.Module:
    """Return the decoder below the head: the model's `get_decoder()` if it takes ids, else its base model.

    Raises:
        ArgumentError: if the model has no such module.
    """
    for body in (model.get_decoder(), model.base_model, getattr(model, "model", None)):  # type: ignore[operator]
        if isinstance(body, nn.Module) and body is not model and hasattr(body, "get_input_embeddings"):
            return body
    raise ArgumentError(
        f"TG-MODEL-017: {type(model).__name__} has no decoder below its head. Pass a causal LM of transformers."
    )


def vision_encoder_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that process only images, audio or video, without the decoder."""
    wrapped: Any = model
    inner = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    if not hasattr(inner.base_model, "get_image_features"):
        return []
    decoder, base = body_of(inner), inner.base_model
    return [part for part in base.children() if decoder not in set(part.modules())]


def attention_of(model: nn.Module) -> str:
    return getattr(config_of(model), "_attn_implementation", None) or "eager"


@contextmanager
def attention_implementation(model: Any, implementation: str) -> Iterator[None]:
    """Use another attention implementation in a model while entered."""
    inner, previous = unwrap_adapters(model), attention_of(model)
    inner.set_attn_implementation(implementation)
    try:
        yield
    finally:
        inner.set_attn_implementation(previous)


@contextmanager
def without_blocks(model: nn.Module) -> Iterator[None]:
    """Run a model uncompiled, and with dense attention if it uses flex_attention, while entered.

    Without this, compiled layers would be compiled for dense attention too.
    """
    attention = (
        attention_implementation(model, dense_attention(model))
        if attention_of(model) in BLOCK_ATTENTION
        else nullcontext()
    )
    with torch.compiler.set_stance("force_eager"), attention:
        yield


def dense_attention(model: Any) -> str:
    """Return the attention implementation for a dense mask: "sdpa", or "eager" if sdpa would compute something else.

    sdpa in transformers silently ignores a cap on the attention scores.
    """
    capped = getattr(config_of(model), "attn_logit_softcapping", None)
    return "sdpa" if getattr(unwrap_adapters(model), "_supports_sdpa", False) and not capped else "eager"


def unwrap_adapters(model: Any) -> Any:
    """Return the transformers model without the wrapper of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def has_activation_checkpointing(model: nn.Module) -> bool:
    """Return whether activations are checkpointed. transformers then returns no keys and values."""
    is_newer = hasattr(type(model), "is_activation_checkpointing")
    return bool(getattr(model, "is_activation_checkpointing" if is_newer else "is_gradient_checkpointing", False))
