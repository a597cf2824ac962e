"""Find the tokens of traces in prepared shards and in the steps that runs stored.

`TokenSets` finds them by trace id and aggregates each trace's step values. `TraceTokens` is one trace with all its
steps. This module has no HTML.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.codes import LEVELS, PROMPT, SAMPLED
from tracegrad.errors import TracegradError
from tracegrad.storage import manifest
from tracegrad.trainer.token_log import CLIPPED, StepTokens, TokenLog, subset
from tracegrad.view.database import Row
from tracegrad.view.features import Codes, of_sequences, sampled_tokens
from tracegrad.view.inputs import Source

OF_STEPS = ("gradient", "ratio", "weight", "clipped", "masked", "entropy", "trained_advantage")
"""Values of a trace in its newest step.

`gradient` is the sum over its trained tokens of |d loss / d logprob|. The others are means.
"""
_BATCH = 500


@dataclass
class TokenSet:
    """Sequences in one folder, with their source."""

    source: Source
    sequences: Sequences
    name: str = ""
    row: dict[str, int] = field(default_factory=dict)

    @cached_property
    def lengths(self) -> NDArray[np.float64]:
        """Return [R] the number of sampled tokens of each trace."""
        return sampled_tokens(self.sequences)


@dataclass(frozen=True)
class TraceTokens:
    """The tokens of one trace, and its values in the steps of its run. `place` indexes `sequences`."""

    source: Source | None
    sequences: Sequences
    steps: tuple[StepTokens, ...] = ()


class TokenSets:
    """All available token sets.

    Args:
        tokenizer: converts ids to text. Without one, such traces have no text.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.known: set[str] = set()
        self.sets: list[TokenSet] = []
        self._finished: set[Path] = set()
        self._summed: dict[Path, dict[str, tuple[float, ...]]] = {}

    def rows(self, source: Source, number: int, groups: Codes) -> Iterator[list[Row]]:
        """Yield rows of new traces that arrived since the last call."""
        for path, name in self._new(source):
            tokens = TokenSet(source, Sequences.load(path), name)
            tokens.row = {tokens.sequences.trace_name(row): row for row in range(tokens.sequences.traces)}
            self._finished.add(path)
            self.sets.append(tokens)
            wanted = [row for trace_id, row in tokens.row.items() if trace_id not in self.known]
            self.known |= set(tokens.row)
            for start in range(0, len(wanted), _BATCH):
                yield self._rows(tokens, number, wanted[start : start + _BATCH], groups)

    def of(self, trace_id: str, run: Path | None = None) -> list[TokenSet]:
        """Return the token sets with a trace: runs before shards, the newest first."""
        matches = [tokens for tokens in self.sets if trace_id in tokens.row and run in (None, tokens.source.run)]
        of_runs = [tokens for tokens in matches if tokens.source.run is not None]
        return [*of_runs[::-1], *(tokens for tokens in matches[::-1] if tokens.source.run is None)]

    def trace_tokens(self, tokens: TokenSet, trace_id: str) -> TraceTokens:
        """Return one trace with all its steps."""
        row = tokens.row[trace_id]
        part, places = subset(tokens.sequences, [row])
        if tokens.source.kind != "token log":
            return TraceTokens(None, part)
        order = np.argsort(places)
        steps = []
        for step in self._steps(tokens):
            trace_step = step.of(row)
            if len(trace_step.token):
                local = order[np.searchsorted(places, trace_step.token, sorter=order)]
                steps.append(
                    StepTokens(
                        trace_step.step,
                        trace_step.tokens,
                        trace_step.labels,
                        local,
                        trace_step.trace,
                        trace_step.outcome,
                        trace_step.values,
                    )
                )
        return TraceTokens(tokens.source, part, tuple(steps))

    def columns(self, names: dict[str, int], rows: int) -> dict[str, NDArray[np.float32]]:
        """Return [rows] for each of `OF_STEPS`. If several runs have a trace, the newest counts."""
        out = np.full((len(OF_STEPS), rows), math.nan, np.float32)
        for source in dict.fromkeys(tokens.source for tokens in self.sets if tokens.source.kind == "token log"):
            for trace_id, values in self._sums(source).items():
                if (n := names.get(trace_id, rows)) < rows:
                    out[:, n] = values
        return dict(zip(OF_STEPS, out, strict=True))

    def lengths(self, names: dict[str, int], rows: int) -> NDArray[np.float32]:
        """Return [rows] the number of sampled tokens of traces in token sets, NaN for others; the newest set counts."""
        out = np.full(rows, math.nan, np.float32)
        for tokens in list(self.sets):
            for trace_id, row in tokens.row.items():
                if (n := names.get(trace_id, rows)) < rows:
                    out[n] = tokens.lengths[row]
        return out

    def _new(self, source: Source) -> list[tuple[Path, str]]:
        if source.kind == "shards":
            folder_manifest = manifest.read(source.path)
            candidates = [(source.path / name, name) for name in folder_manifest.shards] or [(source.path, "")]
        else:
            candidates = [
                (path.parent, path.parent.name) for path in sorted(source.path.glob("tokens-*/manifest.json"))
            ]
        return [(path, name) for path, name in candidates if path not in self._finished]

    def _steps(self, tokens: TokenSet) -> Iterator[StepTokens]:
        token_log = TokenLog(tokens.source.path)
        for _, path in token_log.files():
            step = token_log.read(path)
            if step.tokens == tokens.name:
                yield step

    def _sums(self, source: Source) -> dict[str, tuple[float, ...]]:
        """Return the values of every trace of a run. Each step file is read only once."""
        sums = self._summed.setdefault(source.path, {})
        names = {tokens.name: tokens.sequences for tokens in self.sets if tokens.source == source}
        token_log = TokenLog(source.path)
        for _, path in token_log.files():
            if path in self._finished:
                continue
            try:
                step = token_log.read(path)
            except TracegradError:
                continue  # The step is incomplete or damaged. `shown` raises the precise error.
            if step.tokens in names:
                self._finished.add(path)
                rows, values = aggregate_by_trace(step)
                sequences = names[step.tokens]
                for row, trace_values in zip(rows.tolist(), values.T.tolist(), strict=True):
                    sums[sequences.trace_name(row)] = tuple(trace_values)
        return sums

    def _rows(self, tokens: TokenSet, number: int, wanted: list[int], groups: Codes) -> list[Row]:
        part, _ = subset(tokens.sequences, wanted)
        (levels, reasons), lengths = of_sequences(part), sampled_tokens(part)
        out = []
        for row, place in enumerate(wanted):
            first, last = np.searchsorted(part.trace, [row, row + 1])
            span = slice(int(part.cu_seqlens[first]), int(part.cu_seqlens[last]))
            text, head = self._text(part, span)
            trace_reasons, level = reasons.get(row, set()), float(levels[row])
            group = part.group_names[int(part.group[row])]
            version = part.version[span]
            valid_versions = version[version >= 0]
            numbers = (
                float(part.reward[row]),
                float(lengths[row]),
                int(part.cu_turns[row + 1] - part.cu_turns[row]),
                math.nan,
                math.nan,
                len(text),
                level,
                len(trace_reasons),
                float(valid_versions.min()) if len(valid_versions) else math.nan,
                groups.of(group),
                number,
            )
            tags = {f"mismatch:{reason}" for reason in trace_reasons}
            tags |= set() if math.isnan(level) else {f"level:{LEVELS[int(level)]}"}
            out.append(Row(part.trace_ids[row], group, head, place, text, numbers, tuple(tags), b""))
        return out

    def _text(self, part: Sequences, span: slice) -> tuple[str, str]:
        if self.tokenizer is None:
            return "", ""
        ids, source = part.ids[span], part.source[span]
        try:
            text = self.tokenizer.decode(ids)
            prompt_length = int(np.argmax(source == SAMPLED)) if (source == SAMPLED).any() else len(ids)
            prompt = self.tokenizer.decode(ids[:prompt_length][source[:prompt_length] == PROMPT])
        except TracegradError:
            return "", "its ids are not this model's"
        return text, " ".join(prompt[-400:].split())[-160:]


def aggregate_by_trace(step: StepTokens) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return the rows of a step, and [len(OF_STEPS), rows] their values."""
    rows, index, count = np.unique(step.trace, return_inverse=True, return_counts=True)

    def mean(column: NDArray[np.floating] | NDArray[np.bool_]) -> NDArray[np.float64]:
        return np.asarray(np.bincount(index, column.astype(np.float64), len(rows)) / count, np.float64)

    v = step.values
    gradient = np.bincount(index, np.abs(np.nan_to_num(v["gradient"])).astype(np.float64), len(rows))
    means = [mean(v["ratio"]), mean(v["weight"]), mean(step.outcome == CLIPPED), mean(~step.keep)]
    return rows, np.stack([np.asarray(gradient, np.float64), *means, mean(v["entropy"]), mean(v["advantages"])])
