"""Updates on the device: the same as on the CPU, however a step is cut, under every setting of memory, and resumed."""

import signal

import numpy as np
import pytest

pytest.importorskip("transformers")

from gpu_moved import (
    OBJECTIVE,
    WIDE,
    case,  # noqa: F401
    model_on,
    moved,
    step_of,
    told,
    torch,
)

from tiny import sampled, tiny_model
from tracegrad import model as policy
from tracegrad.model.attention import enable_flex_attention
from tracegrad.objective import presets
from tracegrad.packing import pack
from tracegrad.trainer import train
from tracegrad.trainer.lora import with_adapters
from tracegrad.trainer.step import correct_step, optimizer_step

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def traces():
    return sampled(tiny_model(**WIDE), groups=12)


def test_a_whole_step_in_float32_is_that_of_the_cpu(device, case):
    here, seen, step = moved(case, device)
    there, told, _ = moved(case, torch.device("cpu"), model=tiny_model(5, **WIDE))  # sdpa, branch by branch
    assert (here - there).norm() / there.norm() < 1e-4
    assert seen.loss == pytest.approx(told.loss, rel=1e-4)
    for name in ("logprobs", "entropy", "ratio", "gradient"):
        np.testing.assert_allclose(getattr(seen, name), getattr(told, name), rtol=1e-3, atol=1e-5, err_msg=name)
    assert len(step) > 70


def test_adamw_takes_the_same_step_on_the_device(device, case):
    """The second of two steps, so that both moments matter."""
    found = []
    for place, model in ((device, model_on(device)), (torch.device("cpu"), tiny_model(5, **WIDE))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, fused=place.type == "cuda")
        for _ in range(2):
            optimizer_step(model, step_of(case), OBJECTIVE, optimizer, grad_clip=1.0)
        found.append(torch.cat([p.detach().flatten().double().cpu() for p in model.parameters()]))
    start = torch.cat([p.detach().flatten().double() for p in tiny_model(5, **WIDE).parameters()])
    assert (found[0] - found[1]).norm() / (found[1] - start).norm() < 1e-2


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_gradient_does_not_depend_on_how_the_step_was_cut(device, case, precision):
    whole, _, _ = moved(case, device, precision=precision, budget=1024)
    for cut in ({"budget": 128}, {"budget": 256}, {"budget": 1024, "share": True}):
        other, _, step = moved(case, device, precision=precision, **cut)
        cosine = float(whole @ other / (whole.norm() * other.norm()))
        if precision == torch.float32:
            assert (whole - other).norm() / whole.norm() < 1e-4, cut
        assert cosine > (0.9999 if precision == torch.float32 else 0.999), cut
        assert len(step.batches) > 1 or cut.get("share")


def run(traces, out, device, resume=False, sinks=(), **changes):
    model = tiny_model(**WIDE)
    enable_flex_attention(model)
    how = {"train__device": str(device), "train__dtype": "fp32", **changes}
    done = train(
        traces,
        model,
        objective=presets.DAPO,
        out=out,
        config=told(**how),
        resume=resume,
        sinks=sinks,
        log=lambda _: None,
    )
    assert next(model.parameters()).device == device
    return done, torch.cat([value.detach().flatten().double().cpu() for value in model.state_dict().values()])


@pytest.mark.parametrize(
    "changes", [{"train__memory_mode": "balanced"}, {"train__memory_mode": "low"}], ids=["balanced", "low"]
)
def test_less_memory_is_the_same_run(device, traces, tmp_path, changes):
    _, plain = run(traces, tmp_path / "a", device)
    _, found = run(traces, tmp_path / "b", device, **changes)
    start = torch.cat([value.detach().flatten().double() for value in tiny_model(**WIDE).state_dict().values()])
    assert (found - plain).norm() / (plain - start).norm() < 2e-2


class StopAfter:
    """A sink that presses Ctrl-C when a step's row arrives."""

    def __init__(self, step):
        self.step = step

    def log(self, row):
        if row["step"] == self.step:
            signal.raise_signal(signal.SIGINT)

    def close(self):
        pass


def test_a_resumed_run_is_the_run_that_was_not_stopped(device, traces, tmp_path):
    _, whole = run(traces, tmp_path / "whole", device, train__epochs=2)
    run(traces, tmp_path / "cut", device, sinks=(StopAfter(2),), train__epochs=2)
    _, resumed = run(traces, tmp_path / "cut", device, resume=True, train__epochs=2)
    if device.type == "cpu":
        assert torch.equal(whole, resumed)
    else:  # sums over rows have no fixed order on CUDA
        assert (whole - resumed).norm() / whole.norm() < 1e-5


def test_a_run_in_bfloat16_with_adapters_trains_and_is_written(device, traces, tmp_path):
    _, found = run(traces, tmp_path, device, train__dtype="bf16", train__lora_rank=4)
    assert torch.isfinite(found).all()
    assert (tmp_path / "checkpoint" / "adapter_model.safetensors").is_file()


def test_a_frozen_base_under_adapters_takes_a_gradient_in_bfloat16(device, case):
    model = with_adapters(model_on(device), 4).to(device)
    step = step_of(case)
    corrected = correct_step(step, OBJECTIVE, "mask")
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for batch in step.batches:
            moved_batch = batch.to(device)
            policy.batch_loss(model, moved_batch, step.terms(moved_batch, corrected), OBJECTIVE).loss.backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and torch.isfinite(g).all() for g in grads)
    assert sum(float(g.norm()) for g in grads) > 0


def test_nothing_waits_for_the_device_between_the_batches_of_a_step(device, case, rehearsal):
    """Forward, loss and backward of a shared row; a CPU cannot tell, so there the calls that would wait are counted."""
    from waits import Waits

    model, step = model_on(device), step_of(case, share=True)
    corrected = correct_step(step, OBJECTIVE, "mask")
    given = [(batch.to(device), step.terms(batch.to(device), corrected)) for batch in step.batches]

    def passes():
        for batch, terms in given:
            policy.batch_loss(model, batch, terms, OBJECTIVE).loss.backward()

    passes()  # looks at the head once, and compiles
    if not rehearsal:
        torch.cuda.set_sync_debug_mode("error")
    try:
        with Waits() as waits:
            passes()
    finally:
        if not rehearsal:
            torch.cuda.set_sync_debug_mode("default")
    # On a CPU, where looking waits for nothing, the head looks for temperatures and upstream gradients of 1.
    looks = waits.seen.pop("_local_scalar_dense", 0)
    assert looks <= (3 if rehearsal else 0)
    assert not waits.seen


def test_rows_of_a_trace_level_objective_go_together(device, case):
    """GSPO takes the ratio of a whole trace, whose branches lie in one row."""
    found = []
    for place, model in ((device, model_on(device)), (torch.device("cpu"), tiny_model(5, **WIDE))):
        told = {"requirements": presets.GSPO.requirements, "pad_to_multiple_of": 128}
        [step] = pack(case.sequences, case.advantages, tokens_per_row=512, **told)
        step = case.ready(step)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = optimizer_step(model, step, presets.GSPO, optimizer, grad_clip=1.0)
        assert place.type == model.device.type
        found.append((seen.loss, seen.grad_norm))
    assert found[0] == pytest.approx(found[1], rel=1e-3)
