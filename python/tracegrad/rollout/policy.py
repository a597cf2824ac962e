"""Policy of a rollout: a recorded chat call, or a recording address for agents with their own client.

It enforces the limits on turns and tokens.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tracegrad.errors import ArgumentError, RefusedFields, TracegradError
from tracegrad.rollout.session import Call, Message, Session


class Chat(Protocol):
    """Function that sends a chat completions request and returns the response, as JSON.

    Requests of a session go to one server.
    """

    def __call__(self, body: dict[str, Any], *, session: str, salt: str | None) -> Awaitable[dict[str, Any]]: ...


class LimitReached(TracegradError):
    """An episode needs more turns or tokens than its limit; `which` is "turns" or "tokens".

    >>> import asyncio
    >>> async def chat(request, **_):  # in place of `Servers.chat`
    ...     return {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]}
    >>> async def ask_twice(policy):
    ...     for question in ("2+2?", "Sure?"):
    ...         await policy.chat([{"role": "user", "content": question}])
    >>> try:
    ...     asyncio.run(ask_twice(Policy(Session("a"), chat, limits=Limits(max_turns=1))))
    ... except LimitReached as error:
    ...     print(error.which, error.code)
    turns TG-ROLLOUT-055
    """

    def __init__(self, which: str, words: str) -> None:
        super().__init__(words)
        self.which = which


class NoAnswer(TracegradError):
    """A server's answer contains no message.

    >>> try:
    ...     # `Policy.chat` calls it with the response of a server
    ...     message_of({"choices": []})
    ... except NoAnswer as error:
    ...     print(error.code)
    TG-ROLLOUT-028
    """


@dataclass(frozen=True)
class Limits:
    """Limits of one trajectory.

    Args:
        max_turns: maximum number of policy calls.
        max_tokens: maximum number of sampled tokens in all calls together.
        timeout_s: time limit from start to reward.

    >>> Limits(max_turns=4, max_tokens=512)
    Limits(max_turns=4, max_tokens=512, timeout_s=600.0)
    """

    max_turns: int = 32
    max_tokens: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ArgumentError(f"TG-ROLLOUT-025: limits: {name} is {value}. It must be above 0.")


class Policy:
    """Policy that an agent receives together with its task.

    Existing agents use `base_url` and `key`: an OpenAI-compatible address whose calls are recorded in this trajectory.
    `ended` is the limit that was reached, None before that. `counts` counts tool calls by outcome.

    >>> import asyncio
    >>> from tracegrad.rollout import run_rollout
    >>> async def chat(request, **_):  # in place of `Servers.chat`
    ...     return {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]}
    >>> async def agent(task, policy):
    ...     message = await policy.chat([{"role": "user", "content": task}])
    ...     return float(message["content"] == "4")
    >>> asyncio.run(run_rollout(agent, "2+2?", chat=chat)).record["reward"]
    1.0
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
        """Address of the recording proxy for this trajectory, ending in /v1.

        Raises:
            ArgumentError: if no proxy runs.
        """
        return self._proxy_address()[0]

    @property
    def key(self) -> str:
        """Token for `base_url`."""
        return self._proxy_address()[1]

    @property
    def version(self) -> int | None:
        """Version of the weights that the servers have now."""
        return self.session.version

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **sampling: Any
    ) -> Message:
        """Return the policy's next message.

        It has role, content and `finish_reason`, and tool_calls and reasoning if there are any. `finish_reason` is
        removed again when the message is sent back.

        Args:
            messages: the conversation.
            tools: tool schemas, as in requests.
            sampling: request fields that override those of the run.

        Raises:
            LimitReached: no turn or token is left.
            UnfitRequest: an option's answer cannot be recorded or trained on, such as n=2; or top_p in a run.
            ServerError, NoAnswer: the server returned no message.
        """
        if sampling.get("stream"):
            raise ArgumentError(
                "TG-ROLLOUT-026: policy.chat returns complete messages. Remove stream, or use policy.base_url."
            )
        body: dict[str, Any] = {"messages": [without_finish_reason(message) for message in messages], **sampling}
        if tools:
            body["tools"] = list(tools)
        call = self.session.open(body)
        tokens_left = self.tokens_left()
        if tokens_left is not None:
            self.limit_tokens(call.request, tokens_left)
        self.turns += 1
        try:
            response = await self._answer(call)
        except BaseException as error:
            call.fail(f"{type(error).__name__}: {error}")
            raise
        try:
            message = message_of(response)
        except NoAnswer as error:
            call.fail(str(error))
            raise
        call.close(response)
        truncated = message["finish_reason"] == "length"
        if truncated and self.limits.max_tokens is not None and self.session.tokens >= self.limits.max_tokens:
            self.ended = "tokens"
        return message

    async def _answer(self, call: Call) -> dict[str, Any]:
        """Return the server's answer; if it refuses fields that the session filled in, retry without them."""
        while True:
            try:
                return await self._chat(dict(call.request), session=self.sticky, salt=self.salt())
            except RefusedFields as refused:  # noqa: PERF203
                if not call.drop(refused.names):
                    raise

    def tokens_left(self) -> int | None:
        """Return how many tokens may still be sampled; None without a limit.

        Raises:
            LimitReached: no token or no turn is left.
        """
        if self.turns >= self.limits.max_turns:
            self.ended = "turns"
            raise LimitReached(
                "turns", f"TG-ROLLOUT-055: the episode reached its {self.limits.max_turns} turns. Raise max_turns."
            )
        if self.limits.max_tokens is None:
            return None
        if self.session.tokens >= self.limits.max_tokens:
            self.ended = "tokens"
            raise LimitReached(
                "tokens",
                f"TG-ROLLOUT-056: the episode reached its {self.limits.max_tokens} tokens. Raise max_tokens.",
            )
        return self.limits.max_tokens - self.session.tokens

    def salt(self) -> str | None:
        """Return the `cache_salt` for a request that is sent now."""
        return None if self._salt is None else self._salt()

    def set_address(self, address: tuple[str, str] | None) -> None:
        """Set the recording address of this trajectory: base URL and key."""
        self._address = address

    def limit_tokens(self, request: dict[str, Any], left: int) -> None:
        """Limit the sampled tokens of a request to `left`."""
        name = next((name for name in ("max_completion_tokens", "max_output_tokens") if name in request), "max_tokens")
        request[name] = min(request.get(name) or left, left)

    def _proxy_address(self) -> tuple[str, str]:
        if self._address is None:
            raise ArgumentError(
                "TG-ROLLOUT-027: policy.base_url needs a recording proxy, and none is running. Pass proxy= to "
                'run_rollout, or set rollout.input of the run to "messages".'
            )
        return self._address


def message_of(response: Any) -> Message:
    """Return the message of a response in the form that a conversation contains.

    Raises:
        NoAnswer: if the response contains no message.
    """
    try:
        choice = response["choices"][0]
        reply = choice["message"]
        message: Message = {"role": "assistant", "content": reply.get("content")}
        if calls := reply.get("tool_calls"):
            message["tool_calls"] = [dict(call) for call in calls]
        for key in ("reasoning_content", "reasoning"):
            if reply.get(key):
                message[key] = reply[key]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        text = repr(response)
        raise NoAnswer(
            f"TG-ROLLOUT-028: a server answered {text[:200]}, which contains no message. Read the server's log."
        ) from None
    message["finish_reason"] = choice.get("finish_reason")
    return message


def without_finish_reason(message: Mapping[str, Any]) -> Message:
    """Return a message without `finish_reason`, which only answers have."""
    return {key: value for key, value in message.items() if key != "finish_reason"}
