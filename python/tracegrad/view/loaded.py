"""Hold the state of a viewer: the index, the tokens of traces, and the runs. This module has no HTTP and no HTML."""

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
from tracegrad.data import FieldMap
from tracegrad.data.trace import Trace, Traces
from tracegrad.errors import ArgumentError
from tracegrad.report.page import bytes_of
from tracegrad.view import database
from tracegrad.view.indexer import Indexer
from tracegrad.view.inputs import Source, find
from tracegrad.view.meanings import meanings
from tracegrad.view.tokens import OF_STEPS, TokenSets

NAMES = (*(name for name in database.COLUMNS if name != "version"), "advantage", "staleness", *OF_STEPS[:-1])
"""Columns of the page, in the order in which they are sent."""
_MOST_DRAWN = 1000


@dataclass
class _Columns:
    rows: int
    steps: int
    values: dict[str, NDArray[np.float32]]


class Viewer:
    """Opens paths and indexes them in the background. Use it as a context manager.

    Args:
        paths: paths as the user typed them.
        index: folder of indexes.
        model: folder of the tokenizer. Default: the newest checkpoint of the runs in `paths`.
        map: where records store the fields of a trace, as for `tg.read`.

    Raises:
        ReadError: for a path without traces, shards or runs.

    >>> import time
    >>> from tempfile import TemporaryDirectory
    >>> import tracegrad as tg
    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> with TemporaryDirectory() as folder:
    ...     tg.write([tg.Trace.from_messages(messages, reward=reward) for reward in (1, 0)], f"{folder}/traces.jsonl")
    ...     with Viewer([f"{folder}/traces.jsonl"], Path(folder, "index")) as session:
    ...         while not session.state()["done"]:
    ...             time.sleep(0.01)
    ...         session.rows, session.columns()["reward"].tolist(), session.labels([0])[0]["head"]
    (2, [1.0, 0.0], '2+2?')
    """

    def __init__(
        self, paths: Sequence[str | Path], index: Path, model: str | Path | None = None, map: FieldMap | None = None
    ) -> None:
        self.paths = [str(path) for path in paths]
        sources, self.runs = find(paths)
        self.sources = sorted(sources, key=lambda source: source.kind in ("shards", "token log"))
        self.model = str(model) if model else _model_of(self.runs)
        self.tokenizer = Tokenizer.from_pretrained(self.model) if self.model else None
        self.sets = TokenSets(self.tokenizer)
        # Align only if the user named a model. A run's own tokens need a tokenizer, but no alignment.
        self.indexer = Indexer(self.sources, index, self.tokenizer if model else None, self.sets, map or FieldMap())
        self._database = database.connect(self.indexer.path)
        self._lock = threading.RLock()
        self._columns = _Columns(-1, -1, {})
        self._names: dict[str, int] = {}
        self._named = 0
        self._bytes: dict[int, bytes] = {}
        self._drawn: dict[bytes, tuple[str, str]] = {}

    def __enter__(self) -> "Viewer":
        self.indexer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.indexer.close()
        self._database.close()

    @property
    def rows(self) -> int:
        """Return the current number of indexed traces."""
        return self.indexer.rows

    def version(self) -> str:
        """Return a text that changes with `state` and `columns`. It is cheap enough to be asked for every second."""
        with self._lock:
            database.get_property(self._database, "rows")  # An index that is gone is an error.
        return repr((self.rows, self.indexer.done, self._steps(), self.indexer.problems[:20]))

    def state(self) -> dict[str, Any]:
        """Return the progress of the index, and the available filters."""
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
            "meanings": meanings(),
            "runs": [run.name for run in self.runs],
        }

    def columns(self) -> dict[str, NDArray[np.float32]]:
        """Return [R] float32 for each of `NAMES`, as one consistent snapshot."""
        with self._lock:
            rows, steps = self.rows, self._steps()
            if (self._columns.rows, self._columns.steps) != (rows, steps):
                self._columns = _Columns(rows, steps, self._gather())
            return self._columns.values

    def labels(self, wanted: Iterable[int]) -> list[dict[str, Any]]:
        """Return index, id, group and head of rows."""
        with self._lock:
            entries = database.labels(self._database, wanted)
        return [{"n": n, "id": name, "group": group, "head": head} for n, name, group, head in entries]

    def text(self, n: int) -> str:
        """Return the searchable text of a row.

        Raises:
            ArgumentError: if there is no such row.
        """
        self._check_row(n)
        with self._lock:
            return self._database.execute("SELECT text FROM trace WHERE n = ?", (n,)).fetchone()[0]

    def tagged(self, tag: str) -> NDArray[np.int32]:
        """Return the rows with a tag."""
        with self._lock:
            return database.rows_with_tag(self._database, tag)

    def locate(self, n: int) -> tuple[str, str, Source, int]:
        """Return id, group, source of a row, and its index in the source.

        Raises:
            ArgumentError: if there is no such row.
        """
        self._check_row(n)
        with self._lock:
            entry = self._database.execute("SELECT id, grp, place FROM trace WHERE n = ?", (n,)).fetchone()
        return entry[0], entry[1], self.sources[int(self.columns()["source"][n])], entry[2]

    def trace(self, n: int) -> Trace | None:
        """Return the trace of a row, or None if only its tokens are available.

        Raises:
            ArgumentError: if there is no such row.
        """
        self._check_row(n)
        with self._lock:
            data = database.record(self._database, n)
        return None if data is None else Traces.from_records([data])[0]

    def group(self, n: int, most: int) -> list[int]:
        """Return at most `most` rows of a row's group, itself first.

        Raises:
            ArgumentError: if there is no such row.
        """
        self._check_row(n)
        code = self.columns()["group"]
        return [n, *(int(row) for row in np.flatnonzero(code == code[n]) if row != n)][:most]

    def _check_row(self, n: int) -> None:
        if not 0 <= n < self.rows:
            raise ArgumentError(
                f"TG-VIEW-008: row {str(n)[:20]} does not exist: the index has {self.rows} rows. Search for its id."
            )

    @property
    def thumbnail_cache(self) -> dict[bytes, tuple[str, str]]:
        """Return the cache of thumbnails by digest, for `Thumbnails`. It is emptied when it has too many entries."""
        if len(self._drawn) > _MOST_DRAWN:
            self._drawn = {}
        return self._drawn

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token id. An unknown id becomes its number in brackets."""
        if token not in self._bytes:
            self._bytes[token] = bytes_of(self.tokenizer, token)
        return self._bytes[token]

    def _steps(self) -> int:
        """Return the current number of step files of all runs."""
        return sum(sum(1 for _ in source.path.glob("step-*")) for source in self.sources if source.kind == "token log")

    def _gather(self) -> dict[str, NDArray[np.float32]]:
        table: dict[str, NDArray[np.float32]] = dict(
            zip(database.COLUMNS, database.numbers(self._database), strict=True)
        )
        version = table.pop("version")
        table["staleness"] = np.nanmax(version, initial=0) - version if np.isfinite(version).any() else version
        table["advantage"] = _advantages(table["reward"], table["group"])
        if self.sets.sets:
            if self._named < len(version):
                rows = self._database.execute("SELECT id, n FROM trace WHERE n >= ?", (self._named,))
                self._names.update(rows)
                self._named = len(version)
            lengths = self.sets.lengths(self._names, len(version))
            table["length"] = np.where(np.isnan(lengths), table["length"], lengths)
            table |= self.sets.columns(self._names, len(version))
            trained = table["trained_advantage"]
            table["advantage"] = trained if np.isfinite(trained).any() else table["advantage"]
        else:
            table |= {name: np.full(len(version), np.nan, np.float32) for name in OF_STEPS}
        return {name: np.asarray(table[name], np.float32) for name in NAMES}


def _advantages(reward: NDArray[np.float32], group: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the reward minus the mean of its group, NaN without a reward."""
    out, has_reward = np.full(len(reward), np.nan, np.float32), np.isfinite(reward)
    if has_reward.any():
        codes = np.unique(group[has_reward], return_inverse=True)[1]
        out[has_reward] = advantage.group_mean(reward[has_reward], codes, single_sample_group="zero")
    return out


def _model_of(runs: Sequence[Path]) -> str | None:
    """Return the folder of the newest tokenizer in the runs' checkpoints, or None."""
    folders = [path.parent for run in runs for path in run.glob("checkpoint*/tokenizer.json")]
    return str(max(folders, key=lambda path: path.stat().st_mtime)) if folders else None
