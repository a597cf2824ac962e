"""A record with the fields that a `Map` finds in it, added behind what it says: its own bytes stay as they are.

What each path gave is counted, so that the user is told.
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

from tracegrad.config import Map, nearest, split_names
from tracegrad.data import chat, json_path
from tracegrad.data.codes import LOGPROB_KINDS
from tracegrad.data.sources import Made
from tracegrad.data.trace import Trace, of_json
from tracegrad.errors import ArgumentError

__all__ = ["Made", "Mapper", "Unfit", "add", "loads", "prompt_of", "which_reward"]


MOST_LOOKED, MOST_PATHS = 64, 2000
"""Records, and paths in them, among which the nearest to a path that matches nothing is looked for."""
MOST_BYTES = 64 << 20
"""Bytes that may be made of one record, or of one conversation, beside what it has itself."""


class Unfit(Exception):
    """A value that is none of what its field takes; its argument is a `sources.Refusal`."""


@dataclass
class Mapper:
    """Adds what `told` names to records.

    `seen` counts, for each field, the kinds of values; `low` and `high` bound the rewards.
    """

    told: Map
    seen: dict[str, Counter[str]] = field(default_factory=dict)
    records: int = 0
    low: float = math.inf
    high: float = -math.inf
    names: set[str] = field(default_factory=set)
    words: dict[str, float] = field(default_factory=dict)
    paths: dict[str, None] = field(default_factory=dict)
    """Those of the first records, in their order."""

    def _paths(self) -> dict[str, str]:
        """What is told of single records."""
        told = {name: path for name, path in self.told.told().items() if name not in ("session", "order")}
        return {name: path for name, path in told.items() if (name, path) != ("group", "prompt")}

    def header(self, record: Any) -> dict[str, Any]:
        """The fields of a trace that a record gives by its paths.

        Raises:
            Unfit: for a value that is none.
        """
        self.records += 1
        self._look(record)
        found: dict[str, Any] = {}
        for name, path in self._paths().items():
            if (value := chat.within(record, path)) is None:
                continue
            self.seen.setdefault(name, Counter())[json_path.kind(value)] += 1
            if name == "sampling":
                found = {**_sampling(value, path), **found}
            else:
                found |= self._reward(value, path) if name == "reward" else _field(name, value, path)
        return found

    def _look(self, record: Any) -> None:
        """Notes which paths there are, and whether a session has its key."""
        session = self.told.session
        if session not in ("", "prefix") and "session" not in self.seen:
            value = chat.within(record, session)
            self.seen |= {} if value is None else {"session": Counter({json_path.kind(value): 1})}
        if self.records > MOST_LOOKED or len(self.paths) >= MOST_PATHS:
            return
        self.paths |= dict.fromkeys(map(str, record)) if isinstance(record, Mapping) else {}
        for path, _ in itertools.islice(json_path.leaves(record), MOST_PATHS):
            keys = path.split(".")
            self.paths |= dict.fromkeys(".".join(keys[:count]) for count in range(1, len(keys) + 1))

    def check(self) -> None:
        """Refuses paths that match nothing in any record: another reward or group would count, and nobody would see it.

        Raises:
            ArgumentError: with the nearest path that there is.
        """
        told = {**self._paths(), **({"session": self.told.session} if self.told.session != "prefix" else {})}
        for name, path in told.items():
            if self.records and path and name not in self.seen and path not in self.paths:
                count = f"any of {self.records:,} records" if self.records > 1 else "the record"
                raise ArgumentError(
                    f"--map.{name} {path} matches nothing in {count}. {nearest(path, list(self.paths)[:MOST_PATHS])}"
                )

    def _reward(self, value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, Mapping):
            rewards = {str(name): json_path.verdict(each) for name, each in value.items()}
            if odd := [name for name, each in rewards.items() if each is None and value[name] is not None]:
                raise _unfit("reward", f"{path}.{odd[0]}", value[odd[0]], "a number, a boolean or a number as text")
            self.names.update(rewards)
            for name, each in rewards.items():
                self._word(value[name], each)
            self._bound(*(each for each in rewards.values() if each is not None))
            return {"rewards": rewards}
        reward = json_path.verdict(value)
        self._word(value, reward)
        if reward is None or math.isinf(reward):
            wanted = "a number, a boolean, either as text, a word such as pass or down, or an object of these"
            raise _unfit("reward", path, value, wanted)
        self._bound(reward)
        return {"reward": reward}

    def _word(self, value: Any, reward: float | None) -> None:
        """Keeps which number a word is."""
        if isinstance(value, str) and reward is not None and json_path.number(value) is None:
            self.words[value[:40]] = reward

    def _bound(self, *rewards: float) -> None:
        self.low, self.high = min(self.low, *rewards, math.inf), max(self.high, *rewards, -math.inf)

    def lines(self) -> list[str]:
        """What each path gave, for a terminal."""
        out = []
        for name, path in self._paths().items():
            kinds = self.seen.get(name, Counter())
            what = ", ".join(f"{kind} in {count:,}" for kind, count in kinds.most_common()) or "nothing"
            span = f", {self.low:g} to {self.high:g}" if name == "reward" and self.low <= self.high else ""
            several = f", named {', '.join(sorted(self.names)[:8])}" if name == "reward" and self.names else ""
            words = ", ".join(f"{word!r} is {value:g}" for word, value in list(self.words.items())[:8])
            words = f", {words}" if name == "reward" and words else ""
            out.append(f"map      {name} is {path}: {what} of {self.records:,} records{span}{several}{words}")
        return out


def which_reward(names: Sequence[str], told: str = "") -> list[str]:
    """The line that says which of several rewards is trained on, why, and how another is chosen.

    >>> which_reward(["reward", "tone"])
    ['reward   trained on is "reward", the total of each record, not "tone": --data.reward tone chooses that']
    """
    if len(names) < 2 or not (told or "reward" in names):
        return []
    chosen, why = (told, "as --data.reward says") if told else ("reward", "the total of each record")
    if not (others := [name for name in names if name not in (chosen, *split_names(chosen))]):
        return []
    shown = ", ".join(f'"{name}"' for name in others[:8])
    flag = shlex.join(["--data.reward", others[0]])
    return [f'reward   trained on is "{chosen}", {why}, not {shown}: {flag} chooses that']


def add(raw: bytes, header: Mapping[str, Any]) -> bytes:
    """A record's bytes with further fields at its end, where they count over earlier ones of the same name.

    >>> add(b'{"reward": "0.5"}', {"reward": 0.5})
    b'{"reward": "0.5", "reward": 0.5}'
    """
    if not header:
        return raw
    body = raw.rstrip()
    tail = json.dumps(dict(header), ensure_ascii=False).encode("utf-8", "backslashreplace")[1:]
    head = body[:-1].rstrip()
    return head + (b"" if head.endswith(b"{") else b", ") + tail


PROMPTS = ("prompt", "input", "question", "query", "instruction")
"""Where a record holds the text of a prompt that its trace has neither as messages nor as ids."""


def prompt_of(trace: Trace) -> str | None:
    """A name that traces share whose first sampled turn came after the same messages, ids or text; None without."""
    if not trace.generations:
        return None
    first = trace.generations[0]
    if messages := [trace.pool[index] for index in first.context]:
        said = json.dumps(messages, sort_keys=True).encode()
    elif first.prompt_token_ids is not None:
        said = first.prompt_token_ids.tobytes()
    else:
        record = loads(trace.record)
        text = next((record[key] for key in PROMPTS if record.get(key)), None) if isinstance(record, dict) else None
        if text is None:
            return None
        said = json.dumps(text, sort_keys=True).encode()
    return f"prompt-{hashlib.sha256(said).hexdigest()[:16]}"


def loads(raw: bytes) -> Any:
    """A record as Python has it, or None where it is no JSON: then the reader says what is wrong.

    A run of LangSmith's bulk export keeps its objects as JSON text; they are opened.

    >>> loads(b'{"run_type": "llm", "inputs": "{}", "name": "{x"}')
    {'run_type': 'llm', 'inputs': {}, 'name': '{x'}
    """
    try:
        record = of_json(raw)
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict) and isinstance(record.get("run_type"), str):
        return {key: json_path.opened(value) for key, value in record.items()}
    return record


def _name(value: Any) -> str | None:
    is_one = isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != ""
    return str(value) if is_one else None


def _temperature(value: Any) -> float | None:
    found = None if isinstance(value, bool) else json_path.number(value)
    return found if found is not None and 0 <= found < math.inf else None


def _sampling(value: Any, path: str) -> dict[str, Any]:
    """The sampling options of an object, also of one as JSON text."""
    if not isinstance(options := json_path.opened(value), Mapping):
        raise _unfit("sampling", path, value, "an object with temperature, top_p, top_k, ...")
    found = chat.told(options, chat.SAMPLING)
    for name in ("temperature", "top_p"):
        if name not in found:
            continue
        if (number := _temperature(found[name])) is None:
            raise _unfit("sampling", f"{path}.{name}", found[name], "numbers from 0 as temperature and top_p")
        found[name] = number
    return found


_FIELDS = {
    "group": ("group", _name, "a text or a number"),
    "id": ("id", _name, "a text or a number"),
    "temperature": ("temperature", _temperature, "a number from 0"),
    "version": ("policy_version", json_path.version, "a whole number from 0, or text such as v7"),
    "logprob_kind": (
        "logprob_kind",
        lambda value: value if value in LOGPROB_KINDS else None,
        "raw, processed or unknown",
    ),
}
"""Of each field of a `Map` but the reward: its name in a trace, what reads its value, and what it takes."""


def _field(name: str, value: Any, path: str) -> dict[str, Any]:
    of_trace, read, wanted = _FIELDS[name]
    if (found := read(value)) is None:
        raise _unfit(name, path, value, wanted)
    return {of_trace: found}


def _unfit(field: str, path: str, value: Any, wanted: str) -> Unfit:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    found, cure = f"{path} is {json_path.kind(value)}: {shown}", "Name another field, or leave such records out"
    return Unfit((found, f"--map.{field} takes {wanted}", f"{cure}: --on-error skip"))
