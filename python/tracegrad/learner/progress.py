"""What a checkpoint holds beside parameters and optimizer: counts, controllers, random states. Checked when read.

Here are `Progress`, its files, and the random states of a process. Folders are `checkpoint`'s, tensors of the model
`state`'s.
"""

import json
import math
import os
import random
import re
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tracegrad import outputs, shards
from tracegrad.errors import ReadError
from tracegrad.shards import Written

FORMAT = "tracegrad-checkpoint/4"
MARK = "progress.json"
_SEAL = "crc32"
_LOGPROBS = "logprobs.safetensors"
_LIMIT = 16 << 20
_MT_WORDS = 624


class OtherRunError(ReadError):
    """A checkpoint that is not damaged, and not of this model or version."""


@dataclass(frozen=True)
class Progress:
    """What a run knows beside its parameters and optimizer.

    Args:
        step: optimizer steps taken.
        fingerprint: of the data, the same for the same terms; "" where the run has no data set.
        config: dotted names to values, as the run was told.
        logprobs: named [terms] float32 arrays: `old` for the steps not yet taken, `ref`.
        control: what adapts from step to step, `learner.entropy.Control.state`.
        seconds: wall time by stage, of all processes that the run has had.
        version: of the policy, as the last step was told; -1 where none was.
    """

    step: int
    fingerprint: str
    config: Mapping[str, Any]
    logprobs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    control: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    version: int = -1


def save_logprobs(folder: Path, progress: Progress) -> None:
    """Writes the arrays of what is known, before the mark."""
    shards.write(folder / _LOGPROBS, progress.logprobs)


def save(folder: Path, progress: Progress, elsewhere: Mapping[str, Written] | None = None) -> None:
    """Writes the mark of a whole checkpoint, last of all: what else is known, and sizes and checksums of what is there.

    Args:
        elsewhere: files of the same checkpoint that other machines hold, by name.
    """
    held = {**(elsewhere or {}), **_measured(folder, _files(folder))}
    files = {name: [file.bytes, f"{file.crc32:08x}"] for name, file in sorted(held.items())}
    said = {
        "format": FORMAT,
        "step": progress.step,
        "fingerprint": progress.fingerprint,
        "config": dict(progress.config),
        "control": dict(progress.control),
        "seconds": dict(progress.seconds),
        "version": progress.version,
        "files": files,
    }
    outputs.write(folder / MARK, json.dumps(sealed(said), indent=1))


def sealed(said: Mapping[str, Any]) -> dict[str, Any]:
    """What a mark says, with the checksum of it: a step or a coefficient that changed on a disk is not taken up."""
    said = {name: value for name, value in said.items() if name != _SEAL}
    return {**said, _SEAL: f"{zlib.crc32(json.dumps(said, sort_keys=True).encode()):08x}"}


def read(folder: Path) -> Progress:
    """What a checkpoint says of its run; whatever else it is than what `save` writes is a ValueError or the like.

    Raises:
        ReadError: if it is of another format.
    """
    said = _told(folder)
    logprobs, _ = shards.read(folder / _LOGPROBS)
    if any(array.ndim != 1 or array.dtype != np.float32 for array in logprobs.values()):
        raise ValueError("its logprobs are not flat arrays of float32")
    if type(said["step"]) is not int or not 0 <= said["step"] < 1 << 53 or not isinstance(said["fingerprint"], str):
        raise ValueError("it does not say which step it is of, and of which data")
    if not isinstance(said["config"], dict):
        raise ValueError("it does not say how the run was told")
    version = said.get("version", -1)  # those of before did not say it
    if type(version) is not int or not -1 <= version < 1 << 53:
        raise ValueError("it does not say which version its policy is")
    numbers = {name: _numbers(said[name]) for name in ("control", "seconds")}
    return Progress(said["step"], said["fingerprint"], said["config"], logprobs, **numbers, version=version)


def marked(folder: Path) -> list[str]:
    """The names of the files that a mark tells of.

    Raises:
        ReadError: if it is of another format, or no mark.
    """
    try:
        return list(_told(folder)["files"])
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ReadError):
            raise
        raise ReadError(f"{folder / MARK}: {error}. It is not known what the checkpoint holds. Delete it.") from error


def verify(folder: Path) -> None:
    """Compares every file with its length and checksum when the checkpoint was written; reads each once.

    Raises:
        ReadError: if it is of another format.
        ValueError: with the file that is missing, too many or not as it was; OSError if one cannot be read.
    """
    expected = _told(folder)["files"]
    measured = _measured(folder, _files(folder))
    for name in sorted(expected.keys() ^ measured.keys()):
        raise ValueError(f"{name[:80]!r} is {'missing' if name in expected else 'not of this checkpoint'}")
    for name, file in measured.items():
        if expected[name] != [file.bytes, f"{file.crc32:08x}"]:
            raise ValueError(f"{name!r} is not as it was written, by its length or checksum")


def save_random(path: Path) -> None:
    """Writes the random states of this process: torch's, its devices', numpy's and Python's."""
    save_file(_random_states(), path, metadata={"python": json.dumps(random.getstate())})


def set_random(path: Path) -> None:
    """Puts them back; whatever else stands there is a ValueError or the like, before any is set."""
    states = load_file(path)
    position, has_gauss, gauss = states["numpy_rest"].tolist()
    words = states["numpy_keys"].numpy()
    # numpy takes a position as it is and would draw from the memory behind its state.
    fits = words.shape == (_MT_WORDS,) and words.min() >= 0 and words.max() < 1 << 32 and 0 <= position <= _MT_WORDS
    if not fits or has_gauss not in (0.0, 1.0) or not math.isfinite(gauss):
        raise ValueError("its random state of numpy is none")
    if states["torch"].shape != torch.get_rng_state().shape:
        raise ValueError("its random state of torch is none")
    with safe_open(path, framework="pt") as file:
        version, inner, gaussian = json.loads(file.metadata()["python"])
    random.setstate((version, tuple(inner), gaussian))
    torch.set_rng_state(states["torch"])
    np.random.set_state(("MT19937", words.astype(np.uint32), int(position), int(has_gauss), gauss))  # noqa: NPY002
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            if f"cuda{i}" in states:
                torch.cuda.set_rng_state(states[f"cuda{i}"], i)


def _random_states() -> dict[str, torch.Tensor]:
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 (the global state is what is saved)
    assert kind == "MT19937"
    states = {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(np.asarray(keys, np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states |= {f"cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _told(folder: Path) -> dict[str, Any]:
    said = json.loads(shards.read_text(folder / MARK, _LIMIT))
    if not isinstance(said, dict):
        raise ValueError(f"its {MARK} is no table")
    if said["format"] != FORMAT:
        raise OtherRunError(
            f"{folder.parent}: a checkpoint of format {str(said['format'])[:40]!r}, and this version reads {FORMAT}. "
            "Its state cannot be taken up. Resume with the version that wrote it, or start anew from it with --model."
        )
    if said != sealed(said):
        raise ValueError(f"{MARK!r} is not as it was written, by its checksum")
    return said


def _files(folder: Path) -> list[str]:
    """Whatever lies below the folder but the mark and the card: files, and links, which are none of ours."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for path in paths if (name := path.relative_to(folder).as_posix()) not in (MARK, CARD))


def _measured(folder: Path, names: Iterable[str]) -> dict[str, Written]:
    """Lengths and checksums, several files at a time: crc32 lets go of the interpreter."""
    names = list(names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: shards.measure(folder / name), names), strict=True))


def _numbers(said: Any) -> dict[str, float]:
    if not isinstance(said, dict) or any(type(n) not in (int, float) or math.isnan(n) for n in said.values()):
        raise ValueError("it has something else where numbers belong")
    return {name: float(value) for name, value in said.items()}


def step_of(name: str) -> int:
    """The step that a checkpoint's folder is named for; -1 where it is no such name."""
    match = re.fullmatch(r"step-(\d{8,15})", name)
    return int(match[1]) if match else -1


CARD = "README.md"
"""Text for people, written last, which nothing reads."""
