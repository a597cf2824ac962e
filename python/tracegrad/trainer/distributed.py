"""Distributed training: collective operations and error propagation between ranks, FSDP2 and DDP."""

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
from tracegrad.model.verify import one_pass_plan
from tracegrad.objective import Objective
from tracegrad.objective.torch_loss import Terms
from tracegrad.packing import Batch
from tracegrad.trainer.memory import SPEED, Memory, layers_of, out_of_memory

TIMEOUT_S = 1800.0
"""Default number of seconds for which ranks wait for each other."""
_STOPPED, _ACKNOWLEDGED, _STAGE, _WAITED = "stopped", "heard", "at", "waited"  # Keys of the store that all ranks share.
_PRESENT_PREFIX = "tracegrad/here"
_ACKNOWLEDGE_TIMEOUT_S = 10.0
_REPORT_TIMEOUT_S = 5.0


class OtherRankFailed(OSError):
    """Raised if another rank failed; the message contains its reason."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and collective operations. All ranks make the same calls in the same order.

    Args:
        world: number of processes.
        rank: number of this process.
        group: process group for collectives on the CPU; None for one process.
        thread_group: a second such group, for the thread that prepares the next step.
        token: unique to this process group, for keys of the store, which torchrun can keep across restarts.

    >>> Ranks().all_reduce(np.ones(2), "sum").tolist()
    [1.0, 1.0]
    """

    world: int = 1
    rank: int = 0
    group: Any = None
    thread_group: Any = None
    token: str = ""

    @classmethod
    def join(cls, timeout_s: float = TIMEOUT_S) -> "Ranks":
        """Return the ranks of the default process group. Opens the group if torchrun's variables are set.

        Without a group and these variables, the result is a single process.

        Args:
            timeout_s: seconds for which ranks wait for each other, here and later.

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
        """Return the ranks of the open default process group; a single process if there is none.

        Args:
            timeout_s: seconds for which ranks wait for each other from now on; default unchanged, or 1800.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        if not (_cache and _cache[0] is dist.group.WORLD):
            groups: list[Any] = [dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)) for _ in range(2)]
            token = [secrets.token_hex(8)]
            dist.broadcast_object_list(token, 0, group=groups[0])
            ranks = cls(dist.get_world_size(), dist.get_rank(), groups[0], groups[1], token[0])
            _cache[:] = [dist.group.WORLD, ranks]
        ranks = _cache[1]
        if timeout_s is not None:
            for group in (ranks.group, ranks.thread_group, dist.group.WORLD):
                _set_timeout(timedelta(seconds=timeout_s), group)
        return ranks

    @property
    def is_single(self) -> bool:
        """Whether there is only one process."""
        return self.world == 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def all_reduce(self, array: NDArray[Any], op: str, *, in_thread: bool = False) -> NDArray[np.float64]:
        """Return the sum or maximum over ranks as float64.

        Args:
            array: values of this rank, of the same shape on all ranks.
            op: "sum" or "max".
            in_thread: set it in the thread that prepares the next step, which uses its own process group.
        """
        flat = np.ascontiguousarray(array, np.float64)
        if self.is_single:
            return flat
        tensor, group = torch.from_numpy(flat.copy()), self.thread_group if in_thread else self.group
        dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=group)
        return tensor.numpy()

    def merge(self, values: NDArray[np.float32], held: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Merge arrays over ranks: [N] float32, each entry from the rank where `held` is True; NaN if no rank has it.

        The result is exact, as each entry is the sum of one number and zeros.
        """
        if self.is_single:
            return np.where(held, values, np.float32(np.nan))
        stacked = torch.from_numpy(np.stack([np.where(held, values, 0.0), held]).astype(np.float32))
        dist.all_reduce(stacked, group=self.group)
        total, holders = stacked.numpy()
        return np.where(holders > 0, total, np.float32(np.nan))

    def sum(self, value: float) -> float:
        """Return the sum over ranks."""
        return float(self.all_reduce(np.array([value]), "sum")[0])

    def max(self, value: int) -> int:
        """Return the maximum over ranks. Ranks use it to agree on a signal that one of them received."""
        return int(self.all_reduce(np.array([value], np.float64), "max")[0])

    def gather(self, value: Any) -> list[Any]:
        """Gather the values of all ranks in order on the first rank; another rank gets a list of its own value."""
        if self.is_single:
            return [value]
        values: list[Any] | None = [None] * self.world if self.first else None
        dist.gather_object(value, values, group=self.group)
        return values if values is not None else [value]

    def broadcast(self, value: Any) -> Any:
        """Broadcast the first rank's value to all ranks."""
        if self.is_single:
            return value
        values = [value]
        dist.broadcast_object_list(values, 0, group=self.group)
        return values[0]

    def all_gather_arrays(self, values: NDArray[Any]) -> NDArray[Any]:
        """Concatenate arrays of all ranks in order, on every rank."""
        if self.is_single:
            return values
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, values, group=self.group)
        return np.concatenate(parts)

    def set_flag(self, word: str) -> None:
        """Publish a flag that other ranks can check at any time. This is not a collective call."""
        if not self.is_single:
            dist.distributed_c10d._get_default_store().set(self._key(word), "")

    def has_flag(self, word: str) -> bool:
        """Return whether a rank has published this flag."""
        return not self.is_single and dist.distributed_c10d._get_default_store().check([self._key(word)])

    def all_gather(self, value: Any) -> list[Any]:
        """Gather the values of all ranks in order, on every rank."""
        if self.is_single:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def raise_on_all(self, error: Exception | None) -> None:
        """Raise an error on all ranks if any rank has one, so that no rank waits for a failed one.

        Args:
            error: the error of this rank, or None.

        Raises:
            Exception: `error`, on a rank that has one.
            OtherRankFailed: on a rank without an error of its own; the message is that of a failed rank.
        """
        failed = self.max(0 if error is None else 1)
        if not failed:
            return
        messages = self.all_gather("" if error is None else f"{error}"[:2000])
        if error is not None:
            raise error
        rank = next(number for number, message in enumerate(messages) if message)
        raise OtherRankFailed(0, f"another rank failed: rank {rank}, {messages[rank]}")

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Wrap work that needs no other rank. At the end the ranks synchronize, and an error on one fails all."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.raise_on_all(error)

    def set_stage(self, where: str) -> None:
        """Publish the stage of this rank; if it hangs, the others report it."""
        if not self.is_single and dist.is_initialized():
            dist.distributed_c10d._get_default_store().set(self._key(_STAGE, self.rank), f"{time.time():.0f} {where}")

    def missing_ranks(self, error: Exception) -> str:
        """Return which ranks did not take part in a failed collective call; "" if the failure has another cause.

        Ranks that did wait report it in the store. The call destroys the process group. That closes the connections of
        this rank, which wakes other waiting ranks.

        Args:
            error: the exception of the collective call.
        """
        if self.is_single or not dist.is_initialized() or not _is_other_ranks_fault(error):
            return ""
        store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + _REPORT_TIMEOUT_S
        is_timeout = any(word in str(error) for word in ("Timed out", "timed out", "timeout"))
        try:
            store.set(self._key(_WAITED, self.rank), "")
            if is_timeout:
                store.set(self._key(_WAITED), "")
            dist.destroy_process_group()
            while (missing := self._not_waiting(store)) and time.monotonic() < deadline:
                time.sleep(0.05)
            event = "did not arrive within train.timeout_s" if store.check([self._key(_WAITED)]) else "has ended"
            reports = [f"rank {rank} {event}; its last stage was {self._last_seen(store, rank)}" for rank in missing]
            if self.first:
                time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))  # This rank may host the store.
        except (RuntimeError, ValueError):  # The rank that hosted the store is gone.
            return "the rank that hosts the store of all ranks has ended"
        return ", ".join(reports)

    def _not_waiting(self, store: Any) -> list[int]:
        return [rank for rank in range(self.world) if not store.check([self._key(_WAITED, rank)])]

    def _last_seen(self, store: Any, rank: int) -> str:
        if not store.check([key := self._key(_STAGE, rank)]):
            return "before its first step"
        time_text, _, stage = store.get(key).decode().partition(" ")
        return f"at {stage}, {max(0, round(time.time() - float(time_text)))} s ago"

    def _key(self, name: str, rank: int | None = None) -> str:
        return f"tracegrad/{self.token}/{name}" + ("" if rank is None else f"/{rank}")

    def publish_stop(self, said: str) -> None:
        """Publish that this rank stops, and destroy the process group, which wakes the ranks that wait for it.

        Waits up to 10 seconds until the others have read it.
        """
        if self.is_single or not dist.is_initialized():
            return
        store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + _ACKNOWLEDGE_TIMEOUT_S
        with suppress(RuntimeError, ValueError):  # The rank that hosted the store has ended already.
            store.set(self._key(_STOPPED), f"rank {self.rank}, {said}")
            dist.destroy_process_group()
            while store.add(self._key(_ACKNOWLEDGED), 0) < self.world - 1 and time.monotonic() < deadline:
                time.sleep(0.05)

    def stop_message(self) -> str:
        """Return the message of a rank that stopped; "" if none has."""
        if self.is_single:
            return ""
        try:
            store = dist.distributed_c10d._get_default_store()
            if not store.check([self._key(_STOPPED)]):
                return ""
            store.add(self._key(_ACKNOWLEDGED), 1)
            return store.get(self._key(_STOPPED)).decode()
        except (RuntimeError, ValueError):  # The rank that hosted the store is gone.
            return ""


def _open_group(timeout_s: float) -> None:
    """Open the default process group from torchrun's variables. The error names the ranks that did not arrive."""
    from torch.distributed.rendezvous import rendezvous

    backend, timeout = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timedelta(seconds=timeout_s)
    missing = ""
    try:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        store.set(f"{_PRESENT_PREFIX}/{rank}", "")
        names = {other: f"{_PRESENT_PREFIX}/{other}" for other in range(world)}
        try:
            store.wait([*names.values()], timeout)
        except RuntimeError:
            missing = ", ".join(f"rank {other}" for other, name in names.items() if not store.check([name]))
            raise
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except (ValueError, RuntimeError) as error:
        reason = f"{missing} did not arrive within train.timeout_s" if missing else str(error).splitlines()[0]
        raise ArgumentError(
            f"TG-TRAIN-021: WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the process group does not open: {reason}. "
            "Start the run with torchrun, and check that all ranks can reach each other."
        ) from error


def _is_other_ranks_fault(error: BaseException) -> bool:
    """Return whether a collective call failed because of another rank."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _set_timeout(timeout: timedelta, group: Any) -> None:
    public = getattr(dist, "set_timeout", None)  # Public since torch 2.15.
    (public or dist.distributed_c10d._set_pg_timeout)(timeout, group)


_cache: list[Any] = []
"""The default group and its `Ranks`. They are cached, because making a group is a collective call."""


def propagate_error(error: Exception, step: int, config: Config, ranks: Ranks, ends: bool) -> Exception:
    """Return the error that this rank raises: its own error, another rank's message, or which ranks are missing.

    Args:
        error: the error on this rank.
        step: number of the lost step, from 1.
        config: options of the run, for advice about memory.
        ranks: the ranks that share the step.
        ends: no step follows, so an error that only this rank has is sent to the others.
    """
    if isinstance(error, torch.OutOfMemoryError):
        reason = f"TG-TRAIN-095: step {step}: {out_of_memory(error, config)}"
        ranks.publish_stop(reason)
        return TracegradError(reason)
    if isinstance(error, (TracegradError, OtherRankFailed)):  # All ranks raise these.
        return error
    if not (ends or isinstance(error, RuntimeError)):
        return error
    if reason := ranks.stop_message():
        return TracegradError(f"TG-TRAIN-022: {reason} This rank stops.")
    if reason := ranks.missing_ranks(error):
        return TracegradError(f"TG-TRAIN-023: step {step}: {reason}. This rank stops.")
    if ends:
        ranks.publish_stop(f"step {step}: {type(error).__name__}: {error}"[:2000])
    return error


Mode = Literal["fsdp", "ddp", "none"]


class CallableModel(nn.Module):
    """A causal LM whose forward pass runs a given function of the model.

    Wrappers such as FSDP2, DDP and those of `accelerator.prepare` do their work around `forward`. Inside it the head's
    weight is gathered, and the loss's autograd functions count as part of the model.

    Args:
        model: a transformers causal LM, with or without peft adapters.

    >>> CallableModel(nn.Linear(2, 1))(lambda model: model.in_features)
    2
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return `work(model, *arguments)`."""
        return work(self.model, *arguments)


@dataclass(frozen=True, eq=False)
class DistributedModel:
    """A model on its device and ranks, with the information how its gradient is reduced.

    Args:
        model: the causal LM itself, whose parameters the optimizer updates.
        policy: the callable that runs it: `CallableModel`, DDP around it, or a model that the user prepared.
        mode: type of the wrapper.
        ranks: the ranks that share the step.
        scale: factor on the loss that turns the wrapper's mean over ranks into a sum.
        memory: memory options; a step uses its `reduce_each` and `chunk_bytes`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tracegrad import Sequences, pack
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **size))
    >>> # Each of the 8 tokens gets probability 1 / 8.
    >>> _ = model.lm_head.weight.data.zero_()
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [float("nan"), -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> wrapped = wrap(model)
    >>> logprobs, entropy = wrapped.forward(step.batches[0].to(wrapped.device))
    >>> wrapped.mode, logprobs.detach().exp()
    ('none', tensor([0.1250, 0.1250]))
    """

    model: nn.Module
    policy: Callable[..., Any]
    mode: Mode
    ranks: Ranks
    scale: float = 1.0
    memory: Memory = SPEED

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.model.parameters()).device

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        """Wrap the forward and backward pass of one batch; gradients are exchanged in the last batch of a step.

        With FSDP and `memory.reduce_each`, they are exchanged in every batch.
        """
        exchange = last or self.memory.reduce_each
        if self.mode == "fsdp":
            for module in _sharded(cast(nn.Module, self.policy)):
                module.set_requires_gradient_sync(exchange, recurse=False)
        no_sync = (
            self.policy.no_sync() if isinstance(self.policy, DistributedDataParallel) and not last else nullcontext()
        )
        with no_sync:
            yield

    def reshard(self) -> None:
        """Reshard what FSDP has gathered. Without a backward pass FSDP does not do so.

        The optimizer's parameters are the shards, so the model must not keep gathered ones.
        """
        if self.mode == "fsdp":
            for module in _sharded(cast(nn.Module, self.policy)):
                module.reshard()

    def forward(self, batch: Batch, precision: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Compute logprob and entropy of each trained token of a batch, [m] each."""
        options = precision, self.mode == "fsdp", self.memory.chunk_bytes
        if torch.is_grad_enabled() or self.mode == "fsdp":
            return self.policy(_logprobs_and_entropy, batch, *options)
        return _logprobs_and_entropy(self.model, batch, *options)

    def loss(
        self, batch: Batch, terms: Terms, objective: Objective, precision: torch.dtype = torch.float32
    ) -> tuple[Tensor, PolicyLoss]:
        """Return the loss for `backward`, multiplied by `scale`; and the unscaled loss with its per-token values."""
        options = precision, self.mode == "fsdp", self.memory.chunk_bytes
        loss, policy_loss = self.policy(_batch_loss, batch, terms, objective, *options)
        return (loss if self.scale == 1 else loss * self.scale), policy_loss


def as_distributed_model(model: Any) -> DistributedModel:
    """Wrap a model that the user prepared: a plain model, DDP around a `CallableModel`, or one sharded by
    `fully_shard`.

    Raises:
        ArgumentError: for DDP around the model itself, whose forward returns logits.
    """
    if isinstance(model, DistributedModel):
        return model
    ranks = Ranks.of_open_group()
    if isinstance(model, DistributedDataParallel):
        if not isinstance(model.module, CallableModel):
            raise ArgumentError(
                f"TG-TRAIN-024: DistributedDataParallel wraps {type(model.module).__name__}, whose forward "
                "returns logits. Its gradients would not be exchanged. Wrap the model first: "
                "accelerator.prepare(tracegrad.trainer.CallableModel(model))."
            )
        return DistributedModel(model.module.model, model, "ddp", ranks, scale=float(ranks.world))
    inner = model.model if isinstance(model, CallableModel) else model
    if isinstance(model, FSDPModule):
        policy = model if isinstance(model, CallableModel) else _with_forward_method(model)
        return DistributedModel(inner, cast(Any, policy), "fsdp", ranks, scale=float(ranks.world))
    return DistributedModel(inner, CallableModel(inner), "none", Ranks() if ranks.is_single else ranks)


def check_exchanged(target: DistributedModel) -> None:
    """Reject a model whose gradients would not be exchanged between ranks."""
    if target.mode == "none" and not target.ranks.is_single:
        raise ArgumentError(
            f"TG-TRAIN-025: {type(target.model).__name__} is not wrapped, but a process group of {target.ranks.world} "
            "ranks is open. Without a wrapper, no gradients are exchanged. Pass "
            "tracegrad.trainer.wrap(model, 'ddp') or 'fsdp', or "
            "accelerator.prepare(tracegrad.trainer.CallableModel(model))."
        )


def _with_forward_method(model: Any) -> Any:
    """Register a method of the root that FSDP2 treats as a forward pass."""
    if not hasattr(type(model), "run_in_forward"):
        type(model).run_in_forward = lambda self, work, *arguments: work(self, *arguments)
    if "run_in_forward" not in vars(model):
        register_fsdp_forward_method(model, "run_in_forward")
    return _ForwardMethod(model)


class _ForwardMethod:
    """Calls `run_in_forward` of a root, and returns the root's modules."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def __call__(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return self.root.run_in_forward(work, *arguments)

    def modules(self) -> Iterator[nn.Module]:
        return self.root.modules()


def wrap(
    model: nn.Module,
    mode: Mode = "none",
    *,
    ranks: Ranks | None = None,
    device: torch.device | None = None,
    precision: torch.dtype = torch.float32,
    memory: Memory | None = None,
) -> DistributedModel:
    """Move a model to its device and ranks. Parameters keep their names and dtype.

    Args:
        model: a transformers causal LM on the CPU, with equal parameters on all ranks. Changed in place.
        mode: "fsdp" shards each decoder layer, and the remaining parameters as one unit; "ddp" keeps a full copy on
            each rank.
        ranks: default the open process group.
        device: default the model's device; FSDP moves one layer at a time to it.
        precision: with bfloat16, FSDP gathers and computes in bfloat16. Parameters, gradients and reductions stay
            float32.
        memory: default `Memory.of("speed")`.

    Raises:
        ArgumentError: if the mode and the number of ranks contradict each other.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> wrapped = wrap(LlamaForCausalLM(LlamaConfig(vocab_size=8, **size)))
    >>> wrapped.mode, str(wrapped.device), wrapped.ranks.world
    ('none', 'cpu', 1)
    """
    ranks, memory = ranks or Ranks.of_open_group(), memory or SPEED
    device = device or next(model.parameters()).device
    if ranks.is_single != (mode == "none"):
        raise ArgumentError(
            f"TG-TRAIN-026: parallel.mode is {mode!r} on {ranks.world} rank{'' if ranks.is_single else 's'}. "
            "none needs one process; fsdp and ddp need several, started with torchrun. Leave it out for auto."
        )
    if mode == "fsdp":
        head_of(model)  # Checks the head before it is sharded; the check runs only once per model.
        return DistributedModel(model, _fsdp(model, ranks, device, precision, memory), mode, ranks, memory=memory)
    model.to(device)
    if mode == "ddp":
        head_of(model)
        device_ids = [device.index] if device.type == "cuda" else None
        policy = DistributedDataParallel(CallableModel(model), device_ids=device_ids)
        policy.register_comm_hook(None, _sum_gradients)
        return DistributedModel(model, policy, mode, ranks, memory=memory)
    return DistributedModel(model, CallableModel(model), mode, ranks, memory=memory)


def auto_mode(ranks: Ranks) -> Mode:
    """Return "fsdp" on several CUDA devices, "ddp" on several CPU processes, "none" for one process."""
    if ranks.is_single:
        return "none"
    return "fsdp" if torch.cuda.is_available() else "ddp"


def device_named(name: str) -> torch.device:
    """Return this rank's device. "auto" is CUDA if available; CUDA without an index uses the local rank.

    Raises:
        ArgumentError: if several ranks of a machine would share one numbered device.
    """
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    elif (local_world := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > 1:
        raise ArgumentError(
            f"TG-TRAIN-027: train.device is {name!r}, and {local_world} processes run on this machine. All of them "
            "would use the same device. Set train.device cuda, or leave it out: each process then uses the device of "
            "its local rank."
        )
    torch.cuda.set_device(device)
    return device


def autocast(device: str, precision: torch.dtype) -> AbstractContextManager[Any]:
    """Return an autocast context to `precision` on a type of device; a null context for float32."""
    return nullcontext() if precision == torch.float32 else torch.autocast(device, dtype=precision)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded one; every rank must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[attr-defined]


def _fsdp(
    model: nn.Module, ranks: Ranks, device: torch.device, precision: torch.dtype, memory: Memory
) -> Callable[..., Any]:
    from torch.distributed.device_mesh import init_device_mesh

    is_mixed = precision != torch.float32
    policy = CallableModel(model)
    mixed_precision = (
        MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32) if is_mixed else MixedPrecisionPolicy()
    )
    options = {"mesh": init_device_mesh(device.type, (ranks.world,)), "mp_policy": mixed_precision}
    frozen = not any(parameter.requires_grad for parameter in model.parameters())  # No backward pass will need them.
    for layer in layers_of(model):
        fully_shard(layer, reshard_after_forward=memory.reshard or frozen, **options)
    fully_shard(policy, reshard_after_forward=frozen, **options)
    for module in _sharded(policy):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return policy


def _sharded(module: nn.Module) -> list[FSDPModule]:
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


def _sum_gradients(_, bucket):  # DDP reads the annotations, and does not accept strings.
    """Sum the gradients of DDP's `GradBucket` over ranks, without the division by their number."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _logprobs_and_entropy(
    model: nn.Module, batch: Batch, precision: torch.dtype, one_pass: bool, chunk_bytes: int | None
) -> tuple[Tensor, Tensor]:
    """As `model.logprobs_and_entropy`. `one_pass` calls each layer once per batch, which all FSDP ranks must do."""
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
    """As `model.batch_loss`, with the loss first: wrappers look for the output tensor in a tuple."""
    with _cast(batch, precision, one_pass):
        forward = _forward(model, one_pass)
        loss = batch_loss(model, batch, terms, objective, forward=forward, chunk_bytes=chunk_bytes)
    return loss.loss, loss


def _cast(batch: Batch, precision: torch.dtype, one_pass: bool) -> AbstractContextManager[Any]:
    """Return the autocast context of a pass. FSDP casts by itself."""
    return autocast(batch.ids.device.type, torch.float32 if one_pass else precision)


def _forward(model: nn.Module, one_pass: bool) -> Plan | None:
    return one_pass_plan(model) if one_pass else None
