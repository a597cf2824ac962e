"""Serve OTLP over HTTP, and write whole traces to a folder.

Requests are answered as the OTLP specification says: 200 once all spans are on disk, 400 for bad data, 429 or 503 with
Retry-After if the spans cannot be stored now. Exporters repeat such requests, and repeated spans are stored once.
"""

import asyncio
import ipaddress
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tracegrad._http_server import Refusal, Server, body_of, has_key, send_response
from tracegrad.errors import ArgumentError, TracegradError, escape_terminal
from tracegrad.receive import otlp
from tracegrad.receive.folder import FolderFull, TraceFolder

CHECK_S = 0.5
"""Seconds between two searches for whole traces."""
_GROWTH = 8
"""How many times its bytes the spans of a request may have as JSON, in which each has its resource."""
_GRPC = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 408: 4, 413: 8, 415: 3, 429: 8, 503: 14}
"""Codes of gRPC in the body of an answer, by HTTP status."""


def parse_address(text: str, *, has_key: bool) -> tuple[str, int]:
    """Return host and port of an address to listen on.

    Args:
        text: HOST:PORT, where HOST is an IP address or "localhost".
        has_key: whether requests need a token.

    Raises:
        ArgumentError: if it is none, or an address that other machines reach and requests need no token.

    >>> parse_address("localhost:4318", has_key=False), parse_address("[::]:80", has_key=True)
    (('127.0.0.1', 4318), ('::', 80))
    """
    match = re.fullmatch(r"(?:http://)?(?:\[([^\[\]]+)\]|([^:\[\]]+)):(\d{1,5})/?", text)
    try:
        if match is None or int(match[3]) > 65535:
            raise ValueError
        host = match[1] or match[2]
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ArgumentError(
            f"TG-RECEIVE-005: --otlp {escape_terminal(text)[:80]!r} is not an address to listen on. Give an IP address "
            "of this machine and a port, such as 127.0.0.1:4318."
        ) from None
    if not address.is_loopback and not has_key:
        raise ArgumentError(
            f"TG-RECEIVE-006: --otlp {text[:80]}: other machines reach this address, and anybody there could add "
            "traces. Add --key-file FILE with a token that agents send, or listen on 127.0.0.1."
        )
    return str(address), int(match[3])


class Receiver:
    """OTLP/HTTP endpoint; an asynchronous context manager. On leaving it, all traces are written.

    Args:
        folder: open folder that the traces are written to.
        host, port: address to listen on; port 0 chooses a free one.
        key: token that requests must have; None requires none.
        quiet_s, idle_s: as for `TraceFolder.write_whole`.
        request_bytes, decompressed_bytes: maximum sizes of a body.
        requests: maximum number of requests whose bodies are in memory.
        log: receives lines about rejected data and failures, each once.

    Attributes:
        rejected: number of spans that were refused for good.
    """

    def __init__(
        self,
        folder: TraceFolder,
        *,
        host: str = "127.0.0.1",
        port: int = 4318,
        key: str | None = None,
        quiet_s: float = 10.0,
        idle_s: float = 600.0,
        request_bytes: int = 32 << 20,
        decompressed_bytes: int = 64 << 20,
        requests: int = 16,
        log: Callable[[str], None] = print,
    ) -> None:
        folder.claim("receive")
        self._folder, self._key = folder, key
        self._quiet_s, self._idle_s = quiet_s, idle_s
        self._request_bytes, self._decompressed_bytes, self._max_requests = request_bytes, decompressed_bytes, requests
        self._log, self._logged = log, set[str]()
        self._requests, self.rejected = 0, 0
        self._server = Server(self._app, host, port)
        # One thread decodes and stores: the database has one writer, and one body at a time is decoded.
        self._thread = ThreadPoolExecutor(1, "receive")

    async def __aenter__(self) -> "Receiver":
        await self._server.__aenter__()
        self._writing = asyncio.ensure_future(self._write())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.__aexit__()
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)
        await self._in_thread(self._folder.write_whole, 0.0, 0.0)
        self._thread.shutdown()

    @property
    def url(self) -> str:
        """Address that the endpoint listens on."""
        return self._server.url

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await self._in_thread(self._folder.write_whole, self._quiet_s, self._idle_s)
            except Exception as error:  # The spans are kept, and the next round tries again.
                known = isinstance(error, TracegradError)
                self._log_once(str(error) if known else f"writing failed: {type(error).__name__}: {error}", most=1000)

    def _log_once(self, line: str, most: int = 100) -> None:
        """Log a line that was not logged before. Clients cause at most 100 lines, so that others are still logged."""
        if line not in self._logged and len(self._logged) < most:
            self._logged.add(line)
            self._log(f"note     {line}")

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        more: tuple[tuple[bytes, bytes], ...] = ()
        try:
            answer = await self._answer(scope, headers, kind, receive)
        except Exception as error:
            if isinstance(error, FolderFull):
                refusal = Refusal(503 if error.retry_after_s > 10 else 429, str(error))
                more = ((b"retry-after", str(error.retry_after_s).encode()),)
            elif isinstance(error, Refusal):
                refusal = error
                more = ((b"retry-after", b"1"),) if error.status == 503 else ()
            else:  # Exporters repeat a request after 503, and drop its spans after 500.
                refusal = Refusal(503, f"the receiver failed: {type(error).__name__}: {error}")
                more = ((b"retry-after", b"30"),)
            text = escape_terminal(refusal)[:1000]
            self._log_once(f"a request was answered {refusal.status}: {text}")
            answer_kind = kind if kind == otlp.PROTOBUF else otlp.JSON
            body = otlp.failure(_GRPC[refusal.status], text, answer_kind)
            return await send_response(send, refusal.status, body, answer_kind, *more, close=True)
        await send_response(send, 200, answer, kind)

    async def _answer(self, scope: Any, headers: Mapping[bytes, str], kind: str, receive: Any) -> bytes:
        if self._key is not None and not has_key(headers, self._key):
            raise Refusal(401, "no token, or a wrong one; send Authorization: Bearer TOKEN")
        if self._key is None and b"origin" in headers:  # A page can reach loopback by a name that changed its address.
            raise Refusal(403, "a page in a browser cannot send spans to a receiver without a token")
        path = scope["path"]
        if path not in otlp.REQUESTS:
            raise Refusal(404, f"{path} is not served here; there are {', '.join(otlp.REQUESTS)}")
        if scope["method"] != "POST":
            raise Refusal(405, f"{scope['method']} is not served here; send POST")
        if kind not in (otlp.JSON, otlp.PROTOBUF):
            raise Refusal(415, f"content-type {kind[:80]!r} is not supported; send {otlp.PROTOBUF} or {otlp.JSON}")
        if self._requests >= self._max_requests:
            raise Refusal(503, f"{self._requests} requests are being read")
        self._requests += 1
        try:
            body = await body_of(receive, self._request_bytes, headers)
            encoding = headers.get(b"content-encoding", "").strip().lower()
            return await self._in_thread(self._store, path, body, encoding, kind)
        finally:
            self._requests -= 1

    def _store(self, path: str, body: bytes, encoding: str, kind: str) -> bytes:
        """Store the spans of a request, and return the answer."""
        try:
            body = otlp.decompress(body, encoding, self._decompressed_bytes)
            if len(body) > self._decompressed_bytes:
                raise Refusal(413, f"the decompressed request has more than {self._decompressed_bytes} bytes")
            return self._store_request(path, otlp.decode(path, body, kind), kind)
        except otlp.BadRequest as error:
            raise Refusal(400, str(error)) from None
        except otlp.TooManyFields as error:
            raise Refusal(413, str(error)) from None

    def _store_request(self, path: str, request: Any, kind: str) -> bytes:
        if path != "/v1/traces":
            problem = f"tracegrad stores spans alone; nothing of {path} is stored"
            if count := otlp.count_items(path, request):
                self._log_once(f"{problem}. If messages are sent there, let the agent write them into its spans.")
            return otlp.success(path, kind, count, problem)
        spans, problem, rejected = otlp.spans_of(request, _GROWTH * self._decompressed_bytes)
        if too_large := self._folder.add(spans):
            problem = f"the spans of a trace have more than {self._folder.limits.trace_bytes:,} bytes"
        if problem is not None:
            self.rejected += rejected + too_large
            self._log_once(f"spans were rejected: {problem}")
        return otlp.success(path, kind, rejected + too_large, problem)
