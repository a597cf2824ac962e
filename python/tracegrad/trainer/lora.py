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
from tracegrad.storage.remote import place_here
from tracegrad.storage.safetensors_file import flush, read_text
from tracegrad.trainer.load_model import TOKENIZER_FILES, first_line, load_whole, quiet


def with_adapters(model: Any, rank: int, *, without: Sequence[nn.Module] = ()) -> Any:
    """A peft model with LoRA on all linear layers but the head: alpha = 2 * rank, no dropout; made in place.

    Args:
        model: of transformers.
        rank: of each adapter.
        without: parts of the model that get none.
    """
    peft = imported_peft("train.lora_rank")
    if has_adapters(model):
        raise ArgumentError(
            f"train.lora_rank is {rank}, and the model has adapters already. Two would stand on a layer. Leave it "
            "out to go on with them, or merge them first: tracegrad merge CHECKPOINT --out DIR."
        )
    kept = {id(module) for part in without for module in part.modules()}
    names = [name for name, module in model.named_modules() if id(module) in kept and isinstance(module, nn.Linear)]
    how = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    lora = peft.LoraConfig(**how, **({"exclude_modules": names} if names else {}))
    adapted = peft.get_peft_model(model, lora)
    name_base(adapted)
    return adapted


def name_base(model: Any) -> None:
    """Lets adapters name the folder of their model so that it is found from any working directory."""
    folder = model.name_or_path
    if folder and Path(folder).is_dir():
        model.peft_config[model.active_adapter].base_model_name_or_path = str(Path(folder).resolve())


def imported_peft(what: str) -> Any:
    """peft, or an error that says what needs it."""
    try:
        import peft
    except ImportError as error:
        raise ArgumentError(
            f"{what} needs peft, which is not installed. Without it there are no adapters. "
            "pip install 'tracegrad[lora]'"
        ) from error
    return peft


def has_adapters(model: nn.Module) -> bool:
    """Whether peft put adapters on the model."""
    return bool(_adapted(model))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters while entered; which parameters are trained does not change.

    peft's own switch turns their `requires_grad` off and on, which FSDP2 reads once, when it first gathers a layer.
    """
    before = [(module, module._disable_adapters) for module in _adapted(model)]
    for module, _ in before:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module, was in before:
            module._disable_adapters = was


def _adapted(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_disable_adapters")]


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_LIMIT = 1 << 20
_READ = ("r", "lora_alpha", "target_modules", "modules_to_save", "use_rslora", "use_dora", "bias", "lora_bias")
_READ += ("lora_dropout", "fan_in_fan_out", "init_lora_weights", "task_type")
_ABOUT = ("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode")

_HARMLESS: dict[str, tuple[Any, ...]] = {"megatron_core": ("megatron.core",), "qalora_group_size": (16,)}
"""Defaults of peft that are not empty, of options that do nothing without another."""


@dataclass(frozen=True)
class Adapted:
    """What a folder of adapters says.

    Args:
        path: of the folder.
        base: folder of the model that they are of.
        told: peft's options for them.
    """

    path: Path
    base: Path
    told: Mapping[str, Any]

    @property
    def rank(self) -> int:
        """Of each adapter."""
        return self.told["r"]

    @classmethod
    def read(cls, path: Path, base: Path | None = None) -> "Adapted | None":
        """What a folder says; None where it holds no adapters.

        Args:
            base: folder of the model, where it is not the one that they were made on.

        Raises:
            ReadError: if it says something that is not understood here, or its model is not there.
        """
        if not (path / CONFIG).is_file():
            return None
        try:
            said = json.loads(read_text(path / CONFIG, _LIMIT))
            options = _options(said)
            ranks = {shape[0] for name, shape in _shapes(path / WEIGHTS).items() if ".lora_A." in name}
            if ranks != {options["r"]}:
                raise ValueError(f"its rank is {options['r']!r:.20}, and {WEIGHTS} has {sorted(ranks)[:3]}")
            named = said["base_model_name_or_path"]
            if base is None and not (isinstance(named, str) and named):
                raise ValueError("it does not name the model that the adapters are of")
        except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError, ReadError) as error:
            raise ReadError(
                f"{path / CONFIG}: {first_line(error)[:300]}. The adapters beside it cannot be put on a model. Give a "
                "checkpoint of a run with train.lora_rank, or merge them with what made them."
            ) from error
        adapted = cls(path, base or Path(named), options)
        if not (adapted.base / "config.json").is_file():
            raise ReadError(
                f"{path}: its adapters are of the model {str(adapted.base)[:200]!r}, and no folder with a config.json "
                "is there. Without it they are no policy. Put it there, or say where it is: tracegrad merge "
                f"{path} --base DIR --out DIR makes whole weights."
            )
        return adapted

    def load(self) -> Any:
        """The model with the adapters on it, which alone are trained.

        Raises:
            ReadError: if the model cannot be loaded, or the adapters are of another.
            ArgumentError: without peft.
        """
        peft = imported_peft(f"{self.path} holds LoRA adapters and")
        model = load_whole(self.base)
        options = {name: value for name, value in self.told.items() if name not in ("init_lora_weights", "task_type")}
        try:
            with quiet():
                model = peft.get_peft_model(model, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
                state = load_file(self.path / WEIGHTS)
                current = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
                for name in sorted(current.keys() ^ state.keys()):
                    raise ValueError(f"{name[:120]} is in {'the model' if name in current else 'the file'} alone")
                for name, value in current.items():
                    if value.shape != state[name].shape:
                        raise ValueError(f"{name} is {tuple(state[name].shape)}, the model takes {tuple(value.shape)}")
                peft.set_peft_model_state_dict(model, state)
        except Exception as error:  # whatever the code of peft raises over a stranger's files
            raise ReadError(
                f"{self.path / WEIGHTS}: {first_line(error)[:300]}. The adapters are not of the model {self.base}. "
                "Give the model that they were trained on."
            ) from error
        name_base(model)
        return model


def load_model(path: Path) -> Any:
    """A transformers causal language model from a folder, in float32, its weights all found.

    A folder of LoRA adapters, such as a checkpoint of a run with `train.lora_rank`, gives the model that it names with
    the adapters on it: they alone are trained further, and the model without them is the reference.

    Raises:
        ReadError: if the folder, its config or its weights are missing, or the weights belong to another architecture.
        ArgumentError: for adapters without peft.
    """
    adapted = Adapted.read(path)
    return load_whole(path) if adapted is None else adapted.load()


def merge_adapters(checkpoint: str | Path, out: str | Path, base: str | Path | None = None) -> Path:
    """Writes whole weights in float32, with tokenizer and chat template, of a checkpoint that holds LoRA adapters.

    The weights are those of peft's `merge_and_unload`. The folder is there whole or not at all.

    Args:
        checkpoint: folder of adapters.
        out: folder that is not there yet.
        base: folder of the model that they are of; default the one that they name.

    Returns:
        `out`.

    Raises:
        ArgumentError: if the checkpoint holds no adapters, or `out` is there.
        ReadError: if they cannot be read.
        TracegradError: if they are not finite, or the folder cannot be written.
    """
    checkpoint, out = Path(checkpoint), place_here(out)
    adapted = Adapted.read(checkpoint, Path(base) if base is not None else None)
    if adapted is None:
        raise ArgumentError(
            f"{checkpoint}: no {CONFIG} there. Its weights are whole, or none: there is nothing to merge. Give a "
            "checkpoint of a run with train.lora_rank."
        )
    if out.exists():
        raise ArgumentError(f"{out} is there. Merged weights would be mixed with what it holds. Give another --out.")
    model = adapted.load()
    try:
        merged = model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise TracegradError(
            f"{checkpoint}: {first_line(error)[:200]}. Whole weights of it would be broken. Merge an "
            "earlier checkpoint."
        ) from error
    staged = out.with_name(f".tmp-{out.name}")
    try:
        files.make_folder(staged)
        with quiet():
            merged.save_pretrained(staged)
        for name in TOKENIZER_FILES:
            source = next((each / name for each in (checkpoint, adapted.base) if (each / name).is_file()), None)
            if source is not None and not (staged / name).exists():
                files.copy(source, staged / name)
        for path in [*staged.iterdir(), staged]:
            flush(path)
        staged.rename(out)
        flush(out.parent)
    except (OSError, SafetensorError, ReadError) as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise TracegradError(
            f"{out}: {first_line(error)[:200]}. The merged weights are not written. Make room or give another --out."
        ) from error
    return out


def _options(said: Any) -> dict[str, Any]:
    """The options that are understood; any other must be as peft has it where nobody sets it."""
    if not isinstance(said, dict) or said.get("peft_type") != "LORA":
        raise ValueError("it is not of LoRA adapters")
    for name, value in said.items():
        if name not in _READ and name not in _ABOUT and value not in (None, False, [], {}, *_HARMLESS.get(name, ())):
            raise ValueError(f"{name[:60]!r} is set, which is not read here")
    options = {name: said[name] for name in _READ if said.get(name) is not None}
    for name in ("target_modules", "modules_to_save"):
        listed = options.get(name, [])
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise ValueError(f"{name} is no list of names")
    if type(options.get("r")) is not int or type(options.get("init_lora_weights", True)) is not bool:
        raise ValueError("its r is no whole number, or its init_lora_weights neither true nor false")
    return options


def _shapes(path: Path) -> dict[str, list[int]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (it is no dict)
