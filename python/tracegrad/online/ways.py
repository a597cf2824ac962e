"""How weights reach the servers of a run: whole ones by a file or by NCCL, or an adapter under a name of its own.

The pushing is `sync`'s; here is what is pushed, and what must be true of the run. Called by `start` and `loop`.
"""

import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.learner import Run
from tracegrad.learner.adapters import has_adapters
from tracegrad.online.options import Online
from tracegrad.sync import File, Lora, Nccl

FOLDER = "weights"
NAME = "policy"


def sync_of(driven: Run, told: Online) -> Callable[[Any], Any]:
    """What makes, for the servers of a run, what pushes to them."""
    folder = driven.out / FOLDER
    if told.sync == "file":
        for left in (*folder.glob("weights-*.safetensors"), *folder.glob(".weights-*.safetensors.*")):
            left.unlink(missing_ok=True)  # of a run that was killed
        return lambda servers: File(servers, folder)
    if told.sync == "nccl":
        _check_device(driven)
        return Nccl
    if not has_adapters(driven.model):
        raise ArgumentError(
            "online.sync is 'lora', and the model has no adapters. There would be nothing to push. Set "
            "train.lora_rank, or use online.sync 'file'."
        )
    shutil.rmtree(folder, ignore_errors=True)  # what a run that was killed has left: it has other names
    config = driven.model.peft_config[driven.model.active_adapter].to_dict()
    # Other runs may ask the same servers, whose caches go by the adapters' names.
    name = f"{NAME}-{secrets.token_hex(4)}"
    return lambda servers: Lora(servers, folder, config=config, name=name, keep=adapters_kept(told))


def weights_of(driven: Run, told: Online) -> Mapping[str, Any]:
    """What is pushed, on the first rank; every rank calls this."""
    if told.sync == "lora":
        return driven.weights(adapters="alone")
    return driven.weights(device=None if told.sync == "nccl" else "cpu")


def adapters_kept(told: Online) -> int:
    """Adapters that servers are asked for at once: the newest, those that the lag allows, and one to be loaded."""
    return told.steps_ahead + 2


def before(driven: Run, told: Online) -> tuple[Path, Callable[[str], str]] | None:
    """The file that was pushed one version ago, and by which name it has a parameter; None where there is none."""
    version = driven.taken - 1
    if told.sync == "lora":
        found = list((driven.out / FOLDER).glob(f"{NAME}-*-v{version}/adapter_model.safetensors"))
        return (found[0], _of_adapter) if found else None
    path = driven.out / FOLDER / f"weights-{version:08d}.safetensors"
    return (path, of_whole) if path.is_file() else None


def _of_adapter(name: str) -> str:
    """As peft's files have it: without the name of the adapter."""
    parts = name.split(".")
    return ".".join(part for at, part in enumerate(parts) if at < 1 or not parts[at - 1].startswith("lora_"))


def of_whole(name: str) -> str:
    """As the model without adapters has it, into which they are merged."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _check_device(driven: Run) -> None:
    device = driven.target.device
    if device.type != "cuda":
        raise ArgumentError(
            f"online.sync is 'nccl', and the policy is trained on {device}. NCCL sends from one CUDA device to "
            "another, and no server would get anything. Use online.sync 'file'."
        )
