"""Measure the rows of rows.py on one GPU, each next to its peers:

    python benches/gpu/run.py                              # all rows; each needs 10 minutes at most
    python benches/gpu/run.py --rows head mask             # some of them; only mask runs on a CPU too
    python benches/gpu/run.py --quick --seconds 90         # 1 warm-up and 4 runs; each row stops measuring after 90 s
    python benches/gpu/run.py --tiny --out out/gpu/        # tiny sizes on a CPU, in float32: the arms agree
    python benches/gpu/run.py --rehearse --out out/gpu/    # the same on GPU code paths: bfloat16, flex_attention

Random weights and random ids; medians of 10 runs after 3, interleaved. Writes gpu_<device>.json after each arm and each
round, so that an interrupted row keeps its results; a row that is measured again replaces the one
before. An arm that cannot run has the reason in `arms`; if it is one of ours, the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from clock import Clock, replace_text, skipped
from models import Place
from rehearsal import flex_attention_on_the_cpu
from rows import ROWS, Bench

PEERS = ("trl", "liger-kernel", "verl", "cut-cross-entropy", "prime-rl", "transformers", "triton")
COLUMNS = ("what", "peer", "peer_rate", "ours", "ratio", "limit", "must", "unit")


def measure(name: str, bench: Bench, device: str, command: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the records of a row as far as it is measured, at least once; the last has the reason if the row fails."""
    began = time.perf_counter()
    bench.clock.until = began + bench.budget_s
    versions = {peer: version for peer in PEERS if (version := version_of(peer))}
    more = {"device": device, "command": command, "torch": torch.__version__, "versions": versions}
    records: list[dict[str, Any]] = []
    try:
        for record in ROWS[name](bench):
            records.append({"row": name, **record, **more, "seconds": time.perf_counter() - began})
            yield records
    except Exception as error:
        records.append({"row": name, "what": name, **skipped(error), **more, "seconds": time.perf_counter() - began})
        yield records
    if bench.place.cuda:
        torch.cuda.empty_cache()


def run_row(name: str, bench: Bench, device: str, command: str, path: Path) -> list[dict[str, Any]]:
    """Measure a row, and write its records as soon as they exist, also of unfinished comparisons."""
    records: list[dict[str, Any]] = []
    arms: dict[str, Any] = {}

    def report(measured: dict[str, Any]) -> None:
        arms.update(measured)
        unfinished = {"row": name, "what": f"{name}, unfinished", "device": device, "command": command, "arms": arms}
        write([*records, unfinished], path)

    bench.clock.report = report
    for so_far in measure(name, bench, device, command):
        records = list(so_far)
        if "skipped" in records[-1]:
            records[-1]["arms"] = dict(arms)
        arms.clear()
        write(records, path)
    return records


def version_of(package: str) -> str | None:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def shown(value: Any) -> str:
    return "-" if value is None else f"{value:,.3g}" if isinstance(value, float) else str(value)


def table(records: list[dict[str, Any]]) -> str:
    """The table for a terminal, and below it the rows that did not run."""
    lines = [" | ".join(shown(record.get(column)) for column in COLUMNS) for record in records]
    skipped = {
        f"{name}: {told['skipped']}"
        for record in records
        for name, told in {**record.get("arms", {}), record["what"]: record}.items()
        if "skipped" in told
    }
    return "\n".join([" | ".join(COLUMNS), *lines, *(f"left out: {each}" for each in sorted(skipped))])


def write(records: list[dict[str, Any]], path: Path) -> None:
    """Rows measured before stay, but for those measured now."""
    now = {record["row"] for record in records}
    before = json.loads(path.read_text()) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [record for record in before if record["row"] not in now]
    replace_text(path, json.dumps([*kept, *records], indent=1) + "\n")


def failed(records: list[dict[str, Any]]) -> list[str]:
    """Rows, and arms of ours, that did not run."""
    rows = [record["what"] for record in records if "skipped" in record]
    arms = {
        f"{record['what']}: {name}"
        for record in records
        for name, told in record.get("arms", {}).items()
        if "skipped" in told and name.startswith("tracegrad")
    }
    return [*rows, *sorted(arms)]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results")
    options.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    options.add_argument("--quick", action="store_true", help="1 warm-up and 4 runs instead of 3 and 10")
    options.add_argument("--seconds", type=float, default=540, help="no arm or round of a row is started after these")
    options.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU, in float32")
    options.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU, in bfloat16, by flex_attention")
    return options


def clock_of(options: argparse.Namespace, place: Place) -> Clock:
    """Return the clock that times 10 runs after 3, 4 after 1 with `--quick`, and one run at tiny sizes."""
    warm, repeat = (0, 1) if place.tiny else (1, 4) if options.quick else (3, 10)
    return Clock(place.device, warm, repeat)


def main() -> None:
    options = parser().parse_args()
    small = options.tiny or options.rehearse
    cuda = torch.cuda.is_available() and not small
    if not small and not cuda and options.rows != ["mask"]:
        sys.exit("there is no CUDA device here. --tiny runs tiny sizes on a CPU; --rows mask runs there in full.")
    place = Place("cuda" if cuda else "cpu", small, options.rehearse)
    clock = clock_of(options, place)
    size = ", rehearsal" if options.rehearse else ", tiny" if small else ""
    device = torch.cuda.get_device_name() if cuda else f"cpu{size}"
    path = options.out / f"gpu_{re.sub(r'[^a-z0-9]+', '-', device.lower())}.json"
    records = []
    with flex_attention_on_the_cpu() if options.rehearse else nullcontext():
        for name in options.rows:
            flags = [flag for flag in ("tiny", "rehearse", "quick") if getattr(options, flag)]
            command = " ".join(["python benches/gpu/run.py --rows", name, *(f"--{flag}" for flag in flags)])
            records += run_row(name, Bench(clock, place, options.seconds), device, command, path)
            print(f"{name}: {records[-1]['seconds']:.0f} s", flush=True)
    print(table(records))
    if missing := failed(records):
        sys.exit("ours did not run: " + "; ".join(missing))


if __name__ == "__main__":
    main()
