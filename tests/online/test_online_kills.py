"""Processes of a run that are killed: no group is torn, lost or played twice, and the end is that of a replay."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

import tracegrad as tg
from online_runs import CONFIG, PLAY, assert_same
from tracegrad.online.buffer import ConsumedGroups, GroupReader

HERE = Path(__file__).parents[1] / "helpers"


def killed(out, steps, collectors=0, seed=0, **kills):
    """What came of a run of so many steps whose processes were killed so often."""
    plan = {"steps": steps, "collectors": collectors, "seed": seed, "kills": kills}
    path = os.pathsep.join([str(Path(tg.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, HERE / "killed_online.py", out, json.dumps(plan)],
        capture_output=True,
        text=True,
        check=False,
        env=told,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((out / "killed.json").read_text())
    print(f"\n{found['seconds']:.0f} s, {Counter(each['what'] for each in found['kills'])}, inside:")
    print({name: sum(each[name] for each in found["kills"]) for name in ("inside_a_group", "inside_a_checkpoint")})
    assert Counter(each["what"].split()[0] for each in found["kills"]) == Counter(kills)
    assert {each["code"] for each in found["kills"]} == {-9}
    check(out, steps)
    return found


def check(out, steps):
    """What must hold of the folder of a run that is over, however often what was killed: each task is one group."""
    found = GroupReader(out / "run" / "played").read_new()
    groups = CONFIG.train.groups_per_step
    assert sorted(int(traces.groups[0]) for _, traces in found) == list(range(steps * groups))
    assert all(len(traces) == PLAY["samples"] for _, traces in found)
    records = [json.loads(trace.record) for _, traces in found for trace in traces]
    assert [each["failure"] for each in records if "failure" in each] == []
    ledger = ConsumedGroups(out / "run").steps
    assert [step.step for step in ledger] == list(range(steps))
    taken = [place for step in ledger for place in step.groups]
    assert sorted(taken) == sorted(place for place, _ in found)
    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["weight_check/max"] < 1e-4 for row in rows if row.get("weight_check/tokens"))
    assert len(list((out / "run" / "weights").iterdir())) <= 2
    assert [path.name for path in (out / "run" / "checkpoints").glob(".tmp-*")] == []
    ended = [load_file(out / name / "checkpoint" / "model.safetensors") for name in ("run", "again")]
    assert_same(*ended)


@pytest.mark.nightly
def test_a_trainer_that_is_killed_goes_on_to_the_parameters_of_its_replay(tmp_path):
    killed(tmp_path, 6, trainer=1)


@pytest.mark.nightly  # test_killed.py kills a trainer in every run, test_online_collect.py a collector
def test_one_of_each_process_is_killed(tmp_path):
    killed(tmp_path, 10, collectors=1, trainer=1, collector=1, server=1)


@pytest.mark.nightly
def test_fifty_kills_of_a_trainer_that_plays(tmp_path):
    killed(tmp_path, 70, seed=1, trainer=50)


@pytest.mark.nightly
def test_fifty_kills_of_collectors_and_of_their_trainer(tmp_path):
    killed(tmp_path, 120, collectors=2, seed=2, trainer=50, collector=50)


@pytest.mark.nightly
def test_ten_kills_of_the_server_and_of_all_beside_it(tmp_path):
    killed(tmp_path, 36, collectors=1, seed=3, trainer=5, collector=5, server=10)
