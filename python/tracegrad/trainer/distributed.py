"""Train on several ranks: agreement and errors across ranks, FSDP2 and DDP."""

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from tracegrad.config import Config
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.model import Plan, PolicyLoss, batch_loss, head_of, logprobs_and_entropy
from tracegrad.model.verify import whole_row
from tracegrad.objective import Objective
from tracegrad.objective.torch_loss import Terms
from tracegrad.packing import Batch
from tracegrad.trainer.memory import SPEED, Memory, layers_of, out_of_memory

TIMEOUT_S = 1800.0
"""Seconds that ranks wait for one another, where a run is not told otherwise."""
_WORD, _HEARD, _AT, _WAITED = "stopped", "heard", "at", "waited"  # keys of the store that all ranks see
_HERE = "tracegrad/here"
_PATIENCE_S = 10.0
_REPORT_S = 5.0


class OtherRankFailed(OSError):
    """Another rank could not do its part, and says why."""


@dataclass(frozen=True)
class Ranks:
    """Which process this is, and how it speaks to the others. Every rank makes the same calls in the same order.

    Args:
        world, rank: how many processes, and which of them this is.
        group: for collectives on the CPU; None where there is one process.
        beside: a second such group, for the thread that prepares the next step.
        token: of this group alone, in the keys of the store that torchrun may keep over restarts.

    >>> Ranks().all_reduce(np.ones(2), "sum").tolist()
    [1.0, 1.0]
    """

    world: int = 1
    rank: int = 0
    group: Any = None
    beside: Any = None
    token: str = ""

    @classmethod
    def join(cls, timeout_s: float = TIMEOUT_S) -> "Ranks":
        """The ranks of the default process group, which torchrun's variables open where nobody has; else one process.

        Args:
            timeout_s: how long ranks wait for one another, here and later.

        Raises:
            ArgumentError: if torchrun started this process and the group cannot be opened.
        """
        if not dist.is_available() or not (dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1):
            return cls()
        if not dist.is_initialized():
            _open_group(timeout_s)
        return cls.of_open_group(timeout_s)

    @classmethod
    def of_open_group(cls, timeout_s: float | None = None) -> "Ranks":
        """The ranks of the default process group as it is; one process where there is none.

        Args:
            timeout_s: how long ranks wait for one another from now on; default as before, or half an hour.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        if not (_kept and _kept[0] is dist.group.WORLD):
            groups: list[Any] = [dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)) for _ in range(2)]
            token = [secrets.token_hex(8)]
            dist.broadcast_object_list(token, 0, group=groups[0])
            ranks = cls(dist.get_world_size(), dist.get_rank(), groups[0], groups[1], token[0])
            _kept[:] = [dist.group.WORLD, ranks]
        ranks = _kept[1]
        if timeout_s is not None:
            for group in (ranks.group, ranks.beside, dist.group.WORLD):
                _set_timeout(timedelta(seconds=timeout_s), group)
        return ranks

    @property
    def alone(self) -> bool:
        """Whether there is nobody else."""
        return self.world == 1

    @property
    def first(self) -> bool:
        """Whether this rank writes files and speaks."""
        return self.rank == 0

    def all_reduce(self, array: NDArray[Any], op: str, *, beside: bool = False) -> NDArray[np.float64]:
        """The float64 sum or maximum over ranks, as `correct` and the metrics take it.

        Args:
            beside: in the thread that prepares the next step.
        """
        flat = np.ascontiguousarray(array, np.float64)
        if self.alone:
            return flat
        tensor, group = torch.from_numpy(flat.copy()), self.beside if beside else self.group
        dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=group)
        return tensor.numpy()

    def merge(self, values: NDArray[np.float32], held: NDArray[np.bool_]) -> NDArray[np.float32]:
        """One array of parts that ranks hold: [N] float32, each entry from the rank with `held`, NaN where none has it.

        Exact: every entry is one number plus zeros.
        """
        if self.alone:
            return np.where(held, values, np.float32(np.nan))
        both = torch.from_numpy(np.stack([np.where(held, values, 0.0), held]).astype(np.float32))
        dist.all_reduce(both, group=self.group)
        total, counted = both.numpy()
        return np.where(counted > 0, total, np.float32(np.nan))

    def sum(self, value: float) -> float:
        """The sum over ranks."""
        return float(self.all_reduce(np.array([value]), "sum")[0])

    def largest(self, value: int) -> int:
        """The largest over ranks: how they agree to stop on a signal that one of them got."""
        return int(self.all_reduce(np.array([value], np.float64), "max")[0])

    def gathered(self, value: Any) -> list[Any]:
        """The value of every rank, in order, on the first rank; elsewhere this rank's alone."""
        if self.alone:
            return [value]
        values: list[Any] | None = [None] * self.world if self.first else None
        dist.gather_object(value, values, group=self.group)
        return values if values is not None else [value]

    def shared(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        if self.alone:
            return value
        values = [value]
        dist.broadcast_object_list(values, 0, group=self.group)
        return values[0]

    def joined(self, values: NDArray[Any]) -> NDArray[Any]:
        """[n] of every rank behind one another, in order, on every rank."""
        if self.alone:
            return values
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, values, group=self.group)
        return np.concatenate(parts)

    def leave_word(self, word: str) -> None:
        """Says something that other ranks may look for whenever they like: no collective call."""
        if not self.alone:
            dist.distributed_c10d._get_default_store().set(self._key(word), "")

    def finds_word(self, word: str) -> bool:
        """Whether a rank has left this word."""
        return not self.alone and dist.distributed_c10d._get_default_store().check([self._key(word)])

    def everybody(self, value: Any) -> list[Any]:
        """The value of every rank, in order, on every rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, error: Exception | None) -> None:
        """Raises `error` where there is one, and on the other ranks that one of them failed: nobody waits for it.

        Raises:
            Exception: `error`; OtherRankFailed on a rank whose own work went well while another's did not, with its
                words.
        """
        failed = self.largest(0 if error is None else 1)
        if not failed:
            return
        said = self.everybody("" if error is None else f"{error}"[:2000])
        if error is not None:
            raise error
        rank = next(number for number, words in enumerate(said) if words)
        raise OtherRankFailed(0, f"another rank could not do its part: rank {rank}, {said[rank]}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around work of each rank that needs no other, after which all wait for one another and fail together."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.agree(error)

    def at(self, where: str) -> None:
        """Leaves word of where this rank is, for the others to tell where it hangs."""
        if not self.alone and dist.is_initialized():
            dist.distributed_c10d._get_default_store().set(self._key(_AT, self.rank), f"{time.time():.0f} {where}")

    def absent(self, error: Exception) -> str:
        """Which ranks did not come, after a collective call that has failed; "" where the failure is another.

        The ranks that waited, too, say so. Closes this rank's connections, which wakes the others that wait; the
        process group is gone after this.

        Args:
            error: what the call has raised.
        """
        if self.alone or not dist.is_initialized() or not _of_others(error):
            return ""
        store, until = dist.distributed_c10d._get_default_store(), time.monotonic() + _REPORT_S
        late = any(word in str(error) for word in ("Timed out", "timed out", "timeout"))
        try:
            store.set(self._key(_WAITED, self.rank), "")
            if late:
                store.set(self._key(_WAITED), "")
            dist.destroy_process_group()
            while (gone := self._silent(store)) and time.monotonic() < until:
                time.sleep(0.05)
            how = "did not come within train.timeout" if store.check([self._key(_WAITED)]) else "has ended"
            said = [f"rank {rank} {how}; it was last seen {self._seen(store, rank)}" for rank in gone]
            if self.first:
                time.sleep(min(1.0, max(0.0, until - time.monotonic())))  # the store may be this rank's
        except (RuntimeError, ValueError):  # the store went with the rank that kept it
            return "the rank that kept the store of all ranks has ended"
        return ", ".join(said)

    def _silent(self, store: Any) -> list[int]:
        return [rank for rank in range(self.world) if not store.check([self._key(_WAITED, rank)])]

    def _seen(self, store: Any, rank: int) -> str:
        if not store.check([key := self._key(_AT, rank)]):
            return "before its first step"
        when, _, where = store.get(key).decode().partition(" ")
        return f"at {where}, {max(0, round(time.time() - float(when)))} s ago"

    def _key(self, name: str, rank: int | None = None) -> str:
        return f"tracegrad/{self.token}/{name}" + ("" if rank is None else f"/{rank}")

    def tell(self, said: str) -> None:
        """Leaves word that this rank stops, and closes its connections, which wakes the ranks that wait for it.

        The process group is gone after this. Waits a few seconds until the others have read the word.
        """
        if self.alone or not dist.is_initialized():
            return
        store, until = dist.distributed_c10d._get_default_store(), time.monotonic() + _PATIENCE_S
        with suppress(RuntimeError, ValueError):  # the store went with the rank that kept it, who has ended before
            store.set(self._key(_WORD), f"rank {self.rank}, {said}")
            dist.destroy_process_group()
            while store.add(self._key(_HEARD), 0) < self.world - 1 and time.monotonic() < until:
                time.sleep(0.05)

    def heard(self) -> str:
        """What a rank that stopped has told; "" where none has."""
        if self.alone:
            return ""
        try:
            store = dist.distributed_c10d._get_default_store()
            if not store.check([self._key(_WORD)]):
                return ""
            store.add(self._key(_HEARD), 1)
            return store.get(self._key(_WORD)).decode()
        except (RuntimeError, ValueError):  # the store went with the rank that kept it
            return ""


def _open_group(timeout_s: float) -> None:
    """Opens the default process group by torchrun's variables; says which ranks do not come."""
    from torch.distributed.rendezvous import rendezvous

    backend, wait = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timedelta(seconds=timeout_s)
    lacks = ""
    try:
        store, rank, world = next(rendezvous("env://", timeout=wait))
        store.set_timeout(wait)
        store.set(f"{_HERE}/{rank}", "")
        names = {other: f"{_HERE}/{other}" for other in range(world)}
        try:
            store.wait([*names.values()], wait)
        except RuntimeError:
            lacks = ", ".join(f"rank {other}" for other, name in names.items() if not store.check([name]))
            raise
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
    except (ValueError, RuntimeError) as error:
        why = f"{lacks} did not come within train.timeout" if lacks else str(error).splitlines()[0]
        raise ArgumentError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and the process group does not open: {why}. The ranks cannot "
            "share a gradient. Start the run with torchrun."
        ) from error


def _of_others(error: BaseException) -> bool:
    """Whether a collective call failed by what another rank did, or did not."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _set_timeout(timeout: timedelta, group: Any) -> None:
    public = getattr(dist, "set_timeout", None)  # of torch 2.15
    (public or dist.distributed_c10d._set_pg_timeout)(timeout, group)


_kept: list[Any] = []
"""The default group and its `Ranks`: groups are made once, as making them is a collective call."""


def said_together(error: Exception, step: int, config: Config, ranks: Ranks, ends: bool) -> Exception:
    """What this rank raises: the error itself, or what another rank has told, or whom it waited for.

    Args:
        error: what this rank has met.
        step: that was lost, from 1.
        ends: no step follows, so that an error which this rank meets alone is told the others.
    """
    if isinstance(error, torch.OutOfMemoryError):
        reason = f"step {step}: {out_of_memory(error, config)}"
        ranks.tell(reason)
        return TracegradError(reason)
    if isinstance(error, (TracegradError, OtherRankFailed)):  # all ranks have it
        return error
    if not (ends or isinstance(error, RuntimeError)):
        return error
    if reason := ranks.heard():
        return TracegradError(f"{reason} This rank stops with it.")
    if reason := ranks.absent(error):
        return TracegradError(f"step {step}: {reason}. This rank stops with it.")
    if ends:
        ranks.tell(f"step {step}: {type(error).__name__}: {error}"[:2000])
    return error


Mode = Literal["fsdp", "ddp", "none"]


class Policy(nn.Module):
    """A causal LM whose forward runs a function of it.

    Wrappers such as FSDP2, DDP and those of `accelerator.prepare` do their work around `forward`. In here the head's
    weight is whole and the loss's own autograd functions count as part of the model.

    Args:
        model: a transformers causal LM, with or without adapters of peft.

    >>> Policy(nn.Linear(2, 1))(lambda model: model.in_features)
    2
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """`work(model, *arguments)`."""
        return work(self.model, *arguments)


@dataclass(frozen=True, eq=False)
class Placed:
    """A model where it trains, and how its gradient is put together.

    Args:
        model: the causal LM itself, whose parameters the optimizer holds.
        policy: what is called: `Policy`, DDP around it, or what somebody else prepared.
        mode: of the wrapper.
        ranks: who shares the step.
        scale: what a loss is multiplied by, so that the wrapper's mean over ranks becomes a sum.
        memory: `reduce_each` and `chunk_bytes` of it apply to a step.
    """

    model: nn.Module
    policy: Callable[..., Any]
    mode: Mode
    ranks: Ranks
    scale: float = 1.0
    memory: Memory = SPEED

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return next(self.model.parameters()).device

    @contextmanager
    def last(self, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of one batch: gradients are exchanged with the last of a step."""
        whole = last or self.memory.reduce_each
        if self.mode == "fsdp":
            for module in _sharded(cast(nn.Module, self.policy)):
                module.set_requires_gradient_sync(whole, recurse=False)
        held = self.policy.no_sync() if isinstance(self.policy, DistributedDataParallel) and not last else nullcontext()
        with held:
            yield

    def rest(self) -> None:
        """Gives back what FSDP has gathered: after a pass without gradient no backward pass does, and parameters that
        are not shards are not those of the optimizer."""
        if self.mode == "fsdp":
            for module in _sharded(cast(nn.Module, self.policy)):
                module.reshard()

    def forward(self, batch: Batch, precision: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of each term of a batch, [m] both."""
        how = precision, self.mode == "fsdp", self.memory.chunk_bytes
        if torch.is_grad_enabled() or self.mode == "fsdp":
            return self.policy(_logprobs_and_entropy, batch, *how)
        return _logprobs_and_entropy(self.model, batch, *how)

    def loss(
        self, batch: Batch, terms: Terms, objective: Objective, precision: torch.dtype = torch.float32
    ) -> tuple[Tensor, PolicyLoss]:
        """What `backward` is called on, multiplied by `scale` already; and the loss as it is, with its terms."""
        how = precision, self.mode == "fsdp", self.memory.chunk_bytes
        loss, found = self.policy(_batch_loss, batch, terms, objective, *how)
        return (loss if self.scale == 1 else loss * self.scale), found


def placed(model: Any) -> Placed:
    """How to call a model that anybody prepared: bare, DDP around a `Policy`, or sharded by `fully_shard`.

    Raises:
        ArgumentError: for DDP around the model itself, whose forward gives logits.
    """
    if isinstance(model, Placed):
        return model
    ranks = Ranks.of_open_group()
    if isinstance(model, DistributedDataParallel):
        if not isinstance(model.module, Policy):
            raise ArgumentError(
                f"DistributedDataParallel stands around {type(model.module).__name__}, whose forward gives logits. Its "
                "gradients would not be exchanged. Wrap before: accelerator.prepare(tracegrad.trainer.Policy(model))."
            )
        return Placed(model.module.model, model, "ddp", ranks, scale=float(ranks.world))
    inner = model.model if isinstance(model, Policy) else model
    if isinstance(model, FSDPModule):
        policy = model if isinstance(model, Policy) else _with_method(model)
        return Placed(inner, cast(Any, policy), "fsdp", ranks, scale=float(ranks.world))
    return Placed(inner, Policy(inner), "none", Ranks() if ranks.alone else ranks)


def check_exchanged(target: Placed) -> None:
    """Refuses to train a model whose gradients would stay on each rank."""
    if target.mode == "none" and not target.ranks.alone:
        raise ArgumentError(
            f"{type(target.model).__name__} is not wrapped, and a process group of {target.ranks.world} ranks is open. "
            "Each rank would train a model of its own, as no gradient is exchanged. Pass tracegrad.trainer.prepare("
            "model, 'ddp') or 'fsdp', or accelerator.prepare(tracegrad.trainer.Policy(model))."
        )


def _with_method(model: Any) -> Any:
    """The same root with a method that FSDP2 treats as a forward pass."""
    if not hasattr(type(model), "run_in_forward"):
        type(model).run_in_forward = lambda self, work, *arguments: work(self, *arguments)
    if "run_in_forward" not in vars(model):
        register_fsdp_forward_method(model, "run_in_forward")
    return _Method(model)


class _Method:
    """Calls `run_in_forward` of a root, and stands for it where its modules are walked."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def __call__(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return self.root.run_in_forward(work, *arguments)

    def modules(self) -> Iterator[nn.Module]:
        return self.root.modules()


def prepare(
    model: nn.Module,
    mode: Mode = "none",
    *,
    ranks: Ranks | None = None,
    device: torch.device | None = None,
    precision: torch.dtype = torch.float32,
    memory: Memory | None = None,
) -> Placed:
    """Puts a model on its device and its ranks. Parameters keep their names and dtype.

    Args:
        model: a transformers causal LM on the CPU, every rank with the same parameters. Changed in place.
        mode: "fsdp" shards each decoder layer, and the rest as one; "ddp" keeps a whole copy on each rank.
        ranks: default the open process group.
        device: default where the model is; FSDP moves one layer at a time there.
        precision: bfloat16 lets FSDP gather and compute in it, with float32 parameters, gradients and reductions.
        memory: default `Memory.of("speed")`.

    Raises:
        ArgumentError: if the mode and the number of ranks contradict one another.
    """
    ranks, memory = ranks or Ranks.of_open_group(), memory or SPEED
    device = device or next(model.parameters()).device
    if ranks.alone != (mode == "none"):
        raise ArgumentError(
            f"parallel.mode is {mode!r} on {ranks.world} rank{'' if ranks.alone else 's'}. "
            "none is for one process; fsdp and ddp are for several, which torchrun starts. Leave it out for auto."
        )
    if mode == "fsdp":
        head_of(model)  # looks at the head once, while it is whole
        return Placed(model, _fsdp(model, ranks, device, precision, memory), mode, ranks, memory=memory)
    model.to(device)
    if mode == "ddp":
        head_of(model)
        within = [device.index] if device.type == "cuda" else None
        policy = DistributedDataParallel(Policy(model), device_ids=within)
        policy.register_comm_hook(None, _summed)
        return Placed(model, policy, mode, ranks, memory=memory)
    return Placed(model, Policy(model), mode, ranks, memory=memory)


def auto_mode(ranks: Ranks) -> Mode:
    """fsdp on several CUDA devices, ddp on several CPU processes, none on one."""
    if ranks.alone:
        return "none"
    return "fsdp" if torch.cuda.is_available() else "ddp"


def device_named(name: str) -> torch.device:
    """The device of this rank: "auto" is CUDA where there is one; CUDA without a number is the one of the local rank.

    Raises:
        ArgumentError: where several ranks of a machine would share one numbered device.
    """
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    elif (beside := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > 1:
        raise ArgumentError(
            f"train.device is {name!r}, and {beside} processes run on this machine. All of them would take that one "
            "device. Set train.device cuda, or leave it out: each takes the device of its local rank."
        )
    torch.cuda.set_device(device)
    return device


def autocast(device: str, precision: torch.dtype) -> AbstractContextManager[Any]:
    """Autocast to `precision` on a type of device; nothing for float32."""
    return nullcontext() if precision == torch.float32 else torch.autocast(device, dtype=precision)


def whole(tensor: Tensor) -> Tensor:
    """The tensor that a shard is of; every rank must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[attr-defined]


def _fsdp(
    model: nn.Module, ranks: Ranks, device: torch.device, precision: torch.dtype, memory: Memory
) -> Callable[..., Any]:
    from torch.distributed.device_mesh import init_device_mesh

    low = precision != torch.float32
    policy = Policy(model)
    mixed = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    options = {"mesh": init_device_mesh(device.type, (ranks.world,)), "mp_policy": mixed}
    frozen = not any(parameter.requires_grad for parameter in model.parameters())  # no backward pass to keep them for
    for layer in layers_of(model):
        fully_shard(layer, reshard_after_forward=memory.reshard or frozen, **options)
    fully_shard(policy, reshard_after_forward=frozen, **options)
    for module in _sharded(policy):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return policy


def _sharded(module: nn.Module) -> list[FSDPModule]:
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def _summed(_, bucket):  # DDP reads annotations, and knows no strings
    """DDP's exchange of a `GradBucket` without its division by the number of ranks."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def _logprobs_and_entropy(
    model: nn.Module, batch: Batch, precision: torch.dtype, one_pass: bool, chunk_bytes: int | None
) -> tuple[Tensor, Tensor]:
    """As `policy.logprobs_and_entropy`; `one_pass` calls each layer once a batch, as ranks must all do so alike."""
    with _cast(batch, precision, one_pass):
        return logprobs_and_entropy(model, batch, plan=_forward(model, one_pass), chunk_bytes=chunk_bytes)


def _batch_loss(
    model: nn.Module,
    batch: Batch,
    terms: Terms,
    objective: Objective,
    precision: torch.dtype,
    one_pass: bool,
    chunk_bytes: int | None,
) -> tuple[Tensor, PolicyLoss]:
    """As `model.batch_loss`, the loss apart: wrappers find the tensor whose backward pass they wait for in a tuple."""
    with _cast(batch, precision, one_pass):
        forward = _forward(model, one_pass)
        loss = batch_loss(model, batch, terms, objective, forward=forward, chunk_bytes=chunk_bytes)
    return loss.loss, loss


def _cast(batch: Batch, precision: torch.dtype, one_pass: bool) -> AbstractContextManager[Any]:
    """FSDP casts by itself."""
    return autocast(batch.ids.device.type, torch.float32 if one_pass else precision)


def _forward(model: nn.Module, one_pass: bool) -> Plan | None:
    return whole_row(model) if one_pass else None
