"""Find lists of token ids, logprobs and loss masks in records, and the flags that read them.

A list of numbers is found under any name, in the metadata of messages, in parallel lists and in JSON strings. It is a
candidate by its values (logprobs are fractions of at most 0, ids are whole numbers, masks are 0 and 1) and by its
lengths, which must equal those of the ids in every record. It is reported only if reading a few records with its flags
succeeds and gives turns logprobs or ids that they did not have.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import NoneType
from typing import Any

from tracegrad.config import FieldMap
from tracegrad.data import json_path
from tracegrad.data.reader import stream
from tracegrad.errors import TracegradError

MOST_RECORDS, MOST_NODES, MOST_NUMBERS, TRIED = 200, 8192, 4096, 16
"""Most records, most nodes of one record, most numbers of one list that are searched; records read with the flags."""
MOST_CANDIDATES, MOST_SETS = 32, 64
"""Most lists of one kind, and most sets of them, that are read to see whether they belong together."""
_POSITIVE = 1e-3  # Nats. Rounding can give a certain token a logprob this far above 0.
TEMPERATURE = re.compile(r"(?:^|[._-])(?:sampling_?)?temp(?:erature)?$", re.I)
"""Names of fields with a sampling temperature."""
_LOGPROBS = re.compile(r"log_?p|(^|[._])lps?$|log_?prob|nll", re.I)
_OTHER_MODEL = re.compile(r"ref|old|teacher|critic|base|proxy|prompt", re.I)
_IDS = re.compile(r"tok|(^|[._])ids?$|_ids?$", re.I)
_PROMPT = re.compile(r"prompt|input|context|query|question", re.I)
_MASK = re.compile(r"loss|train|sampled|action|response|completion|assistant|generat", re.I)
_PADDING = re.compile(r"atten|attn|pad", re.I)
_READ_AS_PROMPT = ("prompt_ids", "prompt_token_ids")


def number_lists(record: Any) -> dict[str, list[list[Any]]]:
    """Return the lists of numbers in a record by path. A list of logprob entries counts as the list of their numbers.

    >>> number_lists({"turns": [{"lp": [-0.5]}, {"lp": [-0.1, -0.2]}], "ids": [[1], [2, 3]]})
    {'turns.*.lp': [[-0.5], [-0.1, -0.2]], 'ids': [[1], [2, 3]]}
    """
    result: dict[str, list[list[Any]]] = {}
    _add_lists(record, "", 0, MOST_NODES, result)
    return result


_LEAVES = frozenset((int, float, bool, NoneType))
"""Types of most values, which contain no list."""


def _add_lists(value: Any, path: str, depth: int, nodes: int, result: dict[str, list[list[Any]]]) -> int:
    """Add the lists of numbers in a value to `result`, and return how many of `nodes` more nodes may be searched."""
    nodes -= 1
    if nodes <= 0 or depth > json_path.DEEPEST:
        return nodes
    value = json_path.parse_json_string(value) if path else value
    if isinstance(value, (dict, Mapping)):
        prefix, named = f"{path}." if path else "", value.items()
    elif isinstance(value, list) and value:
        types = {*map(type, value)} - {NoneType}
        numbers = value if _are(types, int, float) else _entry_numbers(value, types)
        if types and numbers is not None:
            result.setdefault(path, []).append(numbers)
            return nodes - 1
        key = "" if _are(types, list, str) else "*"
        prefix = f"{path}." if path and key else path
        named = ((key, item) for item in value if item is not None)
    else:
        return nodes
    for key, item in named:
        if nodes <= 0:
            break
        if type(item) in _LEAVES or (type(item) is str and item[:1] not in ("{", "[")):
            nodes -= 1
        else:
            nodes = _add_lists(item, f"{prefix}{key}", depth + 1, nodes, result)
    return nodes


def _are(types: Iterable[type], *classes: type) -> bool:
    return all(issubclass(each, classes) for each in types)


def _entry_numbers(entries: list[Any], types: Iterable[type]) -> list[Any] | None:
    """Return the logprobs of a list of logprob entries, without nulls; None for other lists."""
    if not _are(types, Mapping):
        return None
    numbers = []
    for entry in entries:
        if entry is not None:
            if not isinstance(number := entry.get("logprob"), (int, float)):
                return None
            numbers.append(number)
    return numbers


@dataclass
class _Lists:
    """Statistics of the lists of numbers at one path.

    Args:
        lengths: length of each list, by the index of its record; for masks also (ones, index of the first one).
    """

    lengths: dict[int, list[int]] = field(default_factory=dict)
    ones: dict[int, tuple[int, int]] = field(default_factory=dict)
    low: float = float("inf")
    high: float = float("-inf")
    has_fraction: bool = False
    is_count: bool = True

    def add(self, record: int, numbers: list[Any]) -> None:
        """Add a list."""
        self.lengths.setdefault(record, []).append(len(numbers))
        known = [item for item in numbers[:MOST_NUMBERS] if item is not None and item == item]
        if known:
            self.low, self.high = min(self.low, *known), max(self.high, *known)
        if not self.has_fraction:
            self.has_fraction = any(isinstance(item, float) and not item.is_integer() for item in known)
        if self.is_count:
            self.is_count = known in ([*range(len(known))], [*range(1, len(known) + 1)])
        if self.is_mask:
            sampled = [bool(item) for item in numbers]
            self.ones[record] = sum(sampled), sampled.index(True) if True in sampled else len(sampled)

    @property
    def is_mask(self) -> bool:
        return self.low >= 0 and self.high <= 1 and not self.has_fraction

    @property
    def are_logprobs(self) -> bool:
        return self.has_fraction and self.low < 0 and self.high <= _POSITIVE

    @property
    def are_ids(self) -> bool:
        is_range = self.is_count and max(map(max, self.lengths.values())) > 1
        return not self.has_fraction and self.low >= 0 and 1 < self.high < 1 << 31 and not is_range

    @property
    def count(self) -> int:
        return sum(map(len, self.lengths.values()))

    def equals(self, other: "_Lists") -> bool:
        """Return whether the other path has a list of the same length for each list here."""
        return all(other.lengths.get(record) == lengths for record, lengths in self.lengths.items())

    def fits(self, mask: "_Lists") -> bool:
        """Return whether there is one number for each token of the mask, each sampled one, or each from the first."""
        return all(
            record in mask.ones
            and len(lengths) == 1
            and mask.lengths[record] != []
            and lengths[0]
            in (mask.lengths[record][0], mask.ones[record][0], mask.lengths[record][0] - mask.ones[record][1])
            for record, lengths in self.lengths.items()
        )


@dataclass(frozen=True)
class TokenLists:
    """A set of lists that belong together.

    Args:
        paths: path by field of `FieldMap`.
        evidence: the evidence, in words.
        records: number of records that have them.
    """

    paths: Mapping[str, str]
    evidence: str
    records: int


class TokenColumns:
    """Lists of numbers in the first records."""

    def __init__(self) -> None:
        self._paths: dict[str, _Lists] = {}
        self._temperatures: dict[str, set[int]] = {}
        self._samples: list[tuple[int, Any]] = []
        self.records = 0

    def add(self, record: Any, fields: Mapping[str, Any]) -> None:
        """Add a record.

        Args:
            record: the record of the file.
            fields: its fields, and those of the record that was converted from it.
        """
        if self.records >= MOST_RECORDS:
            return
        for path, lists in number_lists(fields).items():
            for numbers in lists:
                self._paths.setdefault(path, _Lists()).add(self.records, numbers)
        for path in _temperatures(fields):
            self._temperatures.setdefault(path, set()).add(self.records)
        self._samples.append((self.records, record))
        self.records += 1

    def find(self, field_map: FieldMap, names: Sequence[str]) -> list[TokenLists]:
        """Return the sets of lists that give turns logprobs, or ids, that they do not have; the best first.

        Args:
            field_map: fields that are set.
            names: "logprobs", "token_ids" and "sampling" (temperatures of turns), as far as they are wanted.
        """
        result = []
        if "logprobs" in names:
            paths = [path for path, lists in self._paths.items() if lists.are_logprobs]
            paths.sort(key=lambda path: (bool(_OTHER_MODEL.search(path)), not _LOGPROBS.search(path), path.count(".")))
            for path in self._distinct(paths)[:8]:
                result += islice(self._checked("logprobs", path, self._with_logprobs(path), field_map), 1)
        if "token_ids" in names and not any("token_ids" in each.paths for each in result):
            for path in self._ids()[:MOST_CANDIDATES]:
                if _IDS.search(path) and not _PROMPT.search(path):
                    result += self._checked("token_ids", path, [{"token_ids": path}], field_map)
        if "sampling" in names:
            for path in islice(self._temperatures, MOST_CANDIDATES):
                result += self._checked("temperature", path, [{"temperature": path}], field_map)
        return result

    def _distinct(self, paths: list[str]) -> list[str]:
        """Return paths without those of the same lists in the records that were converted from the file's records."""
        own = {path for path in paths if any(_is_read(json_path.collect, record, path) for _, record in self._samples)}
        repeated = [path for path in paths if any(self._paths[path] == self._paths[other] for other in own)]
        return [path for path in paths if path in own or path not in repeated]

    def sampling_is_readable(self, path: str, field_map: FieldMap) -> bool:
        """Return whether records that have a value at `path` can be read with it as that of their sampling options."""
        records = [record for _, record in self._samples if _is_read(json_path.get, record, path)][:TRIED]
        return bool(_turns(records, {**field_map.paths(), "sampling": path}))

    def _ids(self) -> list[str]:
        paths = [path for path, lists in self._paths.items() if lists.are_ids]
        return sorted(paths, key=lambda path: (not _IDS.search(path), bool(_PROMPT.search(path)), path.count(".")))

    def _with_logprobs(self, path: str) -> Iterator[dict[str, str]]:
        """Yield the sets of lists to which a list of logprobs may belong: with ids and a mask, with ids, alone."""
        yield from islice(self._with_ids(path), MOST_SETS)
        yield {"logprobs": path}

    def _with_ids(self, path: str) -> Iterator[dict[str, str]]:
        lists, ids = self._paths[path], self._ids()[:MOST_CANDIDATES]
        masks = [name for name, each in self._paths.items() if each.is_mask and not _PADDING.search(name)]
        masks.sort(key=lambda name: not _MASK.search(name))
        for name in ids:
            prompts = [
                other for other in ids if other != name and _PROMPT.search(other) and other not in _READ_AS_PROMPT
            ]
            prompt = {"prompt_token_ids": prompts[0]} if prompts else {}
            for mask in masks[:MOST_CANDIDATES]:
                if self._paths[name].equals(self._paths[mask]) and lists.fits(self._paths[mask]):
                    yield {"logprobs": path, "token_ids": name, "loss_mask": mask, **prompt}
            if lists.equals(self._paths[name]):
                yield {"logprobs": path, "token_ids": name}
                yield {"logprobs": path, "token_ids": name, **prompt}

    def _checked(
        self, name: str, path: str, choices: Iterable[dict[str, str]], field_map: FieldMap
    ) -> Iterator[TokenLists]:
        """Yield the sets of paths that can be read, and that give turns a value of `name` that they do not have.

        Args:
            name: the field of `FieldMap` whose values are counted.
            path: its path in each of the sets.
            choices: sets of paths.
            field_map: fields that are set.
        """
        indices = self._temperatures[path] if name == "temperature" else self._paths[path].lengths.keys()
        records = [record for index, record in self._samples if index in indices][:TRIED]
        before: int | None = None  # Number of values without the paths, counted only if it is needed.
        for paths in choices:
            after = _turns(records, {**field_map.paths(), **paths})
            if after is None or not all(map(_is_complete, after)):
                continue
            before = _count(_turns(records, field_map.paths()), name) if before is None else before
            if _count(after, name) > before:
                yield TokenLists(paths, self._evidence(name, paths, after, len(indices)), len(indices))

    def _evidence(self, name: str, paths: Mapping[str, str], turns: list[Any], count: int) -> str:
        text = f"{count:,} of {self.records:,} records have "
        if name == "temperature":
            return f'{text}temperatures of turns "{paths[name]}"'
        lists = self._paths[paths[name]]
        kind = "numbers" if name == "logprobs" else "whole numbers"
        text += f'lists of {kind} "{paths[name]}" ({lists.count:,} lists, {lists.low:.3g} to {lists.high:.3g})'
        if "loss_mask" in paths:
            return f'{text}, one for each sampled token of the ids "{paths["token_ids"]}" with a mask'
        if name == "logprobs" and "token_ids" in paths:
            return f'{text}, as long as the ids "{paths["token_ids"]}"'
        has_ids = name == "logprobs" and all(turn.token_ids is not None for turn in turns)
        return f"{text}, as long as the recorded ids" if has_ids else text


def _temperatures(record: Mapping[str, Any]) -> set[str]:
    """Return the paths of temperatures in the objects of messages and calls, with `*` for their index."""
    items = [(key, item) for key in ("messages", "calls") for item in _items(record, key)]
    return {
        f"{key}.*.{path}"
        for key, item in islice(items, MOST_NODES)
        for path, value in islice(json_path.leaves(item), MOST_NODES)
        if TEMPERATURE.search(path) and json_path.number(value) is not None
    }


def _is_read(by: Callable[[Any, str], Any], record: Any, path: str) -> bool:
    """Return whether a function of `json_path` finds a path in a record."""
    try:
        by(record, path)
    except json_path.Missing:
        return False
    return True


def _items(record: Mapping[str, Any], key: str) -> list[Any]:
    items = record.get(key)
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []


def _turns(records: list[Any], paths: Mapping[str, str]) -> list[Any] | None:
    """Return the sampled turns of records that are read with a field map; None if one cannot be read."""
    unjoined = {name: path for name, path in paths.items() if name not in ("session", "order", "group")}
    try:
        return [turn for part in stream(records, map=unjoined) for trace in part for turn in trace.generations]
    except TracegradError:
        return None


def _count(turns: list[Any] | None, name: str) -> int:
    """Return the number of turns that have a value; -1 if the turns cannot be read."""
    return -1 if turns is None else sum(getattr(turn, name) is not None for turn in turns)


def _is_complete(turn: Any) -> bool:
    """Return whether the ids and logprobs of a turn, if both are recorded, have the same length."""
    return turn.token_ids is None or turn.logprobs is None or len(turn.token_ids) == len(turn.logprobs)


def list_as_long_as(record: Any, lengths: Sequence[int] | None) -> str | None:
    """Return the path of a list that may contain logprobs and has one of these lengths, if they are given."""
    for path, lists in number_lists(record).items():
        for numbers in lists:
            values = _Lists()
            values.add(0, numbers)
            if (lengths is None or len(numbers) in lengths) and values.are_logprobs:
                return path
    return None
