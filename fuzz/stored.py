"""Changes folders that this package wrote, seals half of them anew as a forger would, and loads them.

A folder that loads says what it said before, or was sealed anew and is consistent; all else is an error of ours, in
bounded memory. `run.py` calls it.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from tracegrad.batch import pack
from tracegrad.errors import TracegradError
from tracegrad.sequence import Sequences

MEMORY = 4 << 30  # beyond what the process has at the start
HOSTILE = [
    b"-1",
    b"1e999",
    b"18446744073709551616",
    b"null",
    b'"x"',
    b"[[[[",
    b"\x00",
    b"\xff\xfe",
    b"99999999999",
    b"{}",
]


def fuzz(target: str, seconds: int, out: Path) -> int:
    """Runs until the time is over or something is found, which then stands in `out` as it was loaded."""
    out.mkdir(parents=True, exist_ok=True)
    whole, load, sealed = (shards if target == "shards" else checkpoints)(out / "whole")
    load(whole, True)  # else everything would be refused
    _bound_memory()
    seed, until, refused, loaded = 0, time.monotonic() + seconds, 0, 0
    changed = out / "changed"
    while time.monotonic() < until:
        seed += 1
        draw = random.Random(seed)
        shutil.rmtree(changed, ignore_errors=True)
        shutil.copytree(whole, changed, symlinks=True)
        for _ in range(draw.randint(1, 3)):
            change(draw, draw.choice(sorted(p for p in changed.rglob("*") if p.is_file())))
        forged = draw.random() < 0.5
        try:
            if forged:
                sealed(changed)
            load(changed, not forged)
            loaded += 1
        except TracegradError:
            refused += 1
        except Exception:
            traceback.print_exc()
            print(f"seed {seed}: not an error of ours; the folder is {changed}")
            return 1
    print(f"{target}: {seed} folders in {seconds} s, {refused} refused, {loaded} loaded")
    return 0


def change(draw: random.Random, file: Path) -> None:
    """One change of a file: bytes, its length, a word of its text, or the file itself."""
    data = bytearray(file.read_bytes())
    place = draw.randrange(len(data) + 1)
    kind = draw.randrange(7)
    if kind == 0 and data:
        data[place % len(data)] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del data[place:]
    elif kind == 2:
        data[place:place] = bytes(draw.randrange(256) for _ in range(draw.choice([1, 8, 1000])))
    elif kind == 3:
        data[place:place] = data[draw.randrange(len(data) + 1) :][: draw.choice([1, 16, 4096])]
    elif kind == 4:
        data[place : place + draw.randrange(1, 12)] = draw.choice(HOSTILE)
    elif kind == 5 and data[:1] != b"{" and len(data) > 8:  # the header of a safetensors file
        length = min(int.from_bytes(data[:8], "little"), len(data) - 8)
        at = 8 + draw.randrange(max(length, 1))
        data[at : at + draw.randrange(1, 6)] = draw.choice(HOSTILE)
        grown = len(data) - 8 - (len(file.read_bytes()) - 8 - length)
        data[:8] = max(grown, 0).to_bytes(8, "little")
    elif kind == 6 and draw.random() < 0.3:
        file.unlink()
        return
    file.write_bytes(data)


def shards(whole: Path) -> tuple[Path, Callable[[Path, bool], None], Callable[[Path], None]]:
    """A folder of `Sequences.save`; what loads is packed, so that its indices are followed."""
    shutil.rmtree(whole, ignore_errors=True)
    cu = np.array([0, 4, 9, 12])
    logprobs = np.full(12, -1.0, np.float32)
    trainable = ~np.isin(np.arange(12), cu)
    said = {"trace": [0, 1, 1], "group": [0, 0], "rewards": np.array([[1.0], [0.0]], np.float32)}
    known = Sequences.from_arrays(np.arange(12), cu, np.where(trainable, logprobs, np.nan), trainable, **said)
    known.save(whole)

    def load(folder: Path, same: bool) -> None:
        found = Sequences.load(folder, verify=True)
        if same:
            assert np.array_equal(found.ids, known.ids), "other ids under the same checksums"
        pack(found, np.zeros(found.traces), token_budget=1 << 16)

    return whole, load, _seal_shards


def _seal_shards(folder: Path) -> None:
    path = folder / "manifest.json"
    try:
        told = json.loads(path.read_text())
        for name in told["files"]:
            data = (folder / name).read_bytes()
            told["files"][name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
        path.write_text(json.dumps(told))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return  # the change is in the manifest itself


def checkpoints(whole: Path) -> tuple[Path, Callable[[Path, bool], None], Callable[[Path], None]]:
    """A checkpoint of a tiny model and its AdamW."""
    import torch

    from tiny import tiny_model
    from tracegrad.learner import checkpoint

    torch.set_num_threads(1)
    shutil.rmtree(whole, ignore_errors=True)
    model = tiny_model()

    def adamw(of: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(of.parameters(), lr=0.1)

    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    at = checkpoint.Progress(3, "abc", {"optimizer.lr": 0.1}, {"old": np.array([np.nan, -1.0], np.float32)})
    made = checkpoint.save(whole, model, optimizer, at, tokenizer=None, keep=1)
    name = made.relative_to(whole)
    again = tiny_model(1)

    def load(folder: Path, same: bool) -> None:
        for number, parameter in enumerate(again.parameters()):
            torch.nn.init.constant_(parameter, number)
        found = checkpoint.restore(folder / name, again, adamw(again))
        if same:
            assert found.step == 3
            for a, b in zip(again.parameters(), model.parameters(), strict=True):
                assert torch.equal(a, b), "other parameters under the same checksums"

    def sealed(folder: Path) -> None:
        resume = folder / name / "resume"
        try:
            told = json.loads((resume / "progress.json").read_text())
            for inside in told["files"]:
                data = (resume / inside).read_bytes()
                told["files"][inside] = [len(data), f"{zlib.crc32(data):08x}"]
            (resume / "progress.json").write_text(json.dumps(told))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return

    return whole, load, sealed


def _bound_memory() -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
