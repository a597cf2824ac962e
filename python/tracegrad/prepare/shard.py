"""Records to a shard: read, aligned, and where a stream of traces is cut into shards. For any engine."""

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tracegrad import addresses, inputs
from tracegrad.alignment import align
from tracegrad.config import Data, Map
from tracegrad.errors import ArgumentError, redacted
from tracegrad.inputs.options import Options
from tracegrad.inputs.reading import of_part, together
from tracegrad.prepare.parts import Part
from tracegrad.prepare.place import place_of
from tracegrad.sampling import model_defaults
from tracegrad.sequence import Sequences
from tracegrad.tokenizer import Tokenizer
from tracegrad.trace import Traces

SHARD_BYTES = 256 << 20
"""Bytes of records after which a shard ends with its group."""
MOST_SHARDFULS = 4
"""How many shards' worth a group may have before it is parted."""

Sources = str | Sequence[str]


def names_of(source: Sources) -> list[str]:
    """What is named, one by one."""
    return [source] if isinstance(source, str) else list(source)


def said(named: list[str]) -> str:
    """The same for a line."""
    return ", ".join(map(redacted, named[:3])) + (f" and {len(named) - 3:,} more" if len(named) > 3 else "")


def aside_of(named: list[str]) -> str:
    """How the files begin that bad records of inputs are put into."""
    return "stdin" if named == ["-"] else Path(redacted(named[0]).split("?")[0].rstrip("/")).name


def shard(
    records: Any,
    model: Tokenizer | str | os.PathLike[str],
    *,
    data: Data | None = None,
    map: Map | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Sequences:
    """Aligns records, and writes them as one shard where `out` is given: a function of its arguments alone.

    For engines that spread work themselves: call it on each of their workers, with a folder of its own for each call,
    `DIR/shard-00000` and so on without a gap; then `tracegrad.manifest.seal(DIR)` makes one prepared folder of them.
    A tokenizer that is named by its folder is loaded once in a process.

    Args:
        records: a `Part`, `Traces`, or what `tracegrad.read` takes: records as dicts, tables, names of files.
        model: folder with tokenizer.json and chat template, or what was loaded of it.
        data: options of reading and aligning.
        map: where the records hold what a trace needs.
        out: folder or address of the shard, which appears when it is whole.

    Raises:
        ReadError, FormatError, TokenizerError, TemplateError, AlignmentError: for a bad record, by data.on_error.
        ArgumentError: if a shard is written of records in memory that have no id, as those of another shard would be
            called alike.
    """
    chosen = data or Data()
    if chosen.on_error == "quarantine":
        raise ArgumentError(
            "data.on_error is 'quarantine', and `shard` writes nothing but its shard. Bad records would be lost. "
            "Pass 'skip', or read with tracegrad.read(..., quarantine=PREFIX) and pass what it gives."
        )
    tokenizer = model if isinstance(model, Tokenizer) else _tokenizer(os.fspath(model))
    if isinstance(records, Part):
        traces = together(of_part(list(records.places), map or Map(), Options(on_error=chosen.on_error)))
    elif isinstance(records, Traces):
        traces = records
    else:
        traces = inputs.read(records, map=map, on_error=chosen.on_error)
    sequences = aligned(traces, tokenizer, chosen)
    if out is not None:
        _check_names(sequences)
        whole = str(out) if addresses.is_address(out) else addresses.path_of(out)
        parent, _, name = str(whole).rstrip("/").rpartition("/")
        place = place_of(parent or ".")
        place.make()
        place.put(name, sequences)
    return sequences


def _check_names(sequences: Sequences) -> None:
    """Refuses traces that are named by their number in a list."""
    unnamed = next((name for name in sequences.trace_ids if name.startswith("<records>:")), None)
    if unnamed is not None:
        raise ArgumentError(
            f"{unnamed} has no id. Records of other shards would be called the same, and taken for one group. Give "
            "each record an `id`, or map={'id': PATH}."
        )


@functools.lru_cache(maxsize=4)
def _tokenizer(model: str) -> Tokenizer:
    return Tokenizer.from_pretrained(Path(model))


def aligned(traces: Traces, tokenizer: Tokenizer, data: Data) -> Sequences:
    """What `align` makes of traces under these options."""
    folder = tokenizer.folder if data.sampling_defaults == "model" else None
    return align(
        traces,
        tokenizer,
        lenient=data.lenient,
        text_only=data.text_only,
        logprob_kind=None if data.logprob_kind == "recorded" else data.logprob_kind,
        sampling_defaults=model_defaults(folder) if folder else None,
        server_profile=None if data.server_profile == "recorded" else data.server_profile,
        on_error="raise" if data.on_error == "raise" else "skip",
    )


def shards_of(parts: Iterable[Traces], shard_traces: int, shard_bytes: int = SHARD_BYTES) -> Iterator[Traces]:
    """Cuts a stream of traces by what stands in it: after the group with which a shard is full.

    Neighbours of one group stay together, unless they alone would fill `MOST_SHARDFULS` shards.
    """
    held: list[Traces] = []
    count = size = 0
    before: str | None = None
    for part in parts:
        start = 0
        for row, group in enumerate(part.groups):
            full = max(count / shard_traces, size / shard_bytes)
            if full >= MOST_SHARDFULS or (full >= 1 and (group is None or group != before)):
                yield Traces.concatenate([*held, part[start:row]])
                held, count, size, start = [], 0, 0, row
            count, size, before = count + 1, size + part.core.record_size(row), group
        held.append(part[start:])
    if count:
        yield Traces.concatenate(held)
