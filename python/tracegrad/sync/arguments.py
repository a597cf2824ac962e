"""What a vLLM server must be started with, so that weights can be pushed to it."""

from __future__ import annotations

import os
from pathlib import Path

from tracegrad.errors import ArgumentError

WORKER = "tracegrad.sync.worker.Worker"
GUARD = "tracegrad.sync.guard.Guard"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as --max-lora-rank."""


def vllm_arguments(
    kind: str, *, beside: str | Path | None = None, guard: bool = False, versions: int = 3, rank: int = 16
) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of a server for one kind of sync.

    >>> flags, environment = vllm_arguments("file")
    >>> flags[:2], environment["VLLM_SERVER_DEV_MODE"]
    (['--worker-extension-cls', 'tracegrad.sync.worker.Worker'], '1')

    Args:
        kind: "file", "nccl" or "lora".
        beside: an empty folder for a link to this package, put on PYTHONPATH; for an interpreter that has vLLM and not
            tracegrad. Nothing else of this interpreter is put on the path of that one.
        guard: ask for VLLM_API_KEY on every path, see `guard`.
        versions, rank: for "lora": how many adapters are kept at once, and their largest rank; the flag is the next
            that vLLM takes.
    """
    if kind not in ("file", "nccl", "lora"):
        raise ArgumentError(f"sync is {kind!r}. A server is started for one kind. Choose 'file', 'nccl' or 'lora'.")
    if kind == "lora":
        flags = ["--enable-lora", "--max-loras", str(versions), "--max-lora-rank", str(_taken(rank))]
        environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    else:
        flags = ["--worker-extension-cls", WORKER, "--weight-transfer-config", f'{{"backend": "tracegrad_{kind}"}}']
        environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if guard:
        flags += ["--middleware", GUARD]
    if beside is not None:
        path = [str(_linked(Path(beside))), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
    return flags, environment


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
