"""Run `tracegrad view`: show traces and runs in a browser, or export some of them as one file."""

import argparse
import time
from pathlib import Path
from typing import Any

from tracegrad import config
from tracegrad.cli.args import add_json_flag, print_json, print_lines, verb
from tracegrad.errors import ArgumentError
from tracegrad.storage import cache


def add_to(commands: Any) -> None:
    """Add the verb."""
    parser = verb(commands, "view", "look at traces, prepared shards and runs in a browser", _view)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files of traces, folders of prepare, --out of runs")
    parser.add_argument("--model", metavar="DIR", help="tokenizer to align with (default: of a run)")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="on loopback (default: a free one)")
    parser.add_argument("--index", type=Path, metavar="DIR", help="where indexes stand (default: the user's cache)")
    add_json_flag(parser)
    chosen = parser.add_argument_group("one page that opens without a server")
    chosen.add_argument("--export", type=Path, metavar="FILE", help="write the chosen traces to FILE and end")
    chosen.add_argument(
        "--where", action="append", default=[], metavar="C", help="such as reward<0.5 or tool:price; repeatable"
    )
    chosen.add_argument("--search", default="", metavar="TEXT", help="text that is in them")
    chosen.add_argument("--sort", default="", metavar="COLUMN", help="such as pull, largest first, or pull:up")
    chosen.add_argument("--limit", type=int, default=2000, metavar="N", help="at most so many (2000)")


def _view(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    if idle := [name for name, _ in overrides if not name.startswith("map.")]:
        raise ArgumentError(f"TG-CLI-053: {idle[0]} has no effect on view, which trains nothing. Leave it for train.")
    if options.export is None and (options.where or options.search or options.sort):
        raise ArgumentError(
            "TG-CLI-054: --where, --search, --sort choose what --export writes. Add --export FILE, or leave them."
        )
    try:
        from tracegrad import view
        from tracegrad.view import app as app
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"TG-CLI-055: view needs {error.name}, which is not installed. Nothing can be shown. pip install "
            f"'tracegrad[view]'"
        ) from error
    field_map = config.load(overrides=overrides).map
    with view.Viewer(
        options.paths, options.index or cache.cache_folder() / "view", options.model, field_map
    ) as session:
        if options.export is None:
            view.serve(session, port=options.port, say=_address if options.json else print_lines)
            return 0
        while not session.indexer.done:
            time.sleep(0.02)
        rows = view.select_rows(session, options.where, options.search, options.sort, options.limit)
        size = view.export_page(session, rows, options.export)
        if options.json:
            counts = {"written": len(rows), "traces": session.rows, "bytes": size}
            print_json({"file": str(options.export), **counts, "problems": list(session.indexer.problems)})
            return 0
        print_lines(*(f"note     {problem}" for problem in session.indexer.problems))
        print_lines(f"written  {options.export}: {len(rows):,} of {session.rows:,} traces, {size / 1e6:.1f} MB")
    return 0


def _address(line: str) -> None:
    """Print the address of the page as JSON."""
    print_json({"url": line.split()[-1]}, line=True)
