"""Sequences and traces as tables for pyarrow and pandas. pyarrow is imported on use.

Of sequences one row a trace, or one row a token: the arrays themselves; codes (source, tier, logprob_kind, ending)
become dictionary columns of their names. Of traces one row each, with the conversation in TRL's two columns. What is
not known is null.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.data.codes import ENDINGS, LOGPROB_KINDS, SOURCES, TIERS
from tracegrad.errors import ArgumentError

Array = NDArray[Any]


def arrow() -> Any:
    """pyarrow, or an error that says how it is installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise ArgumentError(
            "pyarrow is not installed. Without it there are no tables. pip install 'tracegrad[arrow]'"
        ) from error
    return pyarrow


def numbers(values: Array, unknown: Array | None = None) -> Any:
    """A column of numbers, null where not known, which for floats is where they are NaN."""
    missing = np.isnan(values) if unknown is None and values.dtype.kind == "f" else unknown
    return arrow().array(values, mask=missing)


def named(codes: Array, names: Sequence[str]) -> Any:
    """A dictionary column: the names that codes stand for, null for a code that has none."""
    pyarrow = arrow()
    known = codes < len(names)
    index = pyarrow.array(np.where(known, codes, 0).astype(np.int32), mask=~known)
    return pyarrow.DictionaryArray.from_arrays(index, pyarrow.array(list(names), pyarrow.string()))


def by_trace(sequences: Any) -> dict[str, Any]:
    """Columns with one row a trace."""
    here, names = sequences, [sequences.trace_name(trace) for trace in range(sequences.traces)]
    groups = here.group_names or tuple(map(str, range(int(here.group.max(initial=-1)) + 1)))
    lengths, owner = np.diff(here.cu_seqlens), here.trace
    trained = np.add.reduceat(np.append(here.trainable, False), here.cu_seqlens[:-1]) if len(owner) else lengths

    def total(values: Array, of: Array) -> Array:
        return np.bincount(of, values, minlength=here.traces).astype(np.int64)

    findings = here.drift.trace[here.drift.trace >= 0]
    return {
        "trace": names,
        "group": named(here.group, groups),
        **{name: numbers(here.rewards[:, column]) for column, name in enumerate(here.reward_names)},
        "branches": total(np.ones_like(owner), owner),
        "tokens": total(lengths, owner),
        "terms": total(trained * (lengths > 0), owner),
        "turns": np.diff(here.cu_turns),
        "logprob_kind": named(here.logprob_kind, LOGPROB_KINDS),
        "temperature": numbers(here.temperature),
        "ending": named(here.ending, ENDINGS),
        "findings": total(np.ones_like(findings), findings),
    }


def by_token(sequences: Any) -> dict[str, Any]:
    """Columns with one row a token."""
    here, lengths = sequences, np.diff(sequences.cu_seqlens)
    branch = np.repeat(np.arange(here.branches), lengths)
    ids = here.trace_ids or tuple(map(str, range(here.traces)))
    return {
        "trace": named(here.trace[branch], ids),
        "branch": branch,
        "position": np.arange(here.tokens) - np.repeat(here.cu_seqlens[:-1], lengths),
        "id": here.ids,
        "source": named(here.source, SOURCES),
        "trainable": here.trainable,
        "rollout_logprob": numbers(here.rollout_logprobs),
        "turn": numbers(here.turn, here.turn < 0),
        "version": numbers(here.version, here.version < 0),
        "tier": named(here.tier, TIERS),
        "inv_temperature": here.inv_temperature,
        **{name: values for name, values in here.extras.items() if isinstance(values, np.ndarray) and values.ndim == 1},
    }


def by_conversation(traces: Any) -> dict[str, Any]:
    """Columns with one row a trace, of `Traces`: who it is, its rewards, and the conversation as prompt and completion.

    The completion begins with the first message that was sampled; a conversation without one is all prompt.
    """
    pyarrow = arrow()
    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string()), ("more", pyarrow.string())])
    names = list(dict.fromkeys(name for trace in traces for name in trace.rewards))
    parts = [_cut(trace) for trace in traces]
    known = [trace.rewards for trace in traces]
    return {
        "trace": pyarrow.array([trace.id for trace in traces], pyarrow.string()),
        "group": pyarrow.array(traces.groups, pyarrow.string()),
        "reward": numbers(traces.reward),
        **{f"rewards/{name}": numbers(np.array([row.get(name, np.nan) for row in known])) for name in names},
        "turns": np.array([len(trace.generations) for trace in traces], np.int64),
        "sampled": np.array([sum(one.tokens for one in trace.generations) for trace in traces], np.int64),
        "prompt": pyarrow.array([prompt for prompt, _ in parts], pyarrow.list_(message)),
        "completion": pyarrow.array([completion for _, completion in parts], pyarrow.list_(message)),
    }


def _cut(trace: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages before the first sampled one, and those from there on."""
    sampled = {id(trace.pool[one.message]) for one in trace.generations}
    messages = trace.messages
    first = next((at for at, message in enumerate(messages) if id(message) in sampled), len(messages))
    told = [_message(message) for message in messages]
    return told[:first], told[first:]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Role and text as they are; content of another kind, and all other keys, as JSON in `more`."""
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        rest["content"], content = content, None
    told = json.dumps(rest, ensure_ascii=False) if rest else None
    return {"role": message.get("role"), "content": content, "more": told}
