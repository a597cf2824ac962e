"""Time of read, align and pack on one thread and on all, beside as many processes of one thread with a share each.

    python benches/cores.py --tokens 12

Input: the bundled example, repeated until it has that many million tokens. Each measurement is a process of its own;
rounds alternate, and the least of each figure counts. Times of a stage are per token of the aligned sequences. The
serial share is what Amdahl's law gives for the times on one thread and on all. The share of separate processes is the
time of these processes, started together, over the time of one process with as many threads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tracegrad as tg

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart"
STAGES = ("read", "align", "pack")


def write_repeated(path: Path, tokens: float, parts: int) -> list[Path]:
    """Write the example repeated to `tokens`, and the same in `parts` files. Returns the files, the whole one first."""
    traces = tg.read(EXAMPLE / "traces.jsonl.zst")
    tokenizer = tg.Tokenizer.from_pretrained(EXAMPLE / "model")
    once = tg.align(traces, tokenizer).tokens
    rounds = max(1, round(tokens / once / parts))
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as plain:
        tg.write(traces, plain.name)
        lines = Path(plain.name).read_bytes()
    files = [path / f"{name}.jsonl" for name in ("whole", *map(str, range(parts)))]
    for file, count in zip(files, (rounds * parts, *[rounds] * parts), strict=True):
        file.write_bytes(lines * count)
    return files


def child(path: Path) -> None:
    """Read, align and pack a file once a line arrives on standard input, and print wall and CPU seconds as JSON."""
    tokenizer = tg.Tokenizer.from_pretrained(EXAMPLE / "model")
    tg.align(tg.read(EXAMPLE / "traces.jsonl.zst", limit=64), tokenizer)
    print("ready", flush=True)
    sys.stdin.readline()
    marks = [(time.perf_counter(), time.process_time())]
    traces = tg.read(path)
    marks.append((time.perf_counter(), time.process_time()))
    sequences = tg.align(traces, tokenizer)
    marks.append((time.perf_counter(), time.process_time()))
    advantages = tg.advantage.group_mean(sequences.reward, sequences.group)
    tg.pack(sequences, advantages, tokens_per_row=8192, share_prefixes=True)
    marks.append((time.perf_counter(), time.process_time()))
    spent = {stage: [marks[at + 1][clock] - marks[at][clock] for clock in (0, 1)] for at, stage in enumerate(STAGES)}
    print(json.dumps({"tokens": sequences.tokens, **spent}), flush=True)


def measure(files: list[Path], threads: int) -> list[dict[str, Any]]:
    """Run one process a file with this many threads, all at once. Returns what each printed, with its seconds."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child"]
    running = [
        subprocess.Popen(
            [*command, str(file)], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for file in files
    ]
    for process in running:
        assert process.stdout.readline() == "ready\n"  # pyright: ignore[reportOptionalMemberAccess]
    for process in running:
        process.stdin.write("\n")  # pyright: ignore[reportOptionalMemberAccess]
        process.stdin.flush()  # pyright: ignore[reportOptionalMemberAccess]
    results = [json.loads(process.communicate()[0]) for process in running]
    return [{**result, "seconds": sum(result[stage][0] for stage in STAGES)} for result in results]


def serial_share(one: float, all_threads: float, threads: int) -> float:
    """Return the share of the work on one thread that further threads do not shorten."""
    return (all_threads / one - 1 / threads) / (1 - 1 / threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=float, default=12, help="size of the input, in millions")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child)
    with tempfile.TemporaryDirectory() as folder:
        whole, *parts = write_repeated(Path(folder), options.tokens * 1e6, options.threads)
        one, every, separate = [], [], []
        for _ in range(options.rounds):
            one += measure([whole], 1)
            every += measure([whole], options.threads)
            separate.append(max(result["seconds"] for result in measure(parts, 1)))
    tokens = one[0]["tokens"]
    rows = []
    for stage in STAGES:
        alone, cpu = (min(result[stage][clock] for result in one) for clock in (0, 1))
        together = min(result[stage][0] for result in every)
        rows.append([stage, cpu / tokens * 1e9, alone / tokens * 1e9, together / tokens * 1e9, alone / together])
    alone, together = (min(result["seconds"] for result in results) for results in (one, every))
    rows.append(["all", sum(row[1] for row in rows), alone / tokens * 1e9, together / tokens * 1e9, alone / together])
    shares = {
        "serial share": serial_share(alone, together, options.threads),
        "share of separate processes": min(separate) / together,
    }
    print(f"{tokens:,} tokens, {options.threads} threads, least of {options.rounds} rounds, ns a token")
    print(f"{'stage':8}{'CPU, 1 thread':>15}{'1 thread':>10}{'all':>8}{'speedup':>9}")
    for name, cpu, alone, together, speedup in rows:
        print(f"{name:8}{cpu:15.1f}{alone:10.1f}{together:8.1f}{speedup:9.2f}")
    for name, share in shares.items():
        print(f"{name}: {share:.1%}")
    if options.out:
        columns = ("cpu_ns", "one_thread_ns", "all_threads_ns", "speedup")
        stages = {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows}
        options.out.write_text(json.dumps({"tokens": tokens, "threads": options.threads, **stages, **shares}, indent=1))


if __name__ == "__main__":
    main()
