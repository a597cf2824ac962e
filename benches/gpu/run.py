"""Everything that is measured on one GPU beside the peers, one command:

    python benches/gpu/run.py                              # all rows; each takes 10 minutes at most
    python benches/gpu/run.py --rows head mask             # some of them; mask alone runs on a CPU too
    python benches/gpu/run.py --minutes 9                  # what fits into nine minutes; the rest is named
    python benches/gpu/run.py --tiny --out out/gpu/        # tiny sizes on a CPU, in float32: the arms agree
    python benches/gpu/run.py --rehearse --out out/gpu/    # the same by the roads of a GPU: bfloat16, flex_attention

Random weights and random ids; medians of 10 runs after 3, interleaved. Writes gpu_<device>.json after each row; a row
that is measured again takes the place of the one before. What cannot run says why in its `arms`; where that is one of
ours, the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from clock import Clock, skipped
from models import Place
from rehearsal import flex_attention_on_the_cpu
from rows import ROWS, Bench

PEERS = ("trl", "liger-kernel", "verl", "cut-cross-entropy", "prime-rl", "transformers", "triton")
ROW_S = 540  # seconds that a row may measure; what has begun is finished
COLUMNS = ("what", "peer", "peer_rate", "ours", "ratio", "limit", "must", "unit")


def measured(name: str, bench: Bench, device: str, command: str) -> list[dict[str, Any]]:
    """The records of a row; one that says why, where the row as a whole cannot run."""
    began = time.perf_counter()
    bench.clock.until = min(bench.until, began + ROW_S)
    bench.budget_s = bench.clock.until - began
    try:
        found = list(ROWS[name](bench))
    except Exception as error:
        found = [{"what": name, **skipped(error)}]
    if bench.place.cuda:
        torch.cuda.empty_cache()
    versions = {peer: version for peer in PEERS if (version := version_of(peer))}
    more = {"device": device, "command": command, "torch": torch.__version__, "versions": versions}
    more["seconds"] = time.perf_counter() - began
    return [{"row": name, **record, **more} for record in found]


def version_of(package: str) -> str | None:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def shown(value: Any) -> str:
    return "-" if value is None else f"{value:,.3g}" if isinstance(value, float) else str(value)


def table(records: list[dict[str, Any]]) -> str:
    """For a terminal, and what did not run below it."""
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
    path.write_text(json.dumps([*kept, *records], indent=1) + "\n")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--minutes", type=float, help="no row is started later than this")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU, in float32")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU, in bfloat16, by flex_attention")
    options = parser.parse_args()
    small = options.tiny or options.rehearse
    cuda = torch.cuda.is_available() and not small
    if not small and not cuda and options.rows != ["mask"]:
        sys.exit("there is no CUDA device here. --tiny runs tiny sizes on a CPU; --rows mask runs there in full.")
    place = Place("cuda" if cuda else "cpu", small, options.rehearse)
    clock = Clock("cpu", 0, 1) if small else Clock(place.device)
    size = ", rehearsal" if options.rehearse else ", tiny" if small else ""
    device = torch.cuda.get_device_name() if cuda else f"cpu{size}"
    path = options.out / f"gpu_{re.sub(r'[^a-z0-9]+', '-', device.lower())}.json"
    until = time.perf_counter() + 60 * (options.minutes or float("inf"))
    records, left = [], []
    with flex_attention_on_the_cpu() if options.rehearse else nullcontext():
        for name in options.rows:
            if time.perf_counter() > until:
                left.append(name)
                continue
            command = " ".join(["python benches/gpu/run.py --rows", name, *(["--tiny"] if small else [])])
            records += measured(name, Bench(clock, place, until=until), device, command)
            write(records, path)
            print(f"{name}: {records[-1]['seconds']:.0f} s", flush=True)
    print(table(records))
    for name in left:
        print(f"not started, the time is over: {name}")
    if missing := failed(records):
        sys.exit("ours did not run: " + "; ".join(missing))


if __name__ == "__main__":
    main()
