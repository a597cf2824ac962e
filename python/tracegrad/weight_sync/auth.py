"""Restrict who may change a server's weights: only this machine, or clients with its token.

`check_protected` is the check of the trainer. `Guard` protects the server: vLLM requires its key only on /v1 and
/inference, so anyone who can reach the port could otherwise pause it, load weights and call methods of its workers.
Imports only this package.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tracegrad.errors import ArgumentError

if TYPE_CHECKING:
    from tracegrad.rollout.client import Servers

OPEN_PATHS = {"/health", "/ping"}


def is_loopback(url: str) -> bool:
    """Return whether a URL is only reachable from this machine.

    >>> is_loopback("http://127.0.0.1:8000"), is_loopback("http://[::1]:80"), is_loopback("http://10.0.0.5:8000")
    (True, True, False)
    """
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def check_protected(servers: Servers, path: str) -> None:
    """Raise ArgumentError for a server on another machine that answers control requests without a token.

    Raises:
        ArgumentError: also if such a server requires a token and `servers.key` is None.
    """
    remote = [url for url in servers.urls if not is_loopback(url)]
    answers = await asyncio.gather(*(servers.request(url, path, method="GET", token=False) for url in remote))
    for url, answer in zip(remote, answers, strict=True):
        if answer.status not in (401, 403):
            raise ArgumentError(
                f"TG-SYNC-001: {url} is on another machine and answered {path} without a token ({answer.words}). "
                "Anyone who can reach it could load other weights and run methods of its workers, since vLLM's "
                "--api-key protects only /v1. Start it with --middleware tracegrad.weight_sync.auth.Guard and "
                "VLLM_API_KEY, or on 127.0.0.1 behind a tunnel."
            )
        if servers.key is None:
            raise ArgumentError(f"TG-SYNC-002: {url} requires a token. Pass the `key` to Servers.")


class Guard:
    """Middleware for vLLM's `--middleware`: every path except `OPEN_PATHS` requires VLLM_API_KEY."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        if not (key := os.environ.get("VLLM_API_KEY", "")):
            raise ArgumentError(
                "TG-SYNC-003: the guard has no token, so it would accept every request. Set VLLM_API_KEY."
            )
        self.app = app
        self.token = f"Bearer {key}".encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Pass on requests with the token; answer all others with 401, and close websockets."""
        headers = dict(scope.get("headers") or ())
        is_authorized = hmac.compare_digest(headers.get(b"authorization", b""), self.token)
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS or is_authorized:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            content_type = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": content_type})
            await send({"type": "http.response.body", "body": b'{"error": {"message": "no token, or another one"}}'})
