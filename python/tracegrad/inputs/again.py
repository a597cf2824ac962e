"""Records that the core read as they stand, though an answer stands beside their messages: read as what they are.

The first records of a source decide whether all of it is looked at in Python. Of one that is not, these are what the
core itself sees is odd, wherever they stand. Called by `reading`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tracegrad import _core
from tracegrad.inputs.adapters import Adapted
from tracegrad.read_report import ReadReport, summed
from tracegrad.trace import Traces


class Again:
    """What becomes of the odd records of one source.

    Args:
        adapted: makes records of them.
        decoder: opens what decodes these and settles bad ones.
    """

    def __init__(self, adapted: Adapted, decoder: Callable[[], Any]) -> None:
        self._adapted, self._open = adapted, decoder
        self._decoder: Any = None
        self._before = ReadReport()

    @property
    def report(self) -> ReadReport:
        """What is to be added to the counts of the source."""
        if self._decoder is None:
            return ReadReport()
        return summed(_less(self._before), replace(ReadReport(**self._decoder.report()), bytes=0))

    def traces(self, part: Traces, odd: Sequence[int]) -> Traces:
        """The traces of a batch, those at `odd` looked at; one that no adapter knows stays as it was read."""
        parts, start = [], 0
        for index in odd:
            trace = part[index]
            file, line = trace.core.location(trace.index)
            rows = self._adapted.rows(file or "", line or 1, trace.record)
            if rows is None:
                continue
            if self._decoder is None:
                self._decoder = self._open()
            _, before = _core.Traces.decode([trace.record], "<record>", 1, "auto")
            self._before = summed(self._before, replace(ReadReport(**before), bytes=0))
            parts += [part[start:index].core, self._decoder.decode(rows)]
            start = index + 1
        return Traces(_core.Traces.concatenate([*parts, part[start:].core])) if start else part


def _less(report: ReadReport) -> ReadReport:
    """Counts to take away."""
    counts = {name: -value for name, value in vars(report).items() if isinstance(value, int)}
    return replace(report, **counts, formats={name: (-count, why) for name, (count, why) in report.formats.items()})
