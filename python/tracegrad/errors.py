"""Every error tracegrad raises: what was found, where, why it matters, what to do.

Raised by all rooms, defined in the core; each is a ValueError and carries `file`, `line`, `trace`, `turn`, `token`
where they are known.
"""

from tracegrad._core import (
    AlignmentError,
    ArgumentError,
    FormatError,
    ReadError,
    TemplateError,
    TokenizerError,
    TracegradError,
)

__all__ = [
    "AlignmentError",
    "ArgumentError",
    "FormatError",
    "ReadError",
    "TemplateError",
    "TokenizerError",
    "TracegradError",
]
