"""Comparisons with peers' own code; those that the extra `test` does not install are skipped where they are absent.

Every comparison goes through `close`, which keeps the worst difference of each subject, and tells `fired` which
branches of the method did something on its inputs. Both are printed at the end.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
WORST: dict[str, list[float]] = {}
FIRED: dict[str, Counter[str]] = {}


@pytest.fixture
def close():
    """close(subject, ours, theirs, rtol): asserts, and keeps the largest relative difference.

    `floor` is the magnitude below which a difference counts as absolute.
    """

    def compare(subject, ours, theirs, rtol=1e-7, floor=1e-6):
        ours, theirs = (torch.as_tensor(value, dtype=torch.float64) for value in (ours, theirs))
        difference = ((ours - theirs).abs() / theirs.abs().clamp(min=floor)).max().item() if ours.numel() else 0.0
        WORST.setdefault(subject, []).append(difference)
        assert difference <= rtol, f"{subject}: {difference:.3g}"

    return compare


@pytest.fixture
def fired():
    """fired(peer, {branch: whether it did something in this case}); without a mapping the counts so far."""

    def count(peer, branches=None):
        counts = FIRED.setdefault(peer, Counter())
        counts.update({name: int(torch.as_tensor(hit).any()) for name, hit in (branches or {}).items()})
        return counts

    return count


def pytest_terminal_summary(terminalreporter):
    for subject, differences in sorted(WORST.items()):
        terminalreporter.write_line(f"{subject}: {len(differences)} cases, worst difference {max(differences):.1e}")
    for peer, counts in sorted(FIRED.items()):
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        terminalreporter.write_line(f"{peer}, cases in which each branch fired: {told}")
