"""Checkpoints: a model folder that transformers loads, and beside it what a run needs to go on exactly.

A checkpoint appears whole or not at all: it is written to a temporary folder, what marks it as whole last, flushed to
disk and renamed. Tensors are safetensors and the rest is JSON, so that reading one runs no code. Called by the loop.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tracegrad.errors import ReadError, TracegradError
from tracegrad.learner import state
from tracegrad.learner.model import first_line, quiet
from tracegrad.learner.ranks import Ranks

FOLDER = "checkpoints"
LINK = "checkpoint"
FORMAT = "tracegrad-checkpoint/2"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)


@dataclass(frozen=True)
class Progress:
    """What a run knows beside its parameters and optimizer.

    Args:
        step: optimizer steps taken.
        fingerprint: of the data, the same for the same terms.
        config: dotted names to values, as the run was told.
        logprobs: named [terms] float32 arrays: `old` for the steps not yet taken, `ref`.
        control: what adapts from step to step, `learner.entropy.Control.state`.
    """

    step: int
    fingerprint: str
    config: Mapping[str, Any]
    logprobs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    control: Mapping[str, float] = field(default_factory=dict)


def save(
    out: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    *,
    tokenizer: Path | None,
    keep: int,
    ranks: Ranks | None = None,
) -> Path:
    """Writes `out/checkpoints/step-N`, points `out/checkpoint` at it and removes all but the newest `keep`.

    Every rank writes its part of the parameters and the optimizer, the first rank the model for transformers as well.

    Args:
        model: a transformers or peft model, sharded or not; written by its own `save_pretrained`.
        tokenizer: folder whose tokenizer files are copied beside the weights, or None.
        ranks: who takes part; each calls this. The folder is one that all of them see.

    Raises:
        TracegradError: if it cannot be written whole; checkpoints written before stay as they are.
    """
    ranks = ranks or Ranks()
    folder = out / FOLDER
    final = folder / f"step-{progress.step:08d}"
    staged = folder / f".tmp-{final.name}"
    with _whole_or_nothing(staged, final, ranks):
        if not _there(final, ranks):
            with _together(ranks):
                if ranks.first:
                    shutil.rmtree(staged, ignore_errors=True)
                    (staged / "resume" / "state").mkdir(parents=True)
            whole = state.whole_state(model, ranks)
            with _together(ranks):
                if ranks.first:
                    _export(staged, model, whole, tokenizer)
            with _together(ranks):
                _save_random(staged / "resume" / f"random-{ranks.rank}.safetensors")
            state.write(staged / "resume" / "state", model, optimizer, ranks)
        with _together(ranks):
            if ranks.first:
                _finish(out, staged, final, progress, keep)
    return final


def _export(staged: Path, model: Any, whole: Mapping[str, torch.Tensor], tokenizer: Path | None) -> None:
    with quiet():
        model.save_pretrained(staged, state_dict=whole)
    (staged / "README.md").unlink(missing_ok=True)  # peft writes a model card with nothing in it
    for name in TOKENIZER_FILES:
        if tokenizer is not None and (tokenizer / name).is_file() and not (staged / name).exists():
            shutil.copyfile(tokenizer / name, staged / name)


def _finish(out: Path, staged: Path, final: Path, progress: Progress, keep: int) -> None:
    """Marks the folder as whole, gives it its name, and lets go of what is too old."""
    if not final.exists():
        _save_progress(staged / "resume", progress)
        _flush_tree(staged)
        staged.rename(final)
        _flush(final.parent)
    _point(out / LINK, final)
    for old in list_checkpoints(out)[:-keep]:
        doomed = old.with_name(f".tmp-{old.name}")
        old.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def list_checkpoints(out: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(path for path in (out / FOLDER).glob("step-*") if (path / "resume" / "progress.json").is_file())


def clear_staged(out: Path) -> None:
    """Removes what a process that was killed while writing or deleting has left."""
    for path in (out / FOLDER).glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def read_progress(path: Path) -> Progress:
    """What a checkpoint says of its run.

    Raises:
        ReadError: if it is damaged or of another format.
    """
    try:
        said = json.loads((path / "resume" / "progress.json").read_text(encoding="utf-8"))
        arrays = load_file(path / "resume" / "logprobs.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(path, error) from error
    if said.get("format") != FORMAT:
        raise ReadError(
            f"{path}: a checkpoint of format {said.get('format')!r}, and this version reads {FORMAT}. Its state cannot "
            "be taken up. Resume with the version that wrote it, or start anew from it with --model."
        )
    logprobs = {name: tensor.numpy() for name, tensor in arrays.items()}
    return Progress(said["step"], said["fingerprint"], said["config"], logprobs, said.get("control", {}))


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks | None = None) -> Progress:
    """Puts parameters, optimizer and random states of a checkpoint back, and says where the run stood.

    The number of ranks may be another than when it was written; a rank that there was not takes the first one's
    random states.

    Raises:
        ReadError: if the checkpoint is damaged or of another model.
    """
    ranks = ranks or Ranks()
    progress = read_progress(path)
    own = path / "resume" / f"random-{ranks.rank}.safetensors"
    try:
        state.read(path / "resume" / "state", model, optimizer, ranks)
        _set_random(own if own.is_file() else own.with_name("random-0.safetensors"))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _damaged(path, error) from error
    return progress


def _save_progress(folder: Path, progress: Progress) -> None:
    arrays = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in progress.logprobs.items()}
    save_file(arrays, folder / "logprobs.safetensors")
    said = {
        "format": FORMAT,
        "step": progress.step,
        "fingerprint": progress.fingerprint,
        "config": dict(progress.config),
        "control": dict(progress.control),
    }
    _write_json(folder / "progress.json", said)


def _save_random(path: Path) -> None:
    save_file(_random_states(), path, metadata={"python": json.dumps(random.getstate())})


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


def _set_random(path: Path) -> None:
    states = load_file(path)
    torch.set_rng_state(states["torch"])
    position, has_gauss, gauss = states["numpy_rest"].tolist()
    keys = states["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))  # noqa: NPY002
    with safe_open(path, framework="pt") as file:
        version, inner, gaussian = json.loads(file.metadata()["python"])
    random.setstate((version, tuple(inner), gaussian))
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            if f"cuda{i}" in states:
                torch.cuda.set_rng_state(states[f"cuda{i}"], i)


@contextmanager
def _together(ranks: Ranks) -> Iterator[None]:
    """Work after which the ranks wait for one another, and fail together."""
    error = None
    try:
        yield
    except (OSError, SafetensorError) as raised:
        error = raised
    ranks.agree(error)


def _there(final: Path, ranks: Ranks) -> bool:
    return bool(ranks.largest(int(ranks.first and final.exists())))


@contextmanager
def _whole_or_nothing(staged: Path, final: Path, ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        if ranks.first:
            shutil.rmtree(staged, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise TracegradError(
            f"{final}: {reason}. This checkpoint is not written; those before it are as they were. "
            "Make room or give a folder that can be written, and go on with --resume."
        ) from error


def _point(link: Path, target: Path) -> None:
    """Lets `link` name `target`, at no moment naming nothing."""
    staged = link.with_name(f".{link.name}.tmp")
    staged.unlink(missing_ok=True)
    staged.symlink_to(target.relative_to(link.parent), target_is_directory=True)
    staged.replace(link)
    _flush(link.parent)


def _flush_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _damaged(path: Path, error: Exception) -> ReadError:
    return ReadError(
        f"{path}: damaged: {first_line(error)}. The run cannot be taken up exactly from it. "
        "Delete this folder to resume from the checkpoint before it."
    )
