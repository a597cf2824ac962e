"""What a vLLM server must be started with, so that weights can be pushed to it."""

import json
import os
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError

WORKER = "tracegrad.weight_sync.worker.Worker"
GUARD = "tracegrad.weight_sync.auth.Guard"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as --max-lora-rank."""


def vllm_arguments(
    kind: str, *, beside: str | Path | None = None, guard: bool = False, versions: int = 3, rank: int = 16
) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of a server for one kind of sync.

    >>> flags, environment = vllm_arguments("file")
    >>> flags[:2], environment["VLLM_SERVER_DEV_MODE"]
    (['--worker-extension-cls', 'tracegrad.weight_sync.worker.Worker'], '1')

    Args:
        kind: "file", "nccl" or "lora".
        beside: an empty folder for a link to this package, put on PYTHONPATH; for an interpreter that has vLLM and not
            tracegrad. Nothing else of this interpreter is put on the path of that one.
        guard: ask for VLLM_API_KEY on every path, see `auth`.
        versions, rank: for "lora": how many adapters are kept at once, and their largest rank; the flag is the next
            that vLLM takes.
    """
    flags = []
    for name, value in engine_arguments(kind, versions=versions, rank=rank).items():
        flags += [f"--{name.replace('_', '-')}", *_spelt(value)]
    dev = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if kind == "lora" else {"VLLM_SERVER_DEV_MODE": "1"}
    environment = dict(dev)
    if guard:
        flags += ["--middleware", GUARD]
    if beside is not None:
        path = [str(_linked(Path(beside))), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
    return flags, environment


def engine_arguments(kind: str, *, versions: int = 3, rank: int = 16) -> dict[str, Any]:
    """The same as arguments of `vllm.LLM`.

    >>> engine_arguments("lora", rank=4)
    {'enable_lora': True, 'max_loras': 3, 'max_lora_rank': 8}
    """
    if kind not in ("file", "nccl", "lora"):
        raise ArgumentError(f"sync is {kind!r}. A server is started for one kind. Choose 'file', 'nccl' or 'lora'.")
    if kind == "lora":
        return {"enable_lora": True, "max_loras": versions, "max_lora_rank": _taken(rank)}
    return {"worker_extension_cls": WORKER, "weight_transfer_config": {"backend": f"tracegrad_{kind}"}}


def _spelt(value: Any) -> list[str]:
    """After its flag: nothing for True."""
    if value is True:
        return []
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


def _taken(rank: int) -> int:
    """The smallest rank of vLLM's list that an adapter of this one fits.

    >>> _taken(4), _taken(16)
    (8, 16)
    """
    if not 1 <= rank <= RANKS[-1]:
        raise ArgumentError(
            f"the rank of the adapters is {rank}. vLLM takes 1 to {RANKS[-1]}, and no server could load them. Train "
            "adapters of such a rank, or push whole weights by sync 'file'."
        )
    return next(each for each in RANKS if each >= rank)


def _linked(folder: Path) -> Path:
    """A folder in which this package stands alone."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "tracegrad"
    if not link.exists():
        link.symlink_to(Path(__file__).parent.parent, target_is_directory=True)
    return folder
