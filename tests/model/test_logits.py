"""Logprobs from logits over the sampler's support, against autograd on the masked softmax and the peers' functions."""

import numpy as np
import pytest
import torch

from tracegrad import Sequences
from tracegrad.alignment.penalties import Penalties
from tracegrad.alignment.ragged import Ragged
from tracegrad.errors import ArgumentError
from tracegrad.model import logprobs_from_logits, support_of_tokens
from tracegrad.packing import Support

SIZES = (3, 4)  # B, S
VOCABULARY = 23


def case(dtype=torch.float64, seed=0):
    """Return logits, labels, inverse temperatures, and supports of no, one, some and all ids."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*SIZES, VOCABULARY, generator=generator, dtype=dtype)
    labels = torch.randint(VOCABULARY, SIZES, generator=generator)
    inverse = torch.rand(SIZES, generator=generator, dtype=dtype) + 0.5
    rows = []
    for label, size in zip(labels.flatten().tolist(), [0, 1, 2, 0, 7, VOCABULARY, 3, 0, 1, 5, 0, 4], strict=True):
        others = [i for i in torch.randperm(VOCABULARY, generator=generator).tolist() if i != label]
        rows.append(sorted([label, *others[: size - 1]]) if size else [])
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    ids = np.array([i for row in rows for i in row], np.int32)
    return logits.requires_grad_(), labels, inverse, Support(ids, offsets)


def masked(logits, labels, inverse, support, over_support):
    """Return logprobs and entropies by a softmax in which the ids outside of the support are -inf."""
    scores = (logits * inverse[..., None]).reshape(-1, VOCABULARY)
    outside = torch.zeros_like(scores, dtype=torch.bool)
    for row in range(len(scores)):
        ids = support.ids[support.offsets[row] : support.offsets[row + 1]]
        if len(ids):
            outside[row] = True
            outside[row, torch.as_tensor(ids).long()] = False
    log_p = scores.masked_fill(outside, -torch.inf).log_softmax(-1)
    kept = log_p if over_support else scores.log_softmax(-1)
    entropy = -(kept.exp() * kept.masked_fill(kept == -torch.inf, 0)).sum(-1)
    return log_p.gather(1, labels.reshape(-1, 1)).reshape(labels.shape), entropy.reshape(labels.shape)


@pytest.mark.parametrize("over_support", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 1000, None])
def test_values_and_gradients_are_those_of_the_masked_softmax(over_support, chunk_bytes, monkeypatch):
    if chunk_bytes:
        monkeypatch.setattr("tracegrad.model.logits._CPU_CHUNK", chunk_bytes)
    logits, labels, inverse, support = case()
    before = logits.detach().clone()
    logprobs, entropy = logprobs_from_logits(
        logits, labels, inv_temperature=inverse, support=support, entropy_over_support=over_support
    )
    expected = masked(logits, labels, inverse, support, over_support)
    factors = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(SIZES)
    for by_entropy in (0.0, 1.0):
        pairs = zip((logprobs, entropy), expected, strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        gradients = [
            torch.autograd.grad((factors * logp).sum() + by_entropy * each.square().sum(), logits, retain_graph=True)[0]
            for logp, each in ((logprobs, entropy), expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert torch.equal(logits, before)


def test_without_support_it_is_the_function_of_trl():
    logits, labels, _, _ = case(torch.float32)
    logprobs, entropy = logprobs_from_logits(logits, labels, inv_temperature=1 / 0.7)
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    torch.testing.assert_close(logprobs, selective_log_softmax(logits, labels, temperature=0.7))
    torch.testing.assert_close(entropy, entropy_from_logits(logits / 0.7))
    entropy.sum().backward()
    assert float(logits.grad.abs().max()) > 0.01


def test_an_id_outside_of_the_support_has_no_gradient():
    logits, labels, _, support = case()
    logprobs_from_logits(logits, labels, support=support)[0].sum().backward()
    gradient = logits.grad.reshape(-1, VOCABULARY)
    assert [int(row.count_nonzero()) for row in gradient] == [23, 0, 2, 23, 7, 23, 3, 23, 0, 5, 23, 4]


def test_bfloat16_logits_are_summed_in_float32():
    logits, labels, inverse, support = case(torch.float32)
    rounded = logits.detach().bfloat16().requires_grad_()
    logprobs, _ = logprobs_from_logits(rounded, labels, inv_temperature=inverse, support=support)
    expected, _ = masked(rounded.float(), labels, inverse, support, False)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    assert rounded.grad.dtype == torch.bfloat16


def test_support_of_padded_tokens_is_flattened_and_padding_has_none():
    rows = [[], [9, 5], [], [7, 8]]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    support = Ragged(offsets, np.array([i for row in rows for i in row], np.int32))
    nan = float("nan")
    sequences = Sequences.from_arrays(
        [4, 5, 4, 7], [0, 2, 4], [nan, -0.5] * 2, [False, True] * 2, trace=[0, 1], support=support
    )
    found = support_of_tokens(sequences, [[1, -1, 3], [0, 3, -1]])
    assert (found.ids.tolist(), found.offsets.tolist()) == ([5, 9, 7, 8, 7, 8], [0, 2, 2, 4, 4, 6, 6])
    assert support_of_tokens(sequences, [-1, 0, 2]) is None
    assert support_of_tokens(sequences, [-1]) is None
    plain = Sequences.from_arrays([4, 5], [0, 2], [nan, -0.5], [False, True])
    assert support_of_tokens(plain, [1]) is None


def test_no_rows_and_wrong_shapes():
    logits, labels, _, support = case()
    assert logprobs_from_logits(logits[:0], labels[:0])[0].shape == (0, 4)
    for wrong in ({"labels": labels[:, 1:]}, {"support": Support(support.ids, support.offsets[:-1])}):
        with pytest.raises(ArgumentError, match="TG-MODEL-027"):
            logprobs_from_logits(**{"logits": logits, "labels": labels, "support": support, **wrong})


def test_penalties_of_padded_tokens_are_those_of_their_context():
    nan, one = float("nan"), np.ones(1, np.float32)
    penalties = Penalties(np.array([0]), 2 * one, one, 0 * one, np.array([1]), np.array([9], np.int32), 3 * one)
    sequences = Sequences.from_arrays([4, 5, 5], [0, 3], [nan, -0.5, -0.5], [False, True, True], penalties=penalties)
    support = support_of_tokens(sequences, [[-1, 2]])
    assert (support.ids.tolist(), support.offsets.tolist()) == ([4, 5, 9], [0, 0, 3])
    assert support.restricted.tolist() == [False, False]
    # 4 is of the prompt, 5 of the answer, and 9 has a bias.
    assert [column.tolist() for column in support.changes] == [[0, 0, 3], [2, 2, 1], [0, -1, 0]]
    logits = torch.zeros(1, 2, 12, dtype=torch.float64)
    logits[0, 1, :6] = torch.tensor([0, 0, 0, 0, 3.0, -1.0])
    changed = logits[0, 1].clone()
    changed[4], changed[5], changed[9] = 1.5, -3.0, 3.0
    logp, entropy = logprobs_from_logits(logits, torch.tensor([[0, 5]]), support=support)
    torch.testing.assert_close(logp[0, 1], changed.log_softmax(-1)[5])
    torch.testing.assert_close(entropy[0, 1], -(changed.softmax(-1) * changed.log_softmax(-1)).sum())
