"""Comparisons with peers that the extra `test` does not install; run by name: `pytest tests/peers/parity_*.py`.

Every comparison goes through `close`, which keeps the worst difference of each subject for the summary.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
WORST: dict[str, list[float]] = {}


@pytest.fixture
def close():
    """close(subject, ours, theirs, rtol): asserts, and keeps the largest relative difference."""

    def compare(subject, ours, theirs, rtol=1e-7):
        ours, theirs = (torch.as_tensor(value, dtype=torch.float64) for value in (ours, theirs))
        difference = ((ours - theirs).abs() / theirs.abs().clamp(min=1e-6)).max().item() if ours.numel() else 0.0
        WORST.setdefault(subject, []).append(difference)
        assert difference <= rtol, f"{subject}: {difference:.3g}"

    return compare


def pytest_terminal_summary(terminalreporter):
    for subject, differences in sorted(WORST.items()):
        terminalreporter.write_line(f"{subject}: {len(differences)} cases, worst difference {max(differences):.1e}")
