"""Give ART's padded, shifted inputs of a loss."""

import pytest
import torch

art = pytest.importorskip("art.loss")


def shifted(value: torch.Tensor, pad: float) -> torch.Tensor:
    """One position to the right, as ART's tensors stand before it shifts them to the left."""
    return torch.cat([torch.full_like(value[:, :1], pad), value[:, :-1]], 1)
