"""Run one fuzzer for some seconds: `python fuzz/run.py records --seconds 60`; `make fuzz` calls it.

records, events, templates and tokenizers are targets of libFuzzer in Rust, built together by stable Rust and the
system's C++ compiler (g++ is enough; no clang). shards, checkpoints, tables and prepared change complete files and load
them. images, bodies (of the proxy), addresses (of the viewer) and scores (of a cache and a judge) change valid inputs,
one by one. Faults are stored in out/fuzz/TARGET, and the corpus in its subfolder. Make a test of each fault.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import kinds

ROOT = Path(__file__).resolve().parent.parent
TRIPLE = "x86_64-unknown-linux-gnu"
COUNTED = ("level=4", "inline-8bit-counters", "pc-table", "trace-compares")
COVERAGE = " ".join(["-Cpasses=sancov-module", *(f"-Cllvm-args=-sanitizer-coverage-{each}" for each in COUNTED)])
IN_RUST = ("records", "events", "templates", "tokenizers")
IN_PYTHON = ("shards", "checkpoints", "tables", "prepared")
MUTATED = ("images", "bodies", "addresses", "scores")
MOST_BYTES = 1 << 16  # of an input
WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_.]{1,30}|\{%-?|-?%\}|\{\{-?|-?\}\}|\\u[0-9a-f]{4}|<\|?[a-z_]{1,20}\|?>")


def seeds(target: str, into: Path, others: list[Path]) -> None:
    """Collect small valid files, for the fuzzer to change, and the words in them."""
    into.mkdir(parents=True, exist_ok=True)
    named = {"templates": "*.jinja", "tokenizers": "tokenizer*.json"}.get(target, "*.json*")
    found = [path for folder in (ROOT / "tests" / "golden", ROOT / "examples", *others) for path in folder.rglob(named)]
    texts = [path.read_bytes() for path in found if path.is_file() and path.stat().st_size < 1 << 22]
    if target == "records":  # also single lines, because a file contains several inputs
        texts += [line for text in texts for line in text.splitlines()[:9]]
    elif target == "events":
        texts = [stream for text in texts for stream in streams(text)]
    elif target == "templates":
        texts += [source.encode() for source in small_templates()]
    elif target == "tokenizers":
        texts += [text + b"\0Hello low, <a> ab \xc3\xa9 12" for text in kinds.small()]
    for number, text in enumerate({text for text in texts if text and len(text) <= MOST_BYTES}):
        (into / str(number)).write_bytes(text)
    words = sorted({word for text in texts for word in WORD.findall(text)})
    quoted = ("".join(f"\\x{byte:02x}" for byte in word) for word in words[:: len(words) // 2000 + 1])
    (into.parent / "words").write_text("".join(f'"{word}"\n' for word in quoted))


def small_templates() -> list[str]:
    """Yield templates that a grammar of the tests draws."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from template_grammar import BEFORE, Grammar

    return [BEFORE + Grammar(seed).statements(2) for seed in range(200)]


def streams(text: bytes) -> Iterator[bytes]:
    """Yield the streams among the records of a file, with one event per line."""
    for line in text.splitlines():
        try:
            response = json.loads(line)["response"]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(response, str):
            yield response.encode()
        elif isinstance(response, list):
            yield b"\n".join(json.dumps(chunk).encode() for chunk in response)


def build() -> None:
    """Build all Rust targets with coverage on stable Rust at once: their shared crates need most of the time."""
    told = {**os.environ, "RUSTFLAGS": f"{COVERAGE} --cfg fuzzing", "CARGO_TARGET_DIR": str(ROOT / "target" / "fuzz")}
    cargo = ["cargo", "build", "--release", "--quiet", "--target", TRIPLE, "--bins"]
    subprocess.run(cargo, cwd=ROOT / "fuzz", env=told, check=True)


def in_rust(target: str, seconds: int, out: Path, seed: int, others: list[Path]) -> int:
    """Run a built target. Memory and time of one input are limited."""
    seeds(target, out / "seeds", others)
    (out / "corpus").mkdir(exist_ok=True)
    options = {
        "max_total_time": seconds,
        "seed": seed % (1 << 31),
        "timeout": 60,  # of the clock; the targets themselves end on CPU time and on memory
        "rss_limit_mb": 3072,
        "max_len": MOST_BYTES,
        "print_final_stats": 1,
        "artifact_prefix": f"{out}/",
        "dict": out / "words",
    }
    binary = ROOT / "target" / "fuzz" / TRIPLE / "release" / target
    run = [binary, *(f"-{name}={value}" for name, value in options.items()), out / "corpus", out / "seeds"]
    return subprocess.run(run, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=[*IN_RUST, *IN_PYTHON, *MUTATED])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="repeats an earlier run")
    parser.add_argument("--seeds", type=Path, nargs="*", default=[], help="folders with more initial files")
    parser.add_argument("--built", action="store_true", help="do not build the Rust targets again")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "fuzz")
    options = parser.parse_args()
    out = options.out.resolve() / options.target
    if options.target in IN_RUST:
        if not options.built:
            build()
        return in_rust(options.target, options.seconds, out, options.seed, options.seeds)
    if options.target in MUTATED:
        import mutated

        return mutated.fuzz(options.target, options.seconds, out, options.seed)
    import stored

    return stored.fuzz(options.target, options.seconds, out, options.seed)


if __name__ == "__main__":
    sys.exit(main())
