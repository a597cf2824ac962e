"""Save and restore a run: model, optimizer, progress and random state, locally or on object storage.

A checkpoint is complete if it contains the marker file `MARKER`, which is written last. Every rank writes its own
shard. `SharedRunDir` mirrors the checkpoints of a run on object storage.
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
from tracegrad.storage.run_dir import CHECKPOINTS_PREFIX, RunDirectory
from tracegrad.storage.safetensors_file import FileChecksum, flush, read_text
from tracegrad.trainer.distributed import Ranks
from tracegrad.trainer.load_model import TOKENIZER_FILES, first_line, quiet
from tracegrad.trainer.lora import has_adapters
from tracegrad.trainer.result import TokenRecord, load_token_records, save_token_records

FORMAT = "tracegrad-checkpoint/4"
MARKER = "progress.json"
_SEAL = "crc32"
_LOGPROBS = "logprobs.safetensors"
_PROGRESS_LIMIT = 16 << 20
_MT_WORDS = 624


class OtherRunError(ReadError):
    """Raised for an undamaged checkpoint of another model or format version."""


@dataclass(frozen=True)
class Progress:
    """The state of a run in addition to its parameters and optimizer.

    Args:
        step: number of optimizer steps done.
        fingerprint: hash of the data, equal for equal trained tokens; None if the run has no data set.
        config: option values of the run, by dotted name.
        logprobs: float32 arrays with one entry per trained token: `old` for the remaining steps, and `ref`.
        control: adaptive coefficients, from `trainer.optim.EntropyController.state`.
        seconds: wall time by stage in seconds, summed over all processes of the run.
        version: policy version passed to the last step; -1 if none was passed.
    """

    step: int
    fingerprint: str | None
    config: Mapping[str, Any]
    logprobs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    control: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    version: int = -1


def save_logprobs(folder: Path, progress: Progress) -> None:
    """Write the logprob arrays. Call this before `save_progress`, which writes the marker."""
    safetensors_file.write(folder / _LOGPROBS, progress.logprobs)


def save_progress(folder: Path, progress: Progress, remote_files: Mapping[str, FileChecksum] | None = None) -> None:
    """Write the marker file, which declares the checkpoint complete; call this last.

    The marker contains the other fields of `progress`, and the size and CRC-32 of every file of the checkpoint.

    Args:
        remote_files: files of the same checkpoint on other machines, by name.
    """
    files_by_name = {**(remote_files or {}), **_measure_files(folder, _list_files(folder))}
    files = {name: [file.bytes, f"{file.crc32:08x}"] for name, file in sorted(files_by_name.items())}
    marker = {
        "format": FORMAT,
        "step": progress.step,
        "fingerprint": progress.fingerprint,
        "config": dict(progress.config),
        "control": dict(progress.control),
        "seconds": dict(progress.seconds),
        "version": progress.version,
        "files": files,
    }
    outputs.write(folder / MARKER, json.dumps(with_checksum(marker), indent=1))


def with_checksum(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the marker's contents with their CRC-32, which detects numbers that changed on disk."""
    contents = {name: value for name, value in contents.items() if name != _SEAL}
    return {**contents, _SEAL: f"{zlib.crc32(json.dumps(contents, sort_keys=True).encode()):08x}"}


def read_progress_file(folder: Path) -> Progress:
    """Read the progress of a run from a checkpoint folder.

    Raises:
        ReadError: if the checkpoint has another format.
        ValueError, KeyError, TypeError: if the contents are not what `save` writes.
    """
    marker = _read_marker(folder)
    logprobs, _ = safetensors_file.read(folder / _LOGPROBS)
    if any(array.ndim != 1 or array.dtype != np.float32 for array in logprobs.values()):
        raise ValueError("its logprobs are not flat arrays of float32")
    if (
        type(marker["step"]) is not int
        or not 0 <= marker["step"] < 1 << 53
        or not isinstance(marker["fingerprint"], str | None)
    ):
        raise ValueError("its step or the hash of its data is missing or invalid")
    if not isinstance(marker["config"], dict):
        raise ValueError("its config is missing or not a table")
    version = marker.get("version", -1)  # Older checkpoints have no version.
    if type(version) is not int or not -1 <= version < 1 << 53:
        raise ValueError("its policy version is invalid")
    return Progress(
        marker["step"],
        marker["fingerprint"],
        marker["config"],
        logprobs,
        control=_to_floats(marker["control"]),
        seconds=_to_floats(marker["seconds"]),
        version=version,
    )


def list_marker_files(folder: Path) -> list[str]:
    """Return the names of the files that the marker lists.

    Raises:
        ReadError: if the checkpoint has another format, or the marker cannot be parsed.
    """
    try:
        return list(_read_marker(folder)["files"])
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ReadError):
            raise
        raise ReadError(f"TG-TRAIN-009: {folder / MARKER}: {error}. The checkpoint is damaged. Delete it.") from error


def verify(folder: Path) -> None:
    """Compare every file with its recorded length and checksum. Each file is read once.

    Raises:
        ReadError: if the checkpoint has another format.
        ValueError: if a file is missing, unexpected or changed; the message names it.
        OSError: if a file cannot be read.
    """
    expected = _read_marker(folder)["files"]
    measured = _measure_files(folder, _list_files(folder))
    for name in sorted(expected.keys() ^ measured.keys()):
        raise ValueError(f"{name[:80]!r} is {'missing' if name in expected else 'not part of this checkpoint'}")
    for name, file in measured.items():
        if expected[name] != [file.bytes, f"{file.crc32:08x}"]:
            raise ValueError(f"{name!r} has another length or checksum than when it was written")


def save_random(path: Path) -> None:
    """Write the random states of this process: torch's, its CUDA devices', numpy's and Python's."""
    save_file(_random_states(), path, metadata={"python": json.dumps(random.getstate())})


def restore_random(path: Path) -> None:
    """Restore the random states of this process. The states of numpy and torch are checked before any is set.

    Raises:
        ValueError, KeyError, TypeError: if the file is invalid.
    """
    states = load_file(path)
    position, has_gauss, gauss = states["numpy_rest"].tolist()
    words = states["numpy_keys"].numpy()
    # numpy does not check the position: a position past the end would read memory after the state.
    fits = words.shape == (_MT_WORDS,) and words.min() >= 0 and words.max() < 1 << 32 and 0 <= position <= _MT_WORDS
    if not fits or has_gauss not in (0.0, 1.0) or not math.isfinite(gauss):
        raise ValueError("its random state of numpy is invalid")
    if states["torch"].shape != torch.get_rng_state().shape:
        raise ValueError("its random state of torch is invalid")
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
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 (the checkpoint saves the global state)
    assert kind == "MT19937"
    states = {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(np.asarray(keys, np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states |= {f"cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _read_marker(folder: Path) -> dict[str, Any]:
    marker = json.loads(safetensors_file.read_text(folder / MARKER, _PROGRESS_LIMIT))
    if not isinstance(marker, dict):
        raise ValueError(f"its {MARKER} is not a table")
    if marker["format"] != FORMAT:
        raise OtherRunError(
            f"TG-TRAIN-010: {folder.parent}: the checkpoint has format {str(marker['format'])[:40]!r}, and this "
            f"version "
            f"reads {FORMAT}. Resume with the version that wrote it, or start a new run with this folder as the model."
        )
    if marker != with_checksum(marker):
        raise ValueError(f"{MARKER!r} has another checksum than when it was written")
    return marker


def _list_files(folder: Path) -> list[str]:
    """List all files and symbolic links below the folder, except the marker and the model card.

    A checkpoint contains no links, so `verify` reports them as unexpected files.
    """
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for path in paths if (name := path.relative_to(folder).as_posix()) not in (MARKER, CARD))


def _measure_files(folder: Path, names: Iterable[str]) -> dict[str, FileChecksum]:
    """Measure files on several threads: crc32 releases the GIL."""
    names = list(names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: safetensors_file.measure(folder / name), names), strict=True))


def _to_floats(values: Any) -> dict[str, float]:
    if not isinstance(values, dict) or any(
        type(value) not in (int, float) or math.isnan(value) for value in values.values()
    ):
        raise ValueError("it has a value that is not a number")
    return {name: float(number) for name, number in values.items()}


def step_of(name: str) -> int:
    """Return the step number in the name of a checkpoint folder, or -1 for any other name."""
    match = re.fullmatch(r"step-(\d{8,15})", name)
    return int(match[1]) if match else -1


CARD = "README.md"
"""Model card for people, written last. The code never reads it."""


_OPTIMIZER_FILE = "optimizer.json"
_STATE_LIMIT = 64 << 20
_MODEL_PREFIXES = ("param:", "reference:")
"""Prefixes of parameter names: of the policy, and of a reference model that follows it."""
_MOMENT_PREFIXES = ("exp_avg:", "exp_avg_sq:", "momentum_buffer:")
"""Prefixes of optimizer state that has the shape of its parameter. torch's optimizers do not check that."""


def save_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    reference: nn.Module | None = None,
) -> None:
    """Write the trained parameters and the optimizer's state into a folder, sharded by rank.

    The parameters of a reference model that follows the policy are written too.

    Raises:
        OSError: if a rank cannot write.
        ArgumentError: if the optimizer keeps plain tensors of sharded parameters, which cannot be resharded.
    """
    tensors = _parameters(model, reference)
    state, optimizer_json = _optimizer_parts(optimizer, model)
    storage = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _collective(save_distributed, {**tensors, **state}, storage_writer=storage, ranks=ranks)
    except CheckpointException as error:
        raise _root_cause(error) from error
    if ranks.first:
        outputs.write(folder / _OPTIMIZER_FILE, json.dumps(optimizer_json, indent=1))


def read_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    reference: nn.Module | None = None,
) -> None:
    """Load in place what `save_state` wrote. The number of ranks may differ.

    Raises:
        OtherRunError: if the parameters belong to another model.
        OSError, ValueError, KeyError, RuntimeError: if files are damaged.
    """
    storage = HuggingFaceStorageReader(str(folder))
    try:
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt"):
                pass  # Checks that the header fits the file's length; the reader below does not.
        stored = storage.read_metadata().state_dict_metadata
        optimizer_json = json.loads(read_text(folder / _OPTIMIZER_FILE, _STATE_LIMIT))
        parameters = _parameters(model, reference)
        tensors = _templates(folder, stored, parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _collective(load, tensors, storage_reader=storage, ranks=ranks)
    except CheckpointException as error:
        raise _root_cause(error) from error
    _load_optimizer(optimizer, model, {k: v for k, v in tensors.items() if k not in parameters}, optimizer_json)


def _parameters(model: nn.Module, reference: nn.Module | None) -> dict[str, Tensor]:
    """Return the trained parameters and the reference's parameters of the same names, by their names in the files."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    reference_parameters = {} if reference is None else dict(reference.named_parameters())
    tracked = {f"reference:{name}": reference_parameters[name].detach() for name in trained if reference_parameters}
    return {**{f"param:{name}": p for name, p in trained.items()}, **tracked}


def full_state_dict(
    model: nn.Module, ranks: Ranks, device: Any = "cpu", include: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Gather the full state dict of a possibly sharded model on the first rank; other ranks get an empty dict.

    A tensor that is not sharded and already on the device is not copied.

    Args:
        device: target device; None keeps the device of each tensor.
        include: predicate of parameter and buffer names; names that it rejects are left out.
    """
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if include(name)}
    full_tensors: dict[int, Tensor] = {}
    for value in state.values():
        if id(value) not in full_tensors:
            full = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
            full_tensors[id(value)] = full.to(device or full.device) if ranks.first else full.new_empty(0)
    return {name: full_tensors[id(value)] for name, value in state.items()} if ranks.first else {}


def _collective(function: Any, state: dict[str, Any], *, ranks: Ranks, **storage: Any) -> None:
    if ranks.is_single:
        function(state, no_dist=True, **storage)
    else:
        function(state, process_group=ranks.group, **storage)


def _templates(folder: Path, metadata: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the tensors to read into: the parameters themselves, and zeros for optimizer state.

    Optimizer state of its parameter's shape is sharded as the parameter.
    """
    stored = {name: tensor for name, tensor in metadata.items() if name.startswith(_MODEL_PREFIXES)}
    unlike = sorted(set(stored) ^ set(parameters)) or [
        n for n, p in parameters.items() if stored[n].size != p.shape or stored[n].properties.dtype != p.dtype
    ]
    if unlike:
        raise OtherRunError(
            f"TG-TRAIN-011: {folder}: the parameters do not match the model: "
            f"{unlike[0].partition(':')[2]} is in only one of them, "
            "or has another shape or type. Resume with the model and the options with which the run was started."
        )
    out: dict[str, Any] = dict(parameters)
    for name, tensor in metadata.items():
        if name not in parameters:
            owner, dtype = parameters[f"param:{name.partition(':')[2]}"], tensor.properties.dtype
            same_shape = owner.shape == tensor.size
            if name.startswith(_MOMENT_PREFIXES) and not same_shape:
                raise ValueError(f"{name[:120]} does not have the shape of its parameter")
            out[name] = torch.zeros_like(owner, dtype=dtype) if same_shape else torch.zeros(tensor.size, dtype=dtype)
            out[name] = out[name].detach()
    return out


def _optimizer_parts(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer state by parameter name: tensors, and a dict of everything else."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    other_state: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            state_key = f"{key}:{names[id(parameter)]}"
            if not isinstance(value, Tensor):
                other_state[state_key] = value
                continue
            if isinstance(parameter, DTensor) and value.ndim and not isinstance(value, DTensor):
                raise ArgumentError(
                    f"TG-TRAIN-012: {type(optimizer).__name__} stores {key} of a sharded parameter as a plain tensor, "
                    "so a checkpoint cannot assign it to ranks. Use parallel.mode ddp, or an optimizer that stores "
                    "DTensors."
                )
            tensors[state_key] = value.detach()
    groups = [{k: v for k, v in group.items() if _is_plain(v)} for group in optimizer.param_groups]
    return tensors, {"state": other_state, "groups": groups}


def _load_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], optimizer_json: Mapping[str, Any]
) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = {names[id(p)]: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state: dict[int, dict[str, Any]] = {}
    for state_key, value in [*tensors.items(), *optimizer_json["state"].items()]:
        key, _, name = state_key.partition(":")
        state.setdefault(order[name], {})[key] = value
    current = optimizer.state_dict()["param_groups"]
    if len(current) != len(optimizer_json["groups"]):
        raise ValueError(f"the optimizer has {len(current)} parameter groups and the checkpoint has another number")
    saved_groups = [
        {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()} for group in optimizer_json["groups"]
    ]
    for current_group, saved_group in zip(current, saved_groups, strict=True):
        if not all(
            name in current_group and _is_compatible(current_group[name], value) for name, value in saved_group.items()
        ):
            raise ValueError("the saved optimizer has other options than the current one")
    groups = [
        {**current_group, **saved_group} for current_group, saved_group in zip(current, saved_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _is_compatible(current: Any, saved: Any) -> bool:
    """Return whether a saved optimizer option may replace the current one.

    A number must stay a finite number; a bool must stay a bool.
    """
    if isinstance(current, (list, tuple)):
        return isinstance(saved, tuple) and len(current) == len(saved) and all(map(_is_compatible, current, saved))
    if isinstance(current, (int, float)) and not isinstance(current, bool):
        return isinstance(saved, (int, float)) and not isinstance(saved, bool) and math.isfinite(saved)
    return saved is None or current is None or type(current) is type(saved)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, float) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _root_cause(error: CheckpointException) -> Exception:
    """Return the error of one failed rank as an Exception, which `CheckpointException` is not."""
    first = next(iter(error.failures.values()))[0]
    return first if isinstance(first, Exception) else RuntimeError(str(first))


_RESUME = "resume"


@dataclass
class SharedRunDir:
    """The run directory as its ranks share it.

    Args:
        mirror: the local folder, and its remote address if it has one.
        ranks: the ranks that share the folder.
        writes: whether this rank creates and removes files in the folder. One rank per folder does.
    """

    mirror: RunDirectory
    ranks: Ranks
    writes: bool

    @classmethod
    def of(cls, out: str | os.PathLike[str] | RunDirectory, ranks: Ranks) -> "SharedRunDir":
        """Open the run directory. Every rank calls this with the same address.

        Ranks of one machine work in one folder. The markers of complete remote checkpoints are downloaded, so that
        `list_checkpoints` finds them.

        Raises:
            ReadError: if the address cannot be reached.
        """
        mirror = RunDirectory.of(out)
        if not mirror.address:
            return cls(mirror, ranks, ranks.first)
        node = os.environ.get("GROUP_RANK")  # torchrun's number of the machine
        folders = ranks.all_gather((node, str(mirror.path)))
        path = next(Path(path) for other, path in folders if other == node and Path(path).is_dir())
        leads = path == mirror.path
        ranks.all_gather(None)  # A barrier: no rank removes its folder while another still looks for it.
        mirror.share(path)
        shared = cls(mirror, ranks, leads)
        with ranks.fail_together():
            if leads:
                shared._fetch_markers()
        return shared

    def __str__(self) -> str:
        return str(self.mirror)

    @property
    def path(self) -> Path:
        """The folder of this machine."""
        return self.mirror.path

    def address_of(self, path: Path) -> str | None:
        """Return the address of a file or folder of the run; "" if the run has no address."""
        return self.mirror.address_of(path)

    def clear(self) -> None:
        """Remove incomplete checkpoints at the address, which a killed run left."""
        if self.mirror.address and self.ranks.first:
            names = self._sent()
            complete = _find_markers(names)
            self.mirror.remove(name for name in names if _folder_of(name) not in complete)

    def download(self, checkpoint: Path) -> None:
        """Download the files that a resume needs: the state of one checkpoint, and the run's files outside checkpoints.

        Raises:
            ReadError: if it cannot be read, or does not match its marker.
        """
        if not self.mirror.address:
            return
        with self.ranks.fail_together():
            if self.writes:
                prefix = f"{CHECKPOINTS_PREFIX}{checkpoint.name}/{_RESUME}/"
                files = list_marker_files(checkpoint / _RESUME)
                names = [name for name in self.mirror.remote_files() if not name.startswith(CHECKPOINTS_PREFIX)]
                self.mirror.download([*names, *(prefix + name for name in files)])

    def upload(self, staged: Path, name: str) -> dict[str, FileChecksum]:
        """Upload this machine's files of a checkpoint that has no marker yet. Every rank calls this.

        Args:
            staged: the local folder of the checkpoint.
            name: name of the checkpoint.

        Returns:
            On the first rank, the size and checksum of each file of `resume` on other machines. {} on other ranks.
        """
        if not self.mirror.address:
            return {}
        measured: dict[str, FileChecksum] = {}
        with self.ranks.fail_together():
            if self.writes:
                files = sorted(path for path in staged.rglob("*") if path.is_file())
                self.mirror.upload_as(
                    {f"{CHECKPOINTS_PREFIX}{name}/{path.relative_to(staged).as_posix()}": path for path in files}
                )
                resume_folder = staged / _RESUME
                measured = {
                    p.relative_to(resume_folder).as_posix(): safetensors_file.measure(p)
                    for p in files
                    if resume_folder in p.parents
                }
        parts = self.ranks.gather({} if self.ranks.first else measured)
        return {name: written for part in parts for name, written in part.items()} if self.ranks.first else {}

    def complete(self, staged: Path, final: Path, keep: int) -> None:
        """Upload the marker of a checkpoint, which completes it, then remove all but the newest `keep`.

        Args:
            staged: the local folder of the checkpoint on machines other than the first.
            final: its final folder; on the first machine it is already complete.
        """
        if not self.mirror.address:
            return
        with self.ranks.fail_together():
            self.push()
        mark = self.ranks.broadcast((final / _RESUME / MARKER).read_bytes() if self.ranks.first else b"")
        with self.ranks.fail_together():
            if self.ranks.first:
                self.mirror.upload([f"{CHECKPOINTS_PREFIX}{final.name}/{_RESUME}/{MARKER}"])
                self._remove_old(keep)
            elif self.writes and staged.is_dir():
                outputs.write(staged / _RESUME / MARKER, mark)
                staged.rename(final)
            for old in final.parent.glob("step-*") if self.writes else ():
                if old != final:
                    shutil.rmtree(old, ignore_errors=True)

    def push(self) -> None:
        """Upload the changed files outside checkpoints from this rank's machine."""
        if self.writes:
            self.mirror.sync()

    def _sent(self) -> list[str]:
        """Return the names of all files of checkpoints at the address."""
        return [name for name in self.mirror.remote_files() if name.startswith(CHECKPOINTS_PREFIX)]

    def _fetch_markers(self) -> None:
        self.mirror.download(name for folder, name in _find_markers(self._sent()).items() if step_of(folder) >= 0)

    def _remove_old(self, keep: int) -> None:
        names = self._sent()
        markers = _find_markers(names)
        for old in sorted(markers, key=step_of)[:-keep]:
            self.mirror.remove([markers[old]])  # First: without its marker, a checkpoint does not count.
            self.mirror.remove(name for name in names if _folder_of(name) == old and name != markers[old])


def _folder_of(name: str) -> str:
    return name.removeprefix(CHECKPOINTS_PREFIX).partition("/")[0]


def _find_markers(names: list[str]) -> dict[str, str]:
    """Return the marker files among `names`, by the name of their checkpoint."""
    return {_folder_of(name): name for name in names if name.endswith(f"/{_RESUME}/{MARKER}")}


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
    terms: Sequence[TokenRecord] = (),
    ranks: Ranks | None = None,
    away: SharedRunDir | None = None,
) -> Path:
    """Write `out/checkpoints/step-N`, point `out/checkpoint` at it, and remove all but the newest `keep`.

    Every rank writes its shard of the parameters and the optimizer. The first rank also writes the model for
    transformers.

    Args:
        out: run directory on this machine.
        model: a transformers or peft model, sharded or not; written by its own `save_pretrained`.
        tokenizer: folder whose tokenizer files are copied next to the weights, or None.
        keep: number of checkpoints to keep.
        reference: a reference model whose weights follow the policy; saved in the checkpoint.
        terms: this rank's records of trained tokens, for the report after a resume.
        ranks: the ranks that share the run; each calls this.
        away: the run directory, if not all ranks see the same folder.

    Raises:
        TracegradError: if the checkpoint cannot be written completely; earlier checkpoints are unchanged.
    """
    ranks = ranks or Ranks()
    away = away or SharedRunDir.of(out, ranks)
    folder = out / FOLDER
    final = folder / f"step-{progress.step:08d}"
    staged = folder / f".tmp-{final.name}"
    with _all_or_nothing(staged, final, ranks):
        if not ranks.max(int(ranks.first and final.exists())):
            with _collective_errors(ranks):
                if away.writes:
                    outputs.make_folder(staged)
                    (staged / "resume" / "state").mkdir(parents=True)
            full_state = full_state_dict(model, ranks)
            with _collective_errors(ranks):
                if ranks.first:
                    _export(staged, model, full_state, tokenizer)
            with _collective_errors(ranks):
                save_random(staged / "resume" / f"random-{ranks.rank}.safetensors")
                save_token_records(staged / "resume" / f"terms-{ranks.rank}.safetensors", terms)
            save_state(staged / "resume" / "state", model, optimizer, ranks, reference)
            with _collective_errors(ranks):
                if ranks.first:
                    save_logprobs(staged / "resume", progress)
            remote_files = away.upload(staged, final.name)
            with _collective_errors(ranks):
                if ranks.first:
                    _finish(staged, final, progress, remote_files)
        away.complete(staged, final, keep)
        with _collective_errors(ranks):
            if ranks.first:
                _remove_old(out, final, keep)
    return final


def _export(staged: Path, model: Any, full_state: Mapping[str, torch.Tensor], tokenizer: Path | None) -> None:
    with quiet():
        model.save_pretrained(staged, state_dict=full_state)
    (staged / "README.md").unlink(missing_ok=True)  # peft writes an empty model card.
    if has_adapters(model):
        model.config.save_pretrained(staged)  # It has the vocabulary size and the end-of-sequence ids.
    for name in TOKENIZER_FILES:
        if tokenizer is not None and (tokenizer / name).is_file() and not (staged / name).exists():
            outputs.copy(tokenizer / name, staged / name)


def _finish(staged: Path, final: Path, progress: Progress, remote_files: Mapping[str, FileChecksum]) -> None:
    """Write the marker and rename the folder to its final name."""
    save_progress(staged / "resume", progress, remote_files)
    _flush_tree(staged)
    staged.rename(final)
    flush(final.parent)


def _remove_old(out: Path, final: Path, keep: int) -> None:
    """Point the link at the newest checkpoint, and remove old ones."""
    _update_link(out / LINK, final)
    for old in list_checkpoints(out)[:-keep]:
        trash = old.with_name(f".tmp-{old.name}")
        old.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def list_checkpoints(out: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    complete = (path for path in (out / FOLDER).glob("step-*") if (path / "resume" / MARKER).is_file())
    return sorted((path for path in complete if step_of(path.name) >= 0), key=lambda path: step_of(path.name))


@contextmanager
def writable(out: Path) -> Iterator[None]:
    """Wrap writes outside checkpoints: turn an OSError into a TracegradError with advice."""
    try:
        yield
    except OSError as error:
        raise TracegradError(
            f"TG-TRAIN-013: {error.filename or out}: {error.strerror}. Checkpoints cannot be written there. Pass "
            f"another out."
        ) from error


def clear_staged(out: Path) -> None:
    """Remove temporary folders that a killed process left while it wrote or deleted a checkpoint."""
    for path in (out / FOLDER).glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def read_progress(path: Path) -> Progress:
    """Read the progress of a run from a checkpoint.

    Raises:
        ReadError: if the checkpoint is damaged or has another format.
    """
    with _reading_errors(path):
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
    """Load parameters, optimizer and random states of a checkpoint, and return the progress of its run.

    Every file is compared with its checksum first. The number of ranks may differ from when the checkpoint was written.
    A new rank uses the first rank's random states.

    Args:
        reference: as for `save`.
        leads: verify the files on this rank too. Set it if the first rank does not see this rank's folder.

    Raises:
        ReadError: if the checkpoint is damaged, or of another model or format version.
    """
    ranks = ranks or Ranks()
    folder = path / "resume"
    error: Exception | None = None
    try:
        if ranks.first or leads:
            verify(folder)
    except Exception as raised:  # `raise_on_all` informs the other ranks first.
        error = raised
    with _reading_errors(path):
        ranks.raise_on_all(error)
        progress = read_progress_file(folder)
        read_state(folder / "state", model, optimizer, ranks, reference)
        random_file = folder / f"random-{ranks.rank}.safetensors"
        restore_random(random_file if random_file.is_file() else random_file.with_name("random-0.safetensors"))
    return progress


def logprobs_of(path: Path, progress: Progress, name: str, terms: int) -> NDArray[np.float32]:
    """Return one array of the checkpoint's logprobs, after a check of its length.

    Raises:
        ReadError: if it is missing or does not have `terms` entries.
    """
    with _reading_errors(path):
        logprobs = progress.logprobs[name]
        if len(logprobs) != terms:
            raise ValueError(f"it has {name} logprobs of {len(logprobs):,} tokens, and the traces have {terms:,}")
        return logprobs


def read_terms(path: Path, ranks: Ranks) -> list[TokenRecord]:
    """Read the checkpoint's records of trained tokens for the report, divided among the current ranks."""
    files = sorted((path / "resume").glob("terms-*.safetensors"))
    with _reading_errors(path):
        return [term for file in files[ranks.rank :: ranks.world] for term in load_token_records(file)]


@contextmanager
def _collective_errors(ranks: Ranks) -> Iterator[None]:
    """Synchronize the ranks after the block; a write error on one rank is raised on all."""
    error = None
    try:
        yield
    except _CANNOT_WRITE as raised:
        error = raised
    ranks.raise_on_all(error)


@contextmanager
def _all_or_nothing(staged: Path, final: Path, ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except _CANNOT_WRITE as error:
        if ranks.first:
            shutil.rmtree(staged, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise TracegradError(
            f"TG-TRAIN-014: {final}: {reason}. This checkpoint is not written; earlier checkpoints are unchanged. "
            "Free space, or make the folder writable, then continue with resume=True."
        ) from error


def _update_link(link: Path, target: Path) -> None:
    """Point the symbolic link `link` at `target` atomically."""
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
def _reading_errors(path: Path) -> Iterator[None]:
    """Turn any error while a checkpoint is read into one ReadError with advice."""
    try:
        yield
    except (torch.OutOfMemoryError, OtherRunError):
        raise
    except Exception as error:
        earlier = [other for other in list_checkpoints(path.parent.parent) if step_of(other.name) < step_of(path.name)]
        advice = (
            f"continue from {earlier[-1].name}, the checkpoint before it"
            if earlier
            else "start anew: there is no earlier checkpoint"
        )
        raise ReadError(
            f"TG-TRAIN-015: {path}: the checkpoint is damaged: {first_line(error)[:300]}. The run cannot resume "
            f"exactly "
            f"from it. Delete this folder to {advice}."
        ) from error
