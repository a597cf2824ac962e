"""One model on several ranks: FSDP2 layer by layer, DDP or bare, with gradients that are sums over ranks.

Here are `Policy`, whose forward runs any function of the model where its parameters are whole, and `prepare`. The loss
of a term has the step's integer denominators in it, so the gradient of a step is the plain sum over batches and ranks:
averaging, the default of both wrappers, is turned off or undone. Called by the step and the loop, or with `accelerate`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from tracegrad.algebra import Objective
from tracegrad.batch import Batch
from tracegrad.errors import ArgumentError
from tracegrad.learner.memory import SPEED, Memory, layers_of
from tracegrad.learner.ranks import Ranks
from tracegrad.objective import Terms
from tracegrad.policy import Plan, PolicyLoss, batch_loss, head_of, logprobs_and_entropy
from tracegrad.policy.roads import whole_row

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
                "gradients would not be exchanged. Wrap before: accelerator.prepare(tracegrad.learner.Policy(model))."
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
            "Each rank would train a model of its own, as no gradient is exchanged. Pass tracegrad.learner.prepare("
            "model, 'ddp') or 'fsdp', or accelerator.prepare(tracegrad.learner.Policy(model))."
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
    """As `policy.batch_loss`, the loss apart: wrappers find the tensor whose backward pass they wait for in a tuple."""
    with _cast(batch, precision, one_pass):
        forward = _forward(model, one_pass)
        loss = batch_loss(model, batch, terms, objective, forward=forward, chunk_bytes=chunk_bytes)
    return loss.loss, loss


def _cast(batch: Batch, precision: torch.dtype, one_pass: bool) -> AbstractContextManager[Any]:
    """FSDP casts by itself."""
    return autocast(batch.ids.device.type, torch.float32 if one_pass else precision)


def _forward(model: nn.Module, one_pass: bool) -> Plan | None:
    return whole_row(model) if one_pass else None
