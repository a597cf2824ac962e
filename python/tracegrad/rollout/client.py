"""Send requests to one or several OpenAI-compatible servers, bounded in time and bytes.

A session stays with its server. `Server` retries, routes and takes a failing server out of use. Bodies are JSON by
orjson, or by the standard library for what orjson refuses (lone surrogates, NaN, integers over 64 bits).
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

from tracegrad.data.sampling import NEUTRAL, refused_fields
from tracegrad.errors import ArgumentError, RefusedFields, ServerError, redacted, shown

__all__ = ["Answer", "ServerError", "Servers"]


try:
    import orjson
except ImportError as error:
    raise ImportError("Playing needs orjson. Run: pip install 'tracegrad[online]'.") from error

# What the standard library refuses is refused, not told in a way that a reader would have to know of.
STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def loads(raw: bytes) -> Any:
    """The value of a text.

    >>> loads(b'{"logprob": -0.25, "half": "\\\\ud83d"}')
    {'logprob': -0.25, 'half': '\\ud83d'}

    Raises:
        ValueError: if it is no JSON.
        RecursionError: if it is nested too deep.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return json.loads(raw)


def dumps(value: Any) -> bytes:
    """A value as one line. NaN, for which JSON has no word, is null.

    >>> dumps({"logprob": float("nan"), "half": "\\ud83d"})
    b'{"logprob":null,"half":"\\\\ud83d"}'

    Raises:
        TypeError, ValueError: for what JSON cannot say.
        RecursionError: if it is nested too deep.
    """
    try:
        return orjson.dumps(value, option=STRICT)
    except TypeError:
        told = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(told, separators=(",", ":")).encode()


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


# Too early, too busy: said of the moment, not of the request.
AGAIN = {408, 425, 429}
SESSIONS = 65_536
BACKOFF_S, LONGEST_BACKOFF_S = 0.25, 8.0


@dataclass
class _Server:
    """What is known of one server. `out` says why it is not asked for now, `evicted` why it never is again."""

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
    """How one request reaches a server: `Wire`, or `in_process.EngineWire` for an engine of this process."""

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

    A session stays with its server, whose cache holds its prefix; a new one goes to the server with the least in
    flight. A request without an answer (a connection that ends, silence, 5xx, 408, 425, 429) is sent again, after a
    wait that doubles; what the server judged (every other 4xx) is an error at once. A server that fails
    `failures` times in a row is not asked until /health answers and `admission`, where set, agrees.

    Args:
        urls: base URLs, with or without /v1.
        model: the name that every request gets; `servers.model` may be changed while it runs.
        key: sent as a bearer token.
        timeout_s: how long one call may take, retries and waits for a server included.
        connect_s, read_s: how long a connection may take, and a server be silent; `read_s` is `timeout_s` unless given.
        retries: how often a call is sent again.
        failures: after how many in a row a server is left out.
        probe_s: how often a server that is out is asked for its health.
        answer_bytes: the largest answer that is taken.
        connections: how many are open at once; further calls wait.
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
        failures: int = 3,
        probe_s: float = 2.0,
        answer_bytes: int = 64 << 20,
        connections: int = 512,
    ):
        if isinstance(urls, str) or not urls:
            raise ArgumentError(f"urls is {urls!r}. A run needs a list of at least one server. Give its URL in a list.")
        names = [checked_url(url) for url in urls]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ArgumentError(f"{twice} is named twice. Each server counts its own load. Name it once.")
        limits = {"timeout_s": timeout_s, "connect_s": connect_s, "read_s": read_s or timeout_s, "probe_s": probe_s}
        limits |= {"failures": failures, "answer_bytes": answer_bytes, "connections": connections}
        for name, value in limits.items():
            if not 0 < value < float("inf"):
                raise ArgumentError(f"{name} is {value}. Without a bound a server that hangs holds the run. Give one.")
        self.model = model
        self.key = key
        self.timeout_s = timeout_s
        self.retried = 0
        self.admission: Callable[[str], Awaitable[bool]] | None = None
        self._servers = {name: _Server(name) for name in names}
        self._in_use: Counter[str] = Counter()
        self._sessions: OrderedDict[str, _Server] = OrderedDict()
        self._connect_s, self._probe_s = connect_s, probe_s
        self._retries, self._failures = retries, failures
        self._refused: set[str] = set()
        self._wire_options: dict[str, Any] = {
            "key": key,
            "connect_s": connect_s,
            "read_s": read_s or timeout_s,
            "answer_bytes": answer_bytes,
            "connections": connections,
        }
        self._wire: Transport | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "Servers":
        self._wire = Wire(**self._wire_options)
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers.values():
            if server.probe is not None:
                server.probe.cancel()
            for asked in server.asked:
                asked.cancel()
        if self._wire is not None:
            wire, self._wire = self._wire, None
            await wire.close()

    @property
    def urls(self) -> list[str]:
        """The base URLs of the servers that are not evicted."""
        return [server.url for server in self._servers.values() if server.evicted is None]

    @property
    def ready(self) -> list[str]:
        """The base URLs of the servers that may be asked now."""
        return [server.url for server in self._servers.values() if server.usable]

    def state(self) -> list[dict[str, Any]]:
        """One row for each server: url, in flight, answered, failures in a row, and why it is out or evicted."""
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
        """The names of models that somebody still asks for, as after a push of another."""
        return set(+self._in_use)

    @contextlib.contextmanager
    def holding(self) -> Iterator[str]:
        """The model's name as it is now, which is `in_use` until this is left."""
        name = self.model
        self._in_use[name] += 1
        try:
            yield name
        finally:
            self._in_use[name] -= 1

    async def chat(self, body: Mapping[str, Any], *, session: str, salt: str | None = None) -> dict[str, Any]:
        """The answer to a chat completion, asked of the session's server.

        Args:
            body: as the API has it; goes through unchanged but for `model` and `cache_salt`.
            session: what stays together on one server.
            salt: sent as `cache_salt`: keys and values are shared only between requests of one salt.

        Raises: ServerError where a server refuses, or none answers in time.
        """
        return await self.post("/v1/chat/completions", body, session=session, salt=salt)

    async def post(
        self, path: str, body: Mapping[str, Any], *, session: str, salt: str | None = None
    ) -> dict[str, Any]:
        """As `chat`, for any path that takes a JSON object and answers with one."""
        with self.holding() as model:
            sent = {**body, "model": model}
            if salt is not None:
                sent["cache_salt"] = salt
            neutral = [name for name, value in NEUTRAL.items() if name in body and body[name] == value]
            if known := [name for name in neutral if name in self._refused]:
                raise RefusedFields(f"the servers refuse {', '.join(known)}", known)
            try:
                return await self._answered(path, encoded(sent, path), session)
            except ServerError as error:
                if not (named := refused_fields(str(error), neutral) if isinstance(error, _Refused) else ()):
                    raise
                self._refused.update(named)
                raise RefusedFields(str(error), named) from error

    async def _answered(self, path: str, data: bytes, session: str) -> dict[str, Any]:
        """The first answer of the session's server that is one, by as many tries as a call has."""
        deadline = time.monotonic() + self.timeout_s
        fresh, tries = False, 0
        while True:
            server = await self._server(session, deadline)
            answer = await self._ask(server, path, data, deadline - time.monotonic(), fresh)
            if answer is None:  # evicted while asked: another server answers
                continue
            if answer.dropped and not fresh:
                # Servers close idle connections just when they are used: no failure yet.
                fresh = True
                continue
            fresh = False
            if answer.ok and isinstance(answer.body, dict):
                server.failures = 0
                server.answered += 1
                return answer.body
            if answer.status in AGAIN:
                wait_s = answer.retry_after_s
            elif not answer.status or answer.status >= 500:
                self._count_failure(server, answer.words)
                wait_s = None
            else:
                raise _refusal(server.url, path, answer)
            tries += 1
            if tries > self._retries or time.monotonic() >= deadline:
                raise ServerError(
                    f"{server.url}{path} gave no answer in {tries} tries, the last time: {answer.words}. The session "
                    f"{session!r} cannot go on. Look at that server's log, or raise retries and timeout_s."
                )
            self.retried += 1
            backoff_s = min(BACKOFF_S * 2 ** (tries - 1), LONGEST_BACKOFF_S) * random.uniform(0.5, 1.5)
            wait_s = backoff_s if wait_s is None else wait_s
            await asyncio.sleep(max(0.0, min(wait_s, deadline - time.monotonic())))

    async def where(self, session: str) -> str:
        """The base URL of the session's server, for who asks it by another road; waits until one can be asked."""
        return (await self._server(session, time.monotonic() + self.timeout_s)).url

    async def ask(
        self,
        url: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        method: str = "POST",
        token: bool = True,
    ) -> Answer:
        """One control request to one server, once, on a connection of its own; never raises for what comes back.

        `token=False` leaves the key out, to see whether the server asks for it.
        """
        data = None if body is None else encoded(body, path)
        return await self._open.request(method, url, path, data, timeout_s=timeout_s, fresh=True, token=token)

    async def each(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0, method: str = "POST"
    ) -> list[Answer]:
        """One control request to every server that is not evicted, at once; the answers in the order of `urls`."""
        asked = [self.ask(url, path, body, timeout_s=timeout_s, method=method) for url in self.urls]
        return list(await asyncio.gather(*asked))

    def leave_out(self, url: str, why: str) -> None:
        """Ask this server no more until its /health answers and `admission` agrees."""
        server = self._servers[url]
        if server.usable:
            server.out = why
            server.probe = asyncio.ensure_future(self._probe(server))

    async def usable(self, timeout_s: float) -> bool:
        """Whether a server can be asked, now or within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not any(server.usable for server in self._servers.values()):
            if not self.urls or not await self._change(deadline):
                return False
        return True

    def evict(self, url: str, why: str) -> None:
        """Never ask this server again; what it was asked is asked of others."""
        server = self._servers[url]
        server.evicted = why
        if server.probe is not None:
            server.probe.cancel()
        for asked in list(server.asked):
            asked.cancel()
        self._changed.set()

    @property
    def _open(self) -> Transport:
        if self._wire is None:
            raise ArgumentError("These servers are not open. Use them inside `async with Servers(...) as servers:`.")
        return self._wire

    async def _ask(self, server: _Server, path: str, data: bytes, timeout_s: float, fresh: bool) -> Answer | None:
        """The server's answer, or None where it was evicted meanwhile."""
        request = self._open.request("POST", server.url, path, data, timeout_s=max(timeout_s, 1e-3), fresh=fresh)
        asked = asyncio.ensure_future(request)
        server.asked.add(asked)
        try:
            await asyncio.wait({asked})
        finally:
            server.asked.discard(asked)
            asked.cancel()  # does nothing to what is done
        if asked.cancelled():
            if server.evicted is None:
                raise ServerError(f"{server.url}{path} was being asked while its servers were closed. Close them last.")
            return None
        return asked.result()

    async def _server(self, session: str, deadline: float) -> _Server:
        """The session's server, or the least loaded one where it has none that can be asked; waits until one can be."""
        while True:
            server = self._sessions.get(session)
            if server is not None and server.usable:
                self._sessions.move_to_end(session)
                return server
            usable = [server for server in self._servers.values() if server.usable]
            if usable:
                server = min(usable, key=lambda one: (len(one.asked), one.placed))
                server.placed += 1
                self._sessions[session] = server
                if len(self._sessions) > SESSIONS:
                    self._sessions.popitem(last=False)
                return server
            why = "; ".join(f"{one.url}: {one.evicted or one.out}" for one in self._servers.values())
            if not self.urls:
                raise ServerError(f"No server is left: {why}. Start them again, and the run from its folder.")
            if not await self._change(deadline):
                raise ServerError(
                    f"No server was up for session {session!r} within {self.timeout_s:g} s: {why}. Start them again; "
                    "they are asked for their health all the time."
                )

    async def _change(self, deadline: float) -> bool:
        """Wait until a server comes back or is evicted; whether that was before the deadline."""
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - time.monotonic()))
        return False

    def _count_failure(self, server: _Server, why: str) -> None:
        server.failures += 1
        if server.failures >= self._failures:
            self.leave_out(server.url, f"failed {server.failures} times in a row, the last time: {why}")

    async def _probe(self, server: _Server) -> None:
        """Ask a server that is out for its health until it may be asked again."""
        while True:
            await asyncio.sleep(self._probe_s)
            healthy = await self.ask(server.url, "/health", timeout_s=self._connect_s, method="GET")
            if not 0 < healthy.status < 500:
                continue
            if self.admission is not None and not await self.admission(server.url):
                continue
            server.out = None
            server.failures = self._failures - 1  # the next failure shuts it out again
            self._changed.set()
            return


class _Refused(ServerError):
    """A request that a server finds fault with."""


def _refusal(url: str, path: str, answer: Answer) -> ServerError:
    cures = {
        401: "Pass the `key` that this server was started with.",
        403: "Pass the `key` that this server was started with.",
        404: "Look whether the model's name and the URL are right.",
        413: "Shorten the conversation, or raise the server's limit.",
    }
    cure = cures.get(answer.status, "Change the request; it is never sent again as it is.")
    if answer.error is not None:
        cure = ""
    kind = _Refused if answer.status in (400, 422) else ServerError
    return kind(f"{url}{path} answered {answer.status}, not what was asked for: {answer.words}. {cure}".rstrip())


async def measured_kind(servers: Servers) -> str | None:
    """Return what the logprobs of the servers are of, "raw" or "processed"; None if none of them shows it.

    Each is asked for one token where only one is allowed: processed logprobs then say 0, for either of two tokens.

    Raises:
        ArgumentError: if the servers differ.
    """
    found = dict[str, str]()
    told = {
        "model": servers.model,
        "prompt": [1],
        "max_tokens": 1,
        "temperature": 1.0,
        "logprobs": 0,
        "ignore_eos": True,
    }
    asked = [await servers.each("/v1/completions", {**told, "allowed_token_ids": [one]}) for one in (1, 2)]
    for url, *answers in zip(servers.urls, *asked, strict=False):
        try:
            sums = sum(float(each.body["choices"][0]["logprobs"]["token_logprobs"][0]) for each in answers)
        except (KeyError, IndexError, TypeError, ValueError):
            continue
        found[url] = "processed" if sums > -1e-3 else "raw"
    if len(set(found.values())) > 1:
        kinds = ", ".join(f"{kind} at {url}" for url, kind in found.items())
        raise ArgumentError(
            f"the servers' logprobs are {kinds}. One ratio would be of two kinds. Start all with the same "
            "--logprobs-mode."
        )
    return next(iter(found.values()), None)
