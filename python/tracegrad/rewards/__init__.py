"""Score trajectories with reward functions in TRL's convention, or with an LLM judge that compares a group.

A trajectory that cannot be scored gets NaN, never 0, and is counted. The package is callable: `tg.rewards(traces,
functions)` is `tg.rewards.score_traces`.
"""

import sys
from types import ModuleType
from typing import Any

from tracegrad.data.reward_columns import RESERVED_COLUMNS, columns_of
from tracegrad.rewards.functions import Rewards, RewardScores, compute_rewards, text_of
from tracegrad.rewards.judge import Judge, JudgeResult, JudgeVote
from tracegrad.rewards.recorded import (
    TRACES_PER_BATCH,
    JudgedTraces,
    ScoredTraces,
    SpillFile,
    judge_traces,
    score_traces,
)

__all__ = [
    "RESERVED_COLUMNS",
    "TRACES_PER_BATCH",
    "Judge",
    "JudgeResult",
    "JudgeVote",
    "JudgedTraces",
    "RewardScores",
    "Rewards",
    "ScoredTraces",
    "SpillFile",
    "columns_of",
    "compute_rewards",
    "judge_traces",
    "score_traces",
    "text_of",
]


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> ScoredTraces:
        return score_traces(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
