"""Convert sequences and traces to tables for pyarrow and pandas. pyarrow is imported on use.

Tables of sequences have one row per trace or per token. Codes (source, alignment_level, logprob_kind, ending) become
dictionary columns of their names. Tables of traces have one row per trace, with the conversation in TRL's columns
`prompt` and `completion`. Unknown values are null.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.data.codes import ENDINGS, LEVELS, LOGPROB_KINDS, SOURCES
from tracegrad.errors import ArgumentError

Array = NDArray[Any]


def arrow() -> Any:
    """Import pyarrow.

    Raises:
        ArgumentError: if it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ArgumentError(
            "TG-DATA-040: pyarrow is not installed. Tables require it. Run pip install 'tracegrad[arrow]'"
        ) from error
    return pyarrow


def number_column(values: Array, unknown: Array | None = None) -> Any:
    """Return a column of numbers, null if `unknown` is set; without `unknown`, NaN becomes null."""
    missing = np.isnan(values) if unknown is None and values.dtype.kind == "f" else unknown
    return arrow().array(values, mask=missing)


def dictionary_column(codes: Array, names: Sequence[str]) -> Any:
    """Return a dictionary column of the names of codes, null for a code without a name."""
    pyarrow = arrow()
    has_name = codes < len(names)
    index = pyarrow.array(np.where(has_name, codes, 0).astype(np.int32), mask=~has_name)
    return pyarrow.DictionaryArray.from_arrays(index, pyarrow.array(list(names), pyarrow.string()))


def by_trace(sequences: Any) -> dict[str, Any]:
    """Return columns with one row per trace."""
    data, names = sequences, [sequences.trace_name(trace) for trace in range(sequences.traces)]
    groups = data.group_names or tuple(map(str, range(int(data.group.max(initial=-1)) + 1)))
    lengths, owner = np.diff(data.cu_seqlens), data.trace
    trained = np.add.reduceat(np.append(data.trainable, False), data.cu_seqlens[:-1]) if len(owner) else lengths

    def total(values: Array, of: Array) -> Array:
        return np.bincount(of, values, minlength=data.traces).astype(np.int64)

    findings = data.alignment_report.trace[data.alignment_report.trace >= 0]
    return {
        "trace": names,
        "group": dictionary_column(data.group, groups),
        **{name: number_column(data.rewards[:, column]) for column, name in enumerate(data.reward_names)},
        "branches": total(np.ones_like(owner), owner),
        "tokens": total(lengths, owner),
        "terms": total(trained * (lengths > 0), owner),
        "turns": np.diff(data.cu_turns),
        "logprob_kind": dictionary_column(data.logprob_kind, LOGPROB_KINDS),
        "temperature": number_column(data.temperature),
        "ending": dictionary_column(data.ending, ENDINGS),
        "findings": total(np.ones_like(findings), findings),
    }


def by_token(sequences: Any) -> dict[str, Any]:
    """Return columns with one row per token."""
    data, lengths = sequences, np.diff(sequences.cu_seqlens)
    branch = np.repeat(np.arange(data.branches), lengths)
    ids = data.trace_ids or tuple(map(str, range(data.traces)))
    return {
        "trace": dictionary_column(data.trace[branch], ids),
        "branch": branch,
        "position": np.arange(data.tokens) - np.repeat(data.cu_seqlens[:-1], lengths),
        "id": data.ids,
        "source": dictionary_column(data.source, SOURCES),
        "trainable": data.trainable,
        "rollout_logprob": number_column(data.rollout_logprobs),
        "turn": number_column(data.turn, data.turn < 0),
        "version": number_column(data.version, data.version < 0),
        "alignment_level": dictionary_column(data.alignment_level, LEVELS),
        "inv_temperature": data.inv_temperature,
        **{name: values for name, values in data.extras.items() if isinstance(values, np.ndarray) and values.ndim == 1},
    }


def by_conversation(traces: Any) -> dict[str, Any]:
    """Return columns with one row per trace of `Traces`: name, rewards, and the conversation as prompt and completion.

    The completion starts with the first sampled message. A conversation without one is all prompt.
    """
    pyarrow = arrow()
    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string()), ("more", pyarrow.string())])
    names = list(dict.fromkeys(name for trace in traces for name in trace.rewards))
    parts = [_split(trace) for trace in traces]
    rewards = [trace.rewards for trace in traces]
    return {
        "trace": pyarrow.array([trace.id for trace in traces], pyarrow.string()),
        "group": pyarrow.array(traces.groups, pyarrow.string()),
        "reward": number_column(traces.reward),
        **{f"rewards/{name}": number_column(np.array([row.get(name, np.nan) for row in rewards])) for name in names},
        "turns": np.array([len(trace.generations) for trace in traces], np.int64),
        "sampled": np.array([sum(generation.tokens for generation in trace.generations) for trace in traces], np.int64),
        "prompt": pyarrow.array([prompt for prompt, _ in parts], pyarrow.list_(message)),
        "completion": pyarrow.array([completion for _, completion in parts], pyarrow.list_(message)),
    }


def _split(trace: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split the messages at the first sampled one into prompt and completion."""
    sampled = {id(trace.pool[generation.message]) for generation in trace.generations}
    messages = trace.messages
    first = next((index for index, message in enumerate(messages) if id(message) in sampled), len(messages))
    converted = [_message(message) for message in messages]
    return converted[:first], converted[first:]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return the role and text of a message; non-text content and all other keys become JSON in `more`."""
    other_fields = {
        name: value for name, value in message.items() if name not in ("role", "content") and value is not None
    }
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        other_fields["content"], content = content, None
    more = json.dumps(other_fields, ensure_ascii=False) if other_fields else None
    return {"role": message.get("role"), "content": content, "more": more}
