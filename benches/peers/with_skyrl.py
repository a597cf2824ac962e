"""SkyRL's path for agents that record messages: each message encoded again, then one left-padded batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from rows import Row

VERSION = "skyrl"


class Road:
    """Built once: imports and the tokenizer are not timed."""

    def __init__(self, model: Path) -> None:
        from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
        from skyrl.train.generators.utils import get_response_ids_and_loss_mask_from_messages
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
        self.encode, self.batch = (
            get_response_ids_and_loss_mask_from_messages,
            convert_prompts_responses_to_batch_tensors,
        )

    def run(self, path: Path, tokens_per_row: int) -> tuple[Any, int]:
        """Batch tensors, and how many traces were left out: because the numbers of logprobs and new ids differ."""
        del tokens_per_row  # It pads, and does not pack.
        columns: list[list[Any]] = [[], [], [], [], []]
        refused = 0
        with path.open("rb") as file:
            for line in file:
                try:
                    one = self._one(orjson.loads(line))
                except ValueError:
                    refused += 1
                    continue
                for column, value in zip(columns, one, strict=True):
                    column.append(value)
        return self.batch(self.tokenizer, *columns), refused

    def _one(self, record: dict[str, Any]) -> tuple[list[int], list[int], list[float], list[int], list[float]]:
        entries = record["messages"]
        first = next(at for at, entry in enumerate(entries) if "logprobs" in entry)
        logprobs = [[t["logprob"] for t in e["logprobs"]["content"]] for e in entries if "logprobs" in e]
        messages = [entry.get("message", entry) for entry in entries]
        prompt = self.tokenizer.apply_chat_template(
            messages[:first], tools=record.get("tools"), add_generation_prompt=False, tokenize=True, return_dict=False
        )
        response, mask, rollout = self.encode(messages[first:], self.tokenizer, logprobs)
        return prompt, response, [0.0] * (len(response) - 1) + [record["reward"]], mask, rollout

    def rows(self, tensors: Any) -> list[Row]:
        """Sequences without their padding; response tensors are right-aligned."""
        ids, attention, action, _, mask, logprobs, _ = tensors
        found = []
        for row in range(len(ids)):
            own = ids[row][attention[row].bool()].numpy()
            length = int(action[row].sum())
            trained, numbers = (0 * own).astype(bool), (0.0 * own).astype("float32")
            trained[len(own) - length :] = mask[row, -length:].bool().numpy()
            numbers[len(own) - length :] = logprobs[row, -length:].numpy()
            found.append(Row(own, trained, numbers))
        return found
