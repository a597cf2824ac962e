"""The policy as an episode sees it: one chat call, recorded; or an address for agents that bring their own client.

Limits of turns and tokens are kept here. Called by whoever writes a contract; made by `play`.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tracegrad.errors import ArgumentError, RefusedFields, TracegradError
from tracegrad.rollout.session import Call, Message, Session


class Chat(Protocol):
    """A chat completions request and its response, as JSON; requests of one session go to one server."""

    def __call__(self, body: dict[str, Any], *, session: str, salt: str | None) -> Awaitable[dict[str, Any]]: ...


class LimitReached(TracegradError):
    """An episode asked for more turns or tokens than it has; `which` is "turns" or "tokens"."""

    def __init__(self, which: str, words: str) -> None:
        super().__init__(words)
        self.which = which


class NoAnswer(TracegradError):
    """A server answered with something that holds no message."""


@dataclass(frozen=True)
class Limits:
    """How long one trajectory may become.

    Args:
        turns: calls of the policy.
        tokens: sampled tokens of all calls together.
        seconds: from its beginning to its reward.
    """

    turns: int = 32
    tokens: int | None = None
    seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in ("turns", "tokens", "seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ArgumentError(f"limits: {name} is {value}. Nothing could be played. Pass more than 0.")


class Policy:
    """What a contract gets beside its task.

    `base_url` and `key` are for agents that exist: an OpenAI-compatible address whose calls are recorded in this
    trajectory. `ended` says which limit was met, None before one is; `counts` are what became of tool calls.
    """

    def __init__(
        self,
        session: Session,
        chat: Chat,
        *,
        limits: Limits | None = None,
        sticky: str | None = None,
        salt: Callable[[], str | None] | None = None,
    ) -> None:
        self.session = session
        self.limits = limits or Limits()
        self.ended: str | None = None
        self.turns = 0
        self.counts: Counter[str] = Counter()
        self._chat = chat
        self.sticky = session.name if sticky is None else sticky
        self._address: tuple[str, str] | None = None
        self._salt = salt

    @property
    def base_url(self) -> str:
        """Of a server that records, ending in /v1.

        Raises:
            ArgumentError: where no proxy runs.
        """
        return self._of_proxy()[0]

    @property
    def key(self) -> str:
        """What the server at `base_url` asks for."""
        return self._of_proxy()[1]

    @property
    def version(self) -> int | None:
        """Of the weights that serve now."""
        return self.session.version

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **sampling: Any
    ) -> Message:
        """The policy's next message: role, content, and where there are any tool_calls and reasoning; and its
        `finish_reason`, which is taken out again where the message is sent back.

        Args:
            messages: the conversation.
            tools: schemas, as requests carry them.
            sampling: fields of the request, before those of the run.

        Raises:
            LimitReached: no turn or token is left.
            UnfitRequest: an option's answer cannot be recorded or trained on, such as n=2; or top_p in a run.
            ServerError, NoAnswer: the server gave no message.
        """
        if sampling.get("stream"):
            raise ArgumentError("policy.chat gives whole messages. Leave out stream, or use policy.base_url.")
        body: dict[str, Any] = {"messages": [sent(message) for message in messages], **sampling}
        if tools:
            body["tools"] = list(tools)
        call = self.session.open(body)
        left = self.left()
        if left is not None:
            self.bound(call.request, left)
        self.turns += 1
        try:
            response = await self._answer(call)
        except BaseException as error:
            call.lose(f"{type(error).__name__}: {error}")
            raise
        try:
            message = said(response)
        except NoAnswer as error:
            call.lose(str(error))
            raise
        call.close(response)
        cut = message["finish_reason"] == "length"
        if cut and self.limits.tokens is not None and self.session.tokens >= self.limits.tokens:
            self.ended = "tokens"
        return message

    async def _answer(self, call: Call) -> dict[str, Any]:
        """The server's answer; a request that it refuses for fields which the session filled in goes without them."""
        while True:
            try:
                return await self._chat(dict(call.request), session=self.sticky, salt=self.salt())
            except RefusedFields as refused:  # noqa: PERF203
                if not call.drop(refused.names):
                    raise

    def left(self) -> int | None:
        """How many tokens may still be sampled; None where there is no limit.

        Raises:
            LimitReached: none, or no turn is left.
        """
        if self.turns >= self.limits.turns:
            self.ended = "turns"
            raise LimitReached("turns", f"the episode has had its {self.limits.turns} turns. Raise limits.turns.")
        if self.limits.tokens is None:
            return None
        if self.session.tokens >= self.limits.tokens:
            self.ended = "tokens"
            raise LimitReached("tokens", f"the episode has had its {self.limits.tokens} tokens. Raise limits.tokens.")
        return self.limits.tokens - self.session.tokens

    def salt(self) -> str | None:
        """The `cache_salt` of a request that is sent now."""
        return None if self._salt is None else self._salt()

    def at(self, address: tuple[str, str] | None) -> None:
        """Says where a proxy records for this trajectory: its base URL and key."""
        self._address = address

    def bound(self, request: dict[str, Any], left: int) -> None:
        """Lets a request sample at most so many tokens."""
        name = next((one for one in ("max_completion_tokens", "max_output_tokens") if one in request), "max_tokens")
        request[name] = min(request.get(name) or left, left)

    def _of_proxy(self) -> tuple[str, str]:
        if self._address is None:
            raise ArgumentError(
                "policy.base_url: no proxy runs, so no agent could be recorded. Pass proxy= to play, or leave a run's "
                'play.ids at "chat".'
            )
        return self._address


def said(response: Any) -> Message:
    """The message of a response, as a conversation carries it on."""
    try:
        choice = response["choices"][0]
        told = choice["message"]
        message: Message = {"role": "assistant", "content": told.get("content")}
        if calls := told.get("tool_calls"):
            message["tool_calls"] = [dict(call) for call in calls]
        for key in ("reasoning_content", "reasoning"):
            if told.get(key):
                message[key] = told[key]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        found = repr(response)
        raise NoAnswer(
            f"a server answered {found[:200]}, which holds no message. There is nothing to go on with. "
            "Look at the server's log."
        ) from None
    message["finish_reason"] = choice.get("finish_reason")
    return message


def sent(message: Mapping[str, Any]) -> Message:
    """A message without what only its answer says."""
    return {key: value for key, value in message.items() if key != "finish_reason"}
