"""Run one trajectory of an agent or environment against the policy, within limits, and record it.

There is always a record. An exception, a timeout or an invalid reward sets the reward None (never 0) and stores the
line that failed. Also contracts for one turn and for plain functions as tools.
"""

import contextlib
import inspect
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracegrad.data.trace import Traces
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.rollout.env import Score, call_score, environment_contract, run_tool_loop, trl_environment
from tracegrad.rollout.policy import Chat, Limits, NoAnswer, Policy, message_of, without_finish_reason
from tracegrad.rollout.session import Message, Session, prompt_of, reward_value
from tracegrad.rollout.token_client import Tokens
from tracegrad.rollout.tools import Tools
from tracegrad.user_code import Failure, UserCodeError, UserThread, await_within, failure_of

Contract = Callable[[Any, Policy], Awaitable[Any]]
TASK_CHARACTERS = 65536
_numbers = itertools.count()


@dataclass(frozen=True)
class RolloutResult:
    """Result of one rollout.

    Args:
        record: record for `tracegrad.read`; its reward is None if the rollout failed or is scored later.
        error: one line with the trajectory, the failure of its rollout or scoring, and its source line; None without a
            failure.
        failure: the same as fields, with the traceback.
        seconds: duration.
        ended: "done", or the limit that ended it: "turns", "tokens", "seconds"; or "failed".
        prompt: first messages.
        completion: messages after the prompt, as reward functions receive them.
        finish_reason: finish reason of the last message.
        task: task of the rollout.

    >>> import asyncio
    >>> async def chat(request, **_):  # in place of `Servers.chat`
    ...     return {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]}
    >>> result = asyncio.run(run_rollout(one_turn(), "2+2?", chat=chat))
    >>> result.ended, result.prompt, result.completion
    ('done', [{'role': 'user', 'content': '2+2?'}], [{'role': 'assistant', 'content': '4'}])
    >>> result.record["reward"], result.error  # nothing scored it
    (None, None)
    """

    record: dict[str, Any]
    error: str | None
    failure: Failure | None
    seconds: float
    ended: str
    prompt: list[Message] = field(repr=False)
    completion: list[Message] = field(repr=False)
    finish_reason: str | None
    task: Any = field(repr=False)


async def run_rollout(
    contract: Any,
    task: Any,
    *,
    chat: Chat,
    version: Callable[[], int] | None = None,
    received: Callable[[], int] | None = None,
    limits: Limits | None = None,
    id: str | None = None,
    group: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    salt: Callable[[], str | None] | None = None,
    proxy: Any = None,
    metadata: Mapping[str, Any] | None = None,
    logprob_kind: str = "raw",
    for_training: bool = False,
) -> RolloutResult:
    """Roll out one trajectory.

    Args:
        contract: `async (task, policy) -> float | dict | None`, a plain function with the same arguments, or an
            `Environment` class.
        task: passed to the agent.
        chat: sends requests to the policy: `Servers.chat`, or `Tokens` to send ids, so that no sampled token is
            tokenised again.
        version: returns the version of the servers' weights; each call records it.
        received: returns the newest version that may have sampled an answer that arrives now; default `version`.
        limits: limits on turns, sampled tokens and seconds.
        id: id of the record; None creates one.
        group: group of the record. All its requests go to one server, whose cache has the prompt.
        sampling: defaults for request fields that the agent does not set, such as {"max_tokens": 512}.
        salt: returns the `cache_salt` of a request.
        proxy: a running `rollout.proxy.Proxy`, for contracts that use `policy.base_url`.
        metadata: metadata of the record, in addition to `task`, `ended`, `seconds` and `turns`.
        logprob_kind: kind of the server's logprobs.
        for_training: refuse requests whose token probabilities the trainer cannot compute, for example with top_p.

    >>> import asyncio
    >>> async def chat(request, **_):  # in place of `Servers.chat`
    ...     choice = {"message": {"content": "4"}, "finish_reason": "stop", "token_ids": [22, 2]}
    ...     return {"prompt_token_ids": [1, 20, 2], "choices": [choice]}
    >>> async def agent(task, policy):
    ...     message = await policy.chat([{"role": "user", "content": task}], max_tokens=8)
    ...     return float(message["content"] == "4")
    >>> record = asyncio.run(run_rollout(agent, "2+2?", chat=chat, id="sum-0")).record
    >>> record["id"], record["reward"], record["calls"][0]["request"]["max_tokens"]
    ('sum-0', 1.0, 8)
    """
    limits = limits or Limits()
    name = f"trajectory-{next(_numbers)}" if id is None else id
    session = Session(
        name,
        version=version,
        received=received,
        sampling=sampling,
        logprob_kind=logprob_kind,
        for_training=for_training,
    )
    sticky = name if group is None else group
    trajectory_chat = chat.trajectory() if isinstance(chat, Tokens) else chat
    policy = Policy(session, trajectory_chat, limits=limits, sticky=sticky, salt=salt)
    async with _address(proxy, policy) as posted:
        started = time.monotonic()
        rewards, failure, ended = await _run(as_contract(contract), task, policy)
        seconds = time.monotonic() - started
    if failure is None and session.refusal_reason is not None and not session.calls:
        rewards, failure, ended = None, Failure("wrong", f"no request was sent: {session.refusal_reason}"), "failed"
    if rewards is None and failure is None:
        rewards = posted.get("rewards")
    prompt, completion, finish_reason = conversation(session.calls)
    summary = {"task": as_json(task), "ended": ended, "turns": len(session.calls), "seconds": round(seconds, 3)}
    if policy.counts:
        summary["tools"] = dict(policy.counts)
    if session.without_ids:
        summary["calls_without_ids"] = session.without_ids
    record = session.record(
        name,
        group,
        rewards,
        metadata={**(metadata or {}), **summary},
        failure=None if failure is None else failure.as_dict(),
        messages=_prompt_or_none(task),
    )
    error = None if failure is None else f"task {name}: {failure}"
    return RolloutResult(record, error, failure, seconds, ended, prompt, completion, finish_reason, task)


async def _run(contract: Contract, task: Any, policy: Policy) -> tuple[Any, Failure | None, str]:
    """Return the rewards or the failure, and the reason why the trajectory ended."""
    try:
        value = await await_within(policy.limits.timeout_s, contract(task, policy), "the trajectory")
    except UserCodeError as error:
        return None, error.failure, "seconds" if error.failure.kind == "late" else policy.ended or "failed"
    try:
        return check_rewards(value), None, policy.ended or "done"
    except ArgumentError as error:
        return None, Failure("wrong", f"invalid return value of the agent: {error}"), "failed"


def check_rewards(value: Any) -> float | dict[str, float | None] | None:
    """Return rewards in the form of a record.

    Raises:
        ArgumentError: if it is not a number, numbers by name, or None.
    """
    if not isinstance(value, Mapping):
        return reward_value(value)
    if invalid := [name for name in value if not isinstance(name, str)]:
        raise ArgumentError(f"TG-ROLLOUT-034: a reward has the name {invalid[0]!r:.100}. Use a string as the name.")
    return {name: reward_value(reward) for name, reward in value.items()}


def as_contract(thing: Any) -> Any:
    """Return an agent for a coroutine function, plain function, `Environment` class or TRL environment class."""
    if isinstance(thing, type) and hasattr(thing, "reset"):
        is_trl = hasattr(thing, "get_reward") or not hasattr(thing, "step")
        return trl_environment(thing) if is_trl else environment_contract(thing)
    if not callable(thing):
        raise ArgumentError(
            f"TG-ROLLOUT-035: the agent is a {type(thing).__name__}. Pass a function of (task, policy) or an "
            "Environment class."
        )
    call = thing if inspect.isfunction(thing) or inspect.ismethod(thing) else type(thing).__call__
    if inspect.iscoroutinefunction(call):
        return thing

    async def plain(task: Any, policy: Policy) -> Any:
        thread = UserThread()
        try:
            value = await thread.call(thing, task, policy, seconds=None, what="the agent")
        finally:
            thread.close()
        return await value if inspect.isawaitable(value) else value

    return plain


def rollout_from_record(record: dict[str, Any], task: Any) -> RolloutResult:
    """Return a rollout from its record, to score it again.

    Args:
        record: the `RolloutResult.record` of the rollout.
        task: task of the rollout.

    Raises:
        KeyError, TypeError, ValueError: if it is not the record of a rollout, or the record of another task.
    """
    metadata, failure_record = record["metadata"], record.get("failure")
    if as_json(task) != metadata["task"] and not (isinstance(metadata["task"], str) and not isinstance(task, str)):
        raise ValueError("it is of another task")
    failure = None if failure_record is None else Failure(**failure_record)
    error = None if failure is None else f"task {record['id']}: {failure}"
    messages = conversation(record.get("calls") or [])
    return RolloutResult(record, error, failure, metadata["seconds"], metadata["ended"], *messages, task)


def conversation(calls: Sequence[dict[str, Any]]) -> tuple[list[Message], list[Message], str | None]:
    """Return the prompt, the completion and the last finish reason of a trajectory."""
    if not calls:
        return [], [], None
    first, last = calls[0]["request"].get("messages"), calls[-1]
    try:
        message = message_of(last["response"])
        reason = message.pop("finish_reason")
        messages = [*last["request"]["messages"], message]
    except (NoAnswer, KeyError):
        try:
            [trace] = Traces.from_records([{"calls": list(calls)}])
        except TracegradError:
            return list(first or ()), [], None
        messages, reason = trace.messages, trace.generations[-1].finish_reason
        first = messages[: len(trace.generations[0].context or ())]
    count = len(first or ())
    keeps_prompt = messages[:count] == first
    return (
        messages[:count] if keeps_prompt else messages[:-1],
        messages[count:] if keeps_prompt else messages[-1:],
        reason,
    )


def _prompt_or_none(task: Any) -> list[Message]:
    try:
        return json.loads(json.dumps(prompt_of(task)))
    except (ArgumentError, TypeError, ValueError, RecursionError):
        return []


def as_json(value: Any) -> Any:
    """Return a value in the form of a record: unchanged if JSON can represent it, else as text.

    Long values are truncated.
    """
    try:
        text = json.dumps(value, allow_nan=False)
        if len(text) <= TASK_CHARACTERS:
            return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return repr(value)[:TASK_CHARACTERS].encode(errors="replace").decode()
    except Exception as error:
        return failure_of(error).message


@contextlib.asynccontextmanager
async def _address(proxy: Any, policy: Policy) -> AsyncIterator[dict[str, Any]]:
    """Open the proxy address of a rollout; on exit, set the rewards that were posted to it."""
    posted: dict[str, Any] = {}
    if proxy is None:
        yield posted
        return
    base_url, key = proxy.open(policy)
    policy.set_address((base_url, key))
    try:
        yield posted
    finally:
        posted["rewards"] = await proxy.close(base_url)


def one_turn(score: Score | None = None, *, sampling: Mapping[str, Any] | None = None) -> Contract:
    """Return an agent with one question and one answer.

    Args:
        score: `(task, prompt, completion)` to a number, numbers by name or None; plain or asynchronous. Without it the
            reward is None, and functions for complete groups can score it later.
        sampling: fields of the request.

    >>> import asyncio
    >>> async def chat(request, **_):  # in place of `Servers.chat`
    ...     return {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]}
    >>> def correct(task, prompt, completion):
    ...     return float(completion[-1]["content"] == task["answer"])
    >>> task = {"prompt": "2+2?", "answer": "4"}
    >>> asyncio.run(run_rollout(one_turn(correct), task, chat=chat)).record["reward"]
    1.0
    """

    async def contract(task: Any, policy: Policy) -> Any:
        prompt = prompt_of(task)
        return await call_score(
            score, task, prompt, [without_finish_reason(await policy.chat(prompt, **(sampling or {})))]
        )

    return contract


def with_tools(
    tools: Sequence[Callable[..., Any]] | Callable[[Any], Sequence[Callable[..., Any]]],
    score: Score | None = None,
    *,
    max_turns: int | None = None,
    seconds: float = 30.0,
    run: Any = "thread",
    sampling: Mapping[str, Any] | None = None,
) -> Contract:
    """Return an agent that answers tool calls until a message calls no tool.

    The calls are counted by outcome in the record's `metadata` as `tools`.

    Args:
        tools: functions, or a function that returns them for a task.
        score: as for `one_turn`.
        max_turns: maximum number of tool answers, in addition to the limits of `run_rollout`.
        seconds: time limit of one tool call.
        run: where plain functions run; see `Tools`.
        sampling: fields of the requests.

    >>> import asyncio
    >>> def price(item: str) -> int:
    ...     '''Price of one item.'''
    ...     return 12
    >>> call = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"item": "lamp"}'}}
    >>> async def chat(request, **_):  # in place of `Servers.chat`: calls the tool once
    ...     message = {"content": "12"} if len(request["messages"]) > 1 else {"content": "", "tool_calls": [call]}
    ...     return {"choices": [{"message": message, "finish_reason": "stop"}]}
    >>> result = asyncio.run(run_rollout(with_tools([price]), "How much is a lamp?", chat=chat))
    >>> [message["role"] for message in result.completion], result.completion[1]["content"]
    (['assistant', 'tool', 'assistant'], '12')
    """
    if isinstance(tools, type) or not (callable(tools) or isinstance(tools, Sequence)):
        raise ArgumentError(
            f"TG-ROLLOUT-036: tools is {tools!r:.100}. Pass functions, or a function from the task to functions."
        )
    shared = None if callable(tools) else Tools(tools, seconds=seconds, run=run)

    async def contract(task: Any, policy: Policy) -> Any:
        prompt = prompt_of(task)
        task_tools = shared or Tools(tools(task), seconds=seconds, run=run)  # type: ignore[operator]
        try:
            messages, _ = await run_tool_loop(policy, prompt, task_tools, max_turns, sampling)
        finally:
            if task_tools is not shared:
                task_tools.close()
        return await call_score(score, task, prompt, messages[len(prompt) :])

    return contract
