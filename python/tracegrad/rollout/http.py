"""One request to one server: bounded in time and in bytes, its answer as data.

Nothing here retries or chooses a server; `server` does, and is the one that calls this.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tracegrad.errors import ArgumentError, redacted, shown
from tracegrad.rollout.jsons import loads

try:
    import aiohttp
except ImportError as error:
    raise ImportError("Asking servers needs aiohttp. Run: pip install 'tracegrad[online]'.") from error

# Servers close connections that were idle for 5 s (uvicorn's default); ours are given up before.
IDLE_S = 3.0
SHOWN = 500


@dataclass(frozen=True)
class Answer:
    """What came of one request.

    `status` is 0 where there was no answer, and `error` says why. `body` is what the JSON held, or the text where it
    was none. `dropped` is true where the connection was closed before an answer, as servers do with idle ones;
    `silent` where the time was over.
    """

    url: str
    status: int
    body: Any
    seconds: float
    error: str | None = None
    dropped: bool = False
    silent: bool = False
    retry_after_s: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the server did what it was asked: 2xx, and no `"success": false` in the body."""
        refused = isinstance(self.body, dict) and self.body.get("success") is False
        return self.error is None and 200 <= self.status < 300 and not refused

    @property
    def words(self) -> str:
        """The server's own words, or why there are none, at most 500 characters."""
        if self.error is not None:
            return shown(self.error)[:SHOWN]
        found: Any = self.body
        while isinstance(found, dict) and (inner := found.get("error") or found.get("message") or found.get("detail")):
            found = inner
        return f"{self.status}: {shown(found)[:SHOWN]}"


def checked_url(url: str) -> str:
    """The base URL of a server without a slash or `/v1` at its end.

    >>> checked_url("http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000'

    Raises: ArgumentError for what is no such URL, or holds a name and password.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except (ValueError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"{redacted(str(url))!r} is no URL of a server. Give one such as http://127.0.0.1:8000."
        ) from error
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ArgumentError(f"{redacted(str(url))!r} is no URL of a server. Give one such as http://127.0.0.1:8000.")
    if parts.username or parts.password:
        raise ArgumentError(f"The URL of {host} holds a name or password, which logs would show. Pass `key` instead.")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def encoded(body: Mapping[str, Any], path: str) -> bytes:
    """A body as JSON.

    Raises: ArgumentError for what JSON cannot hold, with the path that it was meant for.
    """
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"The body for {path} is no JSON: {error}. A server would not take it. Pass dicts, lists, texts and finite "
            "numbers."
        ) from error


class Wire:
    """The connections to all servers: kept ones for what is asked often, fresh ones for control requests.

    Args:
        key: sent as a bearer token, if given.
        connect_s: how long a connection may take.
        read_s: how long a server may be silent within one request.
        answer_bytes: the largest answer that is read.
        connections: how many are kept at once; further requests wait for one.
    """

    def __init__(self, *, key: str | None, connect_s: float, read_s: float, answer_bytes: int, connections: int):
        self._connect_s, self._read_s = connect_s, read_s
        self._answer_bytes = answer_bytes
        self._token = {} if key is None else {"Authorization": f"Bearer {key}"}
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        # Nothing of the environment (proxies, .netrc) and no cookies: what is sent is what the caller told.
        common: dict[str, Any] = {"headers": headers, "auto_decompress": False}
        kept = aiohttp.TCPConnector(limit=connections, keepalive_timeout=IDLE_S)
        self._kept = aiohttp.ClientSession(connector=kept, cookie_jar=aiohttp.DummyCookieJar(), **common)
        fresh = aiohttp.TCPConnector(limit=0, force_close=True)
        self._fresh = aiohttp.ClientSession(connector=fresh, cookie_jar=aiohttp.DummyCookieJar(), **common)

    async def close(self) -> None:
        """Close all connections."""
        await self._kept.close()
        await self._fresh.close()

    async def request(
        self,
        method: str,
        url: str,
        path: str,
        data: bytes | None,
        *,
        timeout_s: float,
        fresh: bool = False,
        token: bool = True,
    ) -> Answer:
        """The answer of one server, or why there is none; raises nothing but cancellation."""
        session = self._fresh if fresh else self._kept
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_s, sock_read=self._read_s)
        started = time.monotonic()
        try:
            async with session.request(
                method,
                url + path,
                data=data,
                headers=self._token if token else None,
                timeout=limits,
                allow_redirects=False,
            ) as response:
                return await self._read(url, response, started)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            seconds = time.monotonic() - started
            dropped = isinstance(error, (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError))
            silent = isinstance(error, asyncio.TimeoutError)
            why = f"no answer within {seconds:.1f} s" if silent else f"{type(error).__name__}: {error}"
            return Answer(url, 0, None, seconds, why, dropped, silent)

    async def _read(self, url: str, response: aiohttp.ClientResponse, started: float) -> Answer:
        def answer(body: Any, error: str | None = None) -> Answer:
            told = response.headers.get("Retry-After", "")
            wait_s = float(told) if told.isascii() and told.isdigit() else None
            return Answer(url, response.status, body, time.monotonic() - started, error, retry_after_s=wait_s)

        if response.headers.get("Content-Encoding", "identity") != "identity":
            return answer(None, "the answer is compressed although identity was asked for. Turn compression off there")
        chunks, size = [], 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > self._answer_bytes:
                return answer(
                    None,
                    f"the answer is longer than {self._answer_bytes:,} bytes. Ask for fewer tokens or logprobs, or "
                    "raise answer_bytes",
                )
            chunks.append(chunk)
        raw = b"".join(chunks)
        try:
            return answer(loads(raw) if raw else None)
        except (ValueError, RecursionError):
            return answer(raw[: 4 * SHOWN].decode(errors="replace"))
