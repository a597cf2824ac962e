"""A trace goes in, a gradient comes out: exact off-policy GRPO from recorded LLM trajectories.

    import tracegrad as tg

    traces = tg.read("traces.jsonl")
    sequences = tg.align(traces, tg.Tokenizer.from_pretrained("model"))

The rooms are modules: `tg.advantage`, `tg.presets`, `tg.objective`, `tg.policy`, `tg.learner`. Those that need torch
are imported when they are used, and importing tracegrad changes nothing in the process.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tracegrad import _alone as _alone
from tracegrad import advantage, presets
from tracegrad._core import __version__
from tracegrad.alignment import align
from tracegrad.batch import Batch, Step, pack
from tracegrad.catalog import Shards
from tracegrad.conversation import Conversation
from tracegrad.correction import Corrected, correct
from tracegrad.errors import TracegradError
from tracegrad.inputs import Map, read, stream
from tracegrad.sequence import Drift, Sequences
from tracegrad.tokenizer import Tokenizer
from tracegrad.trace import Trace, Traces, strip_logprobs, write

if TYPE_CHECKING:
    from tracegrad import config, doctor, learner, objective, online, policy, recipes, report, rollout, score, sync
    from tracegrad.training import train

_ON_USE = (
    "config",
    "doctor",
    "learner",
    "objective",
    "online",
    "policy",
    "recipes",
    "report",
    "rollout",
    "score",
    "sync",
)

__all__ = [
    "Batch",
    "Conversation",
    "Corrected",
    "Drift",
    "Map",
    "Sequences",
    "Shards",
    "Step",
    "Tokenizer",
    "Trace",
    "TracegradError",
    "Traces",
    "__version__",
    "advantage",
    "align",
    "config",
    "correct",
    "doctor",
    "learner",
    "objective",
    "online",
    "pack",
    "policy",
    "presets",
    "read",
    "recipes",
    "report",
    "rollout",
    "score",
    "stream",
    "strip_logprobs",
    "sync",
    "train",
    "write",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("tracegrad.training").train
    if name in _ON_USE:
        return import_module(f"tracegrad.{name}")
    raise AttributeError(f"module 'tracegrad' has no attribute {name!r}")
