"""Treat SIGINT and SIGTERM as a request to stop after the current step."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from tracegrad.errors import ExitCode


class Interrupt:
    """Context that records the first SIGINT or SIGTERM; a second signal ends the process as usual.

    Outside the main thread it has no effect, because Python accepts signal handlers only there.

    >>> with Interrupt() as interrupt:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupt.exit_code
    130
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous_handlers: dict[int, Any] = {}

    @property
    def exit_code(self) -> int | None:
        """128 + signal number, as in shells; None without a signal."""
        return None if self.received is None else ExitCode(128 + self.received).value

    def code(self, stopped: str) -> int:
        """Return the exit code of a process whose run was `stopped`: `exit_code` if by a signal, else 0."""
        return (self.exit_code or ExitCode.DONE.value) if stopped == "signal" else ExitCode.DONE.value

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
