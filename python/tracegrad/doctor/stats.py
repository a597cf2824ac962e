"""Collect statistics of a file while it streams by: hashes, counters, and a bounded sample of tokens.

`Whole.add` takes one batch; `checks_dataset` reads the sums at the end. Memory grows with traces and groups, a few
numbers each, never with tokens.
"""

import itertools
import re
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tracegrad.data.codes import LOGPROB_KINDS
from tracegrad.data.trace import Line, ReadReport, Traces, located
from tracegrad.doctor.checks_logprobs import Zeros, lag_of_tops
from tracegrad.doctor.finding import Hits, Place
from tracegrad.doctor.trace_batch import Array, Look

SAMPLE_TOKENS = 1 << 17  # of the lag test
SAMPLE_TRACES = 64  # of those whose JSON is looked at again
PROMPT_MISMATCH = 31  # reason of a turn whose prompt is not recorded
CHANCE = 15.0  # nats: a trace this improbable is not sampled twice
LONG = 64  # tokens: text this long, without logprobs, is not sampled twice
RESPONSE_ID = re.compile(rb'"id"\s*:\s*"((?:chatcmpl|cmpl|resp|gen|msg)[-_](?!tool[-_])[^"\\]{8,200})"')

CHOICE = re.compile(rb'"choice"\s*:\s*(\d+)')


class Hashes:
    """A set of 64-bit integers at 8 bytes each: sorted arrays, the last two joined while they are of like size."""

    def __init__(self) -> None:
        self._sorted: list[Array] = []

    def add(self, values: Array) -> Array:
        """[n] bools: which of `values` [n] stood there before, or earlier among them; then they stand there too."""
        known = np.zeros(len(values), bool)
        for part in self._sorted:
            at = np.minimum(np.searchsorted(part, values), len(part) - 1)
            known |= part[at] == values
        fresh, first = np.unique(values, return_index=True)
        again = np.ones(len(values), bool)
        again[first] = False
        if len(fresh):
            self._sorted.append(fresh)
        while len(self._sorted) > 1 and len(self._sorted[-2]) < 2 * len(self._sorted[-1]):
            last = self._sorted.pop()
            self._sorted[-1] = np.union1d(self._sorted[-1], last)
        return known | again


WORDS = (
    "the same record, id included, stands earlier in the file",
    "responses with the same ids stand earlier in the file",
    "the same tokens with the same logprobs stand earlier in the file",
    "the same tokens stand earlier in the file",
)


@dataclass
class Copies:
    """Traces that stand in the file a second time: by their own words, by a response's id, or by improbable tokens."""

    seen: Hashes = field(default_factory=Hashes)
    count: int = 0
    first: Place | None = None
    found: str = ""

    def add(self, look: Look) -> None:
        """Looks each trace of the batch up, then remembers it."""
        trace, kind, mark = _marks(look)
        repeated = {int(look.trace[g]): text for g, (_, text) in sorted(look.drift(30).items(), reverse=True)}
        old = np.flatnonzero(self.seen.add(mark))
        for at in old[::-1]:
            repeated[int(trace[at])] = WORDS[kind[at]]
        self.count += len(repeated)
        if repeated and self.first is None:
            index = min(repeated)
            self.first, self.found = look.trace_at(index), repeated[index]


def _marks(look: Look) -> tuple[Array, Array, Array]:
    """What would tell a copy of a trace: its index in the batch, which of `WORDS`, a hash; the surest first."""
    core, found = look.traces.core, []
    for index in range(len(look.traces)):
        record = core.record(index)
        file, line = core.location(index)
        if core.id(index) not in ("", located(file or "", line or 0)):
            found.append((index, 0, hash(record)))
        if b'"id"' in record and (answered := set(RESPONSE_ID.findall(record))):
            # The choices of one stream have one id.
            found.append((index, 1, hash((tuple(sorted(answered)), tuple(CHOICE.findall(record))))))
    found += _improbable(look)
    rows = np.array(sorted(found, key=lambda each: each[:2]), np.int64).reshape(-1, 3)
    return rows[:, 0], rows[:, 1], rows[:, 2]


def _improbable(look: Look) -> list[tuple[int, int, int]]:
    """Marks of traces whose tokens are not drawn twice by chance, greedy ones apart."""
    owner = look.trace[look.own_generation]
    ids, logprobs = look.sequences.ids[look.own], look.sequences.rollout_logprobs[look.own]
    cu = np.searchsorted(owner, np.arange(len(look.traces) + 1))
    known = np.concatenate([[0], np.cumsum(~np.isnan(logprobs))])
    surprise = np.concatenate([[0.0], np.cumsum(-np.nan_to_num(logprobs.astype(np.float64)))])
    silent = known[cu[1:]] == known[cu[:-1]]
    rare = (surprise[cu[1:]] - surprise[cu[:-1]] >= CHANCE) | (silent & (np.diff(cu) >= LONG))
    rare[look.trace[look["temperature"] == 0]] = False
    spans = ((int(index), slice(cu[index], cu[index + 1])) for index in np.flatnonzero(rare))
    return [(i, 2 + int(silent[i]), hash((ids[span].tobytes(), logprobs[span].tobytes()))) for i, span in spans]


@dataclass
class Rewards:
    """First reward of each trace by group, where each group begins, the least and the largest of each name, and which
    names stand together in one trace.
    """

    reward: list[Array] = field(default_factory=list)
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    together: set[tuple[str, ...]] = field(default_factory=set)
    group: list[Array] = field(default_factory=list)
    first: dict[int, tuple[Place, str, int]] = field(default_factory=dict)

    def add(self, look: Look) -> None:
        """Keeps 12 bytes a trace and one place a group."""
        sequences = look.sequences
        known = ~np.isnan(sequences.rewards)
        column = np.where(known.any(axis=1), known.argmax(axis=1), 0)
        self.reward.append(sequences.rewards[np.arange(sequences.traces), column])
        for name, column in zip(sequences.reward_names, sequences.rewards.T, strict=True):
            if len(told := column[~np.isnan(column)]):
                low, high = self.spans.get(name, (np.inf, -np.inf))
                self.spans[name] = (min(low, float(told.min())), max(high, float(told.max())))
        for row in np.unique(known, axis=0):
            self.together.add(tuple(itertools.compress(sequences.reward_names, row)))
        names = [look.traces.core.group(int(row)) for row in look.rows]
        alone = [f"\x1f{look.trace_at(int(row))}" for row in look.rows]
        hashes = [hash(own if name is None else name) for name, own in zip(names, alone, strict=True)]
        self.group.append(np.asarray(hashes, np.int64))
        for row, name, key in zip(look.rows, names, hashes, strict=True):
            if key not in self.first:
                self.first[key] = (look.trace_at(int(row)), name or "", len(self.first))

    def line(self) -> str:
        """Span and mean of the first rewards, and how many groups they stand in; "" where no trace has one."""
        rewards = np.concatenate(self.reward) if self.reward else np.zeros(0)
        known = ~np.isnan(rewards)
        if not known.any():
            return ""
        told, sizes = rewards[known], np.unique(np.concatenate(self.group)[known], return_counts=True)[1]
        few, many = int(sizes.min()), int(sizes.max())
        lacking = f", {np.sum(~known):,} traces have none" * (not known.all())
        return (
            f"rewards {told.min():g} to {told.max():g}, mean {told.mean():.3g}{lacking}; {len(sizes):,} groups of "
            f"{few:,}{f' to {many:,}' * (few < many)} traces"
        )


@dataclass
class Alike:
    """Traces that are, token for token, an earlier one of their record, with another reward."""

    seen: dict[bytes, float] = field(default_factory=dict)
    place: tuple[str | None, Line | None] = (None, None)
    count: int = 0
    first: Place | None = None
    found: str = ""

    def add(self, look: Look) -> None:
        """Compares the traces of each record, which stand one behind the other."""
        sequences = look.sequences
        starts = np.searchsorted(sequences.trace, np.arange(sequences.traces + 1))
        for at, row in enumerate(look.rows):
            place = look.traces.core.location(int(row))
            if place != self.place:
                self.place, self.seen = place, {}
            known = ~np.isnan(sequences.rewards[at])
            if not known.any():
                continue
            reward = float(sequences.rewards[at, known.argmax()])
            ids = sequences.ids[slice(*sequences.cu_seqlens[starts[at : at + 2]])]
            before = self.seen.setdefault(ids.tobytes(), reward)
            if before != reward:
                self.count += 1
                if self.first is None:
                    self.first = look.trace_at(int(row))
                    self.found = f"reward {reward:g}, and {before:g} of an equal one of the same record"


@dataclass
class Versions:
    """Sampled tokens of each policy version, and where it first stands."""

    tokens: dict[int, int] = field(default_factory=dict)
    first: dict[int, Place] = field(default_factory=dict)

    def add(self, look: Look) -> None:
        """Counts the recorded tokens of each version."""
        versions = look["version"]
        for version in np.unique(versions):
            here = np.flatnonzero(versions == version)
            self.tokens[int(version)] = self.tokens.get(int(version), 0) + int(look["tokens"][here].sum())
            self.first.setdefault(int(version), look.at(int(here[0])))


@dataclass(frozen=True)
class Turn:
    """One turn of the sample: before, ids [n] int32, logprobs [n] float32, its tier, and where it stands."""

    before: Array
    ids: Array
    logprobs: Array
    tier: int
    place: Place


@dataclass
class Sample:
    """Turns for the lag test, evenly over the file: when there are too many, every second one is let go."""

    stride: int = 1
    count: int = 0
    turns: list[Turn] = field(default_factory=list)
    tokens: int = 0

    def add(self, look: Look) -> None:
        """Takes every `stride`-th turn with known ids and a logprob: previous ids, ids, logprobs, tier, place."""
        sequences, own = look.sequences, look.own
        logprobs = sequences.rollout_logprobs[own]
        cu = np.searchsorted(look.own_generation, np.arange(look.generations + 1))
        told = np.bincount(look.own_generation[~np.isnan(logprobs)], minlength=look.generations)
        fit = np.flatnonzero(look.known & (np.diff(cu) >= 3) & (told > 0))
        start, self.count = self.count, self.count + len(fit)
        for g in fit[-start % self.stride :: self.stride]:
            at = own[cu[g] : cu[g + 1]]
            before = np.where(at > sequences.cu_seqlens[look.branch[at]], sequences.ids[at - 1], -1)
            tier = int(sequences.tier[at].max())
            turn = Turn(before, sequences.ids[at], logprobs[cu[g] : cu[g + 1]].copy(), tier, look.at(int(g)))
            self.turns.append(turn)
            self.tokens += len(at)
        while self.tokens > SAMPLE_TOKENS and len(self.turns) > 1:
            self.turns = self.turns[::2]
            self.stride *= 2
            self.tokens = sum(len(turn.ids) for turn in self.turns)


@dataclass
class Tops:
    """Traces of a sample of 64 whose top_logprobs say that their logprobs are a neighbour's."""

    lag: int = 0
    count: int = 0
    looked: int = 0
    first: Place | None = None

    @classmethod
    def of(cls, traces: Traces) -> "Tops":
        """Looks at the records of these traces."""
        lags = [lag_of_tops(trace.record) for trace in traces]
        at = next((index for index, lag in enumerate(lags) if lag), None)
        if at is None:
            return cls(looked=len(lags))
        return cls(lags[at], sum(map(bool, lags)), len(lags), Place.of(traces, at))


class Spread:
    """Traces evenly over a file of unknown length: at twice as many as wanted, every second one is let go."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.kept, self._stride, self._seen = wanted, list[Traces](), 1, 0

    def add(self, part: Traces) -> None:
        """Looks at one batch."""
        for index in range(len(part) if self.wanted else 0):
            if self._seen % self._stride == 0:
                self.kept.append(part[[index]])
            self._seen += 1
            if len(self.kept) > 2 * self.wanted:
                self.kept, self._stride = self.kept[::2], self._stride * 2

    def traces(self) -> Traces:
        """At most `wanted` of them."""
        step = max(1, -(-len(self.kept) // max(self.wanted, 1)))
        return Traces.concatenate(self.kept[::step])


@dataclass
class Whole:
    """Everything that is kept of a file.

    Args:
        source: the file as the user named it.
        read: counts of the reader.
        traces, turns, recorded, exact, terms: sums over batches; of traces, those that were read.
        unaligned: traces that could not be aligned, and the first reason.
        promptless, silent: turns without a prompt, without logprobs.
        heatless: turns with logprobs that say no temperature.
        unsaid: turns that do not say what their logprobs are of, at a temperature that is not 1.
    """

    source: str
    read: ReadReport = field(default_factory=ReadReport)
    traces: int = 0
    turns: int = 0
    recorded: int = 0
    exact: int = 0
    terms: int = 0
    unaligned: int = 0
    first_error: str = ""
    copies: Copies = field(default_factory=Copies)
    rewards: Rewards = field(default_factory=Rewards)
    alike: Alike = field(default_factory=Alike)
    versions: Versions = field(default_factory=Versions)
    sample: Sample = field(default_factory=Sample)
    zeros: Zeros = field(default_factory=Zeros)
    headless: Hits = field(default_factory=Hits)
    promptless: int = 0
    silent: int = 0
    unsaid: int = 0
    heatless: int = 0
    few: Spread = field(default_factory=lambda: Spread(SAMPLE_TRACES))

    @cached_property
    def tops(self) -> Tops:
        """What the alternatives of a few traces say."""
        return Tops.of(self.few.traces())

    def add(self, look: Look) -> None:
        """Adds one batch."""
        drift = look.sequences.drift
        self.traces += len(look.traces)
        self.turns += look.generations
        self.recorded += drift.recorded
        self.exact += drift.exact
        self.terms += int(look.sequences.trainable.sum())
        self.unaligned += len(drift.errors)
        self.first_error = self.first_error or next(iter(drift.errors), "")
        self.headless += look.hits(look.headless)
        unprompted = (look["context"] == 0) & (look["prompt_ids"] < 0)
        self.promptless += sum(bool(unprompted[generation]) for generation in look.drift(PROMPT_MISMATCH))
        self.silent += int(np.sum(look["logprobs"] <= 0))
        unknown = (look["logprob_kind"] == LOGPROB_KINDS.index("unknown")) & ~(look["temperature"] == 1.0)
        self.heatless += int(np.sum(np.isnan(look["temperature"]) & (look["logprobs"] > 0)))
        self.unsaid += int(np.sum(unknown & (look["logprobs"] > 0)))
        self.few.add(look.traces)
        for part in (self.copies, self.rewards, self.alike, self.versions, self.sample, self.zeros):
            part.add(look)

    @property
    def grouped(self) -> bool:
        """Whether most traces name a group; one that names none is a group of its own."""
        alone = sum(not name for _, name, _ in self.rewards.first.values())
        return alone * 2 < sum(map(len, self.rewards.group))

    @property
    def is_text(self) -> bool:
        """Whether no turn has logprobs, and most have their prompts."""
        return bool(self.turns) and self.silent == self.turns and self.promptless * 2 <= self.turns

    def hindered(self) -> str:
        """Why no token is trained, by what holds for most turns."""
        if not self.turns:
            return "no message of an assistant was sampled"
        if self.promptless * 2 > self.turns:
            return "the prompts were not recorded: record the request or prompt_token_ids"
        if self.silent * 2 > self.turns:
            return "the turns have no logprobs: they are text"
        return self.first_error or "what the other findings say masks every token"
