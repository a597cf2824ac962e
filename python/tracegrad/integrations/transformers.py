"""A plain transformers.Trainer on recorded traces: data, collator and `compute_loss_func`. Run against 5.23.0.

Here is `TraceLoss`. Denominators come from the Trainer's `num_items_in_batch`, which counts the labels of a whole
optimizer step over micro-batches and ranks: the collator labels what the objective's reduction counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike
from torch import Tensor

from tracegrad import presets
from tracegrad.algebra import Missing, Objective
from tracegrad.batch import Totals
from tracegrad.errors import ArgumentError
from tracegrad.integrations import peer
from tracegrad.integrations.padded import Recorded
from tracegrad.sequence import Sequences

VERSIONS = "transformers==5.23.0"
_IGNORED = -100


class TraceLoss:
    """`Trainer(model, args, train_dataset=x.dataset, data_collator=x.collate, compute_loss_func=x)`.

    A row of the dataset is a trace, and stands in a micro-batch with all its branches. `old` is the policy before the
    optimizer step, which is theta's own value: a clip has nothing to clip, weights and gates have old/rollout. An
    objective on theta/rollout clips. Take `integrations.trl` or our learner to keep `old` over several steps.

    Args:
        sequences: from `align`, or `Sequences.from_arrays`.
        advantages: [R] by trace or [M] by term.
        objective: without what needs the whole step beside its denominators; `reduce.per` token, trace or constant.
        missing: as in `correct`.

    Raises:
        ArgumentError: for another objective, or a Trainer without compute_loss_func.
    """

    def __init__(
        self,
        sequences: Sequences,
        advantages: ArrayLike,
        objective: Objective = presets.DAPO,
        *,
        missing: Missing = "mask",
    ) -> None:
        peer("transformers", VERSIONS, "Trainer._get_num_items_in_batch")
        _check(objective)
        self.recorded = Recorded.of(sequences, advantages, objective, missing)
        self.dataset: list[int] = self.recorded.traces

    def collate(self, traces: Sequence[int]) -> dict[str, Tensor]:
        """A micro-batch: ids and attention [B, S] padded on the right, and the trace's number where labels count."""
        padded = self.recorded.padded(traces, "right")
        trace = padded.origin_trace(self.recorded)
        labels = padded.ids.new_full(padded.ids.shape, _IGNORED)
        return {"input_ids": padded.ids, "attention_mask": padded.attention, "labels": labels}

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """The micro-batch's share of the loss of its optimizer step."""
