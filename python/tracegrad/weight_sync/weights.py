"""Write weights as one safetensors file per version, completely or not at all, and delete old files.

torch and safetensors are imported on use.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.storage import files


def deduplicate(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors to store: of tensors that share all of their memory (tied heads), only the first.

    Raises:
        ArgumentError: for no weights, for values that are not tensors, and for shards of a tensor (FSDP).
    """
    import torch

    if not weights:
        raise ArgumentError(
            "TG-SYNC-022: weights is empty, so servers would keep their old weights. Pass the model's weights."
        )
    stored: dict[str, Any] = {}
    seen = set()
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"TG-SYNC-023: weight {name!r} is a {type(tensor).__name__}, not a tensor. Pass a mapping of tensors."
            )
        if hasattr(tensor, "full_tensor"):
            raise ArgumentError(
                f"TG-SYNC-024: weight {name!r} is a shard of a tensor, but servers need the full tensor. Pass "
                f"Trainer.weights(), which gathers the shards."
            )
        memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        stored[name] = tensor.detach().contiguous()
    # Views of one memory, such as parts of a fused weight, are stored separately.
    storages: set[int] = set()
    for name, tensor in stored.items():
        storage = tensor.untyped_storage().data_ptr()
        stored[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return stored


def write(path: Path, weights: Mapping[str, Any], version: int) -> int:
    """Write the weights to `path` atomically: readers find all of them or no file. Return the size in bytes."""
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        files.create(temporary).close()
        save_file(deduplicate(weights), temporary, metadata={"format": "pt", "version": str(version)})
        files.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path.stat().st_size


def remove_old(paths: list[Path], keep: int) -> list[Path]:
    """Delete all but the newest `keep` files of an ordered list; return the remaining list."""
    for path in paths[:-keep]:
        path.unlink(missing_ok=True)
    return paths[-keep:]
