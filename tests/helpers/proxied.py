"""A stand-in server, a proxy before it, and a client of either, for the tests of the proxy."""

import asyncio
import contextlib
import json

import aiohttp

from stand_in import Scripted, Served, always
from tracegrad.rollout.proxy import Proxy

KEY = "a key that is long"


class Bench:
    """A stand-in server, a proxy before it, and a client of either."""

    def __init__(self, example, script=None, wait_s=0.0, spoil=None, **options):
        self.scripted = Scripted(example, script or always("2 × 20 = 40 €"))
        self.served = Served(self.scripted, wait_s, spoil)
        self.records, self.options = [], options

    async def __aenter__(self):
        self.held = contextlib.AsyncExitStack()
        await self.held.enter_async_context(self.served)
        options = {"finished": self.records.append, "key": KEY, **self.options}
        self.proxy = await self.held.enter_async_context(Proxy(self.served.url, **options))
        self.client = await self.held.enter_async_context(aiohttp.ClientSession())
        return self

    async def __aexit__(self, *error):
        await self.held.aclose()

    async def ask(self, path, body, key=KEY, method="POST", **headers):
        """Status and body of the proxy's answer."""
        sent = {"Authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
        data = body if isinstance(body, bytes | None) else json.dumps(body)
        async with self.client.request(method, self.proxy.url + path, data=data, headers=sent) as answer:
            return answer.status, await answer.read()

    async def plain(self, path, body):
        """What the server itself answers."""
        async with self.client.post(self.served.url + path, json=body) as answer:
            return await answer.read()


def driven(example, **options):
    """Runs `async test(bench)`."""

    def run(test):
        async def main():
            async with Bench(example, **options) as bench:
                return await asyncio.wait_for(test(bench), 60)

        return asyncio.run(main())

    return run


QUESTION = {"model": "clerk", "messages": [{"role": "user", "content": "2 × 20?"}], "max_tokens": 64}
