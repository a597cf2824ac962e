"""Look up dotted paths in records, and convert values to rewards, versions and kinds."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

DEEPEST = 8
MAX_LEAVES = 4096
_WORD_START = r"(?:(?<![a-z])|(?=(?-i:[A-Z])))"
REWARD = re.compile(
    rf"reward|(?<!under)score|{_WORD_START}(success|correct|resolved|solved|rating|grade|feedback|thumb|label|accuracy|"
    r"quality|verdict|outcome|helpful|preference|overall)|"
    r"pass(ed)?$|\bvalue$|\bvotes?$|vote$|\bstars?$|\bpoints?$|\btotal$|\bweight$|"
    # The same in Spanish, French, German, Italian, Polish, Russian, Chinese, Japanese and Korean.
    r"recompensa|puntuaci|calificaci|r[eé]compense|belohnung|bewertung|ricompensa|punteggio|nagroda|ocena|награда|оценка|"
    r"奖励|得分|评分|分数|報酬|スコア|評価|보상|점수",
    re.I,
)
"""Names of fields that contain rewards."""
AGAINST = re.compile(
    r"(^|_)((in|un)(correct|solved|resolved|success)|not_|fail|wrong|down|dislike|reject|error|bad(_|$)|toxic|halluc|"
    r"abort|cancel|timed_?out|interrupt)",
    re.I,
)
"""Starts of words in the names of fields for which a higher value is worse."""
_NAMES = ("name", "key", "metric", "scorer", "assessment_name", "evaluator")
_VALUES = ("score", "value", "numeric_value", "result")
_VERSION = re.compile(r"[vV]?(\d{1,18})")


class Missing(Exception):
    """The path does not exist in the record, or its value is null."""


def get(record: Any, path: str) -> Any:
    """Return the value at a path.

    A key may contain dots. A number is an index into a list. JSON strings are parsed. An entry of a list of scores is
    selected by its name.

    Raises:
        Missing: if the path does not exist, or its value is null.

    >>> get({"metadata": {"score": 0.5}, "a.b": [1, 2]}, "metadata.score"), get({"a.b": [1, 2]}, "a.b.1")
    (0.5, 2)
    """
    if not path:
        if record is None:
            raise Missing
        return record
    record = parse_json_string(record)
    keys = path.split(".")
    record = (keys[0].isdecimal() and record) or scores_by_name(record) or record
    for count in range(len(keys), 0, -1):
        key, remaining = ".".join(keys[:count]), ".".join(keys[count:])
        if isinstance(record, Mapping) and key in record:
            return get(record[key], remaining)
        if isinstance(record, list) and count == 1 and key.isdecimal() and int(key) < len(record):
            return get(record[int(key)], remaining)
    raise Missing


def collect(record: Any, path: str) -> Any:
    """Return the value at a path as `get` does. A key `*` stands for each item of a list: the values form a list.

    An item without the rest of the path has None there.

    Raises:
        Missing: if the path does not exist, its value is null, or no item of a list has the rest of the path.

    >>> collect({"turns": [{"role": "user"}, {"lp": [-0.5]}]}, "turns.*.lp")
    [None, [-0.5]]
    """
    keys = path.split(".")
    if "*" not in keys:
        return parse_json_string(get(record, path))
    star = keys.index("*")
    items = parse_json_string(get(record, ".".join(keys[:star])))
    if not isinstance(items, list):
        raise Missing
    values = [_collected(item, ".".join(keys[star + 1 :])) for item in items]
    if all(value is None for value in values):
        raise Missing
    return values


def _collected(record: Any, path: str) -> Any:
    try:
        return collect(record, path)
    except Missing:
        return None


def natural_sort_key(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return a sort key for natural order: the parts of a name without digits, then the numbers between them.

    >>> sorted(["s10.json", "s9.json", "s2.json"], key=natural_sort_key)
    ['s2.json', 's9.json', 's10.json']
    """
    parts = re.split(r"(\d+)", name)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def split_lines(text: str) -> list[str]:
    r"""Split a text at line feeds, with or without a carriage return before them.

    Other separators that JSON allows unescaped, such as U+2028, do not end a line.

    >>> split_lines("a\u2028b\r\nc\x85\n")
    ['a\u2028b', 'c\x85']
    """
    parts = text.split("\n")
    return [line.removesuffix("\r") for line in (parts if parts[-1] else parts[:-1])]


def parse_json_string(value: Any) -> Any:
    """Parse a JSON string of an object or a list; return other values unchanged.

    >>> parse_json_string('{"a": 1}'), parse_json_string("{x")
    ({'a': 1}, '{x')
    """
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value


def scores_by_name(record: Any) -> dict[str, Any] | None:
    """Return a list of scores or checks as a dict by name; None for other lists.

    If a name occurs twice, the last entry that is not marked as invalid counts.

    >>> scores_by_name([{"name": "right", "value": 1}, {"key": "tone", "score": 0.5, "value": None}])
    {'right': 1, 'tone': 0.5}
    >>> scores_by_name([{"name": "a"}]) is None
    True
    """
    scores: dict[str, Any] = {}
    for entry in record if isinstance(record, list) else ():
        if not isinstance(entry, (dict, Mapping)):
            return None
        feedback = entry.get("feedback")
        fields = {**entry, **feedback} if isinstance(feedback, Mapping) else entry
        name = _first_of(fields, _NAMES, str)
        if not name:
            continue
        if name.isdecimal():
            return None
        value = _first_of(fields, _VALUES, (str, int, float))
        if value is not None and fields.get("valid", True):
            scores[name] = value
    return scores or None


def _first_of(fields: Mapping[str, Any], names: Iterable[str], types: type | tuple[type, ...]) -> Any:
    """Return the first of the fields with these names that has one of the types; None without one."""
    for name in names:
        if isinstance(value := fields.get(name), types):
            return value
    return None


def leaves(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the leaves of a record. Lists are not searched, except lists of scores."""
    stack = [iter((("", record),))]
    while stack:
        for path, value in stack[-1]:
            if isinstance(value, list):
                value = scores_by_name(value)
            elif not isinstance(value, (dict, Mapping)):
                if path:
                    yield path, value
                continue
            if value and len(stack) <= DEEPEST:
                stack.append(_children(path, value))
                break
        else:
            stack.pop()


def _children(path: str, value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())


def number(value: Any) -> float | None:
    """Convert a number, a boolean, or a numeric string to a float; None for other values.

    >>> number(True), number("0.5"), number("good"), number([1])
    (1.0, 0.5, None, None)
    """
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in ("true", "false"):
        return float(word == "true")
    if not isinstance(value, (str, int, float)):
        return None
    try:
        converted = float(value)
    except (ValueError, OverflowError):
        return None
    return None if word and math.isnan(converted) else converted


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
"""Numbers for the words of feedback and checks. The words of one scale keep their order and have distinct numbers."""


def reward_value(value: Any) -> float | None:
    """Convert a value as `number` does, and a word of feedback to a number from 0 (bad) to 1 (good).

    >>> [reward_value(word) for word in ("Thumbs-Up", "good", "partially correct", "failed", "maybe")]
    [1.0, 0.75, 0.5, 0.0, None]
    """
    word = "_".join(value.strip().lower().replace("-", " ").split()) if isinstance(value, str) else None
    return number(value) if word is None else VERDICTS.get(word, number(value))


def describe_type(value: Any) -> str:
    """Describe the type of a value in a few words."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a text" if number(value) is None else "a number as text"
    if isinstance(value, Mapping):
        return "an object"
    return "null" if value is None else "a list"


def parse_version(value: Any) -> int | None:
    """Convert a policy version to an int: a whole number from 0, or a string of digits with an optional v before it."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return value if value >= 0 else None
    match = _VERSION.fullmatch(value) if isinstance(value, str) else None
    return int(match[1]) if match else None


def parse_time(text: str) -> float | None:
    """Parse an ISO 8601 time into seconds since 1970. A time without a zone is UTC. None if it is not a time."""
    try:
        time = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()
