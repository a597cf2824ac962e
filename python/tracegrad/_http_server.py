"""Serve HTTP within limits on heads, bodies and time: for the recording proxy and `receive`."""

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Mapping
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S, HEAD_BYTES = 20.0, 1 << 16
"""Limits on the head of a request: seconds from the connection or its first byte, and size in bytes."""
BODY_S = 60.0
"""Time limit to receive a body, in seconds."""


class Connection(H11Protocol):
    """Connection of a client, closed if no complete request head has arrived within `HEAD_S` seconds."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """Process received bytes, which may start or complete a request head."""
        if self._timer is None and self.conn.their_state is h11.IDLE:
            self._timer = self.loop.call_later(HEAD_S, self.transport.close)
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._cancel_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        self._cancel_timer()
        super().connection_lost(exc)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Refusal(Exception):
    """A request that a server of tracegrad answers itself with an error."""

    def __init__(self, status: int, words: str, kind: str = "invalid_request_error") -> None:
        super().__init__(words)
        self.status, self.kind = status, kind


async def send_response(
    send: Any,
    status: int,
    body: bytes,
    kind: str = "application/json",
    *headers: tuple[bytes, bytes],
    close: bool = False,
) -> None:
    """Send a complete response; `close` ends the connection, since unread parts of the request may still arrive."""
    headers = (*headers, (b"connection", b"close")) if close else headers
    await start(send, status, kind, (b"content-length", str(len(body)).encode()), *headers)
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def start(send: Any, status: int, kind: str, *headers: tuple[bytes, bytes]) -> None:
    """Send the head of a response; any content type of a server is accepted."""
    headers = ((b"content-type", kind.encode("latin-1", "replace")), *headers)
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def wait_for_disconnect(receive: Any) -> None:
    """Return once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def body_of(receive: Any, most: int, headers: Mapping[bytes, str]) -> bytes:
    """Read the body of a request within `BODY_S` seconds.

    Raises:
        Refusal: 400, 408 or 413, if the client closes, is too slow, or sends more than `most` bytes.
    """
    length = headers.get(b"content-length", "0")
    if length.isdigit() and int(length) > most:
        raise Refusal(413, f"the request has more than {most} bytes")

    async def read() -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the client closed")
            body += message.get("body", b"")
            if len(body) > most:
                raise Refusal(413, f"the request has more than {most} bytes")
            if not message.get("more_body"):
                return bytes(body)

    try:
        return await asyncio.wait_for(read(), BODY_S)
    except asyncio.TimeoutError:
        raise Refusal(408, f"the request did not come within {BODY_S:g} s") from None


def has_key(headers: Mapping[bytes, str], key: str) -> bool:
    """Return whether a request has a key, as a bearer token or as x-api-key."""
    scheme, _, bearer = headers.get(b"authorization", "").partition(" ")
    shown_key = bearer.strip() if scheme.lower() == "bearer" else headers.get(b"x-api-key", "")
    return hmac.compare_digest(shown_key.encode(), key.encode())


class Server:
    """HTTP server of one ASGI application; an asynchronous context manager. It handles no signals.

    Args:
        app: the application.
        host, port: address to listen on; port 0 chooses a free one.

    Attributes:
        url: address that the server listens on.

    Raises:
        OSError: on entering, if the address cannot be used.
    """

    def __init__(self, app: Any, host: str, port: int) -> None:
        self._app, self._address = app, (host, port)

    async def __aenter__(self) -> "Server":
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        listening = socket.create_server(self._address, family=family, backlog=1024)
        host, port = listening.getsockname()[:2]
        self.url = f"http://{host if ':' not in host else f'[{host}]'}:{port}"
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            http=Connection,
            ws="none",
            h11_max_incomplete_event_size=HEAD_BYTES,
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listening]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._serving
