"""Trajectories played whole: contracts, tools, environments, and their limits."""

import json

import numpy as np
import pytest

import demonstrations
import task as clerk
import tracegrad as tg
from shop_contracts import Clerk, TrlShop, correct, read, run, shop_tools
from stand_in import Scripted, always, good_clerk, prompts
from tracegrad.rollout import Limits, one_turn, prompt_of, run_rollout, trl_environment, with_tools


@pytest.fixture
def order():
    return next(one for one in prompts(60, "order") if one.stock >= one.quantity)


@pytest.mark.parametrize("road", ["tools", "environment", "trl", "plain"])
def test_every_road_gives_a_record_that_aligns_exactly(road, example, order):
    stand_in = Scripted(example, good_clerk(order))
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
    assert sequences.alignment_report.rate == 0
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
    stand_in = Scripted(example, good_clerk(prompt))
    task = {"prompt": prompt.messages(), "question": prompt}
    assert run(one_turn(correct), task, stand_in.chat).record["reward"] == 1.0
    played = run(one_turn(sampling={"temperature": 0.5}), prompt.text, stand_in.chat)
    assert played.record["reward"] is None
    assert played.error is None
    assert stand_in.seen[-1]["temperature"] == 0.5
    assert stand_in.seen[-1]["messages"] == [{"role": "user", "content": prompt.text}]
    assert played.record["metadata"]["task"] == prompt.text


def test_tools_are_counted_in_the_record(example, order):
    stand_in = Scripted(example, good_clerk(order))
    task = {"prompt": order.messages(), "question": order}

    def price(item: str) -> dict:
        """Price of one item in €."""
        raise ValueError("closed")

    stock = shop_tools(order)[1]
    played = run(with_tools([price, stock], correct), task, stand_in.chat)
    assert played.record["metadata"]["tools"] == {"called": 1, "raised": 1}
    assert json.loads(played.completion[3]["content"]) == {"error": "ValueError: closed"}


def test_a_limit_ends_tools_and_environments_with_a_score(example, order):
    stand_in = Scripted(example, lambda messages: demonstrations.call_text("price", order.item))
    task = {"prompt": order.messages(), "question": order}
    played = run(with_tools(shop_tools(order), correct), task, stand_in.chat, limits=Limits(max_turns=2))
    assert (played.record["reward"], played.ended, played.error) == (0.0, "turns", None)
    assert [one["role"] for one in played.completion] == ["assistant", "tool", "assistant"]
    played = run(with_tools(shop_tools(order), correct, max_turns=1), task, stand_in.chat)
    assert (played.ended, len(played.record["calls"])) == ("done", 2)
    played = run(Clerk, task, stand_in.chat, limits=Limits(max_tokens=45))
    assert (played.ended, played.record["rewards"]["correct"]) == ("tokens", 0.0)
    assert sum(len(call["response"]["choices"][0]["token_ids"]) for call in played.record["calls"]) == 45
    assert played.finish_reason == "length"


def test_a_limit_that_a_contract_does_not_catch_leaves_no_reward(example):
    async def contract(task, policy):
        while True:
            await policy.chat(prompt_of(task))

    played = run(contract, "?", Scripted(example, always("4")).chat, limits=Limits(max_turns=3))
    assert (played.ended, played.record["reward"], len(played.record["calls"])) == ("turns", None, 3)
    assert "reached its 3 turns" in played.error


async def test_instances_made_for_trl_are_used_again_but_not_after_a_failure(example, order):
    TrlShop.made = 0
    stand_in = Scripted(example, good_clerk(order))
    contract = trl_environment(TrlShop)
    task = {"prompt": order.messages(), "question": order}
    for row in (task, task, {"prompt": order.messages()}, task):
        played = await run_rollout(contract, row, chat=stand_in.chat)
        assert (played.error is None) == ("question" in row)
    assert TrlShop.made == 2


def test_what_a_trl_reset_returns_ends_the_last_message(example):
    class Told:
        def reset(self, **row):
            return " Be short."

        def get_reward(self):
            return 1

    stand_in = Scripted(example, always("4"))
    run(trl_environment(Told), {"prompt": [{"role": "user", "content": "2+2?"}]}, stand_in.chat)
    assert stand_in.seen[0]["messages"] == [{"role": "user", "content": "2+2? Be short."}]
    run(trl_environment(Told), {"other": 1}, stand_in.chat)
    assert stand_in.seen[1]["messages"] == [{"role": "user", "content": " Be short."}]
