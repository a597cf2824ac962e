"""Recorded traces in memory: `Trace`, `Traces`, `write`, `strip_logprobs`, and the report of a read.

docs/reference/trace-format.md lists the accepted records. This module uses no tokenizer: `align` turns traces into
tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core, _html, _validation
from tracegrad.data import to_arrow
from tracegrad.errors import FormatError
from tracegrad.images import Images

FIRST_ERRORS = 5


@dataclass(frozen=True)
class ReadReport:
    """Statistics of a read.

    Args:
        records: number of records, good and bad.
        traces: number of good records.
        formats: good records by form: their number, and the sign by which the form was detected.
        bad: number of bad records, left out or quarantined.
        reasons: bad records by reason, such as `not_json`, `wrong_type`, `stream`.
        errors: the first five errors in full.
        generations: number of sampling calls in the good records.
        tokens: number of sampled tokens in these calls.
        missing_logprobs: number of logprobs that were null, NaN or -inf; they are NaN.
        invalid_logprobs: number of logprobs that were positive or exactly -9999.0; they are NaN.
        unused_choices: number of choices left out, as their record selects none and the first was used.
        bytes: bytes of records, after decompression.
    """

    records: int = 0
    traces: int = 0
    formats: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    bad: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    errors: Sequence[str] = ()
    generations: int = 0
    tokens: int = 0
    missing_logprobs: int = 0
    invalid_logprobs: int = 0
    unused_choices: int = 0
    bytes: int = 0


def add_reports(left: ReadReport, right: ReadReport) -> ReadReport:
    """Add the counts of two reports."""

    def add(first: Any, second: Any) -> dict[str, Any]:
        return {
            key: _plus(first.get(key), second.get(key))
            for key in [*first, *(key for key in second if key not in first)]
        }

    counts = {
        name: getattr(left, name) + getattr(right, name) for name, value in vars(left).items() if isinstance(value, int)
    }
    return replace(
        left,
        **counts,
        formats={name: entry for name, entry in add(left.formats, right.formats).items() if entry[0]},
        reasons=add(left.reasons, right.reasons),
        errors=(*left.errors, *right.errors)[:FIRST_ERRORS],
    )


def _plus(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return (first[0] + second[0], first[1]) if isinstance(first, tuple) else first + second


# Fields with token ids, logprobs or masks, in the records of all supported producers.
TOKEN_KEYS = frozenset(
    [
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "token_ids",
        "prompt_token_ids",
        "cumulative_logprob",
        "token_logprobs",
        "output_token_logprobs",
        "input_token_logprobs",
        "output_top_logprobs",
        "input_top_logprobs",
        "output_ids",
        "output_token_ids",
        "completion_probabilities",
        "logprobsResult",
        "raw_output",
        "prefill",
        "top_tokens",
        "best_of_sequences",
        "sampling_logprob",
        "routed_experts",
        "sampling_mask",
        "routing_matrices",
        "weight_versions",
        "text_offset",
        "input_ids",
        "attention_mask",
        "loss_mask",
        "loss_masks",
        "rollout_log_probs",
        "rollout_logprobs",
        "rollout_routed_experts",
        "rollout_expert_indices",
        "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets",
        "teacher_log_probs",
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "completion_logprobs",
        "completion_token_ids",
        "response_ids",
        "response_mask",
        "response_logprobs",
        "response_token_ids",
        "old_log_probs",
        "ref_log_prob",
        "position_ids",
        "old_per_token_logps",
        "ref_per_token_logps",
        "sampling_per_token_logps",
        "tool_mask",
        "env_mask",
        "rm_scores",
        "token_level_scores",
        "token_level_rewards",
        "reference_logprobs",
        "trainer_logprobs",
        "entropies",
        "is_content",
        "tracegrad_filled",
    ]
)

# Names that can also be those of text fields: dropped if the value is a list of numbers.
AMBIGUOUS_KEYS = frozenset(
    [
        "tokens",
        "mask",
        "versions",
        "prompts",
        "responses",
        "advantages",
        "rewards",
        "completion",
        "prompt",
        "bytes",
        "probs",
        "values",
    ]
)

# Fields with token values in the `generation` of a message.
GENERATION_KEYS = frozenset({"tokens", "bytes"})

# Objects that contain further records instead of user text; they are searched recursively.
NESTED_KEYS = frozenset(
    [
        "messages",
        "extra_messages",
        "calls",
        "request",
        "response",
        "choices",
        "message",
        "messages_and_choices",
        "generation",
        "additional_histories",
        "body",
        "result",
        "provider_specific_fields",
        "meta_info",
        "details",
        "output_logprobs",
        "candidates",
        "steps",
        "step",
        "metrics",
        "model_output",
        "trajectory",
        "trajectories",
        "nodes",
        "chat_completions",
        "subagent_trajectories",
        "spans",
        "triplets",
        "trace",
        "attributes",
        "prompt",
        "completion",
        "tokens",
        "history",
        "traj",
        "observations",
        "extra_fields",
        "output",
        "outputs",
    ]
)

# Prefixes of the flat attribute names under which spans store such values.
SPAN_PREFIXES = ("logprobs.", "llm.hosted_vllm.", "agentlightning.operation.output.")


def without_token_data(record: Any) -> Any:
    """Return a copy of a record, message or choice without ids, logprobs and masks."""
    return _without(record, TOKEN_KEYS)


def _without(value: Any, dropped: frozenset[str]) -> Any:
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, list | tuple):
        return [_without(item, dropped) for item in value]
    if not isinstance(value, Mapping):
        return value
    remaining: dict[str, Any] = {}
    for key, item in value.items():
        if key in dropped or (key in AMBIGUOUS_KEYS and _is_numbers(item)) or _is_span_of_numbers(key, item):
            continue
        if key == "generation":
            remaining[key] = _without(item, TOKEN_KEYS | GENERATION_KEYS)
        elif key in NESTED_KEYS or hasattr(item, "model_dump"):
            remaining[key] = _without(item, TOKEN_KEYS)
        else:
            remaining[key] = item
    return remaining


def _is_numbers(value: Any) -> bool:
    """Return whether a value is a non-empty list of numbers, nulls and such lists."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(item, int | float) or item is None or _is_numbers(item) for item in value)


def _is_span_of_numbers(key: str, value: Any) -> bool:
    return key.startswith(SPAN_PREFIXES) and (
        _is_numbers(value) or ("token_ids" in key or "logprobs" in key or "choices" in key)
    )


Record = TypeVar("Record")
Path = str | os.PathLike[str]
Line = int | tuple[int, int]
"""A line number, or (line, number of the record) if a line can contain several records."""


def format_location(file: str, line: Line) -> str:
    """Format a file and line for error messages.

    >>> format_location("runs.json", (1, 57))
    'runs.json:1 record 57'
    """
    return f"{file}:{line[0]} record {line[1]}" if isinstance(line, tuple) else f"{file}:{line}"


@dataclass(frozen=True, eq=False)
class Generation:
    """One sampling call of a trace.

    Args:
        message: index into `Trace.pool` of the message that was sampled.
        context: indices into `Trace.pool` of the messages of its prompt.
        tokens: number of tokens in the record.
        token_ids: [tokens] int32, or None.
        prompt_token_ids: all ids before the first sampled one, int32, or None.
        logprobs: [tokens] float32 in nats, NaN if missing or invalid, or None.
        filled_logprobs: [tokens] float32 in nats that `tracegrad fill` measured for tokens without a recorded one, NaN
            elsewhere; None if it measured none. `align` uses them if they belong to the sampled ids.
        has_bytes, has_texts: whether the record has the tokens' bytes or texts.
        missing: number of logprobs that were null, NaN or -inf.
        invalid: number of logprobs that were positive or -9999.0.
        finish_reason, stop_reason: as recorded.
        logprob_kind: "raw", "processed" or "unknown".
        temperature, top_p: as recorded, or None.
        sampling: the other recorded sampling options (top_k, min_p, repetition_penalty, logit_bias, ...), under the
            names of vLLM and OpenAI.
        policy_version: recorded version of the weights, -1 if unknown.
        cumulative_logprob: nats, or None.
        text: text of the tokens, if it is recorded separately from the message.
        versions: (first token, one past the last, policy version), if the weights changed during the generation.
        notes: (reason, number of tokens, details) of the reader.
    """

    message: int
    context: list[int]
    tokens: int
    token_ids: NDArray[np.int32] | None
    prompt_token_ids: NDArray[np.int32] | None
    logprobs: NDArray[np.float32] | None
    filled_logprobs: NDArray[np.float32] | None
    has_bytes: bool
    has_texts: bool
    missing: int
    invalid: int
    finish_reason: str | None
    stop_reason: str | int | None
    logprob_kind: str
    temperature: float | None
    top_p: float | None
    sampling: dict[str, Any]
    policy_version: int
    cumulative_logprob: float | None
    text: str | None
    versions: list[tuple[int, int, int]]
    notes: list[tuple[str, int, str]]


def parse_json(raw: bytes) -> Any:
    """Parse JSON. An integer with more digits than Python converts becomes a string of these digits.

    >>> parse_json(b'{"a": 1, "b": ' + b"9" * 5000 + b"}")["b"] == "9" * 5000
    True

    Raises:
        ValueError: if the text is not JSON.
        RecursionError: if it is nested too deeply.
    """
    try:
        return json.loads(raw)
    except ValueError:
        return json.loads(raw, parse_int=_integer)


def _integer(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:
        return digits


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """One recorded trajectory. Create it with `Traces[i]`, `Trace.from_dict` or `Trace.from_messages`.

    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> trace = Trace.from_messages(messages, reward=1)
    >>> trace.reward, len(trace.generations), trace.messages[1]["content"]
    (1.0, 1, '4')
    """

    core: _core.Traces
    index: int = 0

    @classmethod
    def from_dict(cls, record: Mapping[str, Any] | Any) -> Trace:
        """Create a trace from a record in any accepted form.

        Raises:
            FormatError: if the record has no accepted form.
        """
        return Traces.from_records([record])[0]

    @classmethod
    def from_messages(cls, messages: Sequence[Any], **record: Any) -> Trace:
        """Create a trace from chat messages.

        Args:
            messages: the chat messages.
            record: other fields of a native record: `reward=`, `group=`, `tools=`, ...

        Raises:
            FormatError: if the result is not a valid native record.
        """
        return cls.from_dict({"format": "tracegrad/1", **record, "messages": list(messages)})

    @property
    def id(self) -> str:
        """The record's own id, or `file:line`."""
        return self.core.id(self.index)

    @property
    def location(self) -> tuple[str | None, int | None]:
        """File and line of the record, None if unknown."""
        file, line = self.core.location(self.index)
        return file, line[0] if isinstance(line, tuple) else line

    @property
    def group(self) -> str | None:
        """Group (prompt) id."""
        return self.core.group(self.index)

    @property
    def reward(self) -> float | None:
        """The scalar reward."""
        return self.core.reward(self.index)

    @property
    def rewards(self) -> dict[str, float]:
        """Named rewards, NaN where null."""
        return self.core.rewards(self.index)

    @property
    def model(self) -> str | None:
        """Model name as recorded."""
        return self.core.model(self.index)

    @property
    def tools(self) -> list[Any] | None:
        """Tool schemas as sent to the server."""
        return self.core.tools(self.index)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Extra variables for the chat template."""
        return self.core.template_kwargs(self.index)

    @cached_property
    def pool(self) -> list[dict[str, Any]]:
        """All distinct messages. A rewritten history adds messages and does not replace earlier ones."""
        return self.core.messages(self.index)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The final conversation, without token lists."""
        return [self.pool[i] for i in self.core.conversation(self.index)]

    @property
    def message_rewards(self) -> list[float | None]:
        """Reward of each message of the conversation."""
        rewards = self.core.message_rewards(self.index)
        return [rewards[i] for i in self.core.conversation(self.index)]

    @cached_property
    def generations(self) -> list[Generation]:
        """The generations of the policy, in the order of the calls."""
        return [Generation(**generation) for generation in self.core.generations(self.index)]

    @property
    def metadata(self) -> dict[str, Any]:
        """The record's `metadata`."""
        return self.to_dict().get("metadata") or {}

    @property
    def record(self) -> bytes:
        """The original bytes of the record."""
        return self.core.record(self.index)

    def to_dict(self) -> dict[str, Any]:
        """Return the original record, with unknown keys. Integers too long for Python become strings."""
        return parse_json(self.record)

    def __reduce__(self) -> tuple[Any, ...]:
        return Trace, (self.core.take([self.index]),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self.record == other.record

    def __hash__(self) -> int:
        return hash(self.record)

    def __repr__(self) -> str:
        return (
            f"Trace(id={self.id!r}, group={self.group!r}, reward={self.reward}, "
            f"messages={len(self.messages)}, generations={len(self.generations)})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Traces(Sequence[Trace]):
    """Traces in memory. Slices and sums share the data.

    >>> traces = Traces.from_records([{"messages": [{"role": "user", "content": "?"}], "reward": r} for r in (0, 1)])
    >>> len(traces), traces[1].reward, len(traces[:1] + traces), traces.reward.tolist()
    (2, 1.0, 3, [0.0, 1.0])
    """

    core: _core.Traces
    read_report: ReadReport | None = None

    @classmethod
    def from_records(cls, records: Iterable[Any], *, format: str = "auto") -> Traces:
        """Create traces from records in any accepted form.

        Args:
            records: one record per trace: a dict, an object with `model_dump` (also inside dicts), or JSON as bytes.
            format: as for `read`.

        Raises:
            FormatError: if a record has no accepted form. Its line is its number, from 1.
        """
        _validation.instance(format, "format", str, "Pass 'auto' or the name of a form.")
        _validation.check_rows(records, "records", (str, bytes, Mapping))
        texts = [to_json(record, i) for i, record in enumerate(records, 1)]
        core, report = _core.Traces.decode(texts, "<records>", 1, format)
        return cls(core, ReadReport(**report))

    def __len__(self) -> int:
        return len(self.core)

    @overload
    def __getitem__(self, index: int) -> Trace: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | NDArray[Any]) -> Traces: ...
    def __getitem__(self, index: int | slice | Sequence[int] | NDArray[Any]) -> Trace | Traces:
        if isinstance(index, int | np.integer):
            return Trace(self.core, range(len(self))[index])
        rows = np.arange(len(self))[index if isinstance(index, slice) else _index_array(index)]
        return Traces(self.core.take(rows.tolist()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Traces) and len(self) == len(other) and all(map(Trace.__eq__, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Traces) -> Traces:
        return Traces.concatenate([self, other])

    @classmethod
    def concatenate(cls, parts: Iterable[Traces]) -> Traces:
        """Concatenate several `Traces`."""
        _validation.check_rows(parts, "parts", (Traces,))
        cores = [
            _validation.instance(part, "a part", Traces, "Pass Traces[:] of the result of read().").core
            for part in parts
        ]
        return cls(_core.Traces.concatenate(cores))

    @property
    def reward(self) -> NDArray[np.float32]:
        """[R] float32 rewards, NaN for a trace without one."""
        return self.core.reward_column()

    @property
    def images(self) -> Images:
        """The distinct images of the records, in order of appearance, not decoded."""
        return Images.of_records(self.core)

    @property
    def groups(self) -> list[str | None]:
        """[R] group ids."""
        return [self.core.group(i) for i in range(len(self))]

    def to_arrow(self) -> Any:
        """Return a `pyarrow.Table` with one row per trace: names, rewards, turns, sampled tokens, prompt, completion.

        `prompt` and `completion` are lists of (role, content, other fields as JSON).

        Raises:
            ArgumentError: if pyarrow is not installed.
        """
        return to_arrow.arrow().table(to_arrow.by_conversation(self))

    def to_pandas(self) -> Any:
        """Return the table of `to_arrow` as a `pandas.DataFrame`. Requires pandas."""
        return self.to_arrow().to_pandas()

    def __repr__(self) -> str:
        return f"Traces({len(self)} traces, {len(set(self.groups) - {None})} groups)"

    def _repr_html_(self) -> str:
        rows = [(t.id, t.group, t.reward, len(t.messages), sum(g.tokens for g in t.generations)) for t in self[:10]]
        return _html.table(repr(self), ("id", "group", "reward", "messages", "sampled tokens"), rows)


def _index_array(index: Any) -> NDArray[Any]:
    """Return an index array of integers, or of one boolean per row."""
    array = _validation.check_flat(_validation.numbers(index, "the index"), "the index")
    return array if array.dtype.kind == "b" else _validation.as_integers(array, np.int64, "the index")


def write(traces: Traces | Iterable[Traces | Trace], path: Path) -> None:
    """Write the original bytes of the records as JSONL; the suffixes `.gz` and `.zst` compress.

    The write is atomic: an error leaves no partial file, and an existing file stays unchanged.

    Args:
        traces: `Traces`, or an iterable of `Trace` or of `Traces`, such as `tracegrad.stream`.
        path: the file.

    Raises:
        ReadError: if the file cannot be written, such as for a missing directory or a full disk.

    >>> from tempfile import TemporaryDirectory
    >>> import tracegrad as tg
    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> traces = [Trace.from_messages(messages, reward=reward) for reward in (1, 0)]
    >>> with TemporaryDirectory() as folder:
    ...     write(traces, f"{folder}/traces.jsonl.gz")
    ...     tg.read(f"{folder}/traces.jsonl.gz").reward.tolist()
    [1.0, 0.0]
    """
    writer = _core.TraceWriter(os.fspath(path))
    try:
        for part in [traces] if isinstance(traces, Traces) else traces:
            writer.write(part.core if isinstance(part, Traces) else part.core.take([part.index]))
        writer.finish()
    finally:
        writer.abandon()


def strip_logprobs(trace: Record) -> Record:
    """Return a copy of a trace without logprobs and ids, for judges and logs. All accepted forms are supported.

    Args:
        trace: a `Trace` or `Traces`, or a record, message or choice as a dict or list, which is not changed.

    >>> strip_logprobs({"role": "assistant", "content": "4", "logprobs": {"content": [{"logprob": -0.1}]}})
    {'role': 'assistant', 'content': '4'}
    """
    if isinstance(trace, Traces):
        return Traces.from_records([_stripped_record(item) for item in trace])  # type: ignore[return-value]
    if isinstance(trace, Trace):
        return Trace.from_dict(_stripped_record(trace))  # type: ignore[return-value]
    return without_token_data(trace)


def _stripped_record(trace: Trace) -> dict[str, Any]:
    """Return a record without token values, with the trace's id.

    A form that is not valid without them becomes a native record of the messages.
    """
    record = {**without_token_data(trace.to_dict()), "id": trace.id}
    if _is_equivalent(record, trace):
        return record
    header = {"group": trace.group, "reward": trace.reward, "model": trace.model, "tools": trace.tools}
    fields = {key: value for key, value in header.items() if value is not None}
    return {"format": "tracegrad/1", "id": trace.id, **fields, "rewards": trace.rewards, "messages": trace.messages}


def _is_equivalent(record: dict[str, Any], trace: Trace) -> bool:
    """Return whether a stripped record can be read, has the same messages, and contains no token values."""
    try:
        [reread] = Traces.from_records([record])
    except FormatError:
        return False
    has_tokens = any(
        generation.token_ids is not None or generation.prompt_token_ids is not None or generation.tokens
        for generation in reread.generations
    )
    return not has_tokens and reread.messages == trace.messages


def to_json(record: Any, number: int) -> bytes:
    """Return a record as JSON bytes. ASCII escapes are used only if a string is not valid UTF-8.

    Args:
        record: a `Trace`, JSON bytes, or an object of dicts, lists, strings and numbers.
        number: number of the record, for the error.

    Raises:
        FormatError: if the record is not JSON-serializable, or nested too deeply.
    """
    if isinstance(record, Trace | bytes):
        return record.record if isinstance(record, Trace) else record
    try:
        text = json.dumps(record, ensure_ascii=False, default=_plain)
    except RecursionError:
        raise FormatError(
            f"TG-DATA-041: <records>:{number}: JSON nested deeper than 128 levels. It would exhaust "
            "the stack. Flatten it, or store the nested part as a string."
        ) from None
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise FormatError(
            f"TG-DATA-042: <records>:{number}: not JSON: {error}. Records are stored as JSON. "
            "Convert it to dicts, lists, strings and numbers."
        ) from None
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(record, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Convert a value that `json` cannot serialize: an API object or a numpy value."""
    for method in ("model_dump", "tolist"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")
