"""Prepare traces on disk: `prepare` reads, aligns and writes shards with a manifest, on one or many workers."""

import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from tracegrad import _core, _validation
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import Data, FieldMap
from tracegrad.data import Progress, stream
from tracegrad.data.reader import BLANK, StreamCounts, add_tallies
from tracegrad.data.sources import expand
from tracegrad.data.trace import Traces, write
from tracegrad.errors import ArgumentError, ReadError, TracegradError, escape_terminal, redact
from tracegrad.metrics import Stopwatch
from tracegrad.prepare import ray_backend
from tracegrad.prepare.output import PLAN, LocalOutput, RemoteOutput, encoded, open_output
from tracegrad.prepare.part import (
    Job,
    Record,
    Sources,
    align_traces,
    describe_inputs,
    load_record,
    names_of,
    prepare_part,
    quarantine_prefix,
    shards_in,
)
from tracegrad.prepare.split import PART_BYTES, Part, split_inputs
from tracegrad.prepare.summary import IngestSummary
from tracegrad.prepare.workers import Workers
from tracegrad.storage import manifest, remote


def load(
    source: Any,
    model: Path,
    data: Data,
    out: Path,
    watch: Stopwatch,
    *,
    map: FieldMap | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Sequences, IngestSummary]:
    """Read and align all inputs in memory, or load a folder that `prepare` wrote.

    Args:
        source: as for `tracegrad.read`: one or several names, or records in memory; or a folder of shards by its path
            or address.
        model: folder with tokenizer.json and chat template.
        data: options of reading and aligning.
        out: folder for quarantined records.
        watch: stopwatch that records the seconds of "read" and "align".
        map: where records store the fields of a trace.
        progress: called with the progress of reading.

    Returns:
        The sequences, and the summary of reading and aligning.

    Raises:
        ReadError, FormatError, TokenizerError, TemplateError, AlignmentError: for a bad record, depending on
            data.on_error. Also for a folder that is incomplete or was changed.
        ArgumentError: for an option of aligning with a folder of shards.
    """
    names = names_of(source)
    account = IngestSummary(describe_inputs(names), names, reward=data.reward)
    if len(names) == 1 and is_prepared(names[0]):
        check_prepared(names[0], data, map or FieldMap())
        with watch("read"):
            sequences = Sequences.load(names[0], verify=True)
        account.add(sequences)
        return sequences, account
    tokenizer = Tokenizer.from_pretrained(model)
    with watch("read"):
        quarantine = None
        if data.on_error == "quarantine":
            open_output(str(out)).make()
            quarantine = out / quarantine_prefix(names)
        traces = stream(names or source, map=map, on_error=data.on_error, quarantine=quarantine, progress=progress)
        all_traces = Traces.concatenate(traces)
    with watch("align"):
        before = _core.aligned_count()
        watch.follow(lambda: _core.aligned_count() - before, len(all_traces), "conversations")
        sequences = align_traces(all_traces, tokenizer, data)
        if quarantine is not None and sequences.alignment_report.errors:
            write(all_traces[sequences.alignment_report.left_out], out / "unaligned-00000.jsonl")
    account.add(sequences)
    account.read, account.mapping_lines = traces.read_report, traces.lines()
    account.infer_fields(names or source, map or FieldMap())
    account.probe(tokenizer)
    return sequences, account


def is_prepared(folder: str | os.PathLike[str]) -> bool:
    """Return whether a path or address is a folder of shards, or a single shard. It may be incomplete."""
    if isinstance(folder, str) and remote.is_address(folder):
        return any(remote.exists(remote.join_address(folder, name)) for name in (manifest.NAME, PLAN))
    path = remote.path_of(folder)
    has_marker = any((path / name).exists() for name in (manifest.NAME, PLAN, "sequences.json"))
    return path.is_dir() and (has_marker or any(path.glob("shard-*")))


TRAIN_OPTIONS = ("reward", "reward_weights", "holdout", "accept_truncated_sampling")
"""Options of [data] that only training uses."""
ALIGN_OPTIONS = [each.name for each in fields(Data) if each.name not in TRAIN_OPTIONS]


def check_prepared(source: str, data: Data, map: FieldMap) -> None:
    """Raise if options of reading or aligning are set for a prepared folder.

    Raises:
        ArgumentError: if so.
    """
    default = Data()
    if map.paths():
        raise ArgumentError(
            f"TG-PREPARE-010: map.{next(iter(map.paths()))} has no effect on {source}, which is a prepared folder. It "
            "is an option "
            "of prepare. Leave it out, or give the file of traces."
        )
    for name in ALIGN_OPTIONS:
        if getattr(data, name) != getattr(default, name):
            raise ArgumentError(
                f"TG-PREPARE-011: data.{name} has no effect on {source}, which is a prepared folder. It is an option "
                "of "
                "prepare. Leave it out, or give the file of traces."
            )


_ACCOUNT = "alignment_report.json"
_TOKENIZER_FILES = (".json", ".jinja", ".tiktoken", ".model")

ProgressCallback = Callable[[Progress], None]


def prepare(
    source: Sources,
    model: Path,
    data: Data,
    out: str | os.PathLike[str],
    *,
    shard_traces: int = 4096,
    resume: bool = False,
    map: FieldMap | None = None,
    progress: ProgressCallback | None = None,
    workers: int = 1,
    ray_address: str | None = None,
    part_bytes: int = PART_BYTES,
) -> IngestSummary:
    """Align inputs of any size into `out/shard-*` in bounded memory.

    Also writes `out/alignment_report.json`, and a manifest last.

    The inputs are read in parts (see `split_inputs`). The content of a shard depends only on the records,
    `shard_traces` and `part_bytes`, not on the number of workers. A group with traces in two shards keeps its name in
    `group_names`; its index differs per shard.

    Args:
        source: one or several names that `tracegrad.read` accepts.
        model, data, map, progress: as for `load`.
        out: folder of the shards, by its path or its address. It is created if it does not exist.
        shard_traces: number of traces at which a shard ends with the current group. It also ends at `SHARD_BYTES` of
            records.
        resume: keep complete parts and shards, and do the others. The result has the same bytes as an uninterrupted
            run.
        workers: number of processes. 1 means this process.
        ray_address: address of a Ray cluster that prepares the parts. "" uses the cluster that Ray finds, or starts a
            local one. `workers` is then the maximum number of actors, and 1 means one per CPU.
        part_bytes: bytes of inputs per part.

    Returns:
        The summary of reading and aligning.

    Raises:
        As `load`; if several parts have a bad record, for the first.
        ArgumentError: also if `out` has shards and `resume` is False, if its shards are of other traces or options, or
            if another process is writing there.
        TracegradError: if the process of a part was lost three times.
    """
    for name, value in (("shard_traces", shard_traces), ("workers", workers), ("part_bytes", part_bytes)):
        _validation.integer(value, name, least=1)
    tokenizer = Tokenizer.from_pretrained(model)
    names, field_map = names_of(source), map or FieldMap()
    account = IngestSummary(describe_inputs(names), names, reward=data.reward)
    account.probe(tokenizer)
    plan = _plan(names, model, data, field_map, shard_traces, part_bytes)
    place = open_output(os.fspath(out))
    _check(place, workers, ray_address)
    if ray_address is not None and names != ["-"]:
        ray_backend.check(ray_address)
    _check_own(place)
    place.make()
    with place.lock() as lock:
        _begin(place, plan, resume)
        parts, account.reason_not_cut = split_inputs(names, part_bytes, field_map)
        records = {part.index: record for part in parts if resume and (record := load_record(place, part))}
        remaining = [part for part in parts if part.index not in records]
        if remaining:
            place.remove(manifest.NAME)
        job = Job(quarantine_prefix(names), str(model), os.fspath(out), data, field_map, shard_traces)
        total_progress = _Far(parts, remaining, progress)
        if ray_address is not None and not _is_stdin_only(remaining):
            new_records = ray_backend.records(job, remaining, ray_address, 0 if workers == 1 else workers)
        elif min(workers, len(remaining)) > 1:
            new_records = _by_processes(job, remaining, min(workers, len(remaining)), lock, total_progress)
        else:
            new_records = (
                prepare_part(job, part, tokenizer, lambda *counts, part=part: total_progress(part, *counts))
                for part in remaining
            )
        for record in new_records:
            records[record["part"]] = record
            total_progress.ended(record["part"])
        total_progress.close()
        in_order = [records[index] for index in sorted(records)]
        _sum(account, in_order, field_map, names)
        place.write(_ACCOUNT, encoded(account.as_dict()))
        place.seal({name: shard for record in in_order for name, shard in shards_in(record).items()})
    return account


def _is_stdin_only(parts: Sequence[Part]) -> bool:
    """Return whether all parts come from standard input, which only this process can read."""
    return all(place.kind == "stdin" for part in parts for place in part.places)


def _by_processes(
    job: Job, parts: Sequence[Part], count: int, lock: int | None, total_progress: "_Far"
) -> Iterator[Record]:
    with Workers(job, count, lock, total_progress) as pool:
        yield from pool.records(parts)


def _check(place: LocalOutput | RemoteOutput, workers: int, ray: str | None) -> None:
    if isinstance(place, RemoteOutput) and place.address.startswith("memory://") and (workers > 1 or ray is not None):
        raise ArgumentError(
            f"TG-PREPARE-012: {place} is in the memory of this process. Shards of other processes would be lost. Leave "
            "out workers and ray_address, or give another out."
        )


_OUTPUT_FILES = re.compile(
    r"\.quarantine\.(raw|jsonl)$|\.tmp$|^unaligned-.*\.jsonl$|^\.lock$|^\.tmp-shard-|^(shard|part)-"
)


def _check_own(place: LocalOutput | RemoteOutput) -> None:
    """Raise if the folder has files but no plan of `prepare`. Files of the same names would be lost."""
    names = place.names()
    try:
        is_ours = (
            PLAN in names and {"tokenizer", "shard_traces", "version"} <= json.loads(place.read(PLAN, 256 << 20)).keys()
        )
    except (ValueError, AttributeError, RecursionError):
        is_ours = any(name.startswith(("shard-", "part-")) for name in names)  # `_check_plan` explains it.
    alien = sorted(name for name in names if not _OUTPUT_FILES.search(name))
    if alien and not is_ours:
        raise ArgumentError(
            f"TG-PREPARE-013: {place} contains {escape_terminal(alien[0])[:80]!r} and is not a folder of "
            "`prepare`. Its files could be replaced. Give another out."
        )


def _sum(account: IngestSummary, records: list[Record], field_map: FieldMap, names: list[str]) -> None:
    """Add up the summaries and reader counts of all parts."""
    for record in records:
        account.merge(record["account"])
    tally = add_tallies([StreamCounts(**record["tally"]) for record in records], field_map)
    account.parts = len(records)
    if not account.read.records and tally.files_without_calls:
        raise ReadError(tally.first_bare or "")
    tally.check(field_map)
    account.mapping_lines = tally.lines(field_map, account.read, BLANK)
    account.infer_fields(names, field_map)


class _Far:
    """The total progress of all parts, reported like that of one reader."""

    def __init__(self, parts: Sequence[Part], left: Sequence[Part], log: ProgressCallback | None) -> None:
        self._log, self._sizes = log, {part.index: part.size for part in left}
        self._total, self._began = sum(self._sizes.values()), time.monotonic()
        self._taken: dict[int, int] = {}
        self._records: dict[int, int] = {}

    def __call__(self, part: Part, taken: int, records: int) -> None:
        self._taken[part.index], self._records[part.index] = taken, records
        self._report(False)

    def ended(self, part: int) -> None:
        """Count a part as complete."""
        self._taken[part] = self._sizes[part]
        self._report(False)

    def close(self) -> None:
        """Report the final progress."""
        self._report(True)

    def _report(self, is_last: bool) -> None:
        if self._log is not None:
            elapsed = time.monotonic() - self._began
            taken, records = sum(self._taken.values()), sum(self._records.values())
            self._log(Progress(taken, self._total, records, elapsed, is_last))


def _begin(place: LocalOutput | RemoteOutput, plan: dict[str, Any], resume: bool) -> None:
    """Prepare the folder for shards of this plan. The caller must have the lock."""
    names = place.names()
    has_shards = any(name.startswith(("shard-", "part-")) for name in names)
    if has_shards and not resume:
        state = "of a completed `prepare`" if manifest.NAME in names else "of an interrupted `prepare`"
        raise ArgumentError(
            f"TG-PREPARE-014: {place} contains shards {state}. New shards would be mixed with them. Continue with "
            "resume=True, or give another out."
        )
    if has_shards and plan["source"] == "-":
        raise ArgumentError(
            f"TG-PREPARE-015: {place} contains shards of standard input, which cannot be read again. They cannot be "
            "resumed. Give a file, or another out."
        )
    if has_shards:
        _check_plan(place, plan)
    place.clear()
    place.write(PLAN, encoded(plan))


def _check_plan(place: LocalOutput | RemoteOutput, plan: dict[str, Any]) -> None:
    remedy = "Use the input and options of the first run, or give another out."
    try:
        previous = json.loads(place.read(PLAN, 256 << 20))
        differing = [name for name in {**previous, **plan} if previous.get(name) != plan.get(name)]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ArgumentError(
            f"TG-PREPARE-016: {place}/{PLAN}: does not contain the input and options of the shards "
            f"({str(error)[:80]!r}). They cannot be resumed. Give another out."
        ) from error
    if differing:
        name = differing[0]
        raise ArgumentError(
            f"TG-PREPARE-017: {place}/{PLAN}: {name} was {str(previous.get(name))[:80]!r} and is now "
            f"{str(plan.get(name))[:80]!r}. The shards of both runs do not fit together. {remedy}"
        )


def _plan(
    names: list[str], model: Path, data: Data, map: FieldMap, shard_traces: int, part_bytes: int = PART_BYTES
) -> dict[str, Any]:
    """Return everything that determines the bytes of the shards."""
    source: dict[str, Any] = {"source": redact(names[0]) if len(names) == 1 else [redact(name) for name in names]}
    if names != ["-"]:
        places = expand(names)
        if missing := [place.path for place in places if place.kind == "file" and not os.path.exists(place.path)]:
            raise TracegradError(f"TG-PREPARE-018: {missing[0]}: No such file or directory. Check the path.")
        sizes, times = [place.size for place in places], [place.modified for place in places]
        source |= {"source_bytes": sizes[0], "source_mtime_ns": times[0]} if len(places) == 1 else {}
        source |= {"source_bytes": sizes, "source_mtime_ns": times} if len(places) > 1 else {}
    options = {f"data.{name}": getattr(data, name) for name in ALIGN_OPTIONS}
    options |= {f"map.{name}": path for name, path in map.paths().items()}
    sizes_of_cuts = {"shard_traces": shard_traces, "part_bytes": part_bytes}
    return {**source, "tokenizer": _checksum(model), **sizes_of_cuts, **options, "version": _core.__version__}


def _checksum(model: Path) -> str:
    """Return the checksum of all files in a folder that a tokenizer or template may be read from."""
    checksum = 0
    with suppress(OSError):
        for path in sorted(model.rglob("*")):
            if path.suffix in _TOKENIZER_FILES and path.is_file():
                name = os.fsencode(path.relative_to(model))
                checksum = zlib.crc32(path.read_bytes(), zlib.crc32(name, checksum))
    return f"{checksum:08x}"
