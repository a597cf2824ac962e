"""Trainer and collectors that are apart: which servers each asks, and what the folder of a run tells."""

import asyncio
import json
import signal

import pytest

from stand_in import StandIn, until
from tracegrad.config import Config
from tracegrad.errors import FormatError, ReadError, ServerError
from tracegrad.online import OnlineConfig, RolloutConfig, collector_process, remote_collectors
from tracegrad.online.buffer import GroupReader
from tracegrad.online.collector import Collector, StalenessLimit
from tracegrad.online.remote_collectors import RemoteCollectors, RunState
from tracegrad.online.run_info import RunInfo
from tracegrad.online.server_pool import Interrupted, ServerPool
from tracegrad.progress import ProgressPrinter
from tracegrad.rollout.client import Servers
from tracegrad.trainer.signals import Interrupt


class Versioned(StandIn):
    """A server that says which weights it has; None: it does not know that question."""

    def __init__(self, version):
        super().__init__(self.told)
        self.version = version

    def told(self, request, body):
        if request.path == "/weight_info":
            return 404 if self.version is None else {"weight_version": self.version}
        return {}


def out(link):
    """Why each server is not asked, by its URL; None for one that is."""
    return {row["url"]: row["out"] for row in link.servers.state()}


async def test_a_trainer_sets_aside_servers_that_are_gone_or_began_anew(tmp_path, monkeypatch):
    async with Versioned("2") as right, Versioned("default") as anew, Versioned(None) as silent:
        async with Versioned("2") as gone:
            pass
        urls = [each.url for each in (right, anew, silent, gone)]
        monkeypatch.setattr(remote_collectors, "LOOK_S", 3600.0)
        with ServerPool(lambda: Servers(urls, model="m", probe_s=60)) as link:
            player = RemoteCollectors(link, StalenessLimit(1), tmp_path, 60, RunState(version=2))
            await asyncio.to_thread(player.check)
            assert set(out(link).values()) == {None}  # they were seen a moment ago
            monkeypatch.setattr(remote_collectors, "LOOK_S", 0.0)
            await asyncio.to_thread(player.check)
            why, (right, anew, silent, gone) = out(link), urls
    assert why == {right: None, anew: "it reports version default", silent: None, gone: "it reports version None"}


async def waiting(task, policy):
    await asyncio.sleep(3600)


@pytest.mark.parametrize("says", [True, False])
async def test_a_collector_leaves_out_what_a_push_did_not_reach_until_it_has_the_weights(tmp_path, says):
    async with Versioned("1" if says else None) as a, Versioned("1" if says else None) as b:
        state = RunState(1, 1, 0, (a.url, b.url), "m")
        state.write(tmp_path)
        with ServerPool(lambda: Servers([a.url, b.url], model="m", probe_s=0.02), version=1) as link:
            player = Collector(waiting, iter([(0, "?")]), link, None, StalenessLimit(1), RolloutConfig(group_size=1))
            interrupt = Interrupt()
            told = (tmp_path, state, player, GroupReader(tmp_path / "played"), interrupt, ProgressPrinter(print))
            following = asyncio.create_task(asyncio.to_thread(collector_process._follow, *told))
            try:
                await until(lambda: link.servers.admission is not None)
                RunState(2, 3, 1, (a.url,), "m").write(tmp_path)
                await until(lambda: out(link)[b.url] is not None)
                assert out(link) == {a.url: None, b.url: "it has not received version 2 from the trainer"}
                await until(lambda: (link.version, link.next_version, player.steps_done) == (2, 3, 1))
                await until(lambda: len(b.asked("/health")) >= 3)
                assert out(link)[b.url] is not None  # healthy, with the weights of before
                if says:
                    b.version = "2"
                else:
                    RunState(2, 3, 1, (a.url, b.url), "m").write(tmp_path)
                await until(lambda: out(link)[b.url] is None)
                RunState(2, 3, 1, (a.url, b.url), "m", is_finished=True).write(tmp_path)
                await asyncio.wait_for(asyncio.shield(following), 60)
            finally:
                interrupt.received = signal.SIGTERM
                await following


@pytest.mark.parametrize(
    "changed",
    [
        {"model": 3},
        {"objective": None},
        {"online": {"stepz": 1}},
        {"online": {"steps": 0}},
        {"engine": 3},
        {"online": 3},
    ],
    ids=str,
)
def test_what_a_run_was_told_is_read_again_or_refused(tmp_path, changed):
    brief = RunInfo("model", "DAPO", OnlineConfig(steps=3), RolloutConfig(max_turns=2), {"max_model_len": 99})
    with pytest.raises(ReadError):
        RunInfo.read(tmp_path)
    brief.write(tmp_path, Config())
    assert RunInfo.read(tmp_path) == brief
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(FormatError, match=r"TG-ONLINE-029.*run\.json"):
        RunInfo.read(tmp_path)
    path.write_text("[" * 100_000)
    with pytest.raises(FormatError, match="TG-ONLINE-029"):
        RunInfo.read(tmp_path)


def test_what_waits_for_a_server_that_has_ended_raises_why():
    async def forever(servers, sync):
        await asyncio.sleep(60)

    why = None
    with ServerPool(lambda: Servers(["http://127.0.0.1:9"], model="m"), end_reason=lambda: why) as link:
        link.check()
        why = "TG-ROLLOUT-054: vLLM ended with status 137"
        with pytest.raises(ServerError, match=r"TG-ROLLOUT-054.*137"):
            link.run(forever)
        with pytest.raises(ServerError, match=r"TG-ROLLOUT-054.*137"):
            link.check()


def test_that_no_server_can_be_asked_is_said_once(monkeypatch):
    monkeypatch.setattr("tracegrad.online.server_pool.WARN_AFTER_S", 1)
    urls, said = ["http://127.0.0.1:9", "http://127.0.0.1:10"], []

    async def gone(servers, sync, url):
        servers.suspend(url, "connection refused")

    async def waited(servers, sync):
        await asyncio.sleep(2.5)

    with ServerPool(lambda: Servers(urls, model="m", probe_s=3600), log=said.append) as link:
        link.run(lambda servers, sync: gone(servers, sync, urls[0]))
        link.run(waited)
        assert said == []
        link.run(lambda servers, sync: gone(servers, sync, urls[1]))
        link.run(waited)
        assert link.wait_s - 2 > link.unreachable_s > 1  # two waits of 2.5 s; one of them while both were gone
        link.interrupted = lambda: True
        with pytest.raises(Interrupted):
            link.run(waited)
    [line] = said
    assert all(f"{url}: connection refused" in line for url in urls)
