"""Score trajectories with reward functions in TRL's convention, or with an LLM judge that compares a group.

A trajectory that cannot be scored gets NaN, never 0, and is counted. The package is callable: `tg.rewards(traces,
functions)` is `tg.rewards.recorded`.
"""

import sys
from types import ModuleType
from typing import Any

from tracegrad.rewards.functions import RESERVED, Rewards, Scored, columns_of, rewards, text_of
from tracegrad.rewards.judge import Judge, Judged, Verdict
from tracegrad.rewards.recorded import PART, Judgement, Rescored, Spool, judged, recorded

__all__ = [
    "PART",
    "RESERVED",
    "Judge",
    "Judged",
    "Judgement",
    "Rescored",
    "Rewards",
    "Scored",
    "Spool",
    "Verdict",
    "columns_of",
    "judged",
    "recorded",
    "rewards",
    "text_of",
]


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Rescored:
        return recorded(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
