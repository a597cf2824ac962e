"""Forty turns against a real vLLM by both roads: ids in and out fork nowhere, re-rendered turns do."""

import asyncio
import itertools
import json

import numpy as np
import pytest

import tracegrad as tg
from shop_contracts import Clerk, correct, shop_tools
from stand_in import prompts
from tracegrad.rollout import Limits, Tokens, run_rollout, with_tools
from tracegrad.rollout.client import Servers
from tracegrad.weight_sync import File
from vllm_logprobs import recomputed

pytestmark = pytest.mark.vllm
TURNS, CONVERSATIONS = 40, 8
VERSION = 7


@pytest.fixture(scope="module")
def server(served, example, tmp_path_factory):
    """The one vLLM of all tests, with the weights of the bundled model under a version of their own."""

    async def push():
        async with Servers([served], model="clerk") as servers:
            weights = example / "model" / "model.safetensors"
            await File(servers, tmp_path_factory.mktemp("weights")).push(weights, VERSION)

    asyncio.run(push())
    return served


async def forty(task, policy):
    """As many turns as the bundled model has room for."""
    messages = [{"role": "user", "content": task}]
    for _ in range(TURNS):
        answer = await policy.chat(messages, max_tokens=7)
        messages += [answer, {"role": "user", "content": "e"}]
    return 1.0


def played(url, example, contract, tasks, by):
    tokenizer = tg.Tokenizer.from_pretrained(example / "model")

    async def run():
        async with Servers([url], model="clerk") as servers:
            chat = servers.chat
            if by == "tokens":
                chat = Tokens(servers, tokenizer)
                await chat.check()
            limits = Limits(max_turns=TURNS)
            plays = (
                run_rollout(contract, task, chat=chat, limits=limits, id=f"{by}-{n}") for n, task in enumerate(tasks)
            )
            return await asyncio.gather(*plays)

    found = asyncio.run(run())
    assert [one.error for one in found] == [None] * len(found)
    traces = tg.Traces.from_records([json.loads(json.dumps(one.record, allow_nan=False)) for one in found])
    return found, traces, tg.align(traces, tokenizer), tokenizer


def agree(example, sequences):
    """Whether the trainer gives each sampled token the logprob that the server gave it."""
    off = np.abs(recomputed(example, sequences) - sequences.rollout_logprobs)[sequences.trainable]
    return len(off) > 0 and off.max() < 1e-4


@pytest.fixture(scope="module")
def talks(server, example):
    tasks = [f"{number} lamps" for number in range(CONVERSATIONS)]
    return {by: played(server, example, forty, tasks, by) for by in ("tokens", "chat")}


def test_forty_turns_by_tokens_are_one_branch_where_re_rendered_ones_fork(talks, example):
    forks, written = {}, {}
    for by, (found, traces, sequences, tokenizer) in talks.items():
        assert sequences.alignment_report.rate == 0
        assert agree(example, sequences)
        forks[by] = sequences.branches - len(traces)
        drawn = [call["response"]["choices"][0] for one in found for call in one.record["calls"]]
        assert len(drawn) == TURNS * CONVERSATIONS
        ids = [[id for id in one["token_ids"] if not tokenizer._core.is_special(id)] for one in drawn]
        written[by] = sum(tokenizer.encode(tokenizer.decode(one)).tolist() != one for one in ids)
    print(f"\n{CONVERSATIONS} conversations of {TURNS} turns: forks {forks}; turns sampled in other tokens {written}")
    assert forks["tokens"] == 0
    assert forks["chat"] > 0
    assert written["tokens"] > 0


def test_every_token_is_told_with_its_version_and_every_id_was_in_the_next_prompt(talks):
    found, _, sequences, _ = talks["tokens"]
    sampled = sequences.source == 2
    assert set(sequences.version[sampled].tolist()) == {VERSION}
    for one in found:
        calls = [call["response"] for call in one.record["calls"]]
        for before, after in itertools.pairwise(calls):
            held = before["prompt_token_ids"] + before["choices"][0]["token_ids"]
            assert after["prompt_token_ids"][: len(held)] == held
            assert before["metadata"]["weight_versions"]


def test_what_the_parsers_make_of_ids_is_what_chat_makes_of_text(server, example):
    """Greedy, so that both roads say the same: messages with tool calls, finish reasons and rewards are equal."""
    tasks = [{"question": one, "prompt": one.messages()} for one in prompts(6)]

    async def shop(task, policy):
        tools = with_tools(shop_tools(task["question"]), correct, sampling={"temperature": 0.0, "max_tokens": 64})
        return await tools(task, policy)

    told = {}
    for by in ("tokens", "chat"):
        found, _, sequences, _ = played(server, example, shop, tasks, by)
        assert sequences.alignment_report.rate == 0
        told[by] = [(plain(one.completion), one.finish_reason, one.record["reward"]) for one in found]
    assert told["tokens"] == told["chat"]
    assert any(message.get("tool_calls") for talk, *_ in told["tokens"] for message in talk)


def plain(messages):
    """Messages without the ids that servers draw for calls."""
    said = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        said.append((message["role"], message.get("content"), calls))
    return [{"role": role, "content": content or "", "tool_calls": calls} for role, content, calls in said]


def test_an_environment_is_played_by_tokens(server, example):
    tasks = [{"question": one, "prompt": one.messages()} for one in prompts(2)]
    found, traces, sequences, _ = played(server, example, Clerk, tasks, "tokens")
    assert sequences.branches == len(traces) == len(found)
