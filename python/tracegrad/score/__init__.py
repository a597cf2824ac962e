"""Rewards of trajectories that were played or recorded: functions in TRL's convention, and a judge of whole groups.

In come traces or trajectories; out go rewards. What cannot be scored is NaN and counted, never 0. Nothing here plays
or trains. The room itself may be called: `tg.score(traces, functions)` is `tg.score.recorded`. Its files, each using
those before it alone: `functions`; `verdict`, `judge`; `cache`, `spool`, `recorded`.
"""

import sys
from types import ModuleType
from typing import Any

from tracegrad.score.functions import RESERVED, Rewards, Scored, columns_of, rewards, text_of
from tracegrad.score.judge import Judge
from tracegrad.score.recorded import PART, Judgement, Rescored, judged, recorded
from tracegrad.score.spool import Spool
from tracegrad.score.verdict import Judged, Verdict

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
