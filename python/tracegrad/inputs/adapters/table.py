"""The adapters in the order in which they are asked, and what became of the records that they took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tracegrad import _core
from tracegrad.errors import FormatError, ReadError
from tracegrad.inputs.adapters import (
    chunks,
    fitting,
    inspect_ai,
    kept,
    langchain,
    lm_eval,
    loggers,
    nemo_gym,
    pairs,
    pydantic_ai,
    samples,
    shapes,
    sharegpt,
    spans,
)
from tracegrad.inputs.mapping import Unfit, loads
from tracegrad.tables import to_json
from tracegrad.trace import Traces


class Adapter(NamedTuple):
    """Its name, and what makes records of one: none where it holds no call, None where it does not know it.

    A `weak` one goes by keys that others use too: it is asked only for what the core does not read. A `late` one is not
    even asked for a record that plainly is in a form of the core, as it looks into all of it. One of its `keys`
    stands in each record that it knows and that the core would read too: without them the core's reading stands, and
    the record is not parsed here. `talks` is its name where it made messages, and no call.
    """

    name: str
    adapt: Callable[[Any], list[dict[str, Any]] | None]
    keys: tuple[str, ...] = ()
    weak: bool = False
    late: bool = False
    talks: str = ""


class Made(NamedTuple):
    """The records that an adapter made of one, and what it is called."""

    name: str
    records: list[dict[str, Any]]


def _listed(record: Any) -> list[Any] | None:
    """The one list of records in an object around them; None without one. Its first one is looked at."""
    if not isinstance(record, Mapping):
        return None
    held = [each for each in record.values() if isinstance(each, list) and each and isinstance(each[0], Mapping)]
    held = [each for each in held if made_of(each[0]) is not None or _core_reads(each[0])]
    return held[0] if len(held) == 1 else None


def _of_export(record: Any) -> list[dict[str, Any]] | None:
    """What is made of each record in the list; one that no adapter knows is left to the core, which says why."""
    if (rows := _listed(record)) is None:
        return None
    out = []
    for each in rows:
        made = adapt(each)
        out += [each if isinstance(each, dict) else {"record": each}] if made is None else made
    return out


ADAPTERS = (
    Adapter("langsmith", langchain.of_run, ("run_type",)),
    Adapter("langchain", langchain.of_talk, langchain.KEYS),
    Adapter("inspect_ai", inspect_ai.of_sample, ("epoch",)),
    Adapter("inspect_ai", inspect_ai.of_log, ("eval",)),
    Adapter("nemo_gym", nemo_gym.of_rollout, ("responses_create_params",)),
    Adapter("pydantic_ai", pydantic_ai.of_history, ("part_kind",)),
    Adapter("lm_eval", lm_eval.of_sample, ("doc_id",)),
    Adapter("sharegpt", sharegpt.of_talk, ("from",)),
    Adapter("preference_pair", pairs.of_preference, ("rejected",)),
    Adapter("kept_responses", kept.of_talk, ("extra",)),
    Adapter("chunk_list", chunks.of_list),
    Adapter("choices", samples.of_choices),
    Adapter("logged_call", loggers.of_call, weak=True),
    Adapter("prompt_response", pairs.of_answered, weak=True),
    Adapter("prompt_samples", samples.of_samples, weak=True),
    Adapter("nested_call", shapes.of_record, weak=True, late=True, talks="renamed_messages"),
    Adapter("span", spans.of_span, weak=True, late=True),
    Adapter("export", _of_export, weak=True, late=True),
)


def made_of(record: Any) -> Made | None:
    """What the first adapter that knows a record makes of it; None where none does, or where the core's reading stands.

    Raises:
        Unfit: if a value of it is none that its form has there.
    """
    with fitting.fitting("any form"):
        plain = _is_plain(record)
        for each in ADAPTERS:
            if plain and each.late:
                continue
            try:
                with fitting.fitting(each.name):
                    made = each.adapt(record)
            except Unfit:
                if each.weak and _core_reads(record):
                    return None
                raise
            if made is not None:
                of_talk = each.talks and made and "messages" in made[0]
                return None if each.weak and _core_reads(record) else Made(each.talks if of_talk else each.name, made)
        return None


def _is_plain(record: Any) -> bool:
    """Whether a record has the keys of the core's commonest forms, with an answer."""
    if not isinstance(record, Mapping):
        return False
    talk, response = record.get("messages"), record.get("response")
    if isinstance(talk, list) and talk and response is None:
        return isinstance(talk[-1], Mapping) and talk[-1].get("role") == "assistant"
    called = isinstance(record.get("request"), Mapping) and isinstance(response, Mapping) and "choices" in response
    return called or isinstance(record.get("calls"), list)


def _core_reads(record: Any) -> bool:
    """Whether the core reads a record, with something that was sampled in it."""
    try:
        core, _ = _core.Traces.decode([to_json(record)], "<record>", 1, "auto")
    except FormatError:
        return False
    return any(trace.generations for trace in Traces(core))


def adapt(record: Any) -> list[dict[str, Any]] | None:
    """Records in a form that the core reads; None where the record needs no adapter.

    Raises:
        Unfit: if nothing can be made of it.

    >>> adapt({"prompt": "2+2?", "response": "4"})[0]["messages"][1]["content"]
    '4'
    """
    found = made_of(record)
    return None if found is None else found.records


_KEYS = [key.encode() for each in ADAPTERS for key in each.keys]


def needed(head: list[bytes], name: str) -> bool:
    """Whether one of the first records of a source is for an adapter; what the core reads as it stands is not parsed.

    Raises:
        ReadError: if the source is a table of text.
    """
    parsed = {at: loads(head[at]) for at, plain in enumerate(_core.Traces.plain(head, _KEYS)) if not plain}
    if 0 in parsed and parsed[0] is None:
        refuse_table(head[0], name)
    return any(chunks.is_chunk(record) or _is_ours(record) for record in parsed.values())


def _is_ours(record: Any) -> bool:
    try:
        return made_of(record) is not None
    except Unfit:
        return True  # so that it is refused where it is read, with its line


def refuse_table(line: bytes, name: str) -> None:
    """Refuses rows of separated text, whatever the file is called.

    Raises:
        ReadError: with the line of Python that converts it.
    """
    text = line[:4096].decode("utf-8", "replace").strip()
    head = text.split("\n")[0]
    for separator, reader in ((",", "csv"), ("\t", "table")):
        cells = head.split(separator)
        plain = len(cells) > 1 and all(cell.strip(' "').replace("_", "").isalnum() for cell in cells)
        if plain:
            told = f"pd.read_{reader}({name!r}).to_json('traces.jsonl', orient='records', lines=True)"
            raise ReadError(
                f"{name}:1: it begins like a table of separated text: {head[:60]!r}. Rows of text hold no messages and "
                "no lists of logprobs, so they are not read. Convert it, and look at what came of it: python -c "
                f'"import pandas as pd; {told}"'
            )


class Adapted:
    """What became of records that adapters took: how many of each, and how many held no call."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.empty: Counter[str] = Counter()

    def adapt(self, record: Any, size: int, place: str) -> list[tuple[bytes, dict[str, Any]]] | None:
        """As `adapt`, counted, each with its JSON; several without an id are named by the place of their record.

        Args:
            size: bytes of the record.
            place: its file and line.

        Raises:
            Unfit: if nothing can be made of it, or too much is.
        """
        found = made_of(record)
        if found is None:
            return None
        out, left = [], fitting.MOST_BYTES + 4 * size
        for at, each in enumerate(found.records):
            if len(found.records) > 1 and each.get("id") is None:
                each = {**each, "id": f"{place}-{at}"}
            with fitting.fitting(found.name):
                out.append((to_json(each), each))
            left -= len(out[-1][0])
            if left < 0:
                raise fitting.too_much(f"{len(found.records):,} traces")
        self.counts[found.name] += 1
        self.empty[found.name] += not found.records
        return out

    def lines(self) -> list[str]:
        """The same for a terminal."""
        out = []
        for name, count in self.counts.items():
            left = f", {self.empty[name]:,} of them hold no call and are left out" if self.empty[name] else ""
            out.append(f"convert  {count:,} records of {name}{left}")
        return out
