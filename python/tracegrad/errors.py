"""Define every error that tracegrad raises. A message states what is wrong, where, why it matters and what to do.

The core defines the base classes. Each error is a ValueError with the attributes `file`, `line`, `trace`, `turn` and
`token`, if they apply. Messages go to terminals and logs, so `escape_terminal` escapes every character that could
forge or hide text.
"""

import copyreg
import re
import signal
from collections.abc import Sequence
from enum import IntEnum

from tracegrad._core import (
    AlignmentError,
    ArgumentError,
    FormatError,
    ReadError,
    TemplateError,
    TokenizerError,
    TracegradError,
)


class ExitCode(IntEnum):
    """The exit codes of all commands. docs/reference/cli.md describes them."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    INTERRUPTED = 128 + signal.SIGINT
    OUTPUT_CLOSED = 128 + 13  # SIGPIPE, which Windows lacks.
    TERMINATED = 128 + signal.SIGTERM


# Control characters, line breaks, marks of text direction, characters of zero width, and lone surrogates, which no
# stream can encode. The core escapes the same set.
_STEERING = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"
)


def escape_terminal(text: object) -> str:
    """Return third-party text as a terminal can safely show it: control, direction and invisible characters are
    escaped.

    >>> escape_terminal("a\\x1b[2J\\u202eb")
    'a\\\\x1b[2J\\\\u202eb'
    """
    return _STEERING.sub(lambda match: match.group().encode("unicode_escape").decode(), str(text))


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,3}[^\s\"<>\\]*[^\s\"<>\\:,.;)'\]}]")
_CHAINED = re.compile(r"(::)(?=[A-Za-z][A-Za-z0-9+.-]*(?:::|:/))")
_HIDDEN = "***"
CODE = re.compile(r"\b(TG-[A-Z]+-\d{3})(?:: |\b)")
"""The code of an error in its message, with the colon after it."""


def redact(text: object) -> str:
    """Return text in which the secrets of addresses are replaced by `***`.

    Secrets are the user and password, every value of the query, and the fragment. Providers name their signatures
    differently, so every query value counts as a secret.

    >>> redact("s3://me:pass@bucket/a.jsonl?X-Amz-Signature=0f&v=1: not found"), redact("hf://datasets/a/b@main/c")
    ('s3://***@bucket/a.jsonl?X-Amz-Signature=***&v=***: not found', 'hf://datasets/a/b@main/c')
    """
    return _ADDRESS.sub(lambda match: "".join(map(_redacted, _CHAINED.split(match.group()))), str(text))


def _redacted(address: str) -> str:
    scheme, mark, tail = address.partition(":/")
    if not mark:
        return address
    slashes = tail[: len(tail) - len(tail.lstrip("/"))]
    tail = tail.lstrip("/")
    location = re.split(r"[?#]", tail)[0]
    authority = location.partition("/")[0]
    # A password can contain unescaped slashes. Digits after the colon are a port. In Azure addresses, the part before
    # the @ is a container.
    if (
        ":" in authority
        and "@" in location
        and not authority.startswith("[")
        and not re.search(r":\d{1,5}$", authority)
    ):
        tail = f"{_HIDDEN}@{tail[location.rfind('@') + 1 :]}"
    elif "@" in authority and not (scheme.lower().startswith(("abfs", "wasb")) and ":" not in authority):
        tail = f"{_HIDDEN}@{tail[authority.rfind('@') + 1 :]}"
    tail, fragment, _ = tail.partition("#")
    path, query, values = tail.partition("?")
    if query and (scheme.lower().startswith("http") or "=" in values):  # In other addresses, ? is a wildcard.
        query += "&".join(
            f"{value.partition('=')[0]}={_HIDDEN}" if "=" in value else _HIDDEN for value in values.split("&")
        )
    else:
        query += values
    return f"{scheme}:/{slashes}{path}{query}" + (f"#{_HIDDEN}" if fragment else "")


def _message(error: TracegradError) -> str:
    return escape_terminal(redact(ValueError.__str__(error)))


def _representation(error: TracegradError) -> str:
    return f"{type(error).__name__}({_message(error)!r})"


def _code(error: TracegradError) -> str | None:
    """The code of the cause, such as `TG-READ-001`; None if the message has no code."""
    match = CODE.search(_message(error))
    return match[1] if match else None


def _rebuild(name: str, args: tuple[object, ...], place: dict[str, object]) -> TracegradError:
    error: TracegradError = globals()[name](*args)
    vars(error).update(place)
    return error


def _reduce(error: TracegradError) -> tuple[object, ...]:
    return _rebuild, (type(error).__name__, error.args, vars(error))


class ServerError(TracegradError):
    """A server that did not respond or cannot be used. The message names the server, its response and the remedy."""


class RefusedFields(ServerError):
    """A server that rejects a request because of sampling fields that have no effect. `names` lists the fields."""

    # Unpickling calls the class with only the message and sets the attributes afterwards.
    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


# Redact and escape in one place, wherever an error is raised.
TracegradError.__str__ = _message  # type: ignore[assignment, method-assign]
TracegradError.__repr__ = _representation  # type: ignore[assignment, method-assign]
TracegradError.code = property(_code)  # type: ignore[assignment]

__all__ = [
    "AlignmentError",
    "ArgumentError",
    "ExitCode",
    "FormatError",
    "ReadError",
    "TemplateError",
    "TokenizerError",
    "TracegradError",
    "escape_terminal",
    "redact",
]

# Register how errors are pickled, so that they keep their class between processes. Pickle cannot import the core's
# classes by name.
for _name in __all__:
    if isinstance(_kind_of_error := globals()[_name], type) and issubclass(_kind_of_error, TracegradError):
        copyreg.pickle(_kind_of_error, _reduce)  # type: ignore[arg-type]
