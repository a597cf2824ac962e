"""verifiers in a process of its own: here a package of its name that does as little as is needed."""

import asyncio
import gc
import signal
import sys
from types import SimpleNamespace

import pytest

import tracegrad as tg
from stand_in import until
from tracegrad.errors import ArgumentError
from tracegrad.rollout import Limits, run_rollout

PACKAGE = """
import contextlib, json, os, sys, asyncio
from types import SimpleNamespace as Some


class Data(dict):
    def model_dump_json(self, **_):
        return json.dumps(self)


class World:
    def __init__(self, config):
        self.config = config
        if config["taskset"]["id"] == "gone":
            raise ModuleNotFoundError("No module named 'gone'")
        self.taskset = [Some(data=Data(prompt=f"{n}?", more=config.get("more"))) for n in range(4)]

    @contextlib.asynccontextmanager
    async def serving(self):
        print("this is no answer")
        yield

    async def run_episode(self, task, ctx):
        number = int(task.data["prompt"][0])
        key = os.environ[ctx.client.api_key_var]
        open("seen", "a").write(f"{ctx.client.base_url} {key}\\n")
        if number == 1:
            error = Some(type="ProviderError", message="nobody answers")
            return Some(ok=False, errors=[error], traces=[])
        if number == 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                open("cancelled", "w").write("yes")
                raise
        if number == 3:
            os._exit(7)
        trace = Some(reward=0.5, rewards={"right": Some(value=0.5)}, errors=[])
        return Some(ok=True, errors=[], traces=[trace] * (2 if self.config.get("more") == "two" else 1))


def load_environment(config):
    return World(config)


def resolve_env_config(config):
    return config


class EvalClientConfig(Some):
    pass


class ModelContext(Some):
    pass
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A contract whose interpreter finds the little package, and the folder that it writes into."""
    for name, text in {"__init__": "", "v1/__init__": PACKAGE, "v1/utils/__init__": "", "v1/utils/loaders": ""}.items():
        path = tmp_path / "verifiers" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or ("from verifiers.v1 import *" if "loaders" in name else ""))
    monkeypatch.chdir(tmp_path)

    def make(env_id="clerk", **more):
        return tg.rollout.verifiers(env_id, python=sys.executable, paths=[tmp_path], **more)

    return make


class Address:
    """What play asks of a proxy."""

    def open(self, policy):
        return "http://127.0.0.1:9/s/1/v1", "a key"

    async def close(self, base_url):
        return None


def played(contract, tasks, seconds=120.0):
    async def main():
        limits = Limits(timeout_s=seconds)
        plays = (run_rollout(contract, task, chat=None, proxy=Address(), limits=limits) for task in tasks)
        return await asyncio.gather(*plays)

    return asyncio.run(main())


def test_tasks_and_rewards_come_from_the_other_process(made, tmp_path):
    contract = made(config={"more": "a"})
    tasks = contract.tasks(3)
    assert tasks == [{"prompt": f"{n}?", "task": n, "data": {"prompt": f"{n}?", "more": "a"}} for n in range(3)]
    assert len(contract.tasks()) == 4
    found = played(contract, [tasks[0]] * 3)
    assert [one.record["reward"] for one in found] == [0.5] * 3
    assert (tmp_path / "seen").read_text() == "http://127.0.0.1:9/s/1/v1 a key\n" * 3


def test_a_failed_episode_has_no_reward_and_says_why(made):
    failed, good = played(contract := made(), [contract.tasks()[1], contract.tasks()[0]])
    assert failed.record["reward"] is None
    assert "ProviderError: nobody answers" in failed.error
    assert good.record["reward"] == 0.5
    [several] = played(made(config={"more": "two"}), [{"task": 0}])
    assert "the episode has 2 agents" in several.error


async def test_an_episode_that_takes_too_long_is_told_to_end(made, tmp_path):
    contract = made()
    await contract({"task": 0}, SimpleNamespace(base_url="http://127.0.0.1:9", key="a key"))  # it has begun
    late = await run_rollout(contract, {"task": 2}, chat=None, proxy=Address(), limits=Limits(timeout_s=3.0))
    await until((tmp_path / "cancelled").exists)
    assert (late).ended == "seconds"


async def test_a_process_that_ends_fails_what_it_played_and_is_started_again(made):
    contract = made()
    one = await run_rollout(contract, {"task": 3}, chat=None, proxy=Address(), limits=Limits(timeout_s=120))
    two = await run_rollout(contract, {"task": 0}, chat=None, proxy=Address(), limits=Limits(timeout_s=120))
    assert "the process of verifiers ended" in one.error
    assert two.record["reward"] == 0.5


def test_a_contract_plays_in_one_loop_after_another_and_leaves_each_nothing_to_close(made, monkeypatch):
    contract, left = made(), []
    monkeypatch.setattr(sys, "unraisablehook", left.append)
    [task, *_] = contract.tasks()
    for _ in range(2):
        [one] = played(contract, [task])
        assert one.record["reward"] == 0.5
        assert contract._starting.result().returncode == -signal.SIGKILL
    del contract
    gc.collect()
    assert [str(each.exc_value) for each in left] == []


def test_what_cannot_be_started_is_said(made):
    with pytest.raises(ArgumentError, match=r"TG-ROLLOUT-050.*named.*gone"):
        made("gone").tasks()
    with pytest.raises(ArgumentError, match=r"TG-ROLLOUT-049.*clerk"):
        tg.rollout.verifiers("clerk", python="/nowhere/python").tasks()
    [failed] = played(made("gone"), [{"task": 0}])
    assert "verifiers cannot run gone: ModuleNotFoundError" in failed.error
