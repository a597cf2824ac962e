"""What a transformers model is made of: its body, its head, the kinds of its layers.

Reads configurations and modules; `attending` alone changes one, for a while. `forward` and `loss` call it.
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

BLOCKS = ("flex_attention", "tracegrad_flex")
"""Implementations of attention that take a `BlockMask`: transformers' own, and that of `attention`."""
_IDS, _LOUD = 8, 100.0  # a head is compared on so many tokens, then with logits so large
_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")
_checked: WeakSet[nn.Module] = WeakSet()  # models whose head was found to be what `head_of` says


_media: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()


def media_ids(model: nn.Module) -> tuple[int, ...]:
    """Ids that stand where a picture, a video or a sound was: what is seen there comes from a tower, which never runs.

    Named by the model's configuration, or by that of the folder it comes from, if it is the decoder of a larger one.
    """
    if model not in _media:
        config: Any = model.config
        told = [vars(config)]
        folder = getattr(config, "_name_or_path", None)
        if folder and (path := Path(folder) / "config.json").is_file():
            said = read_json(path)
            told += [said] if isinstance(said, dict) else []
        found = (value for each in told for name, value in each.items() if _PLACEHOLDER.fullmatch(name))
        _media[model] = tuple(sorted({value for value in found if type(value) is int}))
    return _media[model]


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
    """Compares logits as they are, and of hidden states so large that any cap on logits shows."""
    ids = torch.arange(_IDS, device=head.weight.device)[None] % len(head.weight)
    training, name = model.training, type(model).__name__
    model.eval()
    try:
        with without_blocks(model):  # so few ids need no blocks, and each length would be a compilation of its own
            theirs = model(input_ids=ids, use_cache=False).logits.float()
            hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
            factor = _LOUD / logits_of(hidden, head._replace(softcap=None), None).abs().max().clamp(min=1e-6).item()
            gaps = [_gap(theirs, logits_of(hidden, head, None))]
            linear = model.get_output_embeddings()  # type: ignore[operator]
            with linear.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factor, *inputs[1:])):
                loud = model(input_ids=ids, use_cache=False).logits.float()
            gaps.append(_gap(loud, logits_of(hidden * factor, head, None)))
    except (ArgumentError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a forward of a stranger's may raise anything
        raise ArgumentError(
            f"{name} cannot be run as body and head ({type(error).__name__}: {str(error).strip().splitlines()[:1]}). "
            "Its logits are not known without that. Pass its hidden states and head to token_logprobs."
        ) from error
    finally:
        model.train(training)
    if not max(gaps) <= 0.02:
        raise ArgumentError(
            f"{name} does something to its logits that is not known here: they differ by {max(gaps):.3g} of the "
            "largest. Logprobs computed without it would be wrong. Pass its hidden states and head to token_logprobs."
        )


def _gap(theirs: Tensor, ours: Tensor) -> float:
    gap = (theirs - ours.float()).abs().max() / theirs.abs().max().clamp(min=1e-3)
    return gap.nan_to_num(float("inf")).item()


def config_of(model: nn.Module) -> Any:
    return model.config.get_text_config()  # type: ignore[union-attr,operator]


def body_of(model: nn.Module) -> nn.Module:
    """The decoder below the head: what the model itself calls so, where that takes ids, else what it is built on."""
    for body in (model.get_decoder(), model.base_model, getattr(model, "model", None)):  # type: ignore[operator]
        if isinstance(body, nn.Module) and body is not model and hasattr(body, "get_input_embeddings"):
            return body
    raise ArgumentError(f"{type(model).__name__} has no decoder below its head. Pass a causal LM of transformers.")


def tower_of(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that only pictures, sound or video go through: what stands beside its decoder."""
    wrapped: Any = model
    inner = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    if not hasattr(inner.base_model, "get_image_features"):
        return []
    decoder, base = body_of(inner), inner.base_model
    return [part for part in base.children() if decoder not in set(part.modules())]


def attention_of(model: nn.Module) -> str:
    return getattr(config_of(model), "_attn_implementation", None) or "eager"


@contextmanager
def attending(model: Any, implementation: str) -> Iterator[None]:
    """The model with another implementation of attention while entered."""
    inner, before = unwrapped(model), attention_of(model)
    inner.set_attn_implementation(implementation)
    try:
        yield
    finally:
        inner.set_attn_implementation(before)


@contextmanager
def without_blocks(model: nn.Module) -> Iterator[None]:
    """Run a model uncompiled, and with the attention that it would have without flex_attention, while entered.

    Compiled layers would be compiled for that attention too.
    """
    changed = attending(model, dense_attention(model)) if attention_of(model) in BLOCKS else nullcontext()
    with torch.compiler.set_stance("force_eager"), changed:
        yield


def dense_attention(model: Any) -> str:
    """Return the attention of an architecture that takes a dense mask: "sdpa", or "eager" if sdpa is not the same.

    transformers' sdpa leaves a cap on the scores out, without a word.
    """
    capped = getattr(config_of(model), "attn_logit_softcapping", None)
    return "sdpa" if getattr(unwrapped(model), "_supports_sdpa", False) and not capped else "eager"


def unwrapped(model: Any) -> Any:
    """The transformers model itself, without peft's adapters around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def recomputes(model: nn.Module) -> bool:
    """Whether activations are checkpointed: transformers then returns no keys and values."""
    newer = hasattr(type(model), "is_activation_checkpointing")
    return bool(getattr(model, "is_activation_checkpointing" if newer else "is_gradient_checkpointing", False))
