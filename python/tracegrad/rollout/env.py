"""Make contracts from environments: `Environment` classes, and classes for TRL's `environment_factory`.

An environment exists for one trajectory, and its plain methods run in a thread of its own.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.rollout.policy import LimitReached, Policy
from tracegrad.rollout.session import Message, prompt_of
from tracegrad.rollout.tool_schema import schema
from tracegrad.rollout.tools import Tools
from tracegrad.user_code import UserThread

Score = Callable[[Any, list[Message], list[Message]], Any]


class Environment:
    """Multi-turn environment; methods may be asynchronous or plain.

    `tools` are functions or schemas for the tool list of the model; `step` answers its calls. If a limit of turns or
    tokens is reached, `step` is not called again, and `reward` is called. `finish` is always called at the end.

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
        """Return the first messages of the trajectory."""
        raise NotImplementedError

    def step(self, message: Message) -> list[Message] | Awaitable[list[Message] | None] | None:
        """Return the environment's answer to a message of the policy; None ends the trajectory.

        Args:
            message: role, content, `finish_reason`, and tool_calls and reasoning if there are any.
        """
        raise NotImplementedError

    def reward(self) -> Any:
        """Return one number, or several by name, after the trajectory has ended."""
        return None

    def finish(self) -> Any:
        """Release the resources of the environment."""


def environment_contract(make: Callable[[], Any], *, sampling: Mapping[str, Any] | None = None) -> Any:
    """Return the agent function of an environment class or factory.

    Args:
        make: creates an environment for each trajectory.
        sampling: fields of its requests.

    >>> import asyncio
    >>> from tracegrad.rollout import run_rollout
    >>> class Sum(Environment):
    ...     def reset(self, task):
    ...         return [{"role": "user", "content": task}]
    ...     def step(self, message):
    ...         self.right = message["content"] == "4"
    ...     def reward(self):
    ...         return float(self.right)
    >>> async def chat(request, **_):  # in place of `Servers.chat`
    ...     return {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]}
    >>> asyncio.run(run_rollout(environment_contract(Sum), "2+2?", chat=chat)).record["reward"]
    1.0
    """

    async def contract(task: Any, policy: Policy) -> Any:
        thread = UserThread()

        async def ask(function: Callable[..., Any], *args: Any) -> Any:
            return await _call(thread, function, *args)

        world: Any = None
        try:
            world = await ask(make)
            messages = [dict(message) for message in _messages(await ask(world.reset, task), "reset")]
            while True:
                declared = getattr(world, "tools", ())
                tools = [tool if isinstance(tool, Mapping) else schema(tool) for tool in declared]
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


async def _call(thread: UserThread, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function: await it here if it is asynchronous, run it in the thread if it is not."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    value = await thread.call(function, *args, seconds=None, what=getattr(function, "__name__", "a function"))
    return await value if inspect.isawaitable(value) else value


def _messages(value: Any, method: str) -> list[Message]:
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple) or not all(
        isinstance(message, Mapping) and "role" in message for message in value
    ):
        raise ArgumentError(
            f"TG-ROLLOUT-015: {method} returned {value!r:.200} instead of messages. Return a list of "
            '{"role": ..., "content": ...}.'
        )
    return [dict(message) for message in value]


def trl_environment(
    make: Callable[[], Any],
    *,
    tools: Any = (),
    score: Score | None = None,
    max_turns: int | None = None,
    seconds: float = 30.0,
    sampling: Mapping[str, Any] | None = None,
) -> Any:
    """Return the agent function of a class for TRL's `environment_factory`; the class needs no change.

    `reset(**row)` may return content that is appended to the last message of the prompt. Public methods are tools,
    called one after the other. `get_reward()`, if it exists, returns the reward, named after the class. Instances are
    created once and used again, except those of failed trajectories.

    Args:
        make: creates an instance.
        tools: additional functions.
        score: `(task, prompt, completion)` to a reward, if the class has none.
        max_turns: maximum number of tool answers; TRL's max_tool_calling_iterations.
        seconds: time limit of one tool call.
        sampling: fields of its requests.

    >>> import asyncio
    >>> from tracegrad.rollout import run_rollout
    >>> class Shop:
    ...     def reset(self, **row):
    ...         self.asked = False
    ...     def price(self, item: str) -> int:
    ...         '''Price of one item.'''
    ...         self.asked = True
    ...         return 12
    ...     def get_reward(self):
    ...         return float(self.asked)
    >>> call = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"item": "lamp"}'}}
    >>> async def chat(request, **_):  # in place of `Servers.chat`: calls the tool once
    ...     message = {"content": "12"} if len(request["messages"]) > 1 else {"content": "", "tool_calls": [call]}
    ...     return {"choices": [{"message": message, "finish_reason": "stop"}]}
    >>> asyncio.run(run_rollout(trl_environment(Shop), "How much is a lamp?", chat=chat)).record["rewards"]
    {'Shop': 1.0}
    """
    idle: list[tuple[Any, UserThread]] = []

    async def contract(task: Any, policy: Policy) -> Any:
        row = dict(task) if isinstance(task, Mapping) else {"prompt": task}
        world, thread = idle.pop() if idle else (None, UserThread())
        all_tools: Tools | None = None
        try:
            if world is None:
                world = await _call(thread, make)
            observation = await _call(thread, lambda: world.reset(**row))
            prompt = _append_observation(
                prompt_of(row) if row.get("prompt") else [{"role": "user", "content": ""}], observation
            )
            functions = [*tools, *public_methods(world)]
            all_tools = Tools(functions, seconds=seconds, run="order", text=str, thread=thread)
            messages, _ = await run_tool_loop(policy, prompt, all_tools, max_turns, sampling)
            if hasattr(world, "get_reward"):
                rewards = {type(world).__name__: await _call(thread, world.get_reward)}
            else:
                rewards = await call_score(score, task, prompt, messages[len(prompt) :])
        except BaseException:
            thread.close()
            raise
        idle.append((world, thread))
        return rewards

    return contract


def public_methods(world: Any) -> list[Callable[..., Any]]:
    """Return the methods of an instance that TRL uses as tools."""
    names = [name for name, _ in inspect.getmembers(type(world), predicate=inspect.isfunction)]
    return [getattr(world, name) for name in names if name not in ("reset", "get_reward") and not name.startswith("_")]


def _append_observation(prompt: list[Message], observation: Any) -> list[Message]:
    """Return a prompt with the result of `reset` appended to its last message."""
    if observation is None:
        return prompt
    content: Any = prompt[-1].get("content") or ""
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    suffix: Any = (
        [{"type": "text", "text": observation}]
        if isinstance(observation, str) and isinstance(content, list)
        else observation
    )
    return [*prompt[:-1], {**prompt[-1], "content": content + suffix}]


async def run_tool_loop(
    policy: Policy,
    prompt: list[Message],
    tools: Tools,
    turns: int | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> tuple[list[Message], Message]:
    """Call the policy and answer its tool calls, until a message calls no tool or a limit is reached.

    Returns:
        all messages, and the last message of the policy with its `finish_reason`.
    """
    messages = list(prompt)
    last: Message = {}
    answered = 0
    policy.counts["called"] += 0  # so that a trajectory that has tools but calls none is counted
    while True:
        try:
            last = await policy.chat(messages, tools=tools.schemas, **(sampling or {}))
        except LimitReached:
            if not last:
                raise
            # Tool answers that the policy never saw are not part of the trajectory.
            return messages[
                : max(number for number, message in enumerate(messages, 1) if message["role"] == "assistant")
            ], last
        messages.append({key: value for key, value in last.items() if key != "finish_reason"})
        if not last.get("tool_calls") or answered == turns:
            return messages, last
        answered += 1
        messages += await tools.answers(last, policy.counts)


async def call_score(score: Score | None, task: Any, prompt: list[Message], completion: list[Message]) -> Any:
    """Return the result of a score function; None without one."""
    if score is None:
        return None
    thread = UserThread()
    try:
        return await _call(thread, score, task, prompt, completion)
    finally:
        thread.close()
