"""The server of the page: loopback alone, every address behind a token, nothing but GET.

A request is answered from `Session` and `pieces`. Strangers' text never becomes a script: the policy of every answer
allows only the files of the page itself. Started by `tracegrad view`.
"""

import hmac
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from tracegrad.errors import TracegradError, shown
from tracegrad.view import export, pieces, runs
from tracegrad.view.html import SCRIPTS, STYLES, page
from tracegrad.view.loaded import Session
from tracegrad.view.searcher import Searcher

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-store",
}
_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def application(session: Session, token: str) -> Starlette:
    """The page of a session, under `/TOKEN/`."""
    return _App(session, token).made()


class _App:
    def __init__(self, session: Session, token: str) -> None:
        self.session, self.token = session, token
        self.searcher = Searcher(session.indexer.path)

    def made(self) -> Starlette:
        ways: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "": self.page,
            "static/{name}": self.static,
            "state": self.state,
            "columns": self.columns,
            "rows": self.rows,
            "tag": self.tag,
            "search": self.search,
            "trace/{n}": self.trace,
            "message/{n}": self.message,
            "group/{n}": self.group,
            "runs": self.runs,
            "export": self.export,
        }
        routes = [Route(f"/{{token}}/{path}", _guarded(way), methods=["GET"]) for path, way in ways.items()]
        app = Starlette(routes=routes, middleware=[Middleware(_Door, token=self.token)], lifespan=self._life)
        # An address with a slash too many is not found: one that is no UTF-8 could not be redirected.
        app.router.redirect_slashes = False
        return app

    @asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.searcher.close()

    async def page(self, request: Request) -> Response:
        return HTMLResponse(page())

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        kind = "text/javascript" if name in SCRIPTS else "text/css" if name in STYLES else ""
        if not kind:
            return Response(status_code=404)
        return Response(STYLES[name]() if name in STYLES else pieces.read(name), media_type=kind)

    async def state(self, request: Request) -> Response:
        return _Json(await run_in_threadpool(self.session.state))

    async def columns(self, request: Request) -> Response:
        found = await run_in_threadpool(self.session.columns)
        table = np.stack(list(found.values())).astype("<f4")
        return Response(table.tobytes(), media_type="application/octet-stream", headers={"x-rows": str(table.shape[1])})

    async def rows(self, request: Request) -> Response:
        asked = _rows(request)[:1000]
        found = await run_in_threadpool(self.session.labels, asked)
        return _Json(found, background=BackgroundTask(self.searcher.ready))

    async def tag(self, request: Request) -> Response:
        found = await run_in_threadpool(self.session.tagged, request.query_params.get("name", ""))
        return Response(found.astype("<i4").tobytes(), media_type="application/octet-stream")

    async def search(self, request: Request) -> Response:
        told = request.query_params
        found = await self.searcher.find(told.get("q", ""), told.get("regex") == "1", _number(told.get("start"), 0))
        return _Json(found)

    async def trace(self, request: Request) -> Response:
        told = request.query_params
        more = {"run": told.get("run", ""), "step": _number(told.get("step"), -1)}
        return _Json(await run_in_threadpool(pieces.trace, self.session, _row(request), **more))

    async def message(self, request: Request) -> Response:
        told = request.query_params
        asked = (_row(request), _number(told.get("message"), -1), _number(told.get("start"), 0))
        return _Json({"html": await run_in_threadpool(pieces.message, self.session, *asked)})

    async def group(self, request: Request) -> Response:
        n = _row(request)
        return _Json({"html": await run_in_threadpool(pieces.beside, self.session, n)})

    async def runs(self, request: Request) -> Response:
        chosen = request.query_params.getlist("run")
        return _Json({"html": await run_in_threadpool(runs.page, self.session.runs, chosen)})

    async def export(self, request: Request) -> Response:
        asked = _rows(request)
        text = await run_in_threadpool(export.page_of, self.session, asked)
        headers = {"content-disposition": 'attachment; filename="traces.html"'}
        return Response(text.encode("utf-8", "replace"), media_type="text/html", headers=headers)


class _Door:
    """Lets in who knows the token and asks this machine by its own name: no other page of a browser does both."""

    def __init__(self, app: Any, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").rsplit(":", 1)[0]
        given = scope["path"].partition("/")[2].partition("/")[0].encode("utf-8", "replace")
        if host not in _HOSTS or not hmac.compare_digest(given, self.token.encode()):
            headers = {name.decode(): value.decode() for name, value in _HEADERS.items()}
            await Response("not found", status_code=404, headers=headers)(scope, receive, send)
            return

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS.items()]
            await send(message)

        await self.app(scope, receive, sent)


def _guarded(way: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Errors of ours as the page shows them."""

    async def answered(request: Request) -> Response:
        try:
            return await way(request)
        except TracegradError as error:
            return _Json({"error": str(error)}, status_code=400)
        except (OSError, sqlite3.Error) as error:  # a file, or the index, is gone or damaged by now
            said = shown(f"{type(error).__name__}: {error}")[:300]
            return _Json({"error": f"{said}. Nothing can be shown of it. Open the viewer again."}, status_code=410)

    return answered


class _Json(JSONResponse):
    """JSON in ASCII, as names of files and records may hold halves of characters."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def _row(request: Request) -> int:
    """The row that an address names; -1, which no index has, where it is no number."""
    return max(-1, _number(request.path_params["n"], -1))


def _rows(request: Request) -> list[int]:
    """Rows that an address names; what is no number is left out."""
    found = (_number(word, -1) for word in request.query_params.get("n", "").split(","))
    return [row for row in found if row >= 0]


def _number(text: str | None, default: int) -> int:
    """A number of an address; what is none is the default.

    >>> _number("12", 0), _number("-1", 5), _number("x", 5), _number(None, 5)
    (12, -1, 5, 5)
    """
    plain = (text or "").removeprefix("-")
    return int(text or 0) if plain.isascii() and plain.isdigit() and len(plain) < 16 else default
