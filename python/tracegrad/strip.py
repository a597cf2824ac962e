"""The keys under which producers keep ids, logprobs and masks; records without them, for `trace.strip_logprobs`.

docs/trace-format.md names the producers. Nothing here knows what a trace is.
"""

from collections.abc import Mapping
from typing import Any

# Numbers of tokens, whoever wrote them.
TOKEN_KEYS = frozenset(
    [
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "token_ids",
        "prompt_token_ids",
        "cumulative_logprob",
        "token_logprobs",
        "output_token_logprobs",
        "input_token_logprobs",
        "output_top_logprobs",
        "input_top_logprobs",
        "output_ids",
        "output_token_ids",
        "completion_probabilities",
        "logprobsResult",
        "raw_output",
        "prefill",
        "top_tokens",
        "best_of_sequences",
        "sampling_logprob",
        "routed_experts",
        "sampling_mask",
        "routing_matrices",
        "weight_versions",
        "text_offset",
        "input_ids",
        "attention_mask",
        "loss_mask",
        "loss_masks",
        "rollout_log_probs",
        "rollout_logprobs",
        "rollout_routed_experts",
        "rollout_expert_indices",
        "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets",
        "teacher_log_probs",
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "completion_logprobs",
        "completion_token_ids",
        "response_ids",
        "response_mask",
        "response_logprobs",
        "response_token_ids",
        "old_log_probs",
        "ref_log_prob",
        "position_ids",
        "old_per_token_logps",
        "ref_per_token_logps",
        "sampling_per_token_logps",
        "tool_mask",
        "env_mask",
        "rm_scores",
        "token_level_scores",
        "token_level_rewards",
        "reference_logprobs",
        "trainer_logprobs",
        "entropies",
        "is_content",
    ]
)

# Names that may also be those of text: dropped where they hold a list of numbers.
SOMETIMES = frozenset(
    [
        "tokens",
        "mask",
        "versions",
        "prompts",
        "responses",
        "advantages",
        "rewards",
        "completion",
        "prompt",
        "bytes",
        "probs",
        "values",
    ]
)

# Numbers of the tokens in the `generation` of a message.
GENERATION_KEYS = frozenset({"tokens", "bytes"})

# Objects that hold further records, and no text of the user's.
NESTED = frozenset(
    [
        "messages",
        "extra_messages",
        "calls",
        "request",
        "response",
        "choices",
        "message",
        "messages_and_choices",
        "generation",
        "additional_histories",
        "body",
        "result",
        "provider_specific_fields",
        "meta_info",
        "details",
        "output_logprobs",
        "candidates",
        "steps",
        "step",
        "metrics",
        "model_output",
        "trajectory",
        "trajectories",
        "nodes",
        "chat_completions",
        "subagent_trajectories",
        "spans",
        "triplets",
        "trace",
        "attributes",
        "prompt",
        "completion",
        "tokens",
        "history",
        "traj",
        "observations",
        "extra_fields",
        "output",
        "outputs",
    ]
)

# Beginnings of the flat names that spans give to the same.
SPAN_PREFIXES = ("logprobs.", "llm.hosted_vllm.", "agentlightning.operation.output.")


def without_numbers(record: Any) -> Any:
    """A record, message or choice without ids, logprobs and masks; what is given is not changed."""
    return _without(record, TOKEN_KEYS)


def _without(value: Any, dropped: frozenset[str]) -> Any:
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, list | tuple):
        return [_without(item, dropped) for item in value]
    if not isinstance(value, Mapping):
        return value
    kept: dict[str, Any] = {}
    for key, item in value.items():
        if key in dropped or (key in SOMETIMES and _is_numbers(item)) or _is_span_of_numbers(key, item):
            continue
        if key == "generation":
            kept[key] = _without(item, TOKEN_KEYS | GENERATION_KEYS)
        elif key in NESTED or hasattr(item, "model_dump"):
            kept[key] = _without(item, TOKEN_KEYS)
        else:
            kept[key] = item
    return kept


def _is_numbers(value: Any) -> bool:
    """Whether a list holds numbers alone, in it or in its lists."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(item, int | float) or item is None or _is_numbers(item) for item in value)


def _is_span_of_numbers(key: str, value: Any) -> bool:
    return key.startswith(SPAN_PREFIXES) and (
        _is_numbers(value) or ("token_ids" in key or "logprobs" in key or "choices" in key)
    )
