"""Training on recorded sequences: single optimizer steps, the training loop, and checkpoints that resume exactly.

`train` runs over a data set (`Sequences` or prepared folders). `Trainer` does one step at a time, in your own loop.
Every step returns a row of metrics.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracegrad.trainer.distributed import CallableModel, DistributedModel, Ranks, wrap
    from tracegrad.trainer.loop import train
    from tracegrad.trainer.lora import merge_adapters
    from tracegrad.trainer.memory import Memory
    from tracegrad.trainer.off_policy_eval import OffPolicyEstimate, estimate
    from tracegrad.trainer.result import TokenRecord, TrainResult
    from tracegrad.trainer.step import StepResult, compute_logprobs, optimizer_step
    from tracegrad.trainer.trainer import Trainer

# Public names and their modules. They are imported on use, because they need torch and `dataset` does not.
_WITH_TORCH = {
    "DistributedModel": "distributed",
    "CallableModel": "distributed",
    "Ranks": "distributed",
    "wrap": "distributed",
    "train": "loop",
    "merge_adapters": "lora",
    "Memory": "memory",
    "OffPolicyEstimate": "off_policy_eval",
    "estimate": "off_policy_eval",
    "TokenRecord": "result",
    "TrainResult": "result",
    "StepResult": "step",
    "compute_logprobs": "step",
    "optimizer_step": "step",
    "Trainer": "trainer",
}
__all__ = [
    "CallableModel",
    "DistributedModel",
    "Memory",
    "OffPolicyEstimate",
    "Ranks",
    "StepResult",
    "TokenRecord",
    "TrainResult",
    "Trainer",
    "compute_logprobs",
    "estimate",
    "merge_adapters",
    "optimizer_step",
    "train",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
