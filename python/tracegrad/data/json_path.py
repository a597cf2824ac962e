"""Dotted paths into records, and what a value says where a reward, a version or a kind is wanted. No files."""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

DEEPEST = 8
MOST_WALKED = 4096
REWARD = re.compile(
    r"reward|score|success|correct|pass(ed)?$|resolved|solved|rating|grade|feedback|thumb|label|accuracy|quality|\bvalue$|"
    r"verdict|outcome|\bvotes?$|vote$|\bstars?$|\bpoints?$|helpful|preference|overall|\btotal$|\bweight$|"
    # The same in Spanish, French, German, Italian, Polish, Russian, Chinese, Japanese and Korean.
    r"recompensa|puntuaci|calificaci|r[eé]compense|belohnung|bewertung|ricompensa|punteggio|nagroda|ocena|награда|оценка|"
    r"奖励|得分|评分|分数|報酬|スコア|評価|보상|점수",
    re.I,
)
"""Names under which rewards stand."""
AGAINST = re.compile(
    r"(^|_)((in|un)(correct|solved|resolved|success)|not_|fail|wrong|down|dislike|reject|error|bad(_|$)|toxic|halluc|"
    r"abort|cancel|timed_?out|interrupt)",
    re.I,
)
"""Beginnings of the words of names under which more is worse."""
_NAMES = ("name", "key", "metric", "scorer", "assessment_name", "evaluator")
_VALUES = ("score", "value", "numeric_value", "result")
_VERSION = re.compile(r"[vV]?(\d{1,18})")


class Missing(Exception):
    """A record has nothing at a path."""


def at(record: Any, path: str) -> Any:
    """What stands at a path; keys with dots are found whole, numbers count through lists, JSON as text is opened, and
    what a list of scores names is found by its name.

    Raises:
        Missing: if nothing does, or null.

    >>> at({"metadata": {"score": 0.5}, "a.b": [1, 2]}, "metadata.score"), at({"a.b": [1, 2]}, "a.b.1")
    (0.5, 2)
    """
    if not path:
        if record is None:
            raise Missing
        return record
    record = opened(record)
    keys = path.split(".")
    record = (keys[0].isdecimal() and record) or named(record) or record
    for count in range(len(keys), 0, -1):
        key, rest = ".".join(keys[:count]), ".".join(keys[count:])
        if isinstance(record, Mapping) and key in record:
            return at(record[key], rest)
        if isinstance(record, list) and count == 1 and key.isdecimal() and int(key) < len(record):
            return at(record[int(key)], rest)
    raise Missing


def in_numbers(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """A name as a key to sort by: its parts without digits, then the numbers between them.

    >>> sorted(["s10.json", "s9.json", "s2.json"], key=in_numbers)
    ['s2.json', 's9.json', 's10.json']
    """
    parts = re.split(r"(\d+)", name)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def lines(text: str) -> list[str]:
    r"""The lines of a text, which end in a line feed, alone or behind a carriage return: what JSON may hold unescaped,
    such as U+2028, ends none.

    >>> lines("a\u2028b\r\nc\x85\n")
    ['a\u2028b', 'c\x85']
    """
    found = text.split("\n")
    return [line.removesuffix("\r") for line in (found if found[-1] else found[:-1])]


def opened(value: Any) -> Any:
    """What an object or a list kept as JSON text says; else the value.

    >>> opened('{"a": 1}'), opened("{x")
    ({'a': 1}, '{x')
    """
    if isinstance(value, str) and value[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def named(record: Any) -> dict[str, Any] | None:
    """What a list of scores or checks says, each by its name; None of other lists. Of two by one name the later one
    counts that is not marked as no longer valid.

    >>> named([{"name": "right", "value": 1}, {"key": "tone", "score": 0.5, "value": None}]), named([{"name": "a"}])
    ({'right': 1, 'tone': 0.5}, None)
    """
    out: dict[str, Any] = {}
    for each in record if isinstance(record, list) else ():
        if not isinstance(each, Mapping):
            return None
        inner = each.get("feedback")
        told = {**each, **inner} if isinstance(inner, Mapping) else each
        name = next((told[key] for key in _NAMES if isinstance(told.get(key), str)), None)
        value = next((told[key] for key in _VALUES if isinstance(told.get(key), (str, int, float))), None)
        if name and name.isdecimal():
            return None
        if name and value is not None and told.get("valid", True):
            out[name] = value
    return out or None


def leaves(record: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Paths and values of what is no object or list; messages and lists of numbers are not walked through."""
    held = named(record) or record
    if isinstance(held, Mapping) and depth < DEEPEST:
        for key, value in held.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    elif not isinstance(record, (Mapping, list)) and prefix:
        yield prefix, record


def number(value: Any) -> float | None:
    """A number, a boolean, or a number as text; None for anything else.

    >>> number(True), number("0.5"), number("good"), number([1])
    (1.0, 0.5, None, None)
    """
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in ("true", "false"):
        return float(word == "true")
    if not isinstance(value, (str, int, float)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return None if word and math.isnan(found) else found


_VERDICTS = {
    1.0: "up thumbs_up thumbsup pass passed correct right yes success succeeded positive accepted win liked "
    "resolved solved perfect strongly_agree very_satisfied 👍 ✅",
    0.95: "excellent",
    0.9: "great",
    0.85: "very_good",
    0.75: "good agree satisfied",
    0.5: "partial partially partly partially_correct partly_correct partially_resolved neutral mixed tie "
    "fair ok okay average acceptable",
    0.3: "poor",
    0.25: "bad disagree dissatisfied",
    0.1: "very_poor very_bad",
    0.0: "down thumbs_down thumbsdown fail failed incorrect wrong no failure negative rejected lose disliked "
    "unresolved unsolved escalated terrible awful strongly_disagree very_dissatisfied 👎 ❌",
}
VERDICTS = {word: number for number, words in _VERDICTS.items() for word in words.split()}
"""Words of people's feedback and checks; those of a scale keep its order, each with a number of its own."""


def verdict(value: Any) -> float | None:
    """As `number`, and from 1 to 0 the number of a word that says how good something is.

    >>> verdict("Thumbs-Up"), verdict("good"), verdict("partially correct"), verdict("failed"), verdict("maybe")
    (1.0, 0.75, 0.5, 0.0, None)
    """
    word = "_".join(value.strip().lower().replace("-", " ").split()) if isinstance(value, str) else None
    return number(value) if word is None else VERDICTS.get(word, number(value))


def kind(value: Any) -> str:
    """What a value is, in a word or two."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a text" if number(value) is None else "a number as text"
    if isinstance(value, Mapping):
        return "an object"
    return "null" if value is None else "a list"


def version(value: Any) -> int | None:
    """A policy version: a whole number, or digits after at most a v."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return value if value >= 0 else None
    found = _VERSION.fullmatch(value) if isinstance(value, str) else None
    return int(found[1]) if found else None
