"""List the adapters in the order in which they are asked, and count the records that each one took.

Also the second look at records that the core can read although an answer stands beside their messages.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tracegrad import _core
from tracegrad.data import chat
from tracegrad.data.arrow import to_json
from tracegrad.data.field_map import Unfit, loads
from tracegrad.data.formats import (
    anthropic,
    generic,
    inspect_ai,
    langchain,
    nemo_gym,
    openai,
    openai_calls,
    prompt_response,
    pydantic_ai,
    record_fields,
)
from tracegrad.data.sources import Row
from tracegrad.data.trace import Line, ReadReport, Traces, located, summed
from tracegrad.errors import FormatError, ReadError


class Adapter(NamedTuple):
    """Its name, and what makes records of one: none where it holds no call, None where it does not know it.

    A `weak` one goes by keys that others use too: it is asked only for what the core does not read; of these, one that
    finds an answer `beside` messages also for messages that the core reads and that do not end with what was sampled.
    One of its `keys` stands in each record that it knows and that the core would read too: without them the core's
    reading stands, and the record is not parsed here. `talks` is its name where it made messages, and no call.
    """

    name: str
    adapt: Callable[[Any], list[dict[str, Any]] | None]
    keys: tuple[str, ...] = ()
    weak: bool = False
    beside: bool = False
    talks: str = ""


class Made(NamedTuple):
    """The records that an adapter made of one, and what it is called."""

    name: str
    records: list[dict[str, Any]]


def _of_export(record: Any) -> list[dict[str, Any]] | None:
    """What is made of each record in the one list of records in an object around them, known by their first; None
    without one. A record that no adapter knows is left to the core, which says why.
    """
    held = [each for each in chat.table(record).values() if isinstance(each, list) and each]
    held = [each for each in held if isinstance(each[0], Mapping)]
    held = [each for each in held if made_of(each[0]) is not None or _core_reads(each[0])]
    if len(held) != 1:
        return None
    out = []
    for each in held[0]:
        made = adapt(each)
        out += [each if isinstance(each, dict) else {"record": each}] if made is None else made
    return out


EXPORT = "export"
ADAPTERS = (
    Adapter("langsmith", langchain.of_run, ("run_type",)),
    Adapter("langchain", langchain.of_talk, langchain.KEYS),
    Adapter("inspect_ai", inspect_ai.of_sample, ("epoch",)),
    Adapter("inspect_ai", inspect_ai.of_log, ("eval",)),
    Adapter("nemo_gym", nemo_gym.of_rollout, ("responses_create_params",)),
    Adapter("pydantic_ai", pydantic_ai.of_history, ("part_kind",)),
    Adapter("lm_eval", prompt_response.of_sample, ("doc_id",)),
    Adapter("sharegpt", prompt_response.of_talk, ("from",)),
    Adapter("preference_pair", prompt_response.of_preference, ("rejected",)),
    Adapter("kept_responses", openai.of_talk, ("extra",)),
    Adapter("anthropic_talk", anthropic.of_talk, anthropic.KEYS),
    Adapter("chunk_list", openai.of_list),
    Adapter("choices", openai_calls.of_call),
    Adapter("spans_of_several", generic.of_several),
    Adapter(record_fields.FAILED, openai_calls.of_error, weak=True, beside=True),
    Adapter("logged_call", openai.of_call, weak=True, beside=True),
    Adapter("prompt_response", prompt_response.of_answered, weak=True, beside=True),
    Adapter("prompt_samples", prompt_response.of_samples, weak=True, beside=True),
    Adapter(record_fields.FAILED, openai_calls.of_nothing, weak=True),
    Adapter("nested_call", generic.of_record, weak=True, beside=True, talks="renamed_messages"),
    Adapter("span", generic.of_span, weak=True),
    Adapter(EXPORT, _of_export, weak=True),
    Adapter(record_fields.FAILED, openai_calls.of_prompt, weak=True),
)


def only_roots(head: list[bytes]) -> bool:
    """Whether the first records of a source are runs of LangSmith without those that they started: then what was said
    stands in them alone.
    """
    return len(head) > 1 and all(langchain.is_root(loads(each)) for each in head)


def _of_root(record: Any) -> Made | None:
    """What is made of what a root run says, none where that is no conversation."""
    if not langchain.is_root(record):
        return None
    said = langchain.of_root(record)
    if (made := made_of(said)) is not None:
        return Made("langsmith", made.records)
    return Made("langsmith", [said] if record_fields.is_failed(said) or _core_reads(said) else [])


def made_of(record: Any) -> Made | None:
    """What the first adapter that knows a record makes of it, each choice of a response a record of its own; None where
    none knows it, or where the core's reading stands.

    Raises:
        Unfit: if a value of it is none that its form has there.
    """
    with record_fields.fitting("any form"):
        standing = None
        for each in ADAPTERS:
            if each.weak and standing is None:
                standing = _standing(record)
            if standing == STANDS:
                break
            if standing in (OPEN, ALONE) and not each.beside:
                continue
            with record_fields.fitting(each.name):
                made = each.adapt(record)
            if made is not None:
                of_talk = each.talks and made and "messages" in made[0]
                parts = [part for one in made for part in openai_calls.of_made(one) or [one]]
                return Made(each.talks if of_talk else each.name, parts)
        made = None if standing in (OPEN, UNREAD) or _is_plain(record) else openai_calls.of_response(record)
        return None if made is None else Made("choices", made)


STANDS, OPEN, ALONE, UNREAD = "stands", "open", "alone", "unread"


def _standing(record: Any) -> str:
    """Whether the core's reading of a record stands, as `_core.Traces.plain` has it: OPEN where it reads messages that
    go on behind what was sampled last, so that the answer may stand beside them; ALONE where nothing says what it was
    sampled after, so that the request may stand beside it; UNREAD where nothing sampled is read.
    """
    if _is_plain(record):
        return STANDS
    try:
        core, report = _core.Traces.decode([to_json(record)], "<record>", 1, "auto")
    except FormatError:
        return UNREAD
    first = [trace.generations[0] for trace in Traces(core) if trace.generations]
    if not first:
        return UNREAD
    if core.open() and "chat" in report["formats"]:
        return OPEN
    told = report["unused_choices"] or any(each.context or each.prompt_token_ids is not None for each in first)
    return STANDS if told or _core.Traces.plain([to_json(record)], [])[0] else ALONE


def _is_plain(record: Any) -> bool:
    """Whether a record has the keys of the core's commonest forms, and what was sampled last where they end: then it
    stands, without a look at what the core makes of it.
    """
    if not isinstance(record, Mapping):
        return False
    talk, response = record.get("messages"), record.get("response")
    if isinstance(talk, list) and talk and response is None and "calls" not in record:
        return _was_sampled(talk[-1])
    if isinstance(record.get("request"), Mapping) and isinstance(response, Mapping) and "choices" in response:
        return isinstance(response["choices"], list) and len(response["choices"]) == 1
    return isinstance(record.get("calls"), list)


def _was_sampled(message: Any) -> bool:
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return False
    return message.get("sampled", True) and message.get("trainable", True) and message.get("weight", 1) != 0


def _core_reads(record: Any) -> bool:
    """Whether the core reads a record, with something that was sampled in it."""
    return _standing(record) != UNREAD


def adapt(record: Any, roots: bool = False) -> list[dict[str, Any]] | None:
    """Records in a form that the core reads; None where the record needs no adapter.

    Args:
        roots: whether `only_roots` says so of its source.

    Raises:
        Unfit: if nothing can be made of it.

    >>> adapt({"prompt": "2+2?", "response": "4"})[0]["messages"][1]["content"]
    '4'
    """
    found = (_of_root(record) if roots else None) or made_of(record)
    return None if found is None else found.records


ANSWERS = sorted(
    {openai.plain(each) for each in (*openai.RESPONSES, *prompt_response.ANSWERS, *prompt_response.ANSWER_LISTS)}
)
"""Names under which an answer may stand, by their letters alone."""
_KEYS = [key.encode() for each in ADAPTERS for key in each.keys]


def needed(head: list[bytes], name: str) -> bool:
    """Whether one of the first records of a source is for an adapter; what the core reads as it stands is not parsed.

    Raises:
        ReadError: if the source is a table of text.
    """
    parsed = {at: loads(head[at]) for at, plain in enumerate(_core.Traces.plain(head, _KEYS)) if not plain}
    if 0 in parsed and parsed[0] is None:
        refuse_table(head[0], name)
    return any(openai.is_chunk(record) or _is_ours(record) for record in parsed.values())


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
    head = line[:4096].decode("utf-8", "replace").strip().split("\n")[0]
    for separator, reader in ((",", "csv"), ("\t", "table")):
        cells = head.split(separator)
        if len(cells) > 1 and all(cell.strip(' "').replace("_", "").isalnum() for cell in cells):
            told = f"pd.read_{reader}({name!r}).to_json('traces.jsonl', orient='records', lines=True)"
            raise ReadError(
                f"{name}:1: it begins like a table of separated text: {head[:60]!r}. Rows of text hold no messages and "
                "no lists of logprobs, so they are not read. Convert it, and look at what came of it: python -c "
                f'"import pandas as pd; {told}"'
            )


class Adapted:
    """What became of records that adapters took: how many of each, and how many held no call.

    `roots` is what `only_roots` says of the source that is read.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.empty: Counter[str] = Counter()
        self.roots = False

    def rows(self, name: str, line: Line, raw: bytes) -> list[Row] | None:
        """What is to be decoded in place of a record; None where no adapter knows it."""
        try:
            found = self.adapt(loads(raw), len(raw), name, line)
        except Unfit as unfit:
            return [(line, raw, unfit.args[0])]
        return None if found is None else [(at, raw, text) for at, text, _ in found]

    def adapt(self, record: Any, size: int, name: str, line: Line) -> list[tuple[Line, bytes, dict[str, Any]]] | None:
        """As `adapt`, counted, each with its place and its JSON.

        Those of a list in the record have their number there; several others without an id are named by its place.

        Args:
            size: bytes of the record.
            name, line: where it stands.

        Raises:
            Unfit: if nothing can be made of it, or too much is.
        """
        found = (_of_root(record) if self.roots else None) or made_of(record)
        if found is None:
            return None
        adapter, records = found
        out, left = [], record_fields.MOST_BYTES + 4 * size
        for at, each in enumerate(records):
            place = line
            if adapter == EXPORT and isinstance(line, int):
                place = (line, at + 1)
            elif len(records) > 1 and each.get("id") is None:
                each = {**each, "id": f"{located(name, line)}-{at}"}
            with record_fields.fitting(adapter):
                out.append((place, to_json(each), each))
            left -= len(out[-1][1])
            if left < 0:
                raise record_fields.too_much(f"{len(records):,} traces")
        self.counts[adapter] += adapter != record_fields.FAILED
        self.empty[adapter] += not records
        return out

    def lines(self) -> list[str]:
        """The same for a terminal."""
        out = []
        for name, count in (+self.counts).items():
            left = f", {self.empty[name]:,} of them hold no call and are left out" if self.empty[name] else ""
            out.append(f"convert  {count:,} records of {name}{left}")
        return out


class Again:
    """What becomes of the odd records of one source.

    Args:
        adapted: makes records of them.
        decoder: opens what decodes these and settles bad ones.
    """

    def __init__(self, adapted: Adapted, decoder: Callable[[], Any]) -> None:
        self._adapted, self._open = adapted, decoder
        self._decoder: Any = None
        self._before = ReadReport()

    @property
    def report(self) -> ReadReport:
        """What is to be added to the counts of the source."""
        if self._decoder is None:
            return ReadReport()
        return summed(_less(self._before), replace(ReadReport(**self._decoder.report()), bytes=0))

    def traces(self, part: Traces, odd: Sequence[int]) -> Traces:
        """The traces of a batch, those at `odd` looked at; one that no adapter knows stays as it was read."""
        parts, start = [], 0
        for index in odd:
            trace = part[index]
            file, line = trace.core.location(trace.index)
            rows = self._adapted.rows(file or "", line or 1, trace.record)
            if rows is None:
                continue
            if self._decoder is None:
                self._decoder = self._open()
            _, before = _core.Traces.decode([trace.record], "<record>", 1, "auto")
            self._before = summed(self._before, replace(ReadReport(**before), bytes=0))
            parts += [part[start:index].core, self._decoder.decode(rows)]
            start = index + 1
        return Traces(_core.Traces.concatenate([*parts, part[start:].core])) if start else part


def _less(report: ReadReport) -> ReadReport:
    """Counts to take away."""
    counts = {name: -value for name, value in vars(report).items() if isinstance(value, int)}
    return replace(report, **counts, formats={name: (-count, why) for name, (count, why) in report.formats.items()})
