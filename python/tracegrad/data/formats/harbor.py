"""Convert Harbor's `result.json` of a trial with `rollout_details`: ids and logprobs of each call, and the reward.

Source: harbor 0.26 `models/trial/result.py`, `models/agent/rollout_detail.py` and `llms/chat.py`. The first detail is
the main chat, the others are calls of its subagents with the same model. A prompt contains the history as the server
saw it, so a summarized history needs no messages. Trajectories (ATIF) are read by the core.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.field_map import BadValueError
from tracegrad.data.formats import record_fields
from tracegrad.data.formats.record_fields import Converted

KEYS = ("rollout_details",)


def of_trial(record: Any) -> list[dict[str, Any]] | None:
    """Convert a trial to one trace, or to one for each of its steps; no trace without details, None for other records.

    Raises:
        BadValueError: if it is not certain which prompt belongs to which answer.
    """
    if not (isinstance(record, Mapping) and "trial_name" in record and "agent_info" in record):
        return None
    converted = Converted()
    agent = chat.as_mapping(record["agent_info"])
    model = chat.as_mapping(agent.get("model_info")).get("name")
    kwargs = chat.as_mapping(chat.as_mapping(chat.as_mapping(record.get("config")).get("agent")).get("kwargs"))
    shared = {
        **chat.PARTIAL,
        **chat.sampling(kwargs),
        **({"model": model} if isinstance(model, str) else {}),
        "metadata": chat.pick(record, ("trial_name", "task_name", "source", "task_checksum")),
    }
    steps = [(f"/{step.get('step_name')}", step) for step in map(chat.as_mapping, record.get("step_results") or [])]
    for suffix, result in steps if record.get("agent_result") is None and steps else [("", record)]:
        details = chat.as_mapping(result.get("agent_result")).get("rollout_details")
        calls = [
            call
            for index, detail in enumerate(record_fields.require_list(details, "rollout_details"))
            for call in _calls(detail, index, converted)
        ]
        if not calls:
            converted.left_out["agent runs without ids: `collect_rollout_details` was off"] += 1
            continue
        names = {"id": f"{record['trial_name']}{suffix}", "group": f"{record.get('task_name')}{suffix}"}
        rewards = _rewards(result, [record, result], converted)
        converted.append({**shared, **names, **rewards, "calls": calls})
    return converted


def _calls(detail: Any, index: int, converted: Converted) -> list[dict[str, Any]]:
    """Return the calls of one detail. Its lists have an entry per turn, if the server returned one."""
    prompts, answers, logprobs = (
        record_fields.require_list(chat.as_mapping(detail).get(name), name)
        for name in ("prompt_token_ids", "completion_token_ids", "logprobs")
    )
    if len(prompts) != len(answers):
        problem = f"rollout_details[{index}] has {len(prompts):,} prompts and {len(answers):,} answers"
        why = "Harbor leaves out what a server did not return, so which prompt is whose would be guessed"
        raise BadValueError((problem, why, "Serve with a server that returns both, or leave the trial out"))
    if len(logprobs) != len(answers):
        converted.left_out["lists of logprobs in runs where not every call has one"] += len(logprobs)
        logprobs = [None] * len(answers)
    calls = []
    for prompt, answer, column in zip(prompts, answers, logprobs, strict=True):
        numbers = {} if column is None else {"logprobs": column}
        choice = {"index": 0, "message": {"role": "assistant", "content": None}, "token_ids": answer, **numbers}
        calls.append({"response": {"prompt_token_ids": prompt, "choices": [choice]}})
    return calls


def _rewards(result: Mapping[str, Any], results: list[Mapping[str, Any]], converted: Converted) -> dict[str, Any]:
    """Return the rewards of the verifier, unless an exception of one of the results made them invalid."""
    rewards = chat.as_mapping(chat.as_mapping(result.get("verifier_result")).get("rewards"))
    policies = [chat.get_path(each, "exception_info.policy.has_valid_reward") for each in results]
    if rewards and False in policies:
        converted.left_out["rewards that an exception made invalid (`has_valid_reward`)"] += 1
        return {}
    if set(rewards) == {"reward"}:
        return {"reward": rewards["reward"]}
    total = {"reward": rewards["reward"]} if "reward" in rewards else {}
    return {**total, "rewards": chat.without(rewards, "reward")} if rewards else {}
