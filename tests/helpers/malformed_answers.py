"""Give well-formed and malformed answers and stream chunks of a server."""

import json

from proxied import QUESTION

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"

LOGPROBS = {"content": [{"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": []}]}

HEAD = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}

# A value of each wrong kind or size, for fields that take none of them.
ANY = [True, 1.5, -1, 1 << 31, 10**30, 10**400, "x", ["x"], [[]], {"a": 1}]


def chunk(**choice):
    """A chunk of a chat, or of texts if `choice` has one."""
    said = {} if "text" in choice or "delta" in choice else {"delta": {"content": "a"}}
    return {**HEAD, "choices": [{"index": 0, "token_ids": [5], "finish_reason": None, **said, **choice}]}


def wrong(value, *kinds):
    """Those of `ANY` that are of no kind that a field takes."""
    return [one for one in value if not (isinstance(one, kinds) and type(one) is not bool)]


CHUNKS = {
    "choices": [{**HEAD, "choices": value} for value in [None, 5, "abc", {"a": 1}, True, [3], [None], ["x"], [[]]]],
    "many choices": [{**HEAD, "choices": [{}] * 2000}],
    "delta": [chunk(delta=value) for value in wrong(ANY, dict)],
    "content": [chunk(delta={"content": value}) for value in [5, True, {"a": 1}, ["x"]]],
    "role": [chunk(delta={"role": value}) for value in wrong(ANY, str)],
    "logprobs": [chunk(logprobs=value) for value in wrong(ANY, dict)],
    "content of logprobs": [chunk(logprobs={"content": value}) for value in ANY if value != [[]]],
    "a logprob": [chunk(logprobs={"content": [{"token": "a", "logprob": one}]}) for one in [True, 10**400, "x", []]],
    "a token": [chunk(logprobs={"content": [{"token": one, "logprob": -1.0}]}) for one in wrong(ANY, str)],
    "index": [chunk(index=value) for value in ANY],
    "finish_reason": [chunk(finish_reason=value) for value in wrong(ANY, str)],
    "tool_calls": [chunk(delta={"tool_calls": value}) for value in [*ANY, [5], [[1]]]],
    "index of a tool call": [chunk(delta={"tool_calls": [{"index": one}]}) for one in ANY],
    "function": [chunk(delta={"tool_calls": [{"function": one}]}) for one in wrong(ANY, dict)],
    "arguments": [chunk(delta={"tool_calls": [{"function": {"arguments": one}}]}) for one in [5, [1], True]],
    "token_ids": [chunk(token_ids=value) for value in [*ANY, [True], [-1], [1 << 31], [10**30], [1.5], [None]]],
    "prompt_token_ids": [{**chunk(), "prompt_token_ids": value} for value in [*ANY, [True], [10**400]]],
    "usage": [{**chunk(), "usage": value} for value in wrong(ANY, dict)],
    "counts of usage": [{**chunk(), "usage": {"completion_tokens": value}} for value in ANY],
    "names": [{**chunk(), name: value} for name in ("id", "model", "object") for value in wrong(ANY, str)],
}


def event(data):
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def whole_of(chunk):
    """The chunk's fields as a whole answer of a chat has them."""
    told = json.loads(json.dumps(chunk))
    for choice in told["choices"] if isinstance(told["choices"], list) else ():
        if isinstance(choice, dict) and "delta" in choice:
            choice["message"] = choice.pop("delta")
    return told


GOOD = {
    CHAT: [chunk(delta={"role": "assistant", "content": "hi"}, logprobs=LOGPROBS), chunk(logprobs=LOGPROBS)],
    COMPLETIONS: [chunk(text="hi", logprobs={"tokens": ["hi"], "token_logprobs": [-0.5]})] * 2,
    MESSAGES: [{"type": "message_start", "message": {"role": "assistant", "content": [], "id": "m"}}],
    RESPONSES: [{"type": "response.created", "response": {"output": [], "status": "in_progress"}}],
}

ASKED = {**QUESTION, "prompt": "2?", "input": "2?", "logprobs": None}
