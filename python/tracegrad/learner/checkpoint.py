"""Checkpoints: a model folder that transformers loads, and beside it what a run needs to go on exactly.

A checkpoint appears whole or not at all: it is written to a temporary folder, what marks it as whole last, flushed to
disk and renamed. Tensors are safetensors and the rest is JSON, so that reading one runs no code. Called by the run and
the loop.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import nn

from tracegrad import outputs
from tracegrad.errors import ReadError, TracegradError
from tracegrad.learner import state
from tracegrad.learner.adapters import has_adapters
from tracegrad.learner.away import Away
from tracegrad.learner.model import TOKENIZER_FILES, first_line, quiet
from tracegrad.learner.progress import (
    MARK,
    OtherRunError,
    Progress,
    read,
    save_logprobs,
    save_random,
    set_random,
    step_of,
    verify,
)
from tracegrad.learner.progress import save as save_progress
from tracegrad.learner.ranks import Ranks
from tracegrad.learner.record import TermRecord, load_terms, save_terms
from tracegrad.shards import Written, flush

FOLDER = "checkpoints"
LINK = "checkpoint"
_CANNOT_WRITE = (OSError, SafetensorError, ReadError)


def save(
    out: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    *,
    tokenizer: Path | None,
    keep: int,
    reference: nn.Module | None = None,
    terms: Sequence[TermRecord] = (),
    ranks: Ranks | None = None,
    away: Away | None = None,
) -> Path:
    """Writes `out/checkpoints/step-N`, points `out/checkpoint` at it and removes all but the newest `keep`.

    Every rank writes its part of the parameters and the optimizer, the first rank the model for transformers as well.

    Args:
        out: folder of the run on this machine.
        model: a transformers or peft model, sharded or not; written by its own `save_pretrained`.
        tokenizer: folder whose tokenizer files are copied beside the weights, or None.
        reference: a reference model whose weights follow the policy, and are kept beside it.
        terms: of this rank, for the report of the run that goes on from here.
        ranks: who takes part; each calls this.
        away: where the folder is kept, if it is not one that all ranks see.

    Raises:
        TracegradError: if it cannot be written whole; checkpoints written before stay as they are.
    """
    ranks = ranks or Ranks()
    away = away or Away.of(out, ranks)
    folder = out / FOLDER
    final = folder / f"step-{progress.step:08d}"
    staged = folder / f".tmp-{final.name}"
    with _whole_or_nothing(staged, final, ranks):
        if not ranks.largest(int(ranks.first and final.exists())):
            with _together(ranks):
                if away.leads:
                    outputs.make_folder(staged)
                    (staged / "resume" / "state").mkdir(parents=True)
            whole = state.whole_state(model, ranks)
            with _together(ranks):
                if ranks.first:
                    _export(staged, model, whole, tokenizer)
            with _together(ranks):
                save_random(staged / "resume" / f"random-{ranks.rank}.safetensors")
                save_terms(staged / "resume" / f"terms-{ranks.rank}.safetensors", terms)
            state.write(staged / "resume" / "state", model, optimizer, ranks, reference)
            with _together(ranks):
                if ranks.first:
                    save_logprobs(staged / "resume", progress)
            elsewhere = away.send(staged, final.name)
            with _together(ranks):
                if ranks.first:
                    _mark(staged, final, progress, elsewhere)
        away.seal(staged, final, keep)
        with _together(ranks):
            if ranks.first:
                _let_go(out, final, keep)
    return final


def _export(staged: Path, model: Any, whole: Mapping[str, torch.Tensor], tokenizer: Path | None) -> None:
    with quiet():
        model.save_pretrained(staged, state_dict=whole)
    (staged / "README.md").unlink(missing_ok=True)  # peft writes a model card with nothing in it
    if has_adapters(model):
        model.config.save_pretrained(staged)  # which tells how many ids the model has and where it ends
    for name in TOKENIZER_FILES:
        if tokenizer is not None and (tokenizer / name).is_file() and not (staged / name).exists():
            outputs.copy(tokenizer / name, staged / name)


def _mark(staged: Path, final: Path, progress: Progress, elsewhere: Mapping[str, Written]) -> None:
    """Marks the folder as whole and gives it its name."""
    save_progress(staged / "resume", progress, elsewhere)
    _flush_tree(staged)
    staged.rename(final)
    flush(final.parent)


def _let_go(out: Path, final: Path, keep: int) -> None:
    """Names the newest, and removes what is too old."""
    _point(out / LINK, final)
    for old in list_checkpoints(out)[:-keep]:
        doomed = old.with_name(f".tmp-{old.name}")
        old.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def list_checkpoints(out: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    whole = (path for path in (out / FOLDER).glob("step-*") if (path / "resume" / MARK).is_file())
    return sorted((path for path in whole if step_of(path.name) >= 0), key=lambda path: step_of(path.name))


@contextmanager
def writable(out: Path) -> Iterator[None]:
    """Around what is written beside the checkpoints."""
    try:
        yield
    except OSError as error:
        raise TracegradError(
            f"{error.filename or out}: {error.strerror}. Checkpoints have no place there. Give another --out."
        ) from error


def clear_staged(out: Path) -> None:
    """Removes what a process that was killed while writing or deleting has left."""
    for path in (out / FOLDER).glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def read_progress(path: Path) -> Progress:
    """What a checkpoint says of its run."""
    with _damaged(path):
        return read(path / "resume")


def restore(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks | None = None,
    *,
    reference: nn.Module | None = None,
    leads: bool = False,
) -> Progress:
    """Puts parameters, optimizer and random states of a checkpoint back, and says where the run stood.

    Every file is compared with its checksum first. The number of ranks may be another than when it was written; a rank
    that there was not takes the first one's random states.

    Args:
        reference: as for `save`.
        leads: this rank compares the files, as the first one does: of a folder that the first does not see.
    """
    ranks = ranks or Ranks()
    folder = path / "resume"
    error: Exception | None = None
    try:
        if ranks.first or leads:
            verify(folder)
    except Exception as raised:  # told to the other ranks first
        error = raised
    with _damaged(path):
        ranks.agree(error)
        progress = read(folder)
        state.read(folder / "state", model, optimizer, ranks, reference)
        own = folder / f"random-{ranks.rank}.safetensors"
        set_random(own if own.is_file() else own.with_name("random-0.safetensors"))
    return progress


def logprobs_of(path: Path, progress: Progress, name: str, terms: int) -> NDArray[np.float32]:
    """One array of what a checkpoint knows of the terms."""
    with _damaged(path):
        logprobs = progress.logprobs[name]
        if len(logprobs) != terms:
            raise ValueError(f"it has {name} logprobs of {len(logprobs):,} terms, and the traces have {terms:,}")
        return logprobs


def read_terms(path: Path, ranks: Ranks) -> list[TermRecord]:
    """The terms that a checkpoint keeps for the report, shared among the ranks that there are now."""
    files = sorted((path / "resume").glob("terms-*.safetensors"))
    with _damaged(path):
        return [term for file in files[ranks.rank :: ranks.world] for term in load_terms(file)]


@contextmanager
def _together(ranks: Ranks) -> Iterator[None]:
    """Work after which the ranks wait for one another, and fail together."""
    error = None
    try:
        yield
    except _CANNOT_WRITE as raised:
        error = raised
    ranks.agree(error)


@contextmanager
def _whole_or_nothing(staged: Path, final: Path, ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except _CANNOT_WRITE as error:
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
    flush(link.parent)


def _flush_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        flush(path)
    flush(folder)


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Whatever goes wrong while a stranger's checkpoint is read, as one error that says what to do."""
    try:
        yield
    except (torch.OutOfMemoryError, OtherRunError):
        raise
    except Exception as error:
        before = [one for one in list_checkpoints(path.parent.parent) if step_of(one.name) < step_of(path.name)]
        cure = f"go on from {before[-1].name}, which is before it" if before else "start anew: there is none before it"
        raise ReadError(
            f"{path}: damaged: {first_line(error)[:300]}. The run cannot be taken up exactly from it. "
            f"Delete this folder to {cure}."
        ) from error
