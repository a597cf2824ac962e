"""What lets the code for CUDA run on a CPU, so that its mistakes are found before a device is at hand.

Called by `run.py --rehearse` and by tests/gpu with --rehearse; tests/gpu call `fused_attention_alone` on a device.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.nn.attention import flex_attention as torchs

from tracegrad.model import attention


def _anywhere(*_: Any) -> None:
    """Take any device and gradient, in the place of a check of torch's. Dynamo traces it."""


@contextmanager
def flex_attention_on_the_cpu(backend: Any = "aot_eager") -> Iterator[None]:
    """Run tracegrad's compiled flex_attention on a CPU, with a gradient.

    Dynamo traces it, AOTAutograd differentiates it and both check it as on CUDA; graphs are counted and limited alike.
    Only Inductor is left out, whose kernels for a CPU have no gradient. torch refuses gradients there for that reason.

    Args:
        backend: of torch.compile; one that ends in aot_eager.
    """
    with mock.patch.object(attention, "BACKEND", backend), mock.patch.object(torchs, "_validate_device", _anywhere):
        yield


@contextmanager
def fused_attention_alone() -> Iterator[None]:
    """Raise an error where flex_attention runs in its unfused form, which stores tables of [heads, T, T]."""

    def unfused(*_: Any, **__: Any) -> Any:
        raise AssertionError("flex_attention ran unfused: with a float32 table of [heads, T, T], by math_attention.")

    # torch._higher_order_ops.flex_attention is also a function of that name, which an import statement would find.
    operator = importlib.import_module("torch._higher_order_ops.flex_attention")
    with mock.patch.object(operator, "math_attention", unfused):
        yield
