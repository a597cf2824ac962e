"""All inputs read and aligned at once, for training, or what `prepare` has written taken as it is. No torch."""

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from tracegrad import addresses, inputs, manifest
from tracegrad.account import Account
from tracegrad.config import Data, Map
from tracegrad.errors import ArgumentError
from tracegrad.inputs import Progress
from tracegrad.metrics import Stopwatch
from tracegrad.prepare.place import PLAN, place_of
from tracegrad.prepare.shard import Sources, aligned, aside_of, names_of, said
from tracegrad.sequence import Sequences
from tracegrad.tokenizer import Tokenizer
from tracegrad.trace import Traces, write


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
        traces = inputs.stream(named, **told)
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
    if isinstance(folder, str) and addresses.is_address(folder):
        return any(addresses.exists(addresses.joined(folder, name)) for name in (manifest.NAME, PLAN))
    path = addresses.path_of(folder)
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
