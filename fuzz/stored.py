"""Change folders that this package wrote, recompute the checksums of half of them, and load them.

A loaded folder has its old contents, or has new checksums and is consistent. Otherwise there is an error of this
package, in limited memory and time. `run.py` calls this file.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import tracegrad as tg
from tracegrad.alignment.penalties import Penalties
from tracegrad.alignment.ragged import Ragged
from tracegrad.alignment.sequences import AlignmentReport, Sequences
from tracegrad.errors import TracegradError
from tracegrad.packing import pack
from tracegrad.storage import manifest

MEMORY = 4 << 30  # in addition to the memory of the process at the start
CPU_SECONDS = 10  # for one folder; a valid one needs milliseconds
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
VALUES = [None, True, -1, 0, 1 << 31, 1 << 62, 1 << 64, 1e308, "", "x" * 9999, "\x1b[2J", [], [[]], {}, {"": 0}]
NUMBERS = [
    0,
    1,
    2,
    255,
    1 << 15,
    (1 << 31) - 1,
    1 << 31,
    (1 << 62),
    (1 << 63) - 1,
    (1 << 64) - 1,
    0x7FC00000,
    0xFF800000,
]


def fuzz(target: str, seconds: int, out: Path, seed: int) -> int:
    """Run until the time is over or a fault is found. The faulty folder is then in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    whole, load, sealed = {"shards": shards, "checkpoints": checkpoints, "tables": tables, "prepared": prepared}[
        target
    ](out / "whole")
    load(whole, True)  # else everything would be refused
    bound_memory()
    first, until, refused, loaded = seed, time.monotonic() + seconds, 0, 0
    changed = out / "changed"
    while time.monotonic() < until:
        seed += 1
        draw = random.Random(seed)
        shutil.rmtree(changed, ignore_errors=True)
        shutil.copytree(whole, changed, symlinks=True)
        for _ in range(draw.randint(1, 3)):
            change(draw, draw.choice(sorted(p for p in changed.rglob("*") if p.is_file())))
        forged = draw.random() < 0.5
        began = time.process_time()
        try:
            if forged:
                sealed(changed)
            load(changed, not forged)
            loaded += 1
            wrong = ""
        except TracegradError as error:
            refused += 1
            wrong = "" if str(error).isprintable() else "an error with control characters"
        except Exception:
            traceback.print_exc()
            wrong = "not an error of ours"
        if time.process_time() - began > CPU_SECONDS:
            wrong = f"{time.process_time() - began:.1f} s"
        if wrong:
            print(f"seed {seed}: {wrong}; the folder is {changed}")
            return 1
    print(f"{target}: {seed - first} folders in {seconds} s from seed {first}, {refused} refused, {loaded} loaded")
    return 0


def change(draw: random.Random, file: Path) -> None:
    """Make one change of a file: bytes, its length, a value of its JSON, numbers of its arrays, or the file itself."""
    if file.suffix in (".parquet", ".arrow"):
        import tabular

        return tabular.change(draw, file)
    data = bytearray(file.read_bytes())
    place = draw.randrange(len(data) + 1)
    kind = draw.randrange(9)
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
    elif kind == 5 and draw.random() < 0.3:
        file.unlink()
        return
    elif data[:1] == b"{":
        data = bytearray(_json_changed(draw, bytes(data)))
    elif len(data) > 8:
        length = min(int.from_bytes(data[:8], "little"), len(data) - 8)
        if draw.random() < 0.5:  # the header of a safetensors file
            header = _json_changed(draw, bytes(data[8 : 8 + length]))
            data[: 8 + length] = len(header).to_bytes(8, "little") + header
        else:
            wide = draw.choice([1, 4, 8])
            at = 8 + length + draw.randrange(max((len(data) - 8 - length) // wide, 1)) * wide
            data[at : at + wide] = (draw.choice(NUMBERS) % (1 << 8 * wide)).to_bytes(wide, "little")
    file.write_bytes(data)


def _json_changed(draw: random.Random, text: bytes) -> bytes:
    """Return the text with one of its values or names changed, repeated or removed."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict | list):
        return text + draw.choice(HOSTILE)
    at: Any = told
    while True:
        names = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not names:
            return text
        name = draw.choice(names)
        if isinstance(at[name], dict | list) and at[name] and draw.random() < 0.7:
            at = at[name]
            continue
        kind = draw.randrange(4)
        if kind == 0:
            del at[name]
        elif kind == 1 and isinstance(at, list):
            at.insert(draw.randrange(len(at) + 1), at[name])
        elif kind == 1:
            at[draw.choice(["", "__proto__", "x" * 999, "\x1b[0m", "../../x", "shard-99999", str(name) + "x"])] = (
                at.pop(name)
            )
        elif isinstance(at[name], int) and draw.random() < 0.5:
            at[name] += draw.choice([-1, 1, 8, -8])
        else:
            at[name] = draw.choice(VALUES)
        return json.dumps(told, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")


def shards(whole: Path) -> tuple[Path, Callable[[Path, bool], None], Callable[[Path], None]]:
    """Make a folder of two shards of `Sequences.save`. A loaded one is packed, so that its indices are used."""
    shutil.rmtree(whole, ignore_errors=True)
    for number in range(2):
        _sequences(number).save(whole / manifest.shard_name(number))
    manifest.seal(whole)
    ids = np.concatenate([_sequences(number).ids for number in range(2)])

    def load(folder: Path, same: bool) -> None:
        found = Sequences.load(folder, verify=True)
        if same:
            assert np.array_equal(found.ids, ids), "other ids under the same checksums"
        found.levels()
        found.alignment_report.table()
        steps = pack(found, np.ones(found.traces), tokens_per_row=1 << 16, share_prefixes=True)
        for step in steps:
            for name, extra in found.extras.items():
                assert len(extra) == found.tokens, name
            assert step.origin.size == 0 or step.origin.max() < found.tokens
        found.save(folder.parent / "again")  # a loaded folder can be written again

    return whole, load, _seal_shards


def prepared(whole: Path) -> tuple[Path, Callable[[Path, bool], None], Callable[[Path], None]]:
    """Make a folder of `prepare`, load it for training, and resume it."""
    from tracegrad.config import Data
    from tracegrad.metrics.loggers import Stopwatch
    from tracegrad.prepare import prepare
    from tracegrad.prepare.run import load as loaded

    root = Path(__file__).resolve().parent.parent
    model = root / "examples" / "quickstart" / "model"
    shutil.rmtree(whole, ignore_errors=True)
    source = whole.parent / "traces.jsonl"
    tg.write(tg.read(root / "examples" / "quickstart" / "traces.jsonl.zst", limit=8), source)
    prepare(str(source), model, Data(), whole, shard_traces=4)
    ids = Sequences.load(whole, verify=True).ids

    def load(folder: Path, same: bool) -> None:
        found, _ = loaded(str(folder), model, Data(), folder.parent / "aside", Stopwatch())
        if same:
            assert np.array_equal(found.ids, ids), "other ids under the same checksums"
        pack(found, np.ones(found.traces), tokens_per_row=1 << 16, share_prefixes=True)
        if (folder / "manifest.json").exists() and folder != whole:
            prepare(str(source), model, Data(), folder, shard_traces=4, resume=True)

    return whole, load, _seal_shards


def _sequences(number: int) -> Sequences:
    """Return two traces and three branches, with all kinds of columns in addition to the tokens."""
    cu = np.array([0, 4, 9, 12])
    trainable = ~np.isin(np.arange(12), cu)
    logprobs = np.where(trainable, np.float32(-1.0 - number), np.nan)
    said = {"trace": [0, 1, 1], "group": [0, 0], "rewards": np.array([[1.0, 0.0], [0.0, np.nan]], np.float32)}
    extras = {
        "routed_experts": np.full((12, 2, 2), 3, np.int16),
        "masks": Ragged(np.arange(13, dtype=np.int64), np.arange(12, dtype=np.int32)),
    }
    ids = np.arange(12) + number
    rows = Ragged(np.array([*range(0, 24, 2), 24]), np.stack([ids, ids + 40], 1).reshape(-1).astype(np.int32))
    one = np.ones(1, np.float32)
    penalties = Penalties(np.array([0]), 1.5 * one, one, one, np.array([1]), np.array([7], np.int32), one)
    sampling = {"support": rows, "penalties": penalties}
    made = Sequences.from_arrays(
        ids, cu, logprobs, trainable, **said, reward_names=("reward", "tests"), extras=extras, **sampling
    )
    where = np.array([1], np.int32)
    report = AlignmentReport(
        np.array([2], np.uint8), where, where, where, where, ("a detail",), recorded=7, exact=6, errors=("one",)
    )
    return replace(made, alignment_report=report, trace_ids=(f"a{number}", f"b{number}"), group_names=("é",))


def _seal_shards(folder: Path) -> None:
    """Write the current sizes and checksums to the manifest of the folder and of each shard."""
    for inside in [*sorted(folder.glob("shard-*")), folder]:
        path = inside / manifest.NAME
        try:
            told = json.loads(path.read_text())
            for name, shard in [(".", told), *told.get("shards", {}).items()]:
                for file in shard.get("files", {}):
                    data = (inside / name / file).read_bytes()
                    shard["files"][file] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
            path.write_text(json.dumps(told))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # the change is in the manifest itself


def checkpoints(whole: Path) -> tuple[Path, Callable[[Path, bool], None], Callable[[Path], None]]:
    """Make a checkpoint of a tiny model and its AdamW."""
    import torch

    from tiny import tiny_model
    from tracegrad.trainer import checkpoint

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
            (resume / "progress.json").write_text(json.dumps(checkpoint.with_checksum(told)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return

    return whole, load, sealed


def tables(whole: Path) -> tuple[Path, Callable[[Path, bool], None], Callable[[Path], None]]:
    """Make a folder of Parquet and Arrow files."""
    import tabular

    return tabular.tables(whole)


def bound_memory() -> None:
    """Limit the additional memory of the process."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
