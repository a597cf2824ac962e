"""Record any OpenAI client: a proxy that adds ids and logprobs to requests and removes them from answers.

There is one session per trajectory. Requests and responses are recorded completely. The client gets the same answers as
without the proxy.
"""

import asyncio
import contextlib
import inspect
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from tracegrad._http_server import Refusal, Server, body_of, has_key, send_response, start, wait_for_disconnect
from tracegrad.data.sampling import fields_in_error
from tracegrad.errors import ArgumentError, TracegradError, escape_terminal
from tracegrad.rollout import responses
from tracegrad.rollout.client import orjson
from tracegrad.rollout.policy import LimitReached, Limits, Policy
from tracegrad.rollout.proxy_journal import Entry, Journal
from tracegrad.rollout.responses import parse_json
from tracegrad.rollout.run_agent import check_rewards
from tracegrad.rollout.session import CHAT, COMPLETIONS, Call, Session, UnfitRequest


class Pool(Protocol):
    """Several servers, for example `rollout.client.Servers`."""

    async def url_of(self, session: str) -> str: ...
    def suspend(self, url: str, why: str) -> None: ...


class Upstream:
    """The server or servers behind a proxy; an asynchronous context manager.

    Args:
        url: base URL, or a pool of servers. An unreachable server of a pool is not used until it is healthy; its
            sessions use another server, or wait.
        key: token that the server requires.
        timeout_s: time limit of one request.
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
        """Send a request and return the response once its head has arrived; the caller closes it.

        Raises:
            Refusal: 502, 503 or 504, if there is no response.
        """
        assert self._client is not None
        may_retry, deadline = True, time.monotonic() + self._timeout_s
        while True:
            base = await self._where(session)
            url = base.rstrip("/").removesuffix("/v1") + path
            try:
                return await self._client.request(method, url, data=body, headers=self._headers)
            except asyncio.TimeoutError:
                raise Refusal(504, f"the server was silent for {self._timeout_s:g} s", "upstream_error") from None
            except aiohttp.ClientError as error:
                # A server may close an idle connection while a request is sent.
                dropped = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
                if may_retry and dropped and not isinstance(error, aiohttp.ClientConnectorError):
                    may_retry = False
                    continue
                if not isinstance(self._url, str) and time.monotonic() < deadline:
                    self._url.suspend(base, f"it is not reachable: {error}")
                    continue
                raise Refusal(502, f"the server is not reachable: {error}", "upstream_error") from None

    async def _where(self, session: str) -> str:
        if isinstance(self._url, str):
            return self._url
        try:
            return await self._url.url_of(session)
        except TracegradError as error:
            raise Refusal(503, str(error), "upstream_error") from None


def object_of(body: bytes) -> dict[str, Any]:
    """Decode a body as a JSON object.

    Raises:
        Refusal: 400, if it is not one.
    """
    try:
        value = parse_json(body, allow_lone_surrogates=True)
    except ValueError as error:
        raise Refusal(400, f"the request is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the request is not a JSON object")
    return value


async def read_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Read the body of a server's response.

    Raises:
        Refusal: 502, if it has more than `most` bytes.
    """
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
"""Line prefixes of server-sent events; a name without a colon has an empty value."""
ShapeCheck = Callable[[Mapping[str, Any]], str | None]


class MalformedAnswer(ValueError):
    """A server's answer does not follow its API; the message says how."""


@dataclass(frozen=True)
class Endpoint:
    """One kind of request.

    Args:
        path: path at the server.
        required_fields: fields that are set in every request; empty if requests are passed on unchanged.
        wrong_in, wrong_in_chunk: return what is wrong with a complete answer, or with a chunk of a stream.
    """

    path: str
    required_fields: Mapping[str, Any]
    wrong_in: ShapeCheck
    wrong_in_chunk: ShapeCheck

    def error(self, message: str) -> bytes:
        """Return the event that ends a stream with an error, in the format that clients of this API read."""
        error: dict[str, Any] = {
            "message": escape_terminal(message)[:1000],
            "type": "upstream_error",
            "param": None,
            "code": 502,
        }
        if self.path == "/v1/messages":
            return b"event: error\ndata: " + encode_json({"type": "error", "error": error}) + b"\n\n"
        if self.path == "/v1/responses":
            return b"event: error\ndata: " + encode_json({**error, "type": "error", "error": error}) + b"\n\n"
        return b"data: " + encode_json({"error": error}) + b"\n\n"


ENDPOINTS = {
    road.path: road
    for road in (
        Endpoint("/v1/chat/completions", CHAT, responses.check_chat, responses.wrong_in_chat_chunk),
        Endpoint("/v1/completions", COMPLETIONS, responses.wrong_in_completion, responses.wrong_in_completion_chunk),
        Endpoint("/v1/responses", {}, responses.wrong_in_response, responses.wrong_in_response),
        Endpoint("/v1/messages", {}, responses.wrong_in_message, responses.wrong_in_message),
    )
}


class AddedFields:
    """Fields of an answer that the client did not request, derived from its request.

    >>> AddedFields({"messages": []}, CHAT).remove({"choices": [{"token_ids": [1], "logprobs": {}}], "prompt_token_ids": [2]})
    {'choices': [{'token_ids': None, 'logprobs': None}], 'prompt_token_ids': None}
    """  # noqa: E501

    def __init__(self, body: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
        chat = "top_logprobs" in asked
        logprobs = body.get("logprobs")
        self.logprobs = "logprobs" in asked and not (logprobs if chat else logprobs is not None)
        self.ids = "return_token_ids" in asked and not body.get("return_token_ids")
        self._chat = chat

    def __bool__(self) -> bool:
        return self.logprobs or self.ids

    def remove(self, response: dict[str, Any]) -> dict[str, Any]:
        """Return a response, or a chunk, as the client would get it without the proxy; the input is not changed."""
        out = dict(response)
        if self.ids and "prompt_token_ids" in out:
            out["prompt_token_ids"] = None
        if isinstance(choices := out.get("choices"), list):
            out["choices"] = [self._choice(choice) if isinstance(choice, dict) else choice for choice in choices]
        return out

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        out = dict(choice)
        for key in ("token_ids", "prompt_token_ids") if self.ids else ():
            if key in out:
                out[key] = None
        if self.logprobs and "logprobs" in out:
            out["logprobs"] = None
        return out

    def is_only_content(self, chunk: dict[str, Any]) -> bool:
        """Return whether a chunk has only added fields: without them the server would not have sent it."""
        choices = chunk.get("choices")
        if not (self._chat and self.ids and self.logprobs and choices):
            return False
        return all(choice.get("delta") == {} and choice.get("finish_reason") is None for choice in choices)


class EventStream:
    """Server-sent events for the client: the forwarded bytes, the recorded events, and the number of tokens.

    `text` is the recorded stream, complete events only; `tokens` is the number of ids in its chunks. A malformed event
    is not part of `text` and raises `MalformedAnswer`.

    Args:
        added: fields that the client did not request.
        wrong_in_chunk: returns what is wrong with a chunk.
        max_bytes: maximum size of the stream.
    """

    def __init__(self, added: AddedFields, wrong_in_chunk: ShapeCheck, max_bytes: int) -> None:
        self.tokens = 0
        self.chunks = 0
        self._size = 0
        self._added = added
        self._wrong_in_chunk = wrong_in_chunk
        self._max_bytes = max_bytes
        self._events: list[bytes] = []
        self._buffer = bytearray()

    @property
    def text(self) -> str:
        """The recorded events."""
        return b"".join(self._events).decode(errors="replace")

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what the client gets for a piece of the stream, event by event.

        Raises:
            MalformedAnswer: for an event that is not a chunk of this API, or a stream of more than `max_bytes` bytes.
        """
        self._size += len(data)
        for event in self._split(data):
            yield self._process_event(event)
        if self._size > self._max_bytes:
            raise MalformedAnswer(f"the server's answer has more than {self._max_bytes} bytes")

    def finish(self) -> bytes:
        """Return what the client gets for a last event without a blank line.

        Raises:
            MalformedAnswer: as for `feed`.
        """
        remainder = bytes(self._buffer)
        self._buffer.clear()
        return self._process_event(remainder) if remainder.strip() else remainder

    def _split(self, data: bytes) -> Iterator[bytes]:
        """Yield complete events."""
        buffer = self._buffer
        # The searched part contains no end of an event, but its last 3 bytes may be the start of one.
        searched = max(len(buffer) - 3, 0)
        buffer += data
        start = 0
        while True:
            newline_end = buffer.find(b"\n\n", searched)
            crlf_end = buffer.find(b"\r\n\r\n", searched, newline_end if newline_end >= 0 else len(buffer))
            if newline_end < 0 and crlf_end < 0:
                break
            end = crlf_end + 4 if crlf_end >= 0 else newline_end + 2
            yield bytes(buffer[start:end])
            start = searched = end
        del buffer[:start]

    def _process_event(self, event: bytes) -> bytes:
        lines = event.splitlines() if event.find(b"\n", 0, -2) >= 0 else [event.strip()]
        if self.chunks == 0 and lines[0].startswith(b"\xef\xbb\xbf"):
            lines[0] = lines[0][3:]
        payload_lines, other_lines = [], []
        for line in lines:
            if line.startswith(b"data:"):
                payload_lines.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line or line in _FIELDS or line.startswith(_FIELDS[:5]):
                other_lines.append(line)
            else:
                raise MalformedAnswer(f"the server sent a line that is not an event: {_quoted(line)}")
        payload = b"\n".join(payload_lines).strip()
        if not payload or payload == b"[DONE]":
            self._events.append(event)
            return event
        chunk = self._chunk(payload)
        self._events.append(event)
        self.chunks += 1
        if chunk.get("error") is not None:
            return event
        for choice in chunk.get("choices") or ():
            self.tokens += len(choice.get("token_ids") or ())
        if not self._added:
            return event
        if self._added.is_only_content(chunk):
            return b""
        head = b"".join(line + b"\n" for line in other_lines if line)
        return head + b"data: " + encode_json(self._added.remove(chunk)) + b"\n\n"

    def _chunk(self, payload: bytes) -> dict[str, Any]:
        chunk = _object(payload, "the server sent a chunk that is")
        # An error from the server is passed on unchanged.
        if chunk.get("error") is None and (problem := self._wrong_in_chunk(chunk)) is not None:
            raise MalformedAnswer(f"the server sent a chunk of another shape: {problem}")
        return chunk


def encode_json(value: Any) -> bytes:
    """Encode JSON as vLLM does: no spaces, and escapes only for what UTF-8 cannot represent."""
    try:
        return orjson.dumps(value)
    except TypeError:  # integers of more than 64 bits, and lone surrogates
        pass
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def response_of(data: bytes, wrong_in: ShapeCheck) -> dict[str, Any] | None:
    """Return a server's answer; None if it reports an error.

    Raises:
        MalformedAnswer: if it does not follow the API.
    """
    response = _object(data, "the server's answer is")
    if response.get("error") is not None:
        return None
    if (problem := wrong_in(response)) is not None:
        raise MalformedAnswer(f"the server's answer has another shape: {problem}")
    return response


def _object(data: bytes, prefix: str) -> dict[str, Any]:
    """Decode a JSON object; `prefix` starts the error message if it is not one."""
    try:
        value = responses.parse_json(data)
    except ValueError as error:
        raise MalformedAnswer(f"{prefix} not JSON: {error}: {_quoted(data)}") from None
    if not isinstance(value, dict):
        raise MalformedAnswer(f"{prefix} not a JSON object: {_quoted(data)}")
    return value


def _quoted(data: bytes) -> str:
    return repr(data[:100].decode(errors="replace"))


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
ENDED_NAMES = 65536
LAST_CALLS_S = 30.0


@dataclass
class OpenSession:
    """One open session."""

    policy: Policy
    group: str | None = None
    is_local: bool = True
    entry: Entry | None = None
    calls_in_flight: int = 0
    rewards: Any = None
    last_used: float = field(default_factory=time.monotonic)
    call_finished: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """Recording proxy; an asynchronous context manager.

    Args:
        upstream: base URL of the server, or an open `Servers` if there are several.
        key: token of the clients, sent as a bearer token or x-api-key; None draws a random one.
        upstream_key: token that the server requires.
        model: model name in every request, or a function that returns it; None keeps the client's.
        finished: called with the record of each session that a client opened, once it gets its reward, is idle for too
            long, or the proxy stops. If it raises, the session stays open and the client gets an error.
        journal: stores the sessions that clients opened, with their calls, until they are finished. Sessions that an
            earlier proxy left open are opened again.
        version, sampling, salt, limits, logprob_kind: settings of sessions that clients open; as for `run_rollout`.
        host, port: address to listen on; a free port by default.
        request_bytes, response_bytes: maximum sizes of bodies; larger ones are refused.
        timeout_s: time limit of one request to the server, in seconds.
        sessions: maximum number of open sessions.
        idle_s: a session that a client opened is finished without a reward after this many seconds without a request.
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
            raise ArgumentError(
                "TG-ROLLOUT-029: the proxy's key has fewer than 8 characters. Pass a longer key, or none."
            )
        self.key = key or secrets.token_urlsafe(24)
        self._upstream, self._model = Upstream(upstream, upstream_key, timeout_s), model
        self._finished, self._journal = finished, journal
        self._version, self._sampling, self._logprob_kind = version, sampling, logprob_kind
        self._refused: set[str] = set()
        self._salt, self._limits = salt, limits or Limits(max_turns=1 << 20, timeout_s=idle_s)
        self._address = (host, port)
        self._request_bytes, self._response_bytes = request_bytes, response_bytes
        self._max_sessions, self._idle_s = sessions, idle_s
        self._seats: dict[str, OpenSession] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._count = 0

    async def __aenter__(self) -> "Proxy":
        for entry, calls, lost in () if self._journal is None else self._journal.open_sessions():
            seat = self._seats[entry.name] = self._new_seat(entry.name, entry.group)
            seat.entry, seat.policy.turns = entry, len(calls) + len(lost)
            seat.policy.session.restore(calls, lost)
        await self._upstream.__aenter__()
        self._server = await Server(self._app, *self._address).__aenter__()
        self._sweeping = asyncio.ensure_future(self._sweep())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sweeping.cancel()
        await self._server.__aexit__()
        await self._upstream.__aexit__()
        for name, seat in list(self._seats.items()):
            if not seat.is_local:
                await self._finish(name, seat, None, "stopped")

    @property
    def url(self) -> str:
        """Address that the proxy listens on."""
        return self._server.url

    def open(self, policy: Policy) -> tuple[str, str]:
        """Open a session for a rollout of this process and return its base URL and key; `close` ends it."""
        self._count += 1
        name = f"{self._count}.{secrets.token_hex(4)}"
        self._seats[name] = OpenSession(policy)
        return f"{self.url}/s/{name}/v1", self.key

    async def close(self, base_url: str) -> Any:
        """End a session that `open` opened, and return the reward that was posted to it, if any."""
        seat = self._seats.pop(base_url.split("/")[-2])
        await self._wait_for_calls(seat)
        return seat.rewards

    async def _wait_for_calls(self, seat: OpenSession) -> None:
        """Wait for calls in flight, at most `LAST_CALLS_S` seconds."""
        while seat.calls_in_flight:
            seat.call_finished.clear()
            try:
                await asyncio.wait_for(seat.call_finished.wait(), LAST_CALLS_S)
            except asyncio.TimeoutError:
                return

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        begun = False

        async def send_and_note(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            try:
                await self._answer(scope, receive, send_and_note)
            except Exception as error:
                if begun or isinstance(error, Refusal):
                    raise
                raise Refusal(500, f"the proxy failed: {type(error).__name__}: {error}", "server_error") from error
        except Refusal as refusal:
            body = {
                "error": {
                    "message": escape_terminal(refusal),
                    "type": refusal.kind,
                    "param": None,
                    "code": refusal.status,
                }
            }
            await send_response(send, refusal.status, encode_json(body), close=True)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        self._check_key(headers)
        name, path = _split_session(scope["path"], headers)
        method = scope["method"]
        if path == "/v1/models" and method == "GET":
            return await self._models(send)
        if method != "POST":
            raise Refusal(405 if path in ENDPOINTS else 404, f"{method} {path} is not served here")
        if path == "/reward":
            body = await body_of(receive, self._request_bytes, headers)
            return await self._reward(name, object_of(body), send)
        road = ENDPOINTS.get(path)
        if road is None:
            raise Refusal(
                404, f"{path} is not served here; there are {', '.join(ENDPOINTS)}, /v1/models and /s/NAME/reward"
            )
        body = object_of(await body_of(receive, self._request_bytes, headers))
        seat = self._seat(name, headers)
        call = self._new_call(seat, road, body)
        if name not in self._seats:
            self._register(str(name), seat)
        seat.calls_in_flight += 1
        try:
            await self._call(seat, road, call, AddedFields(body, road.required_fields), receive, send)
        finally:
            seat.calls_in_flight -= 1
            seat.last_used = time.monotonic()
            seat.call_finished.set()

    def _check_key(self, headers: Mapping[bytes, str]) -> None:
        if not has_key(headers, self.key):
            raise Refusal(401, "no key, or a wrong one; send Authorization: Bearer KEY", "authentication_error")

    def _seat(self, name: str | None, headers: Mapping[bytes, str]) -> OpenSession:
        """Return the session of a request, or a new one for a new name; it is stored once its request is accepted."""
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
        if len(self._seats) >= self._max_sessions:
            raise Refusal(503, f"{self._max_sessions} sessions are open; finish some with a reward", "overloaded_error")
        return self._new_seat(name, headers.get(b"x-tracegrad-group"))

    def _register(self, name: str, seat: OpenSession) -> None:
        """Store a session that a client opened."""
        if self._journal is not None:
            try:
                seat.entry = self._journal.start(name, seat.group)
            except OSError as error:
                raise Refusal(507, f"session {name} could not be written to disk: {error.strerror}") from None
        self._seats[name] = seat

    def _new_seat(self, name: str, group: str | None) -> OpenSession:
        """Create a session that a client opens."""
        session = Session(name, version=self._version, sampling=self._sampling, logprob_kind=self._logprob_kind)
        policy = Policy(session, _unused, limits=self._limits, salt=self._salt)
        return OpenSession(policy, group=group, is_local=False)

    def _keep(self, seat: OpenSession) -> None:
        """Write calls that are not in the journal yet, before the client gets its answer."""
        if self._journal is not None and seat.entry is not None:
            try:
                self._journal.keep(seat.entry, seat.policy.session)
            except OSError as error:
                raise Refusal(507, f"the call could not be written to disk, send it again: {error.strerror}") from None

    async def _reward(self, name: str | None, body: dict[str, Any], send: Any) -> None:
        """Set the reward of a session and finish it."""
        seat = self._seats.get(name or "")
        if seat is None:
            status = 409 if name in self._ended else 404
            raise Refusal(status, f"session {name} is finished" if status == 409 else f"session {name} had no calls")
        try:
            rewards = check_rewards(body["rewards"]) if "rewards" in body else check_rewards(body["reward"])
        except KeyError:
            raise Refusal(400, 'send {"reward": 1.0} or {"rewards": {"name": 1.0}}') from None
        except ArgumentError as error:
            raise Refusal(400, str(error)) from None
        await self._wait_for_calls(seat)
        seat.rewards = rewards
        calls = len(seat.policy.session.calls)
        if not seat.is_local and name in self._seats:
            if isinstance(group := body.get("group"), str | int):
                seat.group = str(group)
            try:
                calls = await self._finish(name, seat, body.get("metadata"), "done")
            except Exception as error:
                raise Refusal(
                    507, f"session {name} could not be written to disk, send its reward again: {error}"
                ) from error
        await send_response(send, 200, encode_json({"calls": calls}))

    async def _finish(self, name: str, seat: OpenSession, metadata: Any, ended: str) -> int:
        """Pass on the record of a session and return its number of calls; if that fails, the session is open again."""
        del self._seats[name]
        self._ended[name] = None
        session_metadata = {**(metadata if isinstance(metadata, dict) else {}), "ended": ended}
        if seat.entry is not None:
            session_metadata["session"] = seat.entry.token
        try:
            record = seat.policy.session.record(name, seat.group, seat.rewards, session_metadata)
            result = self._finished(record) if self._finished is not None else None
            if inspect.isawaitable(result):
                await result
        except BaseException:
            del self._ended[name]
            self._seats[name] = seat
            raise
        if self._journal is not None and seat.entry is not None:
            with contextlib.suppress(OSError):  # the next proxy finds that it is recorded
                self._journal.end(seat.entry)
        if len(self._ended) > ENDED_NAMES:
            self._ended.popitem(last=False)
        return len(record.get("calls", ()))

    async def _sweep(self) -> None:
        """Finish sessions without requests for `idle_s` seconds."""
        while True:
            await asyncio.sleep(min(self._idle_s / 4, 60.0))
            before = time.monotonic() - self._idle_s
            for name, seat in list(self._seats.items()):
                if not seat.is_local and not seat.calls_in_flight and seat.last_used < before:
                    with contextlib.suppress(Exception):  # it stays open; the next sweep tries again
                        await self._finish(name, seat, None, "idle")

    async def _models(self, send: Any) -> None:
        response = await self._upstream.ask("GET", "", "/v1/models", None)
        with contextlib.closing(response):
            data = await read_body(response, self._response_bytes)
        await send_response(send, response.status, data, response.content_type)

    def _new_call(self, seat: OpenSession, road: Endpoint, body: dict[str, Any]) -> Call:
        """Create the call of a request within the limits of its session; a refused request leaves no trace."""
        policy = seat.policy
        try:
            tokens_left = policy.tokens_left()
            call = policy.session.open(body, road.required_fields)
            call.drop(self._refused)
        except LimitReached as limit:
            raise Refusal(400, str(limit), "limit_reached") from None
        except UnfitRequest as error:
            raise Refusal(400, str(error)) from None
        if tokens_left is not None:
            policy.limit_tokens(call.request, tokens_left)
        if self._model is not None:
            call.request["model"] = self._model if isinstance(self._model, str) else self._model()
        return call

    async def _call(
        self, seat: OpenSession, road: Endpoint, call: Call, added: AddedFields, receive: Any, send: Any
    ) -> None:
        """Process one request of a client and record it."""
        policy = seat.policy
        self._keep(seat)
        policy.turns += 1
        sent = dict(call.request)
        if road.required_fields and (salt := policy.salt()) is not None:
            sent["cache_salt"] = salt
        closing = asyncio.ensure_future(wait_for_disconnect(receive))
        answering = asyncio.ensure_future(self._pass(seat, call, road, added, sent, send))
        try:
            await asyncio.wait({closing, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
            if not answering.done():
                answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering

    async def _pass(
        self, seat: OpenSession, call: Call, road: Endpoint, added: AddedFields, sent: dict[str, Any], send: Any
    ) -> None:
        """Send the server's answer to the client, and record it completely or as far as it arrived."""
        events: EventStream | None = None
        reason = "the client closed before the answer"
        try:
            response, data = await self._send_upstream(seat, call, road, sent)
            with contextlib.closing(response):
                if response.status == 200 and response.content_type == "text/event-stream":
                    events = EventStream(added, road.wrong_in_chunk, self._response_bytes)
                    reason = "the server's stream has no chunk"
                    return await self._stream(seat, call, response, events, send)
                data = await read_body(response, self._response_bytes) if data is None else data
            parsed_response = response_of(data, road.wrong_in) if response.status == 200 else None
            if parsed_response is None:
                reason = f"the server answered {response.status}: {data[:500].decode(errors='replace')}"
            else:
                call.close(parsed_response)
                self._keep(seat)
                data = encode_json(added.remove(parsed_response)) if added else data
            if not 200 <= response.status < 600:
                raise Refusal(502, reason, "upstream_error")
            await send_response(send, response.status, data, response.content_type)
        except Refusal as refusal:
            reason = str(refusal)
            if events is None:
                raise
            await self._break_off(road, reason, send)
        except MalformedAnswer as error:
            reason = str(error)
            if events is None:
                raise Refusal(502, reason, "upstream_error") from None
            await self._break_off(road, reason, send)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            reason = f"the server's answer broke off: {type(error).__name__}: {error}"
            if events is None:
                raise Refusal(502, reason, "upstream_error") from None
            await self._break_off(road, reason, send)
        except Exception as error:
            reason = f"the proxy failed: {type(error).__name__}: {error}"
            if events is None:
                raise Refusal(500, reason, "server_error") from error
            await self._break_off(road, reason, send)
        finally:
            if events is not None and events.chunks and not call.closed:
                call.close(events.text, tokens=events.tokens)
            elif not call.closed:
                call.fail(reason)
            with contextlib.suppress(Refusal):  # the next call tries to write it again
                self._keep(seat)

    async def _send_upstream(
        self, seat: OpenSession, call: Call, road: Endpoint, sent: dict[str, Any]
    ) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """Return the server's response, with its body if that was read.

        If the server refuses fields that the session filled in, the request is sent again without them.
        """
        while True:
            response = await self._upstream.ask("POST", seat.policy.sticky, road.path, encode_json(sent))
            if response.status not in (400, 422) or not call.filled:
                return response, None
            with contextlib.closing(response):
                data = await read_body(response, self._response_bytes)
            names = fields_in_error(data.decode(errors="replace"), call.filled)
            if not call.drop(names):
                return response, data
            self._refused.update(names)
            sent = {key: value for key, value in sent.items() if key not in names}

    async def _stream(
        self, seat: OpenSession, call: Call, response: aiohttp.ClientResponse, events: EventStream, send: Any
    ) -> None:
        """Stream events to the client; the call is recorded before the end of the stream is sent."""
        await start(send, 200, response.headers["Content-Type"])
        async for data in response.content.iter_any():
            chunks: list[bytes] = []
            try:
                chunks.extend(events.feed(data))
            finally:  # also send the events before a malformed one
                if any(chunks):
                    await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": True})
        last_chunk = events.finish()
        if events.chunks:
            call.close(events.text, tokens=events.tokens)
            self._keep(seat)
        await send({"type": "http.response.body", "body": last_chunk, "more_body": False})

    async def _break_off(self, road: Endpoint, reason: str, send: Any) -> None:
        """End a started stream with an error."""
        await send({"type": "http.response.body", "body": road.error(reason), "more_body": False})


async def _unused(body: dict[str, Any], *, session: str, salt: str | None) -> dict[str, Any]:
    raise ArgumentError("TG-ROLLOUT-030: sessions of clients send requests only through the proxy")


def _split_session(path: str, headers: Mapping[bytes, str]) -> tuple[str | None, str]:
    """Return the session that a request names, and the path."""
    if path.startswith("/s/"):
        name, slash, remainder = path[3:].partition("/")
        return name, slash + remainder
    return headers.get(b"x-tracegrad-session"), path
