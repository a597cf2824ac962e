"""Serve the page on loopback until a signal arrives."""

import secrets
import socket
from collections.abc import Callable
from contextlib import suppress

from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.view.loaded import Viewer


def serve(session: Viewer, *, port: int = 0, token: str | None = None, log: Callable[[str], None] = print) -> None:
    """Serve an open session. Returns after SIGINT or SIGTERM.

    Args:
        port: port on 127.0.0.1. 0 selects a free one.
        token: secret first part of every address. Default: a random one.
        log: called with a line that has the address, when the server is reachable.

    Raises:
        ArgumentError: if the port is out of range.
        TracegradError: if the port cannot be used.

    ```python
    from pathlib import Path
    from tracegrad.view import Viewer, serve

    with Viewer(["traces.jsonl"], Path("out/index")) as session:
        serve(session, port=8080)  # prints the address, and returns after Ctrl-C
    ```
    """
    if not 0 <= port <= 65535:
        raise ArgumentError(
            f"TG-VIEW-014: --port {str(port)[:20]}: a port is 0 to 65535. Nothing is shown. Give one, or leave it."
        )
    import uvicorn

    from tracegrad.view.app import application

    token = token or secrets.token_urlsafe(18)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(64)  # Connections queue until the server runs, instead of being refused.
    except OSError as error:
        raise TracegradError(
            f"TG-VIEW-015: port {port}: {error.strerror}. Nothing is shown. Give another --port."
        ) from error
    with listener:
        log(f"view     http://127.0.0.1:{listener.getsockname()[1]}/{token}/")
        server_config = uvicorn.Config(application(session, token), log_level="error", access_log=False)
        with suppress(KeyboardInterrupt):
            uvicorn.Server(server_config).run(sockets=[listener])
