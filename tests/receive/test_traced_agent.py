"""The walk of docs/how-to/receive.md: an agent with OpenTelemetry, the receiver, the doctor and a step of training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tracegrad as tg
from otlp_spans import Receiving
from policy_server import MODEL, PolicyServer
from tracegrad.cli import main

AGENT = Path(__file__).parents[2] / "examples" / "online" / "traced_agent.py"


def test_what_a_traced_agent_did_is_trained_on(tmp_path, capsys):
    out = tmp_path / "received"
    with PolicyServer() as server, Receiving(out) as receiver:
        server.adapted["policy"] = server.model
        environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
        command = [sys.executable, AGENT, "--server", server.url, "--tasks", "2", "--samples", "4"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        code, counts, _ = receiver.stop()
        assert (code, counts["traces"], counts["rejected"]) == (0, 8, 0)
        calls = server.calls
    traces = tg.read(out, map={"group": "prompt"})
    assert (len(traces), len(set(traces.groups))) == (8, 2)
    sequences = tg.align(traces, tg.Tokenizer.from_pretrained(MODEL))
    assert sequences.levels()["T0"]["generations"] == calls  # each call with its ids and its prompt
    assert np.isfinite(sequences.rollout_logprobs[sequences.terms]).all()
    assert set(traces.reward) == {0.0, 1.0}

    assert main(["doctor", str(out), "--model", str(MODEL)]) == 1
    [command] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next ")]
    assert "--map.group attributes.task" in command
    told = ["--model", str(MODEL), "--out", str(tmp_path / "run"), "--map.group", "prompt"]
    assert main(["train", str(out), *told, "--data.holdout", "0", "--train.groups_per_step", "2"]) == 0
    _, row = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["grad_norm"] > 0
    assert abs(row["kl_rollout_theta"]) < 1e-3  # the recorded logprobs are the model's own


@pytest.mark.nightly
def test_an_instrumentation_records_ids_and_logprobs_that_the_agent_asks_for(tmp_path, stores_python):
    with PolicyServer() as server, Receiving(tmp_path / "received") as receiver:
        server.adapted["policy"] = server.model
        environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
        script = Path(__file__).parents[1] / "helpers" / "openinference_agent.py"
        command = [stores_python, script, server.url]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert receiver.stop()[1]["traces"] == 4
    traces = tg.read(tmp_path / "received", map={"group": "prompt"})
    assert sorted(traces.reward) == [0.0, 0.5, 1.0, 1.5]
    sequences = tg.align(traces, tg.Tokenizer.from_pretrained(MODEL))
    assert sequences.levels()["T0"]["generations"] == 4
    assert np.isfinite(sequences.rollout_logprobs[sequences.terms]).all()
