"""Token in, token out: requests contain token ids, so no sampled token is tokenised again.

Prompts come from a `Conversation` and are sent to /inference/v1/generate. /v1/chat/completions/derender parses the
sampled ids into a message. The result is a chat completion with ids, so contracts and records work as with chat
requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from tracegrad.alignment.conversation import Conversation
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import nearest
from tracegrad.errors import ArgumentError
from tracegrad.rollout.policy import NoAnswer, message_of

if TYPE_CHECKING:
    from tracegrad.rollout.client import Servers

GENERATE, DERENDER = "/inference/v1/generate", "/v1/chat/completions/derender"
FLAG = "--enable-scale-out"
# Sampling parameters with the same name in a chat request.
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop_token_ids", "logit_bias", "bad_words", "ignore_eos", "seed",
)  # fmt: skip
# Fields that are sent to the parsers, and fields that every answer has, requested or not.
PARSED = ("messages", "tools", "tool_choice", "chat_template_kwargs")
ALWAYS = (
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "model",
    "max_completion_tokens",
)
# Number of recent conversations kept, since a call may be repeated on an earlier history.
MAX_CONVERSATIONS = 8


class Tokens:
    """Servers that receive token ids; passed to `run_rollout` as `chat`.

    Args:
        servers: servers started with --enable-scale-out, which `check` tests.
        tokenizer: tokenizer of the served model, with its chat template.

    >>> from tracegrad.rollout import one_turn, run_rollout
    >>> async def ask(servers: Servers, tokenizer: Tokenizer):
    ...     tokens = Tokens(servers, tokenizer)
    ...     await tokens.check()
    ...     return await run_rollout(one_turn(), "2+2?", chat=tokens)
    """

    def __init__(self, servers: Servers, tokenizer: Tokenizer) -> None:
        self.servers = servers
        self.tokenizer = tokenizer

    async def check(self) -> None:
        """Test that every server has both paths.

        Raises:
            ArgumentError: for a server without them; the message names the flag that it needs.
        """
        for path in (GENERATE, DERENDER):
            answers = await self.servers.request_all(path, {})
            for url, answer in zip(self.servers.urls, answers, strict=True):
                # A server with this path rejects the empty body.
                if answer.status in (400, 422):
                    continue
                raise ArgumentError(
                    f"TG-ROLLOUT-039: {url}{path} answered {answer.words}. Token ids need a server with this path. "
                    f'Start it with {FLAG}, or set rollout.input to "messages".'
                )

    def trajectory(self) -> Trajectory:
        """Return the chat function of one trajectory."""
        return Trajectory(self)

    async def __call__(self, body: dict[str, Any], *, session: str, salt: str | None) -> dict[str, Any]:
        """Send one call that belongs to no trajectory."""
        return await self.trajectory()(body, session=session, salt=salt)


class Trajectory:
    """The conversations of one trajectory; a request continues the one whose messages it starts with."""

    def __init__(self, tokens: Tokens) -> None:
        self._servers, self._tokenizer = tokens.servers, tokens.tokenizer
        self._conversations: list[tuple[Any, Conversation]] = []

    async def __call__(self, body: dict[str, Any], *, session: str, salt: str | None) -> dict[str, Any]:
        """Answer a chat request with a chat completion that has `prompt_token_ids` and `token_ids`.

        Raises:
            ArgumentError: for fields that a request with ids does not support, such as stop strings.
            ServerError, NoAnswer: the servers returned no usable answer.
        """
        params = sampling_params(body)
        scaffold, conversation = self._continue_conversation(body)
        prompt = conversation.prompt_ids().tolist()
        request = {"token_ids": prompt, "sampling_params": params}
        choice = parse_choice(await self._servers.post(GENERATE, request, session=session, salt=salt))
        answer = await self._message(body, prompt, choice, session)
        message = message_of(answer)
        message.pop("finish_reason")
        conversation.append(choice["token_ids"], message)
        self._conversations = [*self._conversations[1 - MAX_CONVERSATIONS :], (scaffold, conversation)]
        return chat_completion_of(answer, prompt, choice)

    def _continue_conversation(self, body: Mapping[str, Any]) -> tuple[Any, Conversation]:
        """Return the conversation that a request continues, or a new one, with its tools and template variables."""
        messages = list(body["messages"])
        scaffold = (body.get("tools"), body.get("chat_template_kwargs"))
        ends = [
            conversation
            for key, conversation in self._conversations
            if key == scaffold and len(conversation) <= len(messages)
        ]
        matches = [conversation for conversation in ends if conversation.messages == messages[: len(conversation)]]
        if not matches:
            tools, kwargs = scaffold
            return scaffold, Conversation(self._tokenizer, messages, tools, **(kwargs or {}))
        longest = max(matches, key=len)
        # Copy it, since another call may continue from it too.
        return scaffold, copy(longest).append(messages[len(longest) :])

    async def _message(
        self, body: Mapping[str, Any], prompt: list[int], choice: dict[str, Any], session: str
    ) -> dict[str, Any]:
        """Return the chat completion that the server's parsers make from the sampled ids."""
        ids = choice["token_ids"]
        # The content would otherwise contain the text of the stop token.
        ends_with_stop_token = choice.get("finish_reason") == "stop" and not isinstance(choice.get("stop_reason"), str)
        if not (visible := ids[:-1] if ends_with_stop_token else ids):
            return {"object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": ""}}]}
        generated = {"choices": [{"index": 0, "token_ids": visible}], "prompt_token_ids": prompt}
        chat_request = {key: body[key] for key in PARSED if body.get(key) is not None}
        request = {"generate_response": generated, "chat_request": chat_request, "prompt_tokens": len(prompt)}
        return await self._servers.post(DERENDER, request, session=session)


def sampling_params(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a chat request.

    >>> sampling_params({"messages": [], "temperature": 1.0, "max_completion_tokens": 8, "logprobs": True})
    {'temperature': 1.0, 'max_tokens': 8, 'logprobs': 0}

    Raises:
        ArgumentError: for a field that a request with ids does not support.
    """
    for key, value in body.items():
        is_supported = key in SAMPLING or key in PARSED or key in ALWAYS
        if is_supported and not (key == "tool_choice" and value not in ("auto", "none", None)):
            continue
        if value is None or value is False or (key == "n" and value == 1):
            continue
        raise ArgumentError(
            f"TG-ROLLOUT-040: the request sets {key}={value!r:.100}, which has no effect in a request with token ids. "
            + (f"{nearest(key, SAMPLING)} " if not is_supported else "")
            + 'Remove it, or set rollout.input to "messages".'
        )
    params = {key: body[key] for key in SAMPLING if body.get(key) is not None}
    if body.get("max_completion_tokens") is not None:
        params["max_tokens"] = body["max_completion_tokens"]
    top_logprobs = body.get("top_logprobs")
    return {**params, "logprobs": top_logprobs if isinstance(top_logprobs, int) else 0}


def parse_choice(response: Any) -> dict[str, Any]:
    """Return the choice of a generate response, with `logprobs` as a list of floats and a list of `top_logprobs`.

    Raises:
        NoAnswer: if the response has no ids with a logprob each.
    """
    try:
        [choice] = response["choices"]
        ids = choice["token_ids"]
        entries = choice["logprobs"]["content"] if ids else []
        logprobs = [entry["logprob"] for entry in entries]
        exact = all(type(value) is int for value in ids) and all(isinstance(value, float | int) for value in logprobs)
        if exact and len(ids) == len(logprobs):
            top = [entry.get("top_logprobs") or [] for entry in entries]
            return {**choice, "token_ids": ids, "logprobs": logprobs, "top_logprobs": top}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        pass
    text = repr(response)
    raise NoAnswer(
        f"TG-ROLLOUT-041: a server answered {text[:200]}, without token ids and a logprob for each. Read the server's "
        "log."
    )


def chat_completion_of(answer: Mapping[str, Any], prompt: list[int], choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed answer with its tokens, in the format of chat completions that `tracegrad.read` reads.

    Weight versions are written as SGLang does.
    """
    [parsed] = answer["choices"]
    columns = zip(choice["token_ids"], choice["logprobs"], choice["top_logprobs"], strict=True)
    content = [
        {"token": f"token_id:{id}", "logprob": logprob, **({"top_logprobs": top} if top else {})}
        for id, logprob, top in columns
    ]
    reason = choice.get("finish_reason")
    if reason == "stop" and parsed["message"].get("tool_calls"):
        reason = "tool_calls"
    tokens = {
        "finish_reason": reason,
        "stop_reason": choice.get("stop_reason"),
        "token_ids": choice["token_ids"],
        "logprobs": {"content": content},
    }
    response = {**answer, "prompt_token_ids": prompt, "choices": [{**parsed, "index": 0, **tokens}]}
    if spans := [span for span in choice.get("weight_versions") or () if _has_version(span)]:
        response["metadata"] = {"weight_versions": spans}
    return response


def _has_version(span: Any) -> bool:
    """Return whether a span has a numbered version; a server that got no weight sync reports "default"."""
    return isinstance(span, Mapping) and str(span.get("version")).removeprefix("v").isdecimal()
