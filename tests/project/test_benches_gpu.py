"""benches/gpu at tiny sizes on a CPU: rows run, beside the peers that run here, and they compute the same."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tracegrad

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not (find_spec("trl") and find_spec("peft")), reason="needs trl and peft")

BENCHES = Path(__file__).parents[2] / "benches" / "gpu"
CUDA_ALONE = {"TRL tries, varlen", "verl Triton", "CCE"}
OFTEN_ABSENT = {"Liger GRPO", "Liger NLL and entropy", "CCE", "prime-rl", "verl Triton"}
ROWS_OF_MODELS = ["small", "full", "trainer", "async", "shared", "longest"]
ROWS_OF_HEADS = ["head", "head-narrow", "head-peaked", "head-frozen", "head-memory"]
QUICK = ["head-narrow", "mask"]


def bench(out, *options, script="run.py"):
    """Runs a command of benches/gpu in a process of its own."""
    path = os.pathsep.join([str(Path(tracegrad.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    run = [sys.executable, BENCHES / script, "--out", out, *options]
    return subprocess.run(run, capture_output=True, text=True, check=False, timeout=900, env=told)


def records_of(out, size, *rows):
    """What run.py writes about rows, each of which has its figures."""
    done = bench(out, f"--{size}", "--rows", *rows)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "what | peer | peer_rate | ours | ratio" in done.stdout
    records = json.loads((out / f"gpu_cpu-{'rehearsal' if size == 'rehearse' else size}.json").read_text())
    assert list(dict.fromkeys(record["row"] for record in records)) == list(rows)
    for record in records:
        assert record["ours"] > 0, record
        assert {"what", "peer", "peer_rate", "ratio", "limit", "must", "unit", "device", "command"} <= record.keys()
        assert record["ratio"] > 0 if record["row"] not in ("small", "full") else record["peer"] is None, record
    left_out_for_a_reason(records)
    return records


def left_out_for_a_reason(records):
    """An arm is left out for its device, or because it is not installed, and the record has the reason."""
    for record in records:
        for name, arm in record["arms"].items():
            if "skipped" in arm:
                assert name in CUDA_ALONE | OFTEN_ABSENT, (record["what"], name, arm)
                assert name in CUDA_ALONE or "ModuleNotFoundError" in arm["skipped"], arm
                assert "NotImplementedError" not in arm["skipped"], arm  # an option that the peer does not have


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return records_of(tmp_path_factory.mktemp("gpu"), "tiny", *QUICK)


@pytest.mark.nightly
def test_the_heads_take_the_same_gradient(records):
    [heads] = [record["arms"] for record in records if record["row"] == "head-narrow"]
    if "ms" in (scaled := heads["Liger NLL and entropy"]):
        assert scaled["implementation"] == "_FusedLinearPPOFallbackFunction"  # its kernels are for Hopper
    liger = "Liger GRPO"  # takes one advantage for eight rows
    gaps = [arm["d_weight_error"] for name, arm in heads.items() if "d_weight_error" in arm and name != liger]
    assert len(gaps) >= 5
    assert max(gaps) < 0.05  # bfloat16 beside float32


def test_ligers_head_runs_without_cutlass_where_it_would_take_its_kernels_for_hopper(monkeypatch):
    liger_module = pytest.importorskip("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHES))
    from arms import Problem, full_logits, liger_implementation, liger_scaled

    # What Liger does on a device of capability 9.0; without nvidia-cutlass-dsl it raises ImportError.
    monkeypatch.setattr(liger_module, "_resolve_implementation", lambda device: liger_module._load_sm90_function())
    problem = Problem.of(16, 8, 50, "cpu", False)
    assert liger_implementation(problem) == "_FusedLinearPPOFallbackFunction"
    torch.testing.assert_close(liger_scaled(problem), full_logits(problem), rtol=0.01, atol=0.01)


@pytest.mark.nightly  # one head and the masks are measured in every run of the tests
def test_every_other_row_runs_and_tries_and_trainers_take_the_same_gradient(tmp_path):
    rows = [row for row in [*ROWS_OF_HEADS, *ROWS_OF_MODELS] if row not in QUICK]
    records = {record["row"]: record for record in records_of(tmp_path, "tiny", *rows)}
    assert records["async"]["gradient_gap"] < 1e-5
    ours, theirs = (records["trainer"]["arms"][name]["grad_norm"] for name in ("tracegrad", "TRL GRPOTrainer"))
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.nightly  # test_gpu_rehearsal.py takes the same roads in every run of the tests
def test_models_run_by_the_roads_of_a_gpu_in_bfloat16_under_flex_attention(tmp_path):
    records_of(tmp_path, "rehearse", *ROWS_OF_MODELS)


def test_the_rows_are_those_that_are_tested(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from rows import ROWS

    assert set(ROWS) == {*ROWS_OF_HEADS, *ROWS_OF_MODELS, "mask"}


GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "memory", "bytes_per_parameter", "tokens"),
    [
        # 4.02e9 parameters: (79 - 8) GiB less 30.0 for AdamW in bfloat16 are 7,180 tokens of 5.85 MiB.
        ("Qwen3-4B", 79, 8, 6144),
        ("Qwen3-4B", 139, 8, 16384),
        # Weights and gradients alone take 15.0 GiB and leave 9,800 tokens.
        ("Qwen3-4B", 79, 4, 8192),
        # 1.72e9 parameters, 6.4 GiB: 18,500 tokens of 3.56 MiB, and no row is longer than 16,384.
        ("Qwen3-1.7B", 79, 4, 16384),
        # 0.596e9 parameters, 8.9 GiB for AdamW in float32: (24 - 8 - 8.9) GiB are 3,330 tokens of 2.19 MiB.
        ("Qwen3-0.6B", 79, 16, 16384),
        ("Qwen3-0.6B", 24, 16, 2048),
    ],
)
def test_a_row_is_as_long_as_the_memory_of_the_card_allows(name, memory, bytes_per_parameter, tokens, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from models import row_tokens

    assert row_tokens(name, memory * GIB, bytes_per_parameter) == tokens


def test_prefixes_are_shared_with_the_largest_model_that_fits(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from models import largest_model, row_tokens

    assert [largest_model(n * GIB, 4) for n in (139, 79, 40)] == ["Qwen3-4B", "Qwen3-1.7B", "Qwen3-0.6B"]
    with pytest.raises(ValueError, match=r"Qwen3-4B .*8 .*32 GiB"):
        row_tokens("Qwen3-4B", 32 * GIB, 8)


@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        ("Qwen3-0.6B", True),
        pytest.param("Qwen3-1.7B", True, marks=pytest.mark.nightly),
        pytest.param("Qwen3-4B", False, marks=pytest.mark.nightly),
    ],
)
def test_a_token_keeps_the_memory_that_rows_are_sized_by(name, autocast, monkeypatch):
    """Measured on the second of two layers, less the bfloat16 copies of weights that autocast keeps."""
    monkeypatch.syspath_prepend(str(BENCHES))
    from transformers import Qwen3Config, Qwen3Model

    from clock import Allocated
    from models import MIB_PER_TOKEN, MODELS

    tokens, kept = 64, []
    for layers in (1, 2):
        sizes = {**MODELS[name], "num_hidden_layers": layers, "num_key_value_heads": 8, "head_dim": 128}
        config = Qwen3Config(**sizes, vocab_size=256, attn_implementation="sdpa")
        model = Qwen3Model(config).to(torch.float32 if autocast else torch.bfloat16)
        with Allocated() as allocated, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden = model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False).last_hidden_state
            kept.append(allocated.now)
        del hidden
    copies = 2 * sum(p.numel() for p in model.layers[0].parameters() if p.dim() == 2) if autocast else 0
    layer = (kept[1] - kept[0] - copies) / tokens / 2**20
    assert MODELS[name]["num_hidden_layers"] * layer == pytest.approx(MIB_PER_TOKEN[name], rel=0.01)


def test_a_row_that_is_ended_leaves_what_it_has_measured(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    import run
    from clock import Clock
    from models import Place
    from rows import Bench

    def ended():
        raise KeyboardInterrupt

    def row(bench):
        measured = bench.clock.compare({"tracegrad": lambda: None})
        yield bench.record("first", "ms", None, None, limit=1, must=1, better="less", arms=measured)
        bench.clock.compare({"tracegrad, other": lambda: None, "peer": ended})

    monkeypatch.setitem(run.ROWS, "ended", row)
    path = tmp_path / "x.json"
    with pytest.raises(KeyboardInterrupt):
        run.run_row("ended", Bench(Clock("cpu", 0, 2), Place("cpu", True)), "cpu", "command", path)
    first, unfinished = json.loads(path.read_text())
    assert (first["what"], first["arms"]["tracegrad"]["runs"]) == ("first", 2)
    assert unfinished["what"] == "ended, unfinished"
    assert unfinished["arms"] == {"tracegrad, other": {"peak_bytes": 0}}


def test_a_row_that_fails_keeps_the_arms_that_ran(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    import run
    from clock import Clock
    from models import Place
    from rows import Bench

    def row(bench):
        bench.clock.compare({"tracegrad": lambda: None})
        yield {}["figure"]

    monkeypatch.setitem(run.ROWS, "fails", row)
    path = tmp_path / "x.json"
    [record] = run.run_row("fails", Bench(Clock("cpu", 0, 2), Place("cpu", True)), "cpu", "command", path)
    assert [record] == json.loads(path.read_text())
    assert record["skipped"] == "KeyError: 'figure'"
    assert record["arms"]["tracegrad"]["runs"] == 2
    assert run.failed([record]) == ["fails"]


def test_where_writes_each_part_as_soon_as_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    import where
    from models import Place

    def ended(place):
        raise KeyboardInterrupt

    def fails(place):
        raise KeyError("kernel")

    path, place = tmp_path / "where_cpu-rehearsal.json", Place("cpu", True)
    monkeypatch.setattr(where, "PARTS", {"head": lambda _: {"ms": 1}, "host_waits": fails, "step": ended})
    with pytest.raises(KeyboardInterrupt):
        where.write_parts(place, tmp_path)
    parts = json.loads(path.read_text())
    assert parts["head"] == {"ms": 1}
    assert parts["host_waits"]["skipped"] == "KeyError: 'kernel'"
    assert "step" not in parts
    monkeypatch.setattr(where, "PARTS", {"host_waits": fails, "step": lambda _: {"terms": 1}})
    with pytest.raises(SystemExit, match="did not run: host_waits"):
        where.write_parts(place, tmp_path)
    assert json.loads(path.read_text())["step"] == {"terms": 1}


def test_quick_means_one_warm_up_and_four_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from models import Place
    from run import clock_of, parser

    clocks = [clock_of(parser().parse_args(flags), Place("cuda", False)) for flags in ([], ["--quick"])]
    assert [(clock.warm, clock.repeat) for clock in clocks] == [(3, 10), (1, 4)]


def test_an_arm_of_ours_that_fails_is_an_error_and_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from clock import Clock
    from run import failed

    def broken():
        raise KeyError("what no list of exceptions knew")

    found = Clock("cpu", 0, 2).compare({"tracegrad": broken, "peer": lambda: None, "tracegrad, other": lambda: None})
    assert found["tracegrad"]["skipped"] == "KeyError: 'what no list of exceptions knew'"
    assert "test_benches_gpu.py" in found["tracegrad"]["raised_at"]
    assert found["peer"]["runs"] == found["tracegrad, other"]["runs"] == 2
    assert failed([{"what": "row", "arms": found}]) == ["row: tracegrad"]
    assert failed([{"what": "row", "skipped": "why"}]) == ["row"]
    assert failed([{"what": "row", "arms": {"TRL": {"skipped": "not installed"}}}]) == []


def test_no_round_is_started_when_the_time_is_over(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from clock import Clock

    clock = Clock("cpu", 0, 5)
    clock.until = 0.0
    found = clock.compare({"a": lambda: None, "b": lambda: None})
    assert found["a"]["runs"] == 1
    assert found["b"] == {"skipped": "not started: the time of this row is over"}


def test_a_row_measured_again_takes_the_place_of_the_one_before(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from run import write

    write([{"row": "a", "ours": 1}, {"row": "b", "ours": 1}], tmp_path / "x.json")
    write([{"row": "a", "ours": 2}], tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == [{"row": "b", "ours": 1}, {"row": "a", "ours": 2}]
