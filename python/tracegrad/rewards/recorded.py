"""Score recorded traces group by group with reward functions or a judge, and cache the scores.

The traces are stored in a temporary file, so memory only needs an index entry per trace. Records keep their bytes;
`reward` and `rewards` are appended.
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
from tracegrad.data.field_map import PROMPTS, append_fields, parse_record
from tracegrad.data.reward_columns import columns_of, columns_of_trace
from tracegrad.data.trace import Line, Trace, Traces
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.rewards.functions import Rewards, text_of
from tracegrad.rewards.judge import Judge
from tracegrad.storage import files
from tracegrad.storage.files import refuse_special
from tracegrad.user_code import Failure

__all__ = ["JudgedTraces", "ScoredTraces", "judge_traces", "score_traces"]


MAX_LINE_BYTES = 1 << 24


class ScoreCache:
    """Answers by the hash of their input, in a JSON Lines file.

    Memory has the keys and their offsets in the file, not the answers. An incomplete line, as after a kill, is ignored.

    Args:
        path: the file. None keeps the answers in memory.

    Raises:
        ArgumentError: if the file exists and cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._entries: dict[str, Any] = {}
        if path is not None:
            files.check(path)
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            refuse_special(path)
            with path.open("rb") as lines:
                offset = 0
                for line in iter(lambda: lines.readline(MAX_LINE_BYTES), b""):
                    if (entry := _entry(line)) is not None:
                        self._entries[entry[0]] = offset
                    offset += len(line)
        except OSError as error:
            raise ArgumentError(
                f"TG-REWARD-006: {path}: the cache cannot be read ({error.strerror}). Give another --cache."
            ) from error

    def get(self, key: str) -> Any:
        """Return the cached answer, or None."""
        stored = self._entries.get(key)
        if self._path is None or stored is None:
            return stored
        try:
            with self._path.open("rb") as file:
                file.seek(stored)
                entry = _entry(file.readline(MAX_LINE_BYTES))
        except OSError:
            return None
        return entry[1] if entry is not None and entry[0] == key else None

    def put(self, key: str, value: Any) -> None:
        """Store an answer. With a file, it is written at once.

        Raises:
            ArgumentError: if the file cannot be written.
        """
        if self._path is None:
            self._entries[key] = value
            return
        line = json.dumps({"key": key, "value": value}) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with files.append(self._path) as file:
                # End a line that a kill left incomplete.
                if file.tell() and not _ends_whole(self._path):
                    file.write(b"\n")
                self._entries[key] = file.tell()
                file.write(line.encode())
        except OSError as error:
            raise ArgumentError(
                f"TG-REWARD-007: {self._path}: the cache cannot be written ({error.strerror}). Give another --cache."
            ) from error


def _entry(line: bytes) -> tuple[str, Any] | None:
    try:
        fields = json.loads(line)
        return str(fields["key"]), fields["value"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def key_of(*parts: Any) -> str:
    """Return a hash of everything that determines an answer.

    >>> key_of("a", [1]) == key_of("a", [1]), key_of("a", [1]) == key_of("a", [2])
    (True, False)
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def source_of(function: Callable[..., Any]) -> list[str]:
    """Return a function's name and the text of its source file, which may contain helpers that it calls."""
    while hasattr(function, "func"):
        function = function.func  # type: ignore[attr-defined]
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    try:
        return [name, Path(inspect.getsourcefile(inspect.unwrap(function)) or "").read_text(encoding="utf-8")]
    except (OSError, TypeError, UnicodeDecodeError):
        return [name]


@contextlib.contextmanager
def _naming_folder() -> Iterator[None]:
    """Convert an error of the temporary file to one that names the folder and the remedy."""
    try:
        yield
    except OSError as error:
        where = tempfile.tempdir or os.environ.get("TMPDIR") or "the folder of temporary files"
        raise TracegradError(
            f"TG-REWARD-008: {where}: {error.strerror}. Scoring stores a temporary copy of the traces there. "
            "Free disk space, or set TMPDIR to another folder."
        ) from error


class SpillFile:
    """Traces in a temporary file, read one at a time.

    Args:
        parts: the traces, as `tracegrad.stream` returns them.

    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> with SpillFile([Traces.from_records([{"messages": messages, "group": "g"}])]) as spool:
    ...     len(spool), spool.groups, spool[0].messages[1]["content"]
    (1, ['g'], '4')
    """

    def __init__(self, parts: Iterable[Traces]) -> None:
        self.groups: list[str | None] = []
        self._begins, self._lines, self._names = array("Q", [0]), list[Line](), array("L")
        self._files: list[str] = []
        with _naming_folder():
            self._file = tempfile.TemporaryFile(prefix="tracegrad-score-")  # noqa: SIM115  closed by its owner
        try:
            for part in parts:
                self._add(part)
            with _naming_folder():
                self._file.flush()
        except BaseException:
            # `close` flushes and may fail on a full disk. The descriptor is closed either way.
            with contextlib.suppress(OSError):
                self._file.close()
            raise

    def _add(self, part: Traces) -> None:
        for index, group in enumerate(part.groups):
            record, (file, line) = part.core.record(index), part.core.location(index)
            with _naming_folder():
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

    def __enter__(self) -> "SpillFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


ProgressCallback = Callable[[int, int], None]
MAX_SCORE = sys.float_info.max
TRACES_PER_BATCH = 128
"""Number of traces that are written at once."""


@dataclass
class ScoredTraces:
    """Recorded traces with their scores.

    Args:
        source: the scored traces.
        names: names of the reward functions or the judge.
        rows: for each trace its reward (the weighted sum) and the scores in the order of `names`. Unknown ones are
            None.
        groups, cached_groups: number of groups, and number of those answered from the cache.
        unscored_traces: number of traces without a known reward. Their reward is None, never 0.
        counts, failures: number of failures by "name: kind", and the first of each kind with its group and file.
        columns: names of the columns that reward functions received.

    >>> def correct(completions, answer, **columns):
    ...     return [float(messages[-1]["content"] == right) for messages, right in zip(completions, answer)]
    >>> question = {"role": "user", "content": "2+2?"}
    >>> records = [
    ...     {"messages": [question, {"role": "assistant", "content": text}], "group": "sum", "answer": "4"}
    ...     for text in ("4", "5")
    ... ]
    >>> scored = score_traces(Traces.from_records(records), correct)
    >>> # The reward of the second trace, and that of each function.
    >>> scored.groups, scored.unscored_traces, scored.rows[1]
    (1, 0, (0.0, (0.0,)))
    """

    source: Traces | SpillFile
    names: tuple[str, ...]
    rows: dict[int, tuple[float | None, tuple[float | None, ...]]] = field(default_factory=dict, repr=False)
    groups: int = 0
    cached_groups: int = 0
    unscored_traces: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Failure] = field(default_factory=dict)
    columns: dict[str, None] = field(default_factory=dict, repr=False)

    @cached_property
    def traces(self) -> Traces:
        """Return all traces with their scores, in the order of `source`.

        The scores are added to the recorded `rewards` by name. A recorded `reward` is kept there as "recorded".
        """
        return Traces(_core.Traces.concatenate([part.core for part in self.parts()]))

    def parts(self) -> Iterator[Traces]:
        """Yield the same traces in pieces of `TRACES_PER_BATCH`."""
        for first in range(0, len(self.source), TRACES_PER_BATCH):
            indices = range(first, min(first + TRACES_PER_BATCH, len(self.source)))
            yield Traces(_core.Traces.concatenate([self._scored(index) for index in indices]))

    def _scored(self, index: int) -> _core.Traces:
        """Return a trace with its rewards appended to the record."""
        trace, (total, values) = self.source[index], self.rows[index]
        file, line = trace.core.location(trace.index)
        recorded_rewards = {name: None if math.isnan(value) else value for name, value in trace.rewards.items()}
        recorded_total = {} if trace.reward is None or "recorded" in recorded_rewards else {"recorded": trace.reward}
        scores = dict(zip(self.names, values, strict=True))
        rewards = {**recorded_rewards, **recorded_total, **scores}
        record = append_fields(trace.record, {**_own_id(trace), "reward": total, "rewards": rewards})
        return _core.Traces.decode([record], file or "<records>", line or 1, "auto")[0]


@dataclass
class JudgedTraces(ScoredTraces):
    """Recorded traces with the scores of a judge.

    Args:
        prompt_tokens, completion_tokens: tokens of all requests in this run, as the judge's server counts them.
        agreement: share of pairs within a group that the first two votes order alike. Ties are ignored. NaN if no pair
            remains.

    >>> async def chat(request, **_):  # in place of `Servers.chat`
    ...     message = {"content": '{"scores": [{"id": "1", "score": 1.0}]}'}
    ...     return {"choices": [{"message": message}], "usage": {"prompt_tokens": 100, "completion_tokens": 20}}
    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> judged = asyncio.run(judge_traces(Traces.from_records([{"messages": messages}]), chat, votes=2))
    >>> # The arguments of `cost` are prices of a million tokens.
    >>> judged.prompt_tokens, judged.completion_tokens, judged.cost((1.0, 2.5))
    (200, 40, 0.0003)
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    agreement: float = math.nan

    def cost(self, per_million: tuple[float, float]) -> float:
        """Return the cost of the tokens.

        Args:
            per_million: prices of a million prompt tokens and of a million completion tokens.
        """
        return (self.prompt_tokens * per_million[0] + self.completion_tokens * per_million[1]) / 1e6


def score_traces(
    traces: Traces | SpillFile,
    functions: Sequence[Callable[..., Any]] | Callable[..., Any],
    *,
    weights: Sequence[float] | None = None,
    cache: Path | None = None,
    reward_input: bool = False,
    timeout_s: float = 60.0,
    concurrency: int = 4,
    on_progress: ProgressCallback | None = None,
) -> ScoredTraces:
    """Score recorded traces with reward functions in TRL's convention, a group at a time.

    Args:
        traces: traces in memory or in a spill file. A trace without a group is a group of its own.
        functions: `(prompts, completions, **columns) -> list[float | None]`. Columns are the keys of a record and of
            its `metadata`.
        weights: one per function, 1 by default.
        cache: file of earlier scores. A group is scored again if its traces, a function's source file or a weight
            changed.
        reward_input: pass prompts and completions as texts, not as messages.
        timeout_s: time limit of one call.
        concurrency: number of groups that are scored concurrently.
        on_progress: progress callback, called with the number of finished groups and of all groups.

    Raises:
        ArgumentError: if the cache cannot be read or written.

    >>> def correct(completions, answer, **columns):
    ...     return [float(messages[-1]["content"] == right) for messages, right in zip(completions, answer)]
    >>> question = {"role": "user", "content": "2+2?"}
    >>> records = [
    ...     {"messages": [question, {"role": "assistant", "content": text}], "group": "sum", "answer": "4"}
    ...     for text in ("4", "5")
    ... ]
    >>> score_traces(Traces.from_records(records), correct).traces.reward.tolist()
    [1.0, 0.0]
    """
    functions = [functions] if callable(functions) else list(functions)
    scorer = Rewards(functions, weights, timeout_s=timeout_s, max_processes=concurrency)
    sources, answers = [source_of(function) for function in functions], ScoreCache(cache)
    groups = _groups(traces.groups)
    result = ScoredTraces(traces, scorer.names, groups=len(groups))

    async def score_group(members: list[int]) -> None:
        inputs = _inputs([traces[index] for index in members], reward_input)
        result.columns.update(dict.fromkeys(inputs["columns"]))
        key = key_of("functions", sources, scorer.weights.tolist(), inputs)
        answer = answers.get(key)
        rows = _cached_rows(answer, result.names, len(members))
        if rows is None:
            scores = await scorer.score(inputs["prompts"], inputs["completions"], inputs["columns"])
            answer = [[scores.row(index), _plain(scores.total[index])] for index in range(len(members))]
            rows = [(total, tuple(values[name] for name in result.names)) for values, total in answer]
            for name, failure in scores.failures.items():
                _note(result, f"{name}: {failure.kind}", failure, traces[members[0]])
            if not scores.failed.any():
                answers.put(key, answer)
        else:
            result.cached_groups += 1
        result.rows.update(zip(members, rows, strict=True))

    try:
        asyncio.run(_score_groups(score_group, groups, concurrency, on_progress))
    finally:
        scorer.close()
    result.counts = scorer.counts
    result.unscored_traces = _unscored(result)
    return result


async def judge_traces(
    traces: Traces | SpillFile,
    chat: Callable[..., Awaitable[Any]],
    *,
    model: str = "",
    rubric: str | None = None,
    votes: int = 2,
    name: str = "judge",
    cache: Path | None = None,
    concurrency: int = 8,
    sampling: Mapping[str, Any] | None = None,
    on_progress: ProgressCallback | None = None,
    **options: Any,
) -> JudgedTraces:
    """Score recorded traces with a judge, within each group. Each vote shows the group in another order.

    Args:
        traces, concurrency, on_progress: as for `score_traces`.
        chat: as for `Judge`.
        model: name of the judge's model. Scores of another model are not taken from the cache.
        rubric, sampling, options: as for `Judge`.
        votes: number of votes on each group.
        name: name of the reward.
        cache: as for `score_traces`.

    Raises:
        ArgumentError: if the cache cannot be read or written.

    >>> async def chat(request, **_):  # in place of `Servers.chat`
    ...     answer = '{"scores": [{"id": "1", "score": 0.75}]}'
    ...     return {"choices": [{"message": {"content": answer}}]}
    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> judged = asyncio.run(judge_traces(Traces.from_records([{"messages": messages}]), chat, votes=2))
    >>> judged.traces.reward.tolist()
    [0.75]
    """
    groups, answers = _groups(traces.groups), ScoreCache(cache)
    result = JudgedTraces(traces, (name,), groups=len(groups))
    pairs = [0, 0]

    async def counting_chat(body: Mapping[str, Any], **request: Any) -> Any:
        answer = await chat(body, **request)
        usage = answer.get("usage") if isinstance(answer, Mapping) else None
        if isinstance(usage, Mapping):
            result.prompt_tokens += _token_count(usage.get("prompt_tokens"))
            result.completion_tokens += _token_count(usage.get("completion_tokens"))
        return answer

    judge_options = {"votes": votes, "sampling": sampling, **({} if rubric is None else {"rubric": rubric}), **options}
    judge = Judge(counting_chat, **judge_options)

    async def judge_group(members: list[int]) -> None:
        conversations = [[*prompt, *completion] for prompt, completion in (_split(traces[index]) for index in members)]
        key = key_of("judge by its last verdict", model, judge_options, conversations)
        answer = _cached_votes(answers.get(key), len(members))
        if answer is None:
            judged_group = await judge.score(conversations, group=key[:16])
            by_vote = [verdict.by_member() for verdict in judged_group.verdicts]
            answer = {"scores": [_plain(score) for score in judged_group.scores], "votes": by_vote}
            for error in judged_group.errors:
                _note(result, f"{name}: unusable", Failure("wrong", error), traces[members[0]])
            if all(verdict.scores is not None for verdict in judged_group.verdicts):
                answers.put(key, answer)
        else:
            result.cached_groups += 1
        alike, all_pairs = _agreement(answer["votes"])
        pairs[0], pairs[1] = pairs[0] + alike, pairs[1] + all_pairs
        for index, score in zip(members, answer["scores"], strict=True):
            result.rows[index] = (score, (score,))

    await _score_groups(judge_group, groups, concurrency, on_progress)
    result.counts = Counter({f"{name}: {kind}": count for kind, count in judge.counts.items() if kind != "verdicts"})
    result.agreement = pairs[0] / pairs[1] if pairs[1] else math.nan
    result.unscored_traces = _unscored(result)
    return result


def _own_id(trace: Trace) -> dict[str, str]:
    """Return the id as a field if it is only the place of the record, which changes when it is written elsewhere."""
    file, line = trace.core.location(trace.index)
    is_place = file is not None and trace.id == f"{file}:{line}"
    record = parse_record(trace.record) if is_place else None
    return {"id": trace.id} if isinstance(record, dict) and record.get("id") is None else {}


def _note(result: ScoredTraces, kind: str, failure: Failure, trace: Trace) -> None:
    """Keep the first failure of a kind, with the location of its group's first trace."""
    file, line = trace.core.location(trace.index)
    where = f"{file or '<records>'}:{line or 1}" + ("" if trace.group is None else f", group {trace.group!r}")
    result.failures.setdefault(kind, replace(failure, message=f"{where}: {failure.message}"))


def _cached_rows(answer: Any, names: tuple[str, ...], count: int) -> list[tuple[Any, tuple[Any, ...]]] | None:
    """Return the cached results of reward functions. None if there are none or the entry is malformed."""
    try:
        rows = [(total, tuple(values[name] for name in names)) for values, total in answer]
    except (TypeError, ValueError, LookupError):
        return None
    return (
        rows if len(rows) == count and all(_is_score(score) for total, row in rows for score in (total, *row)) else None
    )


def _cached_votes(answer: Any, count: int) -> Any:
    """Return the cached votes of a judge. None if there are none or the entry is malformed."""
    try:
        rows = [answer["scores"], *answer["votes"]]
        return answer if all(len(row) == count and all(map(_is_verdict, row)) for row in rows) else None
    except (TypeError, LookupError):
        return None


def _is_score(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_SCORE)


def _is_verdict(value: Any) -> bool:
    return value is None or (_is_score(value) and 0 <= value <= 1)


def _token_count(value: Any) -> int:
    """Return a token count that a server reported. Anything but a plausible count becomes 0."""
    return value if type(value) is int and 0 < value < 1 << 40 else 0


def _unscored(result: ScoredTraces) -> int:
    return sum(total is None for total, _ in result.rows.values())


async def _score_groups(
    score_group: Callable[[list[int]], Awaitable[None]],
    groups: list[list[int]],
    parallel: int,
    report: ProgressCallback | None,
) -> None:
    """Score all groups in their order, up to `parallel` at once. A group is read only when its scoring starts."""
    remaining, done = iter(groups), [0]

    async def worker() -> None:
        for members in remaining:
            await score_group(members)
            done[0] += 1
            if report is not None:
                report(done[0], len(groups))

    workers = [asyncio.ensure_future(worker()) for _ in range(max(parallel, 1))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker_task in workers:
            worker_task.cancel()


def _groups(names: Sequence[str | None]) -> list[list[int]]:
    """Return the trace indices of each group, in the order of their first trace.

    A trace without a group is a group of its own.
    """
    indices_by_group: dict[Any, list[int]] = {}
    for index, group in enumerate(names):
        indices_by_group.setdefault(("", index) if group is None else group, []).append(index)
    return list(indices_by_group.values())


def _inputs(members: list[Trace], texts: bool) -> dict[str, Any]:
    """Return the arguments that reward functions get for the traces of a group."""
    prompts, completions = zip(*(_split(trace) for trace in members), strict=True)
    if texts:
        prompts = [text_of(messages, "user") for messages in prompts]
        completions = [text_of(messages, "assistant") for messages in completions]
    columns = columns_of([columns_of_trace(trace) for trace in members])
    return {"prompts": list(prompts), "completions": list(completions), "columns": columns}


def _split(trace: Trace) -> tuple[list[Any], list[Any]]:
    """Return the messages before the first sampled turn, and the other messages.

    A prompt that the record has as text becomes a user message.
    """
    messages = trace.messages
    sampled = {turn.message for turn in trace.generations}
    order = trace.core.conversation(trace.index)
    index = next((index for index, message in enumerate(order) if message in sampled), len(messages))
    if not index and (prompt := _prompt(trace)) is not None:
        return [{"role": "user", "content": prompt}], messages
    return messages[:index], messages[index:]


def _prompt(trace: Trace) -> str | None:
    """Return the prompt of a record that has texts instead of messages, or None."""
    record = parse_record(trace.record)
    candidates = [record.get(key) for key in PROMPTS] if isinstance(record, dict) else []
    return next((text for text in candidates if isinstance(text, str) and text), None)


def _agreement(votes: Sequence[Sequence[float | None]]) -> tuple[int, int]:
    """Return the number of pairs that the first two votes order alike, and of all pairs that both votes order.

    >>> _agreement([[0.1, 0.5, 0.9], [0.2, 0.1, 1.0]])
    (2, 3)
    """
    if len(votes) < 2:
        return 0, 0
    alike = all_pairs = 0
    for first in range(len(votes[0])):
        for second in range(first):
            pair = [(vote[first], vote[second]) for vote in votes[:2]]
            if any(a is None or b is None or a == b for a, b in pair):
                continue
            all_pairs += 1
            alike += len({a > b for a, b in pair if a is not None and b is not None}) == 1
    return alike, all_pairs


def _plain(value: Any) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)
