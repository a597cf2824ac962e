"""The Triton kernels and the compiled passes beside the torch reference, on CPU.

Triton decides at import whether it interprets, so the kernels run in a process of their own with TRITON_INTERPRET=1:
this file again, by pytest.
"""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tracegrad.errors import ArgumentError  # noqa: E402
from tracegrad.kernels.chunk import Chunk, Head, Rows  # noqa: E402
from tracegrad.policy import token_logprobs  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CASES = [
    # softcap, logit_scale, with a temperature, with a gradient by the entropy
    (None, 1.0, False, False),
    (None, 0.3, True, True),
    (1.5, 1.0, True, True),
    (30.0, 2.0, False, True),
]


def inputs(dtype=torch.float32, rows=5, width=8, vocabulary=5000, scale=1.0):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(rows, width, generator=g) * scale, torch.randn(vocabulary, width, generator=g)
    rows_of = Rows(torch.tensor([0, vocabulary - 1, 7, 4095, 4096])[:rows], torch.rand(rows, generator=g) + 0.5)
    return hidden.to(dtype), weight.to(dtype), rows_of


def kind():
    """The class under test."""
    if INTERPRETED:
        from tracegrad.kernels.triton_rows import TritonChunk

        return TritonChunk
    from tracegrad.kernels.compiled import CompiledChunk

    return CompiledChunk


def compare(case, dtype, rounded, scale, bound):
    softcap, logit_scale, warm, by_entropy = case
    hidden, weight, rows = inputs(dtype, scale=scale)
    rows = rows if warm else Rows(rows.target, None)
    head = Head(weight, None, softcap, logit_scale)
    theirs, ours = Chunk(hidden, head, rows, rounded), kind()(hidden, head, rows, rounded)
    expected, found = theirs.statistics(), ours.statistics()
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-6)
    g, e = torch.linspace(-1, 1, len(hidden)), torch.linspace(0.5, -1, len(hidden)) if by_entropy else None
    a, b = ours.gradient(found, g, e), theirs.gradient(expected, g, e)
    assert a.dtype == dtype
    assert (a.float() - b.float()).norm() <= bound * b.float().norm()


@pytest.mark.skipif(INTERPRETED, reason="this is the process that interprets")
def test_the_kernels_interpreted_on_cpu_equal_the_torch_reference():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = 2 * len(CASES) + 6
    assert f"{passed} passed" in done.stdout, done.stdout


interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that interprets")


@interpreted
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_float32(case, scale):
    compare(case, torch.float32, None, scale, 1e-5)


@interpreted
@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float32])
def test_bfloat16_in_place_and_from_float32(rounded):
    compare((None, 1.0, True, True), torch.bfloat16, rounded, 1.0, 5e-3)


@interpreted
def test_a_row_whose_probability_is_all_on_one_token_has_no_entropy():
    hidden, weight, rows = inputs(rows=2, scale=200.0)
    head = Head(weight)
    found = kind()(hidden, head, rows, None).statistics()
    expected = Chunk(
        hidden.double(), Head(weight.double()), Rows(rows.target, rows.inverse.double()), None
    ).statistics()
    assert torch.allclose(found.entropy.double(), expected.entropy, atol=1e-5)
    assert torch.allclose(found.logp.double(), expected.logp, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("frozen", [False, True])
def test_token_logprobs_through_the_kernels(frozen):
    hidden, weight, rows = inputs(vocabulary=4100)
    found = []
    for epilogue in ("torch", "triton"):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
        how = {"inv_temperature": rows.inverse, "chunk_bytes": 2 * 8 * 4100, "epilogue": epilogue}
        target = rows.target.clamp(max=4099)
        logp, entropy = token_logprobs(*leaves, target, bias=torch.linspace(-1, 1, 4100), **how)
        loss = logp.sum() if frozen else logp.sum() - 2 * entropy.sum()
        found.append([logp, entropy, *torch.autograd.grad(loss, leaves[:1] if frozen else leaves)])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-4)


@interpreted
def test_no_rows_are_no_launch():
    hidden, weight, rows = inputs()
    chunk = kind()(hidden[:0], Head(weight), rows.at(slice(0, 0)), None)
    assert chunk.gradient(chunk.statistics(), hidden[:0, 0], None).shape == (0, 5000)


@pytest.mark.skipif(INTERPRETED, reason="traced, without interpreting")
def test_the_compiled_passes_equal_the_torch_reference(monkeypatch):
    from tracegrad.kernels import compiled as room

    for name in ("_statistics", "_gradient"):  # in one graph; Inductor's code for it takes half a minute to build
        function = getattr(room, name)._torchdynamo_orig_callable
        monkeypatch.setattr(room, name, torch.compile(function, dynamic=True, fullgraph=True, backend="aot_eager"))
    compare((1.5, 0.3, True, True), torch.float32, None, 1.0, 1e-5)


@pytest.mark.skipif(INTERPRETED, reason="compiled, without interpreting")
@pytest.mark.parametrize("item", ["bf16", "fp32"])
@pytest.mark.parametrize("flags", [True, False])
def test_the_kernels_compile_for_hopper(item, flags):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tracegrad.kernels import triton_rows as room

    pointers = {"raw": f"*{item}", "out": "*bf16", "target": "*i64"}
    numbers = {"stride": "i32", "vocabulary": "i32", "logit_scale": "fp32", "softcap": "fp32"}
    constants = {"CAPPED": flags, "SCALED": flags, "BY_ENTROPY": flags, "BLOCK": 2048}
    for kernel in (room._statistics, room._gradient):
        names = kernel.arg_names
        kinds = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
        signature = {name: kinds.get(name, "*fp32") for name in names}
        chosen = {(names.index(name),): value for name, value in constants.items() if name in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=chosen)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert ".target sm_90" in compiled.asm["ptx"]
        assert compiled.asm["cubin"]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes tensors on CPU")
def test_kernels_are_not_offered_where_they_cannot_run():
    hidden, weight, rows = inputs()
    with pytest.raises(ArgumentError, match="on cpu and Triton kernels run on CUDA"):
        token_logprobs(hidden, weight, rows.target, epilogue="triton")
    with pytest.raises(ArgumentError, match="sums in float32"):
        token_logprobs(hidden.double(), weight.double(), rows.target, epilogue="compile")
    with pytest.raises(ArgumentError, match="no epilogue 'fast'"):
        token_logprobs(hidden, weight, rows.target, epilogue="fast")
