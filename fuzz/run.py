"""Runs one fuzzer for some seconds: `python fuzz/run.py records --seconds 60`; `make fuzz` calls it.

records, events, templates and tokenizers are libFuzzer's, in Rust; shards and checkpoints change files that this
package wrote and load them. What is found stands in out/fuzz/TARGET; a test is made of it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRIPLE = "x86_64-unknown-linux-gnu"
COUNTED = ("level=4", "inline-8bit-counters", "pc-table", "trace-compares")
COVERAGE = " ".join(["-Cpasses=sancov-module", *(f"-Cllvm-args=-sanitizer-coverage-{each}" for each in COUNTED)])
IN_RUST = ("records", "events", "templates", "tokenizers")
IN_PYTHON = ("shards", "checkpoints")


def seeds(target: str, into: Path) -> None:
    """Small files that are right, for the fuzzer to change."""
    into.mkdir(parents=True, exist_ok=True)
    golden = ROOT / "tests" / "golden"
    found = {
        "records": [*golden.rglob("*.json"), *golden.rglob("*.jsonl")],
        "events": [*golden.rglob("*.sse"), *golden.rglob("*.txt"), *golden.rglob("*stream*")],
        "templates": [*(ROOT / "examples").rglob("*.jinja"), *golden.rglob("*.jinja")],
        "tokenizers": [*(ROOT / "examples").rglob("tokenizer.json")],
    }[target]
    for number, path in enumerate(path for path in found if path.is_file() and path.stat().st_size < 1 << 18):
        (into / f"{number}-{path.name}").write_bytes(path.read_bytes())


def in_rust(target: str, seconds: int) -> int:
    """Builds the target with coverage on stable Rust and runs it; memory and time of one input are bounded."""
    told = {**os.environ, "RUSTFLAGS": f"{COVERAGE} --cfg fuzzing", "CARGO_TARGET_DIR": str(ROOT / "target" / "fuzz")}
    build = ["cargo", "build", "--release", "--quiet", "--target", TRIPLE, "--bin", target]
    subprocess.run(build, cwd=ROOT / "fuzz", env=told, check=True)
    out = ROOT / "out" / "fuzz" / target
    seeds(target, out / "seeds")
    (out / "corpus").mkdir(exist_ok=True)
    limits = [
        f"-max_total_time={seconds}",
        "-timeout=5",
        "-rss_limit_mb=2048",
        "-max_len=65536",
        "-print_final_stats=1",
    ]
    binary = ROOT / "target" / "fuzz" / TRIPLE / "release" / target
    run = [binary, *limits, f"-artifact_prefix={out}/", out / "corpus", out / "seeds"]
    return subprocess.run(run, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=[*IN_RUST, *IN_PYTHON])
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    if options.target in IN_RUST:
        return in_rust(options.target, options.seconds)
    import stored

    return stored.fuzz(options.target, options.seconds, ROOT / "out" / "fuzz" / options.target)


if __name__ == "__main__":
    sys.exit(main())
