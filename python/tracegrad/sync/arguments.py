"""What a vLLM server must be started with, so that weights can be pushed to it."""

from __future__ import annotations

import os
from pathlib import Path

from tracegrad.errors import ArgumentError

WORKER = "tracegrad.sync.worker.Worker"
GUARD = "tracegrad.sync.guard.Guard"


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
        versions, rank: for "lora": how many adapters are kept at once, and their largest rank.
    """
    if kind not in ("file", "nccl", "lora"):
        raise ArgumentError(f"sync is {kind!r}. A server is started for one kind. Choose 'file', 'nccl' or 'lora'.")
    if kind == "lora":
        flags = ["--enable-lora", "--max-loras", str(versions), "--max-lora-rank", str(rank)]
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


def _linked(folder: Path) -> Path:
    """A folder in which this package stands alone."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "tracegrad"
    if not link.exists():
        link.symlink_to(Path(__file__).parent.parent, target_is_directory=True)
    return folder
