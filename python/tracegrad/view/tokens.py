"""Tokens behind the rows: prepared shards, and what runs have kept of their steps.

Here are `TokenSets`, which finds them by the ids of traces and sums up what steps made of each, and `Shown`, one trace
cut out with all its steps. No HTML.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.codes import GIVEN, SAMPLED, TIERS
from tracegrad.errors import TracegradError
from tracegrad.storage import manifest
from tracegrad.trainer.token_log import CLIPPED, StepTerms, Terms, subset
from tracegrad.view.database import Row
from tracegrad.view.features import Codes, of_sequences
from tracegrad.view.inputs import Source

OF_STEPS = ("pull", "ratio", "weight", "clipped", "masked", "entropy", "trained_advantage")
"""Numbers of a trace in the newest step that had it: the sum over its terms of |d loss / d logprob|, and means."""
_BATCH = 500


@dataclass
class TokenSet:
    """Tokens in one folder, and the run that they are of."""

    source: Source
    sequences: Sequences
    name: str = ""
    row: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Shown:
    """One trace's tokens alone, and what the steps of its run made of them, `place` counting in `sequences`."""

    source: Source | None
    sequences: Sequences
    steps: tuple[StepTerms, ...] = ()


class TokenSets:
    """Everything that holds tokens.

    Args:
        tokenizer: spells ids as text; without one the text of such traces is not known.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.known: set[str] = set()
        self.sets: list[TokenSet] = []
        self._taken: set[Path] = set()
        self._summed: dict[Path, dict[str, tuple[float, ...]]] = {}

    def rows(self, source: Source, number: int, groups: Codes) -> Iterator[list[Row]]:
        """Rows of what came since the last look and has no row yet."""
        for path, name in self._new(source):
            tokens = TokenSet(source, Sequences.load(path), name)
            tokens.row = {tokens.sequences.trace_name(row): row for row in range(tokens.sequences.traces)}
            self._taken.add(path)
            self.sets.append(tokens)
            wanted = [row for trace_id, row in tokens.row.items() if trace_id not in self.known]
            self.known |= set(tokens.row)
            for start in range(0, len(wanted), _BATCH):
                yield self._rows(tokens, number, wanted[start : start + _BATCH], groups)

    def of(self, trace_id: str, run: Path | None = None) -> list[TokenSet]:
        """What holds tokens of a trace: runs before shards, the newest first."""
        found = [tokens for tokens in self.sets if trace_id in tokens.row and run in (None, tokens.source.run)]
        of_runs = [tokens for tokens in found if tokens.source.run is not None]
        return [*of_runs[::-1], *(tokens for tokens in found[::-1] if tokens.source.run is None)]

    def shown(self, tokens: TokenSet, trace_id: str) -> Shown:
        """One trace cut out of what holds it."""
        row = tokens.row[trace_id]
        part, places = subset(tokens.sequences, [row])
        if tokens.source.kind != "terms":
            return Shown(None, part)
        order = np.argsort(places)
        steps = []
        for step in self._steps(tokens):
            mine = step.of(row)
            if len(mine.place):
                local = order[np.searchsorted(places, mine.place, sorter=order)]
                steps.append(StepTerms(mine.step, mine.tokens, mine.words, local, mine.trace, mine.why, mine.values))
        return Shown(tokens.source, part, tuple(steps))

    def columns(self, names: dict[str, int], rows: int) -> dict[str, NDArray[np.float32]]:
        """[rows] for each of `OF_STEPS`; the newest run counts where several have a trace."""
        out = np.full((len(OF_STEPS), rows), math.nan, np.float32)
        for source in dict.fromkeys(tokens.source for tokens in self.sets if tokens.source.kind == "terms"):
            for trace_id, values in self._sums(source).items():
                if (n := names.get(trace_id, rows)) < rows:
                    out[:, n] = values
        return dict(zip(OF_STEPS, out, strict=True))

    def _new(self, source: Source) -> list[tuple[Path, str]]:
        if source.kind == "shards":
            whole = manifest.read(source.path)
            found = [(source.path / name, name) for name in whole.shards] or [(source.path, "")]
        else:
            found = [(path.parent, path.parent.name) for path in sorted(source.path.glob("tokens-*/manifest.json"))]
        return [(path, name) for path, name in found if path not in self._taken]

    def _steps(self, tokens: TokenSet) -> Iterator[StepTerms]:
        found = Terms(tokens.source.path)
        for _, path in found.files():
            step = found.read(path)
            if step.tokens == tokens.name:
                yield step

    def _sums(self, source: Source) -> dict[str, tuple[float, ...]]:
        """Of every trace of a run; files that were summed up before are not read again."""
        sums = self._summed.setdefault(source.path, {})
        names = {tokens.name: tokens.sequences for tokens in self.sets if tokens.source == source}
        found = Terms(source.path)
        for _, path in found.files():
            if path in self._taken:
                continue
            try:
                step = found.read(path)
            except TracegradError:
                continue  # its tokens are not whole yet, or it is damaged: `shown` says which
            if step.tokens in names:
                self._taken.add(path)
                rows, values = summed(step)
                sequences = names[step.tokens]
                for row, one in zip(rows.tolist(), values.T.tolist(), strict=True):
                    sums[sequences.trace_name(row)] = tuple(one)
        return sums

    def _rows(self, tokens: TokenSet, number: int, wanted: list[int], groups: Codes) -> list[Row]:
        part, _ = subset(tokens.sequences, wanted)
        tiers, reasons = of_sequences(part)
        out = []
        for row, place in enumerate(wanted):
            first, last = np.searchsorted(part.trace, [row, row + 1])
            span = slice(int(part.cu_seqlens[first]), int(part.cu_seqlens[last]))
            text, head = self._text(part, span)
            found, tier = reasons.get(row, set()), float(tiers[row])
            group = part.group_names[int(part.group[row])]
            version = part.version[span]
            known = version[version >= 0]
            numbers = (
                float(part.reward[row]),
                int(part.trainable[span].sum()),
                int(part.cu_turns[row + 1] - part.cu_turns[row]),
                math.nan,
                math.nan,
                len(text),
                tier,
                len(found),
                float(known.min()) if len(known) else math.nan,
                groups.of(group),
                number,
            )
            tags = {f"drift:{reason}" for reason in found}
            tags |= set() if math.isnan(tier) else {f"tier:{TIERS[int(tier)]}"}
            out.append(Row(part.trace_ids[row], group, head, place, text, numbers, tuple(tags), b""))
        return out

    def _text(self, part: Sequences, span: slice) -> tuple[str, str]:
        if self.tokenizer is None:
            return "", ""
        ids, source = part.ids[span], part.source[span]
        try:
            text = self.tokenizer.decode(ids)
            before = int(np.argmax(source == SAMPLED)) if (source == SAMPLED).any() else len(ids)
            given = self.tokenizer.decode(ids[:before][source[:before] == GIVEN])
        except TracegradError:
            return "", "its ids are not this model's"
        return text, " ".join(given[-400:].split())[-160:]


def summed(step: StepTerms) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Rows that a step has, and [len(OF_STEPS), rows] what it made of them."""
    rows, index, count = np.unique(step.trace, return_inverse=True, return_counts=True)

    def mean(column: NDArray[np.floating] | NDArray[np.bool_]) -> NDArray[np.float64]:
        return np.asarray(np.bincount(index, column.astype(np.float64), len(rows)) / count, np.float64)

    v = step.values
    pull = np.bincount(index, np.abs(np.nan_to_num(v["gradient"])).astype(np.float64), len(rows))
    means = [mean(v["ratio"]), mean(v["weight"]), mean(step.why == CLIPPED), mean(~step.keep)]
    return rows, np.stack([np.asarray(pull, np.float64), *means, mean(v["entropy"]), mean(v["advantages"])])
