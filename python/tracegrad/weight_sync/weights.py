"""Weights as one safetensors file for each version: written whole or not at all, old ones removed.

Imports torch and safetensors on use.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.storage import files


def distinct(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors that are stored: one of each that share memory whole (tied heads), the first by order.

    Raises: ArgumentError for no weights, for what is no tensor, and for shards of one (FSDP).
    """
    import torch

    if not weights:
        raise ArgumentError("There are no weights to push. A server would keep its old ones. Pass the model's.")
    stored: dict[str, Any] = {}
    seen = set()
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"Weight {name!r} is a {type(tensor).__name__}, no tensor. Pass a mapping of tensors.")
        if hasattr(tensor, "full_tensor"):
            raise ArgumentError(
                f"Weight {name!r} is a shard of a tensor; a server needs it whole. Pass Run.weights(), which gathers."
            )
        memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        stored[name] = tensor.detach().contiguous()
    # Parts of one memory, as views of a fused weight are, are stored apart.
    storages: set[int] = set()
    for name, tensor in stored.items():
        storage = tensor.untyped_storage().data_ptr()
        stored[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return stored


def write(path: Path, weights: Mapping[str, Any], version: int) -> int:
    """Write the weights to `path`: whoever opens it finds all of them or no file. Returns bytes."""
    from safetensors.torch import save_file

    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        files.create(beside).close()
        save_file(distinct(weights), beside, metadata={"format": "pt", "version": str(version)})
        files.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path.stat().st_size


def remove_old(paths: list[Path], keep: int) -> list[Path]:
    """Remove all but the newest `keep` files of a list in order; the list that is left."""
    for path in paths[:-keep]:
        path.unlink(missing_ok=True)
    return paths[-keep:]
