"""Give padded rows of answers that were cut off."""

from typing import Any

import numpy as np
import torch

from padded import hard
from tracegrad import recipes
from tracegrad.alignment.sequences import Sequences
from tracegrad.trainer.step import correct_step
from tracegrad.trainer.steps import TrainingData

STOP, PAD = 2, 0

REWARDS = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.5, 0.0, 2.0, 1.0], dtype=torch.float64)

CUT = torch.tensor([False, True, False, False, True, True, False, True])  # rows 4 and 5 are a whole group


def padded() -> dict[str, Any]:
    """Eight traces in four groups, none without a term."""
    data = hard(1)
    data["mask"][1, :5] = True
    return data


def recorded(data: dict[str, Any]) -> Sequences:
    """The same as a run reads them: a prompt of one token, then the row up to its last term."""
    rows, width = data["mask"].shape
    trainable = torch.cat([torch.zeros(rows, 1, dtype=torch.bool), data["mask"]], 1)
    ids = np.where(trainable, np.arange(width + 1) + 5, 3)
    ids[:, -1] = np.where(CUT, 9, STOP)
    return Sequences.from_arrays(
        ids.reshape(-1),
        np.arange(rows + 1) * (width + 1),
        np.full(ids.size, np.nan),
        trainable.reshape(-1).numpy(),
        group=np.arange(rows) // 2,
        rewards=REWARDS,
        ending=np.where(CUT, 2, 1),
    )


def ours(
    recipe: recipes.Recipe, data: dict[str, Any], sequences: Sequences | None = None
) -> tuple[torch.Tensor, torch.Tensor, TrainingData]:
    """Loss, and gradient by position, of the one step that a run with this recipe takes."""
    chosen, _ = recipe.resolve(overrides=[("data.holdout", 0), ("pack.tokens_per_row", 1000)])
    sequences = sequences or recorded(data)
    feed = TrainingData.of(sequences, recipe.objective, chosen)
    (step,) = feed.steps(0)
    row, column = np.divmod(step.origin, data["mask"].shape[1] + 1)
    at = (torch.from_numpy(row), torch.from_numpy(column - 1))
    needs = recipe.objective.requirements
    step = step.with_logprobs(**{name: data[name][at].numpy() for name in ("old", "ref") if getattr(needs, name)})
    corrected = correct_step(step, recipe.objective, chosen.train.missing_logprobs)
    logprobs, loss = data["logprobs"].clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
    for batch in step.batches:
        own = tuple(index[torch.from_numpy(batch.term).long()] for index in at)
        entropy = data["entropy"][own] if needs.entropy else None
        loss = loss + recipe.objective(logprobs[own], entropy, step.terms(batch, corrected)).loss
    loss.backward()
    return loss.detach(), logprobs.grad, feed
