"""Score trajectories with reward functions in TRL's convention, or with an LLM judge of whole groups.

What cannot be scored is NaN and counted, never 0. The package can be called: `tg.rewards(traces, functions)` is
`tg.rewards.recorded`.
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


class _Room(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Rescored:
        return recorded(*args, **options)


sys.modules[__name__].__class__ = _Room
