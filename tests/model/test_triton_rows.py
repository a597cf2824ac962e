"""The Triton kernels without a GPU: they compile for Hopper, and are not offered where they cannot run.

What they compute is held in tests/gpu, which test_gpu_rehearsal.py runs with Triton's interpreter.
"""

import re
import subprocess

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tracegrad.errors import ArgumentError
from tracegrad.model import token_logprobs

THREADS = 4 * 32  # Triton's default of four warps; the launch asks for no other number
VOCABULARY = 151_936  # Qwen3's. Rows of a multiple of 16 numbers begin at a multiple of 16 bytes.


def compiled(name, raw, out, flags):
    """Compile a kernel for Hopper with what the launcher tells Triton about its arguments: multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tracegrad.model import lm_head_triton

    assert VOCABULARY % 16 == 0
    kernel = getattr(lm_head_triton, name)
    block = {"_statistics": lm_head_triton._BLOCK, "_gradient": lm_head_triton._PIECE}[name]
    constants = {"CAPPED": flags, "SCALED": flags, "BY_ENTROPY": flags, "BLOCK": block}
    kinds = {"raw": f"*{raw}", "out": f"*{out}", "target": "*i64", "stride": "i32", "vocabulary": "i32"}
    kinds |= {"logit_scale": "fp32", "softcap": "fp32", **dict.fromkeys(constants, "constexpr")}
    names = kernel.arg_names
    signature = {each: kinds.get(each, "*fp32") for each in names}
    constexprs = {(names.index(each),): value for each, value in constants.items() if each in names}
    aligned = [each for each, kind in signature.items() if kind == "i32" or kind.startswith("*")]
    attributes = {(names.index(each),): [["tt.divisibility", 16]] for each in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)), block


def accesses(ptx, kind):
    """Bytes that one thread reads ("ld") or writes ("st") in each instruction on global memory."""
    every = re.findall(rf"\b{kind}\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\s", ptx)
    return [int(count or 1) * int(bits) // 8 for count, bits in every]


@pytest.mark.parametrize(
    ("name", "raw", "out"),
    [
        ("_statistics", "bf16", None),
        ("_statistics", "fp32", None),
        ("_gradient", "bf16", "bf16"),
        ("_gradient", "fp32", "bf16"),
        ("_gradient", "fp32", "fp32"),
    ],
)
@pytest.mark.parametrize("flags", [True, False])
def test_for_hopper_the_kernels_read_and_write_16_bytes_at_a_time_and_spill_nothing(name, raw, out, flags, tmp_path):
    kernel, block = compiled(name, raw, out, flags)
    ptx = kernel.asm["ptx"]
    assert ".target sm_90" in ptx
    # Beside the table a row has a target, an inverse temperature and, in `_gradient`, four numbers by which it is
    # multiplied (two without the entropy); `_statistics` reads the logit of the target once more and writes three sums.
    one_by_one = 1 + flags + ((4 if flags else 2) if name == "_gradient" else 1)
    reads, writes = accesses(ptx, "ld"), accesses(ptx, "st")
    size = {"bf16": 2, "fp32": 4}
    assert sorted(reads, reverse=True)[:-one_by_one] == [16] * (block * size[raw] // (16 * THREADS))
    assert all(each <= 8 for each in sorted(reads)[:one_by_one])
    assert writes == ([4] * 3 if out is None else [16] * (block * size[out] // (16 * THREADS)))
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", binary]
    usage = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    [(registers, stack, local)] = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert (int(stack), int(local)) == (0, 0), usage
    assert int(registers) * THREADS * 4 <= 65_536, usage  # four blocks fit the registers of a multiprocessor


def test_kernels_are_not_offered_where_they_cannot_run():
    hidden, weight, target = torch.randn(5, 8), torch.randn(50, 8), torch.arange(5)
    with pytest.raises(ArgumentError, match="TG-MODEL-011"):
        token_logprobs(hidden, weight, target, epilogue="triton")
    with pytest.raises(ArgumentError, match="TG-MODEL-009"):
        token_logprobs(hidden.double(), weight.double(), target, epilogue="compile")
    with pytest.raises(ArgumentError, match=r"TG-MODEL-010.*fast"):
        token_logprobs(hidden, weight, target, epilogue="fast")
