"""Record one trajectory: its calls as sent and received, and the record that `tracegrad.read` reads.

A call keeps the complete request and response. Messages that were sent before are stored once in memory. Nothing here
sends requests to a server; `policy` and `proxy` do.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from tracegrad.data.sampling import NEUTRAL, is_truncated, refusal_reason
from tracegrad.data.trace import Traces
from tracegrad.errors import ArgumentError, TracegradError, escape_terminal

Message = dict[str, Any]
# Fields that every request needs, so that its token ids and logprobs are recorded exactly.
CHAT = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
COMPLETIONS = {"logprobs": 0, "return_token_ids": True}
SAMPLING = {"temperature": 1.0, **NEUTRAL}
"""Sent if neither the agent nor the run sets them. A server otherwise uses values from the model's
generation_config.json and records them nowhere."""
LOST_CALLS = 16


class UnfitRequest(ArgumentError):
    """A request with an option whose answer cannot be recorded or trained on; it was not sent."""


class Session:
    """The calls of one trajectory.

    Args:
        name: name of the trajectory; requests with the same name go to one server.
        version: returns the version of the weights that the servers have now.
        received: returns the newest version that may have served an answer that arrives now, if it can differ.
        sampling: defaults for request fields that the sender omits, such as {"temperature": 1.0, "max_tokens":
            512}.
        logprob_kind: kind of the server's logprobs; "raw" unless it was started with --logprobs-mode.
        for_training: refuse requests whose tokens would follow another distribution than the trainer's
            (`sampling.mismatch`).

    `calls` contains {"request", "response", "policy_version"} in the order of the answers. `lost` contains calls
    without an answer. `refused` is why the last request was refused, if one was.

    >>> session = Session("a17", version=lambda: 4)
    >>> call = session.open({"messages": [{"role": "user", "content": "2+2?"}]})
    >>> message = {"role": "assistant", "content": "4"}
    >>> call.close({"prompt_token_ids": [1, 5], "choices": [{"message": message, "token_ids": [19, 2]}]})
    >>> record = session.record(rewards=1.0)
    >>> record["reward"], record["calls"][0]["policy_version"], session.tokens
    (1.0, 4, 2)
    """

    def __init__(
        self,
        name: str,
        *,
        version: Callable[[], int] | None = None,
        received: Callable[[], int] | None = None,
        sampling: Mapping[str, Any] | None = None,
        logprob_kind: str = "raw",
        for_training: bool = False,
    ) -> None:
        self.name = name
        self.sampling = {**SAMPLING, **(sampling or {})}
        self.calls: list[dict[str, Any]] = []
        self.lost: list[dict[str, Any]] = []
        self.tokens = 0
        self.without_ids = 0
        self._lost = 0
        self._unsure = False
        self._version = version
        self._received = received or version
        self._kind = logprob_kind
        self._for_training = for_training
        self.refusal_reason: str | None = None
        self._last_messages: list[Any] = []
        self._tools: Any = None

    @property
    def version(self) -> int | None:
        """Version of the weights that the servers have now."""
        return None if self._version is None else self._version()

    @property
    def newest(self) -> int | None:
        """The newest version that may have sampled an answer that arrives now."""
        return None if self._received is None else self._received()

    @property
    def lost_count(self) -> int:
        """Number of calls without an answer; `lost` has the last of them."""
        return self._lost

    def restore(self, calls: list[dict[str, Any]], lost: list[dict[str, Any]]) -> None:
        """Continue from calls that another process made before."""
        for call in calls:
            is_stream = isinstance(call["response"], str)
            count, exact = (0, False) if is_stream else _count_tokens(call["response"])
            self._unsure |= is_stream
            self._add(call, count, exact)
        self._lost, self.lost = len(lost), lost[-LOST_CALLS:]
        if calls and isinstance(messages := calls[-1]["request"].get("messages"), list):
            self._last_messages, self._tools = messages, calls[-1]["request"].get("tools")

    def open(self, body: Mapping[str, Any], required_fields: Mapping[str, Any] = CHAT) -> "Call":
        """Create a call: `body` with the sampling defaults and the fields that a record needs.

        Args:
            body: request from the sender; it may be changed afterwards.
            required_fields: fields that are always set: CHAT or COMPLETIONS, or {} for an API with neither.

        Raises:
            UnfitRequest: if the request has an option whose answer cannot be recorded or trained on.
        """
        defaults = self.sampling if required_fields else {}
        dropped = {"max_tokens"} if "max_completion_tokens" in body else set()
        # The ids that truncated sampling keeps are read from chat answers only.
        if "top_logprobs" not in required_fields or not is_truncated({**defaults, **_without_none(body)}):
            dropped.add("top_logprobs")
        defaults = {key: value for key, value in defaults.items() if key not in dropped}
        filled = {key: value for key, value in defaults.items() if body.get(key) is None}
        request = {**filled, **_without_none(body)}
        if (reason := refusal_reason(request, self._kind if self._for_training else None)) is not None:
            self.refusal_reason = reason
            raise UnfitRequest(f"TG-ROLLOUT-057: {reason}")
        for key, value in required_fields.items():
            # The sender may request more logprobs than a record needs.
            if key not in ("top_logprobs", "logprobs") or not request.get(key):
                request[key] = value
        if "top_logprobs" in filled:
            request["return_tokens_as_token_ids"] = True  # alternatives are recorded with their ids
        if isinstance(request.get("messages"), list):
            self._last_messages = _share_messages(request["messages"], self._last_messages)
            request["messages"] = list(self._last_messages)
        if "tools" in request:
            self._tools = self._tools if request["tools"] == self._tools else _copy(request["tools"])
            request["tools"] = self._tools
        return Call(self, request, self.version, [key for key in filled if NEUTRAL.get(key) == filled[key]])

    def record(
        self,
        id: str | None = None,
        group: str | None = None,
        rewards: float | Mapping[str, float | None] | None = None,
        metadata: Mapping[str, Any] | None = None,
        failure: Mapping[str, Any] | None = None,
        messages: list[Message] | None = None,
    ) -> dict[str, Any]:
        """Return the trajectory as a record; values are shared with the session.

        Args:
            id: default: the name of the session.
            group: group of the record; None leaves it out.
            rewards: one number, or several by name; None and NaN mean unknown.
            metadata: added to the record, as JSON.
            failure: why the trajectory failed, added to the record.
            messages: initial messages, for a trajectory without an answered call.
        """
        calls, lost, count = self._split_readable()
        record: dict[str, Any] = {"id": self.name if id is None else id}
        if group is not None:
            record["group"] = group
        if isinstance(rewards, Mapping):
            record["rewards"] = {name: reward_value(value) for name, value in rewards.items()}
        else:
            record["reward"] = reward_value(rewards)
        record["logprob_kind"] = self._kind
        if metadata:
            record["metadata"] = dict(metadata)
        if failure:
            record["failure"] = dict(failure)
        if count:
            record["lost_calls"] = {"count": count, "last": lost}
        if not calls:
            return {"format": "tracegrad/1", **record, "messages": messages or []}
        return {**record, "calls": calls}

    def _split_readable(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
        """Return the readable calls, the last lost calls, and the number of lost calls.

        A call that cannot be read counts as lost, since it would make the whole record unreadable.
        """
        if not (self.without_ids or self._unsure) and _unreadable_reason(self.calls) is None:
            return list(self.calls), list(self.lost), self._lost
        readable, lost, count = [], list(self.lost), self._lost
        for call in self.calls:
            if (reason := _unreadable_reason([call])) is None:
                readable.append(call)
            else:
                lost = [*lost[1 - LOST_CALLS :], _lost(call["request"], reason)]
                count += 1
        return readable, lost, count

    def _add(self, call: dict[str, Any], tokens: int, exact: bool) -> None:
        self.calls.append(call)
        self.tokens += tokens
        self.without_ids += not exact

    def _lose(self, request: dict[str, Any], reason: str) -> None:
        self._lost += 1
        self.lost = [*self.lost[1 - LOST_CALLS :], _lost(request, reason)]


class Call:
    """One request in flight.

    `request` is the body to send, `filled` the fields that the session filled in and that have no effect.
    """

    def __init__(
        self, session: Session, request: dict[str, Any], version: int | None, filled: Sequence[str] = ()
    ) -> None:
        self.request = request
        self.filled = list(filled)
        self.dropped: list[str] = []
        self.version = version
        self.closed = False
        self._session = session

    def drop(self, names: Iterable[str]) -> bool:
        """Remove fields that the server refuses and the session filled in; return whether there were any.

        The record marks these values as unknown, since the server uses its own.
        """
        refused = [name for name in self.filled if name in set(names)]
        self.filled = [name for name in self.filled if name not in refused]
        self.dropped += refused
        for name in refused:
            self.request.pop(name, None)
        return bool(refused)

    def close(self, response: Any, *, tokens: int | None = None) -> None:
        """Record the answer: a response, or the text of a stream of events.

        Args:
            tokens: number of sampled tokens, if the answer is not a complete response.
        """
        self.closed = True
        call = {"request": self.request, "response": response}
        if self.dropped:
            call |= {"sampling_defaults": "unknown", "refused_sampling": self.dropped}
        now = self._session.newest
        if self.version is not None:
            call["policy_version"] = self.version
            if now != self.version:
                call["received_version"] = now
        count, exact = _count_tokens(response) if tokens is None else (tokens, tokens > 0)
        self._session._unsure |= tokens is not None
        self._session._add(call, count, exact)

    def fail(self, why: str) -> None:
        """Record that there was no answer, and why."""
        self.closed = True
        self._session._lose(self.request, why)


def prompt_of(task: Any) -> list[Message]:
    """Return the first messages of a task: a text, a list of messages, or a dict with either as `prompt` or `messages`.

    >>> prompt_of("2+2?") == prompt_of({"prompt": "2+2?"}) == prompt_of([{"role": "user", "content": "2+2?"}])
    True
    """
    prompt = task
    if isinstance(task, Mapping):
        prompt = next((task[key] for key in ("prompt", "messages") if task.get(key) is not None), None)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list | tuple) and prompt and all(isinstance(message, Mapping) for message in prompt):
        return [dict(message) for message in prompt]
    raise ArgumentError(
        f"TG-ROLLOUT-037: the task {task!r:.200} has no prompt. Pass a text, a list of messages, or a dict with either "
        "as `prompt`."
    )


def reward_value(reward: Any) -> float | None:
    """Return a reward as a record stores it: None if it is unknown.

    >>> reward_value(True), reward_value(float("nan")), reward_value(None)
    (1.0, None, None)

    Raises:
        ArgumentError: if it is not a finite number, NaN or None.
    """
    if reward is None:
        return None
    try:
        value = float(reward) if not isinstance(reward, str | bytes) else None
    except (TypeError, ValueError, OverflowError):
        value = None
    if value is None or math.isinf(value):
        raise ArgumentError(
            f"TG-ROLLOUT-038: a reward is {reward!r:.100}, which would make the mean of its group invalid. Return a "
            "finite number, or None for an unknown reward."
        )
    return None if math.isnan(value) else value


def _without_none(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if value is not None}


def _share_messages(messages: list[Any], previous: list[Any]) -> list[Any]:
    """Copy messages; messages equal to those at the same position in the last request reuse the same objects."""
    candidates = iter(previous)
    return [old if (old := next(candidates, None)) == message else _copy(message) for message in messages]


def _copy(value: Any) -> Any:
    """Copy like `deepcopy`; faster for JSON values."""
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    if type(value) is list:
        return [_copy(item) for item in value]
    return value if type(value) is str else deepcopy(value)


def _count_tokens(response: Any) -> tuple[int, bool]:
    """Return the number of sampled tokens, and whether ids, prompt ids and logprobs are all present."""
    choices = response.get("choices") if isinstance(response, Mapping) else None
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        return 0, False
    exact = bool(choices) and all(_has_exact_tokens(response, choice) for choice in choices)
    ids = [choice.get("token_ids") for choice in choices]
    if ids and all(isinstance(token_ids, list) for token_ids in ids):
        return sum(map(len, ids)), exact
    usage = response.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, Mapping) else 0
    return (count if isinstance(count, int) else 0), False


def _has_exact_tokens(response: Mapping[str, Any], choice: Mapping[str, Any]) -> bool:
    """Return whether a choice contains its exact tokens."""
    ids, prompt = choice.get("token_ids"), response.get("prompt_token_ids") or choice.get("prompt_token_ids")
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, Mapping):
        logprobs = logprobs.get("content") or logprobs.get("token_logprobs")
    if not (isinstance(ids, list) and isinstance(prompt, list) and isinstance(logprobs, list)):
        return False
    return bool(prompt) and len(ids) == len(logprobs) and all(type(id) is int for id in ids)


def _lost(request: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return the record of a call without an answer."""
    return {"request": request, "error": escape_terminal(reason)[:1000]}


def _unreadable_reason(calls: list[dict[str, Any]]) -> str | None:
    """Return why calls cannot be read; None if they can."""
    try:
        Traces.from_records([{"calls": calls}])
    except TracegradError as error:
        return str(error)
    return None
