"""Types of the compiled core. Arrays are numpy; shapes use the letters of DESIGN.md."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__version__: str

# errors
class TracegradError(ValueError):
    file: str | None
    line: int | None
    trace: str | None
    turn: int | None
    token: int | None

class ReadError(TracegradError): ...
class FormatError(TracegradError): ...
class TemplateError(TracegradError): ...
class TokenizerError(TracegradError): ...
class AlignmentError(TracegradError): ...
class ArgumentError(TracegradError): ...

# traces
class Traces:
    def __len__(self) -> int: ...
    def take(self, indices: list[int]) -> Traces: ...
    @staticmethod
    def concatenate(parts: list[Traces]) -> Traces: ...
    @staticmethod
    def decode(records: list[bytes], name: str) -> tuple[Traces, dict[str, Any]]: ...
    def id(self, index: int) -> str: ...
    def location(self, index: int) -> tuple[str | None, int | None]: ...
    def group(self, index: int) -> str | None: ...
    def reward(self, index: int) -> float | None: ...
    def rewards(self, index: int) -> dict[str, float]: ...
    def model(self, index: int) -> str | None: ...
    def record(self, index: int) -> bytes: ...
    def messages(self, index: int) -> list[dict[str, Any]]: ...
    def message_rewards(self, index: int) -> list[float | None]: ...
    def conversation(self, index: int) -> list[int]: ...
    def tools(self, index: int) -> list[Any] | None: ...
    def template_kwargs(self, index: int) -> dict[str, Any]: ...
    def generations(self, index: int) -> list[dict[str, Any]]: ...
    def reward_column(self) -> NDArray[np.float32]: ...

class TraceReader:
    def __new__(
        cls,
        path: str,
        on_error: str,
        quarantine: str | None,
        limit: int | None,
        max_record_bytes: int,
        chunk_bytes: int,
    ) -> TraceReader: ...
    def batch(self, count: int) -> Traces: ...
    def report(self) -> dict[str, Any]: ...

class TraceWriter:
    def __new__(cls, path: str) -> TraceWriter: ...
    def write(self, traces: Traces) -> None: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...

# template

# tokenizer

# align
DRIFT_REASONS: list[str]

def align_traces(
    traces: Traces,
    tokenizer: Tokenizer,
    *,
    lenient: bool,
    text_only: bool,
    logprob_kind: str | None,
    skip_errors: bool,
) -> dict[str, Any]: ...

# ratio
LOG_RATIO_LIMIT: float

def correct_terms(
    old: NDArray[np.floating] | None,
    rollout: NDArray[np.floating],
    trace: NDArray[np.int64],
    turn: NDArray[np.int64] | None,
    advantages: NDArray[np.floating] | None,
    gates: list[tuple[Any, ...]],
    weights: list[tuple[Any, ...]],
    missing: str,
) -> tuple[
    NDArray[np.floating], NDArray[np.bool_], dict[str, float], dict[str, float], list[tuple[float, float]]
]: ...
def count_terms(ids: NDArray[np.int64], keep: NDArray[np.bool_] | None = None) -> tuple[NDArray[np.int64], int]: ...

# pack
def pack_measure(
    cu_seqlens: NDArray[np.int64],
    trace: NDArray[np.int32],
    trainable: NDArray[np.bool_],
    names: list[str],
    token_budget: int,
    whole_traces: bool,
    too_long: str,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
    """Length [N] and terms [N] of each branch, terms lost [R], traces that were too long."""

def pack_place(
    length: NDArray[np.int32],
    trace: NDArray[np.int32],
    step: NDArray[np.int32],
    ranks: int,
    token_budget: int,
    whole_traces: bool,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Rank [N] and row [N] of each branch (-1: none), rows [steps * ranks]."""

def pack_lay(
    ids: NDArray[np.int32],
    trainable: NDArray[np.bool_],
    inv_temperature: NDArray[np.float32],
    cu_seqlens: NDArray[np.int64],
    length: NDArray[np.int32],
    step: NDArray[np.int32],
    row: NDArray[np.int32],
    rows: NDArray[np.int32],
    multiple: int,
) -> list[NDArray[Any]]:
    """ids, positions, tree_end, cu_tokens, read, target, inv_temperature, row, term, cu_heads, cu_rows, origin, branch,
    cu_terms of one rank; the type `Layout` of the core says what each is."""
