"""Trajectories of programs that have an address and no more; who is let in, and how sessions are spread."""

import json

import aiohttp
import pytest

import task as clerk
import tracegrad as tg
from proxied import KEY, QUESTION, driven
from stand_in import Scripted, Served, always, good_clerk, prompts
from tracegrad.errors import ArgumentError
from tracegrad.rollout import Limits, run_rollout
from tracegrad.rollout.client import Servers
from tracegrad.rollout.proxy import Proxy


def client_of(policy):
    import openai

    return openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.key, max_retries=0)


async def agent(task, policy):
    """An agent that only has a base_url."""
    async with client_of(policy) as client:
        messages = task["question"].messages()
        while True:
            answer = await client.chat.completions.create(model="any", messages=messages, tools=list(clerk.TOOLS))
            message = answer.choices[0].message
            assert answer.choices[0].logprobs is None
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return clerk.check(task["question"], messages)
            for call in message.tool_calls:
                result = clerk.execute(task["question"], call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def test_an_agent_that_only_has_a_base_url_is_played(example):
    [prompt] = prompts(1, "price")

    async def test(bench):
        played = await run_rollout(agent, {"question": prompt}, chat=None, proxy=bench.proxy, id="t", group="g")
        assert played.error is None
        traces = tg.Traces.from_records([played.record])
        sequences = tg.align(traces, bench.scripted.tokenizer)
        assert (traces[0].reward, sequences.alignment_report.rate, len(traces[0].generations)) == (1.0, 0, 2)
        assert [one["role"] for one in played.completion] == ["assistant", "tool", "assistant"]
        assert bench.records == []

    driven(example, script=good_clerk(prompt))(test)


def test_a_limit_of_turns_holds_at_the_address_too(example):
    async def chatty(task, policy):
        async with client_of(policy) as client:
            while True:
                await client.chat.completions.create(model="any", messages=QUESTION["messages"])

    async def test(bench):
        played = await run_rollout(
            chatty, "?", chat=None, proxy=bench.proxy, limits=Limits(max_turns=3, max_tokens=1000)
        )
        assert (played.ended, played.record["reward"], len(played.record["calls"])) == ("turns", None, 3)
        assert "reached its 3 turns" in played.error
        assert bench.scripted.seen[0]["max_tokens"] == 1000

    driven(example)(test)


def test_a_reward_posted_to_the_address_counts_where_the_contract_gives_none(example):
    async def posting(task, policy):
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {policy.key}"}) as client:
            await (await client.post(f"{policy.base_url}/chat/completions", json=QUESTION)).read()
            url = policy.base_url.removesuffix("/v1") + "/reward"
            assert (await client.post(url, json={"rewards": {"right": 1}})).status == 200

    async def test(bench):
        played = await run_rollout(posting, "?", chat=None, proxy=bench.proxy)
        assert played.record["rewards"] == {"right": 1.0}
        assert bench.proxy._seats == {}

    driven(example)(test)


def test_without_sessions_of_clients_unknown_names_are_refused(example):
    async def test(bench):
        assert (await bench.ask("/s/a/v1/chat/completions", QUESTION))[0] == 404

    driven(example, finished=None)(test)


def test_it_listens_on_loopback_and_draws_a_key(example):
    proxy = Proxy("http://127.0.0.1:9")
    assert proxy._address[0] == "127.0.0.1"
    assert len(proxy.key) >= 32
    with pytest.raises(ArgumentError, match="TG-ROLLOUT-029"):
        Proxy("http://127.0.0.1:9", key="secret")


async def test_sessions_are_spread_over_several_servers_and_stay(example):
    first, second = (Served(Scripted(example, always("4"))) for _ in range(2))
    async with (
        first,
        second,
        Servers([first.url, second.url], model="clerk") as servers,
        Proxy(servers, key=KEY, finished=print) as proxy,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as client,
    ):
        for name in ("a", "b", "a", "b", "a"):
            async with client.post(f"{proxy.url}/s/{name}/v1/chat/completions", json=QUESTION) as answer:
                assert answer.status == 200
    assert (len(first.paths), len(second.paths)) == (3, 2)
