"""Traces kept in a temporary file while they are scored, so that memory holds a line of index for each and no more.

A group may stand anywhere in the input: its traces are read again when it is its turn. Called by `tracegrad score`.
"""

import contextlib
import os
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from types import TracebackType

from tracegrad import _core
from tracegrad.errors import TracegradError
from tracegrad.trace import Line, Trace, Traces


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Says of an error of the temporary file where it is and what helps."""
    try:
        yield
    except OSError as error:
        where = tempfile.tempdir or os.environ.get("TMPDIR") or "the folder of temporary files"
        raise TracegradError(
            f"{where}: {error.strerror}. What is scored is kept there meanwhile, as large as the traces. Make room, or "
            "set TMPDIR to another folder."
        ) from error


class Spool:
    """Traces on the disk, read one at a time.

    Args:
        parts: the traces, as `tracegrad.stream` gives them.

    >>> said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> with Spool([Traces.from_records([{"messages": said, "group": "g"}])]) as spool:
    ...     len(spool), spool.groups, spool[0].messages[1]["content"]
    (1, ['g'], '4')
    """

    def __init__(self, parts: Iterable[Traces]) -> None:
        self.groups: list[str | None] = []
        self._begins, self._lines, self._names = array("Q", [0]), list[Line](), array("L")
        self._files: list[str] = []
        with _telling():
            self._file = tempfile.TemporaryFile(prefix="tracegrad-score-")  # noqa: SIM115  closed by its owner
        try:
            for part in parts:
                self._add(part)
            with _telling():
                self._file.flush()
        except BaseException:
            # Closing writes what is held back, and the disk may be full; the descriptor is closed all the same.
            with contextlib.suppress(OSError):
                self._file.close()
            raise

    def _add(self, part: Traces) -> None:
        for index, group in enumerate(part.groups):
            record, (file, line) = part.core.record(index), part.core.location(index)
            with _telling():
                self._file.write(record)
            self._begins.append(self._begins[-1] + len(record))
            self._lines.append(line or 1)
            if not self._files or self._files[-1] != (file or "<records>"):
                self._files.append(file or "<records>")
            self._names.append(len(self._files) - 1)
            self.groups.append(None if group is None else sys.intern(group))

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> Trace:
        self._file.seek(self._begins[index])
        record = self._file.read(self._begins[index + 1] - self._begins[index])
        core, _ = _core.Traces.decode([record], self._files[self._names[index]], self._lines[index], "auto")
        return Trace(core, 0)

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
