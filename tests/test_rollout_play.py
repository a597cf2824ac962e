"""Trajectories played whole: contracts, tools, environments. What fails is recorded, located, never a reward of 0."""

import asyncio
import contextlib
import json
import sys
import time

import numpy as np
import pytest

import demonstrations
import task as clerk
import tracegrad as tg
from stand_in import StandIn, always, good_clerk, prompts
from tracegrad.errors import ArgumentError
from tracegrad.rollout import Environment, Limits, one_turn, play, prompt_of, trl_environment, with_tools


def run(contract, task, chat, **options):
    return asyncio.run(play(contract, task, chat=chat, **options))


def read(played):
    """The record, as it comes back from a file."""
    return tg.Traces.from_records([json.loads(json.dumps(played.record, allow_nan=False))])


@pytest.fixture
def order():
    return next(one for one in prompts(60, "order") if one.stock >= one.quantity)


def shop_tools(prompt):
    def price(item: str) -> dict:
        """Price of one item in €."""
        return json.loads(clerk.execute(prompt, "price", {"item": item}))

    async def stock(item: str) -> dict:
        """How many of an item are left."""
        return json.loads(clerk.execute(prompt, "stock", {"item": item}))

    return [price, stock]


class Clerk(Environment):
    tools = clerk.TOOLS

    async def reset(self, task):
        self.prompt, self.messages = task["question"], task["question"].messages()
        return list(self.messages)

    def step(self, message):
        self.messages.append(message)
        if not message.get("tool_calls"):
            return None
        import record

        answers = record.tool_messages(self.prompt, message)
        self.messages += answers
        return answers

    async def reward(self):
        return {"correct": clerk.check(self.prompt, self.messages), "turns": len(self.messages)}


class TrlShop:
    """As TRL's `environment_factory` takes it."""

    made = 0

    def __init__(self):
        TrlShop.made += 1

    def reset(self, prompt, question, **row):
        self.question, self.asked = question, []
        return None

    def price(self, item: str) -> str:
        """Price of one item in €.

        Args:
            item: its name
        """
        self.asked.append("price")
        return clerk.execute(self.question, "price", {"item": item})

    def stock(self, item: str) -> str:
        """How many of an item are left.

        Args:
            item: its name
        """
        self.asked.append("stock")
        return clerk.execute(self.question, "stock", {"item": item})

    def _hidden(self):
        raise AssertionError

    def get_reward(self):
        return float(self.asked == ["stock", "price"])


def correct(task, prompt, completion):
    return clerk.check(task["question"], completion)


@pytest.mark.parametrize("road", ["tools", "environment", "trl", "plain"])
def test_every_road_gives_a_record_that_aligns_exactly(road, example, order):
    stand_in = StandIn(example, good_clerk(order))
    task = {"prompt": order.messages(), "question": order}

    async def own(task, policy):
        messages = task["question"].messages()
        while True:
            messages.append(await policy.chat(messages, tools=clerk.TOOLS))
            if not messages[-1].get("tool_calls"):
                return correct(task, None, messages)
            import record

            messages += record.tool_messages(order, messages[-1])

    contract = {
        "tools": with_tools(lambda task: shop_tools(task["question"]), correct),
        "environment": Clerk,
        "trl": trl_environment(TrlShop),
        "plain": own,
    }[road]
    played = run(contract, task, stand_in.chat, version=lambda: 3, id="t1", group="g1", sampling={"max_tokens": 64})
    assert played.error is None
    [trace] = read(played)
    named = {"environment": {"correct": 1.0, "turns": 7.0}, "trl": {"TrlShop": 1.0}}.get(road)
    assert trace.rewards == named if named else trace.reward == 1.0
    assert (trace.id, trace.group, played.ended, trace.metadata["turns"]) == ("t1", "g1", "done", 3)
    sequences = tg.align(read(played), stand_in.tokenizer)
    assert sequences.drift.rate == 0
    assert len(sequences.cu_seqlens) == 2
    sampled = [id for call in played.record["calls"] for id in call["response"]["choices"][0]["token_ids"]]
    assert sequences.ids[sequences.trainable].tolist() == sampled
    assert set(sequences.version[sequences.trainable].tolist()) == {3}
    assert not np.isnan(sequences.rollout_logprobs[sequences.trainable]).any()
    assert [one["role"] for one in played.completion] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert played.prompt == order.messages()
    assert played.finish_reason == "stop"
    assert stand_in.asked[0] == ("g1", None)


def test_one_turn_with_and_without_a_score(example):
    [prompt] = prompts(1, "offer")
    stand_in = StandIn(example, good_clerk(prompt))
    task = {"prompt": prompt.messages(), "question": prompt}
    assert run(one_turn(correct), task, stand_in.chat).record["reward"] == 1.0
    played = run(one_turn(sampling={"temperature": 0.5}), prompt.text, stand_in.chat)
    assert played.record["reward"] is None
    assert played.error is None
    assert stand_in.seen[-1]["temperature"] == 0.5
    assert stand_in.seen[-1]["messages"] == [{"role": "user", "content": prompt.text}]
    assert played.record["metadata"]["task"] == prompt.text


def test_tools_are_counted_in_the_record(example, order):
    stand_in = StandIn(example, good_clerk(order))
    task = {"prompt": order.messages(), "question": order}

    def price(item: str) -> dict:
        """Price of one item in €."""
        raise ValueError("closed")

    stock = shop_tools(order)[1]
    played = run(with_tools([price, stock], correct), task, stand_in.chat)
    assert played.record["metadata"]["tools"] == {"called": 1, "raised": 1}
    assert json.loads(played.completion[3]["content"]) == {"error": "ValueError: closed"}


def explode(task, prompt, completion):
    return {}["lamp"]


async def raising(task, policy):
    await policy.chat(prompt_of(task))
    return explode(task, None, None)


def test_what_raises_has_no_reward_and_says_where(example):
    played = run(raising, "2+2?", StandIn(example, always("4")).chat, id="t7")
    assert played.record["reward"] is None
    assert played.error.startswith("task t7: KeyError: 'lamp' (")
    assert "test_rollout_play.py:" in played.error
    assert played.error.endswith("in explode)")
    assert "in raising" in played.failure.traceback
    [trace] = read(played)
    assert trace.reward is None
    assert len(trace.generations) == 1
    assert trace.to_dict()["failure"]["words"] == "KeyError: 'lamp'"
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

    played = run(Broken, {"n": 1}, StandIn(example, always("4")).chat)
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
    assert "what the contract returned: a reward is" in played.error
    assert played.record["reward"] is None


def test_nan_and_none_are_no_reward_and_no_failure():
    async def contract(task, policy):
        return task

    assert run(contract, float("nan"), None).record["reward"] is None
    assert run(contract, {"a": None, "b": 1}, None).record["rewards"] == {"a": None, "b": 1.0}
    assert run(contract, {"a": None, "b": 1}, None).error is None


async def forever(task, policy):
    await policy.chat(prompt_of(task))
    await asyncio.sleep(60)


async def stubborn(task, policy):
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    await asyncio.sleep(60)


def busy(task, policy):
    time.sleep(3)


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
    started = time.monotonic()
    played = run(contract, "?", StandIn(example, always("4")).chat, limits=Limits(seconds=0.4))
    assert time.monotonic() - started < 2.5
    assert words in played.error
    assert f"in {name}" in played.error if name else True
    assert played.record["reward"] is None
    assert played.ended == ("seconds" if "longer" in words else "failed")
    read(played)


def test_a_cancelled_play_cancels_what_it_plays(example):
    seen = []

    async def contract(task, policy):
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("ended")

    async def main():
        playing = asyncio.ensure_future(play(contract, "?", chat=None))
        await asyncio.sleep(0.05)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == ["ended"]


def test_a_limit_ends_tools_and_environments_with_a_score(example, order):
    stand_in = StandIn(example, lambda messages: demonstrations.call_text("price", order.item))
    task = {"prompt": order.messages(), "question": order}
    played = run(with_tools(shop_tools(order), correct), task, stand_in.chat, limits=Limits(turns=2))
    assert (played.record["reward"], played.ended, played.error) == (0.0, "turns", None)
    assert [one["role"] for one in played.completion] == ["assistant", "tool", "assistant"]
    played = run(with_tools(shop_tools(order), correct, turns=1), task, stand_in.chat)
    assert (played.ended, len(played.record["calls"])) == ("done", 2)
    played = run(Clerk, task, stand_in.chat, limits=Limits(tokens=45))
    assert (played.ended, played.record["rewards"]["correct"]) == ("tokens", 0.0)
    assert sum(len(call["response"]["choices"][0]["token_ids"]) for call in played.record["calls"]) == 45
    assert played.finish_reason == "length"


def test_a_limit_that_a_contract_does_not_catch_leaves_no_reward(example):
    async def contract(task, policy):
        while True:
            await policy.chat(prompt_of(task))

    played = run(contract, "?", StandIn(example, always("4")).chat, limits=Limits(turns=3))
    assert (played.ended, played.record["reward"], len(played.record["calls"])) == ("turns", None, 3)
    assert "had its 3 turns" in played.error


def test_a_server_that_fails_leaves_what_came(example):
    stand_in = StandIn(example, always("4"))

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


def test_instances_made_for_trl_are_used_again_but_not_after_a_failure(example, order):
    TrlShop.made = 0
    stand_in = StandIn(example, good_clerk(order))
    contract = trl_environment(TrlShop)
    task = {"prompt": order.messages(), "question": order}

    async def main():
        for row in (task, task, {"prompt": order.messages()}, task):
            played = await play(contract, row, chat=stand_in.chat)
            assert (played.error is None) == ("question" in row)

    asyncio.run(main())
    assert TrlShop.made == 2


def test_what_a_trl_reset_returns_ends_the_last_message(example):
    class Told:
        def reset(self, **row):
            return " Be short."

        def get_reward(self):
            return 1

    stand_in = StandIn(example, always("4"))
    run(trl_environment(Told), {"prompt": [{"role": "user", "content": "2+2?"}]}, stand_in.chat)
    assert stand_in.seen[0]["messages"] == [{"role": "user", "content": "2+2? Be short."}]
    run(trl_environment(Told), {"other": 1}, stand_in.chat)
    assert stand_in.seen[1]["messages"] == [{"role": "user", "content": " Be short."}]


@pytest.mark.parametrize("task", [{}, {"prompt": []}, 3, None, {"prompt": [3]}, []])
def test_a_task_without_a_prompt_is_said(task):
    with pytest.raises(ArgumentError, match="no prompt to begin with"):
        prompt_of(task)
    assert "no prompt to begin with" in run(one_turn(), task, None).error


def test_tasks_that_json_cannot_say_are_kept_as_text():
    class Strange:
        def __repr__(self):
            raise ValueError("no")

    async def contract(task, policy):
        return 1.0

    assert run(contract, {"a": {1}}, None).record["metadata"]["task"] == "{'a': {1}}"
    assert run(contract, Strange(), None).record["metadata"]["task"] == "ValueError: no"
    assert len(run(contract, "x" * 200_000, None).record["metadata"]["task"]) == 65536


@pytest.mark.parametrize("limits", [{"turns": 0}, {"tokens": -1}, {"seconds": 0}, {"seconds": float("nan")}])
def test_limits_that_allow_nothing_are_refused(limits):
    with pytest.raises(ArgumentError, match="Nothing could be played"):
        Limits(**limits)


def test_a_contract_that_cannot_be_called_is_refused():
    with pytest.raises(ArgumentError, match="the contract is a int"):
        run(3, "?", None)


def test_a_contract_that_is_let_go_closes_what_it_holds_before_its_loop_ends():
    closed = []

    async def agent(task, policy):
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.01)
            closed.append(task)

    async def main():
        playing = asyncio.create_task(play(agent, "q", chat=None))
        await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        return playing.cancelled(), list(closed)

    assert asyncio.run(main()) == (True, ["q"])
