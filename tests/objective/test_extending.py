"""docs/how-to/extend.md runs, from outside the package and as patches to a copy of the tree."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tracegrad as tg
from tiny import sampled, tiny_model
from tracegrad.errors import ArgumentError
from tracegrad.objective import override, presets

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "how-to" / "extend.md").read_text(), re.DOTALL)


@pytest.fixture
def page(monkeypatch):
    """The names that the page defines."""
    module = type(sys)("extending")
    monkeypatch.setitem(sys.modules, "extending", module)
    for block in BLOCKS:
        exec(compile(block, "docs/how-to/extend.md", "exec"), vars(module))
    return module


def test_the_loss_of_the_page_is_the_one_of_the_file_that_it_explains():
    own = (ROOT / "tests" / "objective" / "test_own_loss.py").read_text()
    assert len(own.splitlines()) <= 25
    loss = BLOCKS[0][BLOCKS[0].index("@dataclass") : BLOCKS[0].index("SQUARED =")].strip()
    assert loss in own


def test_own_loss_advantage_and_metric_train_together(page, tmp_path):
    model = tiny_model()
    data = sampled(model, groups=8)
    advantages = page.ranked(data.reward, data.group)
    for group in range(8):  # ranks of 4 sum to 0, and order as the rewards do
        reward, rank = data.reward[data.group == group], advantages[data.group == group]
        assert rank.sum() == pytest.approx(0)
        assert (np.sign(reward[:, None] - reward) == np.sign(rank[:, None] - rank)).all()
    rows = page.train(model, data, advantages, page.SQUARED, tmp_path)
    assert len(rows) == 2
    assert rows[0]["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert all(0 < row["own/surprises"] < 1 for row in rows)


def test_own_trainer_takes_the_step_of_our_learner(page, tmp_path):
    data, model, other = sampled(tiny_model(), groups=2), tiny_model(1), tiny_model(1)
    advantages = page.ranked(data.reward, data.group)
    batch = {"advantages": torch.from_numpy(advantages)}
    for name, values in {"ids": data.ids, "mask": data.trainable, "rollout": data.rollout_logprobs}.items():
        rows = [torch.from_numpy(each) for each in np.split(values, data.cu_seqlens[1:-1])]
        batch[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    batch["ids"] = batch["ids"].long()
    for objective in (page.SQUARED, presets.DAPO, presets.GSPO):
        model.zero_grad()
        page.loss_of(model, batch, objective).backward()
        (step,) = tg.pack(data, advantages, tokens_per_row=512, requirements=objective.requirements)
        run = tg.trainer.Trainer(other, objective, out=tmp_path / "run")
        outcome = run.step(step.with_logprobs(old=run.compute_logprobs(step)))
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
        assert norm.item() == pytest.approx(outcome.grad_norm, rel=1e-4)
        other = tiny_model(1)


def test_an_objective_of_ones_own_is_named_on_a_command_line(page, tmp_path):
    (tmp_path / "mine.py").write_text(BLOCKS[0])
    found = presets.find(f"{tmp_path}/mine.py:SQUARED")
    assert repr(found) == repr(page.SQUARED)
    assert override(found, "surrogate.tau", "0.3").surrogate.tau == 0.3
    with pytest.raises(ArgumentError, match=r"TG-OBJ-027.*Did.*you.*SQUARED"):
        presets.find(f"{tmp_path}/mine.py:SQARED")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ArgumentError, match=r"TG-OBJ-026.*broken\.py:SQUARED.*ZeroDivisionError.*division.*zero"):
        presets.find(f"{tmp_path}/broken.py:SQUARED")
    with pytest.raises(ArgumentError, match=r"TG-OBJ-026.*absent\.py"):
        presets.find(f"{tmp_path}/absent.py:SQUARED")


def test_own_rejections_drop_the_tokens_of_their_rule():
    page = (ROOT / "docs" / "how-to" / "write-a-rejection.md").read_text()
    scope = {"__name__": "rejection"}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1:3]:
        exec(compile(block, "write-a-rejection.md", "exec"), scope)
    # Probabilities of e^-12, below 1e-4, at the second and third token; only the second was likelier when recorded.
    # The fourth has no recorded logprob, and the second trace a positive advantage.
    logprobs = torch.tensor([[-0.5, -12.0, -12.0, -12.0], [-12.0, -12.0, -0.5, -0.5]], requires_grad=True)
    rollout = torch.tensor([[-0.5, -3.0, -13.0, torch.nan], [-3.0, -3.0, -0.5, -0.5]])
    arrays = {"old": logprobs.detach(), "rollout": rollout, "mask": torch.ones(2, 4, dtype=torch.bool)}
    for name, dropped in {"DropUnlikely": [1], "DropTraceWithUnlikely": [0, 1, 2, 3]}.items():
        objective = replace(scope["MINE"], rejections=(scope[name](),))
        loss = tg.objective.padded_loss(
            objective, logprobs, advantages=torch.tensor([-1.0, 1.0]), missing_logprobs="ratio_one", **arrays
        ).loss
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert gradient[0].eq(0).nonzero().flatten().tolist() == dropped
        assert gradient[1].ne(0).all()


@pytest.mark.parametrize("name", ["gate", "format"])
def test_the_patches_are_of_the_tree_as_it_is(name):
    told = (ROOT / "examples" / "extending" / f"{name}.patch").read_text()
    subprocess.run(["patch", "-p1", "--fuzz=0", "-s", "--dry-run"], input=told, text=True, cwd=ROOT, check=True)


def test_every_form_has_a_heading_in_the_format_page():
    page = (ROOT / "docs" / "reference" / "trace-format.md").read_text()
    named = {
        name
        for path in (ROOT / "rust" / "core" / "src" / "format" / "trajectories").glob("*.rs")
        for name in re.findall(r'Form \{ name: "(\w+)"', path.read_text())
    }
    assert {"tau_bench", "slime", "rllm"} <= named
    assert {name for name in named if f"`{name}`" not in "".join(re.findall(r"(?m)^#+ .*$", page))} == set()


@pytest.mark.nightly
def test_a_gate_and_a_format_are_patches_that_build_and_run(tmp_path):
    skipped = shutil.ignore_patterns("target", ".*", "out", "*.so", "__pycache__")
    tree = shutil.copytree(ROOT, tmp_path / "tree", ignore=skipped)
    for name in ("gate", "format"):
        told = (ROOT / "examples" / "extending" / f"{name}.patch").read_text()
        subprocess.run(["patch", "-p1", "--fuzz=0", "-s"], input=told, text=True, cwd=tree, check=True)
    quick = {"LTO": "off", "CODEGEN_UNITS": "16", "OPT_LEVEL": "1", "STRIP": "none"}
    target = ROOT / "target" / "patched"
    environment = {**os.environ, **{f"CARGO_PROFILE_RELEASE_{name}": value for name, value in quick.items()}}
    environment |= {"CARGO_TARGET_DIR": str(target), "PYO3_BUILD_EXTENSION_MODULE": "1", "PYO3_PYTHON": sys.executable}
    environment |= {"PYTHONPATH": str(tree / "python")}
    subprocess.run(["cargo", "build", "--release", "-q", "-p", "tracegrad-py"], cwd=tree, env=environment, check=True)
    shutil.copy(target / "release" / "lib_core.so", tree / "python" / "tracegrad" / "_core.abi3.so")
    which = ["tests/objective/test_twins.py", "-k", "hellinger"]
    twins = [sys.executable, "-m", "pytest", *which, "-v", "-p", "no:cacheprovider"]
    done = subprocess.run(twins, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout
    cells = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "notes.jsonl").write_text(json.dumps({"notebook": "n1", "cells": cells, "score": 0.5}) + "\n")
    code = "import sys, tracegrad as tg; (trace,) = tg.read(sys.argv[1]); print(trace.id, trace.to_dict())"
    read = [sys.executable, "-c", code, str(tmp_path / "notes.jsonl")]
    told = subprocess.run(read, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert told.startswith("n1 ")
    assert "0.5" in told
