"""Train online: roll out, score, write, train, sync weights, and check at every step that they arrived.

A run is a folder of groups, checkpoints and a report. Rollouts are written group by group, and the trainer reads them
from the files. A run can therefore be replayed bit for bit, inspected while it runs, and stopped at any time. Needs
`pip install 'tracegrad[online]'`; torch is imported by `train` and `replay`, not by `record` and `collect`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tracegrad.online.options import OnlineConfig, RolloutConfig

if TYPE_CHECKING:
    from tracegrad.online.collector_process import CollectResult, collect
    from tracegrad.online.logprob_gap import SyncFault
    from tracegrad.online.recording import RecordResult, record
    from tracegrad.online.training_loop import OnlineResult, replay, train

__all__ = [
    "CollectResult",
    "OnlineConfig",
    "OnlineResult",
    "RecordResult",
    "RolloutConfig",
    "SyncFault",
    "collect",
    "record",
    "replay",
    "train",
]
_LATER = {"CollectResult": "collector_process", "collect": "collector_process", "SyncFault": "logprob_gap"}
_LATER |= {"RecordResult": "recording", "record": "recording"}
_LATER |= {"OnlineResult": "training_loop", "replay": "training_loop", "train": "training_loop"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
