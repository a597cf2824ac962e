"""What is looked at: the index as far as it has come, the tokens behind it, and the runs. No HTTP and no HTML.

Called by `app`, which answers requests, and by `export`.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import advantage
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data import Map
from tracegrad.data.trace import Trace, Traces
from tracegrad.errors import ArgumentError
from tracegrad.report.page import bytes_of
from tracegrad.view import database
from tracegrad.view.indexer import Indexer
from tracegrad.view.inputs import Source, find
from tracegrad.view.tokens import OF_STEPS, TokenSets

NAMES = (*(name for name in database.COLUMNS if name != "version"), "advantage", "lag", *OF_STEPS)
"""Columns of the page, in the order in which they are sent."""
_MOST_DRAWN = 1000


@dataclass
class _Columns:
    rows: int
    steps: int
    values: dict[str, NDArray[np.float32]]


class Session:
    """Opens paths and indexes them in the background; a context manager.

    Args:
        paths: as a user gives them.
        index: folder of indexes.
        model: folder of the tokenizer; default the newest checkpoint of a run among the paths.
        map: where records hold what a trace needs, as for `tg.read`.

    Raises:
        ReadError: for a path that holds nothing of ours.
    """

    def __init__(
        self, paths: Sequence[str | Path], index: Path, model: str | Path | None = None, map: Map | None = None
    ) -> None:
        self.paths = [str(path) for path in paths]
        sources, self.runs = find(paths)
        self.sources = sorted(sources, key=lambda source: source.kind in ("shards", "terms"))
        self.model = str(model) if model else _model_of(self.runs)
        self.tokenizer = Tokenizer.from_pretrained(self.model) if self.model else None
        self.sets = TokenSets(self.tokenizer)
        # Drift is looked for where a model was named; spelling a run's own tokens needs no alignment.
        self.indexer = Indexer(self.sources, index, self.tokenizer if model else None, self.sets, map or Map())
        self._database = database.connect(self.indexer.path)
        self._lock = threading.RLock()
        self._columns = _Columns(-1, -1, {})
        self._names: dict[str, int] = {}
        self._bytes: dict[int, bytes] = {}
        self._drawn: dict[bytes, tuple[str, str]] = {}

    def __enter__(self) -> "Session":
        self.indexer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.indexer.close()
        self._database.close()

    @property
    def rows(self) -> int:
        """Traces that are in the index by now."""
        return self.indexer.rows

    def state(self) -> dict[str, Any]:
        """How far the index has come, and what can be filtered by."""
        with self._lock:
            tags = database.tags(self._database)
        return {
            "rows": self.rows,
            "done": self.indexer.done,
            "steps": self._steps(),
            "problems": self.indexer.problems[:20],
            "sources": [source.name for source in self.sources],
            "tags": tags[:400],
            "names": NAMES,
            "aligned": self.indexer.aligned,
            "runs": [run.name for run in self.runs],
        }

    def columns(self) -> dict[str, NDArray[np.float32]]:
        """[R] float32 for each of `NAMES`, all of one moment."""
        with self._lock:
            rows, steps = self.rows, self._steps()
            if (self._columns.rows, self._columns.steps) != (rows, steps):
                self._columns = _Columns(rows, steps, self._gathered())
            return self._columns.values

    def labels(self, wanted: Iterable[int]) -> list[dict[str, Any]]:
        """id, group and first words of rows."""
        with self._lock:
            found = database.labels(self._database, wanted)
        return [{"n": n, "id": name, "group": group, "head": head} for n, name, group, head in found]

    def text(self, n: int) -> str:
        """What a search reads of a row."""
        self._known(n)
        with self._lock:
            return self._database.execute("SELECT text FROM trace WHERE n = ?", (n,)).fetchone()[0]

    def tagged(self, tag: str) -> NDArray[np.int32]:
        """Rows with a tag."""
        with self._lock:
            return database.tagged(self._database, tag)

    def where(self, n: int) -> tuple[str, str, Source, int]:
        """id, group, source and place in it of a row.

        Raises:
            ArgumentError: if there is no such row.
        """
        self._known(n)
        with self._lock:
            found = self._database.execute("SELECT id, grp, place FROM trace WHERE n = ?", (n,)).fetchone()
        return found[0], found[1], self.sources[int(self.columns()["source"][n])], found[2]

    def trace(self, n: int) -> Trace | None:
        """The record of a row; None where only its tokens are at hand."""
        self._known(n)
        with self._lock:
            data = database.record(self._database, n)
        return None if data is None else Traces.from_records([data])[0]

    def group(self, n: int, most: int) -> list[int]:
        """Rows of the group of a row, itself first."""
        self._known(n)
        code = self.columns()["group"]
        return [n, *(int(row) for row in np.flatnonzero(code == code[n]) if row != n)][:most]

    def _known(self, n: int) -> None:
        if not 0 <= n < self.rows:
            raise ArgumentError(f"there is no row {str(n)[:20]}; the index has {self.rows}. Look for it by its id.")

    @property
    def drawn(self) -> dict[bytes, tuple[str, str]]:
        """Pictures that were drawn, by digest, as `report.thumbnails` keeps them; forgotten when they are many."""
        if len(self._drawn) > _MOST_DRAWN:
            self._drawn = {}
        return self._drawn

    def token_bytes(self, token: int) -> bytes:
        """What an id spells; the number itself where nobody knows."""
        if token not in self._bytes:
            self._bytes[token] = bytes_of(self.tokenizer, token)
        return self._bytes[token]

    def _steps(self) -> int:
        """Files of steps that all runs have by now."""
        return sum(sum(1 for _ in source.path.glob("step-*")) for source in self.sources if source.kind == "terms")

    def _gathered(self) -> dict[str, NDArray[np.float32]]:
        table: dict[str, NDArray[np.float32]] = dict(
            zip(database.COLUMNS, database.numbers(self._database), strict=True)
        )
        version = table.pop("version")
        table["lag"] = np.nanmax(version, initial=0) - version if np.isfinite(version).any() else version
        table["advantage"] = _advantages(table["reward"], table["group"])
        if any(each.source.kind == "terms" for each in self.sets.sets):
            if len(self._names) < len(version):
                rows = self._database.execute("SELECT id, n FROM trace WHERE n >= ?", (len(self._names),))
                self._names.update(rows)
            table |= self.sets.columns(self._names, len(version))
        else:
            table |= {name: np.full(len(version), np.nan, np.float32) for name in OF_STEPS}
        return {name: np.asarray(table[name], np.float32) for name in NAMES}


def _advantages(reward: NDArray[np.float32], group: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reward above the mean of its group; NaN without one."""
    out, known = np.full(len(reward), np.nan, np.float32), np.isfinite(reward)
    if known.any():
        codes = np.unique(group[known], return_inverse=True)[1]
        out[known] = advantage.group_mean(reward[known], codes, singleton="zero")
    return out


def _model_of(runs: Sequence[Path]) -> str | None:
    """The folder of a tokenizer that a run has left."""
    found = [path.parent for run in runs for path in run.glob("checkpoint*/tokenizer.json")]
    return str(max(found, key=lambda path: path.stat().st_mtime)) if found else None
