"""Files by their suffixes: which may hold traces, and which never do (CSV, pickles, ...)."""

import os

from tracegrad.errors import ReadError

SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".arrow", ".eval", ".traj", ".sse", ".feather", ".log", ".txt")
PACKED = (".gz", ".zst", ".zstd", ".gzip")
_FRAME = "import pandas as pd; pd.read_{}({!r}).to_json({!r}, orient='records', lines=True)"
_OTHERS = {
    ".csv": ("a CSV file", "csv"),
    ".tsv": ("a TSV file", "table"),
    ".xlsx": ("an Excel file", "excel"),
    ".xls": ("an Excel file", "excel"),
    ".orc": ("an ORC file", "orc"),
    ".pkl": ("a pickle", "pickle"),
    ".pickle": ("a pickle", "pickle"),
    ".xml": ("an XML file", "xml"),
    ".html": ("an HTML file", "html"),
}


def suffix(path: str) -> str:
    """The suffix of a file, below that of its compression."""
    stem, last = os.path.splitext(path.lower())
    return os.path.splitext(stem)[1] if last in PACKED else last


def refuse_other(path: str) -> None:
    """Refuses what holds no JSON, by its suffix.

    Raises:
        ReadError: with the line of Python that converts it.
    """
    known = _OTHERS.get(suffix(path))
    if known is None:
        return
    what, reader = known
    line = _FRAME.format(reader, path, f"{os.path.splitext(path)[0]}.jsonl")
    raise ReadError(
        f"{path}: it is {what}. Rows of text hold no messages and no lists of logprobs, so they are not read. Convert "
        f"it, and look at what came of it: python -c {line!r}"
    )
