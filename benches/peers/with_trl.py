"""TRL's path for multi-turn traces: AsyncGRPO's reconciliation of turns, its planner and its collator.

Ids and logprobs are read from the entries as the worker reads them from a response, by one comprehension each.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rows import Row

VERSION = "trl"
FORK_THRESHOLD = 1024  # AsyncGRPOConfig's default


class Road:
    """Built once: imports and the tokenizer are not timed."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer
        from trl.experimental.async_grpo import async_grpo_trainer as trainer
        from trl.experimental.async_grpo import async_rollout_worker as worker

        self.tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
        self.turn, self.chain = worker.TurnRecord, worker._chain_to_sequences
        self.planner, self.collator = trainer.TokenBudgetBatcher, trainer.DataCollatorForRollout

    def run(self, path: Path, tokens_per_row: int) -> tuple[Any, int]:
        """Micro-batches, and how many traces were left out."""
        samples = []
        with path.open("rb") as file:
            for number, (_, group) in enumerate(groupby(map(orjson.loads, file), key=lambda record: record["group"])):
                records = list(group)
                rewards = np.array([record["reward"] for record in records])
                advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
                for record, advantage in zip(records, advantages, strict=True):
                    samples += self._samples(record, float(advantage), number)
        # The planner hands out a micro-batch when the next sample does not fit: the last one closes it.
        whole = {"input_ids": np.full(tokens_per_row, -1), "completion_mask": np.ones(tokens_per_row), "group_id": -1}
        planner = self.planner([*samples, {**whole, "old_log_probs": np.zeros(0)}], 1, tokens_per_row, {})
        collator = self.collator(self.tokenizer.pad_token_id, token_budget=tokens_per_row)
        return [collator.torch_call([rows]) for rows in planner], 0

    def _samples(self, record: dict[str, Any], advantage: float, group: int) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        turns = []
        for entry in record["messages"]:
            if "logprobs" not in entry:
                messages.append(entry)
                continue
            prompt = self.tokenizer.apply_chat_template(
                messages, return_dict=False, add_generation_prompt=True, tools=record.get("tools")
            )
            content = entry["logprobs"]["content"]
            ids = [int(token["token"].removeprefix("token_id:")) for token in content]
            turns.append(self.turn(prompt, ids, [token["logprob"] for token in content]))
            messages.append(entry["message"])
        sequences, _ = self.chain(turns, record["id"], FORK_THRESHOLD)
        return [
            {
                "input_ids": np.asarray(one.input_ids, dtype=np.int64),
                "completion_mask": np.asarray(one.completion_mask, dtype=np.int64),
                "old_log_probs": np.asarray(one.old_log_probs, dtype=np.float32),
                "advantage": advantage,
                "group_id": group,
                "metrics": {"reward": record["reward"]},
            }
            for one in sequences
        ]

    def rows(self, tensors: Any) -> list[Row]:
        """Each sample's path through the row's tree, from the keys that its last segment gathers."""
        found = []
        for batch in tensors:
            one = {name: batch[name][0].numpy() for name in batch if batch[name].ndim == 2}
            queries, keys = one["tree_cu_seqlens_q"], one["tree_cu_seqlens_k"]
            for sample in range(int(one["segment_id"].max()) + 1):
                mine = one["segment_id"] == sample
                read = one["token_index"][mine]
                last = int(read[-1])
                segment = int(np.searchsorted(queries, last, side="right")) - 1
                path = one["tree_kv_index"][keys[segment] : keys[segment + 1]]
                path = path[: int(np.flatnonzero(path == last)[0]) + 1]
                ids = np.append(one["input_ids"][path], one["shift_labels"][last])
                trained, logprobs = np.zeros(len(ids), bool), np.zeros(len(ids), np.float32)
                at = one["position_ids"][read] + 1
                trained[at], logprobs[at] = True, one["old_log_probs"][mine]
                found.append(Row(ids, trained, logprobs))
        return found
