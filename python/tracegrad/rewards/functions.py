"""Call reward functions in TRL's convention: `(prompts, completions, **columns) -> list[float | None]`, plain or async.

Plain functions run in processes within a time limit. A function that raises, hangs or returns something else gives NaN,
never 0. Each failure is counted, and the first one is kept with its line. The online loop and `recorded` call this with
the trajectories of a group.
"""

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.data import chat
from tracegrad.data.reward_columns import RESERVED_COLUMNS
from tracegrad.errors import ArgumentError
from tracegrad.user_code import Failure, ProcessPool, UserCodeError, await_within, failure_of

MAX_LOG_ENTRIES = 4096


@dataclass(frozen=True)
class RewardScores:
    """The results of K reward functions for n trajectories.

    Args:
        names: names of the K functions.
        values: [n, K] float64. NaN if a function does not apply or failed.
        failed: [n, K] bool, True where a function failed.
        total: [n] float64, the weighted sum of the functions that apply. NaN if none applies. NaN also if any function
            failed, because the sum of the others would be a different reward.
        metrics: values passed to `log_metric`, by name.
        extra: values passed to `log_extra` by column, one value per trajectory.
        failures: the reason for each function that failed. If it failed for several trajectories, the first reason.

    >>> def correct(completions, answer, **columns):
    ...     return [float(text == right) for text, right in zip(completions, answer)]
    >>> rewards = Rewards([correct])
    >>> scores = asyncio.run(rewards.score(["2+2?"] * 2, ["4", "5"], {"answer": ["4", "4"]}))
    >>> scores.names, scores.total.tolist(), scores.row(0)
    (('correct',), [1.0, 0.0], {'correct': 1.0})
    >>> rewards.close()
    """

    names: tuple[str, ...]
    values: NDArray[np.float64]
    failed: NDArray[np.bool_]
    total: NDArray[np.float64]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)

    def row(self, number: int) -> dict[str, float | None]:
        """Return the rewards of one trajectory by function name, as a record stores them. NaN becomes None."""
        return {
            name: None if math.isnan(value) else value
            for name, value in zip(self.names, self.values[number].tolist(), strict=True)
        }


class Rewards:
    """Reward functions with weights. Call `close` to end their processes.

    `counts` has the number of failures by "name: kind", and `failures` has the first failure of each function.

    Args:
        functions: each maps `(prompts, completions, **columns)` to one number or None per trajectory. Calls use keyword
            arguments: prompts, completions, completion_ids, the columns, trainer_state, log_extra, log_metric. A
            function gets only those that its signature accepts.
        weights: one per function, 1 by default.
        timeout_s: time limit of one call.
        max_processes: maximum number of processes for plain functions.

    >>> def short(completions, **columns):
    ...     return [float(len(text) < 3) for text in completions]
    >>> compute_rewards = Rewards([short], [0.5])
    >>> asyncio.run(compute_rewards.score(["2+2?"] * 2, ["4", "four"])).total
    array([0.5, 0. ])
    >>> compute_rewards.close()
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
        *,
        timeout_s: float = 60.0,
        max_processes: int = 2,
    ) -> None:
        functions = [functions] if callable(functions) else list(functions)
        for function in functions:
            if not callable(function) or hasattr(function, "state_dict"):
                raise ArgumentError(
                    f"TG-REWARD-001: a reward function is a {type(function).__name__}. Models and model "
                    "names are not supported. Pass a function that calls the model."
                )
        self.weights = np.ones(len(functions)) if weights is None else np.asarray(weights, np.float64)
        if self.weights.shape != (len(functions),) or not np.isfinite(self.weights).all():
            raise ArgumentError(
                f"TG-REWARD-002: weights are {weights!r:.100} for {len(functions)} functions. Pass one number per "
                "function."
            )
        self.names = _names(functions)
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, Failure] = {}
        self._functions = dict(zip(self.names, functions, strict=True))
        self._seconds = timeout_s
        self._processes = ProcessPool(
            {name: _PlainFunction(function) for name, function in self._functions.items() if not _is_async(function)},
            count=max_processes,
        )

    async def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        completion_ids: Sequence[Any] | None = None,
        trainer_state: Any = None,
    ) -> RewardScores:
        """Return the results of all functions, which run concurrently.

        Args:
            prompts, completions: n texts, or n lists of messages.
            columns: n values per name, as `columns_of` returns them. Names in `RESERVED_COLUMNS` are dropped.
            completion_ids: n lists of token ids.
            trainer_state: passed to the functions. It must be picklable for plain functions.

        Raises:
            ArgumentError: if completions or a column do not have n values.
        """
        count = len(prompts)
        columns = {
            name: column_values for name, column_values in (columns or {}).items() if name not in RESERVED_COLUMNS
        }
        for name, column_values in {"completions": completions, **columns}.items():
            if len(column_values) != count:
                raise ArgumentError(
                    f"TG-REWARD-003: {name} has {len(column_values)} values for {count} prompts. Pass one value per "
                    "prompt."
                )
        ids = [None] * count if completion_ids is None else list(completion_ids)
        arguments = {"prompts": list(prompts), "completions": list(completions), "completion_ids": ids}
        arguments |= {**columns, "trainer_state": trainer_state}
        values = np.full((count, len(self.names)), np.nan)
        failed = np.zeros(values.shape, bool)
        metrics: dict[str, list[float]] = {}
        extra: dict[str, list[Any]] = {}
        failures: dict[str, Failure] = {}
        answers = await asyncio.gather(*(self._call(name, arguments, count) for name in self.names))
        for column, answer in enumerate(answers):
            name = self.names[column]
            if isinstance(answer, Failure):
                self._count(name, answer)
                failures[name] = answer
                failed[:, column] = True
                continue
            for row, value in enumerate(answer.values):
                if value is not None and math.isinf(value):
                    failed[row, column] = True
                    infinite = Failure("wrong", f"{name} returned {value} for trajectory {row} of {count}, from 0")
                    failures.setdefault(name, infinite)
                    self._count(name, infinite)
                elif value is not None:
                    values[row, column] = value
            for name, value in answer.metrics:
                metrics.setdefault(name, []).append(value)
            extra |= dict(answer.extra)
        total = _total(values, failed, self.weights)
        return RewardScores(self.names, values, failed, total, metrics, extra, failures)

    def close(self) -> None:
        """End the processes."""
        self._processes.close()

    async def _call(self, name: str, arguments: dict[str, Any], count: int) -> "_Answer | Failure":
        function = self._functions[name]
        inputs = _accepted(function, arguments)
        try:
            if _is_async(function):
                log = _Log()
                inputs = _accepted(function, {**arguments, "log_metric": log.metric, "log_extra": log.extra})
                answer = log.answer(await await_within(self._seconds, function(**inputs), name))
            else:
                answer = await self._processes.call(name, (), inputs, seconds=self._seconds)
        except UserCodeError as failed:
            return failed.failure
        except Exception as error:
            return failure_of(error)
        if len(answer.values) != count:
            return Failure("wrong", f"{name} returned {len(answer.values)} rewards for {count} trajectories")
        for column, logged in answer.extra:
            if len(logged) != count:
                words = f"{name} logged {len(logged)} values of {column!r:.100} for {count} trajectories"
                return Failure("wrong", words)
        return answer

    def _count(self, name: str, failure: Failure) -> None:
        self.counts[f"{name}: {failure.kind}"] += 1
        self.failures.setdefault(name, failure)


async def compute_rewards(
    functions: Sequence[Callable[..., Any]],
    weights: Sequence[float] | None,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]] | None = None,
    *,
    timeout_s: float = 60.0,
) -> NDArray[np.float64]:
    """Call reward functions once and return their values.

    The array is [n, K], with NaN if a function does not apply or failed. See `Rewards`.

    >>> def short(completions, **columns):
    ...     return [float(len(text) < 3) for text in completions]
    >>> asyncio.run(compute_rewards([short], None, ["2+2?"] * 2, ["4", "four"]))
    array([[1.],
           [0.]])
    """
    scorer = Rewards(functions, weights, timeout_s=timeout_s)
    try:
        return (await scorer.score(prompts, completions, columns)).values
    finally:
        scorer.close()


def text_of(messages: Sequence[Mapping[str, Any]], role: str) -> str:
    """Return the contents of all messages of a role as one text, with a blank line between two.

    Tool calls, their results and reasoning are not part of it. Of a content in parts it has the texts.

    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "I add."}]
    >>> answer = [{"type": "text", "text": "4"}]
    >>> messages += [{"role": "tool", "content": "4"}, {"role": "assistant", "content": answer}]
    >>> text_of(messages, "user"), text_of(messages, "assistant")
    ('2+2?', 'I add.\\n\\n4')
    """
    texts = [_content_text(message.get("content")) for message in messages if message.get("role") == role]
    return "\n\n".join(filter(None, texts))


def _content_text(content: Any) -> str:
    parts = content if isinstance(content, list) else [content]
    texts = [chat.text_of([part]) for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


@dataclass(frozen=True)
class _Answer:
    """The output of one function: a number or None per trajectory, and the values that it logged."""

    values: list[float | None]
    metrics: list[tuple[str, float]]
    extra: list[tuple[str, list[Any]]]


class _Log:
    """The values that a function logs in addition to its rewards."""

    def __init__(self) -> None:
        self._metrics: list[tuple[str, float]] = []
        self._extra: list[tuple[str, list[Any]]] = []

    def metric(self, name: str, value: float) -> None:
        if len(self._metrics) < MAX_LOG_ENTRIES:
            self._metrics.append((str(name), float(value)))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        if len(self._extra) < MAX_LOG_ENTRIES:
            self._extra.append((str(column), list(values)))

    def answer(self, found: Any) -> _Answer:
        if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__iter__"):
            raise TypeError(f"it returned {found!r:.100}, not one number or None for each trajectory")
        return _Answer([None if reward is None else _number(reward) for reward in found], self._metrics, self._extra)


class _PlainFunction:
    """A plain function as a process runs it. Its return value and logged values become plain numbers there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, **arguments: Any) -> _Answer:
        log = _Log()
        log_functions = _accepted(self._function, {"log_metric": log.metric, "log_extra": log.extra})
        return log.answer(self._function(**arguments, **log_functions))


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r:.100} is not a number")
    return float(value)


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments that a function's signature accepts."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return dict(arguments)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _is_async(function: Callable[..., Any]) -> bool:
    while hasattr(function, "func"):  # functools.partial
        function = function.func  # type: ignore[attr-defined]
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _names(functions: Sequence[Callable[..., Any]]) -> tuple[str, ...]:
    """Return the functions' own names. A repeated name gets a number."""
    seen: Counter[str] = Counter()
    names = []
    for function in functions:
        while hasattr(function, "func"):
            function = function.func  # type: ignore[attr-defined]
        name = getattr(function, "__name__", type(function).__name__)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return tuple(names)


def _total(values: NDArray[Any], failed: NDArray[Any], weights: NDArray[Any]) -> NDArray[np.float64]:
    total = np.nansum(values * weights, axis=1)
    total[np.isnan(values).all(axis=1) | failed.any(axis=1)] = np.nan
    return total
