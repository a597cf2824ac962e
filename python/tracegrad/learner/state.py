"""Reads and writes trained parameters and optimizer state as safetensors, for any number of ranks.

Each rank writes what it holds, and any number of ranks reads it back. No pickle, no folders made or renamed: that is
`checkpoint`'s. An optimizer's state is kept by the names of its parameters.
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor

from tracegrad import outputs
from tracegrad.errors import ArgumentError
from tracegrad.learner.progress import OtherRunError
from tracegrad.learner.ranks import Ranks
from tracegrad.shards import read_text

_REST = "optimizer.json"
_LIMIT = 64 << 20
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


def read(
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
        rest = json.loads(read_text(folder / _REST, _LIMIT))
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
