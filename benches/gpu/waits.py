"""Calls that make the host wait for a device, counted by name while entered; on any device.

torch itself can only tell on CUDA (`torch.cuda.set_sync_debug_mode`). The calls are the same on a CPU, so what would
wait there is found without one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"}
"""Operations whose result, or its shape, the host needs."""


class Waits(TorchDispatchMode):
    """`seen` is how often each operation of `WAITING` ran, an index by a mask among them."""

    supports_higher_order_operators = True  # flex_attention is one; operations inside it are not counted

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile while this counts; it would run flex_attention unfused otherwise."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "overloadpacket", func).__name__
        if name in WAITING:
            self.seen[name] += 1
        if name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1]):
            self.seen["index by a mask"] += 1
        return func(*args, **(kwargs or {}))
