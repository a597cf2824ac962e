"""Cases for peers' metrics: padded logprobs with everything that goes wrong, measured in two parts and merged."""

import ast
import importlib.util
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tracegrad.metrics import Rows
from tracegrad.objective.torch_loss import Terms

KINDS = ("random", "outliers", "empty rows", "single terms", "one row", "equal")


def drawn(kind, seed=0, shape=(9, 23)):
    """[B, T] float64 logprobs of the four policies, a mask with holes, advantages [B] of both signs and 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = 1 if kind == "one row" else shape[0]

    def noise(scale):
        return scale * torch.randn(rows, shape[1], generator=generator, dtype=torch.float64)

    rollout = -noise(1.0).abs() - 0.05
    old = rollout + noise(0.0 if kind == "equal" else 0.15)
    mask = torch.rand(rows, shape[1], generator=generator) > 0.3
    if kind == "outliers":
        old[0, 0], old[1, 1], old[2, :] = rollout[0, 0] + 24.0, rollout[1, 1] - 24.0, rollout[2, :] + 0.5
        mask[0, 0] = mask[1, 1] = True
    if kind == "empty rows":
        mask[0], mask[-1] = False, False
    if kind == "single terms":
        mask[:] = False
        mask[:, 3] = True
    theta, ref = old + noise(0.2), old + noise(0.3)
    if kind == "outliers":
        theta[1, 2:4], theta[-1, 4] = old[1, 2:4] + 1.5, old[-1, 4] + 2.0
        mask[1, 2:4] = mask[-1, 4] = True
    advantages = torch.linspace(-1.5, 2.0, rows, dtype=torch.float64)
    if rows > 1:
        advantages[rows // 3] = 0.0
    return SimpleNamespace(
        theta=theta, old=old, rollout=rollout, ref=ref, mask=mask, advantages=advantages[:, None].expand_as(old)
    )


def merged(data, measure):
    """measure(rows, part) of the two halves of the rows, merged: part(name) gives the terms of an array."""
    cut = len(data.mask) // 2
    parts = [slice(0, cut), slice(cut, None)] if cut else [slice(None)]
    found = [
        measure(Rows.padded(data.mask[here]), lambda x, here=here: np.asarray(x[here][data.mask[here]]))
        for here in parts
    ]
    return sum(found[1:], start=found[0]).values()


def compare(close, fired, subject, ours, theirs, rtol=1e-6):
    """The same names, and the same numbers; counts the shares that were neither 0 nor 1."""
    assert set(ours) == set(theirs), f"{subject}: {sorted(set(ours) ^ set(theirs))}"
    shares = re.compile("frac|clip|masked|mask_ratio|over_high|under_low|oob")
    fired(f"{subject} metrics", {name: 0 < value < 1 for name, value in theirs.items() if shares.search(name)})
    for name, value in theirs.items():
        if not math.isfinite(value):
            assert ours[name] == value or (math.isnan(ours[name]) and math.isnan(value)), f"{subject} {name}"
        else:
            # A deviation of equal values is the rounding of a difference of squares, in the peers as here.
            away = 1.0 if name.endswith("std") else 0.0
            close(f"{subject} metrics", ours[name] + away, value + away, rtol)


def assert_every_bound_was_crossed(counts, constant="$^"):
    """Of what `fired` counted: a share that is 0 or 1 in all cases would compare nothing."""
    if not counts:
        pytest.skip("none of the cases ran")
    assert [name for name, count in counts.items() if not count and not re.search(constant, name)] == []


def evaluated(objective, data, entropy=None):
    """Per-term values of our objective, [B, T]."""
    trace = torch.arange(len(data.mask))[:, None].expand_as(data.mask)
    terms = Terms(
        old=data.old, ref=data.ref, advantages=data.advantages, scale=data.mask.double(), trace=trace, keep=data.mask
    )
    return objective(data.theta, entropy, terms).per_term


def run_statement(module, first, scope):
    """Executes the one statement of an installed module's source that starts with `first`."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        pytest.skip(f"{module} is not installed")
    tree = ast.parse(Path(spec.origin).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and ast.unparse(node).startswith(first)]
    assert len(found) == 1, f"{len(found)} statements of {module} start with {first!r}"
    exec(compile(ast.Module(found, []), module, "exec"), scope)
