"""Adapters in the online loop against a policy behind HTTP: a name for each version, proven; and what is refused."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tracegrad as tg
from collect_run import questions
from few_probes import few  # noqa: F401
from online_runs import CONFIG, run
from policy_server import MODEL, PolicyServer
from stand_in import StandIn
from tracegrad.errors import ArgumentError
from tracegrad.online import OnlineConfig, SyncFault
from tracegrad.rollout.client import Servers
from tracegrad.weight_sync import Lora

ADAPTERS = tg.config.update(CONFIG, [("train.lora_rank", 4), ("optimizer.lr", 5e-2)])


@pytest.mark.nightly
def test_each_version_is_served_under_its_own_name_and_proven(tmp_path):
    with PolicyServer() as server:
        found = run(server, tmp_path / "run", config=ADAPTERS, steps=4, weight_sync="lora")
        names = list(server.adapted)
    assert all(row["weight_check/tokens"] == row["tokens_trained"] > 0 for row in found.rows)
    assert all(row["weight_check/max"] < 1e-4 for row in found.rows)
    # steps_ahead 0: the newest and one before it; what the run was told to ask for ends with its version
    assert [name.rsplit("-", 1)[1] for name in names[1:]] == ["v3", "v4"]
    assert sorted(each.name for each in (tmp_path / "run" / "weights").iterdir()) == names[1:]
    moved = load_file(tmp_path / "run" / "weights" / names[-1] / "adapter_model.safetensors")
    assert max(float(value.abs().max()) for name, value in moved.items() if "lora_B" in name) > 0.01
    again = tg.online.replay(
        tmp_path / "run", MODEL, objective=tg.presets.DAPO_DIRECT, config=ADAPTERS, out=tmp_path / "again"
    )
    ours, theirs = (load_file(each.checkpoint / "adapter_model.safetensors") for each in (found, again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("mistake", "at", "why"),
    [
        pytest.param("before", 3, "TG-ONLINE-020.*previous step's adapter", marks=pytest.mark.nightly),
        ("bare", 2, r"TG-ONLINE-020.*without an adapter"),
    ],
)
@pytest.mark.parametrize("steps_ahead", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_another_adapter_than_the_one_that_was_named_is_found(tmp_path, mistake, at, why, steps_ahead):
    with PolicyServer(mistake) as server, pytest.raises(SyncFault, match=why) as raised:
        run(server, tmp_path, config=ADAPTERS, steps=6, weight_sync="lora", steps_ahead=steps_ahead)
    # "before" at version 1 is version 0, whose adapter changes nothing
    assert str(raised.value).startswith(f"TG-ONLINE-020: step {2 if at == 2 or not steps_ahead else ''}")


class Slow(PolicyServer):
    """The first call that is played waits for four more adapters before it looks for its own."""

    def __init__(self):
        super().__init__()
        self.five = asyncio.Event()

    async def _chat(self, request):
        if self.calls == 1:  # the one before is the check's
            self.calls += 1
            await self.five.wait()
        return await super()._chat(request)

    def _adapt(self, **told):
        super()._adapt(**told)
        if len(self.known) == 5:
            self.loaded = [name.rsplit("-", 1)[1] for name in self.adapted if name != "clerk"]
            self.five.set()


@pytest.mark.nightly
def test_an_adapter_that_a_call_still_asks_for_stays_loaded(tmp_path):
    with Slow() as server:
        found = run(server, tmp_path, config=ADAPTERS, steps=6, weight_sync="lora", steps_ahead=1)
    assert server.loaded == ["v0", "v1", "v2", "v3", "v4"]
    assert all(row["weight_check/tokens"] > 0 and row["weight_check/max"] < 1e-4 for row in found.rows)
    assert max(row["staleness_max"] for row in found.rows) >= 4  # the late group, trained by what sampled it
    assert found.rows[-1]["trajectories_failed"] == 0
    assert [name.rsplit("-", 1)[1] for name in server.adapted if name != "clerk"] == ["v4", "v5", "v6"]


class Tired(PolicyServer):
    """Takes its time to unload an adapter, while others ask."""

    async def _control(self, request):
        if request.path == "/v1/unload_lora_adapter":
            await asyncio.sleep(0.3)
        return await super()._control(request)


@pytest.mark.nightly
def test_the_version_of_a_call_is_that_of_the_adapter_that_it_named(tmp_path):
    async def often(task_, policy):
        for _ in range(4):
            message = await policy.chat(task_["prompt"])
            await asyncio.sleep(0.02)
        return -float(len(message["content"] or "")) / 10

    with Tired() as server:
        run(
            server,
            tmp_path,
            config=ADAPTERS,
            steps=5,
            weight_sync="lora",
            steps_ahead=1,
            agent=often,
            max_turns=4,
            max_tokens=4,
        )
    records = [json.loads(trace.record) for path in (tmp_path / "played").iterdir() for trace in tg.read(path)]
    calls = [call for record in records for call in record["calls"]]
    assert len({call["policy_version"] for call in calls}) >= 4
    assert [call["response"]["model"].rsplit("-v")[1] for call in calls] == [str(c["policy_version"]) for c in calls]


async def test_a_server_that_began_anew_gets_the_newest_adapter_and_those_still_asked_for(tmp_path):
    loaded = []

    def reply(request, body):
        if request.path == "/v1/load_lora_adapter":
            loaded.append(body["lora_name"])
            assert (Path(body["lora_path"]) / "adapter_config.json").is_file()
        return {}

    async with StandIn(reply) as server, Servers([server.url], model="m", probe_s=0.02) as servers:
        sync = Lora(servers, tmp_path, config={"r": 2}, keep=2)
        await sync.push({"lora_A.weight": torch.ones(2)}, 1)
        with servers.hold_model() as held:
            for version in (2, 3, 4):
                await sync.push({"lora_A.weight": torch.ones(2)}, version)
            assert (held, servers.model, servers.in_use) == ("policy-v1", "policy-v4", {"policy-v1"})
            loaded.clear()
            servers.suspend(server.url, "it began anew")
            assert await servers.usable(5)
            assert loaded == ["policy-v1", "policy-v2", "policy-v3", "policy-v4"]
        assert servers.in_use == set()
        await sync.push({"lora_A.weight": torch.ones(2)}, 5)
        unloaded = [body["lora_name"] for body in server.asked("/v1/unload_lora_adapter")]
        assert unloaded == ["policy-v1", "policy-v2", "policy-v3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy-v4", "policy-v5"]


def test_what_cannot_be_pushed_is_refused_before_anything_is_asked(tmp_path):
    told = {"rewards": [lambda prompts, completions: [0.0] * len(prompts)], "servers": ["http://127.0.0.1:9"]}
    with pytest.raises(ArgumentError, match="TG-ONLINE-033"):
        tg.online.train(MODEL, questions(count=2), **told, online=OnlineConfig(weight_sync="lora"), out=tmp_path / "a")
    with pytest.raises(ArgumentError, match="TG-ONLINE-034"):
        tg.online.train(MODEL, questions(count=2), **told, online=OnlineConfig(weight_sync="nccl"), out=tmp_path / "b")


def test_an_evaluation_of_one_task_has_no_interval_and_its_row_is_one_of_json(tmp_path):
    async def answers(task_, policy):
        await policy.chat(task_["prompt"])
        return float(task_["prompt"][-1]["content"] != "")

    told = {"agent": answers, "eval_tasks": questions(count=1)}
    with PolicyServer() as server:
        found = run(server, tmp_path, how=told, steps=1, group_size=2)
    evaluated = [row for row in found.rows if "eval_reward" in row]
    assert [(row["eval_reward"], row["eval_low"], row["eval_high"]) for row in evaluated] == [(1.0, None, None)] * 2
