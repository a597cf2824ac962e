"""The bare HTTP of the proxy: a client's body in, an answer out, and the server asked, all of bounded size.

No sessions and no records here. Called by `proxy`.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Protocol

import aiohttp
import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tracegrad.errors import TracegradError
from tracegrad.rollout.shapes import parsed

HEAD_S, HEAD_BYTES = 20.0, 1 << 16
"""How long the head of a request may take, from its connection or its first byte, and how large it may be."""
BODY_S = 60.0
"""How long a body may take."""


class Connection(H11Protocol):
    """A connection of a client, closed if no request's head has come whole within `HEAD_S` seconds."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """Take what came, which may begin a head or end it."""
        if self._late is None and self.conn.their_state is h11.IDLE:
            self._late = self.loop.call_later(HEAD_S, self.transport.close)
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._in_time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._in_time()
        super().connection_lost(exc)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Refusal(Exception):
    """A request that is answered by the proxy itself."""

    def __init__(self, status: int, words: str, kind: str = "invalid_request_error") -> None:
        super().__init__(words)
        self.status, self.kind = status, kind


class Pool(Protocol):
    """Several servers, as `rollout.server.Servers` gives them."""

    async def where(self, session: str) -> str: ...
    def leave_out(self, url: str, why: str) -> None: ...


class Upstream:
    """The server, or several, that a proxy asks; an asynchronous context manager.

    Args:
        url: base URL; or several servers, of which one that cannot be asked is left out until it is healthy, and its
            sessions ask another, or wait.
        key: what the server asks for.
        timeout_s: of one request.
    """

    def __init__(self, url: str | Pool, key: str | None, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Upstream":
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=10.0)
        connector = aiohttp.TCPConnector(limit=0)
        self._client = aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 18)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()

    async def ask(self, method: str, session: str, path: str, body: bytes | None) -> aiohttp.ClientResponse:
        """The server's answer, once its head is there; the caller closes it.

        Raises:
            Refusal: 502, 503 or 504, where there is none.
        """
        assert self._client is not None
        again, deadline = True, time.monotonic() + self._timeout_s
        while True:
            base = await self._where(session)
            url = base.rstrip("/").removesuffix("/v1") + path
            try:
                return await self._client.request(method, url, data=body, headers=self._headers)
            except asyncio.TimeoutError:
                raise Refusal(504, f"the server was silent for {self._timeout_s:g} s", "upstream_error") from None
            except aiohttp.ClientError as error:
                # Servers close idle connections just when they are used.
                dropped = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
                if again and dropped and not isinstance(error, aiohttp.ClientConnectorError):
                    again = False
                    continue
                if not isinstance(self._url, str) and time.monotonic() < deadline:
                    self._url.leave_out(base, f"it cannot be asked: {error}")
                    continue
                raise Refusal(502, f"the server cannot be asked: {error}", "upstream_error") from None

    async def _where(self, session: str) -> str:
        if isinstance(self._url, str):
            return self._url
        try:
            return await self._url.where(session)
        except TracegradError as error:
            raise Refusal(503, str(error), "upstream_error") from None


async def answer(send: Any, status: int, body: bytes, kind: str = "application/json", *, close: bool = False) -> None:
    """Sends a whole answer; `close` ends the connection, on which an unread body may still come."""
    more = [(b"connection", b"close")] if close else []
    await start(send, status, kind, (b"content-length", str(len(body)).encode()), *more)
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def start(send: Any, status: int, kind: str, *headers: tuple[bytes, bytes]) -> None:
    """Sends the head of an answer, whatever a server calls its content."""
    headers = ((b"content-type", kind.encode("latin-1", "replace")), *headers)
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def disconnected(receive: Any) -> None:
    """Returns once the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def body_of(receive: Any, most: int, headers: Mapping[bytes, str]) -> bytes:
    """A request's body, read within `BODY_S` seconds."""
    told = headers.get(b"content-length", "0")
    if told.isdigit() and int(told) > most:
        raise Refusal(413, f"the request has more than {most} bytes")

    async def read() -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the client closed")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise Refusal(413, f"the request has more than {most} bytes")
            if not message.get("more_body"):
                return b"".join(parts)

    try:
        return await asyncio.wait_for(read(), BODY_S)
    except asyncio.TimeoutError:
        raise Refusal(408, f"the request did not come within {BODY_S:g} s") from None


def object_of(body: bytes) -> dict[str, Any]:
    """A body as a JSON object."""
    try:
        told = parsed(body, halves=True)
    except ValueError as error:
        raise Refusal(400, f"the request is not JSON: {error}") from None
    if not isinstance(told, dict):
        raise Refusal(400, "the request is not a JSON object")
    return told


async def whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body of a server's answer."""
    data = await response.content.read(most + 1)
    parts = [data]
    size = len(data)
    while data and size <= most:
        data = await response.content.read(most + 1 - size)
        parts.append(data)
        size += len(data)
    if size > most:
        raise Refusal(502, f"the server's answer has more than {most} bytes", "upstream_error")
    return b"".join(parts)
