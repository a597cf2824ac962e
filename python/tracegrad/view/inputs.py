"""Find the contents of user paths: trace files, growing folders, prepared shards, and runs.

Only names of files are read.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tracegrad.data.sources import Place, expand
from tracegrad.errors import ReadError, redact
from tracegrad.storage import manifest

ROLLOUTS = "played"
"""Subfolder of a run with its rollout buffer, as `tracegrad online` names it."""
RECEIVED = ".receive"
"""Subfolder of a folder of received traces, as `tracegrad receive` names it."""
TOKEN_LOG = "terms"
"""Subfolder of a run with its token log."""
_OF_RUN = ("metrics.jsonl", "run.json", "config.toml")


@dataclass(frozen=True)
class Source:
    """A source of traces.

    Args:
        kind: "file", the rollout buffer of a run ("rollouts"), a folder that `receive` writes ("received"), prepared
            "shards", or the "token log" of a run.
        path: the file or folder.
        run: folder of the run that it belongs to, or None.
        place: for a file, its description by `data.sources`, which may be an address or standard input.
    """

    kind: Literal["file", "rollouts", "received", "shards", "token log"]
    path: Path
    run: Path | None = None
    place: Place | None = None

    @property
    def name(self) -> str:
        """Return its name on the page."""
        if self.place is not None and self.place.kind == "address":
            return redact(self.place.path).rpartition("/")[2]
        return self.path.name if self.run is None else f"{self.run.name}/{self.path.name}"


def find(paths: Iterable[str | Path]) -> tuple[list[Source], list[Path]]:
    """Return the sources and the runs of all paths.

    Raises:
        ReadError: for a missing path, or a folder without traces, prepared shards and runs.
    """
    sources: list[Source] = []
    runs: list[Path] = []
    for path in paths:
        folder = Path(path)
        new_sources, new_runs = _of_folder(folder) if folder.is_dir() else (_files(str(path)), [])
        sources += [source for source in new_sources if source not in sources]
        runs += [run for run in new_runs if run not in runs]
    return sources, runs


def is_run(folder: Path) -> bool:
    """Return whether a folder is the `--out` of a run."""
    return any((folder / name).is_file() for name in _OF_RUN) and not (folder / "prepare.json").is_file()


def of_run(run: Path) -> list[Source]:
    """Return the sources of a run: its rollout buffer and its token log. Both may not exist yet."""
    return [Source("rollouts", run / ROLLOUTS, run), Source("token log", run / TOKEN_LOG, run)]


def _of_folder(folder: Path) -> tuple[list[Source], list[Path]]:
    if is_run(folder):
        return of_run(folder), [folder]
    if (folder / RECEIVED).is_dir():
        return [Source("received", folder)], []
    if (folder / manifest.NAME).is_file():
        return [Source("shards", folder)], []
    runs = [subfolder for subfolder in sorted(folder.iterdir()) if subfolder.is_dir() and is_run(subfolder)]
    return ([source for run in runs for source in of_run(run)], runs) if runs else (_files(str(folder)), [])


def _files(name: str) -> list[Source]:
    places = expand([name])
    for place in places:
        if place.kind == "file" and not Path(place.path).is_file():
            raise ReadError(f"TG-VIEW-007: {place.path}: is not there. There is nothing to show. Check the path.")
    return [Source("file", Path(place.path), None, place) for place in places]
