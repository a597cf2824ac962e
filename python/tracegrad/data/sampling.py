"""Detect sampling options for which tokens follow another distribution than the one that the trainer computes.

The trainer computes softmax(logits / temperature), with the recorded temperature if the logprobs are processed and with
1 if they are raw. `doctor` reports requests with other options, and the online loop refuses them. Both call `mismatch`.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core
from tracegrad.storage.files import read_json

MIN_TEMPERATURE = 0.01
"""The lowest temperature of vLLM: it raises lower ones to this value, and treats 0 as greedy decoding."""
_TABLE = _core.sampling_options()
OPTIONS = tuple(option["name"] for option in _TABLE)
"""Names of sampling options except temperature, as in vLLM or OpenAI. Bit b of `Sequences.reshaped` is OPTIONS[b]."""
CANONICAL_NAMES: Mapping[str, str] = {
    spelling: option["name"] for option in _TABLE for spelling in (option["name"], *option["spellings"])
}
NEUTRAL_VALUES: Mapping[str, tuple[float, ...]] = {
    spelling: tuple(option["neutral_values"])
    for option in _TABLE
    if option["neutral_values"] is not None
    for spelling in (option["name"], *option["spellings"])
}
"""Numeric options that truncate, scale or shift the distribution, in every spelling, with their neutral values."""
OPTION_SPELLINGS = tuple(name for name in CANONICAL_NAMES if name != "top_p")
"""Every spelling of every option except temperature and top_p."""
TRUNCATING = ("top_p", "top_k", "min_p", "typical_p", "tfs_z", "top_a", "top_n_sigma", "epsilon_cutoff", "eta_cutoff")
"""Options that truncate the distribution: the kept tokens have mass S, and a token was drawn with probability / S."""
REPLAYED = ("top_p", "top_k", "min_p")
"""Options whose effect is replayed if the record lists the ids that they keep (`Sequences.support`)."""
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""Options whose effect is replayed if the logprobs are processed (`Sequences.penalties`); and so is that of logit_bias.
"""
MASKS = (
    *("logit_bias", "allowed_token_ids", "bad_words", "thinking_token_budget", "watermarking"),
    *("logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs", "extra_args"),
    *("trace_decode_token_ids", "use_beam_search", "watermark"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
    *("guided_decoding_backend", "structural_tag", "json_schema", "regex", "ebnf", "grammar"),
)
"""Options that forbid, force or favour some tokens if they are set and not empty."""
NEUTRAL: Mapping[str, Any] = {
    **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
}
"""Neutral values of the options that vLLM reads from the model's generation_config.json if a request does not set them.
vLLM and SGLang both accept -1 for top_k; SGLang refuses 0."""
UNTRUNCATED_MASS = 0.9995
"""If the mean of p / recorded probability is at least this, the recorded logprobs are not of the truncated
distribution."""
GENERATION_CONFIG = "generation_config.json"
ACCEPT = "accept_truncated_sampling"
"""The option of `[data]` that allows training on logprobs of another distribution than the sampled one."""


def mismatch(request: Mapping[str, Any], logprob_kind: str) -> dict[str, Any]:
    """Return the options of a request, by name, for which the ratio theta/rollout compares different distributions.

    Args:
        request: fields of a completion request, or of sampling parameters; null means not set.
        logprob_kind: kind of the logprobs in the response: "raw", "processed" (after temperature) or "unknown".

    >>> mismatch({"temperature": 0.7, "top_p": 1, "top_k": -1}, "processed")
    {}
    >>> mismatch({"temperature": 0.7, "top_p": 0.8, "response_format": {"type": "text"}}, "raw")
    {'temperature': 0.7, 'top_p': 0.8}
    """
    return {
        name: request[name]
        for name, reshapes in _OPTIONS.items()
        if request.get(name) is not None and reshapes(request, logprob_kind)
    }


def options_on(bits: int) -> tuple[str, ...]:
    """Return the names of the options whose bits are set, as in `Sequences.reshaped`.

    >>> options_on(0b11)
    ('top_p', 'top_k')
    """
    return tuple(name for bit, name in enumerate(OPTIONS) if bits >> bit & 1)


def kept_mass(
    logprobs: NDArray[np.floating[Any]],
    rollout: NDArray[np.floating[Any]],
    reshaped: NDArray[np.integer[Any]],
    processed: NDArray[np.bool_],
) -> tuple[float, float] | None:
    """Return the mean and the minimum of the kept mass S of tokens sampled with truncation (top_p, top_k, ...).

    S is the mass of the distribution that truncation keeps. A token of probability p was drawn with p / S, so p over
    its processed probability is S.

    Args:
        logprobs: [M] nats of the sampling weights, over the full vocabulary.
        rollout: [M] recorded nats, NaN if missing.
        reshaped: [M] bits, as in `Sequences`. Tokens with an option other than truncation are left out.
        processed: [M] whether `rollout` is of the distribution that was sampled from.

    Returns:
        (mean, minimum), or None if there is no such token, or if the recorded logprobs are of the distribution before
        truncation, as SGLang's are.

    >>> one = np.ones(2)
    >>> kept_mass(np.log(0.4 * one), np.log(np.array([0.5, 0.4])), np.array([1, 0]), one > 0)
    (0.8, 0.8)
    """
    other_bits = sum(1 << bit for bit, name in enumerate(OPTIONS) if name not in TRUNCATING)
    selected = (reshaped != 0) & (reshaped & other_bits == 0) & processed & ~np.isnan(logprobs) & ~np.isnan(rollout)
    if not selected.any():
        return None
    mass = np.exp(logprobs[selected].astype(np.float64) - rollout[selected])
    return (round(float(mass.mean()), 9), round(float(mass.min()), 9)) if mass.mean() < UNTRUNCATED_MASS else None


def model_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling defaults that a server reads from a model's generation_config.json.

    Returns:
        temperature, top_p and the other options that change the distribution, by name; {} if there is no such file.
    """
    try:
        config = read_json(folder / GENERATION_CONFIG)
    except (OSError, ValueError):
        return {}
    config = config if isinstance(config, dict) else {}
    defaults = {name: config[name] for name in ("temperature", *NEUTRAL) if config.get(name) is not None}
    return {
        name: value for name, value in defaults.items() if (name == "temperature" and value != 1) or is_on(name, value)
    }


def fields_in_error(message: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that occur in the error message with which a server refused a request.

    >>> fields_in_error("Unrecognized request argument supplied: top_k", ["top_k", "min_p"])
    ('top_k',)
    """
    return tuple(name for name in names if re.search(rf"\b{re.escape(name)}\b", message))


def multiple_answers(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request, by name, for which its response is not one sampled continuation of one prompt.

    >>> multiple_answers({"n": 2, "best_of": 1, "echo": False}), multiple_answers({"prompt": ["a", "b"]})
    ({'n': 2}, {'prompt': ['a', 'b']})
    """
    options_set = {name: request[name] for name in ("n", "best_of") if request.get(name) not in (None, 1)}
    options_set |= {name: request[name] for name in ("use_beam_search", "echo") if request.get(name)}
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(type(item) is int for item in prompt):
        options_set["prompt"] = prompt
    return options_set


def is_truncated(request: Mapping[str, Any]) -> bool:
    """Return whether a request samples with top_p, top_k or min_p, whose effect `align` can replay.

    >>> is_truncated({"top_p": 0.9}), is_truncated({"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.2})
    (True, False)
    """
    return any(CANONICAL_NAMES.get(name, name) in REPLAYED for name in mismatch(request, "processed"))


def is_text_only(messages: Any) -> bool:
    """Return whether messages contain only text: no images, sound or video."""
    parts = [
        part
        for message in messages or []
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    return all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts)


def refusal_reason(request: Mapping[str, Any], logprob_kind: str | None) -> str | None:
    """Return the reason why a request cannot be recorded or trained on, None if it can.

    A request with top_p, top_k or min_p can be trained on if it asks for `top_logprobs`, which show the kept ids; one
    with penalties or logit_bias, if the logprobs are processed and its messages contain only text.

    Args:
        request: fields of a completion request.
        logprob_kind: as for `mismatch`; None if the response is not trained on.
    """
    if bad := multiple_answers(request):
        return (
            f"the request sets {format_options(bad)}. A trajectory has one sampled answer per call; "
            "other answers would be lost, or have no sampled ids. Leave it out, and send one request per answer."
        )
    if logprob_kind is None or not (bad := mismatch(request, logprob_kind)):
        return None
    lists_ids = type(request.get("top_logprobs")) is int and request["top_logprobs"] > 0
    replayed = [name for name in bad if CANONICAL_NAMES.get(name, name) in REPLAYED]
    if replayed and lists_ids:
        bad = {name: value for name, value in bad.items() if name not in (*replayed, "temperature")}
    penalties = [name for name in bad if CANONICAL_NAMES.get(name, name) in (*PENALTIES, "logit_bias")]
    if logprob_kind == "processed" and is_text_only(request.get("messages")):
        bad = {name: value for name, value in bad.items() if name not in penalties}
    if not bad:
        return None
    if list(bad) == ["temperature"] and logprob_kind != "processed":
        return (
            f"the request sets {format_options(bad)}, and the servers' logprobs are {logprob_kind}: of "
            "temperature 1. The importance ratio would be wrong. Start the servers with --logprobs-mode "
            "processed_logprobs, or sample at temperature 1."
        )
    fixes = []
    if any(name in bad for name in replayed):
        fixes.append(
            "Ask for the kept ids with rollout.top_logprobs (one more than top_k, or enough for what top_p keeps)"
        )
    if any(name in bad for name in penalties):
        fixes.append("Send penalties and logit_bias with text only, to servers with --logprobs-mode processed_logprobs")
    can_replay = {*replayed, *penalties, "temperature"} >= bad.keys()
    return (
        f"the request sets {format_options(bad)}. The trainer computes the full distribution at the request's "
        "temperature, and the ratio to tokens sampled from another one would be wrong. "
        + (f"{'. '.join(fixes)}, or leave it out." if can_replay else "Leave it out.")
    )


def format_options(values: Mapping[str, Any]) -> str:
    """Format options as one line, with each value truncated to 40 characters.

    >>> format_options({"n": 2, "logit_bias": {"5": 1}})
    "n=2, logit_bias={'5': 1}"
    """
    return ", ".join(f"{name}={value!r:.40}" for name, value in values.items())


def _changes_temperature(request: Mapping[str, Any], logprob_kind: str) -> bool:
    temperature = request["temperature"]
    return temperature != 1 and (
        logprob_kind != "processed" or not isinstance(temperature, int | float) or temperature < MIN_TEMPERATURE
    )


def _has_response_format(request: Mapping[str, Any], _: str) -> bool:
    response_format = request["response_format"]
    return not isinstance(response_format, Mapping) or response_format.get("type") != "text"


def _forces_tool_call(request: Mapping[str, Any], _: str) -> bool:
    return request["tool_choice"] not in ("auto", "none")


def _has_strict_tool(request: Mapping[str, Any], _: str) -> bool:
    """Return whether a tool has `strict` set, for which vLLM constrains its calls to a grammar."""
    tools = request["tools"] if isinstance(request["tools"], list) else []
    objects = [item for tool in tools if isinstance(tool, Mapping) for item in (tool, tool.get("function"))]
    has_strict = any(isinstance(each, Mapping) and each.get("strict") is True for each in objects)
    return has_strict and request.get("tool_choice") != "none"


def is_on(name: str, value: Any) -> bool:
    """Return whether an option of the core's table changes the distribution at a value."""
    return name in CANONICAL_NAMES and not _core.sampling_option_is_off(
        CANONICAL_NAMES[name], json.dumps(value, default=str)
    )


def _is_active(name: str) -> Callable[[Mapping[str, Any], str], bool]:
    return lambda request, _: is_on(name, request[name])


def _is_set(name: str) -> Callable[[Mapping[str, Any], str], bool]:
    return lambda request, _: request[name] is not False and request[name] not in ({}, [], "")


_OPTIONS: Mapping[str, Callable[[Mapping[str, Any], str], bool]] = {
    "temperature": _changes_temperature,
    **{name: _is_active(name) for name in CANONICAL_NAMES},
    **{name: _is_set(name) for name in MASKS if name not in CANONICAL_NAMES},
    "response_format": _has_response_format,
    "tool_choice": _forces_tool_call,
    "tools": _has_strict_tool,
}
