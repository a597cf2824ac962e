"""The online loop: play, score, write, train, push, and prove at every step that the push arrived.

In come a model, tasks and what plays them; out go a folder of recorded groups, trained checkpoints and a report. The
folder is the queue: what is played is written by whole groups, and the trainer reads what is written. So a run can be
replayed bit for bit, looked at while it runs, and cut anywhere. Needs `pip install 'tracegrad[online]'`; torch is
imported with what trains, not with `record` or `collect`. Its files, each using those before it alone: `options`,
`brief`, `proof` (theta = rollout); `tasks`, `pace`, `signal`; `link`, `ways`, `serve` (the servers); `frames`,
`ledger` (the queue); `collector`, `state`, `elsewhere`, `logged`, `players`, `apart`, `record` (who plays); `canary`,
`causes`, `suspects`, `check` (whether servers have the weights); `bond`, `loop`, `start`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tracegrad.online.options import Online, Play
from tracegrad.online.record import Recorded, record

if TYPE_CHECKING:
    from tracegrad.online.apart import Collected, collect
    from tracegrad.online.proof import SyncFault
    from tracegrad.online.start import Finished, replay, train

__all__ = ["Collected", "Finished", "Online", "Play", "Recorded", "SyncFault", "collect", "record", "replay", "train"]
_LATER = {"Collected": "apart", "collect": "apart", "SyncFault": "proof"}
_LATER |= {"Finished": "start", "replay": "start", "train": "start"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
