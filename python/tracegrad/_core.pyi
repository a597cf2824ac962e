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

# template

# tokenizer

# align

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
