"""Rows and traces as TensorBoard, wandb and trackio keep them, each by its own library, without a network."""

import json
import math
import os
import subprocess
import sys
import time

import pytest

import tracegrad as tg
from tracegrad.config.schema import DASHBOARDS
from tracegrad.errors import ArgumentError
from tracegrad.metrics import loggers

ROWS = [{"step": 1, "loss": 0.5, "kl": math.nan, "value": None}, {"step": 2, "loss": 0.25, "ratio/turn_0": 1.5}]
CONFIG = {"optimizer.lr": 1e-5, "train.seed": 3}
TRACE = {"id": "a", "group": "g", "reward": 1.0, "messages": [{"role": "user", "content": "<b>2 × 3?</b>"}]}


def log(name, out):
    """Two rows by two processes' worth of sinks: the second goes on with the run of the first."""
    for row in ROWS:
        [sink] = loggers.open_sinks([name], out, CONFIG)
        sink.log(row)
        sink.close()
        time.sleep(1.1)  # wandb names a run's folder by the second


def test_every_dashboard_that_an_option_names_can_be_opened():
    assert set(loggers._SINKS) == set(DASHBOARDS)


def test_tensorboard_gets_the_finite_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "ratio/turn_0"}
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]


def records(data):
    """What a .wandb file holds: LevelDB's log format (blocks of 32 KiB, a head of 7 bytes before each part)."""
    at, parts = 7, b""  # wandb's own head
    while at + 7 <= len(data):
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
        at += -at % 32768 if -at % 32768 < 7 else 0


def test_wandb_gets_the_finite_numbers_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    log("wandb", tmp_path / "run")
    from wandb.proto import wandb_internal_pb2

    found, ids, told = [], set(), {}
    for path in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add((record.run.run_id, record.run.project, record.run.display_name))
                told |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                found += [(record.history.step.num, name, json.loads(item.value_json))] if name[0] != "_" else []
    assert sorted(found) == [(1, "loss", 0.5), (2, "loss", 0.25), (2, "ratio/turn_0", 1.5)]
    assert len(ids) == 1
    assert next(iter(ids))[1:] == ("tracegrad", "run")
    assert {name: told[name] for name in CONFIG} == CONFIG


TRACKIO = """
import json, sys
import tracegrad as tg
from pathlib import Path
from tracegrad.metrics import loggers
sys.path.insert(0, sys.argv[1])
from test_dashboards import CONFIG, TRACE, log
out = Path(sys.argv[2])
log("trackio", out)
[sink] = loggers.open_sinks(["trackio"], out, CONFIG)
loggers.log_traces([sink], tg.Traces.from_records([TRACE]), 2)
sink.close()
from trackio.sqlite_storage import SQLiteStorage as Kept
[run] = Kept.get_runs("tracegrad")
there = ("tracegrad", run)
print(json.dumps([run, *(each(*there) for each in (Kept.get_logs, Kept.get_traces, Kept.get_run_config))]))
"""


def test_trackio_gets_numbers_and_traces(tmp_path):
    there = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    told = [sys.executable, "-c", TRACKIO, os.path.dirname(__file__), tmp_path / "run"]
    done = subprocess.run(told, capture_output=True, text=True, check=True, env=there)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("[")]
    run, logs, traces, config = json.loads(line)
    assert run.startswith("run-")
    assert [(row["step"], row["loss"]) for row in logs if "loss" in row] == [(1, 0.5), (2, 0.25)]
    assert not any("kl" in row for row in logs)
    [shown] = traces
    assert shown["step"] == 2
    assert shown["messages"] == TRACE["messages"]
    assert shown["metadata"] == {"id": "a", "group": "g", "reward": 1.0}
    assert {name: config[name] for name in CONFIG} == CONFIG


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_package_that_is_not_there_is_said(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ArgumentError, match=rf"TG-METRIC-006.*{name}"):
        loggers.open_sinks([name], tmp_path, CONFIG)


def test_no_dashboard_is_opened_unless_it_is_named(tmp_path):
    assert loggers.open_sinks((), tmp_path, CONFIG) == []
    with pytest.raises(ArgumentError, match="TG-CONFIG-010"):
        tg.config.Train(report_to=("tensorboard", "comet"))
