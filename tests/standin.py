"""A server in the test process that answers as a test tells it: for the faults that a real one shows too rarely."""

import asyncio
import json

from aiohttp import web

CHAT = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}


def drop(request):
    """End the connection without an answer, as a server does with an idle one or when it dies."""
    request.transport.abort()
    return web.Response()


async def hang(request):
    """Say nothing for longer than any test waits."""
    await asyncio.sleep(60)
    return web.Response()


class StandIn:
    """`answer(request, body)` gives a dict (200), an int (that status) or a response; `seen` holds what was asked."""

    def __init__(self, answer=lambda request, body: CHAT, port=0):
        self.answer, self.port = answer, port
        self.seen = []
        self.headers = []

    async def _handle(self, request):
        raw = await request.read()
        body = json.loads(raw) if raw else None
        self.seen.append((request.path_qs, body))
        self.headers.append(dict(request.headers))
        found = self.answer(request, body)
        if asyncio.iscoroutine(found):
            found = await found
        if isinstance(found, dict):
            return web.json_response(found)
        return (
            web.json_response({"error": {"message": f"said {found}"}}, status=found)
            if isinstance(found, int)
            else found
        )

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    def asked(self, path):
        return [body for seen, body in self.seen if seen.split("?")[0] == path]
