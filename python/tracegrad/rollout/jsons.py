"""JSON as bytes, both ways: by orjson, and by the standard library for the little that orjson refuses.

What orjson refuses and the standard library takes: half a character (a lone surrogate), NaN, integers of more than 64
bits, keys that are numbers, deep nesting. Called for each answer of a server and for each record that is written.
"""

import json
from typing import Any

try:
    import orjson
except ImportError as error:
    raise ImportError("Playing needs orjson. Run: pip install 'tracegrad[online]'.") from error

# What the standard library refuses is refused, not told in a way that a reader would have to know of.
STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


def loads(raw: bytes) -> Any:
    """The value of a text.

    >>> loads(b'{"logprob": -0.25, "half": "\\\\ud83d"}')
    {'logprob': -0.25, 'half': '\\ud83d'}

    Raises:
        ValueError: if it is no JSON.
        RecursionError: if it is nested too deep.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return json.loads(raw)


def dumps(value: Any) -> bytes:
    """A value as one line. NaN, for which JSON has no word, is null.

    >>> dumps({"logprob": float("nan"), "half": "\\ud83d"})
    b'{"logprob":null,"half":"\\\\ud83d"}'

    Raises:
        TypeError, ValueError: for what JSON cannot say.
        RecursionError: if it is nested too deep.
    """
    try:
        return orjson.dumps(value, option=STRICT)
    except TypeError:
        told = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(told, separators=(",", ":")).encode()
