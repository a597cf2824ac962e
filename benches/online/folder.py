"""Recorded calls to a Step on one core: a folder of played groups compared with the same traces in one file.

    python benches/online/folder.py --out benches/results/online.json

The folder's path is the loop's: `GroupReader`, then for each step of 16 groups concatenate, align, advantages, pack.
The
file's is a user's: `tracegrad.read` of the complete JSONL (plain, and compressed as the zstd command does: one frame
with a checksum, as each of the folder's has), align, advantages, pack into steps of as many groups. Rates are tokens of
packed rows, prompts among them, by CPU seconds; the fastest of some alternating rounds. The records are of
the example with ids recorded, `--copies` times, or of a run's folder. `--instructions` counts what each path executes
instead, by valgrind: a second round less the first. That figure does not depend on what else the machine does.
"""

from __future__ import annotations

import os

os.environ["RAYON_NUM_THREADS"] = "1"

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

import machine
import tracegrad as tg
from tracegrad.online.buffer import GroupReader, GroupWriter

COMMAND = "python benches/online/folder.py --out benches/results/online.json"
COUNTED = "python benches/online/folder.py --instructions --copies 2 --out benches/results/online.json"
SAMPLES, GROUPS = 8, 16


def example(copies: int) -> list[list[dict[str, Any]]]:
    """Groups of eight of the example's records whose calls have ids."""
    packed = (machine.QUICKSTART / "traces.jsonl.zst").read_bytes()
    with zstandard.ZstdDecompressor().stream_reader(packed) as file:
        lines = [line for line in file.read().splitlines() if b'"shape":"token_ids"' in line or b"token_ids" in line]
    records = [record for line in lines if (record := json.loads(line))["metadata"]["shape"] == "token_ids"]
    groups = []
    for number in range(copies * len(records) // SAMPLES):
        taken = (records[(number * SAMPLES + each) % len(records)] for each in range(SAMPLES))
        groups.append([{**one, "id": f"{number}-{each}", "group": str(number)} for each, one in enumerate(taken)])
    return groups


def played(folder: Path) -> list[list[dict[str, Any]]]:
    """The groups of a run."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted((folder / "played").glob("*.jsonl.zst")):
        with zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True) as file:
            for line in file.read().splitlines():
                groups[json.loads(line)["group"]].append(json.loads(line))
    return list(groups.values())


def step_of(traces: tg.Traces, tokenizer: tg.Tokenizer) -> int:
    """Tokens of the packed rows."""
    sequences = tg.align(traces, tokenizer, on_error="skip")
    advantages = tg.advantage.group_mean(sequences.reward, sequences.group)
    packed = tg.pack(sequences, advantages, tokens_per_row=8192, groups_per_step=GROUPS)
    return sum(batch.ids.size for step in packed for batch in step.batches)


def by_folder(folder: Path, tokenizer: tg.Tokenizer) -> int:
    """As the loop does."""
    found = [traces for _, traces in GroupReader(folder).read_new()]
    steps = (found[start : start + GROUPS] for start in range(0, len(found), GROUPS))
    return sum(step_of(tg.Traces.concatenate(groups), tokenizer) for groups in steps)


def measured(roads: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Tokens per CPU second of each path."""
    best = dict.fromkeys(roads, np.inf)
    tokens = {}
    for _ in range(rounds):
        for name, road in roads.items():
            began = time.process_time()
            tokens[name] = road()
            best[name] = min(best[name], time.process_time() - began)
    assert len(set(tokens.values())) == 1, tokens
    return {name: tokens[name] / seconds for name, seconds in best.items()}


def roads_of(folder: Path, tokenizer: tg.Tokenizer) -> dict[str, Callable[[], int]]:
    """Each path by name."""
    return {
        "folder": lambda: by_folder(folder / "played", tokenizer),
        "file": lambda: step_of(tg.read(folder / "all.jsonl"), tokenizer),
        "file, zstd": lambda: step_of(tg.read(folder / "all.jsonl.zst"), tokenizer),
    }


def instructions(road: str, folder: Path, model: Path) -> int:
    """Instructions that a path executes."""

    def spent(rounds: int) -> int:
        call = f"import folder; folder.again({road!r}, {str(folder)!r}, {str(model)!r}, {rounds})"
        told = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        ran = subprocess.run(
            [*told, sys.executable, "-c", call],
            cwd=Path(__file__).parent,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found = re.search(r"I\s+refs:\s+([\d,]+)", ran.stderr)
        assert found, ran.stderr[-500:]
        return int(found[1].replace(",", ""))

    return spent(2) - spent(1)


def again(road: str, folder: str, model: str, rounds: int) -> None:
    """Run a path several times in a separate process."""
    work = roads_of(Path(folder), tg.Tokenizer.from_pretrained(model))[road]
    for _ in range(rounds):
        work()


def main() -> None:
    """Prints and writes the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--run", type=Path, help="folder of an online run instead of the example")
    parser.add_argument("--model", type=Path, default=machine.MODEL)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--instructions", action="store_true", help="count them by valgrind instead of CPU seconds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    groups = played(options.run) if options.run else example(options.copies)
    tokenizer = tg.Tokenizer.from_pretrained(options.model)
    with tempfile.TemporaryDirectory() as name:
        folder, plain, packed = Path(name) / "played", Path(name) / "all.jsonl", Path(name) / "all.jsonl.zst"
        with GroupWriter(folder) as writer:
            for group in groups:
                writer.write(group)
        lines = [json.dumps(record, ensure_ascii=False, separators=(",", ":")) for group in groups for record in group]
        plain.write_text("\n".join(lines) + "\n")
        packed.write_bytes(zstandard.ZstdCompressor(level=1, write_checksum=True).compress(plain.read_bytes()))
        roads = roads_of(Path(name), tokenizer)
        if options.instructions:
            counts = {road: instructions(road, Path(name), options.model) for road in roads}
        else:
            rates = measured(roads, options.rounds)
        size = plain.stat().st_size
    if options.instructions:
        told = {road: counts[road] / counts["folder"] for road in roads}
        print(", ".join(f"{road} {count / 1e6:.1f} M" for road, count in counts.items()))
        print(f"folder over file: {told['file']:.3f}, over file, zstd: {told['file, zstd']:.3f}")
        about = {"counts": counts, "ratio": told["file, zstd"], "ratio_plain": told["file"], "must": 1.0}
        about |= {"unit": "instructions", "groups": len(groups), "bytes": size}
        machine.keep(options.out, [machine.row("recorded calls to Step, instructions", COUNTED, **about)])
        return
    for name, rate in rates.items():
        print(f"{name:10} {rate / 1e6:.2f} Mtok/s of a core")
    rows = []
    for peer, must in (("file", None), ("file, zstd", 1.0)):
        ratio = rates["folder"] / rates[peer]
        print(f"folder over {peer}: {ratio:.2f}")
        told = {"peer": peer, "peer_rate": rates[peer] / 1e6, "rate": rates["folder"] / 1e6, "ratio": ratio}
        told |= {"unit": "Mtok/s, all tokens", "must": must, "groups": len(groups), "bytes": size}
        rows.append(machine.row(f"recorded calls to Step, folder beside {peer}", COMMAND, **told))
    machine.keep(options.out, rows)


if __name__ == "__main__":
    main()
