"""Run `tracegrad view`: show traces and runs in a browser, or export some of them as one file."""

import argparse
import time
from pathlib import Path
from typing import Any

from tracegrad import config
from tracegrad._html import plural
from tracegrad.cli.args import MODEL_HELP, add_json_flag, folder_of, print_json, print_lines, verb
from tracegrad.errors import ArgumentError
from tracegrad.storage import cache


def add_to(commands: Any) -> None:
    """Add the verb."""
    parser = verb(
        commands,
        "view",
        "browse traces, prepared shards and runs on a local web page",
        _view,
        more="Needs the extra `view`: pip install '.[view]' in the repository.",
        examples=(
            "logs/ --model Qwen/Qwen3-0.6B",
            "traces.jsonl runs/first --export worst.html --where 'reward<0.5' --limit 50",
        ),
        dotted_names=lambda: [name for name in config.options() if name.startswith("map.")],
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="trace files, folders written by prepare, or --out folders of runs"
    )
    parser.add_argument(
        "--model", metavar="MODEL", type=Path, help=f"{MODEL_HELP}, to align with (default: that of a run)"
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="port on this machine's loopback (default: a free one)"
    )
    parser.add_argument(
        "--index", type=Path, metavar="DIR", help="folder for search indexes (default: the user's cache folder)"
    )
    add_json_flag(parser)
    export = parser.add_argument_group("export to one HTML file, without a server")
    export.add_argument("--export", type=Path, metavar="FILE", help="write the selected traces to FILE and exit")
    export.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="export only matching traces, such as reward<0.5 or tool:price; repeatable, all must match",
    )
    export.add_argument("--search", default="", metavar="TEXT", help="export only traces that contain TEXT")
    export.add_argument(
        "--sort", default="", metavar="COLUMN", help="sort by a column, largest first; COLUMN:up sorts smallest first"
    )
    export.add_argument(
        "--limit", type=int, default=2000, metavar="N", help="maximum number of traces to export (default 2000)"
    )


def _view(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    if options.export is None and (options.where or options.search or options.sort):
        raise ArgumentError(
            "TG-CLI-054: --where, --search and --sort select traces for --export. Add --export FILE, or remove them."
        )
    from tracegrad import view

    field_map = config.load(overrides=overrides).map
    index, model = options.index or cache.cache_folder() / "view", options.model and folder_of(options.model)
    with view.Viewer(options.paths, index, model, field_map) as session:
        if options.export is None:
            view.serve(session, port=options.port, log=_address if options.json else print_lines)
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
        print_lines(f"written  {options.export}: {len(rows):,} of {plural(session.rows, 'trace')}, {size / 1e6:.1f} MB")
    return 0


def _address(line: str) -> None:
    """Print the address of the page as JSON."""
    print_json({"url": line.split()[-1]}, line=True)
