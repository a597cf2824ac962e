"""What Inductor and Triton make of our attention for a CUDA device, without one: lowered, generated and compiled.

A CPU traces and differentiates the function; Inductor is then given the graphs as if their tensors were on an H100, and
Triton compiles the kernels for sm_90. None is run: tests/gpu do that on a device. On the first one, `_flex` was refused
for rows of 64 to 127 tokens, by Inductor alone.
"""

import importlib.util
import re
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "benches" / "gpu"))

from rehearsal import flex_attention_on_the_cpu
from tracegrad.model import attention, block_mask
from tracegrad.packing import Batch

SHARED_BYTES = 232448  # that a block of threads may have on an H100
CARD = {"multi_processor_count": 132, "major": 9, "regs_per_multiprocessor": 65536, "warp_size": 32}


class GeneratedError(Exception):
    """The code is there, and is not run."""


@contextmanager
def h100():
    """Let Inductor find an H100 as device 0."""
    from torch._inductor import scheduler
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget

    hints = DeviceProperties(type="cuda", index=0, cc=90, max_threads_per_multi_processor=2048, **CARD)
    card = SimpleNamespace(name="NVIDIA H100", minor=0, total_memory=80 << 30, gcnArchName="", **CARD)
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "get_device_properties", lambda *_: card),
            (torch.cuda, "current_device", lambda: 0),
            (DeviceProperties, "create", lambda *_: hints),
            (scheduler, "has_triton", lambda: True),
            (triton.runtime.driver, "_active", driver),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def generated(tokens, *, heads, keys, size, dtype, window=None, softcap=None, sinks=False):
    """Inductor's code of the forward and the backward pass of a row on CUDA."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    code = []

    def stop(*_):
        raise GeneratedError

    def lower(module, inputs):
        mode = next(each.fake_mode for each in inputs if isinstance(each, torch.Tensor))
        with mode:
            moved = [
                torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda") if torch.is_tensor(x) else x
                for x in inputs
            ]
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*moved)
        graph = GraphLowering(module, example_inputs=moved, shape_env=mode.shape_env)
        with V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            graph.run(*moved)
            code.append(graph.codegen()[0].value)
        return stop

    place = torch.arange(tokens)
    none = place[:0]
    batch = Batch(place, place, torch.full_like(place, tokens), none, none, none.float(), none, none.numpy())
    shapes = [(1, each, tokens, size) for each in (heads, keys, keys)]
    given = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    sink = torch.randn(heads, requires_grad=True) if sinks else None
    backend = aot_autograd(fw_compiler=lower, bw_compiler=lower, decompositions=select_decomp_table())
    torch.compiler.reset()
    try:
        lowered_at_once = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        with h100(), lowered_at_once, flex_attention_on_the_cpu(backend), pytest.raises(GeneratedError):
            attention._compiled(backend)(*given, block_mask(batch, window=window), size**-0.5, softcap, sink)
    finally:
        torch.compiler.reset()
    return code


def options_beside(**options):
    """In the place of Inductor's decorator: leave a kernel uncompiled beside its options."""
    return lambda function: (function, options)


def kernels(code, folder):
    """Each template in Inductor's code, compiled for sm_90, by name."""
    from torch._inductor.runtime import triton_heuristics
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = {}
    for name, text in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", "\n".join(code), re.DOTALL):
        if "triton_heuristics.template" not in text:
            continue
        (folder / f"{name}.py").write_text(text.replace("\\\\", "\\"))
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        with mock.patch.object(triton_heuristics, "template", options_beside):
            spec.loader.exec_module(module)
        function, told = getattr(module, name)
        meta = told["triton_meta"]
        source = ASTSource(function, dict(meta["signature"]), dict(meta["constants"]), dict(meta["configs"][0]))
        options = {key: told[key] for key in ("num_warps", "num_stages")}
        found[name] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return found


QWEN3 = {"heads": 16, "keys": 8, "size": 128, "dtype": torch.bfloat16}


@pytest.mark.parametrize("tokens", [96, 300])
def test_a_row_of_any_length_is_one_kernel_each_way(tokens):
    code = generated(tokens, **QWEN3)
    names = [re.findall(r"async_compile\.triton\('(triton_tem_\w+)'", each) for each in code]
    assert [len(each) for each in names] == [1, 1]
    assert "flex_attention_backward" in names[1][0]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 16, "keys": 8, "size": 128},
        {"heads": 64, "keys": 8, "size": 64, "window": 128, "sinks": True},
        {"heads": 8, "keys": 4, "size": 256, "window": 512, "softcap": 50.0},
        {"heads": 4, "keys": 1, "size": 256, "window": 512},
        {"heads": 8, "keys": 8, "size": 80},
    ],
    ids=["Qwen3", "GptOss", "Gemma2", "Gemma3", "D80"],
)
def test_the_kernels_fit_the_shared_memory_of_hopper(shape, dtype, tmp_path):
    """A kernel that does not is replaced by another attention, or stops a run: float32 is what checks run in."""
    found = kernels(generated(300, dtype=dtype, **shape), tmp_path)
    assert len(found) == 2
    for name, kernel in found.items():
        assert kernel.metadata.shared <= SHARED_BYTES, name
        if dtype == torch.bfloat16:
            assert "wgmma" in kernel.asm["ptx"], name
