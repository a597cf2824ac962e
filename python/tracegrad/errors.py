"""Every error tracegrad raises: what was found, where, why it matters, what to do.

Raised by all packages, defined in the core; each is a ValueError and carries `file`, `line`, `trace`, `turn`, `token`
where they are known. Their text is for terminals and logs: `shown` makes it one line that says what it seems to say.
"""

import copyreg
import re
from collections.abc import Sequence

from tracegrad._core import (
    AlignmentError,
    ArgumentError,
    FormatError,
    ReadError,
    TemplateError,
    TokenizerError,
    TracegradError,
)

# Controls and breaks of lines, what sets the direction of text, what takes no room, and halves of characters, which no
# stream takes. The core's errors are written alike.
_STEERING = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"
)


def shown(text: object) -> str:
    """Text of strangers as a terminal may show it: what would steer it, turn it or hide in it is an escape.

    >>> shown("a\\x1b[2J\\u202eb")
    'a\\\\x1b[2J\\\\u202eb'
    """
    return _STEERING.sub(lambda found: found.group().encode("unicode_escape").decode(), str(text))


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,3}[^\s\"<>\\]*[^\s\"<>\\:,.;)'\]}]")
_CHAINED = re.compile(r"(::)(?=[A-Za-z][A-Za-z0-9+.-]*(?:::|:/))")
_HIDDEN = "***"


def redacted(text: object) -> str:
    """Text without the secrets of the addresses in it: user and password, values of the query, and the fragment.

    Whatever the provider calls its signature, every value is taken for one.

    >>> redacted("s3://me:pass@bucket/a.jsonl?X-Amz-Signature=0f&v=1: not found"), redacted("hf://datasets/a/b@main/c")
    ('s3://***@bucket/a.jsonl?X-Amz-Signature=***&v=***: not found', 'hf://datasets/a/b@main/c')
    """
    return _ADDRESS.sub(lambda found: "".join(map(_redacted, _CHAINED.split(found.group()))), str(text))


def _redacted(address: str) -> str:
    scheme, mark, rest = address.partition(":/")
    if not mark:
        return address
    slashes = rest[: len(rest) - len(rest.lstrip("/"))]
    rest = rest.lstrip("/")
    place = re.split(r"[?#]", rest)[0]
    first = place.partition("/")[0]
    # A password may hold slashes that nobody has escaped; a port is no password, and Azure's user is a container.
    if ":" in first and "@" in place and not first.startswith("[") and not re.search(r":\d{1,5}$", first):
        rest = f"{_HIDDEN}@{rest[place.rfind('@') + 1 :]}"
    elif "@" in first and not (scheme.lower().startswith(("abfs", "wasb")) and ":" not in first):
        rest = f"{_HIDDEN}@{rest[first.rfind('@') + 1 :]}"
    rest, fragment, _ = rest.partition("#")
    path, query, values = rest.partition("?")
    if query and (scheme.lower().startswith("http") or "=" in values):  # elsewhere a mark of a pattern
        query += "&".join(
            f"{value.partition('=')[0]}={_HIDDEN}" if "=" in value else _HIDDEN for value in values.split("&")
        )
    else:
        query += values
    return f"{scheme}:/{slashes}{path}{query}" + (f"#{_HIDDEN}" if fragment else "")


def _message(error: TracegradError) -> str:
    return shown(redacted(ValueError.__str__(error)))


def _representation(error: TracegradError) -> str:
    return f"{type(error).__name__}({_message(error)!r})"


def _made(name: str, args: tuple[object, ...], place: dict[str, object]) -> TracegradError:
    error: TracegradError = globals()[name](*args)
    vars(error).update(place)
    return error


def _parts(error: TracegradError) -> tuple[object, ...]:
    return _made, (type(error).__name__, error.args, vars(error))


class ServerError(TracegradError):
    """A server that gave no answer, or one that cannot be used: which, what it said, and what to do."""


class RefusedFields(ServerError):
    """A server that refuses a request for sampling fields that do nothing; `names` says which."""

    # A pickle makes one of its message alone, and sets what it carries afterwards.
    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


# Whoever raises one, from whatever text: this is the one place where it becomes a message.
TracegradError.__str__ = _message  # type: ignore[assignment, method-assign]
TracegradError.__repr__ = _representation  # type: ignore[assignment, method-assign]

__all__ = [
    "AlignmentError",
    "ArgumentError",
    "FormatError",
    "ReadError",
    "TemplateError",
    "TokenizerError",
    "TracegradError",
    "redacted",
    "shown",
]

# So that an error comes from another process as what it is: the core's classes cannot be found by their names.
for _name in __all__:
    if isinstance(_found := globals()[_name], type):
        copyreg.pickle(_found, _parts)  # type: ignore[arg-type]
