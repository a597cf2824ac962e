"""Trajectories that fail, hang or are let go: recorded as far as they came, located, never a reward of 0."""

import asyncio
import contextlib
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from shop_contracts import read, run
from stand_in import Scripted, always, until
from tracegrad.errors import ArgumentError
from tracegrad.rollout import Environment, Limits, one_turn, prompt_of, run_rollout


def explode(task, prompt, completion):
    return {}["lamp"]


async def raising(task, policy):
    await policy.chat(prompt_of(task))
    return explode(task, None, None)


def test_what_raises_has_no_reward_and_says_where(example):
    played = run(raising, "2+2?", Scripted(example, always("4")).chat, id="t7")
    assert played.record["reward"] is None
    assert played.error.startswith("task t7: KeyError: 'lamp' (")
    assert f"{Path(__file__).name}:" in played.error
    assert played.error.endswith("in explode)")
    assert "in raising" in played.failure.traceback
    [trace] = read(played)
    assert trace.reward is None
    assert len(trace.generations) == 1
    assert trace.to_dict()["failure"]["message"] == "KeyError: 'lamp'"
    assert trace.metadata["ended"] == "failed"


@pytest.mark.parametrize("where", ["make", "reset", "step", "reward", "finish", "messages", "nonsense"])
def test_an_environment_that_raises_is_recorded_without_a_reward(where, example):
    finished = []

    class Broken(Environment):
        def __init__(self):
            if where == "make":
                raise ValueError("at make")

        def reset(self, task):
            if where == "reset":
                raise ValueError("at reset")
            return "hello" if where == "messages" else [{"role": "user", "content": "?"}]

        async def step(self, message):
            if where == "step":
                raise ValueError("at step")
            return [3] if where == "nonsense" else None

        def reward(self):
            if where == "reward":
                raise ValueError("at reward")
            return 1.0

        def finish(self):
            finished.append(where)
            if where == "finish":
                raise ValueError("at finish")

    played = run(Broken, {"n": 1}, Scripted(example, always("4")).chat)
    words = {"messages": "reset returned 'hello'", "nonsense": r"step returned [3]"}.get(where, f"at {where}")
    assert words in played.error
    assert played.record["reward"] is None
    assert np.isnan(read(played).reward[0])
    assert finished == ([] if where == "make" else [where])
    assert len(played.record.get("calls", ())) == (0 if where in ("make", "reset", "messages") else 1)


@pytest.mark.parametrize("value", ["1.0", float("inf"), [1.0], {3: 1.0}, {"a": "b"}, object()])
def test_what_is_no_reward_is_a_failure(value, example):
    async def contract(task, policy):
        return value

    played = run(contract, "?", None)
    assert "invalid return value of the agent: TG-ROLLOUT-03" in played.error
    assert played.record["reward"] is None


def test_nan_and_none_are_no_reward_and_no_failure():
    async def contract(task, policy):
        return task

    assert run(contract, float("nan"), None).record["reward"] is None
    assert run(contract, {"a": None, "b": 1}, None).record["rewards"] == {"a": None, "b": 1.0}
    assert run(contract, {"a": None, "b": 1}, None).error is None


async def forever(task, policy):
    await policy.chat(prompt_of(task))
    await asyncio.sleep(3600)


async def stubborn(task, policy):
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(3600)
    await asyncio.sleep(3600)


over, late = threading.Event(), []


def busy(task, policy):
    over.wait(60)
    late.append(task)


async def leaves(task, policy):
    sys.exit(4)


async def cancels_itself(task, policy):
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("contract", "words", "name"),
    [
        (forever, "the trajectory took longer than 0.4 s", "forever"),
        (stubborn, "the trajectory took longer than 0.4 s", "stubborn"),
        (busy, "the trajectory took longer than 0.4 s", ""),
        (leaves, "SystemExit: 4", "leaves"),
        (cancels_itself, "the trajectory cancelled itself", ""),
    ],
)
def test_what_does_not_end_well_is_ended_and_said(contract, words, name, example):
    over.clear()
    late.clear()
    played = run(contract, "?", Scripted(example, always("4")).chat, limits=Limits(timeout_s=0.4))
    assert late == []  # nobody has waited for it
    if contract is busy:
        over.set()
        asyncio.run(until(lambda: late))
    assert words in played.error
    assert f"in {name}" in played.error if name else True
    assert played.record["reward"] is None
    assert played.ended == ("seconds" if "longer" in words else "failed")
    read(played)


def test_a_server_that_fails_leaves_what_came(example):
    stand_in = Scripted(example, always("4"))

    async def chat(body, *, session, salt):
        if stand_in.seen:
            raise ConnectionError("gone")
        return await stand_in.chat(body, session=session, salt=salt)

    async def contract(task, policy):
        await policy.chat(prompt_of(task))
        await policy.chat(prompt_of(task))
        return 1.0

    played = run(contract, "?", chat)
    assert "ConnectionError: gone" in played.error
    assert len(read(played)[0].generations) == 1
    assert played.record["lost_calls"]["last"][0]["error"] == "ConnectionError: gone"


@pytest.mark.parametrize("task", [{}, {"prompt": []}, 3, None, {"prompt": [3]}, []])
def test_a_task_without_a_prompt_is_said(task):
    with pytest.raises(ArgumentError, match="TG-ROLLOUT-037"):
        prompt_of(task)
    assert "has no prompt" in run(one_turn(), task, None).error


def test_tasks_that_json_cannot_say_are_kept_as_text():
    class Strange:
        def __repr__(self):
            raise ValueError("no")

    async def contract(task, policy):
        return 1.0

    assert run(contract, {"a": {1}}, None).record["metadata"]["task"] == "{'a': {1}}"
    assert run(contract, Strange(), None).record["metadata"]["task"] == "ValueError: no"
    assert len(run(contract, "x" * 200_000, None).record["metadata"]["task"]) == 65536


@pytest.mark.parametrize(
    "limits", [{"max_turns": 0}, {"max_tokens": -1}, {"timeout_s": 0}, {"timeout_s": float("nan")}]
)
def test_limits_that_allow_nothing_are_refused(limits):
    with pytest.raises(ArgumentError, match="TG-ROLLOUT-025"):
        Limits(**limits)


def test_a_contract_that_cannot_be_called_is_refused():
    with pytest.raises(ArgumentError, match=r"TG-ROLLOUT-035.*int"):
        run(3, "?", None)


async def test_a_contract_that_is_let_go_closes_what_it_holds_before_its_loop_ends():
    closed, begun = [], []

    async def agent(task, policy):
        begun.append(task)
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            closed.append(task)

    playing = asyncio.create_task(run_rollout(agent, "q", chat=None))
    await until(lambda: begun)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert (playing.cancelled(), list(closed)) == (True, ["q"])
