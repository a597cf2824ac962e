"""Types of the compiled Rust core. Arrays are numpy arrays; letters of shapes are those of DESIGN.md."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.align import CoreImageRule
from tracegrad.objective.core_forms import CoreReduction, CoreRejection, CoreRejectionBudget, CoreWeight
from tracegrad.packing.packing import PlacementCost

__version__: str

_Messages = Sequence[Mapping[str, Any]] | str
_Tools = Sequence[Mapping[str, Any]] | str | None
_Kwargs = Mapping[str, Any] | str

class _Rendered(TypedDict):
    text: str
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    message: NDArray[np.int32]
    field: NDArray[np.uint8]
    generation: NDArray[np.int64]
    exact_provenance: bool

# errors
class TracegradError(ValueError):
    """Base class of all errors: a ValueError with the code of its cause, and the place if there is one.

    `file`, `line`, `trace`, `turn` and `token` are None if they do not apply.

    Examples:
        >>> import tracegrad as tg
        >>> try:
        ...     tg.read("missing.jsonl")
        ... except tg.TracegradError as error:
        ...     print(type(error).__name__, error.code, error.file)
        ReadError TG-READ-011 missing.jsonl
    """

    code: str | None
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
Line = int | tuple[int, int]
"""A line, or a line with the number of the record if a line may have several."""

class SamplingOption(TypedDict):
    name: str
    spellings: list[str]
    neutral_values: list[float] | None

def sampling_options() -> list[SamplingOption]: ...
def sampling_option_is_off(name: str, value: str) -> bool: ...
def restore_traces(rows: list[tuple[bytes, str, Line]], format: str) -> Traces: ...

class Traces:
    def __len__(self) -> int: ...
    format: str
    def take(self, indices: list[int]) -> Traces: ...
    @staticmethod
    def concatenate(parts: list[Traces]) -> Traces: ...
    @staticmethod
    def decode(records: list[bytes], name: str, first: Line, format: str) -> tuple[Traces, dict[str, Any]]: ...
    @staticmethod
    def plain(records: list[bytes], keys: list[bytes]) -> list[bool]:
        """Return whether each record can be read unchanged: its last message was sampled, and it has none of the keys.

        None of its choices may be left out, and a sampled message must follow another one.
        """

    def open(self, names: list[str] | None = None) -> list[int]:
        """Return the traces with messages after the last sampled turn.

        With names, return only those that may have an answer under one of these names, and those without sampled turns.
        """

    @staticmethod
    def compose(rows: list[list[Any]], name: str, first: Line, format: str) -> tuple[Traces, dict[str, Any]]: ...
    def id(self, index: int) -> str: ...
    def location(self, index: int) -> tuple[str | None, Line | None]: ...
    def group(self, index: int) -> str | None: ...
    def reward(self, index: int) -> float | None: ...
    def rewards(self, index: int) -> dict[str, float]: ...
    def model(self, index: int) -> str | None: ...
    def record(self, index: int) -> bytes: ...
    def record_size(self, index: int) -> int: ...
    def messages(self, index: int) -> list[dict[str, Any]]: ...
    def message_rewards(self, index: int) -> list[float | None]: ...
    def conversation(self, index: int) -> list[int]: ...
    def tools(self, index: int) -> list[Any] | None: ...
    def template_kwargs(self, index: int) -> dict[str, Any]: ...
    def generations(self, index: int) -> list[dict[str, Any]]: ...
    def reward_column(self) -> NDArray[np.float32]: ...
    def columns(self) -> dict[str, Any]:
        """Return columns with one entry for each of the G generations of all traces, in order.

        [G] int64: trace, turn, tokens (listed), ids, prompt_ids, logprobs (numbers of entries, -1 if there are none),
        rendered (1 if the prompt is the rendered messages), missing, invalid, filled (logprobs that `tracegrad fill`
        measured), filled_kind (0 none), spelled (1 if tokens have texts or bytes), logprob_kind (0 unknown, 1 raw, 2
        processed), version (-1 unknown), context (messages), content_bytes (of string content, U+FFFD counted as one;
        -1 if it is not a string), system (1 if the context starts with a system message), stop_id (-1 none), stop_text
        (0, 1), left_out (bits: 1 the request has no temperature, 2 no top_p, 4 the server reads missing options from
        generation_config.json). [G] float64, NaN unknown: temperature, top_p, cumulative_logprob. sampling: for each
        generation the other options by name, or None. finish_reason: G strings, "" unknown. flat_logprobs: float32,
        concatenated. prompt_head: [2 G] int32, the first two prompt ids, -1 if there are none.
        """

class TraceReader:
    def __new__(
        cls,
        path: str,
        on_error: str,
        quarantine: str | None,
        limit: int | None,
        max_record_bytes: int,
        chunk_bytes: int,
        format: str,
        name: str | None = None,
    ) -> TraceReader: ...
    def batch(self, count: int) -> Traces: ...
    def batch_asking(self, count: int) -> tuple[Traces, tuple[Line, bytes] | None]: ...
    def settle_refused(self) -> None: ...
    def cut(self, count: int, most: int) -> list[tuple[Line, bytes]]: ...
    def put_back(self, records: list[tuple[Line, bytes]]) -> None: ...
    def decode(self, made: list[tuple[Line, bytes, bytes | tuple[str, str, str]]]) -> Traces: ...
    def taken(self) -> int: ...
    def report(self) -> dict[str, Any]: ...

class Frames:
    """Iterates over the zstd frames of a file, from a byte offset.

    `next` returns the traces of a frame and its length, or None if the frame is incomplete.
    """

    def __new__(cls, path: str, start: int, most: int) -> Frames: ...
    def next(self) -> tuple[Traces, int] | None: ...

class TraceWriter:
    def __new__(cls, path: str) -> TraceWriter: ...
    def write(self, traces: Traces) -> None: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...

# template
class Template:
    """A chat template. Messages, tools and kwargs are plain objects or their JSON text."""

    def __new__(cls, source: str, special_tokens: list[tuple[str, str]]) -> Template: ...
    @property
    def has_generation(self) -> bool: ...
    def render(self, messages: _Messages, tools: _Tools, add_generation_prompt: bool, kwargs: _Kwargs) -> _Rendered: ...
    def render_text(self, messages: _Messages, tools: _Tools, add_generation_prompt: bool, kwargs: _Kwargs) -> str: ...

# tokenizer
class _Report(TypedDict):
    backend: str
    reason: str
    probes: int
    cache_disabled_reason: str | None

RebuiltTokenizer = TypedDict("RebuiltTokenizer", {"class": str, "text": str, "ids": list[int], "other": list[int]})

class Tokenizer:
    """A tokenizer.json with its chat template and end-of-sequence ids. Immutable; threads can share it."""

    @staticmethod
    def from_dir(
        path: str | PathLike[str], vocab_size: int | None = None, cache: PathLike[str] | None = None
    ) -> Tokenizer: ...
    @staticmethod
    def from_source(json: bytes, config: bytes) -> Tokenizer: ...
    def source(self) -> tuple[bytes, bytes]: ...
    @property
    def name(self) -> str: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def spelling(self) -> Literal["byte-level", "sentencepiece", "other"]: ...
    @property
    def has_generation(self) -> bool: ...
    @property
    def has_template(self) -> bool: ...
    @property
    def report(self) -> _Report: ...
    @property
    def rebuilt(self) -> RebuiltTokenizer | None: ...
    def __len__(self) -> int: ...
    def encode(self, text: str) -> NDArray[np.int32]: ...
    def encode_with_ends(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]: ...
    def encode_batch(self, texts: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]: ...
    def decode_bytes(self, ids: NDArray[np.int64]) -> bytes: ...
    @property
    def model_vocab_size(self) -> int: ...
    def token_bytes(self, id: int) -> bytes | None: ...
    def id_of_bytes(self, bytes: bytes) -> int | None: ...
    def id_of_added(self, text: str) -> int | None: ...
    def is_special(self, id: int) -> bool: ...
    def is_added(self, id: int) -> bool: ...
    def render(self, messages: _Messages, tools: _Tools, add_generation_prompt: bool, kwargs: _Kwargs) -> _Rendered: ...
    def render_ids(
        self, messages: _Messages, tools: _Tools, add_generation_prompt: bool, kwargs: _Kwargs
    ) -> NDArray[np.int32]: ...

class _Fork(TypedDict):
    turn: int
    reason: str
    detail: str

class Conversation:
    """A conversation with the ids of its sampled messages."""

    def __init__(self, tokenizer: Tokenizer, messages: _Messages, tools: _Tools, kwargs: _Kwargs) -> None: ...
    def append(self, messages: Sequence[Mapping[str, Any]]) -> None: ...
    def append_sampled(self, ids: NDArray[np.int64], message: Mapping[str, Any]) -> None: ...
    def prompt_ids(self) -> NDArray[np.int32]: ...
    def forks(self) -> list[_Fork]: ...
    def copy(self) -> Conversation: ...

# align
MISMATCH_REASONS: list[str]
USAGE_SLACK: tuple[int, float]

def pack_penalties(
    ids: NDArray[np.int32],
    cu_seqlens: NDArray[np.int64],
    turn: NDArray[np.int32],
    penalties: Any,
    tokens: NDArray[np.int64],
    of_tokens: NDArray[np.int32],
    offsets: NDArray[np.int64],
    support: NDArray[np.int32],
) -> dict[str, NDArray[Any]]: ...
def token_sets_encode(
    offsets: NDArray[np.int64], values: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]: ...
def token_sets_check(starts: NDArray[np.int64], data: NDArray[np.uint8], count: int) -> None: ...
def token_sets_decode(
    starts: NDArray[np.int64], data: NDArray[np.uint8], count: int, tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]: ...
def token_sets_keys(
    starts: NDArray[np.int64], data: NDArray[np.uint8], count: int, tokens: NDArray[np.int64]
) -> NDArray[np.int64]: ...
def aligned_count() -> int: ...
def align_traces(
    traces: Traces,
    tokenizer: Tokenizer,
    *,
    allow_unknown_ids: bool,
    text_only: bool,
    assume_canonical: bool,
    mode: str,
    merge: str,
    strict: bool,
    logprob_kind: str | None,
    skip_errors: bool,
    server: str | None = None,
    rule: CoreImageRule | None = None,
    sampling_defaults: str | None = None,
) -> dict[str, Any]: ...
def recover_ids(traces: Traces, tokenizer: Tokenizer) -> dict[str, Any]: ...

# images
class _ImageColumns(TypedDict):
    digests: bytes
    widths: list[int]
    heights: list[int]
    media_types: list[str]

def pictures_of(traces: Traces) -> _ImageColumns: ...
def picture_bytes(traces: Traces, digest: bytes) -> bytes: ...
def picture_digest(file: bytes) -> bytes: ...

# ratio
LOG_RATIO_LIMIT: float

class _Corrected(TypedDict):
    weight: NDArray[np.floating]
    keep: NDArray[np.bool_]
    scales: list[NDArray[np.floating] | float]
    stats: dict[str, float]

def correct_terms(
    columns: dict[str, Any],
    gates: list[CoreRejection | CoreRejectionBudget],
    weights: list[CoreWeight],
    reductions: list[CoreReduction],
    missing: str,
    all_reduce: Callable[[NDArray[np.float64], str], NDArray[np.float64]] | None,
) -> _Corrected:
    """Return weight and keep of each position, the scale of each reduction, and metrics over all ranks.

    Columns, all flat: old, rollout, ref, advantages (float32 or float64, all the same, or None), mask (bool or None),
    trace, turn, group, group_terms, group_traces (int32 or int64, by position or by row of `width`; all except trace
    may be None), positions, width, totals (`CoreTotals` or None).
    """

# pack
class _BranchSizes(TypedDict):
    length: NDArray[np.int32]
    terms: NDArray[np.int32]
    lost: NDArray[np.int64]
    too_long: NDArray[np.int32]

def pack_measure(
    cu_seqlens: NDArray[np.int64],
    trace: NDArray[np.int32],
    ids: NDArray[np.int32],
    trainable: NDArray[np.bool_],
    names: list[str],
    tokens_per_row: int,
    whole_traces: bool,
    shared: bool,
    too_long: str,
) -> _BranchSizes:
    """Return length [N] and trained tokens [N] of each branch, lost trained tokens [R], and the too long traces."""

class _Placement(TypedDict):
    rank: NDArray[np.int32]
    row: NDArray[np.int32]
    order: NDArray[np.int32]
    rows: NDArray[np.int32]
    load: NDArray[np.float64]
    shared: NDArray[np.bool_]
    needed: NDArray[np.bool_]
    tokens: NDArray[np.uint64]
    tree_tokens: NDArray[np.uint64]
    ratio: NDArray[np.float64]

def pack_place(
    ids: NDArray[np.int32],
    cu_seqlens: NDArray[np.int64],
    length: NDArray[np.int32],
    terms: NDArray[np.int32],
    trace: NDArray[np.int32],
    step: NDArray[np.int32],
    ranks: int,
    tokens_per_row: int,
    whole_traces: bool,
    cost: PlacementCost,
    least_gain: float | None,
) -> _Placement:
    """Return rank, row and order [N] of each branch (-1: none), rows and load [steps * ranks].

    Then, for each step: whether prefixes are shared, whether a trace needs it, tokens without and with shared prefixes,
    and the ratio of the costs.
    """

class _RowLayout(TypedDict):
    ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    tree_end: NDArray[np.int32]
    cu_tokens: NDArray[np.int64]
    read: NDArray[np.int32]
    target: NDArray[np.int32]
    inv_temperature: NDArray[np.float32]
    row: NDArray[np.int32]
    term: NDArray[np.int32]
    cu_heads: NDArray[np.int64]
    cu_row_terms: NDArray[np.int64]
    cu_rows: NDArray[np.int64]
    origin: NDArray[np.int64]
    branch: NDArray[np.int32]
    cu_terms: NDArray[np.int64]

def pack_lay(
    ids: NDArray[np.int32],
    trainable: NDArray[np.bool_],
    inv_temperature: NDArray[np.float32],
    cu_seqlens: NDArray[np.int64],
    length: NDArray[np.int32],
    step: NDArray[np.int32],
    row: NDArray[np.int32],
    order: NDArray[np.int32],
    rows: NDArray[np.int32],
    shared: NDArray[np.bool_],
    multiple: int,
) -> _RowLayout:
    """Return the rows of one rank; the core's type `Layout` documents them."""

def pack_gather(
    origin: NDArray[np.int64], branch: NDArray[np.int32], of_tokens: list[NDArray[Any]], of_branches: list[NDArray[Any]]
) -> list[NDArray[Any]]:
    """Return for each column the values at the trained tokens, or at their branches."""
