"""What servers are asked after a push: those that are gone are left out until they have the weights, and waited for."""

import asyncio

import pytest

from stand_in import StandIn, free_port, until
from tracegrad.rollout.server import Servers
from tracegrad.sync import SyncError, canary

FAST = {"model": "clerk", "probe_s": 0.05, "connect_s": 30.0}
CACHED, NEW = [1, 2, 3], [3, 2, 1]


def reply(request, body):
    choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}, "prompt_token_ids": (body or {}).get("prompt")}
    return {"choices": [choice]}


async def gone(stand):
    """The URL of a server that has ended."""
    async with stand:
        return stand.url


def test_a_server_that_is_gone_is_left_out_and_asked_no_more_until_it_is_let_in():
    async def run():
        first, second = StandIn(reply), StandIn(reply, free_port())
        async with first, Servers([first.url, await gone(second)], **FAST) as servers:
            admitted = asyncio.Event()

            async def admission(url):
                return admitted.is_set()

            servers.admission = admission
            said = await canary.ask(servers, CACHED, NEW)
            assert [(one.url, one.cached) for one in said] == [(first.url, True), (first.url, False)]
            assert servers.ready == [first.url]
            async with StandIn(reply, second.port) as back:
                await canary.ask(servers, CACHED, NEW)  # it is back, and has not got the weights
                assert back.asked("/v1/completions") == []
                admitted.set()
                await until(lambda: servers.ready == servers.urls)
                assert {one.url for one in await canary.ask(servers, CACHED, NEW)} == set(servers.urls)

    asyncio.run(run())


def test_the_only_server_is_waited_for():
    async def run():
        first = StandIn(reply, free_port())
        async with Servers([await gone(first)], **FAST) as servers:
            asking = asyncio.ensure_future(canary.ask(servers, CACHED, NEW))
            await until(lambda: servers.state()[0]["out"])
            async with StandIn(reply, first.port):
                assert len(await asking) == 2
            with pytest.raises(SyncError, match=r"No server was there for the canary after a push, within 0\.2 s"):
                await canary.ask(servers, CACHED, NEW, wait_s=0.2)

    asyncio.run(run())
