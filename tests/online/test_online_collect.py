"""Collectors that are processes of their own: one run of one trainer, whoever played what."""

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from aiohttp import web

import tracegrad as tg
from few_probes import few  # noqa: F401
from online_runs import CONFIG, assert_same, run, split, weights
from policy_server import MODEL, PolicyServer
from stand_in import until
from tracegrad.errors import ArgumentError, FormatError, TracegradError
from tracegrad.online.buffer import ConsumedGroups, GroupReader
from tracegrad.online.remote_collectors import RunState

torch.set_num_threads(1)


def collector(out, mine, of, count=50, agent="answers"):
    told = map(str, (out, mine, of, count, agent))
    command = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "collect_run.py"), *told]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def trained(server, out, steps, config=CONFIG, resume=False, **options):
    told = {"objective": tg.presets.DAPO_DIRECT, "config": config, "servers": [server.url], "out": out}
    told["resume"] = resume
    told |= split(**{"steps": steps, "steps_ahead": 1, "max_tokens": 6, **options})
    return tg.online.train(MODEL, None, sinks=(), log=lambda _: None, **told)


@pytest.mark.nightly
def test_two_collectors_play_for_one_trainer_each_its_share_and_end_with_it(tmp_path):
    out = tmp_path / "run"
    processes = [collector(out, mine, 2) for mine in range(2)]
    with PolicyServer() as server:
        found = trained(server, out, 4)
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert found.steps == 4
    assert all(row["weight_check/max"] < 1e-4 for row in found.rows if row["weight_check/tokens"])
    played = {}
    for place, traces in GroupReader(out / "played").read_new():
        number, call = int(traces.groups[0]), json.loads(traces[0].record)["calls"][0]
        played.setdefault(place.file, []).append(number)
        assert number < 2 * (call["policy_version"] + 2)  # none is begun before staleness 1 lets it
    shares = sorted(({number % 2 for number in numbers} for numbers in played.values()), key=min)
    assert shares == [{0}, {1}]
    assert 8 <= sum(map(len, played.values())) <= 10  # what staleness 1 lets begin, and no more
    assert sum(len(step.groups) for step in ConsumedGroups(out).steps) == 8
    again = tg.online.replay(
        out, MODEL, objective=tg.presets.DAPO_DIRECT, config=CONFIG, out=tmp_path / "again", log=lambda _: None
    )
    assert_same(weights(again.checkpoint), weights(found.checkpoint))


def test_a_run_ends_where_its_collectors_have_no_more_tasks(tmp_path):
    out = tmp_path / "run"
    processes = [collector(out, mine, 2, count=2) for mine in range(2)]
    with PolicyServer() as server:
        found = trained(server, out, 9)
    assert [process.wait(120) for process in processes] == [0, 0]
    assert (found.stopped, found.steps) == ("tasks", 1)
    played = {place.file: int(traces.groups[0]) for place, traces in GroupReader(out / "played").read_new()}
    assert sorted(played.values()) == [0, 1]  # each has played its share
    assert sorted(path.name for path in (out / "played").glob("*.ended")) == ["0-of-2.ended", "1-of-2.ended"]


@pytest.mark.nightly
def test_a_killed_collector_is_started_again_and_the_run_goes_on(tmp_path):
    out = tmp_path / "run"
    process = collector(out, 0, 1)
    with PolicyServer() as server:
        ended = []
        thread = threading.Thread(target=lambda: ended.append(trained(server, out, 6)))
        thread.start()
        while len(list((out / "played").glob("*.zst"))) == 0 or not ConsumedGroups(out).steps:
            assert thread.is_alive()
            time.sleep(0.02)
        process.kill()
        process.wait()
        again = collector(out, 0, 1)
        thread.join(300)
    assert again.wait(120) == 0, again.stdout.read()
    assert ended[0].steps == 6
    groups = [traces.groups[0] for _, traces in GroupReader(out / "played").read_new()]
    assert len(groups) == len(set(groups))


@pytest.mark.nightly
def test_a_trainer_that_goes_on_gives_servers_no_version_that_collectors_are_past(tmp_path):
    """Two steps and a third that no checkpoint has: the third is taken again before anything is pushed."""
    out = tmp_path / "run"
    config = tg.config.update(CONFIG, [("checkpoint.every_steps", 2)])
    with PolicyServer() as server:
        process = collector(out, 0, 1)
        first = trained(server, out, 3, config=config)
        assert process.wait(120) == 0
        shutil.rmtree(first.checkpoint)
        assert server.versions == ["0", "1", "2", "3"]
        process = collector(out, 0, 1)
        found = trained(server, out, 4, config=config, resume=True)
        assert process.wait(120) == 0
    assert server.versions[4:] == ["3", "4"]
    assert [row["step"] for row in found.rows] == [3, 4]
    assert found.rows[0]["loss"] == first.rows[2]["loss"]


def test_without_a_collector_the_run_says_so(tmp_path):
    with PolicyServer() as server, pytest.raises(TracegradError, match=r"TG-ONLINE-026.*1"):
        trained(server, tmp_path / "run", 2, stall_timeout_s=0.5)
    assert RunState.read(tmp_path / "run").is_finished


def test_without_a_trainer_a_collector_says_so(tmp_path):
    with pytest.raises(TracegradError, match=r"TG-ONLINE-018.*0"):
        tg.online.collect(tmp_path, ["a"], agent=lambda task, policy: 1.0, wait_s=0.1)
    with pytest.raises(ArgumentError, match="TG-ONLINE-017"):
        tg.online.collect(tmp_path, ["a"], agent=lambda task, policy: 1.0, share=(2, 2))


@pytest.mark.parametrize("change", [("version", -1), ("servers", [3]), ("steps_done", "1"), ("model", None)])
def test_a_state_of_somebody_else_is_refused(tmp_path, change):
    RunState(1, 2, 1, ("http://a",), "policy").write(tmp_path)
    assert RunState.read(tmp_path) == RunState(1, 2, 1, ("http://a",), "policy")
    path = tmp_path / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), change[0]: change[1]}))
    with pytest.raises(FormatError, match="TG-ONLINE-025"):
        RunState.read(tmp_path)


class Overtaken(PolicyServer):
    """Its first call is answered while weights are being brought, once who asked has seen that they are.

    Args:
        seen: a file that who asked makes then; None where it is this process.
    """

    def __init__(self, seen=None):
        super().__init__()
        self.bringing, self.seen = None, seen

    async def _chat(self, request):
        if self.bringing is not None or not self.calls:  # the first is the check's
            return await super()._chat(request)
        self.bringing = asyncio.Event()
        body = await request.json()
        await self.bringing.wait()
        return web.json_response(self._answer(body))

    async def _control(self, request):
        if request.path == "/update_weights" and self.bringing is not None:
            await until(lambda: self.seen is None or self.seen.exists())
            self.bringing.set()
        return await super()._control(request)


@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.first_cases(1)
def test_an_answer_that_came_during_a_push_is_of_two_versions(tmp_path, where):
    """With staleness 1 four groups are begun; two of the three others are step 1, whose push overtakes call 1."""
    out = tmp_path / "run"
    seen = None if where == "here" else tmp_path / "seen"
    with Overtaken(seen) as server:
        if where == "here":
            run(server, out, steps=2, steps_ahead=1)
        else:
            process = collector(out, 0, 1, agent="watches")
            trained(server, out, 2)
            assert process.wait(120) == 0
    calls = [
        call
        for path in (out / "played").glob("*.zst")
        for trace in tg.read(path)
        for call in json.loads(trace.record)["calls"]
    ]
    told = [(call["policy_version"], call.get("received_version")) for call in calls]
    assert (0, 1) in told
    assert all(received in (None, sent + 1) for sent, received in told)
