"""Which options of a request make its tokens follow another distribution than the one that the trainer computes.

The trainer computes softmax(logits / temperature), with the recorded temperature if the logprobs are processed ones and
with 1 if they are raw. `doctor` reports requests outside that, and the online loop refuses them: both call `mismatch`.
"""

from collections.abc import Callable, Mapping
from typing import Any

COLDEST = 0.01
"""The lowest temperature that is sampled at: vLLM raises those below to it, and takes 0 as greedy decoding."""
_OFF_AT_0 = (
    *("min_p", "top_a", "presence_penalty", "frequency_penalty", "min_tokens", "min_new_tokens", "mirostat"),
    *("dry_multiplier", "xtc_probability", "dynatemp_range", "epsilon_cutoff", "eta_cutoff"),
)
OFF: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(("top_p", "typical_p", "tfs_z", "repetition_penalty", "repeat_penalty"), (1,)),
    **dict.fromkeys(_OFF_AT_0, (0,)),
    "top_k": (0, -1),
}
"""Numbers that cut off, scale or move what is sampled, with the values at which they do nothing."""
MASKS = (
    *("logit_bias", "allowed_token_ids", "bad_words", "thinking_token_budget", "watermarking"),
    *("logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs", "extra_args"),
    "trace_decode_token_ids",
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
    *("guided_decoding_backend", "structural_tag", "json_schema", "regex", "ebnf", "grammar"),
)
"""What forbids, forces or favours some tokens, if it is there and not empty."""
NEUTRAL: Mapping[str, Any] = {
    **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
}
"""What vLLM takes from the model's generation_config.json where a request does not set it, and that does nothing."""


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


def _on(name: str) -> Callable[[Mapping[str, Any], str], bool]:
    return lambda request, _: request[name] not in OFF[name]


def _there(name: str) -> Callable[[Mapping[str, Any], str], bool]:
    return lambda request, _: request[name] is not False and request[name] not in ({}, [], "")


_OPTIONS: Mapping[str, Callable[[Mapping[str, Any], str], bool]] = {
    "temperature": _hot,
    **{name: _on(name) for name in OFF},
    **{name: _there(name) for name in MASKS},
    "response_format": _formatted,
    "tool_choice": _forced,
    "tools": _strict,
}
