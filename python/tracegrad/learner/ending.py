"""What an error on one rank becomes on it and on the others: the step that was lost, who failed, or who did not come.

Called by the run.
"""

import torch

from tracegrad.config import Config
from tracegrad.errors import TracegradError
from tracegrad.learner.memory import out_of_memory
from tracegrad.learner.ranks import OtherRankFailed, Ranks


def said_together(error: Exception, step: int, config: Config, ranks: Ranks, ends: bool) -> Exception:
    """What this rank raises: the error itself, or what another rank has told, or whom it waited for.

    Args:
        error: what this rank has met.
        step: that was lost, from 1.
        ends: no step follows, so that an error which this rank meets alone is told the others.
    """
    if isinstance(error, torch.OutOfMemoryError):
        reason = f"step {step}: {out_of_memory(error, config)}"
        ranks.tell(reason)
        return TracegradError(reason)
    if isinstance(error, (TracegradError, OtherRankFailed)):  # all ranks have it
        return error
    if not (ends or isinstance(error, RuntimeError)):
        return error
    if reason := ranks.heard():
        return TracegradError(f"{reason} This rank stops with it.")
    if reason := ranks.absent(error):
        return TracegradError(f"step {step}: {reason}. This rank stops with it.")
    if ends:
        ranks.tell(f"step {step}: {type(error).__name__}: {error}"[:2000])
    return error
