"""How the calls of the first records hang together: which go on an earlier one, and which prompts come again.

`candidates` makes suggestions of it.
"""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tracegrad.errors import TracegradError
from tracegrad.inputs import chat, paths
from tracegrad.inputs.calls import calls_of, prefixes
from tracegrad.inputs.mapping import prompt_of
from tracegrad.trace import Trace

SESSION = re.compile(r"session|conversation|thread|dialog|chat_?id|trace_?id|rollout|episode|run_?id|parent", re.I)
_INSIDE = ("messages", "request", "response", "choices", "calls", "tools", "logprobs", "usage", "delta", "generation")


def counted(value: Any) -> str:
    """A value as it is counted: its text, or the hash of a long one."""
    text = str(value)
    return text if len(text) <= 200 else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def outside(part: dict[str, Any]) -> dict[str, Any]:
    """A record without what was said in it."""
    return chat.without(part, *_INSIDE)


class Calls:
    """How the calls of the first records hang together."""

    def __init__(self, groups: bool, sessions: bool) -> None:
        self.calls = self._joined = self._whole = self._whole_joined = 0
        self.prompts: Counter[bytes] = Counter()
        self._groups, self._sessions = groups, sessions
        self._ends: set[bytes] = set()
        self._of_keys: dict[str, dict[str, dict[bytes, int]]] = {}
        self._whole_of_keys: dict[str, set[str]] = {}

    @property
    def joined(self) -> int:
        """How many records go on an earlier one.

        A record of a whole conversation may begin like another by chance. Such records count only where at least half
        of those that hold an earlier answer go on another record, as they do where calls were logged one by one.
        """
        return self._joined + (self._whole_joined if 2 * self._whole_joined >= self._whole else 0)

    def add(self, record: Any, made: Sequence[Any]) -> None:
        """Looks at the calls of what was made of one record; several answers have one prompt."""
        prompts = [self._add(each) for each in made]
        if self._groups:
            untold = [one for one, told in zip(made, prompts, strict=True) if told is None]
            prompts += [self._prompt(one, times) for one, times in _by_prompt(untold)]
        prompt = next((each for each in prompts if each), None)
        if self._sessions:
            whole = any(calls_of(each) is None for each in made)
            outer = {**(record if isinstance(record, dict) else {}), **made[0]}
            for path, value in itertools.islice(paths.leaves(outside(outer)), paths.MOST_WALKED):
                if value is not None and SESSION.search(path.rpartition(".")[2]):
                    self._seen(path, counted(value), prompt, whole)

    def _seen(self, path: str, value: str, prompt: bytes | None, whole: bool) -> None:
        """Counts a value of a key: the prompts that it has in their order, and whether it is of what is no call."""
        prompts = self._of_keys.setdefault(path, {}).setdefault(value, {})
        if prompt:
            prompts[prompt] = prompts.get(prompt, 0) + 1
        if whole:
            self._whole_of_keys.setdefault(path, set()).add(value)

    def names_prompts(self, path: str) -> bool:
        """Whether each value of a key has one prompt: what shares it was drawn anew, and is no conversation."""
        seen = {value: prompts for value, prompts in self._of_keys.get(path, {}).items() if prompts}
        return bool(seen) and not self.joined and all(len(prompts) == 1 for prompts in seen.values())

    def joins(self, path: str, times: Mapping[str, int]) -> bool:
        """Whether what shares a value of a key are single calls, as no other records are joined."""
        return not any(times.get(value, 0) > 1 for value in self._whole_of_keys.get(path, ()))

    def prompts_by(self, path: str) -> Counter[bytes]:
        """How many conversations begin with each prompt, where those of one value of a key are one."""
        return Counter(next(iter(prompts)) for prompts in self._of_keys.get(path, {}).values() if prompts)

    def _add(self, record: Any) -> bytes | None:
        """Looks at one; the prompt of a call that says its own, empty where it goes on another, else None."""
        if not (calls := calls_of(record)):
            return None
        before, _ = prefixes(calls[0])
        _, end = prefixes(calls[-1])
        self.calls += 1
        goes_on = any(each in self._ends for each in before)
        if "request" in record or "response" in record:
            self._joined += goes_on
        elif chat.has_answer(chat.table(calls[0].get("request")).get("messages")):
            self._whole += 1
            self._whole_joined += goes_on
        if end is not None:
            self._ends.add(end)
        if "request" not in record:
            return None
        if not before or goes_on:
            return b""
        self.prompts[before[-1]] += 1
        return before[-1]

    def _prompt(self, record: Any, times: int) -> bytes | None:
        """Looks at what came before the first sampled turn of a record that is no single call."""
        try:
            prompt = (prompt_of(Trace.from_dict(record)) or "").encode()
        except (TracegradError, IndexError):
            return None
        if prompt:
            self.prompts[prompt] += times
        return prompt


def _by_prompt(made: Sequence[Any]) -> list[tuple[Any, int]]:
    """One record of those that differ in their last message alone, as the answers to one prompt do, and how many."""
    if len(made) < 2:
        return [(each, 1) for each in made]
    alike: dict[Any, list[Any]] = {}
    for at, each in enumerate(made):
        talk = chat.table(each).get("messages")
        alike.setdefault(counted(talk[:-1]) if isinstance(talk, list) else at, []).append(each)
    return [(same[0], len(same)) for same in alike.values()]
