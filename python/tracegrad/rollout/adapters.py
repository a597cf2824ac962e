"""Contracts for what most people have: one turn, or plain functions as tools.

Each is a few lines over `policy.chat`; whoever needs another writes `async (task, policy)`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.rollout.environment import Score, converse, scored
from tracegrad.rollout.play import Contract
from tracegrad.rollout.policy import Policy, sent
from tracegrad.rollout.session import prompt_of
from tracegrad.rollout.tools import Tools


def one_turn(score: Score | None = None, *, sampling: Mapping[str, Any] | None = None) -> Contract:
    """One question, one answer.

    Args:
        score: `(task, prompt, completion)` to a number, numbers by name or None; plain or asynchronous. Without one the
            reward is None, for whoever scores whole groups.
        sampling: fields of the request.
    """

    async def contract(task: Any, policy: Policy) -> Any:
        prompt = prompt_of(task)
        return await scored(score, task, prompt, [sent(await policy.chat(prompt, **(sampling or {})))])

    return contract


def with_tools(
    tools: Sequence[Callable[..., Any]] | Callable[[Any], Sequence[Callable[..., Any]]],
    score: Score | None = None,
    *,
    turns: int | None = None,
    seconds: float = 30.0,
    run: Any = "thread",
    sampling: Mapping[str, Any] | None = None,
) -> Contract:
    """A question, tool calls and their answers, until a message calls no tool.

    What became of the calls is counted in the record's `metadata` as `tools`.

    Args:
        tools: functions; or a function from the task to functions, for those that need to know it.
        score: as for `one_turn`.
        turns: how often tools are answered; beside the limits of `play`.
        seconds: time limit of one tool call.
        run: where plain functions run; see `Tools`.
        sampling: fields of the requests.
    """
    if isinstance(tools, type) or not (callable(tools) or isinstance(tools, Sequence)):
        raise ArgumentError(f"tools is {tools!r:.100}. Pass functions, or a function from the task to functions.")
    shared = None if callable(tools) else Tools(tools, seconds=seconds, run=run)

    async def contract(task: Any, policy: Policy) -> Any:
        prompt = prompt_of(task)
        opened = shared or Tools(tools(task), seconds=seconds, run=run)  # type: ignore[operator]
        try:
            messages, _ = await converse(policy, prompt, opened, turns, sampling)
        finally:
            if opened is not shared:
                opened.close()
        return await scored(score, task, prompt, messages[len(prompt) :])

    return contract
