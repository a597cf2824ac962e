"""Logprobs over the sampler's support, against autograd on the masked softmax."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tracegrad import Sequences, correct, pack
from tracegrad.errors import ArgumentError
from tracegrad.model import policy_loss, token_logprobs
from tracegrad.model.lm_head import HeadProblem, HeadSettings
from tracegrad.model.lm_head_chunked import Chunk, Rows, SupportChunk
from tracegrad.objective import EntropyBonus, Importance, Objective, Penalty, PolicyGradient, Ratio, Terms
from tracegrad.packing import LogitChanges, Support

ROWS, WIDTH, VOCABULARY = 9, 5, 23


def case(dtype=torch.float64, seed=0, penalized=False):
    """Return hidden states, weight, targets, temperatures, and supports of no, one, some and all ids.

    If `penalized`, the logits of the ids are changed, and those of four ids of two rows without support.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    target = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    inverse = torch.rand(ROWS, generator=generator, dtype=dtype) + 0.5
    rows = []
    for row, size in enumerate([0, 1, 2, 0, 7, VOCABULARY, 3, 0, 1]):
        others = [i for i in torch.randperm(VOCABULARY, generator=generator).tolist() if i != target[row]]
        rows.append(sorted([int(target[row]), *others[: size - 1]]) if size else [])
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    restricted = np.diff(offsets) > 0
    if penalized:
        rows[0], rows[3] = [2, 7, int(target[0]), 9], [1, 3, 5, 8]
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    ids = np.concatenate([np.array(row, np.int32) for row in rows])
    changes = None
    if penalized:
        rng = np.random.default_rng(seed)
        before, after = (rng.choice([0.0, 0.7, -1.3], len(ids)).astype(np.float32) for _ in range(2))
        changes = LogitChanges(before, rng.choice([1.0, 1.5], len(ids)).astype(np.float32), after)
    return hidden, weight, target, inverse, Support(ids, offsets, restricted, changes)


def changed(logits, support):
    """Return a table of logits with the changes of the support, by their definition."""
    if support.changes is None:
        return logits
    for row in range(len(logits)):
        for at in range(support.offsets[row], support.offsets[row + 1]):
            before, factor, after = (float(column[at]) for column in support.changes)
            place = torch.zeros_like(logits, dtype=torch.bool)
            place[row, int(support.ids[at])] = True
            y = logits + before
            logits = torch.where(place, torch.where(y > 0, y / factor, y * factor) + after, logits)
    return logits


def masked(hidden, weight, target, inverse, support, *, bias=None, softcap=None, scale=1.0, over_support=False):
    """Return logprobs and entropies by a softmax over a table in which ids outside of the support are -inf."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    plain, scores = logits * inverse[:, None], changed(logits, support) * inverse[:, None]
    outside = torch.zeros_like(scores, dtype=torch.bool)
    for row in range(len(target)):
        ids = support.ids[support.offsets[row] : support.offsets[row + 1]]
        if support.restricted[row]:
            outside[row] = True
            outside[row, torch.as_tensor(ids).long()] = False
    log_p = scores.masked_fill(outside, -torch.inf).log_softmax(-1)
    # Over the vocabulary, the entropy of a row with support is that before the changes.
    of_vocabulary = torch.where(torch.from_numpy(support.restricted)[:, None], plain, scores)
    kept = log_p if over_support else of_vocabulary.log_softmax(-1)
    entropy = -(kept.exp() * kept.masked_fill(kept == -torch.inf, 0)).sum(-1)
    return log_p.gather(1, target[:, None]).squeeze(1), entropy


@pytest.mark.parametrize("over_support", [False, True])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (3.0, 0.7)])
@pytest.mark.parametrize("chunk_rows", [2, 100])
@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("penalized", [False, True])
def test_values_and_gradients_are_those_of_the_masked_softmax(
    over_support, softcap, scale, chunk_rows, trained_head, penalized
):
    hidden, weight, target, inverse, support = case(penalized=penalized)
    weight.requires_grad_(trained_head)
    bias = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=trained_head)
    inputs = [hidden, weight, bias] if trained_head else [hidden]
    for by_entropy in (False, True):
        ways = []
        for head in (True, False):
            if head:
                logp, entropy = token_logprobs(
                    hidden,
                    weight,
                    target,
                    inv_temperature=inverse,
                    support=support,
                    entropy_over_support=over_support,
                    bias=bias,
                    softcap=softcap,
                    logit_scale=scale,
                    chunk_bytes=chunk_rows * VOCABULARY * 16,
                )
            else:
                how = {"bias": bias, "softcap": softcap, "scale": scale, "over_support": over_support}
                logp, entropy = masked(hidden, weight, target, inverse, support, **how)
            factors = torch.arange(1.0, ROWS + 1, dtype=torch.float64)
            loss = (factors * logp).sum() + (entropy.square().sum() if by_entropy else 0)
            ways.append([logp.detach(), entropy.detach(), *torch.autograd.grad(loss, inputs)])
        for ours, theirs in zip(*ways, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_row_with_one_id_has_logprob_0_and_no_gradient():
    hidden, weight, target, _, support = case()
    logp, _ = token_logprobs(hidden, weight, target, support=support)
    [gradient] = torch.autograd.grad(logp.sum(), [hidden])
    assert logp[[1, 8]].tolist() == [0.0, 0.0]
    assert gradient[[1, 8]].abs().max() == 0 < gradient[2].abs().max()


@pytest.mark.parametrize("penalized", [False, True])
@pytest.mark.parametrize("epilogue", ["torch", "compile"])
def test_every_epilogue_has_the_values_of_the_masked_softmax(epilogue, penalized):
    hidden, weight, target, inverse, support = case(torch.float32, penalized=penalized)
    logp, entropy = token_logprobs(
        hidden,
        weight,
        target,
        inv_temperature=inverse,
        support=support,
        softcap=5.0,
        logit_scale=0.5,
        epilogue=epilogue,
    )
    loss = logp.square().sum() + entropy.sum()
    expected, full = masked(hidden, weight, target, inverse, support, softcap=5.0, scale=0.5)
    other = expected.square().sum() + full.sum()
    torch.testing.assert_close(logp, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(loss, [hidden, weight]), torch.autograd.grad(other, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_chunk_without_support_is_that_of_untruncated_sampling():
    hidden, weight, target, _, support = case()
    rows = Rows(target, None, support.to("cpu"))
    problem = HeadProblem.of(hidden.detach(), weight.detach(), None, rows, HeadSettings(None, 1.0, None, Chunk))
    assert [type(problem.chunk(slice(row, row + 2))) for row in (0, 6)] == [SupportChunk, SupportChunk]
    assert [type(problem.chunk(slice(row, row + 1))) for row in (0, 3, 7)] == [Chunk, Chunk, Chunk]


def packed(masks, *, share=False, ids=((5, 6, 7), (5, 6, 8))):
    """Return the step of two branches whose last two tokens were drawn from the given ids."""
    nan = float("nan")
    count = len(ids)
    rows = [row for branch in masks for row in ([], *branch)]
    from tracegrad.alignment.ragged import Ragged

    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    values = np.array([i for row in rows for i in row], np.int32)
    sequences = Sequences.from_arrays(
        np.concatenate(ids),
        np.arange(count + 1) * 3,
        [nan, -0.5, -0.1] * count,
        [False, True, True] * count,
        group=[0] * count,
        support=Ragged(offsets, values),
    )
    [step] = pack(sequences, [1.0] * count, tokens_per_row=16, share_prefixes=share)
    [batch] = step.batches
    return step, batch


def supports(batch):
    found = batch.support
    return [found.ids[found.offsets[row] : found.offsets[row + 1]].tolist() for row in batch.logit_row]


def test_pack_gives_each_logit_row_the_ids_of_its_token():
    _, batch = packed([[[6, 9], []], [[6], [1, 8]]])
    by_term = dict(zip(batch.term.tolist(), supports(batch), strict=True))
    assert [by_term[term] for term in range(4)] == [[6, 9], [], [6], [1, 8]]


def test_a_token_that_was_drawn_from_other_ids_has_its_own_logit_row():
    _, same = packed([[[6, 9], []], [[6, 9], []]], share=True)
    _, other = packed([[[6, 9], []], [[6], []]], share=True)
    # id 6 after id 5, twice; and the two last tokens.
    assert (len(same.read), len(other.read)) == (3, 4)
    assert sorted(map(tuple, supports(other))) == [(), (), (6,), (6, 9)]


def test_dropped_tokens_take_their_support_with_them():
    _, batch = packed([[[6, 9], []], [[6], [1, 8]]])
    left = batch.drop_tokens(np.array(batch.term != 2))
    assert supports(left) == [[6]]


def test_no_support_if_every_token_was_drawn_from_the_vocabulary():
    assert packed([[[], []], [[], []]])[1].support is None


@pytest.mark.parametrize("plan", ["one-pass", "recompute"])
@pytest.mark.parametrize("over", ["vocabulary", "support"])
def test_the_loss_is_that_of_the_masked_softmax(plan, over):
    step, batch = packed([[[6, 9], []], [[6, 1, 2], [1, 8]]])
    hidden, weight, *_ = case(seed=3)
    hidden = hidden[: len(batch.read)].detach().requires_grad_()
    objective = Objective(PolicyGradient(), entropy=EntropyBonus(0.3, masked=False, over=over))
    terms = step.terms(batch, correct(None, step.rollout_logprobs, trace=step.trace))
    result = policy_loss(hidden, weight, batch, terms, objective, plan=plan)
    moved = batch.to("cpu")
    logp, entropy = masked(
        hidden, weight, moved.target, moved.inv_temperature, batch.support, over_support=over == "support"
    )
    expected = -(logp + 0.3 * entropy)[moved.logit_row].sum() / 4
    torch.testing.assert_close(result.loss, expected)
    for ours, theirs in zip(
        torch.autograd.grad(result.loss, [hidden, weight]), torch.autograd.grad(expected, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


KL_KINDS = ["k1", "k2", "k3"]


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (3.0, 0.7)])
@pytest.mark.parametrize("chunk_rows", [2, 100])
@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("penalized", [False, True])
@pytest.mark.parametrize("plan", ["one-pass", "recompute"])
def test_a_penalty_over_the_vocabulary_is_beside_a_ratio_over_the_support(
    kind, softcap, scale, chunk_rows, trained_head, penalized, plan
):
    """Two tokens share a row; the surrogate reads the logprobs over the support, and the penalty the others."""
    hidden, weight, target, inverse, support = case(penalized=penalized)
    weight.requires_grad_(trained_head)
    inputs = [hidden, weight] if trained_head else [hidden]
    logit_row = np.array([*range(ROWS), 4, 0], np.int32)
    count = len(logit_row)
    rng = np.random.default_rng(1)
    terms = Terms(
        advantages=rng.normal(size=count),
        scale=np.full(count, 1 / count),
        old=rng.normal(size=count) - 3,
        ref=rng.normal(size=count) - 3,
        trace=np.arange(count),
    )
    penalty = Penalty(Ratio("theta", "ref"), kind, 0.7, masked=False, weighted=False, over="vocabulary")
    entropy = EntropyBonus(0.3, masked=False, over="support") if trained_head else None
    objective = Objective(Importance(), Ratio("theta", "old"), penalties=(penalty,), entropy=entropy)
    batch = SimpleNamespace(target=target, logit_row=torch.as_tensor(logit_row).long(), inv_temperature=inverse)
    batch.support, batch.to = support.to("cpu"), lambda _: batch
    how = {"softcap": softcap, "logit_scale": scale, "chunk_bytes": chunk_rows * VOCABULARY * 16}
    result = policy_loss(hidden, weight, batch, terms, objective, plan=plan, **how)
    logp, kept_entropy = masked(
        hidden, weight, target, inverse, support, softcap=softcap, scale=scale, over_support=True
    )
    none = Support(np.zeros(0, np.int32), np.zeros(ROWS + 1, np.int64))
    whole, _ = masked(hidden, weight, target, inverse, none, softcap=softcap, scale=scale)
    row = batch.logit_row
    difference = whole[row] - terms.ref
    kl = {"k1": difference, "k2": difference**2 / 2, "k3": (-difference).exp() - 1 + difference}[kind]
    expected = -(terms.advantages * (logp[row] - terms.old).exp()) + 0.7 * kl
    expected = (expected - 0.3 * kept_entropy[row] if trained_head else expected).sum() / count
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.vocabulary_logprobs, whole[row].detach())
    torch.testing.assert_close(result.logprobs, logp[row].detach())
    for ours, theirs in zip(
        torch.autograd.grad(result.loss, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        without = policy_loss(hidden, weight, batch, terms, objective, **how)
    assert without.plan.name == "no-grad"
    torch.testing.assert_close(without.loss, expected.detach(), rtol=1e-10, atol=1e-12)


def test_a_frozen_head_is_computed_in_one_pass_if_a_penalty_is_over_the_vocabulary():
    step, batch = packed([[[6, 9], []], [[6, 1, 2], [1, 8]]])
    step = step.with_logprobs(ref=np.full(4, -2.0))
    hidden, weight, *_ = case(seed=3)
    hidden, weight = hidden[: len(batch.read)].detach().requires_grad_(), weight.detach()
    names = []
    for over, support in (("vocabulary", batch.support), ("support", batch.support), ("vocabulary", None)):
        penalty = Penalty(Ratio("theta", "ref"), "k3", 0.7, masked=False, weighted=False, over=over)
        terms = step.terms(batch, correct(None, step.rollout_logprobs, trace=step.trace))
        objective = Objective(PolicyGradient(), penalties=(penalty,))
        result = policy_loss(hidden, weight, replace(batch, support=support), terms, objective)
        names.append((result.plan.name, result.vocabulary_logprobs is None))
    # Without support there is one logprob of each row, at no other cost.
    assert names == [("one-pass", False), ("frozen", True), ("frozen", True)]


def test_the_entropy_is_over_one_of_two():
    with pytest.raises(ArgumentError, match="TG-ARGS-011"):
        EntropyBonus(0.1, masked=False, over="nucleus")
