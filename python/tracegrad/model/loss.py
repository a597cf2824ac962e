"""The fused road from hidden states to a gradient: an objective evaluated where the logits are, never [U, V].

Here is `policy_loss`, and `batch_loss` with a model before it. The formula of a loss is not here: the same
`objective(logprobs, entropy, terms)` is called on the terms of a chunk of head rows, or on all of them.
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
    Name,
    Problem,
    Setting,
    check_shapes,
    choose,
    chunk_kind,
    inverse_of,
)
from tracegrad.model.lm_head_chunked import Rows, slices
from tracegrad.model.lm_head_fused import head_loss, wants_of
from tracegrad.model.structure import head_of
from tracegrad.objective import Objective
from tracegrad.objective.torch_loss import Loss, PerTerm, Terms
from tracegrad.packing import Batch


@dataclass(frozen=True)
class PolicyLoss(Loss):
    """A loss with what it was computed from. Tensors are [m], detached.

    Args:
        logprobs, entropy: of each term, nats.
        gradient: d loss / d logprob, what each term pulls with.
        plan: how the head was computed, and why.
    """

    logprobs: Tensor
    entropy: Tensor
    gradient: Tensor
    plan: HeadPlan


def batch_loss(
    model: nn.Module, batch: Batch, terms: Terms, objective: Objective, *, forward: Plan | None = None, **how: Any
) -> PolicyLoss:
    """The loss of a batch under a model: its packed forward, then `policy_loss` with its head.

    Args:
        model: a transformers causal LM, unmodified.
        batch: a row of a `Step`; moved to the model's device if it is not there.
        terms: of this batch, on the model's device: `step.terms(batch, corrected)`.
        objective: any.
        forward: the plan of `hidden_states`; default `forward_plan(model, batch)`.
        how: logits_dtype, chunk_bytes, epilogue and plan, as in `policy_loss`.
    """
    batch = batch.to(next(model.parameters()).device)
    head = head_of(model)
    hidden = read_states(model, batch, forward)
    known = {"bias": head.bias, "softcap": head.softcap, "logit_scale": head.logit_scale}
    return policy_loss(hidden, head.weight, batch, terms, objective, **known, **how)


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
    """objective(logprobs, entropy, terms) over a head without logits, the gradient computed with the loss.

    Equals `token_logprobs` followed by the objective, in fewer products with the weight: 6 U H V FLOPs for a loss that
    is known a chunk at a time (`objective.locality` "term"; "turn" and "trace" where chunks can end with them), 8 for
    any other, 4 where the head takes no gradient, 2 without any.

    Args:
        hidden: [U, H], `hidden_states(model, batch)[batch.read]`.
        weight: [V, H] of the head; used in the dtype of `hidden`.
        batch: target, inv_temperature [U] and row [m]; moved to the device of `hidden` if it is not there.
        terms: [m], on that device.
        objective: any. On a GPU one whose locality is "turn" or "trace" reads the places of the terms back once.
        bias, softcap, logit_scale, logits_dtype, chunk_bytes, epilogue: as in `token_logprobs`.
        plan: "no-grad", "recompute", "one-pass" or "frozen"; None chooses.

    Returns:
        the loss, differentiable once, and what it was computed from.

    Raises:
        ArgumentError: if shapes contradict one another, the terms lack what the objective needs, or the plan asked for
            is not possible.
    """
    batch = batch.to(hidden.device)
    check_shapes(hidden, weight, batch.target, bias)
    if len(batch.row) != len(terms.advantages):
        raise ArgumentError(
            f"the batch has {len(batch.row)} terms and `terms` {len(terms.advantages)}. Each term needs its own "
            "arrays. Pass step.terms(batch, corrected) of the same batch."
        )
    setting = Setting(softcap, float(logit_scale), logits_dtype, chunk_kind(hidden, logits_dtype, epilogue))
    rows = Rows(batch.target, inverse_of(batch.inv_temperature, hidden))
    problem = Problem.of(hidden.detach(), weight.detach(), None if bias is None else bias.detach(), rows, setting)
    wants = wants_of(hidden, weight, bias, objective.entropy_gradient)
    chunk_rows = problem.chunk_rows(chunk_bytes, wants)
    cuts = cuts_of(objective, batch.row, terms, len(hidden), chunk_rows)
    unfit = f"one {objective.locality} of the objective spans more than the {chunk_rows:,} rows of a chunk"
    chosen = choose(problem.size(), wants, chunk_rows, fits=cuts is not None, unfit=unfit, asked=plan)
    evaluation = _Evaluation(objective, terms, batch.row, len(hidden), wants.any)
    loss = head_loss(hidden, weight, bias, problem, chosen, cuts or (), evaluation)
    return PolicyLoss(loss=loss, **evaluation.told(), plan=chosen)


def cuts_of(objective: Objective, row: Tensor, terms: Terms, rows: int, chunk_rows: int) -> list[slice] | None:
    """Chunks of at most `chunk_rows` head rows that the objective can be evaluated on one by one; None if none are.

    A chunk may end where no turn or trace, whichever the objective aggregates over, has rows on both sides.
    """
    if rows <= chunk_rows:
        return [slice(0, rows)]
    if objective.locality == "term":
        return slices(rows, chunk_rows)
    if objective.locality == "batch" or terms.trace is None:
        return None
    place, whole = row.cpu().numpy(), terms.trace.cpu().numpy()
    keys = [whole] if objective.locality == "trace" or terms.turn is None else [whole, terms.turn.cpu().numpy()]
    segment = np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1)
    first, last = np.full(segment.max() + 1, rows), np.zeros(segment.max() + 1, np.int64)
    np.minimum.at(first, segment, place)
    np.maximum.at(last, segment, place)
    inside = np.zeros(rows + 1, np.int64)  # segments with rows on both sides of a cut before each row
    np.add.at(inside, first + 1, 1)
    np.add.at(inside, last + 1, -1)
    free = np.flatnonzero(np.cumsum(inside) == 0)
    found, start = [], 0
    while start < rows:
        end = int(free[np.searchsorted(free, start + chunk_rows, side="right") - 1])
        if end <= start:
            return None
        found.append(slice(start, end))
        start = end
    return found


class _Part(NamedTuple):
    """Some of the terms: which of [m], their arrays, the place of their rows in the chunk, and which of them count."""

    where: Any
    terms: Terms
    row: Tensor
    counts: Tensor | None = None


class _Evaluation:
    """The objective on the terms of a chunk of rows, its gradient by them, and what it told of each term."""

    def __init__(self, objective: Objective, terms: Terms, row: Tensor, rows: int, trained: bool) -> None:
        self._rows = rows
        self._objective, self._terms, self._row, self._trained = objective, terms, row, trained
        self._seen: dict[str, Tensor] = {}
        self._order: Tensor | None = None
        self._sorted: Tensor | None = None

    def __call__(self, here: slice, logp: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The loss of the rows `here` and its gradient by their logprobs and entropies."""
        part = self._part(here)
        bonus = self._objective.entropy_gradient
        with torch.set_grad_enabled(self._trained):
            leaf = logp[part.row].requires_grad_(self._trained)
            spread = entropy[part.row].requires_grad_(self._trained and bonus)
            found = self._objective(leaf, spread, part.terms)
        by_logp = by_entropy = None
        if self._trained:
            wanted = [leaf, spread] if bonus else [leaf]
            by_logp, by_entropy = (*torch.autograd.grad(found.loss, wanted, allow_unused=True), None)[:2]
        gradient = torch.zeros_like(leaf) if by_logp is None else by_logp
        told = {each.name: getattr(found.per_term, each.name) for each in fields(PerTerm)}
        for name, value in {**told, "logprobs": leaf, "entropy": spread, "gradient": gradient}.items():
            self._keep(name, part, value.detach())
        return found.loss.detach(), _per_row(by_logp, part, logp), _per_row(by_entropy, part, logp)

    def told(self) -> dict[str, Any]:
        """Of all terms: `PerTerm`, logprobs, entropy, gradient."""
        per_term = PerTerm(**{each.name: self._seen.pop(each.name) for each in fields(PerTerm)})
        return {"per_term": per_term, **self._seen}

    def _part(self, here: slice) -> _Part:
        if here == slice(0, self._rows):
            return _Part(slice(None), self._terms, self._row)
        return self._masked(here) if self._row.is_cuda else self._chosen(here)

    def _chosen(self, here: slice) -> _Part:
        """The terms of these rows, picked out, in their own order: what runs along a trace looks at it."""
        if self._sorted is None:
            self._sorted, self._order = torch.sort(self._row, stable=True)
        start, end = torch.searchsorted(self._sorted, torch.tensor([here.start, here.stop])).tolist()
        assert self._order is not None
        where = self._order[start:end].sort().values
        return _Part(where, self._terms.select(where), self._row[where] - here.start)

    def _masked(self, here: slice) -> _Part:
        """All terms, those of other rows as padding: how many they are would have to be read back from the device."""
        counts = (self._row >= here.start) & (self._row < here.stop)
        scales = {key: torch.where(counts, value, 0) for key, value in (self._terms.scales or {}).items()}
        keep = None if self._terms.keep is None else self._terms.keep.bool() & counts
        terms = replace(self._terms, scale=torch.where(counts, self._terms.scale, 0), scales=scales, keep=keep)
        return _Part(slice(None), terms, (self._row - here.start).clamp(0, here.stop - here.start - 1), counts)

    def _keep(self, name: str, part: _Part, value: Tensor) -> None:
        whole = self._seen.get(name)
        if whole is None:
            whole = self._seen[name] = value.new_zeros(len(self._row))
        if part.counts is None:
            whole[part.where] = value
        else:
            self._seen[name] = torch.where(part.counts, value, whole)


def _per_row(by_term: Tensor | None, part: _Part, like: Tensor) -> Tensor | None:
    """The gradients of the terms, summed over those that share a row."""
    return None if by_term is None else torch.zeros_like(like).index_add_(0, part.row, by_term)
