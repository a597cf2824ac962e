"""Run `tracegrad receive` and `tracegrad pull`: store traces in a folder.

`receive` takes the OpenTelemetry traces of running agents. `pull` fetches those of a trace store.
"""

import argparse
import asyncio
import shlex
import signal
import time
from pathlib import Path
from typing import Any

from tracegrad.cli.args import add_json_flag, place, print_json, print_lines, printer_for, read_key, verb
from tracegrad.errors import ArgumentError, TracegradError

LINE_S = 10.0
"""Shortest time between two lines about what was written, in seconds."""


def add_to(commands: Any) -> None:
    """Add the verbs."""
    parser = verb(
        commands,
        "receive",
        "store the OpenTelemetry traces that your agents send, as a folder of traces",
        _receive,
        more="Needs the extra `receive`: pip install '.[receive]' in the repository. "
        "Set the agent's OTEL_EXPORTER_OTLP_ENDPOINT to the printed URL. "
        "A trace is written once it is whole. The folder can be read at any time, and a killed receiver loses nothing "
        "that it has acknowledged.",
        examples=(
            "--out received",
            "--otlp 0.0.0.0:4318 --key-file token --out received",
        ),
        reason_no_effect="which stores traces as they come. Use it with doctor, view or train.",
    )
    parser.add_argument(
        "--otlp",
        default="127.0.0.1:4318",
        metavar="ADDRESS",
        help="IP address and port to listen on for OTLP over HTTP (default 127.0.0.1:4318)",
    )
    parser.add_argument("--out", type=place, required=True, metavar="DIR", help="folder for the traces")
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="file with a token that requests must have; required if other machines can reach the address",
    )
    parser.add_argument(
        "--quiet-time",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds without a new span after which a trace is written, if its root span is there (default 10)",
    )
    parser.add_argument(
        "--idle-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="the same for a trace without its root span (default 600)",
    )
    add_json_flag(parser)
    parser = verb(
        commands,
        "pull",
        "fetch the traces of a Phoenix project or an MLflow experiment, as a folder of traces",
        _pull,
        more="Needs the extra `phoenix` or `mlflow`: pip install '.[phoenix]' in the repository. "
        "A later pull into the same folder fetches "
        "only new and changed traces. A changed trace replaces the older one. Scores come along.",
        examples=(
            "phoenix http://127.0.0.1:6006 --project shop --out pulled",
            "mlflow http://127.0.0.1:5000 --project shop --out pulled --key-file token",
        ),
        reason_no_effect="which stores traces as they are. Use it with doctor, view or train.",
    )
    parser.add_argument("store", choices=("phoenix", "mlflow"), help="kind of the trace store")
    parser.add_argument("url", metavar="URL", help="address of its server")
    parser.add_argument(
        "--project", required=True, metavar="NAME", help="name of the Phoenix project, or of the MLflow experiment"
    )
    parser.add_argument("--out", type=place, required=True, metavar="DIR", help="folder for the traces")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="file with the server's access token")
    add_json_flag(parser)


def _pull(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    from tracegrad.receive.folder import TraceFolder
    from tracegrad.receive.pull import open_store, pull

    key = read_key(options.key_file) if options.key_file else None
    store = open_store(options.store, options.url, options.project, key)
    with TraceFolder(options.out) as folder:
        counts = pull(store, folder)
    if options.json:
        print_json({**counts, "out": str(options.out)})
        return 0
    print_lines(
        f"pulled   {counts['new']:,} new and {counts['changed']:,} changed traces into {options.out}; "
        f"{counts['unchanged']:,} are unchanged, {counts['unfinished']:,} have not ended, {counts['unreadable']:,} "
        "have no valid spans on the server",
        *((f"next     tracegrad doctor {options.out} --model DIR",) if sum(counts.values()) else ()),
    )
    return 0


def _receive(options: argparse.Namespace, overrides: list[tuple[str, Any]], arguments: list[str]) -> int:
    for flag, value in (("--quiet-time", options.quiet_time), ("--idle-timeout", options.idle_timeout)):
        if not 0 <= value <= 1e9:
            raise ArgumentError(f"TG-RECEIVE-007: {flag} is {value}. Give a number of seconds from 0 to 1e9.")
    return asyncio.run(_serve(options))


async def _serve(options: argparse.Namespace) -> int:
    """Serve until a signal arrives, and then write all traces."""
    from tracegrad.receive.folder import TraceFolder
    from tracegrad.receive.server import Receiver, parse_address

    key = read_key(options.key_file) if options.key_file else None
    host, port = parse_address(options.otlp, has_key=key is not None)
    log = printer_for(options)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    with TraceFolder(options.out) as folder:
        count = folder.open_traces
        receiver = Receiver(
            folder,
            host=host,
            port=port,
            key=key,
            quiet_s=options.quiet_time,
            idle_s=options.idle_timeout,
            log=log,
        )
        try:
            await receiver.__aenter__()
        except OSError as error:
            raise TracegradError(
                f"TG-RECEIVE-008: --otlp {options.otlp}: {error.strerror or error}. Give another address or port."
            ) from error
        try:
            if count:
                log(f"open     {count:,} traces of an earlier receiver continue")
            if options.json:
                print_json({"url": receiver.url, "out": str(options.out), "open": count}, line=True)
            log(f"receive  OTLP over HTTP, into {options.out}", f"export OTEL_EXPORTER_OTLP_ENDPOINT={receiver.url}")
            if key is not None:
                file = shlex.quote(str(options.key_file))
                log(f'export OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20$(cat {file})"')
            await _print_progress(folder.counts, stopped, log)
        finally:
            await receiver.__aexit__()
    counts = {name: folder.counts[name] for name in ("traces", "spans", "late", "duplicates")}
    counts["rejected"] = receiver.rejected
    if options.json:
        print_json({**counts, "out": str(options.out)}, line=True)
    else:
        print_lines(
            f"written  {counts['traces']:,} traces, {counts['spans']:,} spans in {options.out}; "
            f"{counts['late']:,} traces got spans after they were written, {counts['duplicates']:,} repeated spans "
            f"were ignored, {counts['rejected']:,} spans were rejected",
            *((f"next     tracegrad doctor {options.out} --model DIR",) if counts["traces"] else ()),
        )
    return 0


async def _print_progress(counts: Any, stopped: asyncio.Event, log: Any) -> None:
    """Print a line when traces were written, at most every `LINE_S` seconds, until a signal arrives."""
    shown, last = 0, -LINE_S
    while not stopped.is_set():
        if counts["traces"] > shown and time.monotonic() >= last + LINE_S:
            shown, last = counts["traces"], time.monotonic()
            log(f"written  {shown:,} traces, {counts['spans']:,} spans received")
        try:
            await asyncio.wait_for(stopped.wait(), 0.5)
        except asyncio.TimeoutError:
            continue
