"""Moves arrays to a device. torch is imported on use. Called by `Batch.to` and the learner."""

from __future__ import annotations

from typing import Any

import numpy as np


def moved(values: Any, device: Any) -> Any:
    """An array or tensor as a torch tensor on `device`, integers as int64; to CUDA by page-locked memory, no wait."""
    import torch

    tensor = sent(values if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values)), device)
    return tensor if tensor.is_floating_point() else tensor.long()


def sent(tensor: Any, device: Any) -> Any:
    """A tensor on `device`, in its dtype; to CUDA by page-locked memory, no wait."""
    import torch

    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
