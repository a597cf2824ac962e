"""Load a transformers model from a local folder with all its weights, or raise one error that explains the problem.

Nothing is downloaded, and no pickle is read.
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
"""Allowed implementations of attention and experts. They run only the code of torch and transformers."""
_MAX_LAYERS, _MAX_LABELS, _MAX_INTEGER = 1 << 10, 1 << 16, 1 << 53
"""Limits for integers in a config.json. Each layer builds modules, and each label gets a name; others are numbers."""
_SWITCHES = ("output_hidden_states", "output_attentions", "return_dict", "use_cache", "torchscript", "is_decoder")
"""Options of a config.json that every model reads while it runs, but that transformers does not check."""
_LAYER_COUNT_NAMES = re.compile(r"(?!max_window).*(layers?|depths?|blocks)")
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


def load_full_model(path: Path) -> Any:
    """Load a transformers causal LM from a folder of full weights, in float32, with no weight missing.

    If config.json names an image-text model, that model is loaded with its vision encoder.

    Raises:
        ReadError: if the folder, its config or its weights are missing or do not belong together.
    """
    config = model_config(path)
    architectures = config.get("architectures") or []
    if not any((path / name).is_file() for name in WEIGHTS):
        contents = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise ReadError(
            f"TG-TRAIN-030: {path}: the folder has no model.safetensors ({contents}). Pass model with a folder "
            "written by save_pretrained."
        )
    advice = "Pass model with a causal model whose config.json and weights belong together"
    with reading_errors(f"{path}: transformers cannot load it as a causal language model", advice), quiet():
        _check_size(path, empty_model(path, architectures))
        loaded: Any = _auto_class(architectures).from_pretrained(
            path,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    model, info = loaded
    architectures = architectures or [type(model).__name__]
    problem_keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    if type(model).__name__ not in architectures or any(info.get(key) for key in problem_keys):
        _refuse_architecture(path, type(model).__name__, architectures, info)
    return model


def auto_class_name(path: Path) -> str:
    """Return the name of the transformers class that loads a folder, by the architectures in its config.json."""
    try:
        config = read_json(path / "config.json")
        _check_values(path / "config.json", config)
        architectures = config.get("architectures") or []
    except (OSError, ValueError):  # A folder of adapters has no config.json.
        architectures = []
    return _auto_class(architectures).__name__


def empty_model(path: Path, named: list[str]) -> Any:
    """Build the model of a config.json on the meta device: shapes without memory."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        return _auto_class(named).from_config(config, trust_remote_code=False)


def _check_size(path: Path, model: Any) -> None:
    """Reject a model with many more weights than the files have bytes for, before memory is allocated.

    Raises:
        ReadError: the message has both numbers.
    """
    stored_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    weight_count = sum(weight.numel() for weight in model.parameters()) + sum(
        buffer.numel() for buffer in model.buffers()
    )
    # The smallest stored weights have four bits.
    if weight_count > 2 * stored_bytes + (1 << 20):
        raise ReadError(
            f"TG-TRAIN-031: {path}: config.json describes {weight_count:,} weights, but the weight files have "
            f"{stored_bytes:,} bytes. They do not belong together. Pass model with a folder written by "
            f"save_pretrained."
        )


@contextmanager
def reading_errors(what: str, because: str) -> Iterator[None]:
    """Turn any error of transformers on untrusted files into one ReadError.

    Args:
        what: the problem with the folder, start of the message.
        because: the consequence and the advice, without the final full stop.

    Raises:
        ReadError: for every exception that is not a TracegradError already.
    """
    try:
        yield
    except TracegradError:
        raise
    except Exception as error:
        raise ReadError(f"TG-TRAIN-096: {what}: {first_line(error)}. {because}.") from error


def _auto_class(architectures: list[str]) -> Any:
    """Return the transformers class that loads these architectures."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    image_models = {name for names in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values() for name in _names(names)}
    return AutoModelForImageTextToText if image_models.intersection(architectures) else AutoModelForCausalLM


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and load reports of transformers. Errors and notes are reported by tracegrad."""
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
        ReadError: if it is missing, invalid, names code of a hub, or has numbers beyond those of real models.
    """
    if not path.is_dir():
        raise ReadError(
            f"TG-TRAIN-032: {path}: the folder does not exist. Pass model with a folder written by save_pretrained."
        )
    try:
        config = read_json(path / "config.json")
    except (OSError, ValueError) as error:
        raise ReadError(
            f"TG-TRAIN-033: {path / 'config.json'}: {first_line(error)}. The file describes the architecture. "
            "Pass model with a folder written by save_pretrained."
        ) from error
    _check_values(path / "config.json", config)
    _check_implementations(path / "config.json", config)
    return config


def _check_values(path: Path, config: Any) -> None:
    """Reject an invalid configuration, and numbers that would cost much memory and time before they are checked.

    Raises:
        ReadError: the message has the name and the value.
    """

    def invalid(what: str) -> ReadError:
        return ReadError(f"TG-TRAIN-034: {path}: {what}. Copy the file again from its source.")

    if not isinstance(config, dict):
        raise invalid("the file is not a JSON object")
    architectures = config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise invalid("architectures is not a list of names")
    parts: list[Any] = [config]
    while parts:
        part = parts.pop()
        for name, value in part.items() if isinstance(part, dict) else enumerate(part):
            if name in _SWITCHES and value is not None and type(value) is not bool:
                raise invalid(f"{name} must be true or false")
            if isinstance(value, dict | list):
                parts.append(value)
            elif type(value) is int and abs(value) > (limit := _max_integer(str(name))):
                digits = len(str(abs(value)))
                what = value if digits < 20 else f"an integer of {digits} digits"
                raise invalid(f"{str(name)[:80]} is {what}; the maximum is {limit}")


def _max_integer(name: str) -> int:
    """Return the largest allowed integer of an option."""
    if _LAYER_COUNT_NAMES.fullmatch(name):
        return _MAX_LAYERS
    return _MAX_LABELS if name == "num_labels" else _MAX_INTEGER


def _check_implementations(path: Path, config: Any) -> None:
    """Reject a config that names code of a hub for attention or experts, at any depth.

    Flash attention is rejected too: if it is not installed, transformers downloads a kernel from a hub instead.

    Raises:
        ReadError: the message has the name and the value.
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
            for implementation in value.values() if isinstance(value, dict) else [value]:
                if implementation is not None and implementation not in _IMPLEMENTATIONS:
                    raise ReadError(
                        f"TG-TRAIN-035: {path}: {name} is {str(implementation)[:80]!r}, which may be code from a hub. "
                        f"tracegrad never loads such code. Remove {name} from the file, or set it to one of "
                        f"{', '.join(_IMPLEMENTATIONS)}."
                    )


def _refuse_architecture(path: Path, class_name: str, architectures: list[str], info: Mapping[str, Any]) -> None:
    missing, shapes, unexpected = (
        sorted(info.get(f"{kind}_keys", ())) for kind in ("missing", "mismatched", "unexpected")
    )
    detail = f"config.json names {', '.join(architectures)[:300]}, and the causal model for it is {class_name}"
    if missing:
        detail = f"{len(missing)} tensors that {class_name} needs are not in the weights, {missing[0]} first"
    elif shapes:
        detail = f"{len(shapes)} tensors have another shape than in config.json, {shapes[0][0]} first"
    elif unexpected:
        detail = f"{len(unexpected)} tensors do not belong to {class_name}, {unexpected[0]} first"
    raise ReadError(
        f"TG-TRAIN-036: {path}: {detail}. The loaded model would not be the policy that sampled. "
        "Pass model with a causal model whose config.json and weights belong together."
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, at most 300 characters, without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0][:300].rstrip(".") if lines else type(error).__name__
