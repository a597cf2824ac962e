"""Measure the logprobs that recorded tokens lack, with the checkpoint that wrote them (`fill`)."""

import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.align import align
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import FieldMap
from tracegrad.data.codes import SAMPLED, TEXT_ONLY
from tracegrad.data.reader import stream
from tracegrad.data.trace import Trace, Traces, write
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.missing_logprobs import generations as reasons
from tracegrad.missing_logprobs.checkpoint_test import CheckpointTest, SampledTokens, check_checkpoint
from tracegrad.missing_logprobs.generations import REASONS, GenerationTable, SamplingOverrides, has_raw_part
from tracegrad.missing_logprobs.predictions import (
    LISTED,
    LISTED_TRUNCATED,
    Predictions,
    kept_counts,
    over_kept,
    over_listed,
)
from tracegrad.missing_logprobs.records import FilledCall, filled_record, one_line, without_filled
from tracegrad.missing_logprobs.segmentation import Vocabulary, other_segmentations
from tracegrad.storage import files

TEST_TOKENS = 4096
"""Tokens that the test of the checkpoint uses, from conversations that are drawn over all inputs."""
_TEST_TRACES = 2048
_MOST_COMPARED = 32
_COMPARED = 4
"""Number of other checkpoints of a run that are compared by default."""
_BATCH = 256
_BATCH_BYTES = 8 << 20
"""Conversations, and bytes of their records, that are aligned, measured and written at once."""
_REPLACEMENT = "\ufffd".encode()
TEXT_UNCERTAINTY = 0.1
"""Default of the most by which the other segmentations of a text may exceed its canonical tokens."""


class CheckpointRefused(TracegradError):
    """A checkpoint that did not write the tokens, or tokens that cannot show it. `test` has the result of the test.

    >>> from tracegrad.missing_logprobs import CheckpointTest
    >>> test = CheckpointTest("undecided", "there is no token to test", tokens=0, p_value=1.0)
    >>> CheckpointRefused("TG-FILL-005: it cannot be told", test).test.verdict
    'undecided'
    """

    # Unpickling calls the class with only the message and sets the attribute afterwards.
    def __init__(self, message: str, test: CheckpointTest | None = None) -> None:
        super().__init__(message)
        self.test = test


class Scorer(Protocol):
    """Predictions of a model: by forward passes (`ModelScorer`) or from a server (`ServerScorer`)."""

    engine: str
    dtype: str
    writes: bool
    """Whether this process writes the output; with several processes, one does."""

    def predict(
        self, sequences: Sequences, tokens: NDArray[np.int64], listed: int, at: NDArray[np.int32] | None = None
    ) -> Predictions:
        """Return the predictions at these tokens, at `sequences.inv_temperature`; of the ids `at`, if they are set."""
        ...

    def share(self, value: Any) -> Any:
        """Return the value of the process that writes."""
        ...

    def raise_on_all(self, error: Exception | None) -> None:
        """Raise an error of one process on all of them."""
        ...


@dataclass
class FillReport:
    """What `fill` did.

    Args:
        test: the test of the checkpoint; None if no token lacks a logprob.
        provenance: of the filled logprobs: model, dtype, engine.
        conversations: number of conversations read.
        filled_conversations: those with a filled token.
        unfilled: those without one that can be aligned, by reason.
        tokens: number of sampled tokens that training can use.
        recorded: those with a recorded logprob.
        filled: those whose logprob was measured.
        unknown: those that stay without a logprob, by reason.
        skipped: conversations that cannot be aligned; they are written as they are.
        seconds: wall time of the measurement.

    >>> report = FillReport(conversations=3, tokens=5, recorded=1, filled=3, unknown={"another policy version": 1})
    >>> report.filled_conversations, report.unfilled = 2, {"all tokens have a recorded logprob": 1}
    >>> print("\\n".join(report.lines()[1:]))
    filled   3 of 4 tokens without a recorded logprob, in 2 of 3 conversations
    unknown  1 tokens: another policy version
    unfilled 1 conversations: all tokens have a recorded logprob
    """

    test: CheckpointTest | None = None
    provenance: dict[str, str] = field(default_factory=dict)
    conversations: int = 0
    filled_conversations: int = 0
    unfilled: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    recorded: int = 0
    filled: int = 0
    unknown: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict."""
        return {**vars(self), "test": self.test and self.test.as_dict()}

    def lines(self) -> list[str]:
        """Return the report as lines for a terminal."""
        test = self.test
        share = f"{self.filled:,} of {self.tokens - self.recorded:,} tokens without a recorded logprob"
        pace = f"{self.filled / self.seconds:,.0f} tokens/s" if self.seconds > 0 else ""
        lines = [f"model    {self.provenance.get('model', '')[:16]}  {self.provenance.get('dtype', '')}"]
        lines += [] if test is None else [f"test     {test.verdict}: {test.reason} (p = {test.p_value:.3g})"]
        conversations = f"{self.filled_conversations:,} of {self.conversations:,} conversations"
        lines += [f"filled   {share}, in {conversations}  {pace}".rstrip()]
        lines += [f"unknown  {count:,} tokens: {reason}" for reason, count in sorted(self.unknown.items())]
        lines += [f"unfilled {count:,} conversations: {reason}" for reason, count in sorted(self.unfilled.items())]
        return lines + ([f"skipped  {self.skipped:,} conversations cannot be aligned"] if self.skipped else [])


def fill(
    source: Any,
    model: str | Path,
    *,
    out: str | Path,
    logprobs_from: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    policy_version: int | None = None,
    compare_with: Sequence[str | Path] | None = None,
    max_text_uncertainty: float = TEXT_UNCERTAINTY,
    accept_undecided: bool = False,
    server_profile: str | None = None,
    map: FieldMap | Mapping[str, str] | None = None,
    on_error: str = "raise",
    device: str = "auto",
    dtype: str = "auto",
    tokens_per_row: int = 8192,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> FillReport:
    """Measure the logprob of each sampled token that lacks a recorded one, and write the records with them.

    Only the checkpoint that wrote the tokens can measure them, so a sample of them is tested first. Each record is
    copied unchanged, with one key more, `tracegrad_filled`. `align` uses these logprobs at level T7. If the run is
    interrupted, call it again with the same arguments: it continues after the last conversation in `OUT.partial`.

    Args:
        source: inputs, as for `read`, except standard input.
        model: folder of the checkpoint that wrote the tokens.
        out: the file to write; .gz and .zst compress it.
        logprobs_from: URL of a vLLM server of this checkpoint. Its `prompt_logprobs` are used in place of forward
            passes here. They are logprobs at temperature 1, so tokens of another temperature stay without one.
        temperature, top_p, top_k, min_p: how the tokens were sampled, if the records do not state it or state it
            wrongly.
        policy_version: measure only tokens of this recorded version of the policy.
        compare_with: folders of other checkpoints that may have written the tokens, such as other steps of the run. If
            one of them explains the tokens significantly better, the checkpoint is refused. None: up to four others in
            the folder `checkpoints` that has this one, without `logprobs_from`.
        max_text_uncertainty: most by which the other segmentations of a text without ids may exceed its canonical
            tokens, in nats of log-probability. A text above it stays without logprobs.
        accept_undecided: fill also if the tokens are too few, or too certain, for a verdict.
        server_profile: as for `align`.
        map, on_error: as for `read`.
        device, dtype: of the forward passes; "auto": CUDA with bfloat16, or CPU with float32.
        tokens_per_row: tokens of one forward pass.
        seed: of the sample and the simulation of the test.
        progress: called with (phase, conversations done, conversations in total or 0 if unknown).

    Raises:
        CheckpointRefused: if the checkpoint did not write the tokens, or, without `accept_undecided`, if that is
            undecided. `error.test` has the result.
        ArgumentError: if an argument is invalid.
        ReadError, FormatError: as for `read`.

    >>> import tempfile
    >>> from tracegrad import read, strip_logprobs
    >>> texts = strip_logprobs(read("examples/quickstart/traces.jsonl.zst", limit=4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = f"{folder}/filled.jsonl"
    ...     report = fill(texts, "examples/quickstart/model", out=out, temperature=1.0, accept_undecided=True)
    >>> report.filled, report.test.verdict  # so few tokens cannot show whether the model wrote them
    (80, 'undecided')
    """
    overrides = SamplingOverrides(temperature, top_p, top_k, min_p)
    _check(overrides, max_text_uncertainty)
    if compare_with is not None and len(compare_with) > _MOST_COMPARED:
        raise ArgumentError(
            f"TG-FILL-011: compare_with has {len(compare_with)} checkpoints. So many dilute the test, because one of "
            f"them may fit better by chance. Name at most {_MOST_COMPARED}."
        )
    if isinstance(source, Iterator):
        raise ArgumentError(
            f"TG-FILL-009: source is {type(source).__name__}, which can be read once. The inputs are read twice, for "
            "the test and for the result. Pass files, or a list of records."
        )
    folder, out = Path(model), Path(out)
    tokenizer = Tokenizer.from_pretrained(folder)
    options = {"map": map, "on_error": on_error}
    work = _Measurement(
        tokenizer, overrides, policy_version, max_text_uncertainty, Vocabulary(tokenizer), server_profile
    )
    report = FillReport(provenance={"model": weights_hash(folder)})
    sample, report.conversations, digest = _sample(stream(source, **options), work, seed, progress)
    placing = {"device": device, "dtype": dtype, "tokens_per_row": tokens_per_row}
    scorer = _scorer(folder, logprobs_from, placing)
    if compare_with is None:
        compare_with = other_checkpoints(folder) if logprobs_from is None else ()
    report.provenance |= {"dtype": scorer.dtype, "engine": scorer.engine}
    if sample:
        report.test = _test(sample, work, scorer, compare_with, placing, seed)
        _refuse(report.test, folder, accept_undecided)
        report.provenance |= {"test": report.test.verdict, "p_value": f"{report.test.p_value:.3g}"}
    started = time.monotonic()
    settings = [report.provenance, vars(overrides), policy_version, max_text_uncertainty, server_profile, repr(map)]
    partial = _PartialFile(out, [settings, digest, _hash_of(folder, _RENDERING)], scorer)
    partial.restore(report)
    total, done = report.conversations, partial.records
    for traces in _from(stream(source, batch=_BATCH, **options), partial.records):
        lines = work.fill(traces, scorer, report)
        done += len(traces)
        report.seconds += time.monotonic() - started
        started = time.monotonic()
        partial.append(lines, report)
        if progress:
            progress("filling", done, total)
    if scorer.writes:
        write(stream(partial.path), out)
        partial.remove()
    return report


def _check(overrides: SamplingOverrides, nats: float) -> None:
    limits = {"temperature": (0.01, 100.0), "top_p": (1e-6, 1.0), "top_k": (-1, 1 << 31), "min_p": (0.0, 1.0)}
    for name, (low, high) in limits.items():
        value = getattr(overrides, name)
        if value is not None and not low <= value <= high:
            raise ArgumentError(
                f"TG-FILL-002: {name} is {value!r}. It is how the tokens were sampled, and must be between {low:g} and "
                f"{high:g}."
            )
    if not nats >= 0:
        raise ArgumentError(
            f"TG-FILL-003: max_text_uncertainty is {nats!r}. It bounds how uncertain the tokens of a text are, in "
            "nats. Pass a number from 0."
        )


def _scorer(folder: Path, server: str | None, placing: Mapping[str, Any]) -> Scorer:
    if server is not None:
        from tracegrad.missing_logprobs.server_scorer import ServerScorer

        return ServerScorer(server)
    from tracegrad.missing_logprobs.model_scorer import ModelScorer

    return ModelScorer(folder, **placing)


def _refuse(test: CheckpointTest, folder: Path, accept_undecided: bool) -> None:
    if test.verdict == "refused":
        raise CheckpointRefused(
            f"TG-FILL-004: {folder} did not write these tokens: {test.reason} (p = {test.p_value:.2g}). Logprobs of "
            "another checkpoint would be wrong ratios. Pass the checkpoint that sampled them, its chat template, and "
            "the sampling options (temperature, top_p, top_k) if the records lack them.",
            test,
        )
    if test.verdict == "undecided" and not accept_undecided:
        raise CheckpointRefused(
            f"TG-FILL-005: it cannot be told whether {folder} wrote these tokens: {test.reason}. Pass more "
            "conversations at once, or accept_undecided (--accept-undecided) if you know that it did.",
            test,
        )


def other_checkpoints(folder: Path) -> list[Path]:
    """Return up to four other checkpoints of the run that has this one, spread evenly; none for other folders."""
    if not re.fullmatch(r"step-\d+", folder.resolve().name):
        return []
    from tracegrad.trainer.checkpoint import list_checkpoints

    others = [path for path in list_checkpoints(folder.resolve().parents[1]) if path.name != folder.resolve().name]
    places = np.unique(np.linspace(0, len(others) - 1, min(_COMPARED, len(others))).round().astype(int))
    return [others[place] for place in places]


def weights_hash(folder: Path) -> str:
    """Return the blake2b hash of a model's weights, as 32 hex digits: of its safetensors files, in order of names.

    For LoRA adapters, the weights of the base model are included.

    Raises:
        ArgumentError: if the folder has no safetensors file.
    """
    if not any(folder.glob("*.safetensors")):
        raise ArgumentError(
            f"TG-FILL-010: {folder} has no safetensors file, so filled logprobs could not name their weights. Save the "
            "model with save_pretrained, and pass this folder."
        )
    base = _base_of(folder)
    return _hash_of(folder, ("*.safetensors",), *([] if base is None else [base]))


def _base_of(folder: Path) -> Path | None:
    """Return the local folder of the base model of LoRA adapters; None for other folders."""
    try:
        named = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    base = Path(named) if isinstance(named, str) else None
    return base if base is not None and base.is_dir() else None


_RENDERING = ("config.json", "adapter_config.json", "tokenizer*", "chat_template*", "vocab*", "merges.txt")
"""Files of a model's folder that determine the ids of texts."""


def _hash_of(folder: Path, patterns: Sequence[str], *more: Path) -> str:
    """Return the hash of the files of folders that match the patterns, with their names."""
    digest = blake2b(digest_size=16)
    for path in sorted({path for place in (folder, *more) for pattern in patterns for path in place.glob(pattern)}):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class _Selection:
    """The tokens of a batch that lack a logprob and can get one.

    Args:
        sequences: the aligned traces, with the inverse of each token's sampling temperature.
        rows: the trace in the batch of each aligned trace.
        table: the generations.
        generation: [T] generation of each sampled token, -1 for others.
        tokens: indices of the tokens without a logprob that can be measured.
        recorded: indices of tokens with a recorded logprob of the sampled distribution.
        partly_sampled: indices of the tokens of texts of which only the beginning is known to be sampled.
        unknown: number of tokens without a logprob, by reason.
        trainable_counts: [R] number of trainable sampled tokens of each aligned trace.
        recorded_counts: [R] number of those with a recorded logprob.
    """

    sequences: Sequences
    rows: NDArray[np.int64]
    table: GenerationTable
    generation: NDArray[np.int64]
    tokens: NDArray[np.int64]
    recorded: NDArray[np.int64]
    partly_sampled: NDArray[np.int64]
    unknown: dict[str, int]
    trainable_counts: NDArray[np.int64]
    recorded_counts: NDArray[np.int64]


@dataclass(frozen=True)
class _Measurement:
    """Aligns batches, selects their tokens without logprobs, and measures these."""

    tokenizer: Tokenizer
    overrides: SamplingOverrides
    policy_version: int | None
    max_text_uncertainty: float
    vocabulary: Vocabulary
    server_profile: str | None

    def select(self, traces: Sequence[Trace]) -> _Selection:
        """Align traces, and select the tokens without a logprob."""
        together = Traces.concatenate([Traces(trace.core.take([trace.index])) for trace in traces])
        sequences = self._align(together)
        rows = np.arange(len(traces))
        if sequences.traces < len(traces):  # Ids need not be unique, so which ones are left out is found one by one.
            rows = np.flatnonzero([self._align(together[row : row + 1]).traces for row in rows])
        table = GenerationTable.of(
            sequences,
            lambda row: traces[rows[row]],
            self.overrides,
            self.policy_version,
            self.tokenizer.model_vocab_size,
        )
        owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens)).astype(np.int64)
        generation = np.where(sequences.source == SAMPLED, sequences.cu_turns[owner] + sequences.turn, -1)
        usable = sequences.trainable & (generation >= 0)
        missing = np.isnan(sequences.rollout_logprobs)
        reason = (
            np.where(generation >= 0, table.reason[np.maximum(generation, 0)], -1) if len(table.reason) else generation
        )
        unknown = np.bincount(reason[usable & missing & (reason >= 0)], minlength=len(REASONS))
        inverse = sequences.inv_temperature.copy()
        partly = usable & missing & np.isin(reason, (reasons.RENDERED, reasons.LOSSY))
        sampled = usable & (reason < 0)
        is_own = np.zeros(sequences.tokens, bool)
        is_own[sampled] = np.abs(inverse[sampled] - 1 / table.temperature[generation[sampled]]) < 1e-6
        measured = sampled & missing | partly
        inverse[measured] = (1 / table.temperature[generation[measured]]).astype(np.float32)
        return _Selection(
            replace(sequences, inv_temperature=inverse),
            rows,
            table,
            generation,
            np.flatnonzero(sampled & missing),
            np.flatnonzero(sampled & ~missing & is_own & ~table.truncation.is_active[np.maximum(generation, 0)])
            if len(table.reason)
            else np.zeros(0, np.int64),
            np.flatnonzero(partly),
            {REASONS[number]: int(count) for number, count in enumerate(unknown) if count},
            np.bincount(owner[usable], minlength=sequences.traces),
            np.bincount(owner[usable & ~missing], minlength=sequences.traces),
        )

    def _align(self, traces: Traces) -> Sequences:
        options: dict[str, Any] = {"text_only": True, "on_error": "skip", "server_profile": self.server_profile}
        return align(traces, self.tokenizer, **options)

    def predict(self, selection: _Selection, tokens: NDArray[np.int64], scorer: Scorer, listed: int) -> "_Result":
        """Predict tokens over the ids that their sampling options keep."""
        truncation = selection.table.truncation.take(selection.generation[tokens])
        is_text = selection.sequences.alignment_level[tokens] == TEXT_ONLY
        active = truncation.is_active
        listed = max(listed, LISTED_TRUNCATED if active.any() else 0, LISTED if is_text.any() else 0)
        whole = scorer.predict(selection.sequences, tokens, listed)
        reason = np.where(np.isnan(whole.logprobs), reasons.NOT_REPORTED, -1).astype(np.int8)
        if not active.any():
            return _Result(whole, whole, np.full(len(tokens), -1, np.int64), reason)
        rows = np.flatnonzero(active)
        kept = np.full(len(tokens), -1, np.int64)
        kept[rows] = kept_counts(whole.top_logprobs[rows], truncation.take(rows))
        reason[active & (kept < 0) & (reason < 0)] = reasons.NOT_LISTED
        known = np.flatnonzero(kept >= 0)
        over = over_kept(whole.take(known), kept[known])
        logprobs, top, ids = whole.logprobs.copy(), whole.top_logprobs.copy(), whole.ids.copy()
        logprobs[known], top[known], ids[known] = over.logprobs, over.top_logprobs, over.ids
        reason[known[np.isnan(logprobs[known]) & (reason[known] < 0)]] = reasons.EXCLUDED
        logprobs[reason >= 0] = np.nan
        return _Result(replace(whole, logprobs=logprobs, top_logprobs=top, ids=ids), whole, kept, reason)

    def fill(self, traces: Sequence[Trace], scorer: Scorer, report: FillReport) -> list[bytes]:
        """Measure the tokens of a batch, add to the report, and return the records as lines."""
        traces = [without_filled(trace) for trace in traces]
        selection = self.select(traces)
        result = self.predict(selection, selection.tokens, scorer, 0)
        self.leave_out_uncertain_text(selection, result)
        for name, count in selection.unknown.items():
            report.unknown[name] = report.unknown.get(name, 0) + count
        for number in np.unique(result.reason[result.reason >= 0]).tolist():
            count = int(np.count_nonzero(result.reason == number))
            report.unknown[REASONS[number]] = report.unknown.get(REASONS[number], 0) + count
        report.tokens += int(selection.trainable_counts.sum())
        report.recorded += int(selection.recorded_counts.sum())
        report.filled += int(np.count_nonzero(~np.isnan(result.over_kept.logprobs)))
        report.skipped += len(traces) - selection.sequences.traces
        calls = _calls(selection, result)
        report.filled_conversations += len(calls)
        for row in sorted({*range(selection.sequences.traces)} - calls.keys()):
            reason = _unfilled_reason(int(selection.trainable_counts[row]), int(selection.recorded_counts[row]))
            report.unfilled[reason] = report.unfilled.get(reason, 0) + 1
        row_of = {int(row): number for number, row in enumerate(selection.rows)}
        return [
            filled_record(trace, calls.get(row_of.get(number, -1), {}), report.provenance)
            for number, trace in enumerate(traces)
        ]

    def leave_out_uncertain_text(self, selection: _Selection, result: "_Result") -> None:
        """Set the logprobs of texts to NaN if other segmentations are likely."""
        for rows, nats in self._texts(selection, selection.tokens, result):
            if not nats.sum() <= self.max_text_uncertainty:
                result.over_kept.logprobs[rows] = np.nan
                result.reason[rows] = reasons.SEGMENTATION

    def certain_beginnings(
        self, selection: _Selection, tokens: NDArray[np.int64], result: "_Result"
    ) -> NDArray[np.bool_]:
        """Return [M] bool: the predicted tokens that the test of the checkpoint may use.

        Of a text it uses the tokens before the first uncertain one. Whole texts must not be left out by what they
        contain, because the remaining ones would not be draws from the predictions.
        """
        usable = result.reason < 0
        is_rendered = selection.table.reason[selection.generation[tokens]] == reasons.RENDERED
        for rows, nats in self._texts(selection, tokens, result):
            # The nats of the tokens before decide, because those of a token depend on what it is.
            certain = np.cumsum(nats) - nats <= self.max_text_uncertainty
            pieces = [self.tokenizer.decode_bytes(selection.sequences.ids[tokens[row : row + 1]]) for row in rows]
            lost = b"".join(pieces).find(_REPLACEMENT)
            certain &= (np.cumsum([len(piece) for piece in pieces]) <= lost) | (lost < 0)
            certain[1:] &= ~is_rendered[rows[1:]]  # Of a call, only that it is one is known to be sampled.
            usable[rows] &= np.logical_and.accumulate(certain)
        return usable

    def _texts(
        self, selection: _Selection, tokens: NDArray[np.int64], result: "_Result"
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Yield the rows of each text among the predicted tokens, and the nats of its other segmentations by token."""
        sequences = selection.sequences
        places = np.flatnonzero(sequences.alignment_level[tokens] == TEXT_ONLY)
        cuts = np.flatnonzero(np.diff(selection.generation[tokens[places]])) + 1
        for rows in np.split(places, cuts):
            if len(rows):
                continuations = self.vocabulary.continuations(sequences.ids[tokens[rows]].tolist())
                yield rows, other_segmentations(result.whole.take(rows), continuations)


@dataclass(frozen=True)
class _Result:
    """Predictions of selected tokens.

    Args:
        over_kept: over the ids that the sampling options keep; logprobs are NaN where they are unknown.
        whole: over the whole vocabulary.
        kept: [M] number of kept ids, -1 for the whole vocabulary.
        reason: [M] why the logprob is unknown, -1 if it is not.
    """

    over_kept: Predictions
    whole: Predictions
    kept: NDArray[np.int64]
    reason: NDArray[np.int8]


def _unfilled_reason(trainable: int, recorded: int) -> str:
    """Return why a conversation has no filled token, by the number of its trainable tokens and of recorded logprobs."""
    if trainable == 0:
        return "no sampled token that training can use"
    return "all tokens have a recorded logprob" if trainable == recorded else "no missing logprob can be measured"


def _calls(selection: _Selection, result: _Result) -> dict[int, dict[int, FilledCall]]:
    """Return the filled logprobs by aligned trace and number of the generation."""
    sequences, table = selection.sequences, selection.table
    logprobs = np.full(sequences.tokens, np.nan)
    logprobs[selection.tokens] = result.over_kept.logprobs
    place = np.full(sequences.tokens, -1, np.int64)
    place[selection.tokens] = np.arange(len(selection.tokens))
    branch = np.repeat(np.arange(sequences.branches), np.diff(sequences.cu_seqlens))
    has_value = selection.tokens[~np.isnan(result.over_kept.logprobs)]
    calls: dict[int, dict[int, FilledCall]] = {}
    for generation, first in zip(*np.unique(selection.generation[has_value], return_index=True), strict=True):
        token = int(has_value[first])
        start, end = sequences.cu_seqlens[branch[token]], sequences.cu_seqlens[branch[token] + 1]
        own = np.flatnonzero(selection.generation[start:end] == generation) + start
        row = int(sequences.trace[branch[token]])
        recorded = table.generations[generation]
        ids = sequences.ids[own].tolist()
        values = logprobs[own].tolist()
        kept = [
            result.over_kept.ids[place[at], : result.kept[place[at]]].tolist()
            if place[at] >= 0 and result.kept[place[at]] > 0 and not np.isnan(logprobs[at])
            else None
            for at in own
        ]
        if recorded is not None and recorded.token_ids is not None:
            rest = recorded.token_ids[len(ids) :].tolist()
            ids, values, kept = ids + rest, values + [np.nan] * len(rest), kept + [None] * len(rest)
        # At temperature 1 without truncation both kinds are the same. `align` uses one that equals the recorded kind.
        kind = "raw" if recorded is not None and has_raw_part(recorded) else "processed"
        calls.setdefault(row, {})[int(generation - sequences.cu_turns[row])] = FilledCall(
            ids,
            values,
            kind,
            float(table.temperature[generation]),
            kept if any(kept) else None,
            table.truncation.options(generation),
        )
    return calls


def _sample(
    parts: Any, work: _Measurement, seed: int, progress: Callable[[str, int, int], None] | None
) -> tuple[list[Trace], int, str]:
    """Draw conversations from all inputs. Return as many as the test needs, and number and hash of all of them."""
    drawn: list[Trace] = []
    count, chance, digest = 0, random.Random(seed), blake2b(digest_size=16)
    known: set[bytes] = set()
    for traces in parts:
        for trace in traces:
            count += 1
            record = blake2b(one_line(trace.record), digest_size=16).digest()
            digest.update(record)
            if record in known:  # A copy is no further evidence.
                continue
            at = len(drawn) if len(drawn) < _TEST_TRACES else chance.randrange(count)
            if at < _TEST_TRACES:
                drawn[at : at + 1] = [Trace(trace.core.take([trace.index]))]  # without the other traces of its batch
                known.add(record)
        if progress:
            progress("reading", count, 0)
    chance.shuffle(drawn)
    chosen: list[Trace] = []
    tokens = 0
    for start in range(0, len(drawn), 8):
        part = [without_filled(trace) for trace in drawn[start : start + 8]]
        selection = work.select(part)
        if len(selection.tokens):
            chosen += part
            tokens += len(selection.tokens)
        if tokens >= TEST_TOKENS:
            break
    return chosen, count, digest.hexdigest()


def _test(
    sample: Sequence[Trace],
    work: _Measurement,
    scorer: Scorer,
    compare_with: Sequence[str | Path],
    placing: Mapping[str, Any],
    seed: int,
) -> CheckpointTest:
    """Test the checkpoint on a sample of conversations."""
    selection = work.select(sample)
    tokens = np.union1d(np.union1d(selection.tokens, selection.recorded), selection.partly_sampled)[:TEST_TOKENS]
    result = work.predict(selection, tokens, scorer, LISTED)
    known = np.flatnonzero(work.certain_beginnings(selection, tokens, result))
    outside = int(np.count_nonzero(result.reason == reasons.EXCLUDED))
    sequences, tokens = selection.sequences, tokens[known]
    is_recorded = np.isin(tokens, selection.recorded)
    recorded = np.where(is_recorded, sequences.rollout_logprobs[tokens], np.float32(np.nan))
    sampled = SampledTokens(
        result.over_kept.take(known), sequences.ids[np.maximum(tokens - 1, 0)], recorded.astype(np.float32), outside
    )
    others = {}
    for folder in compare_with:
        other = _scorer(Path(folder), None, placing)
        at = sampled.predictions.ids
        others[str(folder)] = over_listed(other.predict(sequences, tokens, 0, at), result.kept[known]).top_logprobs
    return check_checkpoint(sampled, others, seed=seed)


def _from(parts: Any, skip: int) -> Any:
    """Yield lists of traces, of at most `_BATCH_BYTES` if there are several, without the first `skip` traces."""
    for traces in parts:
        batch: list[Trace] = []
        size = 0
        for trace in traces[skip:] if skip else traces:
            length = len(trace.record)
            if batch and size + length > _BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(trace)
            size += length
        skip = max(0, skip - len(traces))
        if batch:
            yield batch


class _PartialFile:
    """The output of a run that may be interrupted: `OUT.partial`, and `OUT.partial-state` with what it has.

    Neither name is that of an input, so that they may be in a folder of inputs.

    Args:
        out: the output.
        settings: a run continues only if they are equal.
        scorer: knows which process writes.
    """

    def __init__(self, out: Path, settings: Any, scorer: Scorer) -> None:
        self.path, self.state = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.partial-state")
        self._key = blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
        self._scorer = scorer
        self.records, self.bytes, self._counts = scorer.share(self._saved())
        if scorer.writes:
            with files.append(self.path) as file:
                file.truncate(self.bytes)

    def _saved(self) -> tuple[int, int, dict[str, Any]]:
        """Return number and bytes of the records in the file, and their counts; zeros if it is of another run."""
        try:
            saved = json.loads(self.state.read_text())
            if saved["settings"] == self._key and self.path.stat().st_size >= saved["bytes"]:
                return int(saved["records"]), int(saved["bytes"]), dict(saved["report"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return 0, 0, {}

    def restore(self, report: FillReport) -> None:
        """Set the counts of the conversations that are already in the file."""
        for name in (
            "filled_conversations",
            "unfilled",
            "tokens",
            "recorded",
            "filled",
            "unknown",
            "skipped",
            "seconds",
        ):
            if name in self._counts:
                setattr(report, name, self._counts[name])

    def append(self, lines: Sequence[bytes], report: FillReport) -> None:
        """Append records, and then write what the file has."""
        error = None
        if self._scorer.writes:
            try:
                self._write(lines, report)
            except (OSError, TracegradError) as failure:
                error = failure
        self._scorer.raise_on_all(error)

    def _write(self, lines: Sequence[bytes], report: FillReport) -> None:
        with files.append(self.path) as file:
            file.writelines(line + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
            self.bytes = file.tell()
        self.records += len(lines)
        counts = {name: value for name, value in report.as_dict().items() if name != "test"}
        value = {"settings": self._key, "records": self.records, "bytes": self.bytes, "report": counts}
        with files.write_atomically(self.state) as file:
            file.write(json.dumps(value).encode())

    def remove(self) -> None:
        """Remove both files."""
        self.path.unlink(missing_ok=True)
        self.state.unlink(missing_ok=True)
