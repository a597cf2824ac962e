"""The token log of a run: one file per step with the results of its tokens, and the sequences they belong to.

    terms/tokens-00001/               a `Sequences` folder: the logged traces
    terms/step-00000001.r0.safetensors  per-token arrays of one step and rank, for those traces

`TokenLog` reads the log, and `trainer.token_log_writer` writes it. A file never changes once it is written.
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

from tracegrad.alignment.mismatch import empty_report
from tracegrad.alignment.penalties import Penalties
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError, FormatError, TracegradError
from tracegrad.storage import safetensors_file

FOLDER = "terms"
FLOATS = ("ratio", "weight", "advantages", "logprobs", "old_logprobs", "gradient", "entropy")
TRAINED, CLIPPED, UNKNOWN, MASKED_BY_POLICY = range(4)
"""Codes of `why`. Higher codes are the objective's rejections on detached ratios, in order."""

_STEP_FILE = re.compile(r"step-(\d{8,})\.r(\d+)\.safetensors")


@dataclass(frozen=True)
class StepTokens:
    """The logged tokens of one step.

    Args:
        step: number of the update, from 1.
        tokens: name of the folder with their sequences.
        labels: label of each code of `why`.
        token: [m] int64, token index in those `Sequences`.
        trace: [m] int32, trace index in them, ascending.
        outcome: [m] uint8, code of the token's outcome: trained, clipped, or the mask that dropped it.
        values: the arrays of `FLOATS` by name, [m] float32 each: ratio in the surrogate, weight, advantage, logprob of
            the policy before the update, old logprob (NaN if none was used), d loss / d logprob, entropy.

    >>> values = {name: np.ones(3, np.float32) for name in FLOATS}
    >>> labels = ("trained", "clipped", "unknown", "masked")
    >>> outcome = np.array([TRAINED, CLIPPED, UNKNOWN], np.uint8)
    >>> tokens = StepTokens(1, "tokens-00001", labels, np.array([1, 2, 4]), np.array([0, 0, 1]), outcome, values)
    >>> tokens.keep.tolist(), tokens.of(trace=0).token.tolist()
    ([True, True, False], [1, 2])
    """

    step: int
    tokens: str
    labels: tuple[str, ...]
    token: NDArray[np.int64]
    trace: NDArray[np.int32]
    outcome: NDArray[np.uint8]
    values: dict[str, NDArray[np.float32]]

    @property
    def keep(self) -> NDArray[np.bool_]:
        """[m] bool: whether no rejection dropped the token."""
        return (self.outcome == TRAINED) | (self.outcome == CLIPPED)

    def of(self, trace: int) -> "StepTokens":
        """Return the tokens of one trace."""
        first, last = np.searchsorted(self.trace, [trace, trace + 1])
        here = slice(int(first), int(last))
        values = {name: column[here] for name, column in self.values.items()}
        return replace(self, token=self.token[here], trace=self.trace[here], outcome=self.outcome[here], values=values)


def write_step(path: Path, terms: StepTokens) -> int:
    """Write the tokens of a step; return the number of bytes.

    >>> from tempfile import TemporaryDirectory
    >>> sequences = Sequences.from_arrays([5, 6], [0, 2], [float("nan"), -0.5], [False, True])
    >>> values = {name: np.full(1, 0.5, np.float32) for name in FLOATS}
    >>> with TemporaryDirectory() as folder:
    ...     sequences.save(Path(folder, "tokens-00001"))
    ...     place = np.array([1]), np.array([0], np.int32), np.array([TRAINED], np.uint8)
    ...     tokens = StepTokens(1, "tokens-00001", ("trained",), *place, values)
    ...     size = write_step(Path(folder, step_name(1, rank=0)), tokens)
    ...     [(step.step, step.token.tolist(), step.values["ratio"].tolist()) for step in iterate_steps(Path(folder))]
    [(1, [1], [0.5])]
    """
    metadata = {"step": str(terms.step), "tokens": terms.tokens, "words": json.dumps(terms.labels)}
    arrays = {"place": terms.token, "trace": terms.trace, "why": terms.outcome, **terms.values}
    return safetensors_file.write(path, arrays, metadata).bytes


def step_name(step: int, rank: int) -> str:
    """Return the file name of one step and rank.

    >>> step_name(12, rank=0)
    'step-00000012.r0.safetensors'
    """
    return f"step-{step:08d}.r{rank}.safetensors"


class TokenLog:
    """Reads the token log of a run.

    Args:
        folder: the run directory, or its folder `terms`.

    Raises:
        ArgumentError: if there is no token log.

    >>> from tempfile import TemporaryDirectory
    >>> sequences = replace(Sequences.from_arrays([5, 6], [0, 2], [np.nan, -0.5], [False, True]), trace_ids=("sum-0",))
    >>> values = {name: np.full(1, 0.5, np.float32) for name in FLOATS}
    >>> with TemporaryDirectory() as folder:
    ...     sequences.save(Path(folder, "tokens-00001"))
    ...     place = np.array([1]), np.array([0], np.int32), np.array([TRAINED], np.uint8)
    ...     _ = write_step(Path(folder, step_name(1, 0)), StepTokens(1, "tokens-00001", ("trained",), *place, values))
    ...     log = TokenLog(folder)
    ...     log.sets(), log.find("sum-0"), log.of("sum-0")[0].values["logprobs"].tolist()
    (['tokens-00001'], [('tokens-00001', 0)], [0.5])
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
        if not any(self.folder.glob("tokens-*")):
            raise ArgumentError(
                f"TG-TRAIN-080: {folder}: no {FOLDER}/tokens-* exists, so the run has no token log. Run it with "
                f"token_log.mode 'sampled'."
            )
        self._sequences = lru_cache(8)(lambda name: Sequences.load(self.folder / name))

    def sets(self) -> list[str]:
        """Return the names of the complete folders of sequences, in order."""
        return sorted(path.parent.name for path in self.folder.glob("tokens-*/manifest.json"))

    def sequences(self, name: str) -> Sequences:
        """Load the sequences of one folder."""
        return self._sequences(name)

    def files(self) -> list[tuple[int, Path]]:
        """Return (step, file) of all step files, in order."""
        matches = [(_STEP_FILE.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return sorted((int(match[1]), path) for match, path in matches if match)

    def read(self, path: Path) -> StepTokens:
        """Read one step file.

        Raises:
            FormatError: if the file is not in the format that a run writes.
        """
        arrays, metadata = safetensors_file.read(path)
        try:
            place, trace, why = (arrays[name] for name in ("place", "trace", "why"))
            values = {name: arrays[name] for name in FLOATS}
            words = tuple(map(str, json.loads(metadata["words"])))
            terms = StepTokens(int(metadata["step"]), metadata["tokens"], words, place, trace, why, values)
            sequences = self.sequences(terms.tokens)
            lengths = {len(column) for column in arrays.values()}
            invalid = len(lengths) != 1 or np.any(np.diff(trace.astype(np.int64)) < 0)
            invalid = invalid or why.max(initial=0) >= len(words)
            invalid = invalid or (len(place) and not 0 <= place.min() <= place.max() < sequences.tokens)
            if (
                invalid
                or (len(trace) and not 0 <= trace[0] <= trace[-1] < sequences.traces)
                or why.max(initial=0) >= len(words)
            ):
                raise ValueError("its arrays do not match")
        except TracegradError:
            raise
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise FormatError(
                f"TG-TRAIN-081: {path}: this is not a file of a token log ({str(error)[:80]!r}). Run it again."
            ) from error
        return terms

    def find(self, trace_id: str) -> list[tuple[str, int]]:
        """Return (folder of sequences, row) of each trace with this id, the newest last."""
        names = ((name, self.sequences(name)) for name in self.sets())
        return [
            (name, sequences.trace_ids.index(trace_id)) for name, sequences in names if trace_id in sequences.trace_ids
        ]

    def of(self, trace_id: str) -> list[StepTokens]:
        """Return the logged tokens of a trace, step by step."""
        rows = dict(self.find(trace_id))
        steps = (self.read(path) for _, path in self.files())
        steps_of_trace = (step.of(rows[step.tokens]) for step in steps if step.tokens in rows)
        return [step for step in steps_of_trace if len(step.token)]


def subset(sequences: Sequences, rows: Sequence[int] | NDArray[Any]) -> tuple[Sequences, NDArray[np.int64]]:
    """Select traces, without extras and the counts of the mismatch report.

    Returns:
        The selected traces; and [T] int64, the index of each of their tokens in `sequences`.

    >>> ids, trainable = [5, 6, 7, 5, 8], [False, True, True, False, True]
    >>> sequences = Sequences.from_arrays(ids, [0, 3, 5], [np.nan, -0.5, -0.1, np.nan, -1.0], trainable)
    >>> part, origin = subset(sequences, [1])
    >>> part.ids.tolist(), origin.tolist()  # the tokens 3 and 4 of `sequences`
    ([5, 8], [3, 4])
    """
    rows = np.asarray(rows, np.int64)
    branches = np.concatenate([np.zeros(0, np.int64), *(_branches(sequences, row) for row in rows)])
    starts, ends = sequences.cu_seqlens[branches], sequences.cu_seqlens[branches + 1]
    tokens = np.concatenate(
        [np.zeros(0, np.int64), *(np.arange(int(a), int(b)) for a, b in zip(starts, ends, strict=True))]
    ).astype(np.int64)
    number = np.full(sequences.traces, -1, np.int32)
    number[rows] = np.arange(len(rows), dtype=np.int32)
    codes, group = np.unique(sequences.group[rows], return_inverse=True)
    turn_offsets = sequences.cu_turns.tolist()
    turns = [np.arange(turn_offsets[row], turn_offsets[row + 1]) for row in rows.tolist()]
    per_token = (
        "ids",
        "source",
        "trainable",
        "rollout_logprobs",
        "turn",
        "version",
        "alignment_level",
        "inv_temperature",
    )
    columns: dict[str, Any] = {name: getattr(sequences, name)[tokens] for name in per_token}
    names = sequences.group_names
    per_trace = ("rewards", "logprob_kind", "temperature", "reshaped", "replayed", "ending")
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
        alignment_report=_subset_report(sequences, number),
        extras={},
        images=sequences.images and sequences.images.take(branches),
        support=sequences.support and sequences.support.take(tokens),
        penalties=Penalties.concatenate([(sequences.penalties, np.concatenate([np.zeros(0, np.int64), *turns]))]),
    ), tokens


def _branches(sequences: Sequences, row: int) -> NDArray[np.int64]:
    first, last = np.searchsorted(sequences.trace, [row, row + 1])
    return np.arange(first, last, dtype=np.int64)


def _subset_report(sequences: Sequences, number: NDArray[np.int32]) -> Any:
    report = sequences.alignment_report
    here = np.flatnonzero(number[report.trace] >= 0) if len(report) else np.zeros(0, np.int64)
    if not len(here):
        return replace(empty_report(), reasons=report.reasons)
    columns = {name: getattr(report, name)[here] for name in ("reason", "turn", "token", "count")}
    details = tuple(report.detail[index] for index in here.tolist())
    return replace(
        report, **columns, trace=number[report.trace[here]], detail=details, recorded=0, exact=0, errors=(), left_out=()
    )


def iterate_steps(folder: Path) -> Iterator[StepTokens]:
    """Yield all steps of a folder, in order.

    >>> from tempfile import TemporaryDirectory
    >>> sequences = Sequences.from_arrays([5, 6], [0, 2], [float("nan"), -0.5], [False, True])
    >>> values = {name: np.full(1, 0.5, np.float32) for name in FLOATS}
    >>> place = np.array([1]), np.array([0], np.int32), np.array([TRAINED], np.uint8)
    >>> with TemporaryDirectory() as folder:
    ...     sequences.save(Path(folder, "tokens-00001"))
    ...     for number in (1, 2):
    ...         tokens = StepTokens(number, "tokens-00001", ("trained",), *place, values)
    ...         _ = write_step(Path(folder, step_name(number, rank=0)), tokens)
    ...     [tokens.step for tokens in iterate_steps(Path(folder))]
    [1, 2]
    """
    reader = TokenLog(folder)
    return (reader.read(path) for _, path in reader.files())
