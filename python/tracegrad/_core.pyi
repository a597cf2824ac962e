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

# pack
