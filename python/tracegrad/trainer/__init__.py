"""Training on recorded sequences: single optimizer steps, the training loop, and checkpoints that resume exactly.

`train` runs over a data set (`Sequences` or prepared folders). `Run` does one step at a time, in your own loop. Every
step returns a row of metrics.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracegrad.trainer.distributed import Placed, Policy, Ranks, prepare
    from tracegrad.trainer.loop import train
    from tracegrad.trainer.lora import merge_adapters
    from tracegrad.trainer.memory import Memory
    from tracegrad.trainer.off_policy_eval import OffPolicyValue, estimate
    from tracegrad.trainer.result import TermRecord, Trained
    from tracegrad.trainer.step import Outcome, measure, optimizer_step
    from tracegrad.trainer.trainer import Run

# Public names and their modules. They are imported on use, because they need torch and `dataset` does not.
_WITH_TORCH = {
    "Placed": "distributed",
    "Policy": "distributed",
    "Ranks": "distributed",
    "prepare": "distributed",
    "train": "loop",
    "merge_adapters": "lora",
    "Memory": "memory",
    "OffPolicyValue": "off_policy_eval",
    "estimate": "off_policy_eval",
    "TermRecord": "result",
    "Trained": "result",
    "Outcome": "step",
    "measure": "step",
    "optimizer_step": "step",
    "Run": "trainer",
}
__all__ = [
    "Memory",
    "OffPolicyValue",
    "Outcome",
    "Placed",
    "Policy",
    "Ranks",
    "Run",
    "TermRecord",
    "Trained",
    "estimate",
    "measure",
    "merge_adapters",
    "optimizer_step",
    "prepare",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
