"""Trained parameters and optimizer of any number of ranks as safetensors, by torch.distributed.checkpoint.

Each rank writes what it holds, and any number of ranks reads it back. No pickle, no folders made or renamed: that is
`checkpoint`'s. An optimizer's state is kept by the names of its parameters.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from tracegrad.errors import ArgumentError, ReadError
from tracegrad.learner.ranks import Ranks

_REST = "optimizer.json"


def write(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Writes the trained parameters and the optimizer's state into a folder that is there.

    Raises:
        OSError: if a rank cannot write.
        ArgumentError: for optimizer state of which each rank holds a part that has no place in the whole.
    """
    tensors = {f"param:{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    state, rest = _optimizer_parts(optimizer, model)
    storage = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _collective(save, {**tensors, **state}, storage_writer=storage, ranks=ranks)
    except CheckpointException as error:
        raise _cause(error) from error
    if ranks.first:
        (folder / _REST).write_text(json.dumps(rest, indent=1), encoding="utf-8")


def read(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Puts parameters and optimizer state back, in place, whatever the number of ranks that wrote them.

    Raises:
        ReadError: if they are those of another model.
        OSError, ValueError, KeyError, RuntimeError: if files are damaged.
    """
    storage = HuggingFaceStorageReader(str(folder))
    try:
        found = storage.read_metadata().state_dict_metadata
        rest = json.loads((folder / _REST).read_text(encoding="utf-8"))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        wanted = _templates(folder, found, trained)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _collective(load, wanted, storage_reader=storage, ranks=ranks)
    except CheckpointException as error:
        raise _cause(error) from error
    _load_optimizer(optimizer, model, {k: v for k, v in wanted.items() if not k.startswith("param:")}, rest)


def whole_state(model: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """The state dict of a model whose parameters may be sharded, whole, on the CPU of the first rank; else empty."""
    seen: dict[int, Tensor] = {}
    for value in model.state_dict(keep_vars=True).values():
        if id(value) not in seen:
            full = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
            seen[id(value)] = full.cpu() if ranks.first else full.new_empty(0)
    return {name: seen[id(v)] for name, v in model.state_dict(keep_vars=True).items()} if ranks.first else {}


def _collective(call: Any, state: dict[str, Any], *, ranks: Ranks, **storage: Any) -> None:
    if ranks.alone:
        call(state, no_dist=True, **storage)
    else:
        call(state, process_group=ranks.group, **storage)


def _templates(folder: Path, found: Mapping[str, Any], trained: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors to read into: the parameters themselves, and zeros for the optimizer's, sharded as their parameters."""
    stored = {name.removeprefix("param:"): told for name, told in found.items() if name.startswith("param:")}
    apart = sorted(set(stored) ^ set(trained)) or [n for n, p in trained.items() if stored[n].size != p.shape]
    if apart:
        raise ReadError(
            f"{folder}: its parameters are not those of the model given: {apart[0]} is not in both, or of another "
            "shape. The run cannot go on from it. Resume with the --model and options that the run was started with."
        )
    out: dict[str, Any] = {f"param:{name}": p.detach() for name, p in trained.items()}
    for name, told in found.items():
        if not name.startswith("param:"):
            owner, dtype = trained[name.partition(":")[2]], told.properties.dtype
            like = owner.shape == told.size
            out[name] = torch.zeros_like(owner, dtype=dtype) if like else torch.zeros(told.size, dtype=dtype)
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
    groups = [{**now, **then} for now, then in zip(current, before, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(each, float) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _cause(error: CheckpointException) -> Exception:
    """What one rank failed with, as an Exception: torch's own is none."""
    first = next(iter(error.failures.values()))[0]
    return first if isinstance(first, Exception) else RuntimeError(str(first))
