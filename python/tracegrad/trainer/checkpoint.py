"""Save and restore a run: model, optimizer, progress and random state, locally or on object storage.

A checkpoint is complete when it holds the file `MARK`, which is written last. Every rank writes its shard. `Away`
mirrors the checkpoints of a run on object storage.
"""

import json
import math
import os
import random
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor

from tracegrad.errors import ArgumentError, ReadError, TracegradError
from tracegrad.storage import files as outputs
from tracegrad.storage import safetensors_file
from tracegrad.storage.run_dir import APART, Mirror
from tracegrad.storage.safetensors_file import Written, flush, read_text
from tracegrad.trainer.distributed import Ranks
from tracegrad.trainer.load_model import TOKENIZER_FILES, first_line, quiet
from tracegrad.trainer.lora import has_adapters
from tracegrad.trainer.result import TermRecord, load_terms, save_terms

FORMAT = "tracegrad-checkpoint/4"
MARK = "progress.json"
_SEAL = "crc32"
_LOGPROBS = "logprobs.safetensors"
_PROGRESS_LIMIT = 16 << 20
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
        control: what adapts from step to step, `trainer.optim.Control.state`.
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
    safetensors_file.write(folder / _LOGPROBS, progress.logprobs)


def save_progress(folder: Path, progress: Progress, elsewhere: Mapping[str, Written] | None = None) -> None:
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


def read_progress_file(folder: Path) -> Progress:
    """What a checkpoint says of its run; whatever else it is than what `save` writes is a ValueError or the like.

    Raises:
        ReadError: if it is of another format.
    """
    said = _told(folder)
    logprobs, _ = safetensors_file.read(folder / _LOGPROBS)
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
    said = json.loads(safetensors_file.read_text(folder / MARK, _PROGRESS_LIMIT))
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
        return dict(zip(names, pool.map(lambda name: safetensors_file.measure(folder / name), names), strict=True))


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


_REST = "optimizer.json"
_STATE_LIMIT = 64 << 20
_MODELS = ("param:", "reference:")
"""What names of parameters begin with: of the policy, and of a reference that follows it."""
_MOMENTS = ("exp_avg:", "exp_avg_sq:", "momentum_buffer:")
"""State that torch's optimizers keep of the shape of the parameter, and believe to be so."""


def write(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    reference: nn.Module | None = None,
) -> None:
    """Writes the trained parameters, those of a reference that follows them, and the optimizer's state into a folder.

    Raises:
        OSError: if a rank cannot write.
        ArgumentError: for optimizer state of which each rank holds a part that has no place in the whole.
    """
    tensors = _parameters(model, reference)
    state, rest = _optimizer_parts(optimizer, model)
    storage = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _collective(save_distributed, {**tensors, **state}, storage_writer=storage, ranks=ranks)
    except CheckpointException as error:
        raise _cause(error) from error
    if ranks.first:
        outputs.write(folder / _REST, json.dumps(rest, indent=1))


def read_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    reference: nn.Module | None = None,
) -> None:
    """Puts what `write` wrote back, in place, whatever the number of ranks that wrote it.

    Raises:
        OtherRunError: if they are those of another model.
        OSError, ValueError, KeyError, RuntimeError: if files are damaged.
    """
    storage = HuggingFaceStorageReader(str(folder))
    try:
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt"):
                pass  # its header fits its length: what reads it next believes it
        stored = storage.read_metadata().state_dict_metadata
        rest = json.loads(read_text(folder / _REST, _STATE_LIMIT))
        parameters = _parameters(model, reference)
        wanted = _templates(folder, stored, parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _collective(load, wanted, storage_reader=storage, ranks=ranks)
    except CheckpointException as error:
        raise _cause(error) from error
    _load_optimizer(optimizer, model, {k: v for k, v in wanted.items() if k not in parameters}, rest)


def _parameters(model: nn.Module, reference: nn.Module | None) -> dict[str, Tensor]:
    """The trained parameters, and the reference's of the same names, as the files name them."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    beside = {} if reference is None else dict(reference.named_parameters())
    followed = {f"reference:{name}": beside[name].detach() for name in trained if beside}
    return {**{f"param:{name}": p for name, p in trained.items()}, **followed}


def whole_state(
    model: nn.Module, ranks: Ranks, device: Any = "cpu", wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """The state dict of a model whose parameters may be sharded, whole, on the first rank; else empty.

    What is whole and on the device already is no copy.

    Args:
        device: where to; None leaves each where it is.
        wanted: of its names.
    """
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if wanted(name)}
    seen: dict[int, Tensor] = {}
    for value in state.values():
        if id(value) not in seen:
            full = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
            seen[id(value)] = full.to(device or full.device) if ranks.first else full.new_empty(0)
    return {name: seen[id(value)] for name, value in state.items()} if ranks.first else {}


def _collective(call: Any, state: dict[str, Any], *, ranks: Ranks, **storage: Any) -> None:
    if ranks.alone:
        call(state, no_dist=True, **storage)
    else:
        call(state, process_group=ranks.group, **storage)


def _templates(folder: Path, metadata: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors to read into: the parameters themselves, and zeros for the optimizer's, sharded as their parameters."""
    stored = {name: tensor for name, tensor in metadata.items() if name.startswith(_MODELS)}
    apart = sorted(set(stored) ^ set(parameters)) or [
        n for n, p in parameters.items() if stored[n].size != p.shape or stored[n].properties.dtype != p.dtype
    ]
    if apart:
        raise OtherRunError(
            f"{folder}: its parameters are not those of the model given: {apart[0].partition(':')[2]} is not in both, "
            "or of another shape or type. The run cannot go on from it. Resume with the --model and options that the "
            "run began with."
        )
    out: dict[str, Any] = dict(parameters)
    for name, tensor in metadata.items():
        if name not in parameters:
            owner, dtype = parameters[f"param:{name.partition(':')[2]}"], tensor.properties.dtype
            like = owner.shape == tensor.size
            if name.startswith(_MOMENTS) and not like:
                raise ValueError(f"{name[:120]} is not of the shape of its parameter")
            out[name] = torch.zeros_like(owner, dtype=dtype) if like else torch.zeros(tensor.size, dtype=dtype)
            out[name] = out[name].detach()
    return out


def _optimizer_parts(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimizer state by parameter name: tensors, and what is no tensor."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            where = f"{key}:{names[id(parameter)]}"
            if not isinstance(value, Tensor):
                rest[where] = value
                continue
            if isinstance(parameter, DTensor) and value.ndim and not isinstance(value, DTensor):
                raise ArgumentError(
                    f"{type(optimizer).__name__} keeps {key} of a sharded parameter as a plain tensor. A checkpoint "
                    "could not tell what each rank's part is of. Use parallel.mode ddp, or an optimizer of DTensors."
                )
            tensors[where] = value.detach()
    groups = [{k: v for k, v in group.items() if _plain(v)} for group in optimizer.param_groups]
    return tensors, {"state": rest, "groups": groups}


def _load_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]
) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = {names[id(p)]: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state: dict[int, dict[str, Any]] = {}
    for where, value in [*tensors.items(), *rest["state"].items()]:
        key, _, name = where.partition(":")
        state.setdefault(order[name], {})[key] = value
    current = optimizer.state_dict()["param_groups"]
    if len(current) != len(rest["groups"]):
        raise ValueError(
            f"the optimizer has {len(current)} groups of parameters and the checkpoint's had another number"
        )
    before = [{k: tuple(v) if isinstance(v, list) else v for k, v in group.items()} for group in rest["groups"]]
    for now, then in zip(current, before, strict=True):
        if not all(name in now and _alike(now[name], value) for name, value in then.items()):
            raise ValueError("the options of its optimizer are not those of the one given")
    groups = [{**now, **then} for now, then in zip(current, before, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _alike(now: Any, then: Any) -> bool:
    """Whether an option of an optimizer may have become the other: a number a finite number, a switch a switch."""
    if isinstance(now, (list, tuple)):
        return isinstance(then, tuple) and len(now) == len(then) and all(map(_alike, now, then))
    if isinstance(now, (int, float)) and not isinstance(now, bool):
        return isinstance(then, (int, float)) and not isinstance(then, bool) and math.isfinite(then)
    return then is None or now is None or type(now) is type(then)


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(each, float) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _cause(error: CheckpointException) -> Exception:
    """What one rank failed with, as an Exception: torch's own is none."""
    first = next(iter(error.failures.values()))[0]
    return first if isinstance(first, Exception) else RuntimeError(str(first))


_RESUME = "resume"


@dataclass
class Away:
    """The folder of a run as its ranks share it.

    Args:
        mirror: the folder, and its address where it has one.
        ranks: who shares it.
        leads: whether this rank makes and removes what is in the folder: one of each folder does.
    """

    mirror: Mirror
    ranks: Ranks
    leads: bool

    @classmethod
    def of(cls, out: str | os.PathLike[str] | Mirror, ranks: Ranks) -> "Away":
        """Every rank calls this with the same address; ranks of one machine work in one folder from then on.

        The marks of the checkpoints that are whole at the address are brought, so that they are known.

        Raises:
            ReadError: if the address cannot be asked.
        """
        mirror = Mirror.of(out)
        if not mirror.address:
            return cls(mirror, ranks, ranks.first)
        node = os.environ.get("GROUP_RANK")  # torchrun's number of the machine
        said = ranks.everybody((node, str(mirror.path)))
        path = next(Path(path) for other, path in said if other == node and Path(path).is_dir())
        leads = path == mirror.path
        ranks.everybody(None)  # nobody leaves a folder that another still looks for
        mirror.share(path)
        found = cls(mirror, ranks, leads)
        with ranks.together():
            if leads:
                found._bring_marks()
        return found

    def __str__(self) -> str:
        return str(self.mirror)

    @property
    def path(self) -> Path:
        """The folder of this machine."""
        return self.mirror.path

    def named(self, path: Path) -> str:
        """The address of a file or folder of the run; "" where the run is at none."""
        return self.mirror.named(path)

    def clear(self) -> None:
        """Removes at the address what a run that was killed there has left of a checkpoint."""
        if self.mirror.address and self.ranks.first:
            names = self._sent()
            whole = _marks(names)
            self.mirror.remove(name for name in names if _folder_of(name) not in whole)

    def bring(self, checkpoint: Path) -> None:
        """Brings what a run goes on from: the state of one checkpoint, and what the run has left beside checkpoints.

        Raises:
            ReadError: if it cannot be read, or is not as its mark says.
        """
        if not self.mirror.address:
            return
        with self.ranks.together():
            if self.leads:
                below = f"{APART}{checkpoint.name}/{_RESUME}/"
                files = marked(checkpoint / _RESUME)
                names = [name for name in self.mirror.names() if not name.startswith(APART)]
                self.mirror.bring([*names, *(below + name for name in files)])

    def send(self, staged: Path, name: str) -> dict[str, Written]:
        """Sends what this machine holds of a checkpoint that has no mark yet; every rank calls it.

        Args:
            staged: where it lies.
            name: of the checkpoint.

        Returns:
            On the first rank what other machines hold of `resume`, with sizes and checksums; elsewhere nothing.
        """
        if not self.mirror.address:
            return {}
        held: dict[str, Written] = {}
        with self.ranks.together():
            if self.leads:
                files = sorted(path for path in staged.rglob("*") if path.is_file())
                self.mirror.send_as({f"{APART}{name}/{path.relative_to(staged).as_posix()}": path for path in files})
                of = staged / _RESUME
                held = {p.relative_to(of).as_posix(): safetensors_file.measure(p) for p in files if of in p.parents}
        parts = self.ranks.gathered({} if self.ranks.first else held)
        return {name: written for part in parts for name, written in part.items()} if self.ranks.first else {}

    def seal(self, staged: Path, final: Path, keep: int) -> None:
        """Marks a checkpoint that was sent as whole, last of all, and lets go of those before the newest `keep`.

        Args:
            staged: where it lies on machines other than the first.
            final: its folder here, on the first machine whole already.
        """
        if not self.mirror.address:
            return
        with self.ranks.together():
            self.push()
        mark = self.ranks.shared((final / _RESUME / MARK).read_bytes() if self.ranks.first else b"")
        with self.ranks.together():
            if self.ranks.first:
                self.mirror.send([f"{APART}{final.name}/{_RESUME}/{MARK}"])
                self._let_go(keep)
            elif self.leads and staged.is_dir():
                outputs.write(staged / _RESUME / MARK, mark)
                staged.rename(final)
            for old in final.parent.glob("step-*") if self.leads else ():
                if old != final:
                    shutil.rmtree(old, ignore_errors=True)

    def push(self) -> None:
        """Sends what has changed beside the checkpoints; of the machine of this rank."""
        if self.leads:
            self.mirror.push()

    def _sent(self) -> list[str]:
        """The files of checkpoints at the address."""
        return [name for name in self.mirror.names() if name.startswith(APART)]

    def _bring_marks(self) -> None:
        self.mirror.bring(name for folder, name in _marks(self._sent()).items() if step_of(folder) >= 0)

    def _let_go(self, keep: int) -> None:
        names = self._sent()
        marks = _marks(names)
        for old in sorted(marks, key=step_of)[:-keep]:
            self.mirror.remove([marks[old]])  # first, as what has no mark is nothing
            self.mirror.remove(name for name in names if _folder_of(name) == old and name != marks[old])


def _folder_of(name: str) -> str:
    return name.removeprefix(APART).partition("/")[0]


def _marks(names: list[str]) -> dict[str, str]:
    """The marks among files of checkpoints, by the name of the checkpoint that each makes whole."""
    return {_folder_of(name): name for name in names if name.endswith(f"/{_RESUME}/{MARK}")}


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
            whole = whole_state(model, ranks)
            with _together(ranks):
                if ranks.first:
                    _export(staged, model, whole, tokenizer)
            with _together(ranks):
                save_random(staged / "resume" / f"random-{ranks.rank}.safetensors")
                save_terms(staged / "resume" / f"terms-{ranks.rank}.safetensors", terms)
            write(staged / "resume" / "state", model, optimizer, ranks, reference)
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
        return read_progress_file(path / "resume")


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
        progress = read_progress_file(folder)
        read_state(folder / "state", model, optimizer, ranks, reference)
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
