"""Reward functions over whole groups: what they say becomes the rewards of the records.

The functions are run by `score`; here they are given what TRL gives them. Called by the collector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracegrad.rollout.play import Played
from tracegrad.score import Rewards

_PROMPTS = ("prompt", "messages")


class GroupScore:
    """Scores the trajectories of a group together; `close` ends the processes of the functions.

    A task that is a text gives them texts, one of messages gives them messages. Keys of a task that is a dict are
    columns. What a trajectory said of itself is kept as the reward `own`, beside those of the functions, which alone
    are trained on.

    Args:
        functions: `(prompts, completions, **columns) -> list[float | None]`.
        weights: of the functions, 1 by default.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> None:
        self.rewards = Rewards(functions, weights)

    async def __call__(self, played: Sequence[Played]) -> None:
        """Sets `reward`, their weighted sum, and `rewards`, each by its name, of the records that did not fail."""
        texts = all(isinstance(_prompt(each.task), str) for each in played)
        prompts = [_prompt(each.task) if texts else each.prompt for each in played]
        completions = [_text(each.completion) if texts else each.completion for each in played]
        found = await self.rewards.score(prompts, completions, columns_of([each.task for each in played]))
        for row, each in enumerate(played):
            if each.error is not None:
                continue
            own = {} if each.record.get("reward") is None else {"own": each.record["reward"]}
            total = float(found.total[row])
            each.record["reward"] = None if math.isnan(total) else total
            each.record["rewards"] = {**(each.record.get("rewards") or {}), **own, **found.row(row)}

    def close(self) -> None:
        """Ends the processes of the functions."""
        self.rewards.close()


def columns_of(tasks: Sequence[Any]) -> dict[str, list[Any]]:
    """The values of each key that all tasks have, but for their prompts.

    >>> columns_of([{"prompt": "2+2?", "answer": "4"}, {"prompt": "1+1?", "answer": "2"}])
    {'answer': ['4', '2']}
    """
    if not all(isinstance(task, Mapping) for task in tasks):
        return {}
    names = [name for name in tasks[0] if name not in _PROMPTS and all(name in task for task in tasks)]
    return {name: [task[name] for task in tasks] for name in names if isinstance(name, str)}


def _prompt(task: Any) -> Any:
    if isinstance(task, Mapping):
        return next((task[name] for name in _PROMPTS if task.get(name) is not None), None)
    return task


def _text(completion: Sequence[Mapping[str, Any]]) -> str:
    return "".join(each.get("content") or "" for each in completion if each.get("role") == "assistant")
