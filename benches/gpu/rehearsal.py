"""What lets the code for CUDA run on a CPU, so that its mistakes are found before a device is at hand.

Called by `run.py --rehearse` and by tests/gpu with --rehearse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def flex_attention_on_the_cpu() -> Iterator[None]:
    """flex_attention uncompiled and with a gradient, for transformers models.

    torch refuses gradients of flex_attention on a CPU because its compiled form has none there. The eager form has, and
    refuses what the compiled one refuses on CUDA, such as queries and values of two dtypes.
    """
    from torch.nn.attention import flex_attention as torchs
    from torch.utils._python_dispatch import _disable_current_modes
    from transformers.integrations import flex_attention as theirs

    def uncompiled(query: Any, key: Any, value: Any, training: bool = False, **how: Any) -> Any:
        # What counts operations or memory cannot look into it, and a compiled kernel is given the dtypes as they are.
        with _disable_current_modes(), torch.autocast("cpu", enabled=False):
            return torchs.flex_attention(query, key, value, **how)

    kept = theirs.compile_friendly_flex_attention, torchs._validate_device
    theirs.compile_friendly_flex_attention = uncompiled
    torchs._validate_device = lambda *_: None
    try:
        yield
    finally:
        theirs.compile_friendly_flex_attention, torchs._validate_device = kept
