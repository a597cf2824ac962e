"""From a file of traces to aligned sequences, with an account of how exactly it went. No torch.

Here are `load` (all at once, for training), `prepare` (shard by shard, to disk) and `Account`, what both tell the user.
Called by the command line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tracegrad.config import Data
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.metrics import Stopwatch
from tracegrad.sequence import TIER_TEXT, Sequences, align
from tracegrad.tables import ParquetStream, is_parquet
from tracegrad.tokenizer import Tokenizer
from tracegrad.trace import ReadReport, Traces, TraceStream, stream, write


@dataclass
class Account:
    """What was read and how exactly it aligned, added up over shards.

    Args:
        source: the file as the user named it.
        read: counts of the reader.
        traces, groups, branches, tokens, terms: of the aligned sequences.
        tiers: name to sampled tokens, trainable ones and generations.
        drift: reason to findings, traces and tokens concerned.
        recorded, exact: tokens recorded as sampled, and of those held with an exact id and a logprob.
        errors: one line for each trace that could not be aligned and was left out.
        template: what the probe found of the chat template, and `warnings` of it.
    """

    source: str
    read: ReadReport = field(default_factory=ReadReport)
    traces: int = 0
    branches: int = 0
    tokens: int = 0
    terms: int = 0
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    drift: dict[str, dict[str, int]] = field(default_factory=dict)
    recorded: int = 0
    exact: int = 0
    template: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    group_names: set[str] = field(default_factory=set)

    @property
    def groups(self) -> int:
        """Distinct groups."""
        return len(self.group_names)

    def add(self, sequences: Sequences) -> None:
        """Counts one shard."""
        self.traces += sequences.traces
        self.branches += sequences.branches
        self.tokens += sequences.tokens
        self.terms += len(sequences.terms)
        self.recorded += sequences.drift.recorded
        self.exact += sequences.drift.exact
        self.errors += sequences.drift.errors
        self.group_names.update(sequences.group_names)
        _add(self.tiers, sequences.tiers())
        _add(self.drift, sequences.drift.table())

    def probe(self, tokenizer: Tokenizer) -> None:
        """Keeps what the tokenizer's chat template does to a conversation."""
        found = tokenizer.probe()
        self.template = {**found.as_dict(), "warnings": found.warnings()}

    def as_dict(self) -> dict[str, Any]:
        """What drift.json holds."""
        counts = {name: getattr(self, name) for name in ("source", "traces", "groups", "branches", "tokens", "terms")}
        found = {"tiers": self.tiers, "recorded": self.recorded, "exact": self.exact, "drift": self.drift}
        return {**counts, **found, "errors": self.errors, "template": self.template, "read": asdict(self.read)}

    def lines(self) -> list[str]:
        """The account for a terminal."""
        bad = f", {self.read.bad:,} bad records left out" if self.read.bad else ""
        out = [
            f"read     {self.traces:,} traces in {self.groups:,} groups from {self.source}{bad}",
            *(f"         {count:,} as {name}: {sign}" for name, (count, sign) in self.read.formats.items()),
            f"aligned  {self.tokens:,} tokens in {self.branches:,} branches, {self.terms:,} of them trained",
        ]
        if self.errors:
            out.append(f"         {len(self.errors):,} traces could not be aligned, the first: {self.errors[0]}")
        out += [f"template {warning}" for warning in self.template.get("warnings", ())]
        out += _table("tier", ("tokens", "trainable", "generations"), self.tiers, TIER_TEXT)
        if self.recorded:
            share = 1 - self.exact / self.recorded
            out.append(f"drift    {share:.3%} of {self.recorded:,} recorded tokens are without an exact id and logprob")
        out += _table("reason", ("findings", "traces", "tokens"), self.drift, {})
        return out


def load(source: str, model: Path, data: Data, out: Path, watch: Stopwatch) -> tuple[Sequences, Account]:
    """Reads and aligns a whole file, or takes what `prepare` has written.

    Args:
        source: file, "-" for standard input, or a folder of shards.
        model: folder with tokenizer.json and chat template.
        data: options of reading and aligning.
        out: where quarantined records go.
        watch: takes the seconds of "read" and "align".

    Raises:
        ReadError, FormatError, TokenizerError, TemplateError, AlignmentError: for a bad record, by data.on_error.
        ArgumentError: for an option of aligning where a folder of shards is given.
    """
    account = Account(source)
    if Path(source).is_dir():
        _check_prepared(source, data)
        with watch("read"):
            sequences = Sequences.load(source)
        account.add(sequences)
        return sequences, account
    tokenizer = Tokenizer.from_pretrained(model)
    with watch("read"):
        traces = _open(source, data, out)
        whole = Traces.concatenate(traces)
    with watch("align"):
        sequences = _aligned(whole, tokenizer, data, out, account, 0)
    account.read = traces.read_report
    account.probe(tokenizer)
    return sequences, account


def _check_prepared(source: str, data: Data) -> None:
    default = Data()
    for name in ("on_error", "logprob_kind", "text_only", "lenient"):
        if getattr(data, name) != getattr(default, name):
            raise ArgumentError(
                f"data.{name} has no effect on {source}, which is aligned already. It is an option of prepare. "
                "Leave it out, or give the file of traces."
            )


def prepare(source: str, model: Path, data: Data, out: Path, *, shard_traces: int = 4096) -> Account:
    """Aligns a file of any size into `out/shard-NNNNN`, in bounded memory, and writes `out/drift.json`.

    Args and Raises: as `load`; ArgumentError too, if `out` holds shards.

    A group that stands in two shards keeps its name in `group_names`; its number is the shard's own.
    """
    if any(out.glob("shard-*")):
        raise ArgumentError(f"{out} holds shards. New ones among them would be read as one set. Give another --out.")
    account = Account(source)
    tokenizer = Tokenizer.from_pretrained(model)
    account.probe(tokenizer)
    _make(out)
    traces = _open(source, data, out, shard_traces)
    for index, part in enumerate(traces):
        sequences = _aligned(part, tokenizer, data, out, account, index)
        sequences.save(out / f"shard-{index:05d}")
    account.read = traces.read_report
    write_json(out / "drift.json", account.as_dict())
    return account


def write_json(path: Path, value: Any) -> None:
    """Writes JSON to a file, whole or not at all.

    Raises:
        TracegradError: if it cannot be written.
    """
    staged = path.with_name(f".{path.name}.tmp")
    try:
        staged.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        staged.replace(path)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise TracegradError(
            f"{path}: {error.strerror}. It is not written. Make room, or give another --out."
        ) from error


def _open(source: str, data: Data, out: Path, batch: int = 1024) -> TraceStream | ParquetStream:
    if is_parquet(source):
        return ParquetStream(source, batch=batch, on_error=data.on_error)
    aside = None
    if data.on_error == "quarantine":
        _make(out)
        aside = out / ("stdin" if source == "-" else Path(source).name)
    return stream(source, batch=batch, on_error=data.on_error, quarantine=aside)


def _aligned(traces: Traces, tokenizer: Tokenizer, data: Data, out: Path, account: Account, shard: int) -> Sequences:
    sequences = align(
        traces,
        tokenizer,
        lenient=data.lenient,
        text_only=data.text_only,
        logprob_kind=None if data.logprob_kind == "recorded" else data.logprob_kind,
        on_error="raise" if data.on_error == "raise" else "skip",
    )
    if data.on_error == "quarantine" and sequences.drift.errors:
        left = list(_left_out(traces, sequences))
        write(traces[left], out / f"unaligned-{shard:05d}.jsonl")
    account.add(sequences)
    return sequences


def _left_out(traces: Traces, sequences: Sequences) -> Iterator[int]:
    """Rows of the traces that stand in no sequence: the aligned ones keep their order."""
    kept = iter(sequences.trace_ids)
    awaited = next(kept, None)
    for row, trace in enumerate(traces):
        if trace.id == awaited:
            awaited = next(kept, None)
        else:
            yield row


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TracegradError(f"{out}: {error.strerror}. Nothing can be written there. Give another --out.") from error


def _add(into: dict[str, dict[str, int]], more: dict[str, dict[str, int]]) -> None:
    for name, counts in more.items():
        row = into.setdefault(name, dict.fromkeys(counts, 0))
        for key, value in counts.items():
            row[key] += value


def _table(head: str, columns: tuple[str, ...], rows: dict[str, dict[str, int]], texts: dict[str, str]) -> list[str]:
    if not rows:
        return []
    width = max(len(name) for name in [head, *rows])
    out = ["         " + "  ".join([head.ljust(width), *(name.rjust(11) for name in columns)])]
    for name, counts in rows.items():
        cells = [name.ljust(width), *(f"{counts[column]:,}".rjust(11) for column in columns)]
        out.append(("         " + "  ".join(cells) + "  " + texts.get(name, "")).rstrip())
    return out
