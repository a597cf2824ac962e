"""Recordings of the bundled example, spoiled in one way each, for the tests of the doctor."""

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import tracegrad as tg
from tracegrad.doctor import Diagnosis, diagnose

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart"
MODEL = EXAMPLE / "model"
Record = dict[str, Any]


@cache
def _recorded() -> tuple[bytes, ...]:
    """Groups of the example without a cut turn, a rewritten history or equal rewards: 15 groups, 120 traces."""
    traces = tg.read(EXAMPLE / "traces.jsonl.zst", limit=400)
    sequences = tg.align(traces, tg.Tokenizer.from_pretrained(MODEL))
    noted = {traces.groups[i] for i in sequences.alignment_report.trace}
    for trace in traces:
        noted |= {trace.group for generation in trace.generations if generation.finish_reason == "length"}
    for group in set(traces.groups):
        here = [i for i, name in enumerate(traces.groups) if name == group]
        noted |= {group} if len({float(traces.reward[i]) for i in here}) == 1 else set()
    kept = [trace.record for trace in traces if trace.group not in noted]
    return tuple(kept[:120])


def recorded() -> list[Record]:
    """120 records with nothing wrong; a fresh copy to spoil."""
    return [json.loads(record) for record in _recorded()]


def answers(record: Record) -> Iterator[Record]:
    """What holds the token list of each turn: a choice of a call, or a message with its logprobs beside it."""
    for call in record.get("calls", ()):
        yield call["response"]["choices"][0]
    for message in record.get("messages", ()):
        if "logprobs" in message:
            yield message


def entries(record: Record) -> Iterator[list[dict[str, Any]]]:
    """The token list of each turn."""
    for answer in answers(record):
        yield answer["logprobs"]["content"]


def responses(record: Record) -> Iterator[Record]:
    """Each response of the record."""
    return (call["response"] for call in record.get("calls", ()))


def spoiled(change: Callable[[Record], None], every: int = 1) -> list[Record]:
    """The records with `change` done to every `every`-th of them."""
    records = recorded()
    for record in records[::every]:
        change(record)
    return records


def save(records: list[Record], path: Path) -> Path:
    """Writes them as JSONL."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def diagnosed(records: list[Record], folder: Path, **options: Any) -> Diagnosis:
    """What the doctor says of them."""
    return diagnose(str(save(records, folder / "traces.jsonl")), options.pop("model", MODEL), **options)


def names(diagnosis: Diagnosis) -> dict[str, str]:
    """Findings by name, with their severity."""
    return {finding.name: finding.severity.name for finding in diagnosis.findings}


def fresh(record: Record, number: int) -> Record:
    """A copy under another id, its responses under others as well."""
    again = copy.deepcopy(record)
    again["id"] = f"{record['id']}-again{number}"
    for response in responses(again):
        response["id"] = f"{response['id']}{number:04d}"
    return again


def zero(record: Record) -> None:
    for content in entries(record):
        for entry in content:
            entry["logprob"] = 0.0


def first(diagnosis: Any) -> Any:
    return diagnosis.findings[0].hits.first
