"""Score recorded traces with reward functions or a judge, group by group, with a cache of earlier scores.

Traces wait in a temporary file, so memory holds one line of index for each. Records keep their bytes; `reward` and
`rewards` are appended.
"""

import asyncio
import contextlib
import hashlib
import inspect
import json
import math
import os
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tracegrad import _core
from tracegrad.data.field_map import PROMPTS, add, loads
from tracegrad.data.trace import Line, Trace, Traces
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.rewards.functions import Rewards, columns_of, text_of
from tracegrad.rewards.judge import Judge
from tracegrad.storage import files
from tracegrad.storage.files import refuse_special
from tracegrad.user_code import Failure

__all__ = ["Judgement", "Rescored", "judged", "recorded"]


MOST_LINE = 1 << 24


class Cache:
    """Answers by their content; a line that is not whole, as after a kill, is passed over.

    Memory holds the keys and where their answers stand, not the answers.

    Args:
        path: the file; None keeps the answers in this object.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        if path is not None:
            files.check(path)
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            refuse_special(path)
            with path.open("rb") as lines:
                at = 0
                for line in iter(lambda: lines.readline(MOST_LINE), b""):
                    if (told := _entry(line)) is not None:
                        self._known[told[0]] = at
                    at += len(line)
        except OSError as error:
            raise ArgumentError(
                f"{path}: {error.strerror}. What was scored before is not known. Give another --cache."
            ) from error

    def get(self, key: str) -> Any:
        """The answer, None where there is none."""
        found = self._known.get(key)
        if self._path is None or found is None:
            return found
        try:
            with self._path.open("rb") as file:
                file.seek(found)
                told = _entry(file.readline(MOST_LINE))
        except OSError:
            return None
        return told[1] if told is not None and told[0] == key else None

    def put(self, key: str, value: Any) -> None:
        """Keeps an answer, on the disk at once."""
        if self._path is None:
            self._known[key] = value
            return
        line = json.dumps({"key": key, "value": value}) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with files.append(self._path) as file:
                # Behind a line that a kill has cut.
                if file.tell() and not _ends_whole(self._path):
                    file.write(b"\n")
                self._known[key] = file.tell()
                file.write(line.encode())
        except OSError as error:
            raise ArgumentError(
                f"{self._path}: {error.strerror}. What was scored would be scored again. Give another --cache."
            ) from error


def _entry(line: bytes) -> tuple[str, Any] | None:
    try:
        told = json.loads(line)
        return str(told["key"]), told["value"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def key_of(*parts: Any) -> str:
    """A name for what an answer is made of.

    >>> key_of("a", [1]) == key_of("a", [1]), key_of("a", [1]) == key_of("a", [2])
    (True, False)
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def source_of(function: Callable[..., Any]) -> list[str]:
    """What a function is: its name, and the text of the file that it stands in, as it may call what is beside it."""
    while hasattr(function, "func"):
        function = function.func  # type: ignore[attr-defined]
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    try:
        return [name, Path(inspect.getsourcefile(inspect.unwrap(function)) or "").read_text(encoding="utf-8")]
    except (OSError, TypeError, UnicodeDecodeError):
        return [name]


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Says of an error of the temporary file where it is and what helps."""
    try:
        yield
    except OSError as error:
        where = tempfile.tempdir or os.environ.get("TMPDIR") or "the folder of temporary files"
        raise TracegradError(
            f"{where}: {error.strerror}. What is scored is kept there meanwhile, as large as the traces. Make room, or "
            "set TMPDIR to another folder."
        ) from error


class Spool:
    """Traces on the disk, read one at a time.

    Args:
        parts: the traces, as `tracegrad.stream` gives them.

    >>> said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> with Spool([Traces.from_records([{"messages": said, "group": "g"}])]) as spool:
    ...     len(spool), spool.groups, spool[0].messages[1]["content"]
    (1, ['g'], '4')
    """

    def __init__(self, parts: Iterable[Traces]) -> None:
        self.groups: list[str | None] = []
        self._begins, self._lines, self._names = array("Q", [0]), list[Line](), array("L")
        self._files: list[str] = []
        with _telling():
            self._file = tempfile.TemporaryFile(prefix="tracegrad-score-")  # noqa: SIM115  closed by its owner
        try:
            for part in parts:
                self._add(part)
            with _telling():
                self._file.flush()
        except BaseException:
            # Closing writes what is held back, and the disk may be full; the descriptor is closed all the same.
            with contextlib.suppress(OSError):
                self._file.close()
            raise

    def _add(self, part: Traces) -> None:
        for index, group in enumerate(part.groups):
            record, (file, line) = part.core.record(index), part.core.location(index)
            with _telling():
                self._file.write(record)
            self._begins.append(self._begins[-1] + len(record))
            self._lines.append(line or 1)
            if not self._files or self._files[-1] != (file or "<records>"):
                self._files.append(file or "<records>")
            self._names.append(len(self._files) - 1)
            self.groups.append(None if group is None else sys.intern(group))

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> Trace:
        self._file.seek(self._begins[index])
        record = self._file.read(self._begins[index + 1] - self._begins[index])
        core, _ = _core.Traces.decode([record], self._files[self._names[index]], self._lines[index], "auto")
        return Trace(core, 0)

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


Told = Callable[[int, int], None]
MOST = sys.float_info.max
PART = 128
"""Traces that are written at once."""
_SAMPLED = ("token_ids", "prompt_token_ids", "logprobs", "tokens", "generation", "reward", "rewards")
_OF_RECORD = ("messages", "calls", "request", "response", "choices", "tools", "metadata", "text", *_SAMPLED)
"""Keys of a record that are no columns: what was said and sampled, and the rewards, which scoring writes itself."""


@dataclass
class Rescored:
    """Recorded traces with their scores.

    Args:
        source: what was scored.
        names: of what scored.
        rows: of each trace its reward, the weighted sum, and the scores by `names`; None for what is not known.
        groups, cached: how many there are, and of them answered from the cache.
        unscored: traces whose reward is not known: what cannot be scored has none, never 0.
        counts, failures: how many there are by "name: kind", and the first of each, with its group and file.
    """

    source: Traces | Spool
    names: tuple[str, ...]
    rows: dict[int, tuple[float | None, tuple[float | None, ...]]] = field(default_factory=dict, repr=False)
    groups: int = 0
    cached: int = 0
    unscored: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Failure] = field(default_factory=dict)

    @cached_property
    def traces(self) -> Traces:
        """All of them, in the order of `source`; `rewards` has the scores by name beside what was there."""
        return Traces(_core.Traces.concatenate([part.core for part in self.parts()]))

    def parts(self) -> Iterator[Traces]:
        """The same, so many at once."""
        for first in range(0, len(self.source), PART):
            indices = range(first, min(first + PART, len(self.source)))
            yield Traces(_core.Traces.concatenate([self._scored(index) for index in indices]))

    def _scored(self, index: int) -> _core.Traces:
        """A trace with its rewards behind its record."""
        trace, (total, values) = self.source[index], self.rows[index]
        file, line = trace.core.location(trace.index)
        own = {name: None if math.isnan(value) else value for name, value in trace.rewards.items()}
        before = {} if trace.reward is None or "recorded" in own else {"recorded": trace.reward}
        scores = dict(zip(self.names, values, strict=True))
        text = add(trace.record, {"reward": total, "rewards": {**own, **before, **scores}})
        return _core.Traces.decode([text], file or "<records>", line or 1, "auto")[0]


@dataclass
class Judgement(Rescored):
    """The same by a judge.

    Args:
        prompt_tokens, completion_tokens: of all its answers in this run, as its server counts them.
        agreement: share of pairs of one group that two orders put alike, ties aside; NaN where there is no such pair.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    agreement: float = math.nan

    def cost(self, per_million: tuple[float, float]) -> float:
        """What the tokens cost, by the prices of a million that are read and a million that are written."""
        return (self.prompt_tokens * per_million[0] + self.completion_tokens * per_million[1]) / 1e6


def recorded(
    traces: Traces | Spool,
    functions: Sequence[Callable[..., Any]] | Callable[..., Any],
    *,
    weights: Sequence[float] | None = None,
    cache: Path | None = None,
    texts: bool = False,
    seconds: float = 60.0,
    parallel: int = 4,
    told: Told | None = None,
) -> Rescored:
    """Scores recorded traces by reward functions in TRL's convention, a group at a time.

    Args:
        traces: what is scored, in memory or on the disk; those without a group are alone.
        functions: `(prompts, completions, **columns) -> list[float | None]`; columns are the keys of a record and
            of its `metadata`.
        weights: of the functions, 1 by default.
        cache: file of what was scored before; a group is scored again where it, a function's file or a weight changed.
        texts: give prompts and completions as texts, not as messages.
        seconds: time limit of one call.
        parallel: groups scored at once.
        told: called with groups done, and all.
    """
    functions = [functions] if callable(functions) else list(functions)
    asked = Rewards(functions, weights, seconds=seconds, processes=parallel)
    sources, known = [source_of(each) for each in functions], Cache(cache)
    groups = _groups(traces.groups)
    done = Rescored(traces, asked.names, groups=len(groups))

    async def one(members: list[int]) -> None:
        given = _given([traces[index] for index in members], texts)
        key = key_of("functions", sources, asked.weights.tolist(), given)
        answer = known.get(key)
        rows = _cached_rows(answer, done.names, len(members))
        if rows is None:
            found = await asked.score(given["prompts"], given["completions"], given["columns"])
            answer = [[found.row(at), _plain(found.total[at])] for at in range(len(members))]
            rows = [(total, tuple(values[name] for name in done.names)) for values, total in answer]
            for name, failure in found.failures.items():
                _note(done, f"{name}: {failure.kind}", failure, traces[members[0]])
            if not found.failed.any():
                known.put(key, answer)
        else:
            done.cached += 1
        done.rows.update(zip(members, rows, strict=True))

    try:
        asyncio.run(_all(one, groups, parallel, told))
    finally:
        asked.close()
    done.counts = asked.counts
    done.unscored = _unscored(done)
    return done


async def judged(
    traces: Traces | Spool,
    chat: Callable[..., Awaitable[Any]],
    *,
    model: str = "",
    rubric: str | None = None,
    votes: int = 2,
    name: str = "judge",
    cache: Path | None = None,
    parallel: int = 8,
    sampling: Mapping[str, Any] | None = None,
    told: Told | None = None,
    **options: Any,
) -> Judgement:
    """Scores recorded traces by a judge, within each group; each vote shows the group in another order.

    Args:
        chat: as for `Judge`.
        model: of the judge: another one is asked anew.
        rubric, sampling, options: as for `Judge`.
        votes: orders of each group.
        name: of the reward.
        cache: as for `recorded`.
    """
    groups, known = _groups(traces.groups), Cache(cache)
    done = Judgement(traces, (name,), groups=len(groups))
    pairs = [0, 0]

    async def counted(body: Mapping[str, Any], **more: Any) -> Any:
        answer = await chat(body, **more)
        usage = answer.get("usage") if isinstance(answer, Mapping) else None
        if isinstance(usage, Mapping):
            done.prompt_tokens += _whole(usage.get("prompt_tokens"))
            done.completion_tokens += _whole(usage.get("completion_tokens"))
        return answer

    given = {"votes": votes, "sampling": sampling, **({} if rubric is None else {"rubric": rubric}), **options}
    judge = Judge(counted, **given)

    async def one(members: list[int]) -> None:
        said = [[*prompt, *rest] for prompt, rest in (_parted(traces[index]) for index in members)]
        key = key_of("judge by its last verdict", model, given, said)
        answer = _cached_votes(known.get(key), len(members))
        if answer is None:
            found = await judge.score(said, group=key[:16])
            by_vote = [verdict.by_member() for verdict in found.verdicts]
            answer = {"scores": [_plain(each) for each in found.scores], "votes": by_vote}
            for error in found.errors:
                _note(done, f"{name}: unusable", Failure("wrong", error), traces[members[0]])
            if all(verdict.scores is not None for verdict in found.verdicts):
                known.put(key, answer)
        else:
            done.cached += 1
        alike, all_pairs = _agreement(answer["votes"])
        pairs[0], pairs[1] = pairs[0] + alike, pairs[1] + all_pairs
        for index, score in zip(members, answer["scores"], strict=True):
            done.rows[index] = (score, (score,))

    await _all(one, groups, parallel, told)
    done.counts = Counter({f"{name}: {kind}": count for kind, count in judge.counts.items() if kind != "verdicts"})
    done.agreement = pairs[0] / pairs[1] if pairs[1] else math.nan
    done.unscored = _unscored(done)
    return done


def _note(done: Rescored, kind: str, failure: Failure, trace: Trace) -> None:
    """Keeps the first failure of a kind, with where its group begins."""
    file, line = trace.core.location(trace.index)
    where = f"{file or '<records>'}:{line or 1}" + ("" if trace.group is None else f", group {trace.group!r}")
    done.failures.setdefault(kind, replace(failure, words=f"{where}: {failure.words}"))


def _cached_rows(answer: Any, names: tuple[str, ...], count: int) -> list[tuple[Any, tuple[Any, ...]]] | None:
    """What functions said before; None where that is not known, or no line of this cache."""
    try:
        rows = [(total, tuple(values[name] for name in names)) for values, total in answer]
    except (TypeError, ValueError, LookupError):
        return None
    return rows if len(rows) == count and all(_is_score(one) for total, row in rows for one in (total, *row)) else None


def _cached_votes(answer: Any, count: int) -> Any:
    """What a judge said before; None where that is not known, or no line of this cache."""
    try:
        rows = [answer["scores"], *answer["votes"]]
        return answer if all(len(row) == count and all(map(_is_verdict, row)) for row in rows) else None
    except (TypeError, LookupError):
        return None


def _is_score(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST)


def _is_verdict(value: Any) -> bool:
    return value is None or (_is_score(value) and 0 <= value <= 1)


def _whole(value: Any) -> int:
    """A count of tokens as a server says it; what is none is 0."""
    return value if type(value) is int and 0 < value < 1 << 40 else 0


def _unscored(done: Rescored) -> int:
    return sum(total is None for total, _ in done.rows.values())


async def _all(
    one: Callable[[list[int]], Awaitable[None]], groups: list[list[int]], parallel: int, told: Told | None
) -> None:
    """All groups in their order, so many at once: no more of them are read than are being scored."""
    left, done = iter(groups), [0]

    async def worker() -> None:
        for members in left:
            await one(members)
            done[0] += 1
            if told is not None:
                told(done[0], len(groups))

    workers = [asyncio.ensure_future(worker()) for _ in range(max(parallel, 1))]
    try:
        await asyncio.gather(*workers)
    finally:
        for each in workers:
            each.cancel()


def _groups(names: Sequence[str | None]) -> list[list[int]]:
    """Numbers of the traces of each group, in the order of their first; one without a group is alone."""
    found: dict[Any, list[int]] = {}
    for index, group in enumerate(names):
        found.setdefault(("", index) if group is None else group, []).append(index)
    return list(found.values())


def _given(members: list[Trace], texts: bool) -> dict[str, Any]:
    """What functions are given of the traces of a group."""
    prompts, completions = zip(*(_parted(trace) for trace in members), strict=True)
    if texts:
        prompts = [text_of(each, "user") for each in prompts]
        completions = [text_of(each, "assistant") for each in completions]
    columns = columns_of([_columns(trace) for trace in members])
    return {"prompts": list(prompts), "completions": list(completions), "columns": columns}


def _columns(trace: Trace) -> dict[str, Any]:
    """What a record says beside its messages, and what its `metadata` says, which counts over it.

    Of what was recorded by playing the keys of the task are columns too, as they were when it was played.
    """
    record, told = loads(trace.record), trace.metadata
    beside = record if isinstance(record, dict) else {}
    kept = {name: value for name, value in beside.items() if name not in _OF_RECORD}
    told = told if isinstance(told, dict) else {}
    task = told.get("task")
    of_task = {name: value for name, value in task.items() if name != "messages"} if isinstance(task, dict) else {}
    return {**of_task, **kept, **told}


def _parted(trace: Trace) -> tuple[list[Any], list[Any]]:
    """The messages before the first sampled turn, and the others; a prompt that is text is what a user said."""
    messages = trace.messages
    sampled = {turn.message for turn in trace.generations}
    order = trace.core.conversation(trace.index)
    at = next((at for at, number in enumerate(order) if number in sampled), len(messages))
    if not at and (prompt := _prompt(trace)) is not None:
        return [{"role": "user", "content": prompt}], messages
    return messages[:at], messages[at:]


def _prompt(trace: Trace) -> str | None:
    """The prompt of a record of texts."""
    record = loads(trace.record)
    told = [record.get(key) for key in PROMPTS] if isinstance(record, dict) else []
    return next((each for each in told if isinstance(each, str) and each), None)


def _agreement(votes: Sequence[Sequence[float | None]]) -> tuple[int, int]:
    """Pairs that the first two votes put alike, and all that both order.

    >>> _agreement([[0.1, 0.5, 0.9], [0.2, 0.1, 1.0]])
    (2, 3)
    """
    if len(votes) < 2:
        return 0, 0
    alike = all_pairs = 0
    for one in range(len(votes[0])):
        for other in range(one):
            pair = [(vote[one], vote[other]) for vote in votes[:2]]
            if any(a is None or b is None or a == b for a, b in pair):
                continue
            all_pairs += 1
            alike += len({a > b for a, b in pair if a is not None and b is not None}) == 1
    return alike, all_pairs


def _plain(value: Any) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)
