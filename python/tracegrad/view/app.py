"""Serve the page: on loopback only, with GET only, and every address starts with a token.

`Viewer` and `pieces` provide the answers. Third-party text never runs as a script: the content security policy of
every response allows only the page's own files.
"""

import hashlib
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

from tracegrad.errors import TracegradError, escape_terminal
from tracegrad.view import export, pieces, runs
from tracegrad.view.html import SCRIPTS, STYLES, page
from tracegrad.view.loaded import Viewer
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


def application(session: Viewer, token: str) -> Starlette:
    """Return the application that serves a session's page below `/TOKEN/`."""
    return _App(session, token).made()


class _App:
    def __init__(self, session: Viewer, token: str) -> None:
        self.session, self.token = session, token
        self.searcher = Searcher(session.indexer.path)

    def made(self) -> Starlette:
        handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
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
        routes = [
            Route(f"/{{token}}/{path}", _with_errors(handler), methods=["GET"]) for path, handler in handlers.items()
        ]
        app = Starlette(routes=routes, middleware=[Middleware(_AccessGuard, token=self.token)], lifespan=self._life)
        # An additional slash gives 404 instead of a redirect, which fails for an address that is not UTF-8.
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
        version = await run_in_threadpool(self.session.version)
        return await _unless_unchanged(request, version, self.session.state)

    async def columns(self, request: Request) -> Response:
        columns = await run_in_threadpool(self.session.columns)
        table = np.stack(list(columns.values())).astype("<f4")
        return Response(table.tobytes(), media_type="application/octet-stream", headers={"x-rows": str(table.shape[1])})

    async def rows(self, request: Request) -> Response:
        wanted = _rows(request)[:1000]
        labels = await run_in_threadpool(self.session.labels, wanted)
        return _Json(labels, background=BackgroundTask(self.searcher.ready))

    async def tag(self, request: Request) -> Response:
        tagged = await run_in_threadpool(self.session.tagged, request.query_params.get("name", ""))
        return Response(tagged.astype("<i4").tobytes(), media_type="application/octet-stream")

    async def search(self, request: Request) -> Response:
        query = request.query_params
        matches = await self.searcher.find(
            query.get("q", ""), query.get("regex") == "1", _number(query.get("start"), 0)
        )
        return _Json(matches)

    async def trace(self, request: Request) -> Response:
        query = request.query_params
        return _Json(
            await run_in_threadpool(
                pieces.trace, self.session, _row(request), run=query.get("run", ""), step=_number(query.get("step"), -1)
            )
        )

    async def message(self, request: Request) -> Response:
        query = request.query_params
        position = (_row(request), _number(query.get("message"), -1), _number(query.get("start"), 0))
        return _Json({"html": await run_in_threadpool(pieces.message, self.session, *position)})

    async def group(self, request: Request) -> Response:
        n = _row(request)
        return _Json({"html": await run_in_threadpool(pieces.group_html, self.session, n)})

    async def runs(self, request: Request) -> Response:
        chosen = request.query_params.getlist("run")
        version = await run_in_threadpool(runs.version, self.session.runs, chosen)
        return await _unless_unchanged(request, version, lambda: {"html": runs.page(self.session.runs, chosen)})

    async def export(self, request: Request) -> Response:
        wanted = _rows(request)
        text = await run_in_threadpool(export.page_of, self.session, wanted)
        headers = {"content-disposition": 'attachment; filename="traces.html"'}
        return Response(text.encode("utf-8", "replace"), media_type="text/html", headers=headers)


class _AccessGuard:
    """Middleware that requires the token in the path and a loopback name in the Host header.

    No foreign page in the browser can send both.
    """

    def __init__(self, app: Any, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").rsplit(":", 1)[0]
        token = scope["path"].partition("/")[2].partition("/")[0].encode("utf-8", "replace")
        if host not in _HOSTS or not hmac.compare_digest(token, self.token.encode()):
            headers = {name.decode(): value.decode() for name, value in _HEADERS.items()}
            await Response("not found", status_code=404, headers=headers)(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS.items()]
            await send(message)

        await self.app(scope, receive, send_with_headers)


async def _unless_unchanged(request: Request, version: str, content: Callable[[], Any]) -> Response:
    """Return the content as JSON, or 304 without computing it if the request names the current version."""
    tag = f'"{hashlib.sha256(version.encode("utf-8", "surrogateescape")).hexdigest()[:32]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return _Json(await run_in_threadpool(content), headers={"etag": tag})


def _with_errors(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler so that expected errors become JSON responses for the page."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except TracegradError as error:
            return _Json({"error": str(error)}, status_code=400)
        except (OSError, sqlite3.Error) as error:  # A file or the index was removed or damaged.
            description = escape_terminal(f"{type(error).__name__}: {error}")[:300]
            return _Json(
                {"error": f"{description}. Nothing can be shown of it. Open the viewer again."}, status_code=410
            )

    return handle


class _Json(JSONResponse):
    """A JSON response in ASCII, because names of files and records may contain lone surrogates."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def _row(request: Request) -> int:
    """Return the row in an address. -1, which no index has, if it is not a number."""
    return max(-1, _number(request.path_params["n"], -1))


def _rows(request: Request) -> list[int]:
    """Return the rows in the query of an address. Values that are not numbers are ignored."""
    numbers = (_number(word, -1) for word in request.query_params.get("n", "").split(","))
    return [row for row in numbers if row >= 0]


def _number(text: str | None, default: int) -> int:
    """Return a number from an address, or the default if the text is not a number.

    >>> _number("12", 0), _number("-1", 5), _number("x", 5), _number(None, 5)
    (12, -1, 5, 5)
    """
    digits = (text or "").removeprefix("-")
    return int(text or 0) if digits.isascii() and digits.isdigit() and len(digits) < 16 else default
