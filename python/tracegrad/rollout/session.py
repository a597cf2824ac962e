"""One recorded trajectory: its calls as they were sent and received, and the record that `tracegrad.read` takes.

A call keeps the whole request and the whole response: messages that were sent before are kept once in memory. Nothing
here speaks to a server; `policy` and `proxy` do.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from tracegrad.data.sampling import NEUTRAL, refusal
from tracegrad.data.trace import Traces
from tracegrad.errors import ArgumentError, TracegradError, shown

Message = dict[str, Any]
# What a request must ask for, so that its tokens and their logprobs are known exactly.
CHAT = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
COMPLETIONS = {"logprobs": 0, "return_token_ids": True}
SAMPLING = {"temperature": 1.0, **NEUTRAL}
"""Sent where neither the agent nor the run says otherwise: a server takes what is left out from the model's
generation_config.json, and records it nowhere."""
LOST_CALLS = 16


class UnfitRequest(ArgumentError):
    """A request with an option whose answer cannot be recorded, or trained on; it was not sent."""


class Session:
    """The calls of one trajectory.

    Args:
        name: of the trajectory; requests of one name go to one server.
        version: gives the version of the weights that serve now.
        received: gives the newest version that may have served an answer that comes now, where that is another.
        sampling: what a request says where its sender does not, such as {"temperature": 1.0, "max_tokens": 512}.
        logprob_kind: what the server's logprobs are of; "raw" unless it was started with --logprobs-mode.
        for_training: refuse requests whose tokens would follow another distribution than the trainer's
            (`sampling.mismatch`).

    `calls` holds {"request", "response", "policy_version"} in the order of the answers; `lost` what went without one;
    `refused` is why the last request was refused, if one was.

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
        self.refused: str | None = None
        self._seen: list[Any] = []
        self._tools: Any = None

    @property
    def version(self) -> int | None:
        """The version that serves now."""
        return None if self._version is None else self._version()

    @property
    def newest(self) -> int | None:
        """The newest version that may have sampled an answer that comes now."""
        return None if self._received is None else self._received()

    @property
    def losses(self) -> int:
        """How many calls went without an answer; `lost` has the last of them."""
        return self._lost

    def take_up(self, calls: list[dict[str, Any]], lost: list[dict[str, Any]]) -> None:
        """Goes on from calls that were made before, in another process."""
        for call in calls:
            told = isinstance(call["response"], str)
            counted, exact = (0, False) if told else _counted(call["response"])
            self._unsure |= told
            self._add(call, counted, exact)
        self._lost, self.lost = len(lost), lost[-LOST_CALLS:]
        if calls and isinstance(said := calls[-1]["request"].get("messages"), list):
            self._seen, self._tools = said, calls[-1]["request"].get("tools")

    def open(self, body: Mapping[str, Any], asked: Mapping[str, Any] = CHAT) -> "Call":
        """A call that is about to be made: `body` with the run's sampling and what a record needs.

        Args:
            body: as its sender wants it; it may be changed afterwards.
            asked: what is set whatever the body says; CHAT or COMPLETIONS, or {} for a road that knows neither.

        Raises:
            UnfitRequest: if the request has an option whose answer cannot be recorded or trained on.
        """
        defaults = self.sampling if asked else {}
        if "max_completion_tokens" in body:
            defaults = {key: value for key, value in defaults.items() if key != "max_tokens"}
        filled = {key: value for key, value in defaults.items() if body.get(key) is None}
        request = {**filled, **_said(body)}
        if (why := refusal(request, self._kind if self._for_training else None)) is not None:
            self.refused = why
            raise UnfitRequest(why)
        for key, value in asked.items():
            # More logprobs than a record needs are the sender's own wish.
            if key not in ("top_logprobs", "logprobs") or not request.get(key):
                request[key] = value
        if isinstance(request.get("messages"), list):
            self._seen = _shared(request["messages"], self._seen)
            request["messages"] = list(self._seen)
        if "tools" in request:
            self._tools = self._tools if request["tools"] == self._tools else _copied(request["tools"])
            request["tools"] = self._tools
        return Call(self, request, self.version, [key for key in filled if key in NEUTRAL])

    def record(
        self,
        id: str | None = None,
        group: str | None = None,
        rewards: float | Mapping[str, float | None] | None = None,
        metadata: Mapping[str, Any] | None = None,
        failure: Mapping[str, Any] | None = None,
        messages: list[Message] | None = None,
    ) -> dict[str, Any]:
        """The trajectory as a record; values are shared with the session.

        Args:
            id: the name of the session by default.
            rewards: one number, or some by name; None and NaN are "not known".
            metadata: kept beside it, as JSON.
            failure: why the trajectory failed, kept beside it.
            messages: what the trajectory began with, for one without any answered call.
        """
        calls, lost, count = self._sifted()
        record: dict[str, Any] = {"id": self.name if id is None else id}
        if group is not None:
            record["group"] = group
        if isinstance(rewards, Mapping):
            record["rewards"] = {name: known(value) for name, value in rewards.items()}
        else:
            record["reward"] = known(rewards)
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

    def _sifted(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
        """The calls that can be read, as one that cannot would take the others with it; what is lost, and how much."""
        if not (self.without_ids or self._unsure) and _readable(self.calls) is None:
            return list(self.calls), list(self.lost), self._lost
        kept, lost, count = [], list(self.lost), self._lost
        for call in self.calls:
            if (why := _readable([call])) is None:
                kept.append(call)
            else:
                lost = [*lost[1 - LOST_CALLS :], _lost(call["request"], why)]
                count += 1
        return kept, lost, count

    def _add(self, call: dict[str, Any], answered: int, exact: bool) -> None:
        self.calls.append(call)
        self.tokens += answered
        self.without_ids += not exact

    def _lose(self, request: dict[str, Any], why: str) -> None:
        self._lost += 1
        self.lost = [*self.lost[1 - LOST_CALLS :], _lost(request, why)]


class Call:
    """One request under way; `request` is the body to send, `filled` what the session filled in that does nothing."""

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
        """Take out fields that the server refuses and the session filled in; return whether there was one.

        What the server takes in their place is unknown, and recorded so.
        """
        here = [name for name in self.filled if name in set(names)]
        self.filled = [name for name in self.filled if name not in here]
        self.dropped += here
        for name in here:
            self.request.pop(name, None)
        return bool(here)

    def close(self, response: Any, *, tokens: int | None = None) -> None:
        """Its answer: a response, or the text of a stream of events.

        Args:
            tokens: how many were sampled, for what is not a whole response.
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
        counted, exact = _counted(response) if tokens is None else (tokens, tokens > 0)
        self._session._unsure |= tokens is not None
        self._session._add(call, counted, exact)

    def lose(self, why: str) -> None:
        """It got no answer."""
        self.closed = True
        self._session._lose(self.request, why)


def prompt_of(task: Any) -> list[Message]:
    """The messages a task begins with: a text, a list of messages, or a dict with either as `prompt` or `messages`.

    >>> prompt_of("2+2?") == prompt_of({"prompt": "2+2?"}) == prompt_of([{"role": "user", "content": "2+2?"}])
    True
    """
    told = task
    if isinstance(task, Mapping):
        told = next((task[key] for key in ("prompt", "messages") if task.get(key) is not None), None)
    if isinstance(told, str):
        return [{"role": "user", "content": told}]
    if isinstance(told, list | tuple) and told and all(isinstance(each, Mapping) for each in told):
        return [dict(each) for each in told]
    raise ArgumentError(
        f"a task is {task!r:.200}. It has no prompt to begin with. Pass a text, a list of messages, or a dict that has "
        "one as `prompt`."
    )


def known(reward: Any) -> float | None:
    """A reward as a record says it: None where it is not known.

    >>> known(True), known(float("nan")), known(None)
    (1.0, None, None)
    """
    if reward is None:
        return None
    try:
        value = float(reward) if not isinstance(reward, str | bytes) else None
    except (TypeError, ValueError, OverflowError):
        value = None
    if value is None or math.isinf(value):
        raise ArgumentError(
            f"a reward is {reward!r:.100}. It would spread over every trace it is averaged with. "
            "Return a finite number, or None where there is none."
        )
    return None if math.isnan(value) else value


def _said(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if value is not None}


def _shared(messages: list[Any], seen: list[Any]) -> list[Any]:
    """Copies of messages; those that stood at the same place before are the same objects."""
    before = iter(seen)
    return [old if (old := next(before, None)) == message else _copied(message) for message in messages]


def _copied(value: Any) -> Any:
    """What `deepcopy` gives, quickly for what JSON is made of."""
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    if type(value) is list:
        return [_copied(each) for each in value]
    return value if type(value) is str else deepcopy(value)


def _counted(response: Any) -> tuple[int, bool]:
    """How many tokens were sampled, and whether ids, prompt ids and logprobs are all there."""
    choices = response.get("choices") if isinstance(response, Mapping) else None
    if not isinstance(choices, list) or not all(isinstance(one, Mapping) for one in choices):
        return 0, False
    exact = bool(choices) and all(_exact(response, one) for one in choices)
    ids = [one.get("token_ids") for one in choices]
    if ids and all(isinstance(one, list) for one in ids):
        return sum(map(len, ids)), exact
    usage = response.get("usage")
    told = usage.get("completion_tokens") if isinstance(usage, Mapping) else 0
    return (told if isinstance(told, int) else 0), False


def _exact(response: Mapping[str, Any], choice: Mapping[str, Any]) -> bool:
    """Whether a choice tells its tokens exactly."""
    ids, prompt = choice.get("token_ids"), response.get("prompt_token_ids") or choice.get("prompt_token_ids")
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, Mapping):
        logprobs = logprobs.get("content") or logprobs.get("token_logprobs")
    if not (isinstance(ids, list) and isinstance(prompt, list) and isinstance(logprobs, list)):
        return False
    return bool(prompt) and len(ids) == len(logprobs) and all(type(one) is int for one in ids)


def _lost(request: dict[str, Any], why: str) -> dict[str, Any]:
    """A call without an answer."""
    return {"request": request, "error": shown(why)[:1000]}


def _readable(calls: list[dict[str, Any]]) -> str | None:
    """Why calls cannot be read; None where they can."""
    try:
        Traces.from_records([{"calls": calls}])
    except TracegradError as error:
        return str(error)
    return None
