"""The Triton kernels without a GPU: they compile for Hopper, and are not offered where they cannot run.

What they compute is held in tests/gpu, which test_gpu_rehearsal.py runs with Triton's interpreter.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tracegrad.errors import ArgumentError  # noqa: E402
from tracegrad.policy import token_logprobs  # noqa: E402


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


def test_kernels_are_not_offered_where_they_cannot_run():
    hidden, weight, target = torch.randn(5, 8), torch.randn(50, 8), torch.arange(5)
    with pytest.raises(ArgumentError, match="on cpu and Triton kernels run on CUDA"):
        token_logprobs(hidden, weight, target, epilogue="triton")
    with pytest.raises(ArgumentError, match="sums in float32"):
        token_logprobs(hidden.double(), weight.double(), target, epilogue="compile")
    with pytest.raises(ArgumentError, match="no epilogue 'fast'"):
        token_logprobs(hidden, weight, target, epilogue="fast")
