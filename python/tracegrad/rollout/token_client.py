"""Token in, token out: the policy is asked with ids, and no sampled token is ever tokenised again.

Prompts are a `Conversation`'s, over /inference/v1/generate; the message is what /v1/chat/completions/derender parses.
What comes back is a chat completion with ids, so that contracts and records know no difference. `play` calls this.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from tracegrad.alignment.conversation import Conversation
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import nearest
from tracegrad.errors import ArgumentError
from tracegrad.rollout.policy import NoAnswer, said

if TYPE_CHECKING:
    from tracegrad.rollout.client import Servers

GENERATE, DERENDER = "/inference/v1/generate", "/v1/chat/completions/derender"
FLAG = "--enable-scale-out"
# Fields of a chat request that are sampling parameters by the same name.
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop_token_ids", "logit_bias", "bad_words", "ignore_eos", "seed",
)  # fmt: skip
# What is sent to the parsers, and what every answer has whether it is asked or not.
PARSED = ("messages", "tools", "tool_choice", "chat_template_kwargs")
ALWAYS = ("logprobs", "top_logprobs", "return_token_ids", "model", "max_completion_tokens")
# Ends of conversations that a trajectory may go on from: calls that are made again on an earlier history.
ENDS = 8


class Tokens:
    """Servers that are asked with ids; passed to `play` as its `chat`.

    Args:
        servers: started with --enable-scale-out; `check` asks them.
        tokenizer: of the served model, with its chat template.

    >>> async def example(servers, tokenizer):
    ...     tokens = Tokens(servers, tokenizer)
    ...     await tokens.check()
    ...     return await play(with_tools([price]), task, chat=tokens)
    """

    def __init__(self, servers: Servers, tokenizer: Tokenizer) -> None:
        self.servers = servers
        self.tokenizer = tokenizer

    async def check(self) -> None:
        """Asks whether every server has the two paths.

        Raises:
            ArgumentError: for one that has not, with the flag that it needs.
        """
        for path in (GENERATE, DERENDER):
            answers = await self.servers.each(path, {})
            for url, answer in zip(self.servers.urls, answers, strict=True):
                # A server that knows the path finds fault with the empty body.
                if answer.status in (400, 422):
                    continue
                raise ArgumentError(
                    f"{url}{path} answered {answer.words}. Ids cannot be sent to a server without this path. Start it "
                    f"with {FLAG}, or ask by chat."
                )

    def trajectory(self) -> Trajectory:
        """The chat of one trajectory."""
        return Trajectory(self)

    async def __call__(self, body: dict[str, Any], *, session: str, salt: str | None) -> dict[str, Any]:
        """One call that belongs to no trajectory."""
        return await self.trajectory()(body, session=session, salt=salt)


class Trajectory:
    """The conversations of one trajectory: a request goes on in the one whose messages it begins with."""

    def __init__(self, tokens: Tokens) -> None:
        self._servers, self._tokenizer = tokens.servers, tokens.tokenizer
        self._ends: list[tuple[Any, Conversation]] = []

    async def __call__(self, body: dict[str, Any], *, session: str, salt: str | None) -> dict[str, Any]:
        """The answer to a chat request, as a chat completion with `prompt_token_ids` and `token_ids`.

        Raises:
            ArgumentError: for what a request with ids cannot say, such as stop strings.
            ServerError, NoAnswer: the servers gave nothing to go on with.
        """
        params = sampling_params(body)
        scaffold, talk = self._begun(body)
        prompt = talk.prompt_ids().tolist()
        asked = {"token_ids": prompt, "sampling_params": params}
        choice = sampled(await self._servers.post(GENERATE, asked, session=session, salt=salt))
        answer = await self._message(body, prompt, choice, session)
        message = said(answer)
        message.pop("finish_reason")
        talk.append(choice["token_ids"], message)
        self._ends = [*self._ends[1 - ENDS :], (scaffold, talk)]
        return recorded(answer, prompt, choice)

    def _begun(self, body: Mapping[str, Any]) -> tuple[Any, Conversation]:
        """The conversation that a request continues, or a new one; and its tools and template variables."""
        messages = list(body["messages"])
        scaffold = (body.get("tools"), body.get("chat_template_kwargs"))
        ends = [talk for own, talk in self._ends if own == scaffold and len(talk) <= len(messages)]
        known = [talk for talk in ends if talk.messages == messages[: len(talk)]]
        if not known:
            tools, kwargs = scaffold
            return scaffold, Conversation(self._tokenizer, messages, tools, **(kwargs or {}))
        longest = max(known, key=len)
        # A copy, as another call may go on from there too.
        return scaffold, copy(longest).append(messages[len(longest) :])

    async def _message(
        self, body: Mapping[str, Any], prompt: list[int], choice: dict[str, Any], session: str
    ) -> dict[str, Any]:
        """What the server's parsers make of the sampled ids: a chat completion."""
        ids = choice["token_ids"]
        # The text of the stop token would stand in the content.
        by_token = choice.get("finish_reason") == "stop" and not isinstance(choice.get("stop_reason"), str)
        if not (shown := ids[:-1] if by_token else ids):
            return {"object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": ""}}]}
        generated = {"choices": [{"index": 0, "token_ids": shown}], "prompt_token_ids": prompt}
        told = {key: body[key] for key in PARSED if body.get(key) is not None}
        asked = {"generate_response": generated, "chat_request": told, "prompt_tokens": len(prompt)}
        return await self._servers.post(DERENDER, asked, session=session)


def sampling_params(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a chat request says.

    >>> sampling_params({"messages": [], "temperature": 1.0, "max_completion_tokens": 8, "logprobs": True})
    {'temperature': 1.0, 'max_tokens': 8, 'logprobs': 0}
    """
    for key, value in body.items():
        passed = key in SAMPLING or key in PARSED or key in ALWAYS
        if passed and not (key == "tool_choice" and value not in ("auto", "none", None)):
            continue
        if value is None or value is False or (key == "n" and value == 1):
            continue
        raise ArgumentError(
            f"the request says {key}={value!r:.100}, which a request with ids cannot say. It would have no effect. "
            + (f"{nearest(key, SAMPLING)} " if not passed else "")
            + "Leave it out, or ask by chat."
        )
    params = {key: body[key] for key in SAMPLING if body.get(key) is not None}
    if body.get("max_completion_tokens") is not None:
        params["max_tokens"] = body["max_completion_tokens"]
    top = body.get("top_logprobs")
    return {**params, "logprobs": top if isinstance(top, int) else 0}


def sampled(response: Any) -> dict[str, Any]:
    """The choice of a generate response, with `logprobs` as a list of floats."""
    try:
        [choice] = response["choices"]
        ids = choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]] if ids else []
        exact = all(type(one) is int for one in ids) and all(isinstance(one, float | int) for one in logprobs)
        if exact and len(ids) == len(logprobs):
            return {**choice, "token_ids": ids, "logprobs": logprobs}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        pass
    found = repr(response)
    raise NoAnswer(
        f"a server answered {found[:200]}, which holds no ids with a logprob each. There is nothing to go on with. "
        "Look at the server's log."
    )


def recorded(answer: Mapping[str, Any], prompt: list[int], choice: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed answer with its tokens, as `tracegrad.read` takes chat completions; versions as SGLang writes them."""
    [parsed] = answer["choices"]
    listed = zip(choice["token_ids"], choice["logprobs"], strict=True)
    content = [{"token": f"token_id:{id}", "logprob": logprob} for id, logprob in listed]
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
    if spans := [span for span in choice.get("weight_versions") or () if _numbered(span)]:
        response["metadata"] = {"weight_versions": spans}
    return response


def _numbered(span: Any) -> bool:
    """Whether a span says which version it is of; a server to which none was pushed says "default"."""
    return isinstance(span, Mapping) and str(span.get("version")).removeprefix("v").isdecimal()
