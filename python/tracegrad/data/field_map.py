"""Add the fields that a `FieldMap` names to records. They are appended, and the original bytes stay unchanged.

The values at each path are counted for the summary.
"""

import hashlib
import itertools
import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.config import FieldMap, join_list, nearest
from tracegrad.data import chat, json_path, token_fields
from tracegrad.data.codes import LOGPROB_KINDS
from tracegrad.data.sources import JsonOrRefusal
from tracegrad.data.trace import Trace, parse_json, to_json
from tracegrad.errors import ArgumentError

__all__ = [
    "BadValueError",
    "JsonOrRefusal",
    "Mapper",
    "append_fields",
    "describe_reward_choice",
    "distinct_rewards",
    "parse_record",
    "prompt_group",
]


MOST_LOOKED, MOST_PATHS = 64, 2000
"""Most records, and most paths, that are searched for the nearest path if one matches nothing."""


class BadValueError(Exception):
    """A value that its field does not accept. The argument is a `sources.Refusal`."""


@dataclass
class Mapper:
    """Extracts the fields that a field map names from records.

    Args:
        field_map: the field map.
        kind_counts: counts of the kinds of values, by field.
        records: number of records.
        low, high: range of the rewards.
        names: names of the rewards, if a record has several.
        word_rewards: number of each word that was used as a reward.
        paths: paths of the first records, in order.
    """

    field_map: FieldMap
    kind_counts: dict[str, Counter[str]] = field(default_factory=dict)
    records: int = 0
    low: float = math.inf
    high: float = -math.inf
    names: set[str] = field(default_factory=set)
    word_rewards: dict[str, float] = field(default_factory=dict)
    paths: dict[str, None] = field(default_factory=dict)

    def _paths(self) -> dict[str, str]:
        """Return the mapped paths within single records: all but the session, its order, and grouping by prompt."""
        paths = {name: path for name, path in self.field_map.paths().items() if name not in ("session", "order")}
        return {name: path for name, path in paths.items() if (name, path) != ("group", "prompt")}

    def _token_paths(self) -> dict[str, str]:
        """Return the mapped paths whose values belong to turns. A temperature does if its path has a `*`."""
        paths = {name: path for name, path in self._paths().items() if name in token_fields.NAMES}
        return {name: path for name, path in paths.items() if name != "temperature" or "*" in path.split(".")}

    def header(self, record: Any) -> dict[str, Any]:
        """Return the fields of a trace at the mapped paths of a record.

        Raises:
            BadValueError: if a field does not accept the value at its path.
        """
        self.records += 1
        self._look(record)
        fields: dict[str, Any] = {}
        token_paths = self._token_paths()
        for name, path in self._paths().items():
            if name in token_paths or (value := chat.get_path(record, path)) is None:
                continue
            self.kind_counts.setdefault(name, Counter())[json_path.describe_type(value)] += 1
            if name == "sampling":
                fields = {**_sampling(value, path), **fields}
            else:
                fields |= self._reward(value, path) if name == "reward" else _field(name, value, path)
        return fields

    def put_tokens(
        self, raw: bytes, record: dict[str, Any], original: Any = None, index: int = 0, count: int = 1
    ) -> tuple[bytes, dict[str, Any]]:
        """Return the JSON of a record and the record, with mapped ids, logprobs and masks where the core reads them.

        Args:
            raw: JSON of the record.
            record: the record, with the fields of the original one that it does not have itself.
            original: the record of the file.
            index, count: number of the record among those that were converted from the original one.

        Raises:
            BadValueError: if a value cannot be assigned to one sampled turn.
        """
        paths = self._token_paths()
        try:
            values = token_fields.values_of(record, original, paths, index, count) if paths else {}
            if not values:
                return raw, record
            for name, value in values.items():
                self.kind_counts.setdefault(name, Counter())[json_path.describe_type(value)] += 1
            fields, is_complete = token_fields.placed(record, values)
        except token_fields.UncertainError as error:
            name, problem = error.args
            fix = "Name the field of this turn, or a list with one entry per turn (docs/reference/inputs.md)"
            raise BadValueError((f"{paths[name]}: {problem}", f"map.{name} would be assigned by guess", fix)) from error
        return (to_json(fields, 1), fields) if is_complete else (append_fields(raw, fields), {**record, **fields})

    def _look(self, record: Any) -> None:
        """Store the paths of a record, and count the session key if it has one."""
        session = self.field_map.session
        if session not in ("", "prefix") and "session" not in self.kind_counts:
            value = chat.get_path(record, session)
            self.kind_counts |= {} if value is None else {"session": Counter({json_path.describe_type(value): 1})}
        if self.records > MOST_LOOKED or len(self.paths) >= MOST_PATHS:
            return
        self.paths |= dict.fromkeys(map(str, record)) if isinstance(record, Mapping) else {}
        for path, _ in itertools.islice(json_path.leaves(record), MOST_PATHS):
            keys = path.split(".")
            self.paths |= dict.fromkeys(".".join(keys[:count]) for count in range(1, len(keys) + 1))

    def check(self) -> None:
        """Check that every mapped path matched a record. Otherwise another reward or group would be used silently.

        Raises:
            ArgumentError: if a path matched nothing; the message names the nearest existing path.
        """
        paths = {**self._paths(), **({"session": self.field_map.session} if self.field_map.session != "prefix" else {})}
        for name, path in paths.items():
            if self.records and path and name not in self.kind_counts and path not in self.paths:
                count = f"any of {self.records:,} records" if self.records > 1 else "the record"
                raise ArgumentError(
                    f"TG-DATA-013: map.{name} {path} matches nothing in {count}. "
                    f"{nearest(path, list(self.paths)[:MOST_PATHS])}"
                )

    def _reward(self, value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, Mapping):
            rewards = {str(name): json_path.reward_value(reward_value) for name, reward_value in value.items()}
            if bad_names := [
                name for name, reward_value in rewards.items() if reward_value is None and value[name] is not None
            ]:
                raise _unfit(
                    "reward", f"{path}.{bad_names[0]}", value[bad_names[0]], "a number, a boolean or a number as text"
                )
            self.names.update(rewards)
            for name, reward_value in rewards.items():
                self._word(value[name], reward_value)
            self._bound(*(reward_value for reward_value in rewards.values() if reward_value is not None))
            return {"rewards": rewards}
        reward = json_path.reward_value(value)
        self._word(value, reward)
        if reward is None or math.isinf(reward):
            accepted = "a number, a boolean, either as text, a word such as pass or down, or an object of these"
            raise _unfit("reward", path, value, accepted)
        self._bound(reward)
        return {"reward": reward}

    def _word(self, value: Any, reward: float | None) -> None:
        """Store the number of a word."""
        if isinstance(value, str) and reward is not None and json_path.number(value) is None:
            self.word_rewards[value[:40]] = reward

    def _bound(self, *rewards: float) -> None:
        self.low, self.high = min(self.low, *rewards, math.inf), max(self.high, *rewards, -math.inf)

    def lines(self) -> list[str]:
        """Return the values found at each path, as lines for a terminal."""
        lines = []
        for name, path in self._paths().items():
            kinds = self.kind_counts.get(name, Counter())
            values = ", ".join(f"{kind} in {count:,}" for kind, count in kinds.most_common()) or "nothing"
            span = f", {self.low:g} to {self.high:g}" if name == "reward" and self.low <= self.high else ""
            names = f", named {', '.join(sorted(self.names)[:8])}" if name == "reward" and self.names else ""
            words = ", ".join(f"{word!r} is {value:g}" for word, value in list(self.word_rewards.items())[:8])
            words = f", {words}" if name == "reward" and words else ""
            lines.append(f"map      {name} is {path}: {values} of {self.records:,} records{span}{names}{words}")
        return lines


def distinct_rewards(names: Sequence[str], values: NDArray[np.floating]) -> list[str]:
    """Return the names of rewards that any trace has, without copies of the total `reward`.

    Args:
        names: K names.
        values: [R, K], NaN if a trace lacks the reward.

    >>> distinct_rewards(["reward", "tone", "right"], np.array([[1.0, 0.5, 1.0], [0.0, np.nan, 0.0]]))
    ['reward', 'tone']
    """
    columns = dict(zip(names, values.T, strict=True))
    total = columns.get("reward")
    return [
        name
        for name, column in columns.items()
        if np.isfinite(column).any()
        and (name == "reward" or total is None or not np.array_equal(column, total, equal_nan=True))
    ]


def describe_reward_choice(names: Sequence[str], selected: Sequence[str] = ()) -> list[str]:
    """Return a line that names the reward used for training, the reason, and the flag to use another one.

    Empty if there is only one reward, or none of them is the default.

    >>> describe_reward_choice(["reward", "tone"])
    ['reward   trained on is "reward", the total of each record, not "tone": --data.reward tone chooses that']
    """
    if len(names) < 2 or not (selected or "reward" in names):
        return []
    reason = "as --data.reward says" if selected else "the total of each record"
    chosen = tuple(selected) or ("reward",)
    if not (others := [name for name in names if name not in chosen]):
        return []
    other_names = ", ".join(f'"{name}"' for name in others[:8])
    flag = shlex.join(["--data.reward", join_list(others[:1])])
    return [f'reward   trained on is "{join_list(chosen)}", {reason}, not {other_names}: {flag} chooses that']


def append_fields(raw: bytes, header: Mapping[str, Any]) -> bytes:
    """Append fields to the JSON of a record. They override earlier fields of the same name.

    >>> append_fields(b'{"reward": "0.5"}', {"reward": 0.5})
    b'{"reward": "0.5", "reward": 0.5}'
    """
    if not header:
        return raw
    body = raw.rstrip()
    tail = json.dumps(dict(header), ensure_ascii=False).encode("utf-8", "backslashreplace")[1:]
    head = body[:-1].rstrip()
    return head + (b"" if head.endswith(b"{") else b", ") + tail


PROMPTS = ("prompt", "input", "question", "query", "instruction")
"""Fields of a record with the text of its prompt, used if the trace has neither messages nor ids of a prompt."""


def prompt_group(trace: Trace) -> str | None:
    """Return a hash of the messages, ids or text before the first sampled turn of a trace; None if there are none.

    Ids, times and other metadata of messages do not count.
    """
    if not trace.generations:
        return None
    first = trace.generations[0]
    if messages := [trace.pool[index] for index in first.context]:
        prompt = chat.prompt_key(messages)
    elif first.prompt_token_ids is not None:
        prompt = first.prompt_token_ids.tobytes()
    else:
        record = parse_record(trace.record)
        text = next((record[key] for key in PROMPTS if record.get(key)), None) if isinstance(record, dict) else None
        if text is None:
            return None
        prompt = json.dumps(text, sort_keys=True).encode()
    return f"prompt-{hashlib.sha256(prompt).hexdigest()[:16]}"


def parse_record(raw: bytes) -> Any:
    """Parse a record. None if it is not JSON: the reader then reports the error.

    LangSmith's bulk export stores the objects of a run as JSON strings; these are parsed too.

    >>> parse_record(b'{"run_type": "llm", "inputs": "{}", "name": "{x"}')
    {'run_type': 'llm', 'inputs': {}, 'name': '{x'}
    """
    try:
        record = parse_json(raw)
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict) and isinstance(record.get("run_type"), str):
        return {key: json_path.parse_json_string(value) for key, value in record.items()}
    return record


def _name(value: Any) -> str | None:
    is_name = isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != ""
    return str(value) if is_name else None


def _temperature(value: Any) -> float | None:
    temperature = None if isinstance(value, bool) else json_path.number(value)
    return temperature if temperature is not None and 0 <= temperature < math.inf else None


def _sampling(value: Any, path: str) -> dict[str, Any]:
    """Return the sampling options of an object or of its JSON string."""
    if not isinstance(options := json_path.parse_json_string(value), Mapping):
        raise _unfit("sampling", path, value, "an object with temperature, top_p, top_k, ...")
    values = chat.pick(options, chat.SAMPLING)
    for name in ("temperature", "top_p"):
        if name not in values:
            continue
        if (number := _temperature(values[name])) is None:
            raise _unfit("sampling", f"{path}.{name}", values[name], "numbers from 0 as temperature and top_p")
        values[name] = number
    return values


_FIELDS = {
    "group": ("group", _name, "a text or a number"),
    "id": ("id", _name, "a text or a number"),
    "temperature": ("temperature", _temperature, "a number from 0"),
    "version": ("policy_version", json_path.parse_version, "a whole number from 0, or text such as v7"),
    "logprob_kind": (
        "logprob_kind",
        lambda value: value if value in LOGPROB_KINDS else None,
        "raw, processed or unknown",
    ),
}
"""For each field of a `FieldMap` except the reward: (field of the trace, converter, accepted values for the error)."""


def _field(name: str, value: Any, path: str) -> dict[str, Any]:
    trace_field, convert, accepted = _FIELDS[name]
    if (converted := convert(value)) is None:
        raise _unfit(name, path, value, accepted)
    return {trace_field: converted}


def _unfit(field: str, path: str, value: Any, accepted: str) -> BadValueError:
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:60]}..."
    problem, fix = (
        f"{path} is {json_path.describe_type(value)}: {text}",
        "Name another field, or leave such records out",
    )
    return BadValueError((problem, f"map.{field} must name {accepted}", f'{fix}: on_error="skip"'))
