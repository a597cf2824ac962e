"""Doing one part: its shards, what was bad in it, and last its record, which says what there is. For any process."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracegrad import manifest
from tracegrad.account import Account
from tracegrad.config import Data, Map
from tracegrad.inputs import Progress
from tracegrad.inputs.options import Options
from tracegrad.inputs.reading import BLANK, InputStream, of_part
from tracegrad.inputs.tally import Tally, added
from tracegrad.prepare.parts import Part
from tracegrad.prepare.place import Bucket, Folder, encoded, place_of
from tracegrad.prepare.shard import aligned, shards_of
from tracegrad.tokenizer import Tokenizer
from tracegrad.trace import write

FORMAT = "tracegrad-part/1"
_LIMIT = 1 << 30

Record = dict[str, Any]
HowFar = Callable[[int, int], None]
"""Called with bytes taken and records read."""


@dataclass(frozen=True)
class Job:
    """What all parts of an input have in common.

    Args:
        aside: how files of bad records begin.
        model: folder with tokenizer.json and chat template.
        out: folder or address of the shards.
        data, map, shard_traces: as for `prepare`.
    """

    aside: str
    model: str
    out: str
    data: Data
    map: Map
    shard_traces: int


def done(job: Job, part: Part, tokenizer: Tokenizer, how_far: HowFar | None = None) -> Record:
    """Does a part, and gives its record, which is its last file: its shards, what was read, and its account.

    Raises:
        ReadError, FormatError, TokenizerError, TemplateError, AlignmentError: for a bad record, by data.on_error.
        TracegradError: if something cannot be written.
    """
    place = place_of(job.out)
    account = Account(part.name)
    shards: dict[str, manifest.Folder] = {}
    with place.aside() as aside:
        stream = _stream(job, part, aside, how_far)
        for index, traces in enumerate(shards_of(stream, job.shard_traces)):
            name = manifest.shard_name(index, None if part.alone else part.index)
            sequences = place.kept(name, len(traces))
            if sequences is None:
                sequences = aligned(traces, tokenizer, job.data)
                if job.data.on_error == "quarantine" and sequences.drift.errors:
                    left_out = traces[sequences.drift.left_out]
                    write(left_out, aside / f"unaligned-{name.removeprefix('shard-')}.jsonl")
                shards[name] = place.put(name, sequences)
            else:
                shards[name] = place.told(name)
            account.add(sequences)
    account.read = stream.read_report
    record = {
        "format": FORMAT,
        "part": part.index,
        "shards": {name: manifest.plain(told) for name, told in shards.items()},
        "tally": stream.tally().as_dict(),
        "account": account.counts(),
    }
    place.write(f"{part.name}.json", encoded(record))
    return json.loads(encoded(record))


def _stream(job: Job, part: Part, aside: Path, how_far: HowFar | None) -> InputStream:
    prefix = None
    if job.data.on_error == "quarantine":
        prefix = aside / (job.aside if part.alone else f"{job.aside}.{part.name}")
    options = Options(batch=min(job.shard_traces, 1024), on_error=job.data.on_error, quarantine=prefix)

    def said(progress: Progress) -> None:
        if how_far is not None:
            how_far(progress.taken, progress.records)

    places = list(part.places)
    if part.alone:
        return InputStream(places, job.map, options, said)
    return of_part(places, job.map, options, said)


def kept(place: Folder | Bucket, part: Part) -> Record | None:
    """The record of a part that is whole: it is there, its counts can be added, and all shards that it names are."""
    try:
        record = json.loads(place.read(f"{part.name}.json", _LIMIT))
        if record["format"] == FORMAT and record["part"] == part.index and place.holds(shards_in(record)):
            trial = Account("")
            trial.join(record["account"])
            added([Tally(**record["tally"])], Map()).lines(Map(), trial.read, BLANK)
            encoded(trial.as_dict())
            return record
    except Exception:  # whatever a changed record leads to: its part is done anew
        return None
    return None


def shards_in(record: Record) -> dict[str, manifest.Folder]:
    """The shards that a record names.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: if it is no record.
    """
    return {str(name): manifest.of_plain(told) for name, told in record["shards"].items()}


def threads(workers: int) -> int:
    """How many threads each of so many processes may keep busy."""
    return max((os.cpu_count() or 1) // workers, 1)
