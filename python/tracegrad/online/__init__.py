"""The online loop: play, score, write, train, push, and prove at every step that the push arrived.

The folder is the queue: what is played is written by whole groups, and the trainer reads what is written. So a run can
be replayed bit for bit, looked at while it runs, and cut anywhere. Needs `pip install 'tracegrad[online]'`.
"""

from tracegrad.online.options import Online
from tracegrad.online.proof import SyncFault
from tracegrad.online.start import Finished, replay, train

__all__ = ["Finished", "Online", "SyncFault", "replay", "train"]
