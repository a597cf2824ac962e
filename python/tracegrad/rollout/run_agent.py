"""Run one trajectory of an agent or environment against the policy, within limits, into a record.

Whatever the agent does, there is a record: an exception, a timeout or a value that is no reward gives the reward None
(never 0) and says which line failed. Also the agents for one turn and for plain functions as tools.
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
from tracegrad.rollout.env import Score, converse, environment, scored, trl_environment
from tracegrad.rollout.policy import Chat, Limits, NoAnswer, Policy, said, sent
from tracegrad.rollout.session import Message, Session, known, prompt_of
from tracegrad.rollout.token_client import Tokens
from tracegrad.rollout.tools import Tools
from tracegrad.user_code import Failed, Failure, Thread, located, within

Contract = Callable[[Any, Policy], Awaitable[Any]]
TASK_CHARACTERS = 65536
_numbers = itertools.count()


@dataclass(frozen=True)
class Played:
    """One trajectory.

    Args:
        record: what `tracegrad.read` takes; its reward is None where it failed or is scored later.
        error: which trajectory failed, or its scoring, how and where, in one line; None where none did.
        failure: the same in parts, with the traceback.
        seconds: from beginning to end.
        ended: "done", or the limit that ended it: "turns", "tokens", "seconds"; or "failed".
        prompt: the messages it began with.
        completion: the messages that came after them, as reward functions take them.
        finish_reason: of the last message.
        task: what was played.
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


async def play(
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
) -> Played:
    """Plays one trajectory.

    Args:
        contract: `async (task, policy) -> float | dict | None`, a plain function alike, or an `Environment` class.
        task: given to it.
        chat: asks the policy; `Servers.chat`, or `Tokens` to ask with ids, so that no sampled token is tokenised again.
        version: of the weights that serve now; each call records it.
        received: the newest version that may have sampled an answer that comes now; default `version`.
        limits: of turns, sampled tokens and seconds.
        id: of the record; one is made up where it is None.
        group: of the record. Its requests go to the server of the group, where the prompt is cached.
        sampling: what requests say where the contract does not, such as {"max_tokens": 512}.
        salt: gives the `cache_salt` of a request.
        proxy: a running `rollout.proxy.Proxy`, for contracts that use `policy.base_url`.
        metadata: of the record, beside `task`, `ended`, `seconds` and `turns`.
        logprob_kind: what the server's logprobs are of.
        for_training: refuse requests whose tokens the trainer could not compute the probability of, such as by top_p.
    """
    limits = limits or Limits()
    name = f"trajectory-{next(_numbers)}" if id is None else id
    kinds: dict[str, Any] = {"logprob_kind": logprob_kind, "for_training": for_training}
    session = Session(name, version=version, received=received, sampling=sampling, **kinds)
    sticky = name if group is None else group
    asked = chat.trajectory() if isinstance(chat, Tokens) else chat
    policy = Policy(session, asked, limits=limits, sticky=sticky, salt=salt)
    async with _address(proxy, policy) as posted:
        started = time.monotonic()
        rewards, failure, ended = await _run(as_contract(contract), task, policy)
        seconds = time.monotonic() - started
    if failure is None and session.refused is not None and not session.calls:
        rewards, failure, ended = None, Failure("wrong", f"no request was sent: {session.refused}"), "failed"
    if rewards is None and failure is None:
        rewards = posted.get("rewards")
    prompt, completion, finish_reason = conversation(session.calls)
    about = {"task": as_json(task), "ended": ended, "turns": len(session.calls), "seconds": round(seconds, 3)}
    if policy.counts:
        about["tools"] = dict(policy.counts)
    if session.without_ids:
        about["calls_without_ids"] = session.without_ids
    record = session.record(
        name,
        group,
        rewards,
        metadata={**(metadata or {}), **about},
        failure=None if failure is None else failure.as_dict(),
        messages=_prompt_or_none(task),
    )
    error = None if failure is None else f"task {name}: {failure}"
    return Played(record, error, failure, seconds, ended, prompt, completion, finish_reason, task)


async def _run(contract: Contract, task: Any, policy: Policy) -> tuple[Any, Failure | None, str]:
    """The rewards, or why there are none; and what ended the trajectory."""
    try:
        value = await within(policy.limits.seconds, contract(task, policy), "the trajectory")
    except Failed as failed:
        return None, failed.failure, "seconds" if failed.failure.kind == "late" else policy.ended or "failed"
    try:
        return checked(value), None, policy.ended or "done"
    except ArgumentError as error:
        return None, Failure("wrong", f"what the contract returned: {error}"), "failed"


def checked(value: Any) -> float | dict[str, float | None] | None:
    """Rewards as a record takes them.

    Raises:
        ArgumentError: what is neither a number, nor numbers by name, nor None.
    """
    if not isinstance(value, Mapping):
        return known(value)
    if wrong := [name for name in value if not isinstance(name, str)]:
        raise ArgumentError(f"a reward is named {wrong[0]!r:.100}. Records name rewards by strings. Use one.")
    return {name: known(each) for name, each in value.items()}


def as_contract(thing: Any) -> Any:
    """A contract from what users pass: a coroutine function, a plain function, a class of ours or of TRL's."""
    if isinstance(thing, type) and hasattr(thing, "reset"):
        theirs = hasattr(thing, "get_reward") or not hasattr(thing, "step")
        return trl_environment(thing) if theirs else environment(thing)
    if not callable(thing):
        raise ArgumentError(
            f"the contract is a {type(thing).__name__}. It is called with (task, policy). Pass a function or an "
            "Environment class."
        )
    call = thing if inspect.isfunction(thing) or inspect.ismethod(thing) else type(thing).__call__
    if inspect.iscoroutinefunction(call):
        return thing

    async def plain(task: Any, policy: Policy) -> Any:
        thread = Thread()
        try:
            value = await thread.call(thing, task, policy, seconds=None, what="the contract")
        finally:
            thread.close()
        return await value if inspect.isawaitable(value) else value

    return plain


def restored(record: dict[str, Any], task: Any) -> Played:
    """Return a trajectory from its record, as it was played, to be scored again.

    Args:
        record: what `Played.record` was.
        task: what was played.

    Raises:
        KeyError, TypeError, ValueError: if it is no record of a trajectory, or one of another task.
    """
    metadata, told = record["metadata"], record.get("failure")
    if as_json(task) != metadata["task"] and not (isinstance(metadata["task"], str) and not isinstance(task, str)):
        raise ValueError("it is of another task")
    failure = None if told is None else Failure(**told)
    error = None if failure is None else f"task {record['id']}: {failure}"
    said = conversation(record.get("calls") or [])
    return Played(record, error, failure, metadata["seconds"], metadata["ended"], *said, task)


def conversation(calls: Sequence[dict[str, Any]]) -> tuple[list[Message], list[Message], str | None]:
    """What a trajectory began with, what came after, and why its last message ended."""
    if not calls:
        return [], [], None
    first, last = calls[0]["request"].get("messages"), calls[-1]
    try:
        message = said(last["response"])
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
    kept = messages[:count] == first
    return messages[:count] if kept else messages[:-1], messages[count:] if kept else messages[-1:], reason


def _prompt_or_none(task: Any) -> list[Message]:
    try:
        return json.loads(json.dumps(prompt_of(task)))
    except (ArgumentError, TypeError, ValueError, RecursionError):
        return []


def as_json(value: Any) -> Any:
    """Return a value as a record keeps it: unchanged if JSON has a word for it, else as text; cut if it is long."""
    try:
        text = json.dumps(value, allow_nan=False)
        if len(text) <= TASK_CHARACTERS:
            return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return repr(value)[:TASK_CHARACTERS].encode(errors="replace").decode()
    except Exception as error:
        return located(error).words


@contextlib.asynccontextmanager
async def _address(proxy: Any, policy: Policy) -> AsyncIterator[dict[str, Any]]:
    """The proxy's address of a trajectory for as long as it is played; then the rewards that were posted to it."""
    posted: dict[str, Any] = {}
    if proxy is None:
        yield posted
        return
    base_url, key = proxy.open(policy)
    policy.at((base_url, key))
    try:
        yield posted
    finally:
        posted["rewards"] = await proxy.close(base_url)


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
