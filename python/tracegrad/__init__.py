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
from tracegrad.batch import Batch, Step, pack
from tracegrad.conversation import Conversation
from tracegrad.correction import Corrected, correct
from tracegrad.errors import TracegradError
from tracegrad.sequence import Drift, Sequences, align
from tracegrad.tokenizer import Tokenizer
from tracegrad.trace import Trace, Traces, read, stream, strip_logprobs, write

if TYPE_CHECKING:
    from tracegrad import doctor, learner, objective, online, policy, report, rollout, score

_ON_USE = ("doctor", "learner", "objective", "online", "policy", "report", "rollout", "score")

__all__ = [
    "Batch",
    "Conversation",
    "Corrected",
    "Drift",
    "Sequences",
    "Step",
    "Tokenizer",
    "Trace",
    "TracegradError",
    "Traces",
    "__version__",
    "advantage",
    "align",
    "correct",
    "doctor",
    "learner",
    "objective",
    "online",
    "pack",
    "policy",
    "presets",
    "read",
    "report",
    "rollout",
    "score",
    "stream",
    "strip_logprobs",
    "write",
]


def __getattr__(name: str) -> Any:
    if name in _ON_USE:
        return import_module(f"tracegrad.{name}")
    raise AttributeError(f"module 'tracegrad' has no attribute {name!r}")
