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
from tracegrad.config import Data, Map
from tracegrad.data import Progress, stream
from tracegrad.data.reader import BLANK, Tally, added
from tracegrad.data.sources import expand
from tracegrad.data.trace import Traces, write
from tracegrad.errors import ArgumentError, ReadError, TracegradError, redacted, shown
from tracegrad.metrics import Stopwatch
from tracegrad.prepare import ray_backend
from tracegrad.prepare.output import PLAN, Bucket, Folder, encoded, place_of
from tracegrad.prepare.part import Job, Record, Sources, aligned, aside_of, done, kept, names_of, said, shards_in
from tracegrad.prepare.split import PART_BYTES, Part, cut
from tracegrad.prepare.summary import Account
from tracegrad.prepare.workers import Workers
from tracegrad.storage import manifest, remote


def load(
    source: Sources,
    model: Path,
    data: Data,
    out: Path,
    watch: Stopwatch,
    *,
    map: Map | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Sequences, Account]:
    """Reads and aligns all inputs, or takes what `prepare` has written.

    Args:
        source: what `tracegrad.read` takes as names, one or several, or a folder of shards, by its path or address.
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
    named = names_of(source)
    account = Account(said(named), named, reward=data.reward)
    if len(named) == 1 and is_prepared(named[0]):
        check_prepared(named[0], data, map or Map())
        with watch("read"):
            sequences = Sequences.load(named[0], verify=True)
        account.add(sequences)
        return sequences, account
    tokenizer = Tokenizer.from_pretrained(model)
    with watch("read"):
        aside = None
        if data.on_error == "quarantine":
            place_of(str(out)).make()
            aside = out / aside_of(named)
        told = {"map": map, "on_error": data.on_error, "quarantine": aside, "progress": progress}
        traces = stream(named, **told)
        whole = Traces.concatenate(traces)
    with watch("align"):
        sequences = aligned(whole, tokenizer, data)
        if aside is not None and sequences.drift.errors:
            write(whole[sequences.drift.left_out], out / "unaligned-00000.jsonl")
    account.add(sequences)
    account.read, account.mapped = traces.read_report, traces.lines()
    account.look(named, map or Map())
    account.probe(tokenizer)
    return sequences, account


def is_prepared(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder, by its path or address, holds shards, or one: whole or not."""
    if isinstance(folder, str) and remote.is_address(folder):
        return any(remote.exists(remote.joined(folder, name)) for name in (manifest.NAME, PLAN))
    path = remote.path_of(folder)
    named = any((path / name).exists() for name in (manifest.NAME, PLAN, "sequences.json"))
    return path.is_dir() and (named or any(path.glob("shard-*")))


OF_ALIGNING = [each.name for each in fields(Data) if each.name not in ("reward", "holdout")]


def check_prepared(source: str, data: Data, map: Map) -> None:
    """Refuses options of reading and aligning where a prepared folder is given."""
    default = Data()
    if map.told():
        raise ArgumentError(
            f"map.{next(iter(map.told()))} has no effect on {source}, which is read already. It is of prepare. "
            "Leave it out, or give the file of traces."
        )
    for name in OF_ALIGNING:
        if getattr(data, name) != getattr(default, name):
            raise ArgumentError(
                f"data.{name} has no effect on {source}, which is aligned already. It is an option of prepare. "
                "Leave it out, or give the file of traces."
            )


_ACCOUNT = "drift.json"
_TOKENIZER_FILES = (".json", ".jinja", ".tiktoken", ".model")

Say = Callable[[Progress], None]


def prepare(
    source: Sources,
    model: Path,
    data: Data,
    out: str | os.PathLike[str],
    *,
    shard_traces: int = 4096,
    resume: bool = False,
    map: Map | None = None,
    progress: Say | None = None,
    workers: int = 1,
    ray: str | None = None,
    part_bytes: int = PART_BYTES,
) -> Account:
    """Aligns inputs of any size into `out/shard-*`, in bounded memory, with `out/drift.json` and a manifest last.

    The inputs are read in parts (`cut`); what stands in a shard is a function of the records, of `shard_traces` and of
    `part_bytes`, not of who does the parts. A group that stands in two shards keeps its name in `group_names`; its
    number is the shard's own.

    Args:
        source, model, data, map, progress: as `load`.
        out: folder of the shards, by its path, made if it is not there; or by its address.
        shard_traces: a shard ends with the group with which it has so many traces, or `SHARD_BYTES` of records.
        resume: keep the parts and shards that are whole and do the others: the same bytes as at once.
        workers: processes that do parts; 1 does them in this one.
        ray: do them on the Ray cluster at this address ("" for the one that Ray finds, or else one of this machine);
            `workers` is then how many actors, at most, and 1 for as many as there are CPUs.
        part_bytes: bytes of inputs in a part.

    Raises:
        As `load`; of several parts with a bad record, for the first. ArgumentError too, if `out` holds shards and
            `resume` is False, or shards of other traces or options, or if another process is writing there.
        TracegradError: if the process of a part was lost three times.
    """
    for name, value in (("shard_traces", shard_traces), ("workers", workers), ("part_bytes", part_bytes)):
        _validation.integer(value, name, least=1)
    tokenizer = Tokenizer.from_pretrained(model)
    named, told = names_of(source), map or Map()
    account = Account(said(named), named, reward=data.reward)
    account.probe(tokenizer)
    plan = _plan(named, model, data, told, shard_traces, part_bytes)
    place = place_of(os.fspath(out))
    _check(place, workers, ray)
    if ray is not None and named != ["-"]:
        ray_backend.check(ray)
    _check_own(place)
    place.make()
    with place.lock() as lock:
        _begin(place, plan, resume)
        parts, account.whole = cut(named, part_bytes, told)
        records = {part.index: record for part in parts if resume and (record := kept(place, part))}
        left = [part for part in parts if part.index not in records]
        if left:
            place.remove(manifest.NAME)
        job = Job(aside_of(named), str(model), os.fspath(out), data, told, shard_traces)
        far = _Far(parts, left, progress)
        if ray is not None and not _is_alone(left):
            made = ray_backend.records(job, left, ray, 0 if workers == 1 else workers)
        elif min(workers, len(left)) > 1:
            made = _by_processes(job, left, min(workers, len(left)), lock, far)
        else:
            made = (done(job, part, tokenizer, lambda *what, part=part: far(part, *what)) for part in left)
        for record in made:
            records[record["part"]] = record
            far.ended(record["part"])
        far.close()
        in_order = [records[index] for index in sorted(records)]
        _sum(account, in_order, told, named)
        place.write(_ACCOUNT, encoded(account.as_dict()))
        place.seal({name: shard for record in in_order for name, shard in shards_in(record).items()})
    return account


def _is_alone(parts: Sequence[Part]) -> bool:
    """Whether there is one part alone that only this process can read."""
    return all(place.kind == "stdin" for part in parts for place in part.places)


def _by_processes(job: Job, parts: Sequence[Part], count: int, lock: int | None, far: "_Far") -> Iterator[Record]:
    with Workers(job, count, lock, far) as pool:
        yield from pool.records(parts)


def _check(place: Folder | Bucket, workers: int, ray: str | None) -> None:
    if isinstance(place, Bucket) and place.address.startswith("memory://") and (workers > 1 or ray is not None):
        raise ArgumentError(
            f"{place} is in the memory of this process. Shards of other processes would be lost. Leave --workers and "
            "--ray out, or give another --out."
        )


_ASIDE = re.compile(r"\.quarantine\.(raw|jsonl)$|\.tmp$|^unaligned-.*\.jsonl$|^\.lock$|^\.tmp-shard-|^(shard|part)-")


def _check_own(place: Folder | Bucket) -> None:
    """Refuses a folder that holds something and no plan of ours: files of the same names would be lost."""
    names = place.names()
    try:
        own = (
            PLAN in names and {"tokenizer", "shard_traces", "version"} <= json.loads(place.read(PLAN, 256 << 20)).keys()
        )
    except (ValueError, AttributeError, RecursionError):
        own = any(name.startswith(("shard-", "part-")) for name in names)  # what is wrong with it is said later
    others = sorted(name for name in names if not _ASIDE.search(name))
    if others and not own:
        raise ArgumentError(
            f"{place} holds {shown(others[0])[:80]!r} and is not a folder of `prepare`. Files of it could be replaced. "
            "Give another --out."
        )


def _sum(account: Account, records: list[Record], told: Map, named: list[str]) -> None:
    """The account of all parts."""
    for record in records:
        account.join(record["account"])
    tally = added([Tally(**record["tally"]) for record in records], told)
    account.parts = len(records)
    if not account.read.records and tally.bare:
        raise ReadError(tally.first_bare)
    tally.check(told)
    account.mapped = tally.lines(told, account.read, BLANK)
    account.look(named, told)


class _Far:
    """How far all parts are together, said as one reader would."""

    def __init__(self, parts: Sequence[Part], left: Sequence[Part], say: Say | None) -> None:
        self._say, self._sizes = say, {part.index: part.size for part in left}
        self._total, self._began = sum(self._sizes.values()), time.monotonic()
        self._taken: dict[int, int] = {}
        self._records: dict[int, int] = {}

    def __call__(self, part: Part, taken: int, records: int) -> None:
        self._taken[part.index], self._records[part.index] = taken, records
        self._tell(False)

    def ended(self, part: int) -> None:
        """A part is done."""
        self._taken[part] = self._sizes[part]
        self._tell(False)

    def close(self) -> None:
        """The last word."""
        self._tell(True)

    def _tell(self, is_last: bool) -> None:
        if self._say is not None:
            spent = time.monotonic() - self._began
            taken, records = sum(self._taken.values()), sum(self._records.values())
            self._say(Progress(taken, self._total, records, spent, is_last))


def _begin(place: Folder | Bucket, plan: dict[str, Any], resume: bool) -> None:
    """Makes the folder ready for shards of this plan. For who holds the lock."""
    names = place.names()
    there = any(name.startswith(("shard-", "part-")) for name in names)
    if there and not resume:
        ended = "of a `prepare` that is done" if manifest.NAME in names else "of a `prepare` that was stopped"
        raise ArgumentError(
            f"{place} holds shards {ended}. New ones among them would be read as one set. Go on with --resume, or give "
            "another --out."
        )
    if there and plan["source"] == "-":
        raise ArgumentError(
            f"{place} holds shards of standard input, which cannot be known to be the same again. The shards would not "
            "be those of one run. Give a file, or another --out."
        )
    if there:
        _check_plan(place, plan)
    place.clear()
    place.write(PLAN, encoded(plan))


def _check_plan(place: Folder | Bucket, plan: dict[str, Any]) -> None:
    cure = "Give what the first run was given, or another --out."
    try:
        before = json.loads(place.read(PLAN, 256 << 20))
        apart = [name for name in {**before, **plan} if before.get(name) != plan.get(name)]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ArgumentError(
            f"{place}/{PLAN}: does not say what the shards beside it were made of ({str(error)[:80]!r}). They cannot "
            "be gone on with. Give another --out."
        ) from error
    if apart:
        name = apart[0]
        raise ArgumentError(
            f"{place}/{PLAN}: {name} was {str(before.get(name))[:80]!r} and is now {str(plan.get(name))[:80]!r}. The "
            f"shards would not be those of one run. {cure}"
        )


def _plan(
    named: list[str], model: Path, data: Data, map: Map, shard_traces: int, part_bytes: int = PART_BYTES
) -> dict[str, Any]:
    """What the bytes of the shards follow from."""
    what: dict[str, Any] = {"source": redacted(named[0]) if len(named) == 1 else [redacted(each) for each in named]}
    if named != ["-"]:
        found = expand(named)
        if missing := [place.path for place in found if place.kind == "file" and not os.path.exists(place.path)]:
            raise TracegradError(f"{missing[0]}: No such file or directory. Nothing is read. Check the path.")
        sizes, times = [place.size for place in found], [place.modified for place in found]
        what |= {"source_bytes": sizes[0], "source_mtime_ns": times[0]} if len(found) == 1 else {}
        what |= {"source_bytes": sizes, "source_mtime_ns": times} if len(found) > 1 else {}
    told = {f"data.{name}": getattr(data, name) for name in OF_ALIGNING}
    told |= {f"map.{name}": path for name, path in map.told().items()}
    cuts = {"shard_traces": shard_traces, "part_bytes": part_bytes}
    return {**what, "tokenizer": _checksum(model), **cuts, **told, "version": _core.__version__}


def _checksum(model: Path) -> str:
    """Of all files in the folder that a tokenizer or template may be read from."""
    checksum = 0
    with suppress(OSError):
        for path in sorted(model.rglob("*")):
            if path.suffix in _TOKENIZER_FILES and path.is_file():
                name = os.fsencode(path.relative_to(model))
                checksum = zlib.crc32(path.read_bytes(), zlib.crc32(name, checksum))
    return f"{checksum:08x}"
