"""Messages that keep the response they came in: it stands in the place of the message, with its logprobs and ids.

Source: mini-swe-agent 2's trajectories (`extra.response`, of litellm).
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.inputs import chat

_TOLD = ("token_ids", "logprobs")


def of_talk(record: Any) -> list[dict[str, Any]] | None:
    """The record with these responses among its messages; None where no message has one that says its tokens."""
    talk = chat.table(record).get("messages")
    if not isinstance(talk, list):
        return None
    held = [_response(each) for each in talk]
    if not any(each["choices"][0].get(key) for each in held if each for key in _TOLD):
        return None
    # What its program noted of a message no template knows.
    plain = [chat.without(each, "extra") if isinstance(each, Mapping) else each for each in talk]
    messages = [each if response is None else response for each, response in zip(plain, held, strict=True)]
    # Where mini-swe-agent's config of the model stands.
    sampling = chat.sampling(chat.within(record, "info.config.model.model_kwargs"))
    return [{**sampling, **record, "messages": messages}]


def _response(message: Any) -> Mapping[str, Any] | None:
    """The response of one choice that an assistant's message keeps."""
    response = chat.table(message.get("extra")).get("response") if chat.role(message) == "assistant" else None
    choices = chat.table(response).get("choices")
    alone = isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], Mapping)
    return response if alone else None
