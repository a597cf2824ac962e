"""Name the columns of a record that reward functions receive, in addition to prompts and completions.

`rewards` passes them, and `doctor` lists them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tracegrad.data.field_map import parse_record
from tracegrad.data.trace import Trace

RESERVED_COLUMNS = ("prompts", "completions", "prompt", "completion", "completion_ids")
RESERVED_COLUMNS += ("trainer_state", "log_metric", "log_extra")
"""Names of arguments that functions do not receive as columns."""
_SAMPLED = ("token_ids", "prompt_token_ids", "logprobs", "tokens", "generation", "reward", "rewards")
_NO_COLUMNS = ("messages", "calls", "request", "response", "choices", "tools", "metadata", "text", *_SAMPLED)
"""Keys of a record that are not columns: messages, sampled data, and the rewards that scoring writes itself."""


def columns_of(tasks: Sequence[Mapping[Any, Any]], without: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return the columns of n tasks that reward functions receive: n values for each key that any task has.

    A value is None if the task has it as null or does not have it. As in TRL, a function for several kinds of tasks
    returns None for those of another kind.

    Args:
        tasks: n dicts. Their string keys name the columns.
        without: keys that are not columns, in addition to `RESERVED_COLUMNS`.

    >>> columns_of([{"prompt": "2+2?", "answer": "4"}, {"prompt": "f?", "answer": None, "tests": "f()"}])
    {'answer': ['4', None], 'tests': [None, 'f()']}
    """
    names = dict.fromkeys(name for task in tasks for name in task if isinstance(name, str))
    return {name: [task.get(name) for task in tasks] for name in names if name not in (*RESERVED_COLUMNS, *without)}


def columns_of_trace(trace: Trace) -> dict[str, Any]:
    """Return the columns of a record: its keys other than messages, and those of its `metadata`, which take precedence.

    If the record has a task from a rollout, the keys of the task are columns too, with the lowest precedence.
    """
    record, metadata = parse_record(trace.record), trace.metadata
    fields = record if isinstance(record, dict) else {}
    columns = {name: value for name, value in fields.items() if name not in _NO_COLUMNS}
    metadata = metadata if isinstance(metadata, dict) else {}
    task = metadata.get("task")
    task_columns = {name: value for name, value in task.items() if name != "messages"} if isinstance(task, dict) else {}
    return {**task_columns, **columns, **metadata}
