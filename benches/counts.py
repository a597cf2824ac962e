"""Count instructions, allocations and peak memory of each stage of the data pipeline, on a fixed workload.

`make bench-counts` runs it.

    python benches/counts.py                   # compared with benches/results/counts.json; fails if a stage has grown
    python benches/counts.py --write           # renews the file
    python benches/counts.py --only align      # stages whose name contains this

Counts do not depend on what else a machine does. Instructions are valgrind's (callgrind, on x86-64), which the bench
switches on only for the stage; allocations and peak bytes are counted by the bench's own allocator. A stage has one
thread, and as many stages run at once as there are processors. Which instructions a library chooses depends on the
processor, so the file names its machine, and on another kind of machine growth is printed and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "benches" / "results" / "counts.json"
GROWN = 0.05
"""Allowed growth of a stage compared with the file; a change that costs more renews it in the same commit."""
SMALL = {"instructions": 500_000, "allocations": 64, "peak": 65_536}
"""Smaller differences are ignored, whatever their share: loading a tokenizer needs up to 250,000 more or less."""

Row = dict[str, Any]


def built() -> str:
    """The bench's binary."""
    # With both crates, features equal the release build, so its dependencies are not built again.
    crates = ["-p", "tracegrad-core", "-p", "tracegrad-py"]
    command = ["cargo", "bench", "--quiet", *crates, "--bench", "counts", "--no-run"]
    told = subprocess.run([*command, "--message-format", "json"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found = [json.loads(line) for line in told.stdout.splitlines() if line.startswith(b"{")]
    [binary] = [each["executable"] for each in found if each.get("executable")]
    return binary


def row_of(command: list[str]) -> Row:
    """Run one stage under valgrind; return the output of the bench, and the instructions of all its threads."""
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--callgrind-out-file=/dev/null", *command]
    done = subprocess.run(valgrind, env=alone(), capture_output=True, text=True, check=False)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or collected is None or not int(collected[1]):
        sys.exit(f"{' '.join(valgrind)} failed:\n{done.stderr}")
    return {**json.loads(done.stdout), "instructions": int(collected[1])}


def alone() -> dict[str, str]:
    """An environment in which nothing is spread over threads."""
    return {**os.environ, "RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1"}


def machine() -> str:
    """Properties that affect counts in addition to the code: the processor, valgrind and the compiler."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    kind = [re.search(rf"^{key}\s*: (.*)$", about, re.M) for key in ("vendor_id", "cpu family", "model", "stepping")]
    versions = [
        subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        for tool in ("valgrind", "rustc")
    ]
    return ", ".join([*(found[1] if found else "?" for found in kind), *versions])


def measured(only: str) -> dict[str, Row]:
    """A row for each stage, by its name."""
    binary = built()
    with tempfile.TemporaryDirectory() as folder:
        names = subprocess.run([binary, "make", folder], env=alone(), capture_output=True, text=True, check=True)
        chosen = [name for name in names.stdout.splitlines() if only in name]
        rows = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            counted = pool.map(lambda name: row_of([binary, "run", folder, name]), chosen)
            for name, row in zip(chosen, counted, strict=True):
                rows[name] = row
                print(line(name, row), flush=True)
    return rows


def line(name: str, row: Row) -> str:
    """A stage in a line.

    >>> line("align", {"unit": "token", "units": 100, "instructions": 52_300, "allocations": 52, "peak": 2_000_000})
    'align                        523.00 instructions    0.520 allocations     20000.0 peak bytes a token'
    """
    per = {key: row[key] / row["units"] for key in ("instructions", "allocations", "peak")}
    return (
        f"{name:22} {per['instructions']:12,.2f} instructions {per['allocations']:8,.3f} allocations "
        f"{per['peak']:11.1f} peak bytes a {row['unit']}"
    )


def grown(before: Row, now: Row) -> list[str]:
    """Describe what has grown.

    >>> row = {"instructions": 20_000_000, "allocations": 100, "peak": 1_000_000}
    >>> grown(row, {"instructions": 21_020_000, "allocations": 160, "peak": 1_040_000})
    ['instructions 20,000,000 -> 21,020,000 (+5.1 %)']
    >>> grown(row, {"instructions": 21_000_000, "allocations": 165, "peak": 900_000})
    ['allocations 100 -> 165 (+65.0 %)']
    """
    return [
        f"{key} {before[key]:,} -> {now[key]:,} (+{now[key] / before[key] - 1:.1%})".replace("%", " %")
        for key, small in SMALL.items()
        if now[key] > before[key] * (1 + GROWN) and now[key] - before[key] > small
    ]


def main() -> int:
    """Return the exit code, 1 if a stage has grown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="stages whose name holds this")
    parser.add_argument("--write", action="store_true", help="renew benches/results/counts.json")
    told = parser.parse_args()
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is not installed, which counts the instructions. Install it by your system's packages.")
    rows, kept = measured(told.only), json.loads(KEPT.read_text()) if KEPT.exists() else {"stages": {}}
    here, before = machine(), kept["stages"]
    if told.write:
        stages = {**(before if told.only else {}), **rows}
        KEPT.write_text(json.dumps({"machine": here, "stages": stages}, indent=1) + "\n")
        return 0
    wrong = [f"{name}: {each}" for name, row in rows.items() for each in grown(before[name], row)]
    print(*wrong, sep="\n")
    if wrong and kept["machine"] != here:
        print(f"The file was written on {kept['machine']}, and this is {here}: that may be why, so nothing fails.")
        return 0
    if wrong:
        print("Make it cheaper, or renew the file in the same commit by python benches/counts.py --write and say why.")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
