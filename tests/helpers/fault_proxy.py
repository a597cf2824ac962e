"""Stands between a run and a vLLM server, and makes one of the mistakes that the check of weights has to find.

Each fault is what something real does: a push that is answered and not done, a part of the weights that stays, a
balancer, a cache, a gateway that sets sampling parameters. `FAULTS` names them with the words that the check must say.
"""

import asyncio
import json
import shutil
import threading
from pathlib import Path

import aiohttp
from aiohttp import web
from safetensors.torch import load_file, save_file

UPDATE = ("/start_weight_update", "/update_weights", "/finish_weight_update")
SAMPLING = {
    "temperature": 0.7, "top_p": 0.8, "top_k": 3, "min_p": 0.2,
    "frequency_penalty": 1.5, "presence_penalty": 1.5, "repetition_penalty": 1.3,
}  # fmt: skip
FAULTS = {
    "missed push": "still run the previous version's weights",
    "weights of the start": "initial weights of the run",
    "one layer missed": "weights of layer 1 are the previous version's",
    "embedding missed": r"weights of model\.embed_tokens are the previous version's",
    "keys and values kept": "On a new prompt they agree",
    "half of the requests to a server without pushes": "answers agree: one address may serve several servers",
    "one of two servers missed a push": r"Only \S+ of 2 servers differs",
    "a cache of responses": "response cache",
    "another chat template": "another chat template",
    "another tokenizer": "another tokenizer",
    "temperature": r"temperature 0\.(69|7)",
    **{name: f"with {name} " for name in SAMPLING if name != "temperature"},
}


class FaultProxy:
    """One server in front of another, in a thread of its own.

    Args:
        upstream: base URL of vLLM.
        fault: of `FAULTS`, or None.
        folder: for files of weights.
        other: base URL of a server that nobody pushes to.
    """

    def __init__(self, upstream, fault, folder, other=None):
        self.upstream, self.fault, self.other = upstream, fault, other
        self.folder = Path(folder)
        self.pushes = self.chats = 0
        self.kept, self.answers = [], {}

    async def _serve(self, request):
        body = json.loads(data) if (data := await request.read()) else None
        path, base = request.path, self.upstream
        if path in UPDATE:
            if (answer := self._pushed(path, body)) is not None:
                return web.json_response(answer)
        elif path == "/v1/chat/completions":
            self.chats += 1
            if self.fault in SAMPLING:
                body[self.fault] = SAMPLING[self.fault]
            if self.fault == "another chat template":
                body["chat_template"] = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
            if self.fault == "a cache of responses":  # those that come together wait for the first
                return await self._cached(json.dumps(body), request)
            if self.other is not None and self.chats % 2:
                base = self.other
        told = "clear_cache=false&" if self.fault == "keys and values kept" and path == "/pause" else ""
        headers = {"Authorization": value} if (value := request.headers.get("Authorization")) else {}
        url = f"{base}{path}?{told}{request.query_string}"
        async with self.client.request(request.method, url, json=body, headers=headers) as found:
            text, kind = await found.read(), found.content_type
        return web.Response(status=found.status, body=text, content_type=kind)

    async def _cached(self, body, request):
        if body not in self.answers:
            url, headers = f"{self.upstream}{request.path}", {"Content-Type": "application/json"}
            headers |= {"Authorization": value} if (value := request.headers.get("Authorization")) else {}

            async def asked():
                async with self.client.post(url, data=body, headers=headers) as found:
                    return found.status, await found.read()

            self.answers[body] = asyncio.ensure_future(asked())
        status, text = await asyncio.shield(self.answers[body])
        return web.Response(status=status, body=text, content_type="application/json")

    def _pushed(self, path, body):
        """Changes a part of a push in place; or the answer that is given without it."""
        self.pushes += path == UPDATE[0]
        if self.fault == "missed push" and self.pushes > 1:
            return {}
        if path != UPDATE[1]:
            return None
        told = body["update_info"]
        copy = self.folder / f"kept-{self.pushes}.safetensors"
        shutil.copy(told["path"], copy)
        self.kept.append(copy)
        if self.fault == "weights of the start" and self.pushes == 3:
            self._send(told, load_file(self.kept[0]))
        if self.fault in ("one layer missed", "embedding missed") and self.pushes > 1:
            new, old = load_file(copy), load_file(self.kept[-2])
            part = "layers.1." if self.fault == "one layer missed" else "embed_tokens"
            self._send(told, {name: old[name] if part in name else value for name, value in new.items()})
        return None

    def _send(self, told, weights):
        path = self.folder / f"sent-{self.pushes}.safetensors"
        save_file(weights, path, metadata={"format": "pt"})
        told |= {"path": str(path), "bytes": path.stat().st_size}

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._main(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(60)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(60)
        self._loop.close()

    async def _main(self, ready):
        self._done = asyncio.Event()
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as self.client:
            ready.set()
            await self._done.wait()
            await runner.cleanup()
