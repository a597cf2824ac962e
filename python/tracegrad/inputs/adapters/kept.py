"""Messages that keep the response they came in: it stands in the place of the message, with its logprobs and ids.

Source: mini-swe-agent 2's trajectories (`extra.response`, of litellm).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TOLD = ("token_ids", "logprobs")


def of_talk(record: Any) -> list[dict[str, Any]] | None:
    """The record with these responses among its messages; None where no message has one that says its tokens."""
    talk = record.get("messages") if isinstance(record, Mapping) else None
    if not isinstance(talk, list):
        return None
    held = [_response(each) for each in talk]
    if not any(_says_tokens(each) for each in held):
        return None
    messages = [_plain(each) if response is None else response for each, response in zip(talk, held, strict=True)]
    return [{**_sampling(record.get("info")), **record, "messages": messages}]


def _response(message: Any) -> Mapping[str, Any] | None:
    """The response of one choice that an assistant's message keeps."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return None
    extra = message.get("extra")
    response = extra.get("response") if isinstance(extra, Mapping) else None
    choices = response.get("choices") if isinstance(response, Mapping) else None
    alone = isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], Mapping)
    return response if alone else None


def _says_tokens(response: Mapping[str, Any] | None) -> bool:
    return response is not None and any(response["choices"][0].get(key) for key in _TOLD)


def _plain(message: Any) -> Any:
    """A message without what its program noted of it, which no template knows."""
    return {key: value for key, value in message.items() if key != "extra"} if isinstance(message, Mapping) else message


def _sampling(info: Any) -> dict[str, Any]:
    """The temperature of mini-swe-agent's config of the model."""
    for key in ("config", "model", "model_kwargs"):
        info = info.get(key) if isinstance(info, Mapping) else None
    told = info if isinstance(info, Mapping) else {}
    return {key: told[key] for key in ("temperature", "top_p") if isinstance(told.get(key), (int, float))}
