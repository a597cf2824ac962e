"""A training run under watch: what each step was given, what it did to the parameters, and what was written."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from tiny import sampled, tiny_model
from tracegrad import config
from tracegrad.alignment.sequences import Sequences
from tracegrad.objective import Objective, presets
from tracegrad.trainer import train, trainer
from tracegrad.trainer.step import optimizer_step

GROUPS, SIZE = 12, 4


def told(**changes: Any) -> config.Config:
    """Three steps an epoch, of three groups each; a quarter of the groups is held out. Dots are double underscores."""
    base = {"data.holdout": 0.25, "train.groups_per_step": 3, "optimizer.lr": 3e-3}
    return config.load(overrides=[*base.items(), *((k.replace("__", "."), v) for k, v in changes.items())])


def traces() -> Sequences:
    """Traces of the tiny model; every seventh term has no recorded logprob, versions are 0 to 4."""
    found = sampled(tiny_model(), groups=GROUPS, size=SIZE)
    version = np.where(found.trainable, np.arange(found.tokens) % 5, -1).astype(np.int32)
    logprobs = found.rollout_logprobs.copy()
    logprobs[found.terms[::7]] = np.nan
    return replace(found, version=version, rollout_logprobs=logprobs)


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def watched(data: Sequences, out: Path, *, objective: Objective = presets.DAPO, **changes: Any) -> SimpleNamespace:
    """A run: what it came to, its model, and its steps, each with `before`, `after`, `gradient` (clipped) and `lr`."""
    steps: list[SimpleNamespace] = []

    def taken(target, step, given, optimizer, **how):
        before = parameters(target.model)
        outcome = optimizer_step(target, step, given, optimizer, **how)
        gradient = {name: p.grad.clone() for name, p in target.model.named_parameters() if p.grad is not None}
        rate = optimizer.param_groups[0]["lr"]
        kept = {"before": before, "after": parameters(target.model), "gradient": gradient, "lr": rate}
        steps.append(SimpleNamespace(step=step, objective=given, outcome=outcome, model=target.model, **kept, **how))
        return outcome

    model, chosen = tiny_model(), told(**changes)
    with mock.patch.object(trainer, "optimizer_step", taken):
        done = train(data, model, objective=objective, out=out, config=chosen, sinks=None, log=lambda _: None)
    return SimpleNamespace(done=done, steps=steps, model=model, out=out, data=data)
