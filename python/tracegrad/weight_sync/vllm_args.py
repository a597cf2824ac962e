"""Arguments that a vLLM server needs for weight sync."""

import json
import os
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError

WORKER = "tracegrad.weight_sync.worker.Worker"
GUARD = "tracegrad.weight_sync.auth.Guard"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank."""


def vllm_arguments(
    kind: str, *, package_folder: str | Path | None = None, require_key: bool = False, versions: int = 3, rank: int = 16
) -> tuple[list[str], dict[str, str]]:
    """Return flags and environment variables of a server for one weight-sync backend.

    >>> flags, environment = vllm_arguments("file")
    >>> flags[:2], environment["VLLM_SERVER_DEV_MODE"]
    (['--worker-extension-cls', 'tracegrad.weight_sync.worker.Worker'], '1')

    Args:
        kind: "file", "nccl" or "lora".
        package_folder: an empty folder for a link to this package, which is added to PYTHONPATH, for an interpreter
            with vLLM but not tracegrad. It gets no other package of this interpreter.
        require_key: require VLLM_API_KEY on every path, see `auth`.
        versions, rank: for "lora": number of adapters loaded at once, and their largest rank; the flag is the next rank
            that vLLM accepts.
    """
    flags = []
    for name, value in engine_arguments(kind, versions=versions, rank=rank).items():
        flags += [f"--{name.replace('_', '-')}", *_flag_value(value)]
    dev = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if kind == "lora" else {"VLLM_SERVER_DEV_MODE": "1"}
    environment = dict(dev)
    if require_key:
        flags += ["--middleware", GUARD]
    if package_folder is not None:
        path = [str(_link_package(Path(package_folder))), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
    return flags, environment


def engine_arguments(kind: str, *, versions: int = 3, rank: int = 16) -> dict[str, Any]:
    """Return the same settings as arguments of `vllm.LLM`.

    >>> engine_arguments("lora", rank=4)
    {'enable_lora': True, 'max_loras': 3, 'max_lora_rank': 8}
    """
    if kind not in ("file", "nccl", "lora"):
        raise ArgumentError(f"TG-SYNC-020: sync is {kind!r}. It must be 'file', 'nccl' or 'lora'.")
    if kind == "lora":
        return {"enable_lora": True, "max_loras": versions, "max_lora_rank": _accepted_rank(rank)}
    return {"worker_extension_cls": WORKER, "weight_transfer_config": {"backend": f"tracegrad_{kind}"}}


def _flag_value(value: Any) -> list[str]:
    """Return the value of a flag; nothing for True."""
    if value is True:
        return []
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


def _accepted_rank(rank: int) -> int:
    """Return the smallest rank that vLLM accepts and that fits adapters of this rank.

    >>> _accepted_rank(4), _accepted_rank(16)
    (8, 16)
    """
    if not 1 <= rank <= RANKS[-1]:
        raise ArgumentError(
            f"TG-SYNC-021: the rank of the adapters is {rank}, but vLLM accepts only 1 to {RANKS[-1]}. Train adapters "
            "of such a rank, or sync merged weights with 'file'."
        )
    return next(accepted for accepted in RANKS if accepted >= rank)


def _link_package(folder: Path) -> Path:
    """Return a folder that contains only this package."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "tracegrad"
    if not link.exists():
        link.symlink_to(Path(__file__).parent.parent, target_is_directory=True)
    return folder
