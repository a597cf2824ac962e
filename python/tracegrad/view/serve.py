"""Serves the page on loopback until it is told to end."""

import secrets
import socket
from collections.abc import Callable
from contextlib import suppress

from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.view.loaded import Session


def serve(session: Session, *, port: int = 0, token: str | None = None, say: Callable[[str], None] = print) -> None:
    """Serves a session that is open; returns after SIGINT or SIGTERM.

    Args:
        port: on 127.0.0.1; 0 takes a free one.
        token: behind which everything stands; default one that nobody can guess.
        say: takes the address when it answers.

    Raises:
        TracegradError: if the port is taken or is none.
    """
    if not 0 <= port <= 65535:
        raise ArgumentError(f"--port {str(port)[:20]}: a port is 0 to 65535. Nothing is shown. Give one, or leave it.")
    import uvicorn

    from tracegrad.view.app import application

    token = token or secrets.token_urlsafe(18)
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind(("127.0.0.1", port))
        door.listen(64)  # who follows the address at once waits for the server and is not refused
    except OSError as error:
        raise TracegradError(f"port {port}: {error.strerror}. Nothing is shown. Give another --port.") from error
    with door:
        say(f"view     http://127.0.0.1:{door.getsockname()[1]}/{token}/")
        told = uvicorn.Config(application(session, token), log_level="error", access_log=False)
        with suppress(KeyboardInterrupt):
            uvicorn.Server(told).run(sockets=[door])
