"""Train language models with GRPO on recorded LLM trajectories, with exact off-policy correction.

    import tracegrad as tg

    traces = tg.read("traces.jsonl")
    data = tg.align(traces, tg.Tokenizer.from_pretrained("model"))

`tg.advantage` and `tg.objective` take and return numpy arrays. `tg.model`, `tg.trainer` and `tg.online` need torch and
are imported on first use. Importing tracegrad needs only numpy and changes no global state.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# numpy and the compiled core share one state per process. Refuse sub-interpreters before importing either.
try:
    import _interpreters
except ImportError:
    try:
        import _xxsubinterpreters as _interpreters  # Python 3.12 and earlier
    except ImportError:
        _interpreters = None

if _interpreters is not None and _interpreters.get_current() != _interpreters.get_main():
    raise ImportError(
        "tracegrad was imported in a sub-interpreter. numpy and the compiled core exist once in a process, and their "
        "memory would be shared without a lock. Use it in the main interpreter, in threads, or in processes."
    )

from tracegrad import advantage, objective
from tracegrad._core import __version__
from tracegrad.alignment.align import align
from tracegrad.alignment.conversation import Conversation
from tracegrad.alignment.sequences import AlignmentReport, Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data import FieldMap, read, stream
from tracegrad.data.to_otlp import write_spans
from tracegrad.data.trace import Trace, Traces, strip_logprobs, write
from tracegrad.errors import AlignmentError as AlignmentError
from tracegrad.errors import ArgumentError as ArgumentError
from tracegrad.errors import FormatError as FormatError
from tracegrad.errors import ReadError as ReadError
from tracegrad.errors import TemplateError as TemplateError
from tracegrad.errors import TokenizerError as TokenizerError
from tracegrad.errors import TracegradError
from tracegrad.objective import presets
from tracegrad.objective.correction import Correction, correct
from tracegrad.packing import Batch, Step, pack
from tracegrad.trainer.dataset import PreparedDataset

if TYPE_CHECKING:
    from tracegrad import (
        config,
        doctor,
        missing_logprobs,
        model,
        online,
        recipes,
        report,
        rewards,
        rollout,
        trainer,
        weight_sync,
    )
    from tracegrad.missing_logprobs import fill
    from tracegrad.trainer.api import train

_ON_USE = (
    "config",
    "doctor",
    "trainer",
    "online",
    "missing_logprobs",
    "model",
    "recipes",
    "report",
    "rollout",
    "rewards",
    "weight_sync",
)

__all__ = [
    "AlignmentReport",
    "Batch",
    "Conversation",
    "Correction",
    "FieldMap",
    "PreparedDataset",
    "Sequences",
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
    "fill",
    "missing_logprobs",
    "model",
    "objective",
    "online",
    "pack",
    "presets",
    "read",
    "recipes",
    "report",
    "rewards",
    "rollout",
    "stream",
    "strip_logprobs",
    "train",
    "trainer",
    "weight_sync",
    "write",
    "write_spans",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("tracegrad.trainer.api").train
    if name == "fill":
        return import_module("tracegrad.missing_logprobs").fill
    if name in _ON_USE:
        return import_module(f"tracegrad.{name}")
    raise AttributeError(f"module 'tracegrad' has no attribute {name!r}")
