"""Rewards of trajectories that were played or recorded: functions in TRL's convention, and a judge of whole groups.

What cannot be scored is NaN and counted, never 0. Nothing here plays or trains.
"""

from tracegrad.score.functions import Rewards, Scored, rewards
from tracegrad.score.judge import Judge
from tracegrad.score.verdict import Judged, Verdict

__all__ = ["Judge", "Judged", "Rewards", "Scored", "Verdict", "rewards"]
