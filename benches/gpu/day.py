"""All that is run when a GPU is at hand, a line each; without a network, without pip, without a build.

    python benches/gpu/day.py check             # does it run? tests/gpu on the device
    python benches/gpu/day.py demo              # the example, trained on the device
    python benches/gpu/day.py fast [ROW ...]    # how fast? benches/gpu/run.py, nine minutes at most a call
    python benches/gpu/day.py where             # where does time go? torch's profiler over an optimizer step
    python benches/gpu/day.py ncu               # the two Triton kernels under Nsight Compute

Each takes --rehearse (on a CPU) and --out DIR. Wheels in the folder `wheels` beside this checkout's README are unpacked
and stand in front of what is installed: tracegrad's own abi3 wheel, and peers that are missing. benches/gpu/README.md
says how to collect them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "benches" / "gpu"
KERNELS = "regex:_statistics|_gradient"


def unpacked(wheels: Path, into: Path) -> list[str]:
    """Folders for PYTHONPATH: the wheels as pip would lay them out; where there are none, this tree's own package."""
    found = sorted(wheels.glob("*.whl"))
    for wheel in found:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(into)
        for more in into.glob("*.data/*lib"):  # files that a wheel wants beside its package
            subprocess.run(["cp", "-r", f"{more}/.", str(into)], check=True)
    own = [] if any(wheel.name.startswith("tracegrad-") for wheel in found) else [str(ROOT / "python")]
    return [*([str(into)] if found else []), *own]


def commands(line: str, rows: list[str], out: Path, rehearse: bool) -> list[list[str]]:
    """What a line runs, one after the other."""
    python, on_cpu = sys.executable, ["--rehearse"] if rehearse else []
    where = [python, str(HERE / "where.py"), *on_cpu]
    told = ["--rows", *rows] if rows else []
    tests = [python, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--durations=10"]
    kernels = [*tests, str(ROOT / "tests/gpu/test_gpu_kernels.py"), *on_cpu]
    others = [*tests, str(ROOT / "tests/gpu"), "--ignore", str(ROOT / "tests/gpu/test_gpu_kernels.py"), *on_cpu]
    return {
        "check": [kernels, others],
        "demo": [[python, str(ROOT / "examples/quickstart/demo.py"), "--out", str(out / "demo")]],
        "fast": [[python, str(HERE / "run.py"), "--out", str(out), "--minutes", "9", *told, *on_cpu]],
        "where": [[*where, "--out", str(out)]],
        "ncu": [[*profiler(rehearse), *where, "--head"]],
    }[line]


def profiler(rehearse: bool) -> list[str]:
    """ncu with the clocks as they are; nothing on a CPU."""
    return [] if rehearse else ["ncu", "--clock-control", "none", "--set", "roofline", "-k", KERNELS, "-c", "4"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("line", choices=["check", "demo", "fast", "where", "ncu"])
    parser.add_argument("rows", nargs="*", help="of run.py, for fast")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, by the same code")
    parser.add_argument("--installed", action="store_true", help="take the tracegrad that is installed, and no wheels")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    site = options.out.resolve() / "site"
    paths = [*([] if options.installed else unpacked(options.wheels, site)), os.environ.get("PYTHONPATH", "")]
    told = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    told |= {"HF_HUB_OFFLINE": "1"}
    worst = 0
    for number, command in enumerate(commands(options.line, options.rows, options.out, options.rehearse)):
        print("$", " ".join(command), flush=True)
        interpreted = {"TRITON_INTERPRET": "1"} if options.rehearse and options.line == "check" and number == 0 else {}
        worst = max(worst, abs(subprocess.run(command, cwd=ROOT, env={**told, **interpreted}, check=False).returncode))
    return worst


if __name__ == "__main__":
    sys.exit(main())
