"""The online loop against a real vLLM: steps that are proven, a replay that is equal, and a mistake that is found."""

import itertools

import pytest
import torch
from safetensors.torch import load_file

import online
import tracegrad as tg
from tracegrad import weight_sync
from tracegrad.online import SyncFault, training_loop
from vllm_runs import CONFIG, run

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_each_step_is_proven_and_the_run_is_its_replay(served, example, tmp_path, steps_ahead):
    found = run(example, served, tmp_path / "run", steps_ahead=steps_ahead)
    for row in found.rows:
        about = f"{row['weight_check/tokens']} tokens, max {row['weight_check/max']:.1e}"
        about += f", staleness {row['staleness_mean']:.2f}"
        print(f"\nstep {row['step']}: {about}")
        assert row["weight_check/tokens"] > 0
        assert row["weight_check/max"] < 1e-4
        assert row["tokens_lost"] == 0
    again = tg.online.replay(
        tmp_path / "run", example / "model", objective=tg.presets.DAPO_DIRECT, config=CONFIG, out=tmp_path / "again"
    )
    ours, theirs = (load_file(each.checkpoint / "model.safetensors") for each in (found, again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_cache_that_is_not_cleared_ends_the_run_by_its_name(served, example, tmp_path, monkeypatch):
    def careless(driven, _told):
        return lambda servers: weight_sync.File(servers, driven.out / "weights", clear_cache=False)

    monkeypatch.setattr(training_loop, "weight_sync_backend", careless)
    with pytest.raises(SyncFault, match=r"TG-ONLINE-020.*On a new prompt they agree"):
        run(example, served, tmp_path, steps=6)


def test_the_example_plays_what_the_task_says(example):
    [told] = itertools.islice(online.tasks("traces", 0), 1)
    assert set(told) == {"kind", "name", "item", "quantity", "offer", "text"}
