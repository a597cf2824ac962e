"""ART's advantages beside ours: population standard deviation, 1e-6."""

from types import SimpleNamespace

import numpy as np
import pytest

from tracegrad.advantage import group_mean

tokenize = pytest.importorskip("art.preprocessing.tokenize")


@pytest.mark.parametrize("scale", [True, False])
def test_group_advantages(close, scale, monkeypatch):
    seen = []
    monkeypatch.setattr(tokenize, "tokenize_trajectory", lambda *args, **_: seen.append(args[3]))
    monkeypatch.setattr(tokenize, "History", SimpleNamespace)
    rewards = np.random.default_rng(0).normal(size=(5, 7))
    groups = [
        [SimpleNamespace(reward=r, messages_and_choices=[], tools=None, additional_histories=[]) for r in row]
        for row in rewards
    ]
    options = {"shuffle_group_trajectories": False, "drop_zero_advantage_trajectories": False}
    list(tokenize.tokenize_trajectory_groups(None, groups, True, scale, **options))
    ours = group_mean(
        rewards.reshape(-1), np.repeat(np.arange(5), 7), **({"scale": "std", "ddof": 0, "eps": 1e-6} if scale else {})
    )
    close(f"ART advantages, scaled {scale}", ours, seen, 1e-6)
