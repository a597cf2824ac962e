"""The passes over the vocabulary fused by torch.compile, and compiled layers, beside plain torch on the device."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import forked as cases
from tiny import tiny_model
from tracegrad.model.attention import enable_flex_attention
from tracegrad.model.lm_head_chunked import Chunk, Head, Rows
from tracegrad.trainer.memory import compile_layers

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def chunk(rehearsal, monkeypatch):
    """The class under test. The rehearsal traces it in one graph and leaves out Inductor, which takes half a minute."""
    from tracegrad.model import lm_head_chunked as room

    if rehearsal:
        options = {"dynamic": True, "fullgraph": True, "backend": "aot_eager"}
        monkeypatch.setattr(room, "_compiled", lambda function: torch.compile(function, **options))
    return room.CompiledChunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_compiled_passes_equal_the_torch_reference(chunk, device, dtype):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=g).to(device, dtype) for n in (6, 5000))
    rows = Rows(torch.tensor([0, 4999, 7, 4095, 4096, 2]).to(device), (torch.rand(6, generator=g) + 0.5).to(device))
    head = Head(weight, None, 1.5, 0.3)
    theirs, ours = Chunk(hidden, head, rows, None), chunk(hidden, head, rows, None)
    expected, found = theirs.statistics(), ours.statistics()
    for a, b in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-6)
    slopes = torch.linspace(-1, 1, 6, device=device), torch.linspace(0.5, -1, 6, device=device)
    a, b = ours.gradient(found, *slopes), theirs.gradient(expected, *slopes)
    assert (a.float() - b.float()).norm() <= (1e-5 if dtype == torch.float32 else 2.0**-8 + 1e-5) * b.float().norm()


def test_compiled_layers_take_the_same_step(device, rehearsal, monkeypatch):
    from gpu_moved import moved

    if rehearsal:
        compile_by = torch.compile
        monkeypatch.setattr(torch, "compile", lambda f, **how: compile_by(f, **{"backend": "aot_eager", **how}))
    models = [tiny_model(5, head_dim=16, hidden_size=32).to(device) for _ in range(2)]
    for model in models:
        enable_flex_attention(model)
    compile_layers(models[1])
    case = cases.forked(more=24, stem=24)
    eager, compiled = (moved(case, device, model=model)[0] for model in models)
    assert (eager - compiled).norm() / eager.norm() < 1e-4
