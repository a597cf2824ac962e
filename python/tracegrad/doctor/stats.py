"""Collect statistics of a file while it streams: hashes, counters, and a bounded sample of tokens.

`DatasetStats.add` adds one batch; `checks_dataset` reads the totals at the end. Memory grows by a few numbers per
trace and group, not with tokens.
"""

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tracegrad.data import chat
from tracegrad.data.field_map import distinct_rewards, parse_record
from tracegrad.data.trace import Line, ReadReport, Trace, Traces, format_location
from tracegrad.doctor.checks_logprobs import Zeros, top_logprobs_lag
from tracegrad.doctor.checks_tokens import FOREIGN, OTHER_TOKENIZER
from tracegrad.doctor.finding import Hits, Place
from tracegrad.doctor.trace_batch import Array, TraceBatch, unknown_kind

SAMPLE_TOKENS = 1 << 17  # most tokens kept for the lag test
SAMPLE_TRACES = 64  # traces whose JSON is parsed a second time
PROMPT_MISMATCH = 31  # alignment reason of a turn whose prompt is not recorded
CHANCE = 15.0  # nats: a trace this improbable is not sampled twice
LONG = 64  # tokens: text this long, without logprobs, is not sampled twice
RESPONSE_ID = re.compile(rb'"id"\s*:\s*"((?:chatcmpl|cmpl|resp|gen|msg)[-_](?!tool[-_])[^"\\]{8,200})"')

MESSAGE_ID_LENGTH = 8  # characters: shorter ids of messages may be numbers within a conversation
COUNTED_MODELS = 2000  # traces whose models are counted
PROBED = 64  # traces whose messages are parsed to see whether they have ids

CHOICE = re.compile(rb'"choice"\s*:\s*(\d+)')


class Hashes:
    """Set of 64-bit integers with 8 bytes each.

    They are kept as sorted arrays; the last two arrays are merged if they have similar sizes.
    """

    def __init__(self) -> None:
        self._sorted: list[Array] = []

    def add(self, values: Array) -> Array:
        """Add `values` [n]. Return [n] bool: whether each was in the set before, or occurs earlier in `values`."""
        seen = np.zeros(len(values), bool)
        for part in self._sorted:
            position = np.minimum(np.searchsorted(part, values), len(part) - 1)
            seen |= part[position] == values
        distinct, first = np.unique(values, return_index=True)
        repeated = np.ones(len(values), bool)
        repeated[first] = False
        if len(distinct):
            self._sorted.append(distinct)
        while len(self._sorted) > 1 and len(self._sorted[-2]) < 2 * len(self._sorted[-1]):
            last = self._sorted.pop()
            self._sorted[-1] = np.union1d(self._sorted[-1], last)
        return seen | repeated


COPY_DESCRIPTIONS = (
    "the same record, including its id, occurs earlier in the file",
    "responses with the same ids occur earlier in the file",
    "messages with the same ids and texts occur earlier in the file",
    "the same tokens with the same logprobs occur earlier in the file",
    "the same tokens occur earlier in the file",
)
BY_TOKENS = 3  # index of the first description that does not compare ids


@dataclass
class Duplicates:
    """Traces that occur in the file a second time, by their record, by a response id, or by improbable tokens."""

    seen: Hashes = field(default_factory=Hashes)
    without_message_ids: int = 0
    count: int = 0
    recorded_twice: int = 0
    first: Place | None = None
    description: str = ""

    def add(self, look: TraceBatch) -> None:
        """Look up each trace of the batch, then remember it."""
        trace, kind, mark = self._marks(look)
        repeated = {int(look.trace[g]): text for g, (_, text) in sorted(look.mismatches(30).items(), reverse=True)}
        repeats = np.flatnonzero(self.seen.add(mark))
        for row in repeats[::-1]:
            repeated[int(trace[row])] = COPY_DESCRIPTIONS[kind[row]]
        self.recorded_twice += sum(text in COPY_DESCRIPTIONS[:BY_TOKENS] for text in repeated.values())
        self.count += len(repeated)
        if repeated and self.first is None:
            index = min(repeated)
            self.first, self.description = look.trace_at(index), repeated[index]

    def _marks(self, look: TraceBatch) -> tuple[Array, Array, Array]:
        """Return the marks that identify a copy of a trace.

        Each mark has the index of the trace in the batch, an index into `COPY_DESCRIPTIONS`, and a hash. The marks of a
        trace are ordered from the most to the least certain.
        """
        core, marks = look.traces.core, []
        for index in range(len(look.traces)):
            record = core.record(index)
            file, line = core.location(index)
            if core.id(index) not in ("", format_location(file or "", line or 0)):
                marks.append((index, 0, hash(record)))
            if b'"id"' in record and (response_ids := set(RESPONSE_ID.findall(record))):
                # All choices of one stream share an id, so the choice is part of the mark.
                marks.append((index, 1, hash((tuple(sorted(response_ids)), tuple(CHOICE.findall(record))))))
            if self.without_message_ids < PROBED and b'"id"' in record:
                answers = _identified_answers(look.traces[index])
                self.without_message_ids = 0 if answers else self.without_message_ids + 1
                marks += [(index, 2, hash(answers))] if answers else []
        marks += _improbable_marks(look)
        rows = np.array(sorted(marks, key=lambda entry: entry[:2]), np.int64).reshape(-1, 3)
        return rows[:, 0], rows[:, 1], rows[:, 2]


def _identified_answers(trace: Trace) -> tuple[str, ...]:
    """Return the ids and texts of the assistant messages of a trace; empty unless each has a long id."""
    answers = [message for message in trace.messages if message.get("role") == "assistant"]
    ids = [identity for message in answers if isinstance(identity := message.get("id"), str)]
    if len(ids) < len(answers) or min(map(len, ids), default=0) < MESSAGE_ID_LENGTH:
        return ()
    return (*ids, *(str(message.get("content")) for message in answers))


def _improbable_marks(look: TraceBatch) -> list[tuple[int, int, int]]:
    """Return marks of traces, greedy ones excepted, whose tokens are too improbable to be drawn twice by chance."""
    owner = look.trace[look.sampled_generation]
    ids, logprobs = look.sequences.ids[look.sampled], look.recorded_logprobs
    cu = np.searchsorted(owner, np.arange(len(look.traces) + 1))
    known_before = np.concatenate([[0], np.cumsum(~np.isnan(logprobs))])
    surprise_before = np.concatenate([[0.0], np.cumsum(-np.nan_to_num(logprobs.astype(np.float64)))])
    without_logprobs = known_before[cu[1:]] == known_before[cu[:-1]]
    improbable = (surprise_before[cu[1:]] - surprise_before[cu[:-1]] >= CHANCE) | (
        without_logprobs & (np.diff(cu) >= LONG)
    )
    improbable[look.trace[look["temperature"] == 0]] = False
    spans = ((int(index), slice(cu[index], cu[index + 1])) for index in np.flatnonzero(improbable))
    return [
        (i, BY_TOKENS + int(without_logprobs[i]), hash((ids[span].tobytes(), logprobs[span].tobytes())))
        for i, span in spans
    ]


@dataclass
class Models:
    """Models that the responses of the first traces name.

    Args:
        turns: number of turns of each model.
        first: first place of each model.
        traces: number of traces that were counted, at most `COUNTED_MODELS`.
    """

    turns: Counter[str] = field(default_factory=Counter)
    first: dict[str, Place] = field(default_factory=dict)
    traces: int = 0

    def add(self, look: TraceBatch) -> None:
        """Count the models of a batch."""
        for index in range(min(len(look.traces), COUNTED_MODELS - self.traces)):
            self.traces += 1
            record = look.traces.core.record(index)
            for name in models_of(parse_record(record)) if b'"model"' in record else ():
                self.turns[name] += 1
                self.first.setdefault(name, look.trace_at(index))


def models_of(record: Any) -> list[str]:
    """Return the model of each turn of a record that names one: that of the response, or else of the request.

    >>> models_of({"calls": [{"request": {"model": "a"}, "response": {"model": "b"}}, {"request": {"model": "a"}}]})
    ['b', 'a']
    """
    fields = chat.as_mapping(record)
    calls = fields["calls"] if isinstance(fields.get("calls"), list) else [fields] if "response" in fields else []
    turns = [[chat.as_mapping(call).get(key) for key in ("response", "request")] for call in calls]
    messages = fields.get("messages")
    if not calls and isinstance(messages, list):
        turns = [[message] for message in messages if chat.was_sampled(message)]
    names = [[chat.as_mapping(part).get("model") for part in (*parts, fields)] for parts in turns]
    named = [next((name for name in each if isinstance(name, str) and name), None) for each in names]
    return [name for name in named if name is not None]


@dataclass
class Rewards:
    """Rewards of the traces of a file.

    Args:
        reward: first reward of each trace that has one, else NaN, by batch.
        spans: reward name to its least and largest value.
        distinct: names of rewards, without copies of the total.
        together: sets of names that occur in one trace.
        group: hash of the group of each trace, by batch.
        first: hash of a group to its first place, its name ("" if none) and its number.
    """

    reward: list[Array] = field(default_factory=list)
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    distinct: dict[str, None] = field(default_factory=dict)
    together: set[tuple[str, ...]] = field(default_factory=set)
    group: list[Array] = field(default_factory=list)
    first: dict[int, tuple[Place, str, int]] = field(default_factory=dict)

    def add(self, look: TraceBatch) -> None:
        """Add one batch; keeps 12 bytes for each trace and one place for each group."""
        sequences = look.sequences
        known = ~np.isnan(sequences.rewards)
        column = np.where(known.any(axis=1), known.argmax(axis=1), 0)
        self.reward.append(sequences.rewards[np.arange(sequences.traces), column])
        for name, column in zip(sequences.reward_names, sequences.rewards.T, strict=True):
            if len(values := column[~np.isnan(column)]):
                low, high = self.spans.get(name, (np.inf, -np.inf))
                self.spans[name] = (min(low, float(values.min())), max(high, float(values.max())))
        self.distinct.update(dict.fromkeys(distinct_rewards(sequences.reward_names, sequences.rewards)))
        for row in np.unique(known, axis=0):
            self.together.add(tuple(itertools.compress(sequences.reward_names, row)))
        names = [look.traces.core.group(int(row)) for row in look.rows]
        own_names = [f"\x1f{look.trace_at(int(row))}" for row in look.rows]
        hashes = [hash(own_name if name is None else name) for name, own_name in zip(names, own_names, strict=True)]
        self.group.append(np.asarray(hashes, np.int64))
        for row, name, key in zip(look.rows, names, hashes, strict=True):
            if key not in self.first:
                self.first[key] = (look.trace_at(int(row)), name or "", len(self.first))

    def line(self) -> str | None:
        """Return a line with range, mean and group sizes of the first rewards; None if no trace has a reward."""
        rewards = np.concatenate(self.reward) if self.reward else np.zeros(0)
        known = ~np.isnan(rewards)
        if not known.any():
            return None
        valid, sizes = rewards[known], np.unique(np.concatenate(self.group)[known], return_counts=True)[1]
        smallest, largest = int(sizes.min()), int(sizes.max())
        lacking = f", {np.sum(~known):,} traces have none" * (not known.all())
        others = f" with a reward ({left_out:,} groups have none)" if (left_out := self.groups_without_reward) else ""
        return (
            f"rewards {valid.min():g} to {valid.max():g}, mean {valid.mean():.3g}{lacking}; {len(sizes):,} groups of "
            f"{smallest:,}{f' to {largest:,}' * (smallest < largest)} traces{others}"
        )

    @property
    def groups_without_reward(self) -> int:
        """Number of groups none of whose traces has a reward. Counts of groups leave them out."""
        groups, rewards = np.concatenate(self.group), np.concatenate(self.reward)
        return len(np.unique(groups)) - len(np.unique(groups[~np.isnan(rewards)]))


@dataclass
class UnlikeRewards:
    """Traces that equal an earlier trace of their record token for token, but have another reward."""

    seen: dict[bytes, float] = field(default_factory=dict)
    place: tuple[str | None, Line | None] = (None, None)
    count: int = 0
    first: Place | None = None
    found: str = ""

    def add(self, look: TraceBatch) -> None:
        """Compare the traces of each record, which are neighbours in the batch."""
        sequences = look.sequences
        starts = np.searchsorted(sequences.trace, np.arange(sequences.traces + 1))
        for index, row in enumerate(look.rows):
            place = look.traces.core.location(int(row))
            if place != self.place:
                self.place, self.seen = place, {}
            known = ~np.isnan(sequences.rewards[index])
            if not known.any():
                continue
            reward = float(sequences.rewards[index, known.argmax()])
            ids = sequences.ids[slice(*sequences.cu_seqlens[starts[index : index + 2]])]
            earlier = self.seen.setdefault(ids.tobytes(), reward)
            if earlier != reward:
                self.count += 1
                if self.first is None:
                    self.first = look.trace_at(int(row))
                    self.found = f"reward {reward:g}, but {earlier:g} for an equal trace of the same record"


@dataclass
class Versions:
    """Number of recorded tokens of each policy version, and the first place of each version."""

    tokens: dict[int, int] = field(default_factory=dict)
    first: dict[int, Place] = field(default_factory=dict)

    def add(self, look: TraceBatch) -> None:
        """Add the recorded tokens of each version."""
        versions = look["version"]
        for version in np.unique(versions):
            generations = np.flatnonzero(versions == version)
            self.tokens[int(version)] = self.tokens.get(int(version), 0) + int(look["tokens"][generations].sum())
            self.first.setdefault(int(version), look.place_of(int(generations[0])))


@dataclass(frozen=True)
class Turn:
    """One turn of the sample.

    Args:
        before: [n] int32, the id before each token; -1 at the start of a branch.
        ids: [n] int32.
        logprobs: [n] float32, nats.
        alignment_level: the highest alignment level of its tokens.
        place: location of the turn.
    """

    before: Array
    ids: Array
    logprobs: Array
    alignment_level: int
    place: Place


@dataclass
class TurnSample:
    """Turns for the lag test, spread evenly over the file. If there are too many, every second one is dropped."""

    stride: int = 1
    count: int = 0
    turns: list[Turn] = field(default_factory=list)
    tokens: int = 0

    def add(self, look: TraceBatch) -> None:
        """Add every `stride`-th turn that has known ids, at least 3 tokens and at least one logprob."""
        sequences, own = look.sequences, look.sampled
        logprobs = look.recorded_logprobs
        cu = np.searchsorted(look.sampled_generation, np.arange(look.generations + 1))
        logprob_count = np.bincount(look.sampled_generation[~np.isnan(logprobs)], minlength=look.generations)
        eligible = np.flatnonzero(look.has_known_ids & (np.diff(cu) >= 3) & (logprob_count > 0))
        start, self.count = self.count, self.count + len(eligible)
        for g in eligible[-start % self.stride :: self.stride]:
            position = own[cu[g] : cu[g + 1]]
            before = np.where(position > sequences.cu_seqlens[look.branch[position]], sequences.ids[position - 1], -1)
            level = int(sequences.alignment_level[position].max())
            turn = Turn(
                before, sequences.ids[position], logprobs[cu[g] : cu[g + 1]].copy(), level, look.place_of(int(g))
            )
            self.turns.append(turn)
            self.tokens += len(position)
        while self.tokens > SAMPLE_TOKENS and len(self.turns) > 1:
            self.turns = self.turns[::2]
            self.stride *= 2
            self.tokens = sum(len(turn.ids) for turn in self.turns)


@dataclass
class TopLogprobsLag:
    """Traces in a sample of 64 whose top_logprobs show that their logprobs belong to a neighbouring token."""

    lag: int = 0
    count: int = 0
    looked: int = 0
    first: Place | None = None

    @classmethod
    def of(cls, traces: Traces) -> "TopLogprobsLag":
        """Check the records of these traces."""
        lags = [top_logprobs_lag(trace.record) for trace in traces]
        shifted = next((index for index, lag in enumerate(lags) if lag), None)
        if shifted is None:
            return cls(looked=len(lags))
        return cls(lags[shifted], sum(map(bool, lags)), len(lags), Place.of(traces, shifted))


class SpreadSample:
    """Traces spread evenly over a file of unknown length.

    As soon as more than twice the wanted number is kept, every second one is dropped.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted, self.kept, self._stride, self._seen = wanted, list[Traces](), 1, 0

    def add(self, part: Traces) -> None:
        """Add one batch."""
        for index in range(len(part) if self.wanted else 0):
            if self._seen % self._stride == 0:
                self.kept.append(part[[index]])
            self._seen += 1
            if len(self.kept) > 2 * self.wanted:
                self.kept, self._stride = self.kept[::2], self._stride * 2

    def traces(self) -> Traces:
        """Return at most `wanted` traces."""
        step = max(1, -(-len(self.kept) // max(self.wanted, 1)))
        return Traces.concatenate(self.kept[::step])


@dataclass
class DatasetStats:
    """Statistics of one file.

    Args:
        source: the file as the user named it.
        read: counters of the reader.
        traces, turns, recorded, exact, filled, terms: sums over batches: traces read, turns, recorded tokens, tokens
            with an exact id and logprob, tokens with a filled logprob, tokens that would be trained.
        longest_branch: tokens of the longest branch.
        unaligned, first_error: number of traces that could not be aligned, and the first reason.
        foreign: number of turns with ids or texts of another tokenizer.
        grouped_traces: number of traces whose record, or the field map, names their group.
        headless: turns in which only the first logprob is missing.
        without_prompt, without_logprobs, without_ids: turns without a prompt, turns without logprobs, and turns without
            recorded ids.
        without_temperature: turns with logprobs and without a recorded temperature.
        unknown_logprob_kind: turns with logprobs of unknown kind at a temperature that is not known to be 1.
        few: sample of traces whose top_logprobs are read.
    """

    source: str
    read: ReadReport = field(default_factory=ReadReport)
    traces: int = 0
    turns: int = 0
    recorded: int = 0
    exact: int = 0
    filled: int = 0
    terms: int = 0
    longest_branch: int = 0
    unaligned: int = 0
    first_error: str | None = None
    grouped_traces: int = 0
    foreign: int = 0
    copies: Duplicates = field(default_factory=Duplicates)
    models: Models = field(default_factory=Models)
    rewards: Rewards = field(default_factory=Rewards)
    alike: UnlikeRewards = field(default_factory=UnlikeRewards)
    versions: Versions = field(default_factory=Versions)
    sample: TurnSample = field(default_factory=TurnSample)
    zeros: Zeros = field(default_factory=Zeros)
    headless: Hits = field(default_factory=Hits)
    without_prompt: int = 0
    without_logprobs: int = 0
    without_ids: int = 0
    unknown_logprob_kind: int = 0
    without_temperature: int = 0
    few: SpreadSample = field(default_factory=lambda: SpreadSample(SAMPLE_TRACES))

    @cached_property
    def tops(self) -> TopLogprobsLag:
        """Result of comparing logprobs with top_logprobs on a few traces."""
        return TopLogprobsLag.of(self.few.traces())

    def add(self, look: TraceBatch) -> None:
        """Add one batch."""
        report = look.sequences.alignment_report
        self.traces += len(look.traces)
        self.turns += look.generations
        self.foreign += len(look.mismatches(*FOREIGN))
        self.grouped_traces += sum(look.traces.core.group(row) is not None for row in range(len(look.traces)))
        self.recorded += report.recorded
        self.exact += report.exact
        self.terms += int(look.sequences.trainable.sum())
        self.longest_branch = max(self.longest_branch, int(np.diff(look.sequences.cu_seqlens).max(initial=0)))
        self.unaligned += len(report.errors)
        self.first_error = self.first_error or next(iter(report.errors), None)
        self.headless += look.hits(look.missing_first_logprob)
        unprompted = (look["context"] == 0) & (look["prompt_ids"] < 0)
        self.without_prompt += sum(bool(unprompted[generation]) for generation in look.mismatches(PROMPT_MISMATCH))
        self.filled += int(look.filled.sum())
        self.without_logprobs += int(np.sum(~look.has_logprobs))
        self.without_ids += int(np.sum(look["ids"] < 0))
        self.without_temperature += int(np.sum(np.isnan(look["temperature"]) & look.has_logprobs))
        self.unknown_logprob_kind += int(np.sum(unknown_kind(look.columns, look.filled)))
        self.few.add(look.traces)
        for part in (self.copies, self.models, self.rewards, self.alike, self.versions, self.sample, self.zeros):
            part.add(look)

    @property
    def grouped(self) -> bool:
        """Whether most traces name a group; a trace without a group name is a group of its own."""
        return 0 < self.traces < 2 * self.grouped_traces

    @property
    def is_text(self) -> bool:
        """Whether no turn has logprobs and at least half of the turns have a prompt."""
        return bool(self.turns) and self.without_logprobs == self.turns and self.without_prompt * 2 <= self.turns

    def untrained_reason(self) -> tuple[str, str]:
        """Return why no token is trained, the first reason that holds for most turns, and its fix."""
        if not self.turns:
            return "no assistant message was sampled", "Record the answers of the model, not marked as unsampled."
        if self.without_prompt * 2 > self.turns:
            reason = "the prompts were not recorded: record the request or prompt_token_ids"
            return reason, "Record the request with each response (or prompt_token_ids)."
        if self.without_logprobs * 2 > self.turns:
            fix = "Record logprobs with ids: logprobs=true, and return_token_ids on vLLM and SGLang."
            return "the turns have no logprobs: they are text", fix
        if self.foreign * 2 > self.turns:
            return f"{self.foreign:,} of {self.turns:,} turns are of another tokenizer", OTHER_TOKENIZER
        return self.first_error or "the causes in the other findings mask every token", "Fix the other findings first."
