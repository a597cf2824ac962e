"""Environments as contracts: ours, with `reset`, `step` and `reward`; and the classes of TRL's `environment_factory`.

An environment lives for one trajectory, and its plain methods run in one thread of its own. Made into contracts here,
played by `play`.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.rollout.policy import LimitReached, Policy
from tracegrad.rollout.session import Message, prompt_of
from tracegrad.rollout.tool_schema import schema
from tracegrad.rollout.tools import Tools
from tracegrad.user_code import Thread

Score = Callable[[Any, list[Message], list[Message]], Any]


class Environment:
    """A world of many turns; methods may be asynchronous or plain.

    `tools` are functions or schemas that the model is told of; `step` answers its calls. Where a limit of turns or
    tokens is met, `step` is called no more and `reward` is asked. `finish` is called at the end, whatever happened.

    >>> class Guess(Environment):
    ...     def reset(self, task):
    ...         self.right = False
    ...         return [{"role": "user", "content": f"A number below {task['below']}?"}]
    ...     def step(self, message):
    ...         self.right = message["content"] == "7"
    ...         return None if self.right else [{"role": "user", "content": "Another one."}]
    ...     def reward(self):
    ...         return float(self.right)
    """

    tools: Any = ()

    def reset(self, task: Any) -> list[Message] | Awaitable[list[Message]]:
        """The messages that the trajectory begins with."""
        raise NotImplementedError

    def step(self, message: Message) -> list[Message] | Awaitable[list[Message] | None] | None:
        """What the world answers to a message of the policy; None where the trajectory ends.

        Args:
            message: role, content, `finish_reason`, and where there are any tool_calls and reasoning.
        """
        raise NotImplementedError

    def reward(self) -> Any:
        """One number, or some by name, once the trajectory has ended."""
        return None

    def finish(self) -> Any:
        """Gives back what the environment holds."""


def environment(make: Callable[[], Any], *, sampling: Mapping[str, Any] | None = None) -> Any:
    """The contract of an environment class, or of whatever makes one.

    Args:
        make: makes an environment for each trajectory.
        sampling: fields of its requests.
    """

    async def contract(task: Any, policy: Policy) -> Any:
        thread = Thread()

        async def ask(function: Callable[..., Any], *args: Any) -> Any:
            return await _either(thread, function, *args)

        world: Any = None
        try:
            world = await ask(make)
            messages = [dict(message) for message in _messages(await ask(world.reset, task), "reset")]
            while True:
                told = getattr(world, "tools", ())
                tools = [one if isinstance(one, Mapping) else schema(one) for one in told]
                try:
                    message = await policy.chat(messages, tools=tools, **(sampling or {}))
                except LimitReached:
                    break
                answers = await ask(world.step, dict(message))
                if answers is None:
                    break
                messages += [message, *_messages(answers, "step")]
            return await ask(world.reward)
        finally:
            if hasattr(world, "finish"):
                await ask(world.finish)
            thread.close()

    return contract


async def _either(thread: Thread, function: Callable[..., Any], *args: Any) -> Any:
    """The value of a function, awaited here where it is asynchronous, run in the thread where it is not."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    value = await thread.call(function, *args, seconds=None, what=getattr(function, "__name__", "a function"))
    return await value if inspect.isawaitable(value) else value


def _messages(value: Any, what: str) -> list[Message]:
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) and "role" in one for one in value):
        raise ArgumentError(
            f"{what} returned {value!r:.200}. The policy is asked with messages. Return a list of "
            '{"role": ..., "content": ...}.'
        )
    return [dict(one) for one in value]


def trl_environment(
    make: Callable[[], Any],
    *,
    tools: Any = (),
    score: Score | None = None,
    turns: int | None = None,
    seconds: float = 30.0,
    sampling: Mapping[str, Any] | None = None,
) -> Any:
    """The contract of a class made for TRL's `environment_factory`, as it is.

    `reset(**row)` may return what is appended to the last message of the prompt; public methods are tools, one call
    after the other; `get_reward()`, where there is one, is the reward by the name of the class. Instances are made
    once and used again. A failed trajectory's is not.

    Args:
        make: makes one.
        tools: more functions.
        score: `(task, prompt, completion)` to a reward, where the class has none.
        turns: tool answers at most; TRL's max_tool_calling_iterations.
        seconds: time limit of one tool call.
        sampling: fields of its requests.
    """
    idle: list[tuple[Any, Thread]] = []

    async def contract(task: Any, policy: Policy) -> Any:
        row = dict(task) if isinstance(task, Mapping) else {"prompt": task}
        world, thread = idle.pop() if idle else (None, Thread())
        opened: Tools | None = None
        try:
            if world is None:
                world = await _either(thread, make)
            seen = await _either(thread, lambda: world.reset(**row))
            prompt = _with(prompt_of(row) if row.get("prompt") else [{"role": "user", "content": ""}], seen)
            functions = [*tools, *public_methods(world)]
            opened = Tools(functions, seconds=seconds, run="order", text=str, thread=thread)
            messages, _ = await converse(policy, prompt, opened, turns, sampling)
            if hasattr(world, "get_reward"):
                found = {type(world).__name__: await _either(thread, world.get_reward)}
            else:
                found = await scored(score, task, prompt, messages[len(prompt) :])
        except BaseException:
            thread.close()
            raise
        idle.append((world, thread))
        return found

    return contract


def public_methods(world: Any) -> list[Callable[..., Any]]:
    """The methods of an instance that TRL takes for tools."""
    names = [name for name, _ in inspect.getmembers(type(world), predicate=inspect.isfunction)]
    return [getattr(world, name) for name in names if name not in ("reset", "get_reward") and not name.startswith("_")]


def _with(prompt: list[Message], seen: Any) -> list[Message]:
    """A prompt whose last message ends with what `reset` returned."""
    if seen is None:
        return prompt
    content: Any = prompt[-1].get("content") or ""
    if isinstance(seen, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    added: Any = [{"type": "text", "text": seen}] if isinstance(seen, str) and isinstance(content, list) else seen
    return [*prompt[:-1], {**prompt[-1], "content": content + added}]


async def converse(
    policy: Policy,
    prompt: list[Message],
    tools: Tools,
    turns: int | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> tuple[list[Message], Message]:
    """The policy asked again and again, its tool calls answered, until a message calls no tool or a limit is met.

    Returns: all messages, and the last with its `finish_reason`.
    """
    messages = list(prompt)
    last: Message = {}
    answered = 0
    policy.counts["called"] += 0  # so that a trajectory with tools that calls none says so
    while True:
        try:
            last = await policy.chat(messages, tools=tools.schemas, **(sampling or {}))
        except LimitReached:
            if not last:
                raise
            # Answers that the policy never saw are no part of what it did.
            return messages[: max(n for n, one in enumerate(messages, 1) if one["role"] == "assistant")], last
        messages.append({key: value for key, value in last.items() if key != "finish_reason"})
        if not last.get("tool_calls") or answered == turns:
            return messages, last
        answered += 1
        messages += await tools.answers(last, policy.counts)


async def scored(score: Score | None, task: Any, prompt: list[Message], completion: list[Message]) -> Any:
    """What a score says; None without one."""
    if score is None:
        return None
    thread = Thread()
    try:
        return await _either(thread, score, task, prompt, completion)
    finally:
        thread.close()
