"""Hold recorded traces in memory: `Trace`, `Traces`, `write`, `strip_logprobs`, and the report of a read.

docs/trace-format.md says which records are accepted. There is no tokenizer here: `align` makes tokens of traces.
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
from tracegrad.images import Pictures

FIRST_ERRORS = 5


@dataclass(frozen=True)
class ReadReport:
    """What was read, and what was wrong with it.

    Args:
        records: good and bad ones.
        traces: good ones.
        formats: good ones by the form they were read in: how many, and the sign by which it was known.
        bad: bad ones, left out or written aside.
        reasons: bad ones by reason, such as `not_json`, `wrong_type`, `stream`.
        errors: the first five errors in full.
        generations: sampling calls in the good ones.
        tokens: sampled tokens that they list.
        missing_logprobs: logprobs that were null, NaN or -inf; they are NaN.
        invalid_logprobs: logprobs that were positive or exactly -9999.0; they are NaN.
        unused_choices: choices of responses that name none, where the first was taken.
        bytes: of records, after decompression.
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


def summed(left: ReadReport, right: ReadReport) -> ReadReport:
    """The counts of two readers together."""

    def add(one: Any, other: Any) -> dict[str, Any]:
        return {key: _plus(one.get(key), other.get(key)) for key in [*one, *(key for key in other if key not in one)]}

    counts = {
        name: getattr(left, name) + getattr(right, name) for name, value in vars(left).items() if isinstance(value, int)
    }
    return replace(
        left,
        **counts,
        formats={name: found for name, found in add(left.formats, right.formats).items() if found[0]},
        reasons=add(left.reasons, right.reasons),
        errors=(*left.errors, *right.errors)[:FIRST_ERRORS],
    )


def _plus(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return (one[0] + other[0], one[1]) if isinstance(one, tuple) else one + other


# Numbers of tokens, whoever wrote them.
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
    ]
)

# Names that may also be those of text: dropped where they hold a list of numbers.
SOMETIMES = frozenset(
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

# Numbers of the tokens in the `generation` of a message.
GENERATION_KEYS = frozenset({"tokens", "bytes"})

# Objects that hold further records, and no text of the user's.
NESTED = frozenset(
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

# Beginnings of the flat names that spans give to the same.
SPAN_PREFIXES = ("logprobs.", "llm.hosted_vllm.", "agentlightning.operation.output.")


def without_numbers(record: Any) -> Any:
    """A record, message or choice without ids, logprobs and masks; what is given is not changed."""
    return _without(record, TOKEN_KEYS)


def _without(value: Any, dropped: frozenset[str]) -> Any:
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, list | tuple):
        return [_without(item, dropped) for item in value]
    if not isinstance(value, Mapping):
        return value
    kept: dict[str, Any] = {}
    for key, item in value.items():
        if key in dropped or (key in SOMETIMES and _is_numbers(item)) or _is_span_of_numbers(key, item):
            continue
        if key == "generation":
            kept[key] = _without(item, TOKEN_KEYS | GENERATION_KEYS)
        elif key in NESTED or hasattr(item, "model_dump"):
            kept[key] = _without(item, TOKEN_KEYS)
        else:
            kept[key] = item
    return kept


def _is_numbers(value: Any) -> bool:
    """Whether a list holds numbers alone, in it or in its lists."""
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
"""A line, or a line with the number of the record where several may stand on it."""


def located(file: str, line: Line) -> str:
    """A file and a line as errors name them.

    >>> located("runs.json", (1, 57))
    'runs.json:1 record 57'
    """
    return f"{file}:{line[0]} record {line[1]}" if isinstance(line, tuple) else f"{file}:{line}"


@dataclass(frozen=True, eq=False)
class Generation:
    """One sampling call of a trace.

    Args:
        message: index into `Trace.pool` of the message it produced.
        context: indices into `Trace.pool` of the messages it was conditioned on.
        tokens: how many tokens the record lists.
        token_ids: [tokens] int32, or None.
        prompt_token_ids: all ids before the first sampled one, int32, or None.
        logprobs: [tokens] float32 in nats, NaN where missing or invalid, or None.
        has_bytes, has_texts: whether the record has the tokens' bytes or texts.
        missing, invalid: how many logprobs were null, NaN or -inf; positive or -9999.0.
        finish_reason, stop_reason: as recorded.
        logprob_kind: "raw", "processed" or "unknown".
        temperature, top_p: as recorded, or None.
        sampling: the other sampling options that the record says (top_k, min_p, repetition_penalty, logit_bias, ...),
            by the names of vLLM and OpenAI, whoever wrote them.
        policy_version: -1 unknown.
        cumulative_logprob: nats, or None.
        text: what the tokens spell, where the record has it apart from the message.
        versions: (first token, one past the last, policy version), where it changed while sampling.
        notes: (reason, tokens concerned, what was found) of the reader.
    """

    message: int
    context: list[int]
    tokens: int
    token_ids: NDArray[np.int32] | None
    prompt_token_ids: NDArray[np.int32] | None
    logprobs: NDArray[np.float32] | None
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


def of_json(raw: bytes) -> Any:
    """Return the value of a JSON text; an integer of more digits than Python reads is a text, as it stands.

    >>> of_json(b'{"a": 1, "b": ' + b"9" * 5000 + b"}")["b"] == "9" * 5000
    True

    Raises:
        ValueError: if it is no JSON.
        RecursionError: if it is nested too deep.
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
    """One recorded trajectory. Made by `Traces[i]`, `Trace.from_dict` or `Trace.from_messages`.

    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> trace = Trace.from_messages(messages, reward=1)
    >>> trace.reward, len(trace.generations), trace.messages[1]["content"]
    (1.0, 1, '4')
    """

    core: _core.Traces
    index: int = 0

    @classmethod
    def from_dict(cls, record: Mapping[str, Any] | Any) -> Trace:
        """Takes a record in any accepted form.

        Raises:
            FormatError: if it is in none.
        """
        return Traces.from_records([record])[0]

    @classmethod
    def from_messages(cls, messages: Sequence[Any], **record: Any) -> Trace:
        """Takes chat messages; `record` is the rest of a native record: `reward=`, `group=`, `tools=`, ..."""
        return cls.from_dict({"format": "tracegrad/1", **record, "messages": list(messages)})

    @property
    def id(self) -> str:
        """The record's own id, or `file:line`."""
        return self.core.id(self.index)

    @property
    def location(self) -> tuple[str | None, int | None]:
        """File and line it was read from."""
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
        """Tool schemas as given to the server."""
        return self.core.tools(self.index)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Extra variables for the chat template."""
        return self.core.template_kwargs(self.index)

    @cached_property
    def pool(self) -> list[dict[str, Any]]:
        """Every distinct message; a rewritten history adds messages instead of replacing them."""
        return self.core.messages(self.index)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as it ended, without token lists."""
        return [self.pool[i] for i in self.core.conversation(self.index)]

    @property
    def message_rewards(self) -> list[float | None]:
        """Reward of each message of the conversation."""
        rewards = self.core.message_rewards(self.index)
        return [rewards[i] for i in self.core.conversation(self.index)]

    @cached_property
    def generations(self) -> list[Generation]:
        """What the policy sampled, in the order of the calls."""
        return [Generation(**generation) for generation in self.core.generations(self.index)]

    @property
    def metadata(self) -> dict[str, Any]:
        """The record's `metadata`."""
        return self.to_dict().get("metadata") or {}

    @property
    def record(self) -> bytes:
        """The record as it was read."""
        return self.core.record(self.index)

    def to_dict(self) -> dict[str, Any]:
        """The record as it was read, unknown keys included; an integer of more digits than Python reads is a text."""
        return of_json(self.record)

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
    """Traces in memory; slices and sums share them.

    >>> traces = Traces.from_records([{"messages": [{"role": "user", "content": "?"}], "reward": r} for r in (0, 1)])
    >>> len(traces), traces[1].reward, len(traces[:1] + traces), traces.reward.tolist()
    (2, 1.0, 3, [0.0, 1.0])
    """

    core: _core.Traces
    read_report: ReadReport | None = None

    @classmethod
    def from_records(cls, records: Iterable[Any], *, format: str = "auto") -> Traces:
        """Takes records in any accepted form: dicts, objects with `model_dump` (also inside dicts), or JSON as bytes.

        Args:
            records: one for each trace.
            format: as for `read`.

        Raises:
            FormatError: if one is in no accepted form; its line is its number, from 1.
        """
        _validation.instance(format, "format", str, "Pass 'auto' or the name of a form.")
        _validation.rows(records, "records", (str, bytes, Mapping))
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
        rows = np.arange(len(self))[index if isinstance(index, slice) else _chosen(index)]
        return Traces(self.core.take(rows.tolist()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Traces) and len(self) == len(other) and all(map(Trace.__eq__, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Traces) -> Traces:
        return Traces.concatenate([self, other])

    @classmethod
    def concatenate(cls, parts: Iterable[Traces]) -> Traces:
        """All parts, one after the other."""
        _validation.rows(parts, "parts", (Traces,))
        cores = [
            _validation.instance(part, "a part", Traces, "Pass Traces[:] of what read() gave.").core for part in parts
        ]
        return cls(_core.Traces.concatenate(cores))

    @property
    def reward(self) -> NDArray[np.float32]:
        """[R] float32, NaN where a trace has none."""
        return self.core.reward_column()

    @property
    def pictures(self) -> Pictures:
        """The distinct pictures that the records hold, in the order in which they appear. Nothing is decoded."""
        return Pictures.of_records(self.core)

    @property
    def groups(self) -> list[str | None]:
        """R group ids."""
        return [self.core.group(i) for i in range(len(self))]

    def to_arrow(self) -> Any:
        """A `pyarrow.Table` with one row a trace: names, rewards, turns, sampled tokens, its `prompt` and `completion`
        as lists of (role, content, more as JSON); raises ArgumentError if pyarrow is not installed."""
        return to_arrow.arrow().table(to_arrow.by_conversation(self))

    def to_pandas(self) -> Any:
        """The table of `to_arrow` as a `pandas.DataFrame`; pandas must be installed."""
        return self.to_arrow().to_pandas()

    def __repr__(self) -> str:
        return f"Traces({len(self)} traces, {len(set(self.groups) - {None})} groups)"

    def _repr_html_(self) -> str:
        rows = [(t.id, t.group, t.reward, len(t.messages), sum(g.tokens for g in t.generations)) for t in self[:10]]
        return _html.table(repr(self), ("id", "group", "reward", "messages", "sampled tokens"), rows)


def _chosen(index: Any) -> NDArray[Any]:
    """Rows by number, or one flag a row."""
    array = _validation.flat(_validation.numbers(index, "the index"), "the index")
    return array if array.dtype.kind == "b" else _validation.whole(array, np.int64, "the index")


def write(traces: Traces | Iterable[Traces | Trace], path: Path) -> None:
    """Writes the records of traces as JSONL, byte for byte as they were read; `.gz` and `.zst` compress.

    The file appears when all is written: after an error there is no half file, and an earlier one is untouched.

    Args:
        traces: `Traces`, or an iterable of `Trace` or of `Traces`, such as `tracegrad.stream` gives.
        path: the file.

    Raises:
        ReadError: if it cannot be written: a missing directory, a full disk.
    """
    writer = _core.TraceWriter(os.fspath(path))
    try:
        for part in [traces] if isinstance(traces, Traces) else traces:
            writer.write(part.core if isinstance(part, Traces) else part.core.take([part.index]))
        writer.finish()
    finally:
        writer.abandon()


def strip_logprobs(trace: Record) -> Record:
    """The trace without logprobs and ids, in every form they are accepted in; for judges and logs.

    Args:
        trace: a `Trace` or `Traces`, or a record, message or choice as a dict or list, which is not changed.

    >>> strip_logprobs({"role": "assistant", "content": "4", "logprobs": {"content": [{"logprob": -0.1}]}})
    {'role': 'assistant', 'content': '4'}
    """
    if isinstance(trace, Traces):
        return Traces.from_records([_stripped_record(one) for one in trace])  # type: ignore[return-value]
    if isinstance(trace, Trace):
        return Trace.from_dict(_stripped_record(trace))  # type: ignore[return-value]
    return without_numbers(trace)


def _stripped_record(trace: Trace) -> dict[str, Any]:
    """What was said, by the trace's own id. A form that cannot be without its numbers becomes a list of messages."""
    record = {**without_numbers(trace.to_dict()), "id": trace.id}
    if _says_the_same(record, trace):
        return record
    head = {"group": trace.group, "reward": trace.reward, "model": trace.model, "tools": trace.tools}
    told = {key: value for key, value in head.items() if value is not None}
    return {"format": "tracegrad/1", "id": trace.id, **told, "rewards": trace.rewards, "messages": trace.messages}


def _says_the_same(record: dict[str, Any], trace: Trace) -> bool:
    """Whether a stripped record is still read, as the same messages, and holds nothing of tokens."""
    try:
        [again] = Traces.from_records([record])
    except FormatError:
        return False
    kept = any(
        generation.token_ids is not None or generation.prompt_token_ids is not None or generation.tokens
        for generation in again.generations
    )
    return not kept and again.messages == trace.messages


def to_json(record: Any, number: int) -> bytes:
    """A record as JSON bytes. ASCII escapes are used only for what UTF-8 cannot say."""
    if isinstance(record, Trace | bytes):
        return record.record if isinstance(record, Trace) else record
    try:
        text = json.dumps(record, ensure_ascii=False, default=_plain)
    except RecursionError:
        raise FormatError(
            f"<records>:{number}: JSON nested deeper than 128 levels. A record so deep is not a trace and would "
            "exhaust the stack. Flatten it, or store the nested part as a string."
        ) from None
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise FormatError(
            f"<records>:{number}: not JSON: {error}. A record is kept as JSON. "
            "Convert it to dicts, lists, strings and numbers."
        ) from None
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(record, default=_plain).encode()


def _plain(value: Any) -> Any:
    """What `json` cannot write: API objects and numpy values."""
    for method in ("model_dump", "tolist"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")
