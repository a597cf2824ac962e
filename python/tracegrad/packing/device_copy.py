"""Copy arrays to a device as torch tensors. torch is imported on use."""

from typing import Any

import numpy as np


def to_device(values: Any, device: Any) -> Any:
    """Move an array or tensor to `device` as a torch tensor, integers as int64; asynchronously to CUDA."""
    import torch

    tensor = copy_to_device(
        values if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values)), device
    )
    return tensor if tensor.is_floating_point() else tensor.long()


def copy_to_device(tensor: Any, device: Any) -> Any:
    """Move a tensor to `device` in its dtype; to CUDA asynchronously, from page-locked memory."""
    import torch

    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
