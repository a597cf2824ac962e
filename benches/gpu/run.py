"""Everything that is measured on one GPU beside the peers, one command:

    python benches/gpu/run.py                              # all rows; each takes 10 minutes at most
    python benches/gpu/run.py --rows head mask             # some of them; mask alone runs on a CPU too
    python benches/gpu/run.py --tiny --out out/gpu/        # tiny sizes on a CPU: sees that all of it runs

Random weights and random ids; medians of 10 runs after 3, interleaved. Writes gpu_<device>.json, in which a row that is
measured again takes the place of the one before, and prints a table. What cannot run says why in its `arms`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from clock import CANNOT, Clock, reason
from models import Place
from rows import ROWS, Bench

PEERS = ("trl", "liger-kernel", "verl", "cut-cross-entropy", "prime-rl", "transformers", "triton")
COLUMNS = ("what", "peer", "peer_rate", "ours", "ratio", "limit", "must", "unit")


def measured(name: str, bench: Bench, device: str, command: str) -> list[dict[str, Any]]:
    """The records of a row; one that says why, where the row as a whole cannot run."""
    began = time.perf_counter()
    try:
        found = list(ROWS[name](bench))
    except CANNOT as error:
        found = [{"what": name, "skipped": reason(error)}]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU")
    options = parser.parse_args()
    cuda = torch.cuda.is_available() and not options.tiny
    if not options.tiny and not cuda and options.rows != ["mask"]:
        sys.exit("there is no CUDA device here. --tiny runs tiny sizes on a CPU; --rows mask runs there in full.")
    place = Place("cuda" if cuda else "cpu", options.tiny)
    clock = Clock("cpu", 0, 1) if options.tiny else Clock(place.device)
    device = torch.cuda.get_device_name() if cuda else "cpu, tiny" if options.tiny else "cpu"
    path = options.out / f"gpu_{re.sub(r'[^a-z0-9]+', '-', device.lower())}.json"
    records = []
    for name in options.rows:
        command = f"python benches/gpu/run.py --rows {name}{' --tiny' if options.tiny else ''}"
        records += measured(name, Bench(clock, place), device, command)
        write(records, path)
        print(f"{name}: {records[-1]['seconds']:.0f} s", flush=True)
    print(table(records))


if __name__ == "__main__":
    main()
