"""ART's path from recorded choices to packed tensors: `tokenize_trajectory_groups`, then `packed_tensors_from_...`."""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rows import Row

VERSION = "openpipe-art"


class Road:
    """Built once: imports and the tokenizer are not timed."""

    def __init__(self, model: Path) -> None:
        from art.preprocessing.pack import packed_tensors_from_tokenized_results
        from art.preprocessing.tokenize import tokenize_trajectory_groups
        from art.trajectories import Trajectory, TrajectoryGroup
        from openai.types.chat.chat_completion import Choice
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
        self.choice, self.trajectory, self.group = Choice, Trajectory, TrajectoryGroup
        self.tokenize, self.pack = tokenize_trajectory_groups, packed_tensors_from_tokenized_results

    def run(self, path: Path, tokens_per_row: int) -> tuple[Any, int]:
        """Packed tensors, and how many traces were left out."""
        groups = []
        with path.open("rb") as file:
            for _, records in groupby((orjson.loads(line) for line in file), key=lambda record: record["group"]):
                groups.append(self.group([self._trajectory(record) for record in records]))
        tokenized = self.tokenize(self.tokenizer, groups, False, True)
        return self.pack(list(tokenized), tokens_per_row, self.tokenizer.pad_token_id, False), 0

    def _trajectory(self, record: dict[str, Any]) -> Any:
        entries = [self.choice.model_validate(entry) if "logprobs" in entry else entry for entry in record["messages"]]
        return self.trajectory(messages_and_choices=entries, tools=record.get("tools"), reward=record["reward"])

    def rows(self, tensors: Any) -> list[Row]:
        """Each answer after the prompt that it shares: runs of one group id, a prompt's own and then the answers'."""
        found = []
        names = ("tokens", "group_ids", "parent_ids", "assistant_mask", "logprobs")
        for tokens, group, parent, mask, logprobs in zip(*(tensors[name].numpy() for name in names), strict=True):
            used = int((group != -1).sum())
            cuts = [0, *(np.flatnonzero(np.diff(group[:used])) + 1).tolist(), used]
            prompts: dict[int, np.ndarray] = {}
            for start, end in pairwise(cuts):
                run = np.arange(start, end)
                if group[start] == parent[start]:
                    prompts[int(parent[start])] = run
                    continue
                whole = np.concatenate([prompts.get(int(parent[start]), run[:0]), run])
                found.append(Row(tokens[whole], mask[whole], logprobs[whole]))
        return found
