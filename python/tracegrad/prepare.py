"""From a file of traces to aligned sequences, with an account of how exactly it went. No torch.

Here are `load` (all at once, for training) and `prepare` (shard by shard, to disk, and on from where it was stopped);
`Account` is what both tell the user. docs/trace-format.md states what a prepared folder is. Called by the command line.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from tracegrad import _core, inputs, manifest, store
from tracegrad.account import Account
from tracegrad.config import Data, Map
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.inputs.places import expand
from tracegrad.metrics import Stopwatch
from tracegrad.sequence import Sequences, align
from tracegrad.shards import flush, read_text, write_bytes
from tracegrad.tokenizer import Tokenizer
from tracegrad.trace import Traces, write

SHARD_BYTES = 256 << 20
"""Bytes of records after which a shard ends with its group."""
MOST_SHARDFULS = 4
"""How many shards' worth a group may have before it is parted."""
PLAN = "prepare.json"
_ACCOUNT = "drift.json"
_TOKENIZER_FILES = (".json", ".jinja", ".tiktoken", ".model")


Sources = str | Sequence[str]
Say = Callable[[inputs.Progress], None]


def load(
    source: Sources,
    model: Path,
    data: Data,
    out: Path,
    watch: Stopwatch,
    *,
    map: Map | None = None,
    progress: Say | None = None,
) -> tuple[Sequences, Account]:
    """Reads and aligns all inputs, or takes what `prepare` has written.

    Args:
        source: what `tracegrad.read` takes as names, one or several, or a folder of shards.
        model: folder with tokenizer.json and chat template.
        data: options of reading and aligning.
        out: where quarantined records go.
        watch: takes the seconds of "read" and "align".
        map: where the records hold what a trace needs.
        progress: called with how far reading is.

    Raises:
        ReadError, FormatError, TokenizerError, TemplateError, AlignmentError: for a bad record, by data.on_error; for a
            folder that is not whole or was changed.
        ArgumentError: for an option of aligning where a folder of shards is given.
    """
    named = _names(source)
    account = Account(_said(named), named, reward=data.reward)
    if len(named) == 1 and is_prepared(Path(named[0])):
        check_prepared(named[0], data, map or Map())
        with watch("read"):
            sequences = Sequences.load(named[0], verify=True)
        account.add(sequences)
        return sequences, account
    tokenizer = Tokenizer.from_pretrained(model)
    with watch("read"):
        traces = _open(named, data, map, out, progress=progress)
        whole = Traces.concatenate(traces)
    with watch("align"):
        sequences = _aligned(whole, tokenizer, data, out, 0)
    account.add(sequences)
    account.read, account.mapped = traces.read_report, traces.lines()
    account.look(named, map or Map())
    account.probe(tokenizer)
    return sequences, account


def is_prepared(folder: Path) -> bool:
    """Whether a folder holds shards, or one: whole or not."""
    named = any((folder / name).exists() for name in (manifest.NAME, PLAN, "sequences.json"))
    return folder.is_dir() and (named or any(folder.glob("shard-*")))


def _names(source: Sources) -> list[str]:
    return [source] if isinstance(source, str) else list(source)


def _said(named: list[str]) -> str:
    return ", ".join(named[:3]) + (f" and {len(named) - 3:,} more" if len(named) > 3 else "")


_OF_ALIGNING = [each.name for each in fields(Data) if each.name not in ("reward", "holdout", "weights")]


def check_prepared(source: str, data: Data, map: Map) -> None:
    """Refuses options of reading and aligning where a prepared folder is given."""
    default = Data()
    if map.told():
        raise ArgumentError(
            f"map.{next(iter(map.told()))} has no effect on {source}, which is read already. It is of prepare. "
            "Leave it out, or give the file of traces."
        )
    for name in _OF_ALIGNING:
        if getattr(data, name) != getattr(default, name):
            raise ArgumentError(
                f"data.{name} has no effect on {source}, which is aligned already. It is an option of prepare. "
                "Leave it out, or give the file of traces."
            )


def prepare(
    source: Sources,
    model: Path,
    data: Data,
    out: Path,
    *,
    shard_traces: int = 4096,
    resume: bool = False,
    map: Map | None = None,
    progress: Say | None = None,
) -> Account:
    """Aligns a file of any size into `out/shard-NNNNN`, in bounded memory, with `out/drift.json` and a manifest last.

    What stands in a shard is a function of the records and of `shard_traces` alone. A group that stands in two shards
    keeps its name in `group_names`; its number is the shard's own.

    Args:
        source, model, data, map, progress: as `load`.
        out: folder of the shards; made if it is not there.
        shard_traces: a shard ends with the group with which it has so many traces, or `SHARD_BYTES` of records.
        resume: keep the shards that are whole, by their checksums, and write the others: the same bytes as at once.

    Raises:
        As `load`. ArgumentError too, if `out` holds shards and `resume` is False, or shards of other traces or options,
            or if another process is writing there.
    """
    tokenizer = Tokenizer.from_pretrained(model)
    named = _names(source)
    account = Account(_said(named), named, reward=data.reward)
    account.probe(tokenizer)
    plan = _plan(named, model, data, map or Map(), shard_traces)
    _make(out)
    with manifest.lock(out):
        _begin(out, plan, resume)
        traces = _open(named, data, map, out, batch=min(shard_traces, 1024), progress=progress)
        for index, part in enumerate(shards_of(traces, shard_traces)):
            shard = out / manifest.shard_name(index)
            if not _is_whole(shard, part):
                _write_shard(shard, _aligned(part, tokenizer, data, out, index))
            account.add(Sequences.load(shard))
        account.read, account.mapped = traces.read_report, traces.lines()
        account.look(named, map or Map())
        write_json(out / _ACCOUNT, account.as_dict())
        manifest.seal(out)
    return account


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


def _begin(out: Path, plan: dict[str, Any], resume: bool) -> None:
    """Makes the folder ready for shards of this plan. For who holds the lock."""
    there = any(out.glob("shard-*"))
    if there and not resume:
        ended = "of a `prepare` that is done" if (out / manifest.NAME).exists() else "of a `prepare` that was stopped"
        raise ArgumentError(
            f"{out} holds shards {ended}. New ones among them would be read as one set. Go on with --resume, or give "
            "another --out."
        )
    if there and plan["source"] == "-":
        raise ArgumentError(
            f"{out} holds shards of standard input, which cannot be known to be the same again. The shards would not "
            "be those of one run. Give a file, or another --out."
        )
    if there:
        _check_plan(out / PLAN, plan)
    for path in out.glob(".tmp-shard-*"):
        shutil.rmtree(path, ignore_errors=True)
    manifest.clear_drafts(out, PLAN, _ACCOUNT, manifest.NAME)
    write_json(out / PLAN, plan)


def _check_plan(path: Path, plan: dict[str, Any]) -> None:
    cure = "Give what the first run was given, or another --out."
    try:
        before = json.loads(read_text(path, 1 << 20))
        apart = [name for name in {**before, **plan} if before.get(name) != plan.get(name)]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ArgumentError(
            f"{path}: does not say what the shards beside it were made of ({str(error)[:80]!r}). They cannot be gone "
            "on with. Give another --out."
        ) from error
    if apart:
        name = apart[0]
        raise ArgumentError(
            f"{path}: {name} was {str(before.get(name))[:80]!r} and is now {str(plan.get(name))[:80]!r}. The shards "
            f"would not be those of one run. {cure}"
        )


def _plan(named: list[str], model: Path, data: Data, map: Map, shard_traces: int) -> dict[str, Any]:
    """What the bytes of the shards follow from."""
    what: dict[str, Any] = {"source": named[0] if len(named) == 1 else named}
    if named != ["-"]:
        found = expand(named)
        if missing := [place.path for place in found if place.kind == "file" and not os.path.exists(place.path)]:
            raise TracegradError(f"{missing[0]}: No such file or directory. Nothing is read. Check the path.")
        sizes, times = [place.size for place in found], [place.modified for place in found]
        what |= {"source_bytes": sizes[0], "source_mtime_ns": times[0]} if len(found) == 1 else {}
        what |= {"source_bytes": sizes, "source_mtime_ns": times} if len(found) > 1 else {}
    told = {f"data.{name}": getattr(data, name) for name in _OF_ALIGNING}
    told |= {f"map.{name}": path for name, path in map.told().items()}
    return {**what, "tokenizer": _checksum(model), "shard_traces": shard_traces, **told, "version": _core.__version__}


def _checksum(model: Path) -> str:
    """Of all files in the folder that a tokenizer or template may be read from."""
    checksum = 0
    with suppress(OSError):
        for path in sorted(model.rglob("*")):
            if path.suffix in _TOKENIZER_FILES and path.is_file():
                name = os.fsencode(path.relative_to(model))
                checksum = zlib.crc32(path.read_bytes(), zlib.crc32(name, checksum))
    return f"{checksum:08x}"


def _is_whole(shard: Path, part: Traces) -> bool:
    """Whether a shard is there to its last byte and holds these traces."""
    if not shard.exists():
        return False
    try:
        manifest.verify(shard, manifest.read(shard))
        found = Sequences.load(shard)
    except TracegradError:
        return False
    return found.traces + len(found.drift.errors) == len(part)


def _write_shard(shard: Path, sequences: Sequences) -> None:
    """Writes a shard beside its place and moves it there when it is whole and on the disk."""
    staged = shard.with_name(f".tmp-{shard.name}")
    try:
        (shard.parent / manifest.NAME).unlink(missing_ok=True)
        if shard.exists():
            shard.rename(staged)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        store.write(staged, sequences.stored())
        staged.rename(shard)
        flush(shard.parent)
    except OSError as error:
        raise TracegradError(
            f"{shard}: {error.strerror}. It is not written. Make room and go on with --resume."
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Writes JSON to a file, whole or not at all."""
    write_bytes(path, [(json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")])


def _open(
    named: list[str], data: Data, map: Map | None, out: Path, *, batch: int = 1024, progress: Say | None = None
) -> inputs.InputStream:
    aside = None
    if data.on_error == "quarantine":
        _make(out)
        aside = out / ("stdin" if named == ["-"] else Path(named[0].rstrip("/")).name)
    told = {"map": map, "batch": batch, "on_error": data.on_error, "quarantine": aside, "progress": progress}
    return inputs.stream(named, **told)


def _aligned(traces: Traces, tokenizer: Tokenizer, data: Data, out: Path, shard: int) -> Sequences:
    sequences = align(
        traces,
        tokenizer,
        lenient=data.lenient,
        text_only=data.text_only,
        logprob_kind=None if data.logprob_kind == "recorded" else data.logprob_kind,
        on_error="raise" if data.on_error == "raise" else "skip",
    )
    if data.on_error == "quarantine" and sequences.drift.errors:
        write(traces[sequences.drift.left_out], out / f"unaligned-{shard:05d}.jsonl")
    return sequences


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TracegradError(f"{out}: {error.strerror}. Nothing can be written there. Give another --out.") from error
