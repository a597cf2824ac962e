"""Add LoRA adapters with peft, load them from a checkpoint, and merge them into the weights."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from tracegrad.errors import ArgumentError, ReadError, TracegradError
from tracegrad.storage import files
from tracegrad.storage.remote import require_local_path
from tracegrad.storage.safetensors_file import flush, read_text
from tracegrad.trainer.load_model import TOKENIZER_FILES, first_line, load_full_model, quiet


def with_adapters(model: Any, rank: int, *, exclude: Sequence[nn.Module] = ()) -> Any:
    """Add LoRA adapters in place to all linear layers except the LM head: alpha = 2 * rank, no dropout.

    Args:
        model: a transformers model.
        rank: rank of each adapter.
        exclude: parts of the model without adapters.

    Returns:
        The peft model.

    Raises:
        ArgumentError: if peft is missing, or the model has adapters already.
    """
    peft = import_peft("train.lora_rank")
    if has_adapters(model):
        raise ArgumentError(
            f"TG-TRAIN-040: train.lora_rank is {rank}, but the model has adapters already. "
            "Leave the option out to train them further, or merge them first: tracegrad merge CHECKPOINT --out DIR."
        )
    excluded = {id(module) for part in exclude for module in part.modules()}
    names = [name for name, module in model.named_modules() if id(module) in excluded and isinstance(module, nn.Linear)]
    lora_config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        **({"exclude_modules": names} if names else {}),
    )
    adapted = peft.get_peft_model(model, lora_config)
    name_base(adapted)
    return adapted


def name_base(model: Any) -> None:
    """Make the base model's folder in the adapter config absolute, so that it is found from any working directory."""
    folder = model.name_or_path
    if folder and Path(folder).is_dir():
        model.peft_config[model.active_adapter].base_model_name_or_path = str(Path(folder).resolve())


def import_peft(what: str) -> Any:
    """Import peft.

    Args:
        what: subject of the error message: what needs peft.

    Raises:
        ArgumentError: if peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ArgumentError(
            f"TG-TRAIN-041: {what} needs peft, which is not installed. Run: pip install 'tracegrad[lora]'"
        ) from error
    return peft


def has_adapters(model: nn.Module) -> bool:
    """Return whether the model has peft adapters."""
    return bool(_adapter_layers(model))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch off the model's adapters inside a `with` block. The set of trained parameters does not change.

    peft's own switch changes `requires_grad`, but FSDP2 reads it only once, when it first gathers a layer.
    """
    states = [(module, module._disable_adapters) for module in _adapter_layers(model)]
    for module, _ in states:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module, state in states:
            module._disable_adapters = state


def _adapter_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_disable_adapters")]


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_SUPPORTED_OPTIONS = (
    "r",
    "lora_alpha",
    "target_modules",
    "modules_to_save",
    "use_rslora",
    "use_dora",
    "bias",
    "lora_bias",
)
_SUPPORTED_OPTIONS += ("lora_dropout", "fan_in_fan_out", "init_lora_weights", "task_type")
_METADATA_OPTIONS = (
    "peft_type",
    "peft_version",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
)

_INERT_DEFAULTS: dict[str, tuple[Any, ...]] = {"megatron_core": ("megatron.core",), "qalora_group_size": (16,)}
"""Nonempty defaults of peft options that have no effect unless another option is set."""


@dataclass(frozen=True)
class LoraFolder:
    """A folder of LoRA adapters, before the model is loaded.

    Args:
        path: the folder.
        base: folder of the base model.
        options: peft's options for the adapters.
    """

    path: Path
    base: Path
    options: Mapping[str, Any]

    @property
    def rank(self) -> int:
        """Rank of each adapter."""
        return self.options["r"]

    @classmethod
    def read(cls, path: Path, base: Path | None = None) -> "LoraFolder | None":
        """Read the config of a folder of adapters; return None if the folder has no adapters.

        Args:
            path: the folder.
            base: folder of the base model; default the one that the config names.

        Raises:
            ReadError: if the config is not supported, or the base model is missing.
        """
        if not (path / CONFIG).is_file():
            return None
        try:
            contents = json.loads(read_text(path / CONFIG, _MAX_CONFIG_BYTES))
            options = _parse_options(contents)
            ranks = {shape[0] for name, shape in _shapes(path / WEIGHTS).items() if ".lora_A." in name}
            if ranks != {options["r"]}:
                raise ValueError(f"its rank is {options['r']!r:.20}, but {WEIGHTS} has {sorted(ranks)[:3]}")
            base_name = contents["base_model_name_or_path"]
            if base is None and not (isinstance(base_name, str) and base_name):
                raise ValueError("it does not name the base model of the adapters")
        except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError, ReadError) as error:
            raise ReadError(
                f"TG-TRAIN-042: {path / CONFIG}: {first_line(error)[:300]}. The adapters in this folder cannot be "
                "loaded. Pass a checkpoint of a run with train.lora_rank, or merge them with the tool that wrote them."
            ) from error
        adapted = cls(path, base or Path(base_name), options)
        if not (adapted.base / "config.json").is_file():
            raise ReadError(
                f"TG-TRAIN-043: {path}: its adapters need the base model {str(adapted.base)[:200]!r}, and that folder "
                "is missing or has no config.json. Restore it, or pass its new location: tracegrad "
                f"merge {path} --base DIR --out DIR writes full weights."
            )
        return adapted

    def load(self) -> Any:
        """Load the base model with the adapters. Only the adapters are trainable.

        Raises:
            ReadError: if the model cannot be loaded, or the adapters belong to another model.
            ArgumentError: if peft is not installed.
        """
        peft = import_peft(f"{self.path} contains LoRA adapters and")
        model = load_full_model(self.base)
        options = {
            name: value for name, value in self.options.items() if name not in ("init_lora_weights", "task_type")
        }
        try:
            with quiet():
                model = peft.get_peft_model(model, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
                state = load_file(self.path / WEIGHTS)
                current = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
                for name in sorted(current.keys() ^ state.keys()):
                    raise ValueError(f"{name[:120]} is only in {'the model' if name in current else 'the file'}")
                for name, value in current.items():
                    if value.shape != state[name].shape:
                        raise ValueError(f"{name} is {tuple(state[name].shape)}, the model needs {tuple(value.shape)}")
                peft.set_peft_model_state_dict(model, state)
        except Exception as error:  # peft can raise anything for untrusted files.
            raise ReadError(
                f"TG-TRAIN-044: {self.path / WEIGHTS}: {first_line(error)[:300]}. The adapters do not belong to the "
                f"model {self.base}. Pass the model on which they were trained."
            ) from error
        name_base(model)
        return model


def load_model(path: Path) -> Any:
    """Load a transformers causal LM from a folder, in float32. All its weights must be in the folder.

    For a folder of LoRA adapters, such as a checkpoint of a run with `train.lora_rank`, the base model is loaded with
    the adapters. Only the adapters are trainable, and the base model is the reference.

    Raises:
        ReadError: if the folder, its config or its weights are missing, or the weights belong to another architecture.
        ArgumentError: if the folder has adapters and peft is not installed.
    """
    adapted = LoraFolder.read(path)
    return load_full_model(path) if adapted is None else adapted.load()


def merge_adapters(checkpoint: str | Path, out: str | Path, base: str | Path | None = None) -> Path:
    """Merge the LoRA adapters of a checkpoint, and write the full float32 weights with tokenizer and chat template.

    The weights equal the result of peft's `merge_and_unload`. The folder `out` is created atomically.

    Args:
        checkpoint: folder of adapters.
        out: output folder, which must not exist.
        base: folder of the base model; default the one that the adapters name.

    Returns:
        `out`.

    Raises:
        ArgumentError: if the checkpoint has no adapters, or `out` exists.
        ReadError: if they cannot be read.
        TracegradError: if the merged weights are not finite, or the folder cannot be written.

    ```python
    from transformers import AutoModelForCausalLM
    from tracegrad.trainer import merge_adapters

    folder = merge_adapters("out/run/checkpoint", "out/merged")  # of a run with train.lora_rank
    model = AutoModelForCausalLM.from_pretrained(folder)
    ```
    """
    checkpoint, out = Path(checkpoint), require_local_path(out)
    adapted = LoraFolder.read(checkpoint, Path(base) if base is not None else None)
    if adapted is None:
        raise ArgumentError(
            f"TG-TRAIN-045: {checkpoint}: the folder has no {CONFIG}, so it contains no adapters. "
            "Pass a checkpoint of a run with train.lora_rank."
        )
    if out.exists():
        raise ArgumentError(f"TG-TRAIN-046: {out} exists already. Pass another out.")
    model = adapted.load()
    try:
        merged = model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise TracegradError(
            f"TG-TRAIN-047: {checkpoint}: {first_line(error)[:200]}. The merged weights would not be usable. Merge an "
            "earlier checkpoint."
        ) from error
    staged = out.with_name(f".tmp-{out.name}")
    try:
        files.make_folder(staged)
        with quiet():
            merged.save_pretrained(staged)
        for name in TOKENIZER_FILES:
            source = next((folder / name for folder in (checkpoint, adapted.base) if (folder / name).is_file()), None)
            if source is not None and not (staged / name).exists():
                files.copy(source, staged / name)
        for path in [*staged.iterdir(), staged]:
            flush(path)
        staged.rename(out)
        flush(out.parent)
    except (OSError, SafetensorError, ReadError) as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise TracegradError(
            f"TG-TRAIN-048: {out}: {first_line(error)[:200]}. The merged weights were not written. Free space, or "
            f"pass another out."
        ) from error
    return out


def _parse_options(contents: Any) -> dict[str, Any]:
    """Return the supported options of a peft config. Every other option must have its default value."""
    if not isinstance(contents, dict) or contents.get("peft_type") != "LORA":
        raise ValueError("peft_type is not LORA")
    for name, value in contents.items():
        if (
            name not in _SUPPORTED_OPTIONS
            and name not in _METADATA_OPTIONS
            and value not in (None, False, [], {}, *_INERT_DEFAULTS.get(name, ()))
        ):
            raise ValueError(f"{name[:60]!r} is set, which is not supported")
    options = {name: contents[name] for name in _SUPPORTED_OPTIONS if contents.get(name) is not None}
    for name in ("target_modules", "modules_to_save"):
        names = options.get(name, [])
        if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
            raise ValueError(f"{name} is not a list of names")
    if type(options.get("r")) is not int or type(options.get("init_lora_weights", True)) is not bool:
        raise ValueError("its r is not an integer, or its init_lora_weights is not true or false")
    return options


def _shapes(path: Path) -> dict[str, list[int]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (it is not a dict)
