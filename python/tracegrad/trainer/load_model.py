"""A transformers model from a folder, with every weight found, or one error that says what is wrong with the folder.

No hub, no pickle. Called by the command line and by `checkpoint`.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tracegrad.errors import ReadError, TracegradError
from tracegrad.storage.files import read_json

_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""Of attention and experts: the code of torch and transformers alone."""
_MOST_LAYERS, _MOST_LABELS, _MOST_INTEGER = 1 << 10, 1 << 16, 1 << 53
"""Of a config.json: each layer is built of modules of its own, and each label has a name; others are plain numbers."""
_SWITCHES = ("output_hidden_states", "output_attentions", "return_dict", "use_cache", "torchscript", "is_decoder")
"""Options of a config.json that every model reads as it runs, and transformers does not check."""
_LAYERS = re.compile(r"(?!max_window).*(layers?|depths?|blocks)")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def load_whole(path: Path) -> Any:
    """A transformers causal language model from a folder of whole weights, in float32, its weights all found.

    A folder whose config.json names a model that takes pictures gives that, with its tower.
    """
    config = model_config(path)
    named = config.get("architectures") or []
    if not any((path / name).is_file() for name in WEIGHTS):
        there = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise ReadError(
            f"{path}: no model.safetensors there ({there}). Without weights there is no policy to train. "
            "Give --model a folder written by save_pretrained."
        )
    because = "There is no policy to train. Give --model a causal model whose config.json and weights belong together"
    with refused(f"{path}: transformers cannot load it as a causal language model", because), quiet():
        _check_size(path, empty_model(path, named))
        loaded: Any = _kind(named).from_pretrained(
            path,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    model, info = loaded
    named = named or [type(model).__name__]
    odd = ("missing_keys", "unexpected_keys", "mismatched_keys")
    if type(model).__name__ not in named or any(info.get(kind) for kind in odd):
        _refuse_architecture(path, type(model).__name__, named, info)
    return model


def loaded_by(path: Path) -> str:
    """The class of transformers that loads a folder, by the architecture that its config.json names."""
    try:
        config = read_json(path / "config.json")
        _check_values(path / "config.json", config)
        named = config.get("architectures") or []
    except (OSError, ValueError):  # as a folder of adapters has none
        named = []
    return _kind(named).__name__


def empty_model(path: Path, named: list[str]) -> Any:
    """Build the model of a config.json on the meta device: shapes without memory."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        return _kind(named).from_config(config, trust_remote_code=False)


def _check_size(path: Path, model: Any) -> None:
    """Refuse a model with many more weights than the files hold, before memory is asked for them.

    Raises:
        ReadError: with both numbers.
    """
    held = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    wanted = sum(weight.numel() for weight in model.parameters()) + sum(one.numel() for one in model.buffers())
    # A weight of four bits is the smallest that is stored.
    if wanted > 2 * held + (1 << 20):
        raise ReadError(
            f"{path}: config.json describes {wanted:,} weights, and the files of weights have {held:,} bytes. They do "
            "not belong together. Give --model a folder written by save_pretrained."
        )


@contextmanager
def refused(what: str, because: str) -> Iterator[None]:
    """Turn whatever transformers raises over a stranger's files into one error of ours.

    Args:
        what: is wrong, with the folder.
        because: of that, and what to do; without a full stop at its end.

    Raises:
        ReadError: for every exception that is not one of ours already.
    """
    try:
        yield
    except TracegradError:
        raise
    except Exception as error:
        raise ReadError(f"{what}: {first_line(error)}. {because}.") from error


def _kind(named: list[str]) -> Any:
    """The class of transformers that loads a named architecture."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    seeing = {name for each in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values() for name in _names(each)}
    return AutoModelForImageTextToText if seeing.intersection(named) else AutoModelForCausalLM


def _names(told: Any) -> tuple[str, ...]:
    return (told,) if isinstance(told, str) else tuple(told)


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its bars and load reports: what they say is raised or printed by us, once."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def model_config(path: Path) -> dict[str, Any]:
    """Load the config.json of a model's folder.

    Raises:
        ReadError: if there is none, or one that names code of a hub, or has numbers that no model has.
    """
    if not path.is_dir():
        raise ReadError(
            f"{path}: no such folder. Without it there is no model. Give --model a folder of save_pretrained."
        )
    try:
        config = read_json(path / "config.json")
    except (OSError, ValueError) as error:
        raise ReadError(
            f"{path / 'config.json'}: {first_line(error)}. The architecture is not known without it. "
            "Give --model a folder written by save_pretrained."
        ) from error
    _check_values(path / "config.json", config)
    _check_implementations(path / "config.json", config)
    return config


def _check_values(path: Path, config: Any) -> None:
    """Refuse what is no configuration, and numbers that would take memory and time before they are looked at.

    Raises:
        ReadError: with the name and the value.
    """

    def wrong(what: str) -> ReadError:
        return ReadError(f"{path}: {what}. It describes no model. Copy the file again from where the model came from.")

    if not isinstance(config, dict):
        raise wrong("it holds no JSON object")
    named = config.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        raise wrong("architectures is not a list of names")
    parts: list[Any] = [config]
    while parts:
        part = parts.pop()
        for name, value in part.items() if isinstance(part, dict) else enumerate(part):
            if name in _SWITCHES and value is not None and type(value) is not bool:
                raise wrong(f"{name} is neither true nor false")
            if isinstance(value, dict | list):
                parts.append(value)
            elif type(value) is int and abs(value) > (most := _most(str(name))):
                digits = len(str(abs(value)))
                what = value if digits < 20 else f"an integer of {digits} digits"
                raise wrong(f"{str(name)[:80]} is {what}, and at most {most} is taken")


def _most(name: str) -> int:
    """The largest integer that is taken under a name."""
    if _LAYERS.fullmatch(name):
        return _MOST_LAYERS
    return _MOST_LABELS if name == "num_labels" else _MOST_INTEGER


def _check_implementations(path: Path, config: Any) -> None:
    """Refuse a config that names code of a hub for its attention or its experts, in any of its parts.

    Flash attention is refused as well: where it is not installed, transformers loads a kernel of a hub in its place.

    Raises:
        ReadError: with the name and the value.
    """
    parts = [config]
    while parts:
        part = parts.pop()
        if not isinstance(part, dict):
            parts += part if isinstance(part, list) else []
            continue
        for name, value in part.items():
            if not name.removesuffix("_internal").endswith("_implementation"):
                parts.append(value)
                continue
            for one in value.values() if isinstance(value, dict) else [value]:
                if one is not None and one not in _IMPLEMENTATIONS:
                    raise ReadError(
                        f"{path}: {name} is {str(one)[:80]!r}, which may be code of a hub. It is never loaded. Remove "
                        f"{name} from the file, or set it to one of {', '.join(_IMPLEMENTATIONS)}."
                    )


def _refuse_architecture(path: Path, built: str, named: list[str], info: Mapping[str, Any]) -> None:
    missing, shapes, extra = (sorted(info.get(f"{kind}_keys", ())) for kind in ("missing", "mismatched", "unexpected"))
    detail = f"config.json names {', '.join(named)[:300]}, a causal model of it is {built}"
    if missing:
        detail = f"{len(missing)} tensors that {built} needs are not in the weights, {missing[0]} first"
    elif shapes:
        detail = f"{len(shapes)} tensors have another shape than config.json says, {shapes[0][0]} first"
    elif extra:
        detail = f"{len(extra)} tensors have no place in {built}, {extra[0]} first"
    raise ReadError(
        f"{path}: {detail}. What was loaded would be another policy than the one that sampled. "
        "Give --model a causal model whose config.json and weights belong together."
    )


def first_line(error: Exception) -> str:
    """The first line of an error's message, at most 300 characters of it, without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0][:300].rstrip(".") if lines else type(error).__name__
