"""Join the calls of spans into conversations: one for each trace id, or for each value of a key that the user names.

The spans of a trace can be in any order, in many records and in many files. A call inside the span of a tool or of
another agent is a side call. A call that is recorded twice, by two instrumentations or by a parent that repeats it,
counts once. Spans without a call contribute their mapped values, such as the reward of their conversation.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tracegrad.data import chat
from tracegrad.data.arrow import to_json
from tracegrad.data.field_map import BadValueError, Mapper
from tracegrad.data.formats import openai_calls, span_calls, span_containers
from tracegrad.data.sessions import REWARD_FIELDS, Entry, Joined, Sessions, key_of, order_of, prefix_hashes
from tracegrad.data.sources import Row
from tracegrad.data.trace import Line
from tracegrad.errors import ReadError

_DEEPEST_TREE = 128
_BARE = -1
"""Choice of a call whose messages are not recorded."""


class _Node(NamedTuple):
    """A span in the tree of its trace."""

    parent: str | None
    kind: str
    session: str | None


@dataclass
class SpanSessions(Sessions):
    """Collects spans with `add_spans`, then yields conversations with `join`.

    Args:
        repeated: number of calls left out because another span records them too.
        unmatched: number of annotations of spans that are not in the inputs, or that several traces have.
    """

    repeated: int = 0
    unmatched: int = 0
    _mapper: Mapper = field(init=False)
    _messages: dict[tuple[str, str], list[Entry]] = field(default_factory=dict)
    _annotations: list[Entry] = field(default_factory=list)
    _trees: dict[str, dict[str, _Node]] = field(default_factory=dict)
    _spans: dict[str, list[Entry]] = field(default_factory=dict)
    _only_sessions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._mapper = Mapper(self.field_map)
        self.by = self.field_map.session or span_containers.TRACE

    def check(self) -> None:
        """Check that a span is a model call.

        Raises:
            ReadError: if none is one.
        """
        if self.records_without_call and not self.records:
            name = self.files[0] if self.files else "<records>"
            raise ReadError(
                f"TG-DATA-045: {name}: none of the {self.records_without_call:,} spans is a model call, so there is "
                "nothing to train on. Record the spans of model calls too: their gen_ai.operation.name is chat, or "
                "their openinference.span.kind is LLM."
            )

    def add_spans(self, place: int, line: Line, raw: bytes, record: Any, mapper: Mapper) -> list[Row]:
        """Add the spans of one record. Return the rows of failed calls and of spans that are refused.

        Args:
            place: index of its file in `files`.
            line: its line.
            raw: its JSON.
            record: the parsed record.
            mapper: the field map.
        """
        self._mapper = mapper
        try:
            spans = span_containers.spans_of(record) or []
        except BadValueError as unfit:
            return [(line, raw, unfit.args[0])]
        return [row for span in spans for row in self._rows_of_span(place, line, span, mapper)]

    def _rows_of_span(self, place: int, line: Line, span: dict[str, Any], mapper: Mapper) -> list[Row]:
        """Add a span. Return its row if it is a failed call or is refused."""
        if span["name"] in span_calls.MESSAGE_NAMES:
            self._add_message(place, line, span)
            return []
        try:
            kind, converted = span_calls.convert(span)
            self._add_span(place, line, kind, converted, mapper.header(converted), mapper)
        except BadValueError as unfit:
            return [(line, to_json(span), unfit.args[0])]
        failed = [span_calls.failed_call(span)] if kind == span_calls.FAILED else []
        return [(line, to_json(span), to_json(each)) for each in failed]

    def _add_message(self, place: int, line: Line, record: dict[str, Any]) -> None:
        """Add a log record with one message of a call."""
        trace, name = str(record["context"]["trace_id"]), str(record["context"]["span_id"])
        entry = self._written(
            Entry(place, line, 0, 0, record["start_time"], {}, trace=trace, span=name), to_json(record)
        )
        self._messages.setdefault((trace, name), []).append(entry)

    def _written(self, entry: Entry, text: bytes) -> Entry:
        """Write the JSON of a record to the temporary file, and return its index entry."""
        self._file.seek(self._size)
        self._file.write(text)
        self._size += len(text)
        return replace(entry, offset=self._size - len(text), length=len(text))

    def _add_calls_of_messages(self) -> Iterator[Joined]:
        """Add the calls whose messages are log records of their own. Yield the refusals."""
        recorded: dict[tuple[str, str], Entry] = {}
        for entry in (each for spans in self._spans.values() for each in spans if each.length):
            known = recorded.get((entry.trace, entry.span))
            if known is None or known.silent:
                recorded[entry.trace, entry.span] = entry
        for (trace, name), entries in self._messages.items():
            bare = recorded.get((trace, name))
            if bare and not bare.silent:
                continue  # The span has its messages too.
            first = min(entries, key=lambda entry: entry.order)
            context = {"context": {"trace_id": trace, "span_id": name}, "parent_id": None, "start_time": first.order}
            unknown = {"name": "", **context, "attributes": {"gen_ai.operation.name": "chat"}, "status": {}}
            span = json.loads(self._text(bare)) if bare else unknown
            span["events"] = [json.loads(self._text(each)) for each in sorted(entries, key=lambda entry: entry.order)]
            for line, raw, row in self._rows_of_span(first.place, first.line, span, self._mapper):
                yield first.place, (line, raw, row)

    def _add_span(
        self, place: int, line: Line, kind: str, record: dict[str, Any], header: Mapping[str, Any], mapper: Mapper
    ) -> None:
        context, path = record["context"], self.field_map.session
        if context["trace_id"] is None:
            span = str(context["span_id"])
            self.records_without_call += 1
            self._annotations.append(Entry(place, line, 0, 0, record["start_time"], header, silent=True, span=span))
            return
        trace, name = str(context["trace_id"]), str(context["span_id"])
        session = key_of(record, path) if path not in ("", "prefix") else None
        tree = self._trees.setdefault(trace, {})
        known = tree.get(name, _Node(None, span_calls.STEP, None))
        kind_of_node = kind if known.kind in (span_calls.STEP, span_calls.BARE) else known.kind
        tree[name] = _Node(known.parent or record["parent_id"], kind_of_node, known.session or session)
        order = order_of(record, self.field_map.order) if self.field_map.order else record["start_time"]
        entry = Entry(place, line, self._size, 0, order, header, trace=trace, span=name)
        if kind != span_calls.CALL:
            values = {**chat.pick(record, REWARD_FIELDS), **header}
            is_bare = kind == span_calls.BARE
            self.records_without_call += kind not in (span_calls.BARE, span_calls.FAILED)
            if values or is_bare:
                silent = replace(entry, header=values, silent=True, choice=_BARE if is_bare else 0)
                # Its messages may be log records, which are joined with its attributes at the end.
                silent = self._written(silent, to_json(record)) if is_bare else silent
                self._spans.setdefault(trace, []).append(silent)
            return
        self.records += 1
        choices = openai_calls.of_made(record) or [record]
        for choice, each in enumerate(choices):
            text, made = mapper.put_tokens(to_json(each), each, record, choice, len(choices))
            before, end = prefix_hashes(made)
            response = chat.as_mapping(made["response"]).get("id")
            hashes = tuple(before) if path == "prefix" else tuple(before[-1:])
            fields = {"choice": choice, "before": hashes, "end": end, "response": response}
            self._spans.setdefault(trace, []).append(self._written(replace(entry, **fields), text))

    def join(self) -> Iterator[Joined]:
        """Yield every conversation as one record, after the refusals of calls whose messages are not recorded."""
        yield from self._add_calls_of_messages()
        self._add_annotations()
        for trace, entries in sorted(self._spans.items(), key=lambda item: min(entry.order for entry in item[1])):
            calls = self._unique(trace, [entry for entry in entries if not entry.silent])
            named = {entry.span for entry in entries if not entry.silent}
            for entry in entries:
                if entry.choice == _BARE and entry.span not in named:
                    named.add(entry.span)
                    yield entry.place, (entry.line, b"", span_calls.bare_refusal(entry.span).args[0])
            silent = self._by_depth(trace, [replace(entry, choice=0) for entry in entries if entry.silent])
            if self.field_map.session == "prefix":
                self._free += calls
                continue
            for entry in (*calls, *silent):
                self._keyed.setdefault((self._session_of(trace, entry.span), entry.choice), []).append(entry)
        yield from super().join()

    def _add_annotations(self) -> None:
        """Add the annotations to the traces of their spans, if exactly one trace has a span with this id."""
        spans = {entry.span for entry in self._annotations}
        traces: dict[str, set[str]] = {}
        for trace, tree in self._trees.items():
            for name in spans & tree.keys():
                traces.setdefault(name, set()).add(trace)
        for entry in self._annotations:
            if len(owners := traces.get(entry.span, set())) == 1:
                [trace] = owners
                self._spans.setdefault(trace, []).append(replace(entry, trace=trace))
            else:
                self.unmatched += 1

    def _chains(self) -> list[list[Entry]]:
        """Join calls that continue one another. The longest conversation of a trace gets the values of its spans."""
        chains = super()._chains()
        longest: dict[str, list[Entry]] = {}
        for chain in sorted(chains, key=len):
            longest |= dict.fromkeys((entry.trace for entry in chain), chain)
        for trace, entries in self._spans.items():
            if trace in longest:
                longest[trace].extend(self._by_depth(trace, [entry for entry in entries if entry.silent]))
        return chains

    def _by_depth(self, trace: str, entries: list[Entry]) -> list[Entry]:
        """Sort the spans of a trace, the innermost first. Of several rewards the last one counts."""
        return sorted(entries, key=lambda entry: (-len(self._ancestors(trace, entry.span)), entry.order))

    def _session_of(self, trace: str, name: str) -> str:
        """Return the key of a span: its own, its nearest ancestor's, the only one of its trace, or the trace id."""
        if self.by == span_containers.TRACE:
            return trace
        tree = self._trees[trace]
        for each in (name, *self._ancestors(trace, name)):
            if each in tree and tree[each].session is not None:
                return str(tree[each].session)
        if trace not in self._only_sessions:
            keys = {node.session for node in tree.values()} - {None}
            self._only_sessions[trace] = str(keys.pop()) if len(keys) == 1 else trace
        return self._only_sessions[trace]

    def _ancestors(self, trace: str, name: str) -> list[str]:
        tree, names = self._trees[trace], dict[str, None]()
        node = tree.get(name)
        while node is not None and node.parent and node.parent not in names and len(names) < _DEEPEST_TREE:
            names[node.parent] = None
            node = tree.get(node.parent)
        return list(names)

    def owner(self, entry: Entry) -> str | None:
        """Return the span of the tool or of the other agent that a call belongs to, None for the outermost agent."""
        tree = self._trees.get(entry.trace or "", {})
        owners = [
            name
            for name in self._ancestors(entry.trace or "", entry.span or "")
            if name in tree and tree[name].kind in (span_calls.AGENT, span_calls.TOOL)
        ]
        is_own = len(owners) == 1 and tree[owners[0]].kind == span_calls.AGENT
        return None if not owners or is_own else owners[0]

    def _unique(self, trace: str, entries: list[Entry]) -> list[Entry]:
        """Leave out the calls of a trace that another span repeats.

        These are the same span again, and, of calls with equal messages and answers, a span around another one and a
        span with the response id of another one. The inner of two spans counts: it is nearer to the server.
        """
        kept: dict[tuple[str, int], Entry] = {}
        for entry in entries:
            kept.setdefault((entry.span, entry.choice), entry)
        equal: dict[Any, list[Entry]] = {}
        for entry in kept.values():
            if entry.end is not None:
                equal.setdefault((entry.before[-1:], entry.end, entry.choice), []).append(entry)
        for group in equal.values():
            around = (
                {name for entry in group for name in self._ancestors(trace, entry.span)} if len(group) > 1 else set()
            )
            responses: set[str] = set()
            for entry in sorted(group, key=lambda entry: entry.span in around):
                if entry.span in around or entry.response in responses:
                    del kept[entry.span, entry.choice]
                elif entry.response:
                    responses.add(entry.response)
        self.repeated += len(entries) - len(kept)
        return list(kept.values())

    def lines(self) -> list[str]:
        """Return the counts as lines for a terminal."""
        lines = super().lines()
        if self.repeated:
            lines.append(f"         {self.repeated:,} calls are left out, because another span records them too")
        if self.unmatched:
            lines.append(
                f"         {self.unmatched:,} annotations are left out: none or several of the traces have their span"
            )
        return lines
