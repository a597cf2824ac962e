"""Run the commands of the how-to on several machines: several processes, and the options of a large run."""

import functools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import tracegrad
import tracegrad as tg

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import sampled, tiny_model
from tracegrad import config
from tracegrad.objective import presets
from tracegrad.trainer import train

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-on-several-machines.md"
QUICK = {"train.groups_per_step": 1, "pack.tokens_per_row": 1024, "data.holdout": 0, "optimizer.lr": 2e-4}


def documented() -> list[str]:
    """The page's torchrun command, word by word, without `torchrun` itself."""
    line, _ = [line for line in PAGE.read_text().splitlines() if line.startswith("torchrun ")]
    return shlex.split(line)[1:]


@pytest.mark.nightly  # torchrun; test_ranks.py has the process group of every run
def test_the_documented_command_trains_two_sharded_ranks_to_a_model_that_loads(example, tmp_path):
    from transformers import AutoModelForCausalLM

    tg.write(tg.read(example / "traces.jsonl.zst", limit=16), tmp_path / "runs.jsonl")
    words = ["2" if word == "8" else word for word in documented()]
    words = [{"DIR": str(example / "model")}.get(word, word) for word in words]
    words[words.index("--out") + 1] = "out"
    options = [part for name, value in QUICK.items() for part in (f"--{name}", str(value))]
    told = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    told |= {"PYTHONPATH": str(Path(tracegrad.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words, *options],
        cwd=tmp_path,
        env=told,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("2 ranks (fsdp)") == 1  # the first rank speaks, once
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) > 1
    assert all(row["grad_norm"] > 0 for row in rows[1:])
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint")
    before = AutoModelForCausalLM.from_pretrained(example / "model")
    pairs = zip(trained.state_dict().values(), before.state_dict().values(), strict=True)
    assert any(not torch.equal(now, then) for now, then in pairs)


def run(out, **changes):
    """A run of one epoch, its rows and the parameters it came to."""
    model = tiny_model(0, attn_implementation="sdpa")
    base = {"optimizer.lr": 3e-3, "train.groups_per_step": 6, "pack.tokens_per_row": 64}
    told = config.load(overrides=[*base.items(), *((name.replace("__", "."), v) for name, v in changes.items())])
    given = {"objective": presets.DAPO, "out": out, "config": told, "sinks": (), "log": lambda _: None}
    done = train(sampled(tiny_model(), groups=12), model, **given)
    return done.rows, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def compiled_runs(tmp_path, memory):
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    rows, wanted = run(tmp_path / "eager")
    ours, found = run(tmp_path / "compiled", train__compile=True, train__memory_mode=memory)
    assert counted["unique_graphs"] > before  # something was compiled
    assert [row["grad_norm"] for row in ours[1:]] == pytest.approx([row["grad_norm"] for row in rows[1:]], rel=1e-5)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.nightly  # test_flex_attention.py compiles layers in every run
@pytest.mark.parametrize("memory", ["speed", "low"])
def test_layers_that_are_traced_for_compilation_take_the_same_steps(tmp_path, monkeypatch, memory):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled_runs(tmp_path, memory)


@pytest.mark.nightly  # minutes of compiling
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_take_the_same_steps(tmp_path):
    compiled_runs(tmp_path, "speed")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.first_cases(1)
def test_a_dry_run_predicts_the_tokens_exactly_and_the_peak_nearly(monkeypatch, dtype):
    root = Path(__file__).parents[2] / "benches"
    monkeypatch.syspath_prepend(str(root / "gpu"))
    monkeypatch.syspath_prepend(str(root))
    from forecast import compared

    found = compared("balanced", True, dtype)
    assert found["planned"] == found["taken"]
    assert len(found["planned"]) == 2
    assert 0.86 < found["bytes"] / found["peak"] < 1.1  # so small that what is not of tensors' sizes shows
    assert found["least"] < found["seconds"]
