"""Compute the loss of an objective and its gradient from hidden states, without a table of logits [U, V].

`policy_loss` starts from hidden states, and `batch_loss` from a model. The formulas of losses are in the objective.
`objective(logprobs, entropy, terms)` is called on the trained tokens of each chunk of logit rows, or on all of them.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tracegrad.errors import ArgumentError
from tracegrad.model.forward import Plan, read_states
from tracegrad.model.lm_head import (
    Epilogue,
    HeadPlan,
    HeadProblem,
    HeadSettings,
    Name,
    check_shapes,
    choose_plan,
    chunk_kind,
    inverse_of,
)
from tracegrad.model.lm_head_chunked import RowGradients, Rows, Statistics, slices
from tracegrad.model.lm_head_fused import head_loss, wants_of
from tracegrad.model.structure import head_of
from tracegrad.objective import Objective
from tracegrad.objective.torch_loss import Loss, PerTerm, Terms
from tracegrad.packing import Batch


@dataclass(frozen=True)
class PolicyLoss(Loss):
    """A loss with the numbers it was computed from. Tensors are [m], detached.

    Args:
        logprobs, entropy: of each trained token, nats.
        gradient: d loss / d logprob of each trained token. With a penalty over the vocabulary, it is the sum of the
            gradients by `logprobs` and by `vocabulary_logprobs`.
        plan: how the head was computed, and why.
        vocabulary_logprobs: of each trained token over the whole vocabulary, without penalties of the sampler. None if
            no penalty reads them, or if they equal `logprobs`.

    >>> from tracegrad import Sequences, correct, pack
    >>> from tracegrad.objective import Objective, PolicyGradient
    >>> nan = float("nan")
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [nan, -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> terms = step.terms(step.batches[0], correct(None, step.rollout_logprobs, trace=step.trace))
    >>> # 8 tokens of equal probability.
    >>> hidden, weight = torch.zeros(2, 4, requires_grad=True), torch.zeros(8, 4)
    >>> result = policy_loss(hidden, weight, step.batches[0], terms, Objective(PolicyGradient()))
    >>> # log(1 / 8), log(8), -A / 2 tokens
    >>> result.logprobs, result.entropy, result.gradient
    (tensor([-2.0794, -2.0794]), tensor([2.0794, 2.0794]), tensor([-0.5000, -0.5000]))
    >>> result.plan.name  # the weight needs no gradient
    'frozen'
    """

    logprobs: Tensor
    entropy: Tensor
    gradient: Tensor
    plan: HeadPlan
    vocabulary_logprobs: Tensor | None = None


def batch_loss(
    model: nn.Module, batch: Batch, terms: Terms, objective: Objective, *, forward: Plan | None = None, **how: Any
) -> PolicyLoss:
    """Compute the loss of a batch under a model: a packed forward pass, then `policy_loss` with the model's head.

    Args:
        model: a transformers causal LM, unmodified.
        batch: a row of a `Step`. It is moved to the model's device if needed.
        terms: the trained tokens of this batch, on the model's device: `step.terms(batch, corrected)`.
        objective: any objective.
        forward: the plan of `hidden_states`; default `forward_plan(model, batch)`.
        how: logits_dtype, chunk_bytes, epilogue and plan, as in `policy_loss`.

    Raises:
        ArgumentError: as `policy_loss` and `hidden_states`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tracegrad import Sequences, correct, pack
    >>> from tracegrad.objective import Objective, PolicyGradient
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **size))
    >>> # Each of the 8 tokens gets probability 1 / 8.
    >>> _ = model.lm_head.weight.data.zero_()
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [np.nan, -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> terms = step.terms(step.batches[0], correct(None, step.rollout_logprobs, trace=step.trace))
    >>> result = batch_loss(model, step.batches[0], terms, Objective(PolicyGradient()))
    >>> round(result.loss.item(), 4)  # -log(1 / 8)
    2.0794
    >>> result.loss.backward()
    """
    batch = batch.to(next(model.parameters()).device)
    head = head_of(model)
    hidden = read_states(model, batch, forward)
    return policy_loss(
        hidden,
        head.weight,
        batch,
        terms,
        objective,
        bias=head.bias,
        softcap=head.softcap,
        logit_scale=head.logit_scale,
        **how,
    )


def policy_loss(
    hidden: Tensor,
    weight: Tensor,
    batch: Batch,
    terms: Terms,
    objective: Objective,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    chunk_bytes: int | None = None,
    epilogue: Epilogue | None = None,
    plan: Name | None = None,
) -> PolicyLoss:
    """Compute objective(logprobs, entropy, terms) and its gradient from hidden states, without all logits in memory.

    The result equals `token_logprobs` followed by the objective, with fewer products with the weight. A loss that can
    be evaluated chunk by chunk costs 6 U H V FLOPs: if `objective.locality` is "term", or if it is "turn" or "trace"
    and chunks can end with them. Any other loss costs 8 U H V, a head without gradient 4, a loss without gradient 2.

    Args:
        hidden: [U, H], `hidden_states(model, batch)[batch.read]`.
        weight: [V, H] of the head; used in the dtype of `hidden`.
        batch: target, inv_temperature [U] and row [m]. It is moved to the device of `hidden` if needed.
        terms: the trained tokens, [m], on that device.
        objective: any objective. On a GPU, one whose locality is "turn" or "trace" copies the positions of the trained
            tokens to the host once.
        bias, softcap, logit_scale, logits_dtype, chunk_bytes, epilogue: as in `token_logprobs`.
        plan: "no-grad", "recompute", "one-pass" or "frozen"; None chooses.

    Returns:
        the loss, differentiable once, and the numbers it was computed from.

    Raises:
        ArgumentError: if shapes do not match, the terms lack inputs of the objective, or the plan is not possible.

    >>> from tracegrad import Sequences, correct, pack
    >>> from tracegrad.objective import Objective, PolicyGradient
    >>> nan = float("nan")
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [nan, -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> terms = step.terms(step.batches[0], correct(None, step.rollout_logprobs, trace=step.trace))
    >>> # 8 tokens of equal probability.
    >>> hidden, weight = torch.zeros(2, 4, requires_grad=True), torch.zeros(8, 4)
    >>> result = policy_loss(hidden, weight, step.batches[0], terms, Objective(PolicyGradient()))
    >>> round(result.loss.item(), 4)  # -log(1 / 8)
    2.0794
    >>> result.loss.backward()
    """
    batch = batch.to(hidden.device)
    check_shapes(hidden, weight, batch.target, bias)
    if len(batch.logit_row) != len(terms.advantages):
        raise ArgumentError(
            f"TG-MODEL-013: the batch has {len(batch.logit_row)} trained tokens and `terms` has "
            f"{len(terms.advantages)}. Each needs one entry in every array. Pass step.terms(batch, corrected) of the "
            "same batch."
        )
    setting = HeadSettings(softcap, float(logit_scale), logits_dtype, chunk_kind(hidden, logits_dtype, epilogue))
    over_support = objective.entropy is not None and objective.entropy.over == "support"
    has_both = batch.support is not None and objective.requirements.ref_over == "vocabulary"
    rows = Rows(batch.target, inverse_of(batch.inv_temperature, hidden), batch.support, over_support, has_both)
    problem = HeadProblem.of(hidden.detach(), weight.detach(), None if bias is None else bias.detach(), rows, setting)
    wants = wants_of(hidden, weight, bias, entropy=objective.entropy_gradient, vocabulary_logp=has_both)
    chunk_rows = problem.chunk_rows(chunk_bytes, wants)
    cuts = cuts_of(objective, batch.logit_row, terms, len(hidden), chunk_rows)
    unfit = f"one {objective.locality} of the objective spans more than the {chunk_rows:,} rows of a chunk"
    chosen = choose_plan(problem.size(), wants, chunk_rows, fits=cuts is not None, reason_unfit=unfit, requested=plan)
    evaluation = _Evaluation(objective, terms, batch.logit_row, len(hidden), wants.any, has_both)
    loss = head_loss(hidden, weight, bias, problem, chosen, cuts or (), evaluation)
    return PolicyLoss(loss=loss, **evaluation.result(), plan=chosen)


def cuts_of(objective: Objective, row: Tensor, terms: Terms, rows: int, chunk_rows: int) -> list[slice] | None:
    """Return chunks of at most `chunk_rows` logit rows on which the objective can be evaluated; None if impossible.

    A chunk must not split a turn or a trace, whichever the objective aggregates over.
    """
    if rows <= chunk_rows:
        return [slice(0, rows)]
    if objective.locality == "term":
        return slices(rows, chunk_rows)
    if objective.locality == "batch" or terms.trace is None:
        return None
    position, trace = row.cpu().numpy(), terms.trace.cpu().numpy()
    keys = [trace] if objective.locality == "trace" or terms.turn is None else [trace, terms.turn.cpu().numpy()]
    segment = np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1)
    first, last = np.full(segment.max() + 1, rows), np.zeros(segment.max() + 1, np.int64)
    np.minimum.at(first, segment, position)
    np.maximum.at(last, segment, position)
    crossing = np.zeros(rows + 1, np.int64)  # segments with rows on both sides of a cut before each row
    np.add.at(crossing, first + 1, 1)
    np.add.at(crossing, last + 1, -1)
    allowed = np.flatnonzero(np.cumsum(crossing) == 0)
    chunks, start = [], 0
    while start < rows:
        end = int(allowed[np.searchsorted(allowed, start + chunk_rows, side="right") - 1])
        if end <= start:
            return None
        chunks.append(slice(start, end))
        start = end
    return chunks


class _Selection(NamedTuple):
    """Trained tokens of a chunk.

    Args:
        where: their index in [m].
        terms: their arrays.
        row: their rows in the chunk.
        counts: the mask of those that belong to the chunk; None if all do.
    """

    where: Any
    terms: Terms
    row: Tensor
    counts: Tensor | None = None


class _Evaluation:
    """Evaluates the objective and its gradient on chunks of rows, and collects the values of each trained token."""

    def __init__(
        self, objective: Objective, terms: Terms, row: Tensor, rows: int, trained: bool, has_both: bool
    ) -> None:
        self._rows, self._has_both = rows, has_both
        self._objective, self._terms, self._row, self._trained = objective, terms, row, trained
        self._values: dict[str, Tensor] = {}
        self._order: Tensor | None = None
        self._sorted: Tensor | None = None

    def __call__(self, here: slice, statistics: Statistics) -> tuple[Tensor, RowGradients]:
        """Return the loss of the rows `here` and its gradients by their statistics."""
        selection, logp = self._selection(here), statistics.logp
        uses_entropy, of_vocabulary = self._objective.entropy_gradient, statistics.vocabulary_logp
        with torch.set_grad_enabled(self._trained):
            leaf = logp[selection.row].requires_grad_(self._trained)
            entropy_leaf = statistics.entropy[selection.row].requires_grad_(self._trained and uses_entropy)
            other_leaf = None
            if of_vocabulary is not None:
                other_leaf = of_vocabulary[selection.row].requires_grad_(self._trained)
            result = self._objective(leaf, entropy_leaf, selection.terms, vocabulary_logprobs=other_leaf)
        by: dict[str, Tensor | None] = {}
        if self._trained:
            inputs = {"logp": leaf, "entropy": entropy_leaf if uses_entropy else None, "vocabulary_logp": other_leaf}
            inputs = {name: value for name, value in inputs.items() if value is not None}
            gradients = torch.autograd.grad(result.loss, list(inputs.values()), allow_unused=True)
            by = dict(zip(inputs, gradients, strict=True))
        gradient = torch.zeros_like(leaf)
        for part in (by.get("logp"), by.get("vocabulary_logp")):
            gradient = gradient if part is None else gradient + part
        values = {field.name: getattr(result.per_term, field.name) for field in fields(PerTerm)}
        values |= {"logprobs": leaf, "entropy": entropy_leaf, "gradient": gradient}
        if self._has_both:
            values["vocabulary_logprobs"] = leaf if other_leaf is None else other_leaf
        for name, value in values.items():
            self._store(name, selection, value.detach())
        rows = {name: _per_row(part, selection, logp) for name, part in by.items() if part is not None}
        return result.loss.detach(), RowGradients(**{"logp": torch.zeros_like(logp), **rows})

    def result(self) -> dict[str, Any]:
        """Return `PerTerm` and the other values of all trained tokens, as keyword arguments."""
        per_term = PerTerm(**{field.name: self._values.pop(field.name) for field in fields(PerTerm)})
        return {"per_term": per_term, **self._values}

    def _selection(self, here: slice) -> _Selection:
        if here == slice(0, self._rows):
            return _Selection(slice(None), self._terms, self._row)
        return self._mask(here) if self._row.is_cuda else self._select(here)

    def _select(self, here: slice) -> _Selection:
        """Select the trained tokens of these rows, in their original order, which objectives over a trace read."""
        if self._sorted is None:
            self._sorted, self._order = torch.sort(self._row, stable=True)
        start, end = torch.searchsorted(self._sorted, torch.tensor([here.start, here.stop])).tolist()
        assert self._order is not None
        index = self._order[start:end].sort().values
        return _Selection(index, self._terms.select(index), self._row[index] - here.start)

    def _mask(self, here: slice) -> _Selection:
        """Return all trained tokens, with those of other rows masked.

        A selection would have to copy their number from the device to the host.
        """
        counts = (self._row >= here.start) & (self._row < here.stop)
        scales = {key: torch.where(counts, value, 0) for key, value in (self._terms.scales or {}).items()}
        keep = None if self._terms.keep is None else self._terms.keep.bool() & counts
        terms = replace(self._terms, scale=torch.where(counts, self._terms.scale, 0), scales=scales, keep=keep)
        return _Selection(slice(None), terms, (self._row - here.start).clamp(0, here.stop - here.start - 1), counts)

    def _store(self, name: str, selection: _Selection, value: Tensor) -> None:
        total = self._values.get(name)
        if total is None:
            total = self._values[name] = value.new_zeros(len(self._row))
        if selection.counts is None:
            total[selection.where] = value
        else:
            self._values[name] = torch.where(selection.counts, value, total)


def _per_row(by_term: Tensor, selection: _Selection, like: Tensor) -> Tensor:
    """Return the gradient of each row: the sum over the trained tokens that share it."""
    return torch.zeros_like(like).index_add_(0, selection.row, by_term)
