"""Record what tracegrad computes, by its commands and its objectives, and compare two records bit for bit.

    python tools/same.py record before.json                     # at the commit before files move
    python tools/same.py record after.json                      # after
    python tools/same.py compare before.json after.json         # prints what differs; exit status 1 if anything does
    python tools/same.py record part.json --only prepare doctor # only some sections
    python tools/same.py record all.json --online out/online    # with the replay of a run of `tracegrad online`

Arrays are recorded by their hash, and numbers of metrics as JSON writes them, so both records must be made on one
machine. Times, hashes of commits and paths of results are left out. `--renames` of `compare` names a CSV file with
lines `old,new`: keys and values that changed on purpose, as tools/renames.csv does. An empty second column leaves a key
out. `--no-text` compares no messages.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
QUICKSTART, IMAGES = ROOT / "examples" / "quickstart", ROOT / "examples" / "images"
VOLATILE = {"seconds", "tokens_per_s", "commit", "version", "checkpoint", "device_idle"}
VOLATILE |= {"bytes", "crc32", "source_mtime_ns"}
"""Keys whose values differ from run to run, or depend on a file with such a value."""
PLAIN = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
SMALL = ["--train.max_steps", "8", "--train.epochs", "8", "--train.groups_per_step", "6"]
RANKS = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
Found = Iterator[tuple[str, Any]]


def tracegrad(*arguments: Any, launcher: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output, whatever its exit status."""
    command = [sys.executable, *launcher, "-m", "tracegrad", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **PLAIN}, capture_output=True, text=True, check=False)


def recordings() -> list[Path]:
    """Every file of traces in the tree."""
    golden = ROOT / "tests" / "golden"
    named = [path for kind in ("*.jsonl", "*.jsonl.zst", "*.eval") for path in golden.rglob(kind)]
    return sorted([*named, QUICKSTART / "traces.jsonl.zst", IMAGES / "traces.jsonl.zst"])


def model_of(path: Path) -> Path:
    """The model that a recording is aligned with."""
    return (IMAGES if path.parent == IMAGES else QUICKSTART) / "model"


def plain(value: Any, out: Path) -> Any:
    """A value of JSON without what differs from run to run."""
    if isinstance(value, dict):
        return {key: UNORDERED.get(key, plain)(each, out) for key, each in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [plain(each, out) for each in value]
    if isinstance(value, str):
        return value.replace(str(out), "OUT").replace(str(ROOT) + "/", "")
    return value


UNORDERED: dict[str, Callable[[Any, Path], Any]] = {
    "files": lambda files, out: sorted(files) if isinstance(files, dict) else plain(files, out),
    "target_modules": lambda names, _: sorted(names),
}
"""Values that no run repeats: sizes and checksums of a checkpoint's files, and the order of what peft has as a set."""


def digest(data: bytes) -> str:
    """Sixteen digits of its hash."""
    return hashlib.sha256(data).hexdigest()[:16]


def files_of(folder: Path, out: Path) -> Found:
    """Yield arrays of a folder by their hash, JSON unchanged, other files only by name."""
    from safetensors.numpy import load_file

    for path in sorted(each for each in folder.rglob("*") if each.is_file() and not each.is_symlink()):
        name = str(path.relative_to(folder))
        if path.name.startswith("random-"):
            yield name, "is there"  # the state of generators without a seed
        elif path.suffix == ".safetensors":
            for key, array in sorted(load_file(path).items()):
                yield f"{name}:{key}", f"{array.dtype}{list(array.shape)} {digest(array.tobytes())}"
        elif path.suffix == ".json":
            yield name, plain(json.loads(path.read_text()), out)
        elif path.suffix == ".jsonl":
            yield name, [plain(json.loads(line), out) for line in path.read_text().splitlines()]
        else:
            yield name, "is there"


# --- sections ---


def prepared(out: Path, _: argparse.Namespace) -> Found:
    """Folders that `prepare` makes of every recording by one process, and of the largest by two."""
    cases = [(path, 1) for path in recordings()] + [(QUICKSTART / "traces.jsonl.zst", 2)]
    for number, (path, workers) in enumerate(cases):
        folder = out / f"{number}"
        given = [path, "--model", model_of(path), "--out", folder, "--workers", workers]
        done = tracegrad("prepare", *given, "--on-error", "skip", "--allow-unknown-ids")
        name = f"{path.relative_to(ROOT)}, {workers} workers"
        yield f"{name}: says", [done.returncode, plain(done.stdout, folder), plain(done.stderr, folder)]
        for key, value in files_of(folder, folder) if folder.exists() else ():
            yield f"{name}: {key}", value


def examined(_: Path, __: argparse.Namespace) -> Found:
    """Return the output of `doctor --json` for every recording."""
    for path in recordings():
        model = model_of(path).relative_to(ROOT)
        done = tracegrad("doctor", path.relative_to(ROOT), "--model", model, "--json")
        found = json.loads(done.stdout) if done.stdout.startswith("{") else done.stdout + done.stderr
        yield str(path.relative_to(ROOT)), [done.returncode, found]


def objectives(_: Path, __: argparse.Namespace) -> Found:
    """Loss and gradient of every preset on the same arrays."""
    import numpy as np
    import torch

    from tracegrad.objective import presets
    from tracegrad.objective.torch_loss import padded_loss

    rng = np.random.default_rng(0)
    rows, length = 16, 12
    draw = lambda: torch.from_numpy(rng.normal(-1.5, 0.5, (rows, length)))  # noqa: E731
    theta, old, rollout, ref = (draw() for _ in range(4))
    entropy, mask = draw().abs(), torch.arange(length) < torch.from_numpy(rng.integers(1, length + 1, rows))[:, None]
    rollout[0, 0] = float("nan")
    given = {
        "mask": mask,
        "advantages": torch.from_numpy(rng.normal(size=rows)),
        "old": old,
        "rollout": rollout,
        "ref": ref,
        "group": np.arange(rows) // 4,
        "alpha": torch.full((rows, length), 0.5, dtype=torch.float64),
    }
    for name in sorted(name for name in presets.__all__ if name.isupper()):
        leaves = [each.clone().requires_grad_() for each in (theta, entropy)]
        try:
            loss = padded_loss(presets.find(name), leaves[0], entropy=leaves[1], **given).loss
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        except Exception as error:
            yield name, f"{type(error).__name__}: {error}"
            continue
        yield name, [loss.item(), *(None if each is None else digest(each.numpy().tobytes()) for each in gradients)]


def trained(out: Path, _: argparse.Namespace) -> Found:
    """Weights, metrics and token logs of eight steps: plain, shared, adapters, images, resumed, two ranks."""
    import zstandard

    lines = zstandard.ZstdDecompressor().stream_reader((QUICKSTART / "traces.jsonl.zst").open("rb")).read().splitlines()
    traces = out / "traces.jsonl"
    traces.write_bytes(b"\n".join(lines[:400]) + b"\n")
    text = [traces, "--model", QUICKSTART / "model", "--config", QUICKSTART / "run.toml", *SMALL]
    images = [IMAGES / "traces.jsonl.zst", "--model", IMAGES / "model", "--config", IMAGES / "run.toml", *SMALL]
    variants = {
        "plain": [text],
        "shared": [[*text, "--pack.share_prefixes", "true"]],
        "adapters": [[*text, "--train.lora_rank", "4"]],
        "images": [images],
        "resumed": [[*text, "--train.max_steps", "4"], [*text, "--resume"]],
        "two ranks": [text],
    }
    for name, runs in variants.items():
        folder = out / name.replace(" ", "-")
        for run in runs:
            launcher = RANKS if name == "two ranks" else ()
            done = tracegrad("train", *run, "--out", folder, launcher=launcher)
            if done.returncode:
                yield f"{name}: failed", plain(re.sub(r"\d+\.\d+ s", "", done.stderr[-500:]), out)
        for key, value in files_of(folder, out) if folder.exists() else ():
            yield f"{name}: {key}", value


def replayed(out: Path, options: argparse.Namespace) -> Found:
    """Repeat the steps of a recorded run of `online`."""
    if options.online is None:
        return
    done = tracegrad("replay", options.online, "--model", QUICKSTART / "model", "--out", out / "replay")
    yield "exit status", done.returncode
    yield from files_of(out / "replay", out)


def configured(_: Path, __: argparse.Namespace) -> Found:
    """Every option with its default."""
    given = [QUICKSTART / "traces.jsonl.zst", "--model", QUICKSTART / "model", "--out", "OUT", "--print-config"]
    yield "train --print-config", tracegrad("train", *given).stdout.splitlines()


SECTIONS: dict[str, Callable[[Path, argparse.Namespace], Found]] = {
    "prepare": prepared,
    "doctor": examined,
    "objectives": objectives,
    "train": trained,
    "replay": replayed,
    "config": configured,
}


def record(options: argparse.Namespace) -> None:
    """Write the results of the sections."""
    found: dict[str, dict[str, Any]] = {}
    for name in options.only or SECTIONS:
        with tempfile.TemporaryDirectory() as out:
            found[name] = dict(SECTIONS[name](Path(out), options))
        print(f"{name}: {len(found[name])} values", flush=True)
        options.first.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def new_name(key: str, names: Mapping[str, str]) -> str:
    """Return the new name of a key. The parts of a path, an array's name and a metric's selection are renamed too.

    >>> new_name("ess/turn_0", {"ess": "token_ess"}), new_name("loss", {"ess": "token_ess"})
    ('token_ess/turn_0', 'loss')
    >>> new_name("ess/tier_T0", {"ess": "token_ess", "tier_T0": "level_T0"})
    'token_ess/level_T0'
    >>> new_name("one worker: shard-00000/traces.safetensors:tier", {"tier": "alignment_level"})
    'one worker: shard-00000/traces.safetensors:alignment_level'
    """
    return names[key] if key in names else "".join(names.get(part) or part for part in re.split("(: |[/:])", key))


def is_prose(value: Any) -> bool:
    """Return whether a value is text for people: it has a blank."""
    return isinstance(value, str) and " " in value


def differences(
    before: Any, after: Any, names: Mapping[str, str], place: str = "", *, with_text: bool = True
) -> Iterator[str]:
    """Yield each place at which two records differ, with both values.

    Args:
        names: old to new keys. A key is renamed where the second record has only the new one.
        with_text: whether messages are compared.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        moved = {key: new_name(key, names) for key in before if key not in after}
        before = {moved.get(key, key) if moved.get(key) in after else key: value for key, value in before.items()}
        for key in sorted({*before, *after}):
            if key in before and key in after:
                yield from differences(before[key], after[key], names, f"{place}/{key}", with_text=with_text)
            elif names.get(key) != "":  # "" in the table: left out on purpose
                yield f"{place}/{key}: is {'new' if key in after else 'gone'}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, names, f"{place}[{number}]", with_text=with_text)
    elif isinstance(before, str) and isinstance(after, str):
        is_skipped = not with_text and (is_prose(before) or is_prose(after))
        if not is_skipped and before != after and names.get(before) != after:
            yield f"{place}: {before[:200]!r} became {after[:200]!r}"
    elif before != after or type(before) is not type(after):
        yield f"{place}: {str(before)[:200]!r} became {str(after)[:200]!r}"


def compare(options: argparse.Namespace) -> None:
    """Print what differs."""
    names: dict[str, str] = {}
    if options.renames:
        with options.renames.open() as file:
            names = {row[0]: row[1] for row in csv.reader(file) if row}
    before, after = (json.loads(path.read_text()) for path in (options.first, options.second))
    found = list(differences(before, after, names, with_text=not options.no_text))
    print("\n".join(found[:200]) or f"the same: {sum(map(len, after.values()))} values")
    if len(found) > 200:
        print(f"and {len(found) - 200} more")
    sys.exit(bool(found))


def main() -> None:
    """Run the command line."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("what", choices=["record", "compare"])
    options.add_argument("first", type=Path)
    options.add_argument("second", type=Path, nargs="?")
    options.add_argument("--only", nargs="+", choices=SECTIONS)
    options.add_argument("--online", type=Path, help="the folder of a run of `tracegrad online`")
    options.add_argument("--renames", type=Path, help="a CSV file with lines old,new: keys that changed on purpose")
    options.add_argument("--no-text", action="store_true", help="do not compare messages")
    given = options.parse_args()
    if given.what == "compare" and given.second is None:
        options.error("compare takes two records")
    (record if given.what == "record" else compare)(given)


if __name__ == "__main__":
    main()
