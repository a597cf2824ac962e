"""Convert rows of token ids with a mask, as trainers write them: Atropos, NeMo RL and prime-rl.

A run of ids that the mask marks is one answer of the model after all ids before it. Sources: atroposlib 0.4.0
`envs/base.py` (ScoredDataGroup) and `utils/tokenize_for_trainer.py` (masks of -100 or the id itself); NeMo RL
`algorithms/grpo.py` and `utils/logger.py` (`train_data_step*.jsonl`); prime-rl `trainer/rl/token_export.py`.
"""

import hashlib
import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from tracegrad.data import chat
from tracegrad.data.field_map import BadValueError
from tracegrad.data.formats import record_fields
from tracegrad.data.formats.record_fields import Converted, FileGroup

ATROPOS_KEYS, NEMO_RL_KEYS, PRIME_RL_KEYS = ("masks",), ("idx",), ("export_sequence_idx",)
_NOT_SAMPLED = -100
_MOST_PROMPT_IDS = 1_000_000
"""Most prompt ids of a conversation that are repeated for each of its answers, so that their texts can be shown."""


def of_atropos_group(record: Any) -> list[dict[str, Any]] | None:
    """Convert a scored group of Atropos to one trace for each member; None for other records.

    Raises:
        BadValueError: if a list does not have one entry per member or token, or a mask has another id than the token.
    """
    if not (isinstance(record, Mapping) and all(isinstance(record.get(key), list) for key in ("tokens", "masks"))):
        return None
    if "scores" not in record or not all(isinstance(each, list) for each in record["tokens"]):
        return None
    converted, count = Converted(), len(record["tokens"])
    columns = {name: record[name] for name in ("masks", "scores")}
    for name in ("messages", "inference_logprobs", "overrides"):
        if record.get(name):
            columns[name] = record[name]
    for name, column in columns.items():
        if not isinstance(column, list) or len(column) != count:
            raise record_fields.length_refusal(name, column, count)
    if chat.as_mapping(record.get("group_overrides")).get("sft"):
        converted.left_out["members of supervised groups (`sft`): nothing in them was sampled by the policy"] += count
        return converted
    shared = {
        "group": FileGroup(_digest(record["tokens"])),
        **chat.PARTIAL,
        **chat.pick(record.get("generation_params"), chat.SAMPLING),
    }
    for index, ids in enumerate(record["tokens"]):
        mask, overrides = columns["masks"][index], _at(columns, "overrides", index)
        if not isinstance(mask, list) or len(mask) != len(ids):
            raise record_fields.length_refusal(f"masks[{index}]", mask, len(ids), "tokens")
        wrong = next((at for at, value in enumerate(mask) if value not in (_NOT_SAMPLED, ids[at])), None)
        if wrong is not None:
            problem = f"masks[{index}][{wrong}] is {mask[wrong]!r}, and the token is {ids[wrong]!r}"
            why = "A mask of Atropos has the token's id, or -100 if it was not sampled"
            raise BadValueError((problem, why, "Write the masks as `tokenize_for_trainer` returns them"))
        sampled = [value != _NOT_SAMPLED for value in mask]
        if chat.as_mapping(overrides).get("set_advantage_to_zero"):
            converted.left_out["answers with `set_advantage_to_zero`: they are context, and their reward counts"] += 1
            sampled = [False] * len(sampled)
        header = {**shared, "reward": columns["scores"][index]}
        logprobs, messages = (_at(columns, name, index) for name in ("inference_logprobs", "messages"))
        converted.append(_row(ids, sampled, logprobs, header, messages))
    return converted


def of_nemo_rl(record: Any) -> list[dict[str, Any]] | None:
    """Convert a row of NeMo RL's `train_data_step*.jsonl` to one trace; None for other records.

    The group is the prompt's ids within the file, as the trainer computes its baselines.

    Raises:
        BadValueError: if the row has no ids, as those of a validation or a distillation have.
    """
    if not (isinstance(record, Mapping) and "content" in record and type(record.get("idx")) is int):
        return None
    if not {"input_lengths", "rewards"} & record.keys():
        return None
    fields = {name: _only(value) for name, value in record.items()}
    if "token_ids" not in record:
        problem = "it has the texts of NeMo RL's messages, and no `token_ids`"
        why = "These texts are behind the chat template already: a template would be applied twice"
        raise BadValueError((problem, why, "Read train_data_step*.jsonl of GRPO or PPO"))
    converted = Converted()
    ids, mask = fields["token_ids"], fields.get("token_loss_mask")
    if ids is None:
        converted.left_out["rows that dynamic sampling filtered: they have a reward and no tokens"] += 1
        return converted
    length = int(fields["input_lengths"])
    if not isinstance(mask, list) or len(mask) != len(ids) or length > len(ids):
        raise record_fields.length_refusal("token_loss_mask", mask, len(ids), "tokens")
    ids, sampled = ids[:length], [value != 0 for value in mask[:length]]
    prompt = ids[: sampled.index(True)] if any(sampled) else ids
    if fields.get("sample_loss_mask") == 0:
        converted.left_out["answers that `sample_loss_mask` excludes: they are context, and their reward counts"] += 1
        sampled = [False] * length
    # Dynamic sampling writes the rewards of all samples next to the rows of some: only `filtered_rewards` fit the row.
    reward = fields.get("filtered_rewards", fields.get("rewards"))
    header = {"group": FileGroup(_digest(prompt)), **chat.PARTIAL, "reward": reward}
    logprobs = fields.get("generation_logprobs")
    converted.append(_row(ids, sampled, logprobs[:length] if isinstance(logprobs, list) else None, header))
    return converted


def of_prime_rl(record: Any) -> list[dict[str, Any]] | None:
    """Convert a sequence of prime-rl's token export to one trace without a reward; None for other records.

    A token of a frozen model (only a cross-entropy weight) was not sampled by the policy.
    """
    if not (isinstance(record, Mapping) and "export_sequence_idx" in record and "loss_mask" in record):
        return None
    converted, ids = Converted(), record_fields.require_list(record.get("token_ids"), "token_ids")
    mask = record_fields.require_list(record["loss_mask"], "loss_mask")
    rl, ref_kl = (record.get(name) or [None] * len(ids) for name in ("rl_weights", "ref_kl_weights"))
    for name, column in (("loss_mask", mask), ("rl_weights", rl), ("ref_kl_weights", ref_kl)):
        if not isinstance(column, list) or len(column) != len(ids):
            raise record_fields.length_refusal(name, column, len(ids), "tokens")
    sampled = [bool(bit) and (rl[at] != 0 or bool(ref_kl[at])) for at, bit in enumerate(mask)]
    if frozen := sum(map(bool, mask)) - sum(sampled):
        converted.left_out["tokens with a cross-entropy weight alone: the policy did not sample them"] += frozen
    names = ("step", "rank", "micro_step", "export_sequence_idx")
    header = {"id": "-".join(str(record.get(name)) for name in names), **chat.PARTIAL}
    converted.append(_row(ids, sampled, record.get("inference_logprobs"), header))
    converted.left_out["rewards: prime-rl's token export has advantages alone"] += 1
    return converted


def _row(
    ids: list[Any], sampled: list[bool], logprobs: Any, header: dict[str, Any], messages: Any = None
) -> dict[str, Any]:
    """Return the record of one row: messages with tokens if each answer is one of them, else the ids alone.

    Args:
        ids: all token ids of the row.
        sampled: which of them the policy sampled.
        logprobs: one number per id, or None. Numbers of other ids are filler.
        header: fields of the record.
        messages: the conversation that the ids spell, or None.
    """
    if logprobs is not None and (not isinstance(logprobs, list) or len(logprobs) != len(ids)):
        raise record_fields.length_refusal("the list of logprobs", logprobs, len(ids), "tokens")
    runs = [(bit, [at for at, _ in group]) for bit, group in groupby(enumerate(sampled), key=lambda pair: pair[1])]
    answers = [(places[0], places[-1] + 1) for bit, places in runs if bit]
    turns = _answer_places(messages, len(answers))
    if turns is None or sum(start for start, _ in answers) > _MOST_PROMPT_IDS:
        column = {} if logprobs is None else {"logprobs": logprobs}
        reward = {"rewards": header["reward"]} if "reward" in header else {}
        return {
            **chat.without(header, "reward"),
            **reward,
            "input_ids": ids,
            "loss_mask": [int(bit) for bit in sampled],
            **column,
        }
    conversation = chat.mark_not_sampled([dict(each) for each in messages])
    for place, (start, end) in zip(turns, answers, strict=True):
        column = {} if logprobs is None else {"logprobs": logprobs[start:end]}
        tokens = {"prompt_token_ids": ids[:start], "token_ids": ids[start:end], **column}
        conversation[place] = {**chat.without(conversation[place], "sampled"), **tokens}
    return {**header, "messages": conversation}


def _answer_places(messages: Any, count: int) -> list[int] | None:
    """Return the indices of the messages that `count` answers spell; None if that is not certain.

    They are all assistant messages if there are as many, or a last message if there is one answer.
    """
    if not isinstance(messages, list) or not messages or not all(map(chat.as_mapping, messages)):
        return None
    places = [index for index, each in enumerate(messages) if chat.role(each) == "assistant"]
    if count == 1 and places[-1:] == [len(messages) - 1]:
        return places[-1:]
    return places if count == len(places) else None


def _only(value: Any) -> Any:
    """Return the row of a batch of one; None for an empty batch."""
    return value[0] if isinstance(value, list) and len(value) == 1 else None if value == [] else value


def _at(columns: Mapping[str, list[Any]], name: str, index: int) -> Any:
    return columns[name][index] if name in columns else None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
