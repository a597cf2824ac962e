"""Reward functions in TRL's convention: `(prompts, completions, **columns) -> list[float | None]`, plain or async.

Plain ones run in processes within a time limit. One that raises, hangs or answers with something else gives NaN, never
0; it is counted, and its line is told. The online loop and `recorded` call this with the trajectories of a group.
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

from tracegrad.errors import ArgumentError
from tracegrad.user_code import Failed, Failure, Processes, located, within

LOGGED = 4096


@dataclass(frozen=True)
class Scored:
    """What reward functions say of n trajectories.

    Args:
        names: of the K functions.
        values: [n, K] float64; NaN where a function does not apply, or failed.
        failed: [n, K] bool, where one failed.
        total: [n] float64: the weighted sum of what applies; NaN where nothing does, and where a function failed, as
            the sum of the others would be another reward.
        metrics: what functions said by `log_metric`, by name.
        extra: what they said by `log_extra`, one value for each trajectory, by name.
        failures: of each function that failed, why; of several trajectories the first.
    """

    names: tuple[str, ...]
    values: NDArray[np.float64]
    failed: NDArray[np.bool_]
    total: NDArray[np.float64]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)

    def row(self, number: int) -> dict[str, float | None]:
        """The named rewards of one trajectory as a record has them; None where there is none."""
        return {
            name: None if math.isnan(value) else value
            for name, value in zip(self.names, self.values[number].tolist(), strict=True)
        }


class Rewards:
    """Several reward functions with weights; `close` ends their processes.

    Args:
        functions: each `(prompts, completions, **columns)` to one number or None a trajectory. They are called by
            keywords: prompts, completions, completion_ids, the columns, trainer_state, log_extra, log_metric; what a
            function does not take is left out.
        weights: of the functions, 1 by default.
        seconds: time limit of one call.
        processes: at most so many at once, for plain functions.

    `counts` holds the failures by "name: kind", `failures` the first of each function.

    >>> def short(completions, **columns):
    ...     return [float(len(text) < 3) for text in completions]
    >>> rewards = Rewards([short], [0.5])
    >>> asyncio.run(rewards.score(["2+2?"] * 2, ["4", "four"])).total
    array([0.5, 0. ])
    >>> rewards.close()
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
        *,
        seconds: float = 60.0,
        processes: int = 2,
    ) -> None:
        functions = [functions] if callable(functions) else list(functions)
        for function in functions:
            if not callable(function) or hasattr(function, "state_dict"):
                raise ArgumentError(
                    f"a reward function is a {type(function).__name__}. Models and names of models are not run here. "
                    "Pass a function that asks them."
                )
        self.weights = np.ones(len(functions)) if weights is None else np.asarray(weights, np.float64)
        if self.weights.shape != (len(functions),) or not np.isfinite(self.weights).all():
            raise ArgumentError(f"weights are {weights!r:.100} for {len(functions)} functions. Pass a number for each.")
        self.names = _names(functions)
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, Failure] = {}
        self._functions = dict(zip(self.names, functions, strict=True))
        self._seconds = seconds
        self._processes = Processes(
            {name: _Plain(one) for name, one in self._functions.items() if not _is_async(one)}, count=processes
        )

    async def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        completion_ids: Sequence[Any] | None = None,
        trainer_state: Any = None,
    ) -> Scored:
        """What all functions say, asked together.

        Args:
            prompts, completions: n texts, or n lists of messages.
            columns: n values for each name, as of `columns_of`; those of `RESERVED` names are not given on.
            completion_ids: n lists of ids.
            trainer_state: given on; picklable, for plain functions.
        """
        count = len(prompts)
        columns = {name: each for name, each in (columns or {}).items() if name not in RESERVED}
        for name, each in {"completions": completions, **columns}.items():
            if len(each) != count:
                raise ArgumentError(f"{name} has {len(each)} values for {count} prompts. Pass one for each.")
        ids = [None] * count if completion_ids is None else list(completion_ids)
        told = {"prompts": list(prompts), "completions": list(completions), "completion_ids": ids}
        told |= {**columns, "trainer_state": trainer_state}
        values = np.full((count, len(self.names)), np.nan)
        failed = np.zeros(values.shape, bool)
        metrics: dict[str, list[float]] = {}
        extra: dict[str, list[Any]] = {}
        failures: dict[str, Failure] = {}
        answers = await asyncio.gather(*(self._ask(name, told, count) for name in self.names))
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
        return Scored(self.names, values, failed, total, metrics, extra, failures)

    def close(self) -> None:
        """Ends the processes."""
        self._processes.close()

    async def _ask(self, name: str, told: dict[str, Any], count: int) -> "_Answer | Failure":
        function = self._functions[name]
        given = _taken(function, told)
        try:
            if _is_async(function):
                log = _Log()
                given = _taken(function, {**told, "log_metric": log.metric, "log_extra": log.extra})
                answer = log.answer(await within(self._seconds, function(**given), name))
            else:
                answer = await self._processes.call(name, (), given, seconds=self._seconds)
        except Failed as failed:
            return failed.failure
        except Exception as error:
            return located(error)
        if len(answer.values) != count:
            return Failure("wrong", f"{name} returned {len(answer.values)} rewards for {count} trajectories")
        for column, said in answer.extra:
            if len(said) != count:
                words = f"{name} logged {len(said)} values of {column!r:.100} for {count} trajectories"
                return Failure("wrong", words)
        return answer

    def _count(self, name: str, failure: Failure) -> None:
        self.counts[f"{name}: {failure.kind}"] += 1
        self.failures.setdefault(name, failure)


async def rewards(
    functions: Sequence[Callable[..., Any]],
    weights: Sequence[float] | None,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]] | None = None,
    *,
    seconds: float = 60.0,
) -> NDArray[np.float64]:
    """The values of reward functions, asked once: [n, K], NaN where one does not apply or failed; see `Rewards`."""
    asked = Rewards(functions, weights, seconds=seconds)
    try:
        return (await asked.score(prompts, completions, columns)).values
    finally:
        asked.close()


def columns_of(tasks: Sequence[Mapping[Any, Any]], without: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return the columns that reward functions are given of n tasks: for each key that any has, n values.

    A value is None for a task that has it as null or not at all, as in TRL, where a function of several kinds of tasks
    returns None for those of another kind.

    Args:
        tasks: n dicts, by whose keys columns are named.
        without: keys that are no columns, besides those that functions are given otherwise (`RESERVED`).

    >>> columns_of([{"prompt": "2+2?", "answer": "4"}, {"prompt": "f?", "answer": None, "tests": "f()"}])
    {'answer': ['4', None], 'tests': [None, 'f()']}
    """
    names = dict.fromkeys(name for task in tasks for name in task if isinstance(name, str))
    return {name: [task.get(name) for task in tasks] for name in names if name not in (*RESERVED, *without)}


def text_of(messages: Sequence[Mapping[str, Any]], role: str) -> str:
    """Return what the messages of a role say, as one text: the string form of a prompt or a completion, as in TRL."""
    said = [each.get("content") for each in messages if each.get("role") == role]
    return "".join(text for text in said if isinstance(text, str))


RESERVED = ("prompts", "completions", "prompt", "completion", "completion_ids")
RESERVED += ("trainer_state", "log_metric", "log_extra")
"""Arguments that functions are given otherwise than as columns."""


@dataclass(frozen=True)
class _Answer:
    """What one function said: a number or None a trajectory, and what it logged."""

    values: list[float | None]
    metrics: list[tuple[str, float]]
    extra: list[tuple[str, list[Any]]]


class _Log:
    """What a function says beside its rewards."""

    def __init__(self) -> None:
        self._metrics: list[tuple[str, float]] = []
        self._extra: list[tuple[str, list[Any]]] = []

    def metric(self, name: str, value: float) -> None:
        if len(self._metrics) < LOGGED:
            self._metrics.append((str(name), float(value)))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        if len(self._extra) < LOGGED:
            self._extra.append((str(column), list(values)))

    def answer(self, found: Any) -> _Answer:
        if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__iter__"):
            raise TypeError(f"it returned {found!r:.100}, not one number or None for each trajectory")
        return _Answer([None if one is None else _number(one) for one in found], self._metrics, self._extra)


class _Plain:
    """A plain function, as a process runs it: what it returns and logs becomes plain numbers there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, **given: Any) -> _Answer:
        log = _Log()
        logs = _taken(self._function, {"log_metric": log.metric, "log_extra": log.extra})
        return log.answer(self._function(**given, **logs))


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r:.100} is no number")
    return float(value)


def _taken(function: Callable[..., Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """What a function takes of what there is."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return dict(told)
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(told)
    names = {one.name for one in parameters}
    return {name: value for name, value in told.items() if name in names}


def _is_async(function: Callable[..., Any]) -> bool:
    while hasattr(function, "func"):  # functools.partial
        function = function.func  # type: ignore[attr-defined]
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _names(functions: Sequence[Callable[..., Any]]) -> tuple[str, ...]:
    """Their own names; a second of one name gets a number."""
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
