"""Record any OpenAI client: a proxy that adds ids and logprobs to requests and hides them from answers.

One session per trajectory; requests and responses are recorded whole, and the client gets what it would have got
without the proxy.
"""

import asyncio
import contextlib
import hmac
import inspect
import json
import re
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tracegrad.data.sampling import refused_fields
from tracegrad.errors import ArgumentError, TracegradError, shown
from tracegrad.rollout import responses
from tracegrad.rollout.client import orjson
from tracegrad.rollout.policy import LimitReached, Limits, Policy
from tracegrad.rollout.proxy_journal import Entry, Journal
from tracegrad.rollout.responses import parsed
from tracegrad.rollout.run_agent import checked
from tracegrad.rollout.session import CHAT, COMPLETIONS, Call, Session, UnfitRequest

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


_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":", b"data", b"event", b"id", b"retry")
"""How lines of an event begin; a name alone has an empty value."""
Wrong = Callable[[Mapping[str, Any]], str | None]


class MalformedAnswer(ValueError):
    """An answer of a server that is not what its API says; the text says what is wrong with it."""


@dataclass(frozen=True)
class Road:
    """One kind of request.

    Args:
        path: at the server.
        asked: what is asked whatever the client says; empty where the request goes as it came.
        wrong_in, wrong_in_chunk: say what is wrong with a whole answer, and with a chunk of a stream.
    """

    path: str
    asked: Mapping[str, Any]
    wrong_in: Wrong
    wrong_in_chunk: Wrong

    def error(self, message: str) -> bytes:
        """Return the event that ends a stream by an error, in the form that clients of this API read."""
        error: dict[str, Any] = {"message": shown(message)[:1000], "type": "upstream_error", "param": None, "code": 502}
        if self.path == "/v1/messages":
            return b"event: error\ndata: " + dumped({"type": "error", "error": error}) + b"\n\n"
        if self.path == "/v1/responses":
            return b"event: error\ndata: " + dumped({**error, "type": "error", "error": error}) + b"\n\n"
        return b"data: " + dumped({"error": error}) + b"\n\n"


ROADS = {
    road.path: road
    for road in (
        Road("/v1/chat/completions", CHAT, responses.wrong_in_chat, responses.wrong_in_chat_chunk),
        Road("/v1/completions", COMPLETIONS, responses.wrong_in_completion, responses.wrong_in_completion_chunk),
        Road("/v1/responses", {}, responses.wrong_in_response, responses.wrong_in_response),
        Road("/v1/messages", {}, responses.wrong_in_message, responses.wrong_in_message),
    )
}


class Added:
    """What a client did not ask for, by its request.

    >>> Added({"messages": []}, CHAT).taken_out({"choices": [{"token_ids": [1], "logprobs": {}}], "prompt_token_ids": [2]})
    {'choices': [{'token_ids': None, 'logprobs': None}], 'prompt_token_ids': None}
    """  # noqa: E501

    def __init__(self, body: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
        chat = "top_logprobs" in asked
        told = body.get("logprobs")
        self.logprobs = "logprobs" in asked and not (told if chat else told is not None)
        self.ids = "return_token_ids" in asked and not body.get("return_token_ids")
        self._chat = chat

    def __bool__(self) -> bool:
        return self.logprobs or self.ids

    def taken_out(self, response: dict[str, Any]) -> dict[str, Any]:
        """A response, or a chunk of one, as the client would have got it; what is given is not changed."""
        out = dict(response)
        if self.ids and "prompt_token_ids" in out:
            out["prompt_token_ids"] = None
        if isinstance(choices := out.get("choices"), list):
            out["choices"] = [self._choice(one) if isinstance(one, dict) else one for one in choices]
        return out

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        out = dict(choice)
        for key in ("token_ids", "prompt_token_ids") if self.ids else ():
            if key in out:
                out[key] = None
        if self.logprobs and "logprobs" in out:
            out["logprobs"] = None
        return out

    def alone(self, chunk: dict[str, Any]) -> bool:
        """Whether a chunk carries nothing but what was added: the server would not have sent it."""
        choices = chunk.get("choices")
        if not (self._chat and self.ids and self.logprobs and choices):
            return False
        return all(choice.get("delta") == {} and choice.get("finish_reason") is None for choice in choices)


class Events:
    """A stream of server-sent events while it passes: what the client gets, what is recorded, how many tokens.

    `text` is what came, whole events only; `tokens` how many ids its chunks list. An event that is not what the API
    says is not in `text`: whoever reads on gets `MalformedAnswer`.

    Args:
        added: what the client did not ask for.
        wrong_in_chunk: says what is wrong with a chunk.
        most: bytes of the stream.
    """

    def __init__(self, added: Added, wrong_in_chunk: Wrong, most: int) -> None:
        self.tokens = 0
        self.chunks = 0
        self._size = 0
        self._added = added
        self._wrong_in_chunk = wrong_in_chunk
        self._most = most
        self._kept: list[bytes] = []
        self._rest = bytearray()

    @property
    def text(self) -> str:
        """The events that came."""
        return b"".join(self._kept).decode(errors="replace")

    def passed(self, data: bytes) -> Iterator[bytes]:
        """Return what the client gets for a piece of the stream, event by event.

        Raises:
            MalformedAnswer: for an event that is no chunk of this API, and for a stream of too many bytes.
        """
        self._size += len(data)
        for event in self._split(data):
            yield self._passed(event)
        if self._size > self._most:
            raise MalformedAnswer(f"the server's answer has more than {self._most} bytes")

    def ended(self) -> bytes:
        """Return what the client gets for an end without a blank line.

        Raises:
            MalformedAnswer: as for `passed`.
        """
        rest = bytes(self._rest)
        self._rest.clear()
        return self._passed(rest) if rest.strip() else rest

    def _split(self, data: bytes) -> Iterator[bytes]:
        """Events that are whole."""
        rest = self._rest
        # What was searched before holds no end of an event, but may hold the beginning of one.
        searched = max(len(rest) - 3, 0)
        rest += data
        start = 0
        while True:
            lines = rest.find(b"\n\n", searched)
            carriage = rest.find(b"\r\n\r\n", searched, lines if lines >= 0 else len(rest))
            if lines < 0 and carriage < 0:
                break
            end = carriage + 4 if carriage >= 0 else lines + 2
            yield bytes(rest[start:end])
            start = searched = end
        del rest[:start]

    def _passed(self, event: bytes) -> bytes:
        lines = event.splitlines() if event.find(b"\n", 0, -2) >= 0 else [event.strip()]
        if self.chunks == 0 and lines[0].startswith(b"\xef\xbb\xbf"):
            lines[0] = lines[0][3:]
        said, others = [], []
        for line in lines:
            if line.startswith(b"data:"):
                said.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line or line in _FIELDS or line.startswith(_FIELDS[:5]):
                others.append(line)
            else:
                raise MalformedAnswer(f"the server sent a line that is no event: {_quoted(line)}")
        payload = b"\n".join(said).strip()
        if not payload or payload == b"[DONE]":
            self._kept.append(event)
            return event
        chunk = self._chunk(payload)
        self._kept.append(event)
        self.chunks += 1
        if chunk.get("error") is not None:
            return event
        for choice in chunk.get("choices") or ():
            self.tokens += len(choice.get("token_ids") or ())
        if not self._added:
            return event
        if self._added.alone(chunk):
            return b""
        head = b"".join(line + b"\n" for line in others if line)
        return head + b"data: " + dumped(self._added.taken_out(chunk)) + b"\n\n"

    def _chunk(self, payload: bytes) -> dict[str, Any]:
        chunk = _object(payload, "the server sent a chunk that is")
        # An error of the server passes as it is.
        if chunk.get("error") is None and (why := self._wrong_in_chunk(chunk)) is not None:
            raise MalformedAnswer(f"the server sent a chunk of another shape: {why}")
        return chunk


def dumped(value: Any) -> bytes:
    """JSON as vLLM writes it: no blanks, no escapes but for what UTF-8 cannot say."""
    try:
        return orjson.dumps(value)
    except TypeError:  # integers of more than 64 bits, and half a character
        pass
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def response_of(data: bytes, wrong_in: Wrong) -> dict[str, Any] | None:
    """Return a server's answer; None if it says that it failed.

    Raises:
        MalformedAnswer: if it is not what the API says.
    """
    told = _object(data, "the server's answer is")
    if told.get("error") is not None:
        return None
    if (why := wrong_in(told)) is not None:
        raise MalformedAnswer(f"the server's answer has another shape: {why}")
    return told


def _object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object of these bytes; `what` begins the error if they are none."""
    try:
        value = responses.parsed(data)
    except ValueError as error:
        raise MalformedAnswer(f"{what} not JSON: {error}: {_quoted(data)}") from None
    if not isinstance(value, dict):
        raise MalformedAnswer(f"{what} not a JSON object: {_quoted(data)}")
    return value


def _quoted(data: bytes) -> str:
    return repr(data[:100].decode(errors="replace"))


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
ENDED_NAMES = 65536
LAST_CALLS_S = 30.0


@dataclass
class Seat:
    """One session while it is open."""

    policy: Policy
    group: str | None = None
    own: bool = True
    entry: Entry | None = None
    flying: int = 0
    rewards: Any = None
    used: float = field(default_factory=time.monotonic)
    landed: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """Serves and records, as an asynchronous context manager.

    Args:
        upstream: base URL of the server, or an open `Servers`, where there are several.
        key: what clients show, as a bearer token or x-api-key; one is drawn where it is None.
        upstream_key: what the server asks for.
        model: name that every request gets, or a function that gives it; the client's own where it is None.
        finished: called with the record of each session that a client opened, when it gets its reward, is not used
            any more, or the proxy ends. Where it raises, the session stays open and the client is told.
        journal: keeps the sessions that clients opened, with their calls, until they are finished; those that a proxy
            before this one left open are open again.
        version, sampling, salt, limits, logprob_kind: of sessions that clients open; as for `play`.
        host, port: where it listens; a free port by default.
        request_bytes, response_bytes: larger bodies are refused.
        timeout_s: of one request to the server.
        sessions: at most so many open at once.
        idle_s: a session that a client opened and does not use is finished without a reward.
    """

    def __init__(
        self,
        upstream: str | Pool,
        *,
        key: str | None = None,
        upstream_key: str | None = None,
        model: str | Callable[[], str] | None = None,
        finished: Callable[[dict[str, Any]], Any] | None = None,
        journal: Journal | None = None,
        version: Callable[[], int] | None = None,
        sampling: Mapping[str, Any] | None = None,
        salt: Callable[[], str | None] | None = None,
        limits: Limits | None = None,
        logprob_kind: str = "raw",
        host: str = "127.0.0.1",
        port: int = 0,
        request_bytes: int = 16 << 20,
        response_bytes: int = 64 << 20,
        timeout_s: float = 600.0,
        sessions: int = 4096,
        idle_s: float = 3600.0,
    ) -> None:
        if key is not None and len(key) < 8:
            raise ArgumentError("the proxy's key has fewer than 8 characters. It could be guessed. Leave it out.")
        self.key = key or secrets.token_urlsafe(24)
        self._upstream, self._model = Upstream(upstream, upstream_key, timeout_s), model
        self._finished, self._journal = finished, journal
        self._new = {"version": version, "sampling": sampling, "logprob_kind": logprob_kind}
        self._refused: set[str] = set()
        self._salt, self._limits = salt, limits or Limits(turns=1 << 20, seconds=idle_s)
        self._address = (host, port)
        self._request_bytes, self._response_bytes = request_bytes, response_bytes
        self._most, self._idle_s = sessions, idle_s
        self._seats: dict[str, Seat] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._count = 0

    async def __aenter__(self) -> "Proxy":
        for entry, calls, lost in () if self._journal is None else self._journal.found():
            seat = self._seats[entry.name] = self._opened(entry.name, entry.group)
            seat.entry, seat.policy.turns = entry, len(calls) + len(lost)
            seat.policy.session.take_up(calls, lost)
        await self._upstream.__aenter__()
        listening = socket.create_server(self._address, backlog=1024)
        self._address = listening.getsockname()[:2]
        options = {"interface": "asgi3", "lifespan": "off", "proxy_headers": False, "server_header": False}
        options |= {"http": Connection, "ws": "none", "h11_max_incomplete_event_size": HEAD_BYTES}
        options |= {"log_level": "error", "access_log": False, "timeout_graceful_shutdown": 1}
        self._server = uvicorn.Server(uvicorn.Config(self._app, **options))
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listening]))
        self._sweeping = asyncio.ensure_future(self._sweep())
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sweeping.cancel()
        self._server.should_exit = True
        await self._serving
        await self._upstream.__aexit__()
        for name, seat in list(self._seats.items()):
            if not seat.own:
                await self._finish(name, seat, None, "stopped")

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._address
        return f"http://{host if ':' not in host else f'[{host}]'}:{port}"

    def open(self, policy: Policy) -> tuple[str, str]:
        """Opens a session for a trajectory that is played here: its base URL and key. `close` ends it."""
        self._count += 1
        name = f"{self._count}.{secrets.token_hex(4)}"
        self._seats[name] = Seat(policy)
        return f"{self.url}/s/{name}/v1", self.key

    async def close(self, base_url: str) -> Any:
        """Ends a session that `open` opened, and gives the reward that was posted to it, if one was."""
        seat = self._seats.pop(base_url.split("/")[-2])
        await self._landed(seat)
        return seat.rewards

    async def _landed(self, seat: Seat) -> None:
        """Waits for calls that are under way."""
        while seat.flying:
            seat.landed.clear()
            try:
                await asyncio.wait_for(seat.landed.wait(), LAST_CALLS_S)
            except asyncio.TimeoutError:
                return

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        begun = False

        async def sending(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            try:
                await self._answer(scope, receive, sending)
            except Exception as error:
                if begun or isinstance(error, Refusal):
                    raise
                raise Refusal(500, f"the proxy failed: {type(error).__name__}: {error}", "server_error") from error
        except Refusal as refused:
            body = {"error": {"message": shown(refused), "type": refused.kind, "param": None, "code": refused.status}}
            await answer(send, refused.status, dumped(body), close=True)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        self._check_key(headers)
        name, path = _named(scope["path"], headers)
        method = scope["method"]
        if path == "/v1/models" and method == "GET":
            return await self._models(send)
        if method != "POST":
            raise Refusal(405 if path in ROADS else 404, f"{method} {path} is not served here")
        if path == "/reward":
            body = await body_of(receive, self._request_bytes, headers)
            return await self._reward(name, object_of(body), send)
        road = ROADS.get(path)
        if road is None:
            raise Refusal(
                404, f"{path} is not served here; there are {', '.join(ROADS)}, /v1/models and /s/NAME/reward"
            )
        body = object_of(await body_of(receive, self._request_bytes, headers))
        seat = self._seat(name, headers)
        call = self._asked(seat, road, body)
        if name not in self._seats:
            self._begin(str(name), seat)
        seat.flying += 1
        try:
            await self._call(seat, road, call, Added(body, road.asked), receive, send)
        finally:
            seat.flying -= 1
            seat.used = time.monotonic()
            seat.landed.set()

    def _check_key(self, headers: Mapping[bytes, str]) -> None:
        scheme, _, bearer = headers.get(b"authorization", "").partition(" ")
        shown_key = bearer.strip() if scheme.lower() == "bearer" else headers.get(b"x-api-key", "")
        if not hmac.compare_digest(shown_key.encode(), self.key.encode()):
            raise Refusal(401, "no key, or a wrong one; send Authorization: Bearer KEY", "authentication_error")

    def _seat(self, name: str | None, headers: Mapping[bytes, str]) -> Seat:
        """The session of a request; a new one if a client names it, which is kept once its request is taken."""
        if name is None:
            raise Refusal(400, "no session: use /s/NAME/v1/... as the base URL, or send x-tracegrad-session: NAME")
        if (seat := self._seats.get(name)) is not None:
            return seat
        if name in self._ended:
            raise Refusal(409, f"session {name} is finished; use another name")
        if self._finished is None:
            raise Refusal(404, f"no session {name} is open here")
        if not NAME.fullmatch(name):
            raise Refusal(400, "a session's name has 1 to 128 letters, digits, '.', '_', ':' and '-'")
        if len(self._seats) >= self._most:
            raise Refusal(503, f"{self._most} sessions are open; finish some with a reward", "overloaded_error")
        return self._opened(name, headers.get(b"x-tracegrad-group"))

    def _begin(self, name: str, seat: Seat) -> None:
        """Keeps a session that a client opened."""
        if self._journal is not None:
            try:
                seat.entry = self._journal.begin(name, seat.group)
            except OSError as error:
                raise Refusal(507, f"session {name} could not be kept: {error.strerror}") from None
        self._seats[name] = seat

    def _opened(self, name: str, group: str | None) -> Seat:
        """A session that a client opens."""
        policy = Policy(Session(name, **self._new), _unused, limits=self._limits, salt=self._salt)
        return Seat(policy, group=group, own=False)

    def _keep(self, seat: Seat) -> None:
        """Writes what the journal has not of a session, before its client hears of it."""
        if self._journal is not None and seat.entry is not None:
            try:
                self._journal.keep(seat.entry, seat.policy.session)
            except OSError as error:
                raise Refusal(507, f"the call could not be kept, send it again: {error.strerror}") from None

    async def _reward(self, name: str | None, body: dict[str, Any], send: Any) -> None:
        """Finishes a session."""
        seat = self._seats.get(name or "")
        if seat is None:
            status = 409 if name in self._ended else 404
            raise Refusal(status, f"session {name} is finished" if status == 409 else f"session {name} had no calls")
        try:
            told = checked(body["rewards"]) if "rewards" in body else checked(body["reward"])
        except KeyError:
            raise Refusal(400, 'send {"reward": 1.0} or {"rewards": {"name": 1.0}}') from None
        except ArgumentError as error:
            raise Refusal(400, str(error)) from None
        await self._landed(seat)
        seat.rewards = told
        calls = len(seat.policy.session.calls)
        if not seat.own and name in self._seats:
            if isinstance(group := body.get("group"), str | int):
                seat.group = str(group)
            try:
                calls = await self._finish(name, seat, body.get("metadata"), "done")
            except Exception as error:
                raise Refusal(507, f"session {name} could not be kept, send its reward again: {error}") from error
        await answer(send, 200, dumped({"calls": calls}))

    async def _finish(self, name: str, seat: Seat, metadata: Any, ended: str) -> int:
        """Hands on the record of a session, which is open again where that fails; gives the number of its calls."""
        del self._seats[name]
        self._ended[name] = None
        about = {**(metadata if isinstance(metadata, dict) else {}), "ended": ended}
        if seat.entry is not None:
            about["session"] = seat.entry.token
        try:
            record = seat.policy.session.record(name, seat.group, seat.rewards, about)
            done = self._finished(record) if self._finished is not None else None
            if inspect.isawaitable(done):
                await done
        except BaseException:
            del self._ended[name]
            self._seats[name] = seat
            raise
        if self._journal is not None and seat.entry is not None:
            with contextlib.suppress(OSError):  # the next proxy finds its record
                self._journal.end(seat.entry)
        if len(self._ended) > ENDED_NAMES:
            self._ended.popitem(last=False)
        return len(record.get("calls", ()))

    async def _sweep(self) -> None:
        """Finishes sessions that nobody uses."""
        while True:
            await asyncio.sleep(min(self._idle_s / 4, 60.0))
            before = time.monotonic() - self._idle_s
            for name, seat in list(self._seats.items()):
                if not seat.own and not seat.flying and seat.used < before:
                    with contextlib.suppress(Exception):  # it stays open, and is tried again
                        await self._finish(name, seat, None, "idle")

    async def _models(self, send: Any) -> None:
        response = await self._upstream.ask("GET", "", "/v1/models", None)
        with contextlib.closing(response):
            data = await whole(response, self._response_bytes)
        await answer(send, response.status, data, response.content_type)

    def _asked(self, seat: Seat, road: Road, body: dict[str, Any]) -> Call:
        """The call that a request makes, within the session's limits; nothing is kept of one that is refused."""
        policy = seat.policy
        try:
            left = policy.left()
            call = policy.session.open(body, road.asked)
            call.drop(self._refused)
        except LimitReached as limit:
            raise Refusal(400, str(limit), "limit_reached") from None
        except UnfitRequest as unfit:
            raise Refusal(400, str(unfit)) from None
        if left is not None:
            policy.bound(call.request, left)
        if self._model is not None:
            call.request["model"] = self._model if isinstance(self._model, str) else self._model()
        return call

    async def _call(self, seat: Seat, road: Road, call: Call, added: Added, receive: Any, send: Any) -> None:
        """One request of a client, recorded."""
        policy = seat.policy
        self._keep(seat)
        policy.turns += 1
        sent = dict(call.request)
        if road.asked and (salt := policy.salt()) is not None:
            sent["cache_salt"] = salt
        closed = asyncio.ensure_future(disconnected(receive))
        passing = asyncio.ensure_future(self._pass(seat, call, road, added, sent, send))
        try:
            await asyncio.wait({closed, passing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
            if not passing.done():
                passing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await passing

    async def _pass(self, seat: Seat, call: Call, road: Road, added: Added, sent: dict[str, Any], send: Any) -> None:
        """The server's answer to the client; recorded whole, or as far as it came."""
        events: Events | None = None
        why = "the client closed before the answer"
        try:
            response, data = await self._sent(seat, call, road, sent)
            with contextlib.closing(response):
                if response.status == 200 and response.content_type == "text/event-stream":
                    events = Events(added, road.wrong_in_chunk, self._response_bytes)
                    why = "the server's stream has no chunk"
                    return await self._stream(seat, call, response, events, send)
                data = await whole(response, self._response_bytes) if data is None else data
            told = response_of(data, road.wrong_in) if response.status == 200 else None
            if told is None:
                why = f"the server answered {response.status}: {data[:500].decode(errors='replace')}"
            else:
                call.close(told)
                self._keep(seat)
                data = dumped(added.taken_out(told)) if added else data
            if not 200 <= response.status < 600:
                raise Refusal(502, why, "upstream_error")
            await answer(send, response.status, data, response.content_type)
        except Refusal as refused:
            why = str(refused)
            if events is None:
                raise
            await self._break_off(road, why, send)
        except MalformedAnswer as error:
            why = str(error)
            if events is None:
                raise Refusal(502, why, "upstream_error") from None
            await self._break_off(road, why, send)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            why = f"the server's answer broke off: {type(error).__name__}: {error}"
            if events is None:
                raise Refusal(502, why, "upstream_error") from None
            await self._break_off(road, why, send)
        except Exception as error:
            why = f"the proxy failed: {type(error).__name__}: {error}"
            if events is None:
                raise Refusal(500, why, "server_error") from error
            await self._break_off(road, why, send)
        finally:
            if events is not None and events.chunks and not call.closed:
                call.close(events.text, tokens=events.tokens)
            elif not call.closed:
                call.lose(why)
            with contextlib.suppress(Refusal):  # the next call tries again
                self._keep(seat)

    async def _sent(
        self, seat: Seat, call: Call, road: Road, sent: dict[str, Any]
    ) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """The server's response, with its body if that was read: a request that it refuses for fields which the session
        filled in is sent again without them.
        """
        while True:
            response = await self._upstream.ask("POST", seat.policy.sticky, road.path, dumped(sent))
            if response.status not in (400, 422) or not call.filled:
                return response, None
            with contextlib.closing(response):
                data = await whole(response, self._response_bytes)
            named = refused_fields(data.decode(errors="replace"), call.filled)
            if not call.drop(named):
                return response, data
            self._refused.update(named)
            sent = {key: value for key, value in sent.items() if key not in named}

    async def _stream(
        self, seat: Seat, call: Call, response: aiohttp.ClientResponse, events: Events, send: Any
    ) -> None:
        """A stream of events to the client; what it was is recorded before its end is sent."""
        await start(send, 200, response.headers["Content-Type"])
        async for data in response.content.iter_any():
            passed: list[bytes] = []
            try:
                passed.extend(events.passed(data))
            finally:  # the events before one that is malformed
                if any(passed):
                    await send({"type": "http.response.body", "body": b"".join(passed), "more_body": True})
        rest = events.ended()
        if events.chunks:
            call.close(events.text, tokens=events.tokens)
            self._keep(seat)
        await send({"type": "http.response.body", "body": rest, "more_body": False})

    async def _break_off(self, road: Road, why: str, send: Any) -> None:
        """Ends a stream that has begun by an error."""
        await send({"type": "http.response.body", "body": road.error(why), "more_body": False})


async def _unused(body: dict[str, Any], *, session: str, salt: str | None) -> dict[str, Any]:
    raise ArgumentError("sessions of clients are asked through the proxy")


def _named(path: str, headers: Mapping[bytes, str]) -> tuple[str | None, str]:
    """The session that a request names, and what it asks for."""
    if path.startswith("/s/"):
        name, slash, rest = path[3:].partition("/")
        return name, slash + rest
    return headers.get(b"x-tracegrad-session"), path
