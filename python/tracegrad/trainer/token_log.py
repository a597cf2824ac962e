"""What each step of a run made of its tokens, kept beside the run: one file a step, and the tokens they are of.

    terms/tokens-00001/               a `Sequences` folder: the traces that are kept
    terms/step-00000001.r0.safetensors  per-term arrays of one step and rank, for those traces

`Terms` reads, `subset` chooses, `trainer.token_log_writer` writes. A file is never changed once it is written.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.mismatch import no_drift
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError, FormatError, TracegradError
from tracegrad.storage import safetensors_file

FOLDER = "terms"
FLOATS = ("ratio", "weight", "advantages", "logprobs", "old_logprobs", "gradient", "entropy")
KEPT, CLIPPED, UNKNOWN, LATE = range(4)
"""Codes of `why`; those behind are the objective's gates on detached ratios, in order."""

_STEP = re.compile(r"step-(\d{8,})\.r(\d+)\.safetensors")


@dataclass(frozen=True)
class StepTerms:
    """Terms of one step.

    Args:
        step: number of the update, from 1.
        tokens: name of the folder of their tokens.
        words: what the codes of `why` mean.
        place: [m] int64, token of those `Sequences`.
        trace: [m] int32, row of them, ascending.
        why: [m] uint8, what became of each: trained, clipped, or what masked it.
        values: [m] float32 each by name, those of `FLOATS`: ratio inside the surrogate, weight, advantage, logprobs
            of the policy before the update and of old (NaN where none was taken), d loss / d logprob, entropy.
    """

    step: int
    tokens: str
    words: tuple[str, ...]
    place: NDArray[np.int64]
    trace: NDArray[np.int32]
    why: NDArray[np.uint8]
    values: dict[str, NDArray[np.float32]]

    @property
    def keep(self) -> NDArray[np.bool_]:
        """[m]: what no gate has dropped."""
        return (self.why == KEPT) | (self.why == CLIPPED)

    def of(self, trace: int) -> "StepTerms":
        """Those of one trace."""
        first, last = np.searchsorted(self.trace, [trace, trace + 1])
        here = slice(int(first), int(last))
        values = {name: column[here] for name, column in self.values.items()}
        return replace(self, place=self.place[here], trace=self.trace[here], why=self.why[here], values=values)


def write_step(path: Path, terms: StepTerms) -> int:
    """Writes the terms of a step; returns the bytes."""
    told = {"step": str(terms.step), "tokens": terms.tokens, "words": json.dumps(terms.words)}
    arrays = {"place": terms.place, "trace": terms.trace, "why": terms.why, **terms.values}
    return safetensors_file.write(path, arrays, told).bytes


def step_name(step: int, rank: int) -> str:
    """File of one step and rank."""
    return f"step-{step:08d}.r{rank}.safetensors"


class Terms:
    """Reads what a run has kept.

    Args:
        folder: of the run, or `terms` in it.

    Raises:
        ArgumentError: if nothing was kept there.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
        if not any(self.folder.glob("tokens-*")):
            raise ArgumentError(
                f"{folder}: has no {FOLDER}/tokens-*. The run has kept no terms. Run it with terms.keep 'sampled'."
            )
        self._sequences = lru_cache(8)(lambda name: Sequences.load(self.folder / name))

    def sets(self) -> list[str]:
        """Names of the folders of tokens that are whole, in order."""
        return sorted(path.parent.name for path in self.folder.glob("tokens-*/manifest.json"))

    def sequences(self, name: str) -> Sequences:
        """The tokens of one folder."""
        return self._sequences(name)

    def files(self) -> list[tuple[int, Path]]:
        """(step, file) of what is whole, in order."""
        found = [(_STEP.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return sorted((int(match[1]), path) for match, path in found if match)

    def read(self, path: Path) -> StepTerms:
        """One file.

        Raises:
            FormatError: if it is none that a run writes.
        """
        arrays, told = safetensors_file.read(path)
        try:
            place, trace, why = (arrays[name] for name in ("place", "trace", "why"))
            values = {name: arrays[name] for name in FLOATS}
            words = tuple(map(str, json.loads(told["words"])))
            found = StepTerms(int(told["step"]), told["tokens"], words, place, trace, why, values)
            whole = self.sequences(found.tokens)
            lengths = {len(column) for column in arrays.values()}
            wrong = len(lengths) != 1 or np.any(np.diff(trace.astype(np.int64)) < 0)
            wrong = wrong or why.max(initial=0) >= len(words)
            wrong = wrong or (len(place) and not 0 <= place.min() <= place.max() < whole.tokens)
            if (
                wrong
                or (len(trace) and not 0 <= trace[0] <= trace[-1] < whole.traces)
                or why.max(initial=0) >= len(words)
            ):
                raise ValueError("its arrays do not belong together")
        except TracegradError:
            raise
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise FormatError(f"{path}: not what a run writes ({str(error)[:80]!r}). Run it again.") from error
        return found

    def find(self, trace_id: str) -> list[tuple[str, int]]:
        """(folder of tokens, row) of a trace by its id, the newest last."""
        names = ((name, self.sequences(name)) for name in self.sets())
        return [(name, found.trace_ids.index(trace_id)) for name, found in names if trace_id in found.trace_ids]

    def of(self, trace_id: str) -> list[StepTerms]:
        """What became of a trace, step by step."""
        places = dict(self.find(trace_id))
        steps = (self.read(path) for _, path in self.files())
        mine = (step.of(places[step.tokens]) for step in steps if step.tokens in places)
        return [step for step in mine if len(step.place)]


def subset(sequences: Sequences, rows: Sequence[int] | NDArray[Any]) -> tuple[Sequences, NDArray[np.int64]]:
    """Some traces alone, without extras and drift details, and where each of their tokens stood: [T] int64."""
    rows = np.asarray(rows, np.int64)
    branches = np.concatenate([np.zeros(0, np.int64), *(_branches(sequences, row) for row in rows)])
    starts, ends = sequences.cu_seqlens[branches], sequences.cu_seqlens[branches + 1]
    places = np.concatenate(
        [np.zeros(0, np.int64), *(np.arange(int(a), int(b)) for a, b in zip(starts, ends, strict=True))]
    ).astype(np.int64)
    number = np.full(sequences.traces, -1, np.int32)
    number[rows] = np.arange(len(rows), dtype=np.int32)
    codes, group = np.unique(sequences.group[rows], return_inverse=True)
    cu = sequences.cu_turns.tolist()
    turns = [np.arange(cu[row], cu[row + 1]) for row in rows.tolist()]
    per_token = ("ids", "source", "trainable", "rollout_logprobs", "turn", "version", "tier", "inv_temperature")
    columns: dict[str, Any] = {name: getattr(sequences, name)[places] for name in per_token}
    names = sequences.group_names
    per_trace = ("rewards", "logprob_kind", "temperature", "reshaped", "ending")
    columns |= {name: getattr(sequences, name)[rows] for name in per_trace}
    return replace(
        sequences,
        **columns,
        cu_seqlens=np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int64),
        trace=number[sequences.trace[branches]],
        group=group.astype(np.int32),
        turn_rewards=sequences.turn_rewards[np.concatenate([np.zeros(0, np.int64), *turns])],
        cu_turns=np.concatenate([[0], np.cumsum([len(part) for part in turns])]).astype(np.int64),
        trace_ids=tuple(sequences.trace_name(int(row)) for row in rows),
        group_names=tuple(names[code] if code < len(names) else str(code) for code in codes),
        drift=_drift(sequences, number),
        extras={},
        images=sequences.images and sequences.images.take(branches),
    ), places


def _branches(sequences: Sequences, row: int) -> NDArray[np.int64]:
    first, last = np.searchsorted(sequences.trace, [row, row + 1])
    return np.arange(first, last, dtype=np.int64)


def _drift(sequences: Sequences, number: NDArray[np.int32]) -> Any:
    found = sequences.drift
    here = np.flatnonzero(number[found.trace] >= 0) if len(found) else np.zeros(0, np.int64)
    if not len(here):
        return replace(no_drift(), reasons=found.reasons)
    columns = {name: getattr(found, name)[here] for name in ("reason", "turn", "token", "count")}
    details = tuple(found.detail[index] for index in here.tolist())
    return replace(
        found, **columns, trace=number[found.trace[here]], detail=details, recorded=0, exact=0, errors=(), left_out=()
    )


def each(folder: Path) -> Iterator[StepTerms]:
    """All steps of a folder, in order."""
    found = Terms(folder)
    return (found.read(path) for _, path in found.files())
