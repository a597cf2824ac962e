"""An OpenAI-compatible proxy that records: any program in any language, one session for each trajectory.

It asks the server for ids and logprobs in addition, records request and response whole, and hands the client what it
would have got. It serves in the loop of its caller. `play` opens sessions for contracts; strangers open their own.
"""

import asyncio
import contextlib
import hmac
import inspect
import re
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvicorn

from tracegrad.errors import ArgumentError, shown
from tracegrad.rollout.exchange import (
    HEAD_BYTES,
    Connection,
    Pool,
    Refusal,
    Upstream,
    answer,
    body_of,
    disconnected,
    object_of,
    start,
    whole,
)
from tracegrad.rollout.journal import Entry, Journal
from tracegrad.rollout.passing import ROADS, Added, Events, MalformedAnswer, Road, dumped, response_of
from tracegrad.rollout.play import checked
from tracegrad.rollout.policy import LimitReached, Limits, Policy
from tracegrad.rollout.session import Call, Session, UnfitRequest
from tracegrad.sampling import refused_fields

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
