"""The Triton kernels beside the torch reference, on the device; interpreted in the rehearsal (TRITON_INTERPRET=1)."""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tracegrad.model import token_logprobs
from tracegrad.model.lm_head import MAX_CHUNK_BYTES, Gradients, HeadProblem, HeadSettings, free_bytes
from tracegrad.model.lm_head_chunked import Chunk, Head, RowGradients, Rows
from tracegrad.model.lm_head_fused import _scaled
from tracegrad.packing import LogitChanges, Support

pytestmark = pytest.mark.gpu
CASES = {
    # softcap, logit_scale, with a temperature, with a gradient by the entropy
    "plain": (None, 1.0, False, False),
    "scaled": (None, 0.3, True, True),
    "capped": (1.5, 1.0, True, True),
    "capped and scaled": (30.0, 2.0, False, True),
}
ROUNDING = 2.0**-8  # the largest relative error of rounding to bfloat16, whose significand has 8 bits, to the nearest


@pytest.fixture(scope="module")
def kernels(rehearsal):
    """The class under test. Triton decides at import whether it interprets."""
    if rehearsal and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("the rehearsal of the kernels needs TRITON_INTERPRET=1")
    from tracegrad.model.lm_head_triton import TritonChunk

    return TritonChunk


def inputs(device, dtype=torch.float32, rows=5, width=8, vocabulary=5000, scale=1.0):
    """Hidden states, a head, and targets at both ends of the vocabulary and of a block of 4096."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(rows, width, generator=g) * scale, torch.randn(vocabulary, width, generator=g)
    target = torch.tensor([0, vocabulary - 1, 7, 4095, 4096])[:rows]
    rows_of = Rows(target.to(device), (torch.rand(rows, generator=g) + 0.5).to(device))
    return hidden.to(device, dtype), weight.to(device, dtype), rows_of


def compare(kernels, device, case, dtype, rounded, scale, bound):
    softcap, logit_scale, warm, by_entropy = case
    hidden, weight, rows = inputs(device, dtype, scale=scale)
    rows = rows if warm else Rows(rows.target, None)
    head = Head(weight, None, softcap, logit_scale)
    theirs, ours = Chunk(hidden, head, rows, rounded), kernels(hidden, head, rows, rounded)
    expected, found = theirs.statistics(), ours.statistics()
    reach = max(10.0, float(expected.lse.abs().max()))  # sums are of scores of this size, in float32
    for a, b in zip(found[:3], expected[:3], strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=1e-6 * reach, rtol=1e-6)
    g = torch.linspace(-1, 1, len(hidden), device=device)
    e = torch.linspace(0.5, -1, len(hidden), device=device) if by_entropy else None
    a, b = ours.gradient(found, g, e), theirs.gradient(expected, g, e)
    assert a.dtype == dtype
    assert (a.float() - b.float()).norm() <= bound * b.float().norm()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_float32(kernels, device, case, scale):
    compare(kernels, device, CASES[case], torch.float32, None, scale, 1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float32])
def test_bfloat16_in_place_and_from_float32(kernels, device, case, rounded, rehearsal):
    """Both gradients come from one product; the kernel's is rounded once on its way out. Triton's interpreter cuts."""
    bound = (2 if rehearsal else 1) * ROUNDING + 1e-5
    compare(kernels, device, CASES[case], torch.bfloat16, rounded, 1.0, bound)


def test_a_row_whose_probability_is_all_on_one_token_has_no_entropy(kernels, device):
    hidden, weight, rows = inputs(device, rows=2, scale=200.0)
    found = kernels(hidden, Head(weight), rows, None).statistics()
    wide = Rows(rows.target, rows.inverse.double())
    expected = Chunk(hidden.double(), Head(weight.double()), wide, None).statistics()
    assert torch.allclose(found.entropy.double(), expected.entropy, atol=1e-5)
    assert torch.allclose(found.logp.double(), expected.logp, rtol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_token_logprobs_through_the_kernels(kernels, device, frozen):
    hidden, weight, rows = inputs(device, vocabulary=4100)
    found = []
    for epilogue in ("torch", "triton"):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
        how = {"inv_temperature": rows.inverse, "chunk_bytes": 2 * 8 * 4100, "epilogue": epilogue}
        bias = torch.linspace(-1, 1, 4100, device=device)
        logp, entropy = token_logprobs(*leaves, rows.target.clamp(max=4099), bias=bias, **how)
        loss = logp.sum() if frozen else logp.sum() - 2 * entropy.sum()
        found.append([logp, entropy, *torch.autograd.grad(loss, leaves[:1] if frozen else leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_the_kernels_are_what_a_cuda_device_is_given(kernels, device, rehearsal):
    from tracegrad.model.lm_head import chunk_kind

    hidden, _, _ = inputs(device)
    assert chunk_kind(hidden, None, "triton" if rehearsal else None) is kernels


def test_no_rows_are_no_launch(kernels, device):
    hidden, weight, rows = inputs(device)
    chunk = kernels(hidden[:0], Head(weight), rows.at(slice(0, 0)), None)
    assert chunk.gradient(chunk.statistics(), hidden[:0, 0], None).shape == (0, 5000)


@pytest.mark.parametrize("rows", [1, 3000])
def test_a_vocabulary_of_a_real_size(kernels, device, rehearsal, rows):
    """151,936 tokens, as Qwen3 has: offsets past 2^31 bytes, and the last block is a part of one."""
    rows = min(rows, 2) if rehearsal else rows
    hidden, weight, _ = inputs(device, vocabulary=151_936, rows=5)
    hidden = hidden.repeat(-(-rows // 5), 1)[:rows].contiguous()
    target = torch.arange(rows, device=device) * 50 % 151_936
    found = kernels(hidden, Head(weight), Rows(target, None), None).statistics()
    last = slice(rows - 1, rows)
    expected = Chunk(hidden[last], Head(weight), Rows(target[last], None), None).statistics()
    for a, b in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(a[last], b, atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("row_major", [True, False])
def test_a_gradient_is_scaled_in_float32_and_without_a_copy(device, row_major):
    """A CUDA kernel rounds a factor without dimensions to the dtype of what it multiplies; on a CPU torch does not."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    plain = every[every.isfinite()].repeat(64).reshape(64, -1).to(device)
    value = plain.clone() if row_major else plain.T.contiguous().T
    factor = torch.tensor(1 / 3, device=device)
    expected = (plain.float() * factor).bfloat16()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    found = _scaled(value, factor, in_place=True)
    if cuda:
        assert torch.cuda.max_memory_allocated(device) == before
    assert (found.data_ptr(), found.stride()) == (value.data_ptr(), value.stride())
    assert torch.equal(found, expected)


def test_a_default_chunk_fits_the_memory_that_is_free_and_asking_waits_for_nothing(device):
    hidden, weight, rows = inputs(device)
    hidden, target = hidden.repeat(30000, 1), rows.target.repeat(30000)  # more rows than a chunk of 4 GiB has
    problem = HeadProblem.of(hidden, weight, None, Rows(target, None), HeadSettings(None, 1.0, None, Chunk))
    if device.type != "cuda":
        assert problem.chunk_rows(None, Gradients()) >= 64
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunk, free = problem.chunk_rows(None, Gradients()), free_bytes(device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 0 < free <= torch.cuda.get_device_properties(device).total_memory
    assert chunk % 256 == 0
    assert chunk * problem.size().row_bytes * len(weight) <= min(MAX_CHUNK_BYTES, free)


@pytest.mark.parametrize("penalized", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_rows_with_support_beside_the_torch_chunk(kernels, device, case, penalized):
    softcap, logit_scale, warm, by_entropy = CASES[case]
    hidden, weight, rows = inputs(device)
    target = rows.target.tolist()
    # Every id of row 0 is possible; the others have one, two, and many ids.
    ids = [[], [target[1]], [3, target[2]], sorted({*range(0, 5000, 7), target[3]}), sorted({5, target[4]})]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64)
    flat = np.concatenate([np.array(row, np.int32) for row in ids])
    changes = None
    if penalized:
        ones = np.ones(len(flat), np.float32)
        changes = LogitChanges(0.5 * ones, np.where(flat % 2, 1.5, 1.0).astype(np.float32), -0.25 * ones)
    support = Support(flat, offsets, None, changes)
    inverse = 1.0 if not warm else rows.inverse
    found = []
    for epilogue in ("triton", "torch"):
        inputs_ = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        logp, entropy = token_logprobs(
            *inputs_,
            rows.target,
            inv_temperature=inverse,
            support=support,
            softcap=softcap,
            logit_scale=logit_scale,
            epilogue=epilogue,
        )
        loss = logp.square().sum() + (entropy.sum() if by_entropy else 0)
        found.append([logp.detach(), entropy.detach(), *torch.autograd.grad(loss, inputs_)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert found[0][0][1] == 0
    # The gradients by the logprobs over the support and over the vocabulary, at once.
    of_both = Rows(rows.target, rows.inverse if warm else None, support.to(device), needs_vocabulary_logp=True)
    by = RowGradients(torch.linspace(-1, 1, 5, device=device), None, torch.linspace(2, -1, 5, device=device))
    found = []
    for kind in (kernels, Chunk):
        problem = HeadProblem.of(hidden, weight, None, of_both, HeadSettings(softcap, logit_scale, None, kind))
        chunk = problem.chunk(slice(0, 5))
        statistics = chunk.statistics()
        found.append([statistics.vocabulary_logp, by.through(chunk, statistics)])
    whole, _ = token_logprobs(
        hidden, weight, rows.target, inv_temperature=inverse, softcap=softcap, logit_scale=logit_scale
    )
    torch.testing.assert_close(found[0][0], whole, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert issubclass(kernels, Chunk)
