"""List the adapters in order of priority, and count the records that each one converts.

Also retry records that the core can read although their answer is stored outside their messages.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tracegrad import _core
from tracegrad.data import chat
from tracegrad.data.arrow import to_json
from tracegrad.data.field_map import BadValueError, parse_record
from tracegrad.data.formats import (
    anthropic,
    autogen,
    claude_code,
    codex,
    evaluations,
    generic,
    google_adk,
    harbor,
    haystack,
    inspect_ai,
    langchain,
    langfuse,
    message_lines,
    message_parts,
    nemo_gym,
    ollama,
    openai,
    openai_calls,
    openhands,
    prompt_prefix,
    prompt_response,
    pydantic_ai,
    record_fields,
    session_tree,
    span_containers,
    token_rows,
)
from tracegrad.data.sources import Row
from tracegrad.data.trace import Line, ReadReport, Traces, add_reports, format_location
from tracegrad.errors import FormatError, ReadError


class Adapter(NamedTuple):
    """A converter of the records of one producer.

    Args:
        name: name in counts and messages.
        adapt: converts a record to several: an empty list if it contains no call, None if the form is not recognized.
        keys: every record that the adapter recognizes, and that the core could read too, contains one of these. A
            record without them is left to the core and not parsed in Python.
        weak: whether it recognizes records by common keys. It is then tried only for records that the core cannot read.
        finds_separate_answer: whether a weak adapter is also tried for messages that the core reads but that do not end
            with a sampled turn. Their answer may be stored next to them.
        messages_name: name used instead of `name` if the result is messages and not a call.
    """

    name: str
    adapt: Callable[[Any], list[dict[str, Any]] | None]
    keys: tuple[str, ...] = ()
    weak: bool = False
    finds_separate_answer: bool = False
    messages_name: str | None = None


class Conversion(NamedTuple):
    """Result of an adapter: its name, the converted records, and counts of what it left out, by reason."""

    name: str
    records: list[dict[str, Any]]
    left_out: Mapping[str, int] = {}


def _of_export(record: Any) -> list[dict[str, Any]] | None:
    """Convert an object that wraps exactly one list of records; None if it does not.

    A list is recognized by its first record. A record in it that no adapter recognizes is left to the core, which
    reports the reason.
    """
    record_lists = [each for each in chat.as_mapping(record).values() if isinstance(each, list) and each]
    record_lists = [each for each in record_lists if isinstance(each[0], Mapping)]
    record_lists = [each for each in record_lists if convert_first_match(each[0]) is not None or _core_reads(each[0])]
    if len(record_lists) != 1:
        return None
    converted = []
    for each in record_lists[0]:
        results = adapt(each)
        converted += [each if isinstance(each, dict) else {"record": each}] if results is None else results
    return converted


EXPORT_ADAPTER = "export"
ADAPTERS = (
    Adapter(claude_code.NAME, claude_code.of_session, claude_code.KEYS),
    Adapter(codex.NAME, codex.of_session, codex.KEYS),
    Adapter(openhands.NAME, openhands.of_session, session_tree.KEYS),
    Adapter(message_lines.NAME, message_lines.of_session, session_tree.KEYS),
    Adapter(google_adk.NAME, google_adk.of_session, google_adk.KEYS),
    Adapter("autogen", autogen.of_event, autogen.EVENT_KEYS),
    Adapter("autogen", autogen.of_task_result, autogen.RESULT_KEYS),
    Adapter("ag2", autogen.of_ag2, autogen.AG2_KEYS),
    Adapter("ag2", autogen.of_ag2_log, autogen.AG2_LOG_KEYS),
    Adapter("langsmith", langchain.of_run, ("run_type",)),
    Adapter("langchain", langchain.of_talk, langchain.KEYS),
    Adapter(langfuse.NAME, langfuse.of_trace, langfuse.KEYS),
    Adapter("inspect_ai", inspect_ai.of_sample, ("epoch",)),
    Adapter("inspect_ai", inspect_ai.of_log, ("eval",)),
    Adapter("inspect_ai", inspect_ai.of_messages, ("source",)),
    Adapter("nemo_gym", nemo_gym.of_rollout, ("responses_create_params",)),
    Adapter("nemo_gym_chat", nemo_gym.of_chat, ("generation_token_ids",)),
    Adapter("atropos", token_rows.of_atropos_group, token_rows.ATROPOS_KEYS),
    Adapter("nemo_rl", token_rows.of_nemo_rl, token_rows.NEMO_RL_KEYS),
    Adapter("prime_rl", token_rows.of_prime_rl, token_rows.PRIME_RL_KEYS),
    Adapter("harbor_trial", harbor.of_trial, harbor.KEYS),
    Adapter("garak", evaluations.of_garak, evaluations.GARAK_KEYS),
    Adapter("lighteval", evaluations.of_lighteval, evaluations.LIGHTEVAL_KEYS),
    Adapter(haystack.NAME, haystack.of_talk, haystack.KEYS),
    Adapter("pydantic_ai", pydantic_ai.of_history, ("part_kind",)),
    Adapter("lm_eval", prompt_response.of_sample, ("doc_id",)),
    Adapter("sharegpt", prompt_response.of_talk, ("from",)),
    Adapter("preference_pair", prompt_response.of_preference, ("rejected",)),
    Adapter("kept_responses", openai.of_talk, ("extra",)),
    Adapter("anthropic_talk", anthropic.of_talk, anthropic.KEYS),
    Adapter("chunk_list", openai.of_list),
    Adapter(message_parts.NAME, message_parts.of_record),
    Adapter("choices", openai_calls.of_call),
    Adapter(record_fields.FAILED, ollama.of_request, ollama.KEYS, weak=True),
    Adapter(record_fields.FAILED, openai_calls.of_error, weak=True, finds_separate_answer=True),
    Adapter("parent_row", generic.of_observation, weak=True),
    Adapter("logged_call", openai.of_call, weak=True, finds_separate_answer=True),
    Adapter("prompt_response", prompt_response.of_answered, weak=True, finds_separate_answer=True),
    Adapter("prompt_samples", prompt_response.of_samples, weak=True, finds_separate_answer=True),
    Adapter(record_fields.FAILED, openai_calls.of_nothing, weak=True),
    Adapter("http_call", openai.of_http, weak=True),
    Adapter("nested_call", generic.of_record, weak=True, finds_separate_answer=True, messages_name="renamed_messages"),
    Adapter("span", generic.of_span, weak=True),
    Adapter(EXPORT_ADAPTER, _of_export, weak=True),
    Adapter("parent_row", generic.of_parent_row, weak=True),
    Adapter("parent_row", evaluations.of_harness, weak=True, finds_separate_answer=True),
    Adapter("nested_call", generic.refuse_ambiguous, weak=True, finds_separate_answer=True),
    Adapter(record_fields.FAILED, openai_calls.of_prompt, weak=True),
)


def only_roots(head: list[bytes]) -> bool:
    """Return whether the first records of a source are all LangSmith root runs, without their child runs.

    The conversation is then read from the root runs.
    """
    return len(head) > 1 and all(langchain.is_root(parse_record(each)) for each in head)


def _of_root(record: Any) -> Conversion | None:
    """Convert a LangSmith root run; no records if it contains no conversation, None if it is not a root run."""
    if not langchain.is_root(record):
        return None
    conversation = langchain.of_root(record)
    if (conversion := convert_first_match(conversation)) is not None:
        return Conversion("langsmith", conversion.records)
    return Conversion(
        "langsmith", [conversation] if record_fields.is_failed(conversation) or _core_reads(conversation) else []
    )


def convert_first_match(record: Any) -> Conversion | None:
    """Convert a record with the first adapter that recognizes it; each choice of a response becomes a record.

    None if no adapter recognizes the record, or if the core reads it correctly without conversion.

    Raises:
        BadValueError: if a value in the record has the wrong type for its form.
    """
    with record_fields.refuse_on_error("any form") as form:
        if isinstance(record, Mapping) and (parsed := chat.with_parsed_messages(record)) is not record:
            return convert_first_match(parsed) or Conversion("messages_as_text", [dict(parsed)])
        if isinstance(record, Mapping) and (complete := prompt_prefix.complete(record)) is not record:
            return convert_first_match(complete) or Conversion(prompt_prefix.NAME, [dict(complete)])
        standing = unused = None
        for each in ADAPTERS:
            if each.weak and standing is None:
                standing, unused = _standing(record)
            if standing == STANDS:
                break
            if standing in (OPEN, ALONE) and not each.finds_separate_answer:
                continue
            form.name = each.name
            made = each.adapt(record)
            form.name = "any form"
            if made is not None:
                of_talk = bool(made) and "messages" in made[0]
                parts = [part for converted in made for part in openai_calls.of_made(converted) or [converted]]
                for each_record in made:
                    _refuse_unread(each_record)
                left_out = made.left_out if isinstance(made, record_fields.Converted) else {}
                return Conversion((of_talk and each.messages_name) or each.name, parts, left_out)
        if standing == OPEN:
            _refuse_unread(record)
        has_no_choices = standing in (OPEN, UNREAD) or _is_plain(record)
        made = None if has_no_choices else openai_calls.of_response(record, unused)
        return None if made is None else Conversion("choices", made)


def _refuse_unread(record: Mapping[str, Any]) -> None:
    """Refuse messages that end before an answer next to a response that no adapter has read.

    Raises:
        BadValueError: for such a record. Its messages are those of the request, which this call did not sample.
    """
    if not {"request", "calls", "call_type"} & record.keys() and (unread := openai.unread_response(record)):
        raise record_fields.unread_refusal(*unread)


STANDS, OPEN, ALONE, UNREAD = "stands", "open", "alone", "unread"


def _standing(record: Any) -> tuple[str, int | None]:
    """Classify how the core reads a record. With it, return the number of choices that the core leaves out, if known.

    STANDS: the core reads it completely, as `_core.Traces.plain` reports.
    OPEN: messages follow the last sampled turn, so the answer may be stored next to them.
    ALONE: the record has an answer without a prompt, so the request may be stored next to it.
    UNREAD: the core cannot read the record, or finds nothing sampled in it.
    """
    if _is_plain(record):
        return STANDS, None
    raw = to_json(record)
    try:
        core, report = _core.Traces.decode([raw], "<record>", 1, "auto")
    except FormatError:
        return UNREAD, None
    first = [turns[0] for index in range(len(core)) if (turns := core.generations(index))]
    if not first:
        return UNREAD, None
    unused = openai_calls.unused_choices(core, report)
    if core.open() and "chat" in report["formats"]:
        return OPEN, unused
    has_prompt = any(each["context"] or each["prompt_token_ids"] is not None for each in first)
    has_prompt = has_prompt or report["unused_choices"] or _core.Traces.plain([raw], [])[0]
    return STANDS if has_prompt else ALONE, unused


def _is_plain(record: Any) -> bool:
    """Return whether a record has the keys of one of the core's most common forms and ends with a sampled turn.

    Such a record does not have to be decoded to know that the core reads it completely.
    """
    if not isinstance(record, Mapping):
        return False
    messages, response = record.get("messages"), record.get("response")
    if isinstance(messages, list) and messages and response is None and "calls" not in record:
        return chat.was_sampled(messages[-1])
    if isinstance(record.get("request"), Mapping) and isinstance(response, Mapping) and "choices" in response:
        return isinstance(response["choices"], list) and len(response["choices"]) == 1
    return isinstance(record.get("calls"), list)


def _core_reads(record: Any) -> bool:
    """Return whether the core reads a record and finds a sampled turn in it."""
    return _standing(record)[0] != UNREAD


def core_reads(record: Any) -> bool:
    """Return whether the core reads a record, also without a sampled turn, and apart from what a field map replaces."""
    if _is_plain(record):
        return True
    try:
        _core.Traces.decode([to_json(chat.without(record, "reward", "rewards", "group", "id"))], "<record>", 1, "auto")
    except FormatError:
        return False
    return True


def adapt(record: Any, roots: bool = False) -> list[dict[str, Any]] | None:
    """Convert a record to records that the core reads; None if it needs no conversion.

    Args:
        record: the parsed record.
        roots: the result of `only_roots` for its source.

    Raises:
        BadValueError: if the record cannot be converted.

    >>> adapt({"prompt": "2+2?", "response": "4"})[0]["messages"][1]["content"]
    '4'
    """
    conversion = (_of_root(record) if roots else None) or convert_first_match(record)
    return None if conversion is None else conversion.records


ANSWERS = sorted(
    {
        openai.normalize_name(each)
        for each in (*openai.RESPONSES, *prompt_response.ANSWERS, *prompt_response.ANSWER_LISTS)
    }
)
"""Names of fields that may contain an answer, in lower case and without `_` and `-`."""
_KEYS = sorted(
    {
        key.encode()
        for key in (*span_containers.KEYS, *prompt_prefix.KEYS, *(key for each in ADAPTERS for key in each.keys))
    },
    key=len,
    reverse=True,
)
"""Keys of all adapters. A key comes before its own beginning: only the first that matches at a place is compared."""


def needs_adapter(head: list[bytes], name: str) -> bool:
    """Return whether one of the first records of a source needs an adapter.

    Records that the core reads directly are not parsed.

    Raises:
        ReadError: if the source is a table of separated text, such as CSV.
    """
    parsed = {
        index: parse_record(head[index])
        for index, is_direct in enumerate(_core.Traces.plain(head, _KEYS))
        if not is_direct
    }
    if 0 in parsed and parsed[0] is None:
        refuse_table(head[0], name)
    return any(openai.is_chunk(record) or _is_ours(record) for record in parsed.values())


def _is_ours(record: Any) -> bool:
    try:
        return span_containers.is_spans(record) or convert_first_match(record) is not None
    except BadValueError:
        return True  # The reader then refuses the record, with its line.


def refuse_table(line: bytes, name: str) -> None:
    """Refuse a table of separated text (CSV, TSV), whatever the name of the file, and the log of Ollama's server.

    Raises:
        ReadError: if the line looks like a row of such a table, or like a line of that log. The message contains a line
            of Python that converts the table.
    """
    if ollama.is_server_log(line):
        raise ReadError(
            f"TG-DATA-047: {name}:1: it is the log of Ollama's server. It has no requests and no answers. {ollama.FIX}."
        )
    head = line[:4096].decode("utf-8", "replace").strip().split("\n")[0]
    for separator, reader in ((",", "csv"), ("\t", "table")):
        cells = head.split(separator)
        if len(cells) > 1 and all(cell.strip(' "').replace("_", "").isalnum() for cell in cells):
            conversion = f"pd.read_{reader}({name!r}).to_json('traces.jsonl', orient='records', lines=True)"
            raise ReadError(
                f"TG-DATA-023: {name}:1: it looks like a table of separated text: {head[:60]!r}. Rows of text have no "
                "messages and no lists of logprobs, so they are not read. Convert it, and inspect the result: "
                "python -c "
                f'"import pandas as pd; {conversion}"'
            )


class RecordConverter:
    """Converts records, and counts them by adapter.

    `counts` has the converted records, `empty` those without a call, `left_out` by "adapter: reason" the parts that are
    in no result. `names` has the adapter of each line since the reader last cleared it. `roots` is the result of
    `only_roots` for the current source.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.empty: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.names: dict[Line, str] = {}
        self.roots = False

    def rows(self, name: str, line: Line, raw: bytes) -> list[Row] | None:
        """Return the rows to decode instead of a record; None if no adapter recognizes it."""
        try:
            converted = self.adapt(parse_record(raw), len(raw), name, line)
        except BadValueError as unfit:
            return [(line, raw, unfit.args[0])]
        return None if converted is None else [(place, raw, text) for place, text, _ in converted]

    def adapt(self, record: Any, size: int, name: str, line: Line) -> list[tuple[Line, bytes, dict[str, Any]]] | None:
        """Convert a record as `adapt` does, count it, and return (line, JSON, record) of each result.

        Records of a wrapped list get (line, number in the list) as their line. Otherwise, if there are several results,
        those without an id get one made of the file, the line and their index.

        Args:
            record: the parsed record.
            size: its size in bytes.
            name: its file.
            line: its line.

        Raises:
            BadValueError: if the record cannot be converted, or the results are too large.
        """
        conversion = (_of_root(record) if self.roots else None) or convert_first_match(record)
        if conversion is None:
            return None
        adapter, records, left_out = conversion
        results, bytes_left = [], record_fields.MOST_BYTES + 4 * size
        for index, each in enumerate(records):
            place = line
            if adapter == EXPORT_ADAPTER and isinstance(line, int):
                place = (line, index + 1)
            elif len(records) > 1 and each.get("id") is None:
                each = {**each, "id": f"{format_location(name, line)}-{index}"}
            if isinstance(each.get("group"), record_fields.FileGroup):
                each = {**each, "group": f"{name}-{each['group']}"}
            with record_fields.refuse_on_error(adapter):
                results.append((place, to_json(each), each))
            bytes_left -= len(results[-1][1])
            if bytes_left < 0:
                raise record_fields.size_refusal(f"{len(records):,} traces")
        self.names |= {place: adapter for place, _, _ in results}
        self.counts[adapter] += adapter != record_fields.FAILED
        self.empty[adapter] += not records
        self.left_out.update({f"{adapter}: {reason}": count for reason, count in left_out.items()})
        return results

    def lines(self) -> list[str]:
        """Return the counts as lines for a terminal."""
        lines = []
        for name, count in (+self.counts).items():
            empty_note = f", {self.empty[name]:,} of them hold no call and are left out" if self.empty[name] else ""
            lines.append(f"convert  {count:,} records of {name}{empty_note}")
            for key, parts in self.left_out.items():
                if key.startswith(f"{name}: "):
                    lines.append(f"         left out: {parts:,} {key.removeprefix(f'{name}: ')}")
        return lines


class RetryWithAdapters:
    """Retries records of one source with the adapters after the core decoded them.

    Args:
        adapted: converts the records.
        decoder: returns a core reader, which decodes the results and handles bad ones.
    """

    def __init__(self, adapted: RecordConverter, decoder: Callable[[], Any]) -> None:
        self._adapted, self._open = adapted, decoder
        self._decoder: Any = None
        self._before = ReadReport()

    @property
    def report(self) -> ReadReport:
        """Counts to add to those of the source: minus the first decoding of these records, plus the second."""
        if self._decoder is None:
            return ReadReport()
        return add_reports(_less(self._before), replace(ReadReport(**self._decoder.report()), bytes=0))

    def traces(self, part: Traces, odd: Sequence[int]) -> Traces:
        """Retry the traces of a batch at the indices `odd`. A trace that no adapter recognizes stays unchanged."""
        parts, start = [], 0
        for index in odd:
            trace = part[index]
            file, line = trace.core.location(trace.index)
            rows = self._adapted.rows(file or "", line or 1, trace.record)
            if rows is None:
                continue
            if self._decoder is None:
                self._decoder = self._open()
            _, first_report = _core.Traces.decode([trace.record], "<record>", 1, "auto")
            self._before = add_reports(self._before, replace(ReadReport(**first_report), bytes=0))
            parts += [part[start:index].core, self._decoder.decode(rows)]
            start = index + 1
        return Traces(_core.Traces.concatenate([*parts, part[start:].core])) if start else part


def _less(report: ReadReport) -> ReadReport:
    """Negate the counts of a report, so that adding the result subtracts them."""
    counts = {name: -value for name, value in vars(report).items() if isinstance(value, int)}
    return replace(report, **counts, formats={name: (-count, sign) for name, (count, sign) in report.formats.items()})
