"""Options of `read` and `stream`, except the source and the field map, with their checks."""

import os
from dataclasses import dataclass

from tracegrad import _validation
from tracegrad.errors import ArgumentError

ON_ERROR = ("raise", "skip", "quarantine")
MAX_RECORD_BYTES = 1 << 30
CHUNK_BYTES = 8 << 20
MOST_BYTES = 64 << 20
"""Most bytes that can be added to one record, or that the file of one session can have."""


@dataclass(frozen=True)
class Options:
    """Reader options, as for `tracegrad.stream`; `quarantine` is the prefix of one source.

    Raises:
        ArgumentError: if an option is invalid.
    """

    batch: int = 1024
    format: str = "auto"
    on_error: str = "raise"
    quarantine: str | os.PathLike[str] | None = None
    limit: int | None = None
    max_record_bytes: int = MAX_RECORD_BYTES
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        _validation.one_of(self.on_error, "on_error", ON_ERROR)
        _validation.instance(self.format, "format", str, "Pass 'auto' or the name of a form.")
        _validation.instance(self.quarantine or "", "quarantine", (str, os.PathLike), "Pass a path.")
        if self.quarantine is not None and self.on_error != "quarantine":
            raise ArgumentError(
                f"TG-DATA-024: quarantine is given but on_error is {self.on_error!r}. Pass "
                f"on_error='quarantine' as well."
            )
        for name in ("batch", "chunk_bytes", "max_record_bytes"):
            _validation.integer(getattr(self, name), name, least=1)
        if self.limit is not None:
            _validation.integer(self.limit, "limit", least=0)

    @property
    def quarantine_prefix(self) -> str | None:
        """The prefix of the quarantine as a string, None by default."""
        return None if self.quarantine is None else os.fspath(self.quarantine)
