"""Prepare one part: read its records, align them, and write its shards."""

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracegrad.alignment.align import align
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import Data, FieldMap
from tracegrad.data import Progress, read
from tracegrad.data.read_options import Options
from tracegrad.data.reader import BLANK, InputStream, StreamCounts, add_tallies, concatenate, open_part
from tracegrad.data.sampling import model_defaults
from tracegrad.data.trace import Traces, write
from tracegrad.errors import ArgumentError, redact
from tracegrad.prepare.output import LocalOutput, RemoteOutput, encoded, open_output
from tracegrad.prepare.split import Part
from tracegrad.prepare.summary import IngestSummary
from tracegrad.storage import manifest, remote

SHARD_BYTES = 256 << 20
"""Size of a shard in bytes of records. When it is reached, the shard ends with the current group."""
MAX_SHARDS_PER_GROUP = 4
"""Maximum size of a group, in shards. A larger group is split."""

Sources = str | Sequence[str]


def names_of(source: Any) -> list[str]:
    """Return the named inputs as a list; empty for records, tables and data sets in memory.

    >>> names_of("a.jsonl"), names_of([Path("a.jsonl"), "b.jsonl"]), names_of([{"messages": []}])
    (['a.jsonl'], ['a.jsonl', 'b.jsonl'], [])
    """
    items = [source] if isinstance(source, (str, os.PathLike)) else source
    is_named = isinstance(items, Sequence) and all(isinstance(item, (str, os.PathLike)) for item in items)
    return [os.fspath(item) for item in items] if is_named else []


def describe_inputs(named: list[str]) -> str:
    """Return the named inputs as text for one line of output; <records> for records in memory."""
    if not named:
        return "<records>"
    return ", ".join(map(redact, named[:3])) + (f" and {len(named) - 3:,} more" if len(named) > 3 else "")


def quarantine_prefix(named: list[str]) -> str:
    """Return the prefix for the names of files with bad records."""
    if not named or named == ["-"]:
        return "stdin" if named else "records"
    return Path(redact(named[0]).split("?")[0].rstrip("/")).name


def shard(
    records: Any,
    model: Tokenizer | str | os.PathLike[str],
    *,
    data: Data | None = None,
    map: FieldMap | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Sequences:
    """Align records, and write them as one shard if `out` is given. The result depends only on the arguments.

    Use it in engines that distribute work themselves. Call it on each worker with a different folder per call:
    `DIR/shard-00000` and so on, without a gap. Then `tracegrad.storage.manifest.seal(DIR)` turns them into one prepared
    folder. A tokenizer that is named by its folder is loaded once per process.

    Args:
        records: a `Part`, `Traces`, or anything that `tracegrad.read` accepts: dicts, tables, names of files.
        model: folder with tokenizer.json and chat template, or a loaded `Tokenizer`.
        data: options of reading and aligning.
        map: where records store the fields of a trace.
        out: folder or address of the shard. It appears only when it is complete.

    Raises:
        ReadError, FormatError, TokenizerError, TemplateError, AlignmentError: for a bad record, depending on
            data.on_error.
        ArgumentError: if data.on_error is "quarantine". Also if `out` is given and records in memory have no id,
            because records of other shards would get the same id.
    """
    chosen = data or Data()
    if chosen.on_error == "quarantine":
        raise ArgumentError(
            "TG-PREPARE-003: data.on_error is 'quarantine', but `shard` writes no quarantine files. "
            "Pass 'skip', or read with tracegrad.read(..., quarantine=PREFIX) and pass the traces."
        )
    tokenizer = model if isinstance(model, Tokenizer) else _tokenizer(os.fspath(model))
    if isinstance(records, Part):
        traces = concatenate(open_part(list(records.places), map or FieldMap(), Options(on_error=chosen.on_error)))
    elif isinstance(records, Traces):
        traces = records
    else:
        traces = read(records, map=map, on_error=chosen.on_error)
    sequences = align_traces(traces, tokenizer, chosen)
    if out is not None:
        _check_names(sequences)
        address = str(out) if remote.is_address(out) else remote.path_of(out)
        parent, _, name = str(address).rstrip("/").rpartition("/")
        place = open_output(parent or ".")
        place.make()
        place.write_shard(name, sequences)
    return sequences


def _check_names(sequences: Sequences) -> None:
    """Raise if a trace is named by its position in a list."""
    unnamed = next((name for name in sequences.trace_ids if name.startswith("<records>:")), None)
    if unnamed is not None:
        raise ArgumentError(
            f"TG-PREPARE-004: {unnamed} has no id. Records of other shards would get the same name, and would "
            "count as one group. Give each record an `id`, or map={'id': PATH}."
        )


@functools.lru_cache(maxsize=4)
def _tokenizer(model: str) -> Tokenizer:
    return Tokenizer.from_pretrained(Path(model))


def align_traces(traces: Traces, tokenizer: Tokenizer, data: Data) -> Sequences:
    """Align traces with these options."""
    folder = tokenizer.folder if data.sampling_defaults == "model" else None
    return align(
        traces,
        tokenizer,
        allow_unknown_ids=data.allow_unknown_ids,
        text_only=data.text_only,
        logprob_kind=None if data.logprob_kind == "recorded" else data.logprob_kind,
        sampling_defaults=model_defaults(folder) if folder else None,
        server_profile=None if data.server_profile == "recorded" else data.server_profile,
        on_error="raise" if data.on_error == "raise" else "skip",
    )


def shards_of(parts: Iterable[Traces], shard_traces: int, shard_bytes: int = SHARD_BYTES) -> Iterator[Traces]:
    """Split a stream of traces into shards. A full shard ends at the next change of group.

    Neighbouring traces of a group stay in one shard, unless they would fill `MAX_SHARDS_PER_GROUP` shards.
    """
    pending: list[Traces] = []
    count = size = 0
    previous_group: str | None = None
    for part in parts:
        start = 0
        for row, group in enumerate(part.groups):
            fill = max(count / shard_traces, size / shard_bytes)
            if fill >= MAX_SHARDS_PER_GROUP or (fill >= 1 and (group is None or group != previous_group)):
                yield Traces.concatenate([*pending, part[start:row]])
                pending, count, size, start = [], 0, 0, row
            count, size, previous_group = count + 1, size + part.core.record_size(row), group
        pending.append(part[start:])
    if count:
        yield Traces.concatenate(pending)


FORMAT = "tracegrad-part/1"
_LIMIT = 1 << 30

Record = dict[str, Any]
ProgressCallback = Callable[[int, int], None]
"""Called with the number of bytes and of records read so far."""


@dataclass(frozen=True)
class Job:
    """The settings that all parts of an input share.

    Args:
        quarantine_prefix: prefix for the names of files with bad records.
        model: folder with tokenizer.json and chat template.
        out: folder or address of the shards.
        data, map, shard_traces: as for `prepare`.
    """

    quarantine_prefix: str
    model: str
    out: str
    data: Data
    map: FieldMap
    shard_traces: int


def prepare_part(job: Job, part: Part, tokenizer: Tokenizer, how_far: ProgressCallback | None = None) -> Record:
    """Prepare a part and return its record, which is also written as the part's last file.

    The record has the part's shards, the counts of the reader and the alignment summary.

    Raises:
        ReadError, FormatError, TokenizerError, TemplateError, AlignmentError: for a bad record, depending on
            data.on_error.
        TracegradError: if something cannot be written.
    """
    place = open_output(job.out)
    account = IngestSummary(part.name)
    shards: dict[str, manifest.FolderManifest] = {}
    with place.scratch() as scratch:
        stream = _stream(job, part, scratch, how_far)
        for index, traces in enumerate(shards_of(stream, job.shard_traces)):
            name = manifest.shard_name(index, None if part.is_only else part.index)
            sequences = place.load_shard(name, len(traces))
            if sequences is None:
                sequences = align_traces(traces, tokenizer, job.data)
                if job.data.on_error == "quarantine" and sequences.alignment_report.errors:
                    left_out = traces[sequences.alignment_report.left_out]
                    write(left_out, scratch / f"unaligned-{name.removeprefix('shard-')}.jsonl")
                shards[name] = place.write_shard(name, sequences)
            else:
                shards[name] = place.shard_manifest(name)
            account.add(sequences)
    account.read = stream.read_report
    record = {
        "format": FORMAT,
        "part": part.index,
        "shards": {name: manifest.to_dict(shard_manifest) for name, shard_manifest in shards.items()},
        "tally": stream.tally().as_dict(),
        "account": account.counts(),
    }
    place.write(f"{part.name}.json", encoded(record))
    return json.loads(encoded(record))


def _stream(job: Job, part: Part, scratch: Path, how_far: ProgressCallback | None) -> InputStream:
    prefix = None
    if job.data.on_error == "quarantine":
        prefix = scratch / (job.quarantine_prefix if part.is_only else f"{job.quarantine_prefix}.{part.name}")
    options = Options(batch=min(job.shard_traces, 1024), on_error=job.data.on_error, quarantine=prefix)

    def report(progress: Progress) -> None:
        if how_far is not None:
            how_far(progress.bytes_read, progress.records)

    places = list(part.places)
    if part.is_only:
        return InputStream(places, job.map, options, report)
    return open_part(places, job.map, options, report)


def load_record(place: LocalOutput | RemoteOutput, part: Part) -> Record | None:
    """Return the record of a part if it is valid and all of its shards are complete. None otherwise."""
    try:
        record = json.loads(place.read(f"{part.name}.json", _LIMIT))
        if record["format"] == FORMAT and record["part"] == part.index and place.has_shards(shards_in(record)):
            trial = IngestSummary("")
            trial.merge(record["account"])
            add_tallies([StreamCounts(**record["tally"])], FieldMap()).lines(FieldMap(), trial.read, BLANK)
            encoded(trial.as_dict())
            return record
    except Exception:  # A corrupt record can raise anything. The part is then done again.
        return None
    return None


def shards_in(record: Record) -> dict[str, manifest.FolderManifest]:
    """Return the shards that a record lists.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: if the record is invalid.
    """
    return {str(name): manifest.from_dict(shard_manifest) for name, shard_manifest in record["shards"].items()}


def threads_per_worker(workers: int) -> int:
    """Return the number of threads that each of `workers` processes may use."""
    return max((os.cpu_count() or 1) // workers, 1)
