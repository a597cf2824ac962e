"""Count what was read, for each producer, and what was left out and why."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.data.reader import InputStream
from tracegrad.doctor.trace_batch import TraceBatch

OWN_FORMS = ("tracegrad/1", "chat", "calls", "call")
"""Forms without a producer of their own."""
_LEFT_OUT = {"failed_call": "failed calls"}


@dataclass
class ProducerCounts:
    """Totals of the records of one producer.

    Args:
        conversations, calls: number of traces, and of sampled turns.
        without_answer: number of traces without a sampled turn, such as the requests of another file.
        sampled_tokens, with_ids, with_logprobs: number of recorded tokens, and of those with an id and with a logprob.
        calls_without_tokens: number of sampled turns that are recorded as text only.
        sampling_known: number of sampled turns with a known temperature.
        rewards: number of traces with a reward.
        group_hashes: hashes of the groups that the records name.
    """

    conversations: int = 0
    calls: int = 0
    without_answer: int = 0
    sampled_tokens: int = 0
    with_ids: int = 0
    with_logprobs: int = 0
    calls_without_tokens: int = 0
    sampling_known: int = 0
    rewards: int = 0
    group_hashes: set[int] = field(default_factory=set)

    def add(self, look: TraceBatch, rows: NDArray[np.intp]) -> None:
        """Add the traces at some rows of a batch, aligned or not."""
        own = np.isin(look.trace, rows)
        tokens, logprobs = look["tokens"][own], (look["logprobs"] - look["missing"] - look["invalid"])[own]
        self.conversations += len(rows)
        self.calls += int(own.sum())
        self.without_answer += len(np.setdiff1d(rows, look.trace))
        self.sampled_tokens += int(tokens.sum())
        self.with_ids += int(tokens[look["ids"][own] >= 0].sum())
        self.with_logprobs += int(np.maximum(logprobs, 0).sum())
        self.calls_without_tokens += int((tokens == 0).sum())
        self.sampling_known += int((~np.isnan(look["temperature"][own])).sum())
        scored = ~np.isnan(look.traces.reward[rows])
        named = (look.traces[int(row)].rewards.values() for row in rows[~scored])
        self.rewards += int(scored.sum()) + sum(any(each == each for each in values) for values in named)
        names = (look.traces.core.group(int(row)) for row in rows)
        self.group_hashes.update(hash(name) for name in names if name is not None)

    def as_dict(self) -> dict[str, int]:
        """Return the counts as a JSON-serializable dict, with the number of groups."""
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return {**counts, "groups": len(self.group_hashes)}

    def lines(self) -> list[str]:
        """Return the counts as text for two or three lines of a terminal."""
        tokens = f"{self.sampled_tokens:,} recorded tokens"
        if self.sampled_tokens:
            shares = (self.with_ids, "ids"), (self.with_logprobs, "logprobs")
            tokens += " (" + ", ".join(f"{count / self.sampled_tokens:.0%} with {what}" for count, what in shares) + ")"
        if self.calls_without_tokens:
            tokens += f", {self.calls_without_tokens:,} calls are text only"
        conversations = f"{self.conversations:,} conversations ({self.rewards:,} with a reward)"
        calls = f"{self.calls:,} calls ({self.sampling_known:,} with a temperature)"
        lines = [f"{conversations} in {len(self.group_hashes):,} groups, {calls},", tokens]
        if self.without_answer:
            lines.append(
                f"{self.without_answer:,} of the conversations are only requests: they have no answer to train"
            )
        return lines


@dataclass
class ReadingSummary:
    """Totals of a file by producer, and what is in no trace.

    Args:
        producers: counts by producer.
        left_out: numbers of records and parts of records, by reason.
        is_converted: whether records were converted, mapped, joined or left out.
    """

    producers: dict[str, ProducerCounts] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    is_converted: bool = False

    def add(self, look: TraceBatch, producers: Sequence[str]) -> None:
        """Add a batch, with the producer of each trace."""
        names = np.asarray(producers, object)
        for name in dict.fromkeys(producers):
            self.producers.setdefault(name, ProducerCounts()).add(look, np.flatnonzero(names == name))

    def close(self, stream: InputStream) -> None:
        """Add what the stream left out, after its last batch."""
        tally, report = stream.tally(), stream.read_report
        reasons = {_LEFT_OUT.get(name, f"bad records ({name})"): count for name, count in report.reasons.items()}
        records = {f"records of {name} without a call": count for name, count in tally.records_without_call.items()}
        files = {"files without a call": tally.files_without_calls, "empty files": tally.empty}
        choices = {"choices that are not read": report.unused_choices}
        counts = {**reasons, **records, **tally.left_out, **stream.unjoined(), **choices, **files}
        self.left_out = {name: count for name, count in counts.items() if count}
        self.is_converted = bool(self.left_out or tally.adapted or tally.sessions or tally.mapper.get("seen"))
        self.is_converted |= not self.producers.keys() <= set(OWN_FORMS)

    def lines(self) -> list[str]:
        """Return the totals as lines for a terminal; none for records in a form of tracegrad."""
        if not self.is_converted:
            return []
        lines = []
        for name, counts in self.producers.items():
            first, *others = counts.lines()
            lines += [f"summary  {name}: {first}", *(f"         {line}" for line in others)]
        left_out = ", ".join(f"{count:,} {name}" for name, count in self.left_out.items())
        return [*lines, *([f"         left out: {left_out}"] if left_out else [])]

    def as_dict(self) -> dict[str, Any]:
        """Return the totals as a JSON-serializable dict."""
        return {
            "producers": {name: counts.as_dict() for name, counts in self.producers.items()},
            "left_out": dict(self.left_out),
        }
