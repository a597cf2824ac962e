"""The head without logits: exact gradients, the roundings that are asked for, and no table of all logits."""

import pytest

torch = pytest.importorskip("torch")

from largest import Largest  # noqa: E402
from tracegrad.errors import ArgumentError  # noqa: E402
from tracegrad.policy import token_logprobs  # noqa: E402


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
        with pytest.raises(ArgumentError, match="have shapes"):
            token_logprobs(*wrong)
    with pytest.raises(ArgumentError, match="bias"):
        token_logprobs(hidden, weight, target, bias=bias[1:])
