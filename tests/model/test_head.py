"""The head without logits: exact gradients, the roundings that are asked for, and no table of all logits."""

import weakref
from typing import ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode

from largest import Largest
from tracegrad.errors import ArgumentError
from tracegrad.model import lm_head as kernels_head
from tracegrad.model import loss as policy_loss_module
from tracegrad.model import policy_loss, token_logprobs
from tracegrad.model.lm_head import Gradients, HeadProblem, HeadSettings, Size, device_chunk_bytes
from tracegrad.model.lm_head_chunked import Chunk, Rows
from tracegrad.model.lm_head_fused import _scaled
from tracegrad.objective import Clip, Objective, Ratio
from tracegrad.objective.torch_loss import Terms
from tracegrad.packing import Batch


def inputs(rows=7, hidden=5, vocab=11, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    target = torch.randint(0, vocab, (rows,), generator=g)
    return draw(rows, hidden), draw(vocab, hidden), draw(vocab), target, draw(rows).abs() + 0.5


def plain(hidden, weight, bias, target, inverse, softcap=None, logit_scale=1.0):
    """logp and entropy by the definition, all logits at once."""
    logits = (hidden @ weight.T + (0 if bias is None else bias)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits * torch.as_tensor(inverse).reshape(-1, 1), -1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("logit_scale", [1.0, 0.3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_gradient_of_the_head_is_exact_in_float64(rows, softcap, logit_scale, with_bias):
    hidden, weight, bias, target, inverse = inputs()
    variables = [hidden.requires_grad_(), weight.requires_grad_(), *([bias.requires_grad_()] if with_bias else [])]

    def ours(hidden, weight, bias=None):
        rest = {"softcap": softcap, "logit_scale": logit_scale, "chunk_bytes": rows * 4 * len(weight)}
        return token_logprobs(hidden, weight, target, inv_temperature=inverse, bias=bias, **rest)

    assert torch.autograd.gradcheck(ours, variables)
    expected = plain(hidden, weight, bias if with_bias else None, target, inverse, softcap, logit_scale)
    for found, value in zip(ours(*variables), expected, strict=True):
        assert torch.allclose(found, value, atol=1e-12)


def test_only_what_wants_a_gradient_gets_one():
    hidden, weight, _, target, _ = inputs()
    logp, entropy = token_logprobs(hidden.requires_grad_(), weight, target)
    (logp.sum() - entropy.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_a_peaked_distribution_keeps_its_small_entropy():
    hidden = torch.tensor([[40.0], [1.0]])
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    logp, entropy = token_logprobs(hidden, weight, torch.tensor([1, 0]))
    exact = plain(hidden.double(), weight.double(), None, torch.tensor([1, 0]), 1.0)
    assert logp.tolist() == pytest.approx(exact[0].tolist(), rel=1e-6)
    assert entropy.tolist() == pytest.approx(exact[1].tolist(), abs=1e-6)


def test_no_tensor_of_the_size_of_all_logits_is_ever_made():
    hidden, weight, _, target, _ = inputs(rows=300, hidden=4, vocab=200, dtype=torch.float32)
    with Largest() as largest:
        logp, entropy = token_logprobs(hidden.requires_grad_(), weight.requires_grad_(), target, chunk_bytes=16_000)
        (logp.sum() + entropy.sum()).backward()
    assert largest.numbers <= 20 * 200  # 16,000 bytes are 20 rows; all logits would be 60,000 numbers


def test_logits_dtype_says_what_the_logits_are_rounded_to():
    hidden, weight, _, target, _ = inputs(rows=64, hidden=32, vocab=50, dtype=torch.bfloat16)
    exact = plain(hidden.double(), weight.double(), None, target, 1.0)[0]
    error = {
        dtype: (token_logprobs(hidden, weight, target, logits_dtype=dtype)[0] - exact).abs().max().item()
        for dtype in (None, torch.bfloat16, torch.float32)
    }
    assert error[torch.float32] < 1e-4
    assert error[None] == error[torch.bfloat16] > 1e-3
    rounded = token_logprobs(hidden.float(), weight.float(), target, logits_dtype=torch.bfloat16)[0]
    assert (rounded - exact).abs().max() > 1e-3


def test_autocast_gives_bfloat16_logits_and_float32_sums():
    hidden, weight, _, target, _ = inputs(dtype=torch.bfloat16)
    weight = weight.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, _ = token_logprobs(hidden, weight, target)
    logp.sum().backward()
    assert logp.dtype == weight.grad.dtype == torch.float32
    assert torch.equal(logp, token_logprobs(hidden, weight.detach().bfloat16(), target)[0])


def test_shapes_that_contradict_one_another_are_refused():
    hidden, weight, bias, target, _ = inputs()
    for wrong in [(hidden[None], weight, target), (hidden, weight.T, target), (hidden, weight, target[1:])]:
        with pytest.raises(ArgumentError, match="TG-MODEL-012"):
            token_logprobs(*wrong)
    with pytest.raises(ArgumentError, match="TG-MODEL-012"):
        token_logprobs(hidden, weight, target, bias=bias[1:])


# --- operations on a tensor of the size of the weight ---


class Operations(TorchDispatchMode):
    """While entered, `names` lists each operation that makes or writes a tensor of `shape`; a cast with its dtype."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.names = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == self.shape and not func.is_view:
            name = func.overloadpacket.__name__
            self.names.append(f"cast to {out.dtype}" if name == "_to_copy" else name)
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row_major", [True, False])
def test_a_gradient_of_any_strides_is_scaled_by_one_operation_in_its_own_memory(dtype, row_major):
    plain = torch.randn(1100, 1000).to(dtype)  # over 2^20 numbers
    value = plain.clone() if row_major else plain.T.contiguous().T
    factor = torch.tensor(1 / 3)
    with Operations(value.shape) as seen:
        found = _scaled(value, factor, in_place=True)
    assert seen.names == ["mul"]
    assert (found.data_ptr(), found.stride()) == (value.data_ptr(), value.stride())
    assert torch.equal(found, (plain.float() * factor).to(dtype))


@pytest.mark.parametrize("in_place", [True, False])
def test_each_bfloat16_number_is_scaled_in_float32_and_rounded_once(in_place):
    """All 65,536 of them, subnormal, infinite and NaN; some products are subnormal or overflow."""
    value = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    for number in [1 / 3, -0.7, 1e-30, 3e38, 2.0**-140, 0.0, float("inf")]:
        factor = torch.tensor(number)
        expected = (value.double() * factor.double()).float().to(torch.bfloat16)
        found = _scaled(value.clone(), factor, in_place=in_place)
        same = found.view(torch.int16) == expected.view(torch.int16)
        assert bool((same | (found.isnan() & expected.isnan())).all()), number


def test_a_float64_gradient_is_scaled_in_float64():
    value, factor = torch.randn(40, 30, dtype=torch.float64), torch.tensor(1 / 3, dtype=torch.float64)
    expected = value * (1 / 3)
    for in_place in (False, True):
        assert torch.equal(_scaled(value, factor, in_place=in_place), expected)


def run_both_passes(path, head, hidden, weight, bias, target):
    """Forward and backward over nine rows in three chunks of four rows at most, by a path to a gradient."""
    variables = [each.requires_grad_(head == "trained") for each in (weight, bias)]
    how = {"bias": bias, "chunk_bytes": 4 * 8 * len(weight)}
    hidden.requires_grad_()
    if path == "any loss":
        logp, entropy = token_logprobs(hidden, weight, target, **how)
        (logp.sum() - entropy.sum() if head == "trained" else logp.sum()).backward()
    else:
        row, nothing = torch.arange(9), torch.zeros(1, dtype=torch.int32)
        batch = Batch(nothing, nothing, nothing + 1, nothing, target, torch.ones(9), row, np.arange(9))
        terms = Terms(old=torch.full((9,), -2.0), advantages=torch.ones(9), scale=torch.full((9,), 1 / 9))
        objective, plan = Objective(Clip(), Ratio("theta", "old")), None if head == "frozen" else path
        policy_loss(hidden, weight, batch, terms, objective, plan=plan, **how).loss.backward()
    assert all((each.grad is not None) == (head == "trained") for each in variables)


@pytest.mark.parametrize("head", ["trained", "frozen"])
@pytest.mark.parametrize("path", ["any loss", "one-pass", "recompute"])
def test_a_float32_weight_is_cast_to_bfloat16_once_for_forward_and_backward(path, head):
    hidden, weight, bias, target, _ = inputs(rows=9, hidden=6, vocab=13, dtype=torch.float32)
    with Operations(weight.shape) as seen:
        run_both_passes(path, head, hidden.bfloat16(), weight, bias, target)
    assert [name for name in seen.names if "cast" in name] == ["cast to torch.bfloat16"]


# --- the memory of chunks ---


class Counted(Chunk):
    """The reference, which counts in `alive` how many chunks hold their tables whenever one is made."""

    chunks: ClassVar = weakref.WeakSet()
    alive: ClassVar = []

    def __init__(self, *how):
        self.alive.append(len(self.chunks))
        super().__init__(*how)
        self.chunks.add(self)


@pytest.mark.parametrize("head", ["trained", "frozen"])
@pytest.mark.parametrize("path", ["any loss", "one-pass", "recompute"])
def test_the_tables_of_a_chunk_are_gone_before_the_next_one_is_made(path, head, monkeypatch):
    monkeypatch.setattr(Counted, "alive", [])
    monkeypatch.setattr(kernels_head if path == "any loss" else policy_loss_module, "chunk_kind", lambda *_: Counted)
    run_both_passes(path, head, *inputs(rows=9, hidden=6, vocab=13, dtype=torch.float32)[:4])
    assert len(Counted.alive) == (3 if head == "frozen" or path == "one-pass" else 6)
    assert not any(Counted.alive)


def test_on_a_device_whose_memory_is_not_asked_for_a_chunk_has_a_gibibyte():
    weight, setting = torch.empty(151_936, 8, device="meta"), HeadSettings(None, 1.0, None, Chunk)
    for rows, expected in ((32_768, 768), (100, 220)):
        hidden, target = torch.empty(rows, 8, device="meta"), torch.empty(rows, dtype=torch.long, device="meta")
        problem = HeadProblem.of(hidden, weight, None, Rows(target, None), setting)
        # A row of two float32 tables has 1,215,488 bytes: 883 fit 1 GiB, 220 fit the 256 MiB that are always taken.
        assert problem.chunk_rows(None, Gradients()) == expected


QWEN3 = Size(rows=32768, hidden=4096, vocabulary=151_936, item=2, row_bytes=2)


@pytest.mark.parametrize(
    ("chunk_bytes", "rows"),
    [
        (1, 1),  # at least one row
        (255 * 2 * 151_936, 255),  # below 256 rows each one counts
        (256 * 2 * 151_936, 256),
        (512 * 2 * 151_936 - 1, 256),
        (4 << 30, 14_080),  # 55 * 256; 4 GiB hold 14,134 rows of 303,872 bytes
    ],
)
def test_a_chunk_has_a_multiple_of_256_rows_where_it_can(chunk_bytes, rows):
    assert QWEN3.chunk(chunk_bytes) == rows


def test_rows_that_all_fit_are_one_chunk_however_many_they_are():
    size = Size(rows=1000, hidden=6, vocabulary=300)
    assert size.chunk(1000 * 300 * 8) == 1000
    assert size.chunk(999 * 300 * 8) == 768


@pytest.mark.parametrize(
    ("free_gib", "wants", "chunk_mib"),
    [
        (70, Gradients(), 4096),  # never more than 4 GiB
        (0, Gradients(), 256),  # never less than 256 MiB
        # The gradients take 0.25 GiB (hidden states, bfloat16) and 2.32 GiB (weight, float32). Half of the rest,
        # rounded down to a power of two:
        (10.4, Gradients(), 2048),  # 7.83 / 2 = 3.9
        (10.7, Gradients(), 4096),  # 8.13 / 2 = 4.07
        (10.4, Gradients(weight=False), 4096),  # 10.15 / 2 = 5.08
        (4, Gradients(hidden=False, weight=False), 2048),  # no gradients
    ],
)
def test_a_chunk_takes_at_most_half_of_what_the_gradients_leave(free_gib, wants, chunk_mib):
    assert device_chunk_bytes(QWEN3, wants, int(free_gib * 2**30)) == chunk_mib << 20
