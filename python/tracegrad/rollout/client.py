"""Send requests to one or several OpenAI-compatible servers, with limits on time and bytes.

All requests of a session go to the same server. `Servers` retries, routes and stops using a failing server. Bodies are
encoded by orjson, or by the standard library for values that orjson refuses (lone surrogates, NaN, integers over 64
bits).
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from tracegrad.data.sampling import NEUTRAL, fields_in_error
from tracegrad.errors import ArgumentError, RefusedFields, ServerError, escape_terminal, redact

__all__ = ["Answer", "ServerError", "Servers"]


try:
    import orjson
except ImportError as error:
    raise ImportError("Rollouts need orjson. Run: pip install 'tracegrad[online]'.") from error

# Refuse the types that the standard library refuses, so that no type gets an encoding of its own.
STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def loads(raw: bytes) -> Any:
    """Decode JSON.

    >>> loads(b'{"logprob": -0.25, "half": "\\\\ud83d"}')
    {'logprob': -0.25, 'half': '\\ud83d'}

    Raises:
        ValueError: if it is not JSON.
        RecursionError: if it is nested too deep.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return json.loads(raw)


def dumps(value: Any) -> bytes:
    """Encode a value as one line of JSON. NaN, which JSON cannot represent, becomes null.

    >>> dumps({"logprob": float("nan"), "half": "\\ud83d"})
    b'{"logprob":null,"half":"\\\\ud83d"}'

    Raises:
        TypeError, ValueError: for values that JSON cannot represent.
        RecursionError: if it is nested too deep.
    """
    try:
        return orjson.dumps(value, option=STRICT)
    except TypeError:
        without_nan = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(without_nan, separators=(",", ":")).encode()


try:
    import aiohttp
except ImportError as error:
    raise ImportError("Asking servers needs aiohttp. Run: pip install 'tracegrad[online]'.") from error

# Servers close connections after 5 s without requests (uvicorn's default), so the client closes them earlier.
IDLE_S = 3.0
SHOWN = 500


@dataclass(frozen=True)
class Answer:
    """Result of one request.

    `status` is 0 if there was no answer, and `error` contains the reason. `body` is the decoded JSON, or the text if it
    is not JSON. `dropped` is true if the connection was closed before an answer, as servers do with idle connections.
    `silent` is true after a timeout.
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
        """Whether the request succeeded: 2xx, and no `"success": false` in the body."""
        refused = isinstance(self.body, dict) and self.body.get("success") is False
        return self.error is None and 200 <= self.status < 300 and not refused

    @property
    def words(self) -> str:
        """The error message of the server, or the reason for a missing answer; at most 500 characters."""
        if self.error is not None:
            return escape_terminal(self.error)[:SHOWN]
        message: Any = self.body
        while isinstance(message, dict) and (
            inner := message.get("error") or message.get("message") or message.get("detail")
        ):
            message = inner
        return f"{self.status}: {escape_terminal(message)[:SHOWN]}"


def normalize_url(url: str) -> str:
    """Return the base URL of a server without a trailing slash or `/v1`.

    >>> normalize_url("http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000'

    Raises:
        ArgumentError: if it is not such a URL, or contains a user name or password.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except (ValueError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"TG-ROLLOUT-001: {redact(str(url))!r} is not the URL of a server. Pass a URL such as http://127.0.0.1:8000."
        ) from error
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ArgumentError(
            f"TG-ROLLOUT-002: {redact(str(url))!r} is not the URL of a server. Pass a URL such as http://127.0.0.1:8000."
        )
    if parts.username or parts.password:
        raise ArgumentError(
            f"TG-ROLLOUT-003: the URL of {host} contains a name or password, which logs would show. Pass `key` instead."
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def encode_body(body: Mapping[str, Any], path: str) -> bytes:
    """Encode a request body as JSON.

    Raises:
        ArgumentError: for values that JSON cannot represent; the message names the request path.
    """
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"TG-ROLLOUT-004: the body for {path} cannot be written as JSON: {error}. Use only dicts, lists, strings "
            "and finite numbers."
        ) from error


class HttpTransport:
    """HTTP connections to all servers: a pool for frequent requests, and new connections for control requests.

    Args:
        key: sent as a bearer token, if set.
        connect_s: time limit to connect, in seconds.
        read_s: longest silence of a server within one request, in seconds.
        answer_bytes: maximum size of an answer.
        connections: maximum number of pooled connections; further requests wait for one.
    """

    def __init__(self, *, key: str | None, connect_s: float, read_s: float, answer_bytes: int, connections: int):
        self._connect_s, self._read_s = connect_s, read_s
        self._answer_bytes = answer_bytes
        self._token = {} if key is None else {"Authorization": f"Bearer {key}"}
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        # Ignore proxies and .netrc of the environment, and use no cookies: requests contain only what the caller set.
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
        """Send one request and return the answer, or why there is none. Raises only on cancellation."""
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
            reason = f"no answer within {seconds:.1f} s" if silent else f"{type(error).__name__}: {error}"
            return Answer(url, 0, None, seconds, reason, dropped, silent)

    async def _read(self, url: str, response: aiohttp.ClientResponse, started: float) -> Answer:
        def answer(body: Any, error: str | None = None) -> Answer:
            retry_after = response.headers.get("Retry-After", "")
            wait_s = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None
            return Answer(url, response.status, body, time.monotonic() - started, error, retry_after_s=wait_s)

        if response.headers.get("Content-Encoding", "identity") != "identity":
            return answer(
                None, "the answer is compressed although the request set identity. Turn off compression there"
            )
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


# Status codes of temporary states: the same request may succeed later.
RETRY_STATUSES = {408, 425, 429}
SESSIONS = 65_536
BACKOFF_S, LONGEST_BACKOFF_S = 0.25, 8.0


@dataclass
class _Server:
    """State of one server.

    `out` is the reason why it is temporarily not used, `evicted` the reason why it is never used again.
    """

    url: str
    failures: int = 0
    answered: int = 0
    placed: int = 0
    out: str | None = None
    evicted: str | None = None
    asked: set[asyncio.Future[Answer]] = field(default_factory=set)
    probe: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        return self.out is None and self.evicted is None


class Transport(Protocol):
    """A way to send requests to a server: `HttpTransport`, or `in_process.EngineTransport` for an engine."""

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
    ) -> Answer: ...
    async def close(self) -> None: ...


class Servers:
    """The servers of a run, as an async context manager.

    >>> async def example():
    ...     async with Servers(["http://127.0.0.1:8000"], model="clerk") as servers:
    ...         return await servers.chat({"messages": [{"role": "user", "content": "hi"}]}, session="g0-0")

    All requests of a session go to the same server, whose cache has its prefix. A new session goes to the server with
    the fewest requests in flight. A request without an answer (a closed connection, a timeout, 5xx, 408, 425, 429) is
    sent again after a wait that doubles each time. Every other 4xx is an error at once. A server that fails
    `max_consecutive_failures` times in a row is not used until /health answers and `admission`, if set, agrees.

    Args:
        urls: base URLs, with or without /v1.
        model: model name in every request; `servers.model` may be changed during the run.
        key: sent as a bearer token.
        timeout_s: time limit of one call, including retries and waits for a server.
        connect_s, read_s: time limit to connect, and longest silence of a server; `read_s` defaults to `timeout_s`.
        retries: maximum number of times a call is sent again.
        max_consecutive_failures: a server is no longer used after this many failures in a row.
        probe_s: seconds between health requests to a server that is out of use.
        answer_bytes: maximum size of an answer.
        connections: maximum number of open connections; further calls wait.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str,
        key: str | None = None,
        timeout_s: float = 600.0,
        connect_s: float = 10.0,
        read_s: float | None = None,
        retries: int = 5,
        max_consecutive_failures: int = 3,
        probe_s: float = 2.0,
        answer_bytes: int = 64 << 20,
        connections: int = 512,
    ):
        if isinstance(urls, str) or not urls:
            raise ArgumentError(f"TG-ROLLOUT-005: urls is {urls!r}. Pass a list with the URL of at least one server.")
        names = [normalize_url(url) for url in urls]
        if len(set(names)) != len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise ArgumentError(f"TG-ROLLOUT-006: {duplicate} is listed twice. List each server once.")
        limits = {"timeout_s": timeout_s, "connect_s": connect_s, "read_s": read_s or timeout_s, "probe_s": probe_s}
        limits |= {"max_consecutive_failures": max_consecutive_failures, "answer_bytes": answer_bytes}
        limits["connections"] = connections
        for name, value in limits.items():
            if not 0 < value < float("inf"):
                raise ArgumentError(
                    f"TG-ROLLOUT-007: {name} is {value}. It must be above 0 and finite, so no server can block the run."
                )
        self.model = model
        self.key = key
        self.timeout_s = timeout_s
        self.retried = 0
        self.admission: Callable[[str], Awaitable[bool]] | None = None
        self._servers = {name: _Server(name) for name in names}
        self._in_use: Counter[str] = Counter()
        self._sessions: OrderedDict[str, _Server] = OrderedDict()
        self._connect_s, self._probe_s = connect_s, probe_s
        self._retries, self._failures = retries, max_consecutive_failures
        self._refused: set[str] = set()
        self._read_s, self._answer_bytes, self._connections = read_s or timeout_s, answer_bytes, connections
        self._wire: Transport | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "Servers":
        self._wire = HttpTransport(
            key=self.key,
            connect_s=self._connect_s,
            read_s=self._read_s,
            answer_bytes=self._answer_bytes,
            connections=self._connections,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers.values():
            if server.probe is not None:
                server.probe.cancel()
            for request in server.asked:
                request.cancel()
        if self._wire is not None:
            wire, self._wire = self._wire, None
            await wire.close()

    @property
    def urls(self) -> list[str]:
        """Base URLs of the servers that are not evicted."""
        return [server.url for server in self._servers.values() if server.evicted is None]

    @property
    def ready(self) -> list[str]:
        """Base URLs of the servers that accept requests now."""
        return [server.url for server in self._servers.values() if server.usable]

    def state(self) -> list[dict[str, Any]]:
        """Return one row per server: URL, requests in flight, answers, failures in a row, and why it is not used."""
        return [
            {
                "url": server.url,
                "in_flight": len(server.asked),
                "answered": server.answered,
                "failures": server.failures,
                "out": server.out,
                "evicted": server.evicted,
            }
            for server in self._servers.values()
        ]

    @property
    def in_use(self) -> set[str]:
        """Model names that requests in flight still use, for example after a weight sync under a new name."""
        return set(+self._in_use)

    @contextlib.contextmanager
    def hold_model(self) -> Iterator[str]:
        """Yield the current model name, and keep it in `in_use` until the context is left."""
        name = self.model
        self._in_use[name] += 1
        try:
            yield name
        finally:
            self._in_use[name] -= 1

    async def chat(self, body: Mapping[str, Any], *, session: str, salt: str | None = None) -> dict[str, Any]:
        """Send a chat completion to the server of the session and return the answer.

        Args:
            body: request body of the API; sent unchanged except for `model` and `cache_salt`.
            session: requests with the same value go to one server.
            salt: sent as `cache_salt`: keys and values are shared only between requests with the same salt.

        Raises:
            ServerError: if a server refuses the request, or none answers in time.
        """
        return await self.post("/v1/chat/completions", body, session=session, salt=salt)

    async def post(
        self, path: str, body: Mapping[str, Any], *, session: str, salt: str | None = None
    ) -> dict[str, Any]:
        """Send a JSON object to any path, as `chat` does, and return the JSON object of the answer."""
        with self.hold_model() as model:
            sent = {**body, "model": model}
            if salt is not None:
                sent["cache_salt"] = salt
            neutral = [name for name, value in NEUTRAL.items() if name in body and body[name] == value]
            if refused := [name for name in neutral if name in self._refused]:
                raise RefusedFields(f"TG-ROLLOUT-008: the servers refuse {', '.join(refused)}", refused)
            try:
                return await self._post_with_retries(path, encode_body(sent, path), session)
            except ServerError as error:
                if not (names := fields_in_error(str(error), neutral) if isinstance(error, _Refused) else ()):
                    raise
                self._refused.update(names)
                raise RefusedFields(str(error), names) from error

    async def _post_with_retries(self, path: str, data: bytes, session: str) -> dict[str, Any]:
        """Return the first successful answer of the session's server, within the limits of one call."""
        deadline = time.monotonic() + self.timeout_s
        fresh, tries = False, 0
        while True:
            server = await self._server(session, deadline)
            answer = await self._ask(server, path, data, deadline - time.monotonic(), fresh)
            if answer is None:  # evicted during the request: another server answers
                continue
            if answer.dropped and not fresh:
                # A server may close an idle connection while a request is sent: not a failure yet.
                fresh = True
                continue
            fresh = False
            if answer.ok and isinstance(answer.body, dict):
                server.failures = 0
                server.answered += 1
                return answer.body
            if answer.status in RETRY_STATUSES:
                wait_s = answer.retry_after_s
            elif not answer.status or answer.status >= 500:
                self._count_failure(server, answer.words)
                wait_s = None
            else:
                raise _refusal(server.url, path, answer)
            tries += 1
            if tries > self._retries or time.monotonic() >= deadline:
                raise ServerError(
                    f"TG-ROLLOUT-009: {server.url}{path} did not answer in {tries} tries; the last failure: "
                    f"{answer.words}. Session {session!r} cannot continue. Read that server's log, or raise retries "
                    "and timeout_s."
                )
            self.retried += 1
            backoff_s = min(BACKOFF_S * 2 ** (tries - 1), LONGEST_BACKOFF_S) * random.uniform(0.5, 1.5)
            wait_s = backoff_s if wait_s is None else wait_s
            await asyncio.sleep(max(0.0, min(wait_s, deadline - time.monotonic())))

    async def url_of(self, session: str) -> str:
        """Return the base URL of the session's server, for clients with own connections; wait until one is usable."""
        return (await self._server(session, time.monotonic() + self.timeout_s)).url

    async def request(
        self,
        url: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        method: str = "POST",
        token: bool = True,
    ) -> Answer:
        """Send one control request to one server, once, on a new connection; never raises because of the answer.

        `token=False` leaves out the key, to test whether the server requires it.
        """
        data = None if body is None else encode_body(body, path)
        return await self._open.request(method, url, path, data, timeout_s=timeout_s, fresh=True, token=token)

    async def request_all(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0, method: str = "POST"
    ) -> list[Answer]:
        """Send one control request to every server that is not evicted; return the answers in the order of `urls`."""
        requests = [self.request(url, path, body, timeout_s=timeout_s, method=method) for url in self.urls]
        return list(await asyncio.gather(*requests))

    def suspend(self, url: str, why: str) -> None:
        """Stop using a server until its /health answers and `admission` agrees."""
        server = self._servers[url]
        if server.usable:
            server.out = why
            server.probe = asyncio.ensure_future(self._probe(server))

    async def usable(self, timeout_s: float) -> bool:
        """Return whether a server is usable, now or within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not any(server.usable for server in self._servers.values()):
            if not self.urls or not await self._change(deadline):
                return False
        return True

    def evict(self, url: str, why: str) -> None:
        """Evict a server from the run; its requests in flight are sent to other servers."""
        server = self._servers[url]
        server.evicted = why
        if server.probe is not None:
            server.probe.cancel()
        for request in list(server.asked):
            request.cancel()
        self._changed.set()

    @property
    def _open(self) -> Transport:
        if self._wire is None:
            raise ArgumentError(
                "TG-ROLLOUT-010: these servers are not open. Use them inside `async with Servers(...) as servers:`."
            )
        return self._wire

    async def _ask(self, server: _Server, path: str, data: bytes, timeout_s: float, fresh: bool) -> Answer | None:
        """Return the server's answer, or None if it was evicted during the request."""
        request = self._open.request("POST", server.url, path, data, timeout_s=max(timeout_s, 1e-3), fresh=fresh)
        future = asyncio.ensure_future(request)
        server.asked.add(future)
        try:
            await asyncio.wait({future})
        finally:
            server.asked.discard(future)
            future.cancel()  # has no effect on a finished request
        if future.cancelled():
            if server.evicted is None:
                raise ServerError(
                    f"TG-ROLLOUT-011: the servers were closed during a request to {server.url}{path}. Close them after "
                    f"all requests."
                )
            return None
        return future.result()

    async def _server(self, session: str, deadline: float) -> _Server:
        """Return the session's server, or the least loaded one if it is not usable; wait for a usable one."""
        while True:
            server = self._sessions.get(session)
            if server is not None and server.usable:
                self._sessions.move_to_end(session)
                return server
            usable = [server for server in self._servers.values() if server.usable]
            if usable:
                server = min(usable, key=lambda server: (len(server.asked), server.placed))
                server.placed += 1
                self._sessions[session] = server
                if len(self._sessions) > SESSIONS:
                    self._sessions.popitem(last=False)
                return server
            why = "; ".join(f"{server.url}: {server.evicted or server.out}" for server in self._servers.values())
            if not self.urls:
                raise ServerError(f"TG-ROLLOUT-012: all servers are evicted: {why}. Restart them and resume the run.")
            if not await self._change(deadline):
                raise ServerError(
                    f"TG-ROLLOUT-013: no server was available for session {session!r} within {self.timeout_s:g} s: "
                    f"{why}. Restart the servers; the run checks their health and uses them once they answer."
                )

    async def _change(self, deadline: float) -> bool:
        """Wait until a server comes back or is evicted; return whether that was before the deadline."""
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
        return False

    def _count_failure(self, server: _Server, reason: str) -> None:
        server.failures += 1
        if server.failures >= self._failures:
            self.suspend(server.url, f"failed {server.failures} times in a row, the last time: {reason}")

    async def _probe(self, server: _Server) -> None:
        """Send health requests to a server that is out, until it may be used again."""
        while True:
            await asyncio.sleep(self._probe_s)
            healthy = await self.request(server.url, "/health", timeout_s=self._connect_s, method="GET")
            if not 0 < healthy.status < 500:
                continue
            if self.admission is not None and not await self.admission(server.url):
                continue
            server.out = None
            server.failures = self._failures - 1  # the next failure takes it out of use again
            self._changed.set()
            return


class _Refused(ServerError):
    """A request that a server rejects as invalid."""


def _refusal(url: str, path: str, answer: Answer) -> ServerError:
    fixes = {
        401: "Pass the `key` that this server was started with.",
        403: "Pass the `key` that this server was started with.",
        404: "Look whether the model's name and the URL are right.",
        413: "Shorten the conversation, or raise the server's limit.",
    }
    fix = fixes.get(answer.status, "Change the request; it is never sent again as it is.")
    if answer.error is not None:
        fix = ""
    error_type = _Refused if answer.status in (400, 422) else ServerError
    message = f"TG-ROLLOUT-058: {url}{path} answered {answer.status} instead of a completion: {answer.words}. {fix}"
    return error_type(message.rstrip())


async def measure_logprob_kind(servers: Servers) -> str | None:
    """Return the kind of the servers' logprobs, "raw" or "processed"; None if no server reveals it.

    Each server samples one token while only one token is allowed, for two different tokens. Processed logprobs are then
    0 for both tokens.

    Raises:
        ArgumentError: if the servers differ.
    """
    kinds = dict[str, str]()
    body = {
        "model": servers.model,
        "prompt": [1],
        "max_tokens": 1,
        "temperature": 1.0,
        "logprobs": 0,
        "ignore_eos": True,
    }
    answers_by_token = [
        await servers.request_all("/v1/completions", {**body, "allowed_token_ids": [token]}) for token in (1, 2)
    ]
    for url, *answers in zip(servers.urls, *answers_by_token, strict=False):
        try:
            sums = sum(float(answer.body["choices"][0]["logprobs"]["token_logprobs"][0]) for answer in answers)
        except (KeyError, IndexError, TypeError, ValueError):
            continue
        kinds[url] = "processed" if sums > -1e-3 else "raw"
    if len(set(kinds.values())) > 1:
        descriptions = ", ".join(f"{kind} at {url}" for url, kind in kinds.items())
        raise ArgumentError(
            f"TG-ROLLOUT-014: the servers' logprobs are {descriptions}. One ratio cannot mix both kinds. Start all "
            "servers with the same --logprobs-mode."
        )
    return next(iter(kinds.values()), None)
