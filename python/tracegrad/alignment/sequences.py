"""Aligned tokens as flat arrays: `Sequences`, a packed (varlen) token dataset.

`align` and `Sequences.from_arrays` create it. Each token has one source, and at most one logprob.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _html, _validation
from tracegrad.alignment import store
from tracegrad.alignment.mismatch import AlignmentReport, empty_report
from tracegrad.alignment.penalties import Penalties, check_penalties
from tracegrad.alignment.ragged import Ragged
from tracegrad.alignment.token_sets import TokenSets, support_of
from tracegrad.data import to_arrow
from tracegrad.data.codes import ENDINGS, LEVEL_TEXT, LEVELS, LOGPROB_KINDS, MEDIA, NO_LEVEL, PROMPT, SAMPLED, TEXT_ONLY
from tracegrad.errors import ArgumentError
from tracegrad.images import ImageSpans
from tracegrad.storage import download

Array = NDArray[Any]


def integers(values: ArrayLike, name: str, length: int) -> NDArray[np.int32]:
    return _validation.integers(values, name, np.int32, length=length)


def check_indices(values: NDArray[np.int32], name: str, least: int, count: int) -> None:
    """Raise ArgumentError unless numbers count from 0: tables are as long as the largest number."""
    most = max(count, 1 << 16)
    if len(values) and not least <= values.min() <= values.max() <= most:
        raise ArgumentError(
            f"TG-ALIGN-008: {name} runs from {values.min()} to {values.max()}. A table would have as many rows. "
            f"Number them from 0: at least {least}, at most {most}."
        )


def check_offsets(cu: Array, count: int) -> None:
    if len(cu) < 2 or cu[0] != 0 or cu[-1] != count or np.any(cu[1:] < cu[:-1]):
        raise ArgumentError(
            f"TG-ALIGN-009: cu_seqlens must rise from 0 to the {count} ids, with an end for at least one sequence. "
            f"It is {cu[:8].tolist()}... Pass where each sequence begins, and the number of ids."
        )


def check_logprobs(logprobs: Array, keep: Array) -> None:
    bad = np.flatnonzero(keep & (logprobs > 1e-3))
    if len(bad):
        raise ArgumentError(
            f"TG-ALIGN-010: token {bad[0]}: the rollout logprob {logprobs[bad[0]]:.4g} is positive, and {len(bad)} "
            "are. A logprob is at most 0, so these are something else. Pass NaN where a logprob is not known."
        )


def rewards_of(rewards: ArrayLike | None, total: int, names: Sequence[str]) -> Array:
    """Check rewards, and return them as [R, K] float32; NaN if there are none."""
    _validation.instances(names, "reward_names", str)
    if rewards is None:
        return np.full((total, max(len(names), 1)), np.nan, np.float32)
    table = _validation.as_floats(_validation.numbers(rewards, "rewards"), np.float32, "rewards")
    if table.shape != (total, len(names)) and not (table.shape == (total,) and len(names) == 1):
        raise ArgumentError(
            f"TG-ALIGN-011: rewards has shape {table.shape} for {total} traces and the names {names!r}. "
            "Each trace has one number a name. Pass [R], or [R, K] with K reward_names."
        )
    return table.reshape(total, -1)


def extras_of(extras: Mapping[str, Array | Ragged] | None, count: int) -> dict[str, Any]:
    """Check named arrays with one row per token, and return them as a dict."""
    columns = dict(_validation.instance({} if extras is None else extras, "extras", Mapping, "Pass names and arrays."))
    for name, values in columns.items():
        _validation.instance(name, "a name of extras", str, "Name each array.")
        column = columns[name] = (
            values if isinstance(values, Ragged) else _validation.numbers(values, f"extras[{name!r}]")
        )
        if (not isinstance(column, Ragged) and column.ndim == 0) or len(column) != count:
            raise ArgumentError(
                f"TG-ALIGN-012: extras[{name!r}] has not one row for each of the {count} ids. Pass [T, ...]."
            )
    return columns


def check_traces(trace: Array) -> None:
    steps = np.diff(trace.astype(np.int64))
    if len(trace) and (trace[0] != 0 or np.any((steps != 0) & (steps != 1))):
        raise ArgumentError("TG-ALIGN-013: trace must count up from 0 without gaps, branches of a trace side by side.")


@dataclass(frozen=True, repr=False)
class Sequences:
    """Traces as flat token arrays. Letters: R traces, N branches, T tokens, K rewards.

    Args:
        ids: [T] int32.
        source: [T] uint8: 0 prompt, 1 template, 2 sampled.
        trainable: [T] bool: whether the token is trained.
        rollout_logprobs: [T] float32, nats, NaN if unknown.
        turn: [T] int32: the generation of the trace that sampled the token, -1 if it was not sampled.
        version: [T] int32: the policy version that sampled the token, -1 unknown.
        alignment_level: [T] uint8: index into `LEVELS`, 255 if the token was not sampled.
        inv_temperature: [T] float32: 1 for raw logprobs, 1/temperature for processed ones.
        cu_seqlens: [N+1] int64: branch n is tokens cu_seqlens[n]:cu_seqlens[n+1].
        trace: [N] int32: the trace of each branch; branches of a trace are adjacent and in order.
        group: [R] int32.
        rewards: [R, K] float32, NaN if a trace lacks the reward; `reward_names` names the columns.
        turn_rewards: float32, one per generation, NaN if there is none; trace r has
            turn_rewards[cu_turns[r]:cu_turns[r+1]].
        cu_turns: [R+1] int64.
        logprob_kind: [R] uint8: 0 unknown, 1 raw, 2 processed.
        temperature: [R] float32: the sampling temperature, NaN if that of any turn is unknown. If turns differ, it is
            one that is not 1.
        reshaped: [R] uint32: bit b is set if option b of `sampling.OPTIONS` was on (top_p below 1, a top_k, a penalty)
            in a turn with logprobs, and neither `support` nor `penalties` replay it. Its tokens then have another
            distribution than that which the trainer computes.
        replayed: [R] uint32: bit b is set if option b was on in a turn with logprobs, and `support` or `penalties`
            replay it.
        ending: [R] uint8: the end of the last generation: 0 unknown, 1 finished, 2 truncated by a length limit, an
            abort or a filter. It is read from the finish reason. Without one, a generation is finished if it contains
            its stop token or text.
        trace_ids: R names; `group_names`: names of the integers in `group`.
        alignment_report: the alignment report.
        extras: named arrays per token [T, ...], or `Ragged` if rows differ in length; sliced along with the tokens.
            `routed_experts` (-1 if a token has none) come from the records.
        images: the spans of images; None if there are none.
        support: the ids from which each token was sampled, if the sampler kept only a part of the vocabulary (top_p,
            top_k, min_p, ...); None if there is no such token. The logprobs of these tokens, recorded and computed, are
            over their support.
        penalties: the penalties of generations whose logprobs, recorded and computed, include them; None if there are
            none.

    >>> nan = float("nan")
    >>> sequences = Sequences.from_arrays(
    ...     ids=[5, 6, 7, 5, 8],
    ...     cu_seqlens=[0, 3, 5],
    ...     rollout_logprobs=[nan, -0.5, -0.1, nan, -1.0],
    ...     trainable=[False, True, True, False, True],
    ...     group=[0, 0],
    ...     rewards=[1.0, 0.0],
    ... )
    >>> sequences.traces, sequences.tokens, sequences.terms.tolist(), sequences.reward.tolist()
    (2, 5, [1, 2, 4], [1.0, 0.0])
    """

    ids: NDArray[np.int32]
    source: NDArray[np.uint8]
    trainable: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    turn: NDArray[np.int32]
    version: NDArray[np.int32]
    alignment_level: NDArray[np.uint8]
    inv_temperature: NDArray[np.float32]
    cu_seqlens: NDArray[np.int64]
    trace: NDArray[np.int32]
    group: NDArray[np.int32]
    rewards: NDArray[np.float32]
    reward_names: tuple[str, ...]
    turn_rewards: NDArray[np.float32]
    cu_turns: NDArray[np.int64]
    logprob_kind: NDArray[np.uint8]
    temperature: NDArray[np.float32]
    reshaped: NDArray[np.uint32]
    replayed: NDArray[np.uint32]
    ending: NDArray[np.uint8]
    trace_ids: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()
    alignment_report: AlignmentReport = field(default_factory=empty_report)
    extras: Mapping[str, Array | Ragged] = field(default_factory=dict)
    images: ImageSpans | None = None
    support: TokenSets | None = None
    penalties: Penalties | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return len(self.ids)

    @property
    def branches(self) -> int:
        """Number of branches N."""
        return len(self.trace)

    @property
    def traces(self) -> int:
        """Number of traces R."""
        return len(self.group)

    def trace_name(self, trace: int) -> str:
        """Return the name of a trace in messages: its id, or its index if there are no ids."""
        return self.trace_ids[trace] if self.trace_ids else str(trace)

    @property
    def terms(self) -> NDArray[np.int64]:
        """[M] int64: positions of the trainable tokens, in order."""
        return np.flatnonzero(self.trainable)

    def levels(self) -> dict[str, dict[str, int]]:
        """Return for each level the number of sampled tokens, of trainable tokens, and of generations with one."""
        owner = np.repeat(self.trace, np.diff(self.cu_seqlens)).astype(np.int64)
        generation = self.cu_turns[owner] + self.turn
        table: dict[str, dict[str, int]] = {}
        for code, name in enumerate(LEVELS):
            # Later branches repeat a sampled token without its logprob, not trainable: count it once.
            selected = (self.alignment_level == code) & (
                self.trainable | ~np.isnan(self.rollout_logprobs) | (code == TEXT_ONLY)
            )
            if selected.any():
                table[name] = {
                    "tokens": int(selected.sum()),
                    "trainable": int((selected & self.trainable).sum()),
                    "generations": len(np.unique(generation[selected])),
                }
        return table

    @property
    def reward(self) -> NDArray[np.float32]:
        """[R] float32: the first reward column."""
        return self.rewards[:, 0]

    def __repr__(self) -> str:
        size = f"{self.traces} traces, {self.branches} branches, {self.tokens} tokens"
        return f"Sequences({size}, {int(self.trainable.sum())} trainable, {self.alignment_report.rate:.3%} inexact)"

    def _repr_html_(self) -> str:
        levels = [(name, LEVEL_TEXT[name], *counts.values()) for name, counts in self.levels().items()]
        return _html.table(repr(self), ("alignment level", "", "tokens", "trainable", "generations"), levels)

    def to_arrow(self, rows: Literal["trace", "token"] = "trace") -> Any:
        """Return a `pyarrow.Table` with one row per trace, or one row per token; unknown values are null.

        Columns of traces: trace, group, a column for each reward, branches, tokens, terms, turns, logprob_kind,
        temperature, ending, findings (in `alignment_report`). Columns of tokens: trace, branch, position (in its
        branch), the arrays per token, and extras of one dimension.

        Raises:
            ArgumentError: if `per` is neither, or pyarrow is not installed.

        >>> one = Sequences.from_arrays([5, 6], [0, 2], [float("nan"), -0.5], [False, True], rewards=[1.0])
        >>> one.to_arrow().select(["reward", "tokens", "terms"]).to_pylist()
        [{'reward': 1.0, 'tokens': 2, 'terms': 1}]
        >>> one.to_arrow("token").select(["position", "id", "rollout_logprob"]).to_pylist()[1]
        {'position': 1, 'id': 6, 'rollout_logprob': -0.5}
        """
        if rows not in ("trace", "token"):
            raise ArgumentError(f"TG-ALIGN-014: per is {rows!r}. Rows are traces or tokens. Pass 'trace' or 'token'.")
        return to_arrow.arrow().table(to_arrow.by_trace(self) if rows == "trace" else to_arrow.by_token(self))

    def to_pandas(self, per: Literal["trace", "token"] = "trace") -> Any:
        """Return the table of `to_arrow` as a `pandas.DataFrame`. pandas must be installed.

        Raises:
            ArgumentError: as for `to_arrow`.
        """
        return self.to_arrow(per).to_pandas()

    @property
    def has_unknown_media(self) -> NDArray[np.bool_]:
        """[R] bool: traces with an image, audio or video before a turn and without ids for it (R32, R34).

        No later token of such a branch is trained.
        """
        mask = np.zeros(self.traces, np.bool_)
        mask[self.alignment_report.trace[np.isin(self.alignment_report.reason, MEDIA)]] = True
        return mask

    def with_image_processor(self, folder: str | os.PathLike[str]) -> "Sequences":
        """Return the sequences with the image processor of a model's folder; unchanged if there are no images.

        Raises:
            ArgumentError: if they were aligned with another image processor.
        """
        return self if self.images is None else replace(self, images=self.images.of_model(Path(folder)))

    @classmethod
    def from_arrays(
        cls,
        ids: ArrayLike,
        cu_seqlens: ArrayLike,
        rollout_logprobs: ArrayLike,
        trainable: ArrayLike,
        *,
        trace: ArrayLike | None = None,
        group: ArrayLike | None = None,
        rewards: ArrayLike | None = None,
        reward_names: Sequence[str] = ("reward",),
        turn: ArrayLike | None = None,
        version: ArrayLike | None = None,
        inv_temperature: ArrayLike | None = None,
        logprob_kind: str = "processed",
        ending: ArrayLike | None = None,
        extras: Mapping[str, Array | Ragged] | None = None,
        support: Ragged | TokenSets | None = None,
        penalties: Penalties | None = None,
    ) -> "Sequences":
        """Create sequences from the arrays of a trainer.

        Args:
            ids: [T] integers.
            cu_seqlens: [N+1] offsets, starting at 0 and ending at T.
            rollout_logprobs: [T] nats, NaN if unknown.
            trainable: [T] bool.
            trace: [N], default one trace per sequence.
            group: [R], default one group for each trace.
            rewards: [R] or [R, K], default NaN.
            reward_names: names of the K columns of `rewards`.
            turn: [T], default 0 for trainable tokens and -1 for others.
            version: [T], the policy version that sampled each token, default -1 (unknown).
            inv_temperature: [T], default 1.
            logprob_kind: "raw", "processed" or "unknown".
            ending: [R] 0 unknown, 1 finished, 2 truncated; default unknown.
            extras: named arrays with one row per token.
            support: for each token the ids from which it was sampled, empty for the whole vocabulary. The logprobs of
                tokens with support must be those of the distribution over it.
            penalties: of the generations, numbered by trace and turn. Their logprobs must include them.

        Raises:
            ArgumentError: if lengths contradict one another or a trainable token has a positive logprob.

        >>> s = Sequences.from_arrays([5, 6, 7], [0, 3], [float("nan"), -0.5, -0.1], [False, True, True], rewards=[1.0])
        >>> s.traces, s.tokens, s.terms.tolist()
        (1, 3, [1, 2])
        """
        ids_ = _validation.integers(ids, "ids", np.int32)
        count = len(ids_)
        cu = _validation.integers(cu_seqlens, "cu_seqlens")
        check_offsets(cu, count)
        keep = _validation.flags(trainable, "trainable", length=count)
        logprobs = _validation.floats(rollout_logprobs, "rollout_logprobs", np.float32, length=count)
        check_logprobs(logprobs, keep)
        trace_ = integers(np.arange(len(cu) - 1, dtype=np.int32) if trace is None else trace, "trace", len(cu) - 1)
        check_traces(trace_)
        total = int(trace_[-1]) + 1 if len(trace_) else 0
        group_ = integers(np.arange(total, dtype=np.int32) if group is None else group, "group", total)
        table = rewards_of(rewards, total, reward_names)
        turn_ = integers(np.where(keep, 0, -1).astype(np.int32) if turn is None else turn, "turn", count)
        check_indices(group_, "group", 0, total)
        check_indices(turn_, "turn", -1, count)
        owner = np.repeat(trace_, np.diff(cu))
        turns = np.zeros(total, np.int64)
        np.maximum.at(turns, owner, turn_.astype(np.int64) + 1)
        cu_turns = np.concatenate([[0], np.cumsum(turns)]).astype(np.int64)
        _validation.one_of(logprob_kind, "logprob_kind", LOGPROB_KINDS)
        ending_ = integers(np.zeros(total, np.int32) if ending is None else ending, "ending", total)
        if len(ending_) and not 0 <= ending_.min() <= ending_.max() < len(ENDINGS):
            raise ArgumentError(
                f"TG-ALIGN-015: ending runs from {ending_.min()} to {ending_.max()}. It says how each trace ended. "
                "Pass 0 where it is unknown, 1 where it ended by itself, 2 where it was cut off."
            )
        return cls(
            ids=ids_,
            source=np.where(keep, SAMPLED, PROMPT).astype(np.uint8),
            trainable=keep,
            rollout_logprobs=logprobs,
            turn=turn_,
            version=np.full(count, -1, np.int32)
            if version is None
            else _validation.integers(version, "version", np.int32, length=count),
            alignment_level=np.where(keep, 0, NO_LEVEL).astype(np.uint8),
            inv_temperature=np.ones(count, np.float32)
            if inv_temperature is None
            else _validation.floats(inv_temperature, "inv_temperature", np.float32, length=count),
            cu_seqlens=cu,
            trace=trace_,
            group=group_,
            rewards=table,
            reward_names=tuple(reward_names),
            turn_rewards=np.full(int(cu_turns[-1]), np.nan, np.float32),
            cu_turns=cu_turns,
            logprob_kind=np.full(total, LOGPROB_KINDS.index(logprob_kind), np.uint8),
            temperature=np.full(total, np.nan, np.float32),
            reshaped=np.zeros(total, np.uint32),
            replayed=np.zeros(total, np.uint32),
            ending=ending_.astype(np.uint8),
            trace_ids=tuple(str(i) for i in range(total)),
            group_names=tuple(str(i) for i in range(int(group_.max()) + 1)) if total else (),
            extras=extras_of(extras, count),
            support=support_of(support, ids_, keep),
            penalties=check_penalties(penalties, int(cu_turns[-1])),
        )

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the sequences to a directory.

        The files are `sequences.safetensors`, `traces.safetensors`, `sequences.json` with names and details,
        `media.bin` if there are images, and finally `manifest.json`.

        Args:
            directory: created if needed. Existing files with these names are replaced.

        Raises:
            ArgumentError: for values that `load` would reject, or if another process is saving there.
            ReadError: if the files cannot be written, for example because the disk is full.
        """
        store.save(Path(directory), self.stored())

    def stored(self) -> store.StoredSequences:
        """Return the fields in the form that `store` writes."""
        names = {name: getattr(self, name) for name in store.NAMES}
        columns = {name: getattr(self, name) for name in store.COLUMNS}
        columns |= {f"mismatches.{name}": getattr(self.alignment_report, name) for name in store.MISMATCH_COLUMNS}
        report = {
            name: getattr(self.alignment_report, name) for name in ("detail", "reasons", "recorded", "exact", "errors")
        }
        report["server_profiles"] = dict(self.alignment_report.server_profiles)
        return store.StoredSequences(
            columns, dict(self.extras), names, report, self.images, self.support, self.penalties
        )

    @classmethod
    def load(cls, directory: str | os.PathLike[str], *, verify: bool = False) -> "Sequences":
        """Load a directory that `save` wrote, memory-mapped and read-only.

        All shards of a directory that `prepare` wrote are concatenated in memory. Groups of several shards are merged
        if their names are equal. The manifest must exist, all files must have the lengths in it, and all values must be
        valid.

        Args:
            directory: a path, or an address (s3://bucket/path), which is downloaded into the cache.
            verify: also compare the checksums of the files, which detects a changed logprob; `tracegrad train` does.

        Raises:
            ReadError: if there is no complete data in the directory.
            FormatError: if the files were not written by `save`, or do not match the manifest.
        """
        return cls.of_stored(store.load(download.local_path(directory), verify))

    @classmethod
    def of_stored(cls, found: store.StoredSequences) -> "Sequences":
        """Create sequences from the result of `stored`."""
        columns: dict[str, Any] = {**found.columns, **found.names}
        mismatches = {name: columns.pop(f"mismatches.{name}") for name in store.MISMATCH_COLUMNS}
        return cls(
            **columns,
            extras=found.extras,
            alignment_report=AlignmentReport(**mismatches, **found.alignment_report),
            images=found.images,
            support=found.support,
            penalties=found.penalties,
        )
