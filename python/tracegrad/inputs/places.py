"""What a user names as input, taken apart into places: files, standard input, folders, globs, addresses.

Nothing is read here but the first bytes of a file.
"""

import glob
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tracegrad.addresses import ADDRESS
from tracegrad.errors import ArgumentError, ReadError, redacted
from tracegrad.inputs.paths import in_numbers
from tracegrad.inputs.remote import listed
from tracegrad.inputs.suffixes import SUFFIXES, refuse_other, suffix
from tracegrad.plain_files import refuse_special

MOST_PLACES = 1_000_000
_BEGINS = {b"PAR1": "parquet", b"ARROW1": "arrow", b"PK\x03\x04": "eval"}


@dataclass(frozen=True)
class Place:
    """One source of records.

    Args:
        kind: "file", "stdin", "parquet", "arrow", "saved" (a datasets folder), "eval" (an inspect-ai log) or "address".
        path: where it is.
        size: bytes on the disk, 0 where they are not known.
        modified: time of its last change in nanoseconds, 0 where it is not known.
        start, end: which of its bytes are read, of a file that is cut between records; all, where `end` is 0.
        line: on which these begin.
        number: from 1, among the places whose paths are the same without their secrets.
    """

    kind: str
    path: str
    size: int = 0
    modified: int = 0
    start: int = 0
    end: int = 0
    line: int = 1
    number: int = 1

    @property
    def name(self) -> str:
        """The path without secrets, as records and errors name it; no two places that are read together have one name.

        >>> [Place("address", f"https://host/a?sig={sig}", number=n).name for n, sig in enumerate("xy", 1)]
        ['https://host/a?sig=***', 'https://host/a?sig=*** (2)']
        """
        return redacted(self.path) + (f" ({self.number})" if self.number > 1 else "")


def expand(paths: Sequence[str | os.PathLike[str]]) -> list[Place]:
    """The places that names stand for, in the order of the names; what a folder or glob holds, by name, in the order of
    the numbers in them.

    Raises:
        ReadError: if there is nothing of that name, or nothing in it that could hold traces.
        ArgumentError: if standard input is named beside others.

    >>> expand(["-"])
    [Place(kind='stdin', path='-', size=0, modified=0, start=0, end=0, line=1, number=1)]
    """
    names = [os.fspath(path) for path in paths]
    if "-" in names and len(names) > 1:
        raise ArgumentError("standard input is named beside other inputs. Its end is not known. Read it alone.")
    places = [place for name in names for place in _of(name)]
    if len(places) > MOST_PLACES:
        raise ArgumentError(f"{len(places):,} files are named. At most {MOST_PLACES:,} are read. Name fewer.")
    return _numbered(places)


def _numbered(places: list[Place]) -> list[Place]:
    """The places, those that differ by secrets alone told apart."""
    paths: dict[str, dict[str, int]] = {}
    found = []
    for place in places:
        if not ADDRESS.match(place.path):
            found.append(place)
            continue
        alike = paths.setdefault(redacted(place.path), {})
        found.append(replace(place, number=alike.setdefault(place.path, len(alike) + 1)))
    return found


def filled(places: list[Place]) -> list[Place]:
    """The places that are not empty files; the first, where all are."""
    return [place for place in places if not _is_empty(place)] or places[:1]


def _is_empty(place: Place) -> bool:
    try:
        return os.path.isfile(place.path) and os.path.getsize(place.path) == 0
    except OSError:
        return False


def named(source: Any) -> tuple[list[Place], Any]:
    """The places that are named, or given, or else what holds records itself.

    Raises:
        ReadError, ArgumentError: as `expand`, or if nothing is named.
    """
    if isinstance(source, (str, os.PathLike)):
        return expand([source]), None
    if isinstance(source, Sequence) and source and all(isinstance(each, Place) for each in source):
        return list(source), None
    if isinstance(source, Sequence) and source and all(isinstance(each, (str, os.PathLike)) for each in source):
        return expand(source), None
    if isinstance(source, Sequence) and not source and not hasattr(source, "features"):
        raise ReadError("no input is named. There are no traces to read. Name a file.")
    return [], source


def _of(name: str) -> list[Place]:
    if name == "-":
        return [Place("stdin", name)]
    if ADDRESS.match(name):
        return [Place("address", path, size) for path, size in listed(name)]
    if os.path.isdir(name):
        return _folder(Path(name))
    if os.path.lexists(name):
        return [_file(name)]
    if glob.has_magic(name):
        found = sorted((path for path in glob.glob(name, recursive=True) if not _is_aside(path)), key=in_numbers)
        places = [place for path in found for place in (_folder(Path(path)) if os.path.isdir(path) else [_found(path)])]
        if places:
            return places
        raise ReadError(f"{name}: no file has such a name. There are no traces to read. Check the pattern.")
    return [Place("file", name)]  # the reader says what is wrong with it


def _folder(folder: Path) -> list[Place]:
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return [Place("saved", str(folder))]
    if (folder / "manifest.json").is_file():
        raise ArgumentError(
            f"{folder} holds prepared shards. They are aligned already. Give that folder to train alone, or the files "
            "of traces."
        )
    found, others = [], set()
    for root, folders, files in os.walk(folder):
        folders[:] = sorted((each for each in folders if not each.startswith(".")), key=in_numbers)
        for file in sorted(files, key=in_numbers):
            path = os.path.join(root, file)
            if file.startswith(".") or _is_aside(file):
                continue
            if suffix(file) in SUFFIXES:
                found.append(path)
            else:
                others.add(suffix(file) or file)
    if not found:
        held = f"it holds {', '.join(sorted(others)[:5])}" if others else "it is empty"
        raise ReadError(
            f"{folder}: {held}. There are no traces to read. Name the files themselves; of a folder are read: "
            f"{', '.join(SUFFIXES)}, also as .gz or .zst."
        )
    return [_found(path) for path in found]


def _found(path: str) -> Place:
    """A file that a folder or a pattern holds; a pipe is read only where its own name is given."""
    try:
        refuse_special(path)
    except OSError as error:
        raise ReadError(
            f"{path}: {error.strerror}. Of folders and patterns files alone are read. Remove it, or name the files."
        ) from error
    return _file(path)


def _is_aside(path: str) -> bool:
    """Whether a file is what a quarantine wrote."""
    return path.endswith((".quarantine.raw", ".quarantine.jsonl"))


def _file(path: str) -> Place:
    refuse_other(path)
    try:
        found = os.stat(path)
        size, modified = found.st_size, found.st_mtime_ns
        if not stat.S_ISREG(found.st_mode):
            return Place("file", path)
        with open(path, "rb") as file:
            head = file.read(8)
    except OSError:
        return Place("file", path)
    is_stream = head[:4] == b"\xff\xff\xff\xff" and suffix(path) in (".arrow", ".feather")
    return Place("arrow" if is_stream else kind_of(head), path, size, modified)


def kind_of(head: bytes) -> str:
    """The kind of a file that begins so."""
    return next((kind for begin, kind in _BEGINS.items() if head.startswith(begin)), "file")
