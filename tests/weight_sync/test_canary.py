"""What servers are asked after a push: those that are gone are left out until they have the weights, and waited for."""

import asyncio

import pytest

from stand_in import StandIn, free_port, until
from tracegrad.rollout.client import Servers
from tracegrad.weight_sync import SyncError, probe_requests

FAST = {"model": "clerk", "probe_s": 0.05, "connect_s": 30.0}
MESSAGES = [{"role": "user", "content": "?"}]
CHAT = probe_requests.Probe(probe_requests.CHAT, {"messages": MESSAGES, "max_tokens": 3})
TEXT = probe_requests.Probe(probe_requests.COMPLETIONS, {"prompt": "?"}, 0.5)
IDS = probe_requests.Probe(probe_requests.GENERATE, {"token_ids": [4, 5], "sampling_params": {"logprobs": 0}})


def reply(request, body):
    """Three tokens as each path lists them."""
    ids, logprobs = [7, 8, 9], [-0.5, -0.25, -1.0]
    content = [{"logprob": each} for each in logprobs]
    listed = {"token_logprobs": logprobs} if request.path == probe_requests.COMPLETIONS else {"content": content}
    choice = {"token_ids": ids, "logprobs": listed}
    if request.path == probe_requests.COMPLETIONS:
        choice["prompt_token_ids"] = [1, 2]
    return {"choices": [choice], **({"prompt_token_ids": [1, 3]} if request.path == probe_requests.CHAT else {})}


async def gone(stand):
    """The URL of a server that has ended."""
    async with stand:
        return stand.url


async def test_a_server_that_is_gone_is_left_out_and_asked_no_more_until_it_is_let_in():
    first, second = StandIn(reply), StandIn(reply, free_port())
    async with first, Servers([first.url, await gone(second)], **FAST) as servers:
        admitted = asyncio.Event()

        async def admission(url):
            return admitted.is_set()

        servers.admission = admission
        said = await probe_requests.send_probes(servers, [CHAT], tokens=1)
        assert {one.url for one in said} == {first.url}
        assert servers.ready == [first.url]
        async with StandIn(reply, second.port) as back:
            await probe_requests.send_probes(servers, [CHAT], tokens=1)  # it is back, and has not got the weights
            assert back.asked(probe_requests.CHAT) == []
            admitted.set()
            await until(lambda: servers.ready == servers.urls)
            said = await probe_requests.send_probes(servers, [CHAT], tokens=1)
            assert {one.url for one in said} == set(servers.urls)


async def test_the_only_server_is_waited_for():
    first = StandIn(reply, free_port())
    async with Servers([await gone(first)], **FAST) as servers:
        asking = asyncio.ensure_future(probe_requests.send_probes(servers, [CHAT], tokens=1))
        await until(lambda: servers.state()[0]["out"])
        async with StandIn(reply, first.port):
            assert len(await asking) == probe_requests.AT_ONCE + 1
        with pytest.raises(SyncError, match=r"TG-SYNC-014.*0\.2"):
            await probe_requests.send_probes(servers, [CHAT], wait_s=0.2)


async def test_requests_are_asked_in_turn_at_the_path_they_are_played_at_until_there_are_enough_tokens():
    async with StandIn(reply) as stand, Servers([stand.url], **FAST) as servers:
        said = await probe_requests.send_probes(servers, [CHAT, TEXT, IDS], tokens=100, salt="v1")
        asked = {
            path: stand.asked(path)
            for path in (probe_requests.CHAT, probe_requests.COMPLETIONS, probe_requests.GENERATE)
        }
    # 16 requests of three tokens each; 18 for the 52 tokens that lack; and the first request once more.
    assert [one.number for one in said] == [number % 3 for number in range(34)] + [0]
    prompts = {probe_requests.CHAT: [1, 3], probe_requests.COMPLETIONS: [1, 2], probe_requests.GENERATE: [4, 5]}
    for probe, one in zip((CHAT, TEXT, IDS), said, strict=False):
        assert (one.prompt_ids, one.ids, one.logprobs) == (prompts[probe.path], [7, 8, 9], [-0.5, -0.25, -1.0])
    assert {path: len(bodies) for path, bodies in asked.items()} == dict(zip(asked, (13, 11, 11), strict=True))
    body = asked[probe_requests.CHAT][0]
    assert body == {
        **{"messages": MESSAGES, "max_tokens": 3, "model": "clerk", "cache_salt": "v1"},
        **{"logprobs": True, "top_logprobs": 0, "return_token_ids": True},
    }


def test_a_server_whose_answers_are_short_is_asked_for_no_more_than_some_rounds():
    async def run():
        async with StandIn(reply) as stand, Servers([stand.url], **FAST) as servers:
            return await probe_requests.send_probes(servers, [CHAT], tokens=10**6)

    assert (
        len(asyncio.run(run()))
        == probe_requests.AT_ONCE + (probe_requests.ROUNDS - 1) * probe_requests.MOST_AT_ONCE + 1
    )


@pytest.mark.parametrize(("length", "requests"), [(3.0, 37), (4.0, 28 + 6), (1.0, 64)])
async def test_as_many_are_asked_at_once_as_the_length_of_answers_says(length, requests):
    """Answers are three tokens: 37 of them are a tenth more than 100; 28 are 84, and 6 more the other 16."""
    async with StandIn(reply) as stand, Servers([stand.url], **FAST) as servers:
        sent = await probe_requests.send_probes(servers, [CHAT], tokens=100, length=length, repeat_first=False)
        assert len(sent) == requests


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"choices": [{}]}, "TG-SYNC-016"),
        ({"choices": [{"token_ids": [1], "logprobs": {"content": []}}], "prompt_token_ids": [1]}, r"TG-SYNC-017.*1.*0"),
        (
            {
                "choices": [{"token_ids": [1], "logprobs": {"content": [{"logprob": float("-inf")}]}}],
                "prompt_token_ids": [1],
            },
            "TG-SYNC-017",
        ),
    ],
)
async def test_an_answer_that_cannot_be_compared_is_an_error(answer, why):
    async with StandIn(lambda *_: answer) as stand, Servers([stand.url], **FAST) as servers:
        with pytest.raises(SyncError, match=why):
            await probe_requests.send_probe(servers, stand.url, CHAT)
