"""Check `reward_kl.*`, rows of test_every_option.py."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from tiny import sampled, tiny_model
from tracegrad.objective import presets
from tracegrad.trainer.advantages import RewardKl
from tracegrad.trainer.steps import TrainingData
from watched import told


@cache
def one_batch() -> SimpleNamespace:
    found = sampled(tiny_model())
    feed = TrainingData.of(found, presets.DAPO, told(data__holdout=0, train__groups_per_step=100))
    old = np.full(len(found.terms), -1.0, np.float32)
    ref = -1.0 + 0.5 * np.sin(np.arange(len(found.terms)), dtype=np.float32)
    trace = np.repeat(found.trace, np.diff(found.cu_seqlens))[found.terms]
    return SimpleNamespace(feed=feed, trace=trace, old=old, ref=ref, steps=feed.steps(0))


def charge(**changes) -> RewardKl:
    """One batch of the tiny model's traces, charged."""
    one = one_batch()
    chosen = told(**{f"reward_kl__{name}": value for name, value in {"coef": 0.5, **changes}.items()})
    found = RewardKl(one.feed.source, one.feed.rewards, one.feed.eligible, chosen)
    found.batch(one.steps[0].totals.traces, one.trace, one.old, one.ref)
    return found


def reward_kl(_: Path) -> None:
    """A row of test_every_option.py for each option: what the batch then pays, and what the next one would."""
    plain, same = charge(), one_batch().feed.advantages
    assert not np.allclose(plain.advantages, same, atol=1e-2)
    np.testing.assert_allclose(plain.advantages - same, (charge(coef=1.0).advantages - same) / 2, atol=1e-6)
    assert charge(kind="k2").kl > abs(plain.kl)
    assert charge(kind="abs", cap=0.1).kl < 0.1 < charge(kind="abs").kl
    assert plain.following == 0.5
    traces_ = one_batch().steps[0].totals.traces
    grown = charge(kind="abs", target_kl=0.01, horizon=100.0)
    assert grown.following == pytest.approx(0.5 * (1 + 0.2 * traces_ / 100))
    assert charge(kind="abs", target_kl=0.01).following == pytest.approx(0.5 * (1 + 0.2 * traces_ / 10_000))
