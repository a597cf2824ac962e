"""Which options of a request make its tokens follow another distribution than the one that the trainer computes.

The trainer computes softmax(logits / temperature), with the recorded temperature if the logprobs are processed ones and
with 1 if they are raw. `doctor` reports requests outside that, and the online loop refuses them: both call `mismatch`.
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

COLDEST = 0.01
"""The lowest temperature that is sampled at: vLLM raises those below to it, and takes 0 as greedy decoding."""
_TABLE = _core.sampling_options()
OPTIONS = tuple(name for name, _, _ in _TABLE)
"""Names of sampling options but temperature, as vLLM or OpenAI write them: bit b of `Sequences.reshaped` is
OPTIONS[b]."""
_NAMED: Mapping[str, str] = {each: name for name, spelled, _ in _TABLE for each in (name, *spelled)}
OFF: Mapping[str, tuple[float, ...]] = {
    each: tuple(off) for name, spelled, off in _TABLE if off is not None for each in (name, *spelled)
}
"""Numbers that cut off, scale or move what is sampled, in every spelling, with the values at which they do nothing."""
SPELLED = tuple(name for name in _NAMED if name != "top_p")
"""Every name of an option but temperature and top_p, in every spelling."""
TRUNCATING = ("top_p", "top_k", "min_p", "typical_p", "tfs_z", "top_a", "top_n_sigma", "epsilon_cutoff", "eta_cutoff")
"""Options that cut off tokens: what is left has the kept mass S, and a token was drawn with its probability / S."""
MASKS = (
    *("logit_bias", "allowed_token_ids", "bad_words", "thinking_token_budget", "watermarking"),
    *("logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs", "extra_args"),
    *("trace_decode_token_ids", "use_beam_search", "watermark"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
    *("guided_decoding_backend", "structural_tag", "json_schema", "regex", "ebnf", "grammar"),
)
"""What forbids, forces or favours some tokens, if it is there and not empty."""
NEUTRAL: Mapping[str, Any] = {
    **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
}
"""What vLLM takes from the model's generation_config.json if a request does not set it, at the values that do nothing.
For top_k vLLM and SGLang both take -1; SGLang refuses 0."""
UNCUT = 0.9995
"""Mean of p over its recorded probability from which a recording is of the uncut distribution."""
GENERATION_CONFIG = "generation_config.json"
ACCEPT = "accept_truncated_sampling"
"""The option of `[data]` that trains on logprobs of another distribution than the sampled one."""


def mismatch(request: Mapping[str, Any], logprob_kind: str) -> dict[str, Any]:
    """Return the options of a request, by name, under which the ratio theta/rollout would compare unlike distributions.

    Args:
        request: fields of a completion request, or of sampling parameters; null is not set.
        logprob_kind: "raw", "processed" (after temperature) or "unknown": of the logprobs that answer it.

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
    """Return the mean and the least kept mass S of tokens that top_p, top_k and the like cut.

    S is what a cut leaves of the distribution: a token of probability p was drawn with p / S, so that p over its
    processed probability is S.

    Args:
        logprobs: [M] nats of the weights that sampled, over the whole vocabulary.
        rollout: [M] recorded nats, NaN if missing.
        reshaped: [M] bits, as in `Sequences`; tokens with an option that does more than cut are left out.
        processed: [M] whether `rollout` is of the distribution that was sampled from.

    Returns:
        None if there is no such token, or if the numbers are of the uncut distribution, as SGLang's are.

    >>> one = np.ones(2)
    >>> kept_mass(np.log(0.4 * one), np.log(np.array([0.5, 0.4])), np.array([1, 0]), one > 0)
    (0.8, 0.8)
    """
    more = sum(1 << bit for bit, name in enumerate(OPTIONS) if name not in TRUNCATING)
    here = (reshaped != 0) & (reshaped & more == 0) & processed & ~np.isnan(logprobs) & ~np.isnan(rollout)
    if not here.any():
        return None
    mass = np.exp(logprobs[here].astype(np.float64) - rollout[here])
    return (round(float(mass.mean()), 9), round(float(mass.min()), 9)) if mass.mean() < UNCUT else None


def model_defaults(folder: Path) -> dict[str, Any]:
    """Return what a server takes from a model's generation_config.json if a request leaves it out.

    Returns:
        temperature, top_p and the other options that change the distribution, by name; {} if there is no such file.
    """
    try:
        told = read_json(folder / GENERATION_CONFIG)
    except (OSError, ValueError):
        return {}
    told = told if isinstance(told, dict) else {}
    found = {name: told[name] for name in ("temperature", *NEUTRAL) if told.get(name) is not None}
    return {
        name: value for name, value in found.items() if (name == "temperature" and value != 1) or _is_on(name, value)
    }


def refused_fields(words: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of some fields that a server's refusal names.

    >>> refused_fields("Unrecognized request argument supplied: top_k", ["top_k", "min_p"])
    ('top_k',)
    """
    return tuple(name for name in names if re.search(rf"\b{re.escape(name)}\b", words))


def several(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request, by name, with which its answer is not one sampled continuation of one prompt.

    >>> several({"n": 2, "best_of": 1, "echo": False}), several({"prompt": ["a", "b"]})
    ({'n': 2}, {'prompt': ['a', 'b']})
    """
    found = {name: request[name] for name in ("n", "best_of") if request.get(name) not in (None, 1)}
    found |= {name: request[name] for name in ("use_beam_search", "echo") if request.get(name)}
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(type(each) is int for each in prompt):
        found["prompt"] = prompt
    return found


def refusal(request: Mapping[str, Any], logprob_kind: str | None) -> str | None:
    """Return why a request cannot be recorded, or trained on; None if it can.

    Args:
        request: fields of a completion request.
        logprob_kind: as for `mismatch`; None if nothing is trained on the answer.
    """
    if wrong := several(request):
        return (
            f"the request sets {options(wrong)}. A trajectory has one sampled answer to each call; the others would be "
            "lost, or come without the ids that were sampled. Leave it out, and call once for each answer."
        )
    if logprob_kind is None or not (wrong := mismatch(request, logprob_kind)):
        return None
    if list(wrong) == ["temperature"] and logprob_kind != "processed":
        return (
            f"the request sets {options(wrong)}, and the servers' logprobs are {logprob_kind}: of temperature 1. The "
            "ratio of the policy to what was sampled would be wrong. Start the servers with --logprobs-mode "
            "processed_logprobs, or sample at temperature 1."
        )
    return (
        f"the request sets {options(wrong)}. The trainer computes the whole distribution at the request's temperature, "
        "and the ratio to tokens that were drawn from another one would be wrong. Leave it out."
    )


def options(values: Mapping[str, Any]) -> str:
    """Return options as a line, each cut to 40 characters.

    >>> options({"n": 2, "logit_bias": {"5": 1}})
    "n=2, logit_bias={'5': 1}"
    """
    return ", ".join(f"{name}={value!r:.40}" for name, value in values.items())


def _hot(request: Mapping[str, Any], logprob_kind: str) -> bool:
    heat = request["temperature"]
    return heat != 1 and (logprob_kind != "processed" or not isinstance(heat, int | float) or heat < COLDEST)


def _formatted(request: Mapping[str, Any], _: str) -> bool:
    told = request["response_format"]
    return not isinstance(told, Mapping) or told.get("type") != "text"


def _forced(request: Mapping[str, Any], _: str) -> bool:
    return request["tool_choice"] not in ("auto", "none")


def _strict(request: Mapping[str, Any], _: str) -> bool:
    """Whether a tool has `strict`, for which vLLM keeps its call to a grammar."""
    tools = request["tools"] if isinstance(request["tools"], list) else []
    objects = [inner for tool in tools if isinstance(tool, Mapping) for inner in (tool, tool.get("function"))]
    strict = any(isinstance(each, Mapping) and each.get("strict") is True for each in objects)
    return strict and request.get("tool_choice") != "none"


def _is_on(name: str, value: Any) -> bool:
    """Whether an option of the core's table does something at a value."""
    return name in _NAMED and not _core.sampling_option_is_off(_NAMED[name], json.dumps(value, default=str))


def _on(name: str) -> Callable[[Mapping[str, Any], str], bool]:
    return lambda request, _: _is_on(name, request[name])


def _there(name: str) -> Callable[[Mapping[str, Any], str], bool]:
    return lambda request, _: request[name] is not False and request[name] not in ({}, [], "")


_OPTIONS: Mapping[str, Callable[[Mapping[str, Any], str], bool]] = {
    "temperature": _hot,
    **{name: _on(name) for name in _NAMED},
    **{name: _there(name) for name in MASKS if name not in _NAMED},
    "response_format": _formatted,
    "tool_choice": _forced,
    "tools": _strict,
}
