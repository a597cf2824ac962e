"""Set up a run: model on its device, optimizer, reference model, and checks that they fit the data.

The reference model can follow the policy (TR-DPO, arXiv 2404.09656; TRL's `sync_ref_model`).
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tracegrad.alignment.sequences import Sequences
from tracegrad.config import Config, as_dict, options
from tracegrad.errors import ArgumentError
from tracegrad.model.attention import BLOCK, attend_in_blocks
from tracegrad.model.structure import BLOCKS, attention_of, dense_attention, media_ids, tower_of, unwrapped
from tracegrad.objective import Objective
from tracegrad.packing import Step
from tracegrad.trainer.advantages import needs_of
from tracegrad.trainer.checkpoint import Progress
from tracegrad.trainer.dataset import InMemory, Source, source_of
from tracegrad.trainer.distributed import Placed, Ranks, auto_mode, device_named, prepare
from tracegrad.trainer.lora import has_adapters, load_model, with_adapters
from tracegrad.trainer.memory import Memory, compile_layers, recompute_layers
from tracegrad.trainer.optim import share


def is_mixed(objective: Objective, config: Config) -> bool:
    """Return whether the reference of a run is a mixture of the policy and the reference before."""
    train = config.train
    return bool(needs_of(objective, config).ref and train.ref_every) and train.ref_mixup_alpha < 1


@torch.no_grad()
def mix(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """Set each trained parameter of `reference` to alpha * policy + (1 - alpha) * reference, in place.

    Args:
        reference: of the architecture of `policy`, its parameters on the same devices and sharded alike.
        policy: the model that is trained; parameters that it does not train are passed over, as both have the same.
        alpha: share of the policy, above 0 and at most 1.

    >>> old, new = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> _ = old.weight.data.fill_(1.0), new.weight.data.fill_(2.0)
    >>> mix(old, new, 0.75)
    >>> old.weight.item()
    1.75
    """
    for mixed, trained in zip(reference.parameters(), policy.parameters(), strict=True):
        if trained.requires_grad:
            mixed.mul_(1.0 - alpha).add_(trained, alpha=alpha)


MAY_CHANGE = (
    *(f"train.{name}" for name in ("epochs", "max_steps", "off_policy_value_per_epoch", "log_to", "memory", "timeout")),
    "checkpoint.",
    "stop.",
    "parallel.",
    "schedule.steps",
)
"""Options that a resumed run may have otherwise than the run it goes on with; `optim` looks at the schedule's steps."""
OF_DATA = (
    "data.",
    "filter.",
    "advantage.",
    "train.seed",
    *(f"pack.{name}" for name in ("token_budget", "step_groups", "too_long")),
)
"""Options of what is trained on; those of a run that holds no data set are its caller's."""


Optimizers = torch.optim.Optimizer | Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""An optimizer over the model's parameters, or what makes one from groups of them."""


def adamw(model: torch.nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW as the config says; vectors (norms, biases) are not decayed."""
    options = config.optimizer
    how: dict[str, Any] = {"foreach": Memory.of(config.train.memory).foreach}
    if how["foreach"] is None and next(model.parameters()).is_cuda:
        how = {"fused": True}
    kind = {"betas": (options.beta1, options.beta2), "eps": options.eps, **how}
    return torch.optim.AdamW(groups_of(model, options.weight_decay), lr=options.lr, **kind)


def groups_of(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters: those that decay, and the vectors, which do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


class ParametersByName:
    """The parameters of somebody's optimizer by name, as sharding gives the model new ones.

    Args:
        optimizer: over parameters of the model.
        model: before it is placed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        self.optimizer = optimizer
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        try:
            self.names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        except KeyError:
            raise ArgumentError(
                f"{type(optimizer).__name__} holds a parameter that is not the model's. It would train something "
                "else. Make it from model.parameters(), after adapters are on, or pass a function of the groups."
            ) from None

    def of(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer over the parameters that the model has now."""
        now = dict(model.named_parameters())
        for group, names in zip(self.optimizer.param_groups, self.names, strict=True):
            fresh = [now[name] for name in names]
            if self.optimizer.state and any(a is not b for a, b in zip(fresh, group["params"], strict=True)):
                raise ArgumentError(
                    f"{type(self.optimizer).__name__} has taken steps, and the model is sharded anew. Its state is of "
                    "whole parameters. Pass a new one, and resume from a checkpoint."
                )
            group["params"] = fresh
        return self.optimizer


def device_of(config: Config) -> torch.device:
    """Where a run trains."""
    name = config.train.device
    try:
        device = device_named(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"train.device is {name!r}: {str(error).splitlines()[0]}. The model cannot go there. Leave it out for auto."
        ) from error
    return device


def precision_of(config: Config, device: str) -> torch.dtype:
    """Of the forward pass on a type of device."""
    bf16 = config.train.dtype == "bf16" or (config.train.dtype == "auto" and device == "cuda")
    return torch.bfloat16 if bf16 else torch.float32


def bucket_of(config: Config) -> int:
    """What rows are padded to a multiple of: on CUDA an eighth of the budget, so that few lengths are compiled.

    A short last row costs what it holds and at most an eighth of the budget more.
    """
    if device_of(config).type != "cuda":
        return 1
    return min(config.pack.token_budget, -(-config.pack.token_budget // (8 * BLOCK)) * BLOCK)


def place(model: Any, config: Config, ranks: Ranks) -> tuple[Placed, torch.dtype]:
    """Moves the model where it trains, without dropout; and the precision of its forward pass.

    What trains is float32. Frozen parameters under adapters take the precision of the forward pass; under FSDP, which
    gathers parameters of one dtype, they are float32 too.
    """
    device = device_of(config)
    precision = precision_of(config, device.type)
    memory = Memory.of(config.train.memory)
    mode = auto_mode(ranks) if config.parallel.mode == "auto" else config.parallel.mode
    model.to(dtype=torch.float32).eval()
    if mode != "fsdp" and has_adapters(model):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else precision)
    if device.type == "cuda":
        choose_attention(model, config)
    if memory.recompute:
        recompute_layers(model)
    if config.train.compile:
        compile_layers(model)
    return prepare(model, mode, ranks=ranks, device=device, precision=precision, memory=memory), precision


def choose_attention(model: Any, config: Config) -> None:
    """Switch a model on CUDA to the attention of `attention.implementation`, where its architecture has it."""
    if config.attention.implementation == "auto":
        attend_in_blocks(model)
    elif attention_of(model) in BLOCKS:
        unwrapped(model).set_attn_implementation(dense_attention(model))


@dataclass(frozen=True)
class Prepared:
    """A policy that is ready to train.

    Args:
        target: the model in its place.
        precision: of the forward pass.
        optimizer: over its parameters.
        rates: full learning rate of each group; None where the config's goes for all.
    """

    target: Placed
    precision: torch.dtype
    optimizer: torch.optim.Optimizer
    rates: tuple[float, ...] | None = None

    def set_rates(self, config: Config, step: int, steps: int | None) -> float:
        """Sets the learning rate of a step out of `steps`, and gives that of the first group."""
        groups, part = self.optimizer.param_groups, share(config.schedule, step, steps, config.optimizer.lr)
        for group, full in zip(groups, self.rates or (config.optimizer.lr,) * len(groups), strict=True):
            group["lr"] = full * part
        return float(groups[0]["lr"])

    def sentence(self, config: Config) -> str:
        """Where it trains and what that costs, for the one who reads the run."""
        ranks = self.target.ranks
        where = "one process" if ranks.alone else f"{ranks.world} ranks ({self.target.mode})"
        dtype = "bf16" if self.precision == torch.bfloat16 else "fp32"
        memory = config.train.memory
        does = self.target.memory.sentence(self.target.mode == "fsdp")
        return f"{where} on {self.target.device.type}, {dtype} forward, fp32 parameters; train.memory {memory}: {does}."


def prepared(model: Any, config: Config, ranks: Ranks, given: Optimizers | None) -> tuple[Any, Prepared]:
    """The model with the adapters the config asks for, and the policy it has become."""
    frozen = tower_of(model) if config.images.tower == "frozen" else []
    for part in frozen:
        part.requires_grad_(False)
    if config.train.lora_rank:
        with torch.random.fork_rng(devices=[]):  # the same adapters on every rank
            torch.manual_seed(config.train.seed)
            model = with_adapters(model, config.train.lora_rank, without=frozen)
    by_name = ParametersByName(given, model) if isinstance(given, torch.optim.Optimizer) else None
    if given is not None:
        check_optimizer(config)
    target, precision = place(model, config, ranks)
    if given is None:
        return model, Prepared(target, precision, adamw(model, config))
    if by_name is not None:
        optimizer = by_name.of(model)
    else:
        assert callable(given)
        optimizer = given(groups_of(model, 0.0))
    rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
    return model, Prepared(target, precision, optimizer, rates)


def other_model(reference: Any, objective: Objective, config: Config, policy: Prepared) -> Placed | None:
    """The reference model in its place; None where the policy itself is what is measured."""
    if reference is None and not config.train.ref_model:
        return None
    model = reference if reference is not None else load_model(Path(config.train.ref_model))
    model.to(dtype=torch.float32).eval().requires_grad_(False)
    target = policy.target
    if target.device.type == "cuda":
        choose_attention(model, config)
    mode = target.mode if target.mode == "fsdp" else "none"
    ranks = target.ranks if mode == "fsdp" else Ranks()
    return prepare(model, mode, ranks=ranks, device=target.device, precision=policy.precision, memory=target.memory)


def first_reference(given: Any, model: Any, objective: Objective, config: Config, *, keep_start: bool) -> Any:
    """Return the reference model that a run begins with, apart from its policy; None if there is no such model.

    Args:
        given: the caller's reference model, or None.
        model: the policy before the first step and before the adapters that the config asks for.
        keep_start: copy the model if it is the reference, and is about to be trained into something else.

    Raises:
        ArgumentError: if `given` would have no effect, or a model with adapters would be mixed.
    """
    train = config.train
    if given is not None:
        if not needs_of(objective, config).ref or train.ref_every or train.ref_model:
            raise ArgumentError(
                "reference has no effect: the objective takes none, or train.ref_every or train.ref_model say what it "
                "is. Two answers to one question hide a mistake. Leave it out."
            )
        return given
    adapters = train.lora_rank or has_adapters(model)
    if is_mixed(objective, config):
        if adapters:
            raise ArgumentError(
                f"train.ref_mixup_alpha is {train.ref_mixup_alpha:g}, and the model has adapters. A reference of mixed "
                "weights is a second whole model. Set train.ref_mixup_alpha to 1, or train without adapters."
            )
        return deepcopy(model)
    stays = objective.needs.ref and not (train.ref_model or train.ref_every or adapters)
    return deepcopy(model) if keep_start and stays else None


def check_optimizer(config: Config) -> None:
    """Refuses options of an optimizer that somebody else made."""
    values, known = as_dict(config), options()
    for name in ("lr", "beta1", "beta2", "eps", "weight_decay"):
        if values[f"optimizer.{name}"] != known[f"optimizer.{name}"][1]:
            raise ArgumentError(
                f"optimizer.{name} has no effect: the run was given an optimizer. Two answers to one question hide a "
                "mistake. Set it there, and leave it out here."
            )


def check_vocabulary(data: Sequences | Source, model: Any) -> None:
    """Refuses ids that the model has no row for: on CUDA they would end the process without a word about them."""
    size, source = embeddings_of(model), source_of(data)
    highest = source.catalog.max_id
    if len(over := np.flatnonzero(highest >= size)):
        row = int(over[highest[over].argmax()])
        raise _foreign(f"trace '{source.trace_name(row)}'", int(highest[row]), size)
    if isinstance(source, InMemory) and source.sequences.tokens:  # a file with an id below 0 is refused when it is read
        s = source.sequences
        if (token := int(s.ids[place := int(s.ids.argmin())])) < 0:
            row = int(s.trace[int(np.searchsorted(s.cu_seqlens, place, side="right")) - 1])
            raise _foreign(f"trace '{s.trace_name(row)}'", token, size)


def check_step(step: Step, model: Any) -> None:
    """The same for the ids of a step."""
    size = embeddings_of(model)
    for row, batch in enumerate(step.batches):
        for token in (int(np.max(batch.ids, initial=0)), int(np.min(batch.ids, initial=0))):
            if not 0 <= token < size:
                raise _foreign(f"row {row} of the step", token, size)


def embeddings_of(model: Any) -> int:
    """How many ids a model has a row for, at both of its ends."""
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    return min(table.weight.shape[0] for table in tables if getattr(table, "weight", None) is not None)


def _foreign(where: str, token: int, size: int) -> ArgumentError:
    return ArgumentError(
        f"{where}: token id {token} stands in it, and the model has {size} embeddings. They are of another tokenizer. "
        "Align with the tokenizer of the model that is trained."
    )


def check_media(data: Sequences | Source, model: Any) -> list[str]:
    """Refuses to train on what was sampled behind a picture, which the decoder would not see.

    Returns:
        what a user should know of traces that hold some.
    """
    source, media = source_of(data), media_ids(model)
    behind = [trace for part in (source.parts() if media else ()) for trace in _behind(part, media)]
    if behind:
        raise ArgumentError(
            f"{len(behind)} of {source.catalog.traces} traces, '{behind[0]}' first, are trained behind a picture, "
            f"video or sound. {type(model).__name__} would not see it, as its decoder runs without a tower: logprobs "
            "would be nats off. Leave these traces out."
        )
    if not tower_of(model) and source.shows_pictures:
        raise ArgumentError(
            f"the traces hold pictures, and {type(model).__name__} takes none. It would not see what the policy saw. "
            "Give --model the image-text model that sampled them."
        )
    count = int(source.catalog.media.sum())
    return [f"{count} traces hold pictures, videos or sounds: nothing sampled behind one is trained."] if count else []


def check_ranks_see(data: Sequences | Source, target: Placed, config: Config) -> None:
    """Refuses pictures where ranks would have to run a tower equally often: rows have unlike many pictures."""
    if target.mode != "fsdp" and (target.ranks.alone or config.images.tower == "frozen"):
        return
    if source_of(data).shows_pictures:
        mode = target.mode == "fsdp"
        what = "parallel.mode is fsdp" if mode else "images.tower is trained on several ranks"
        cure = "Set parallel.mode ddp or none" if mode else "Leave images.tower frozen, or train on one rank"
        raise ArgumentError(
            f"the traces hold pictures, and {what}. Every rank would have to run the tower as often as the others, and "
            f"a row has as many pictures as it has. {cure}."
        )


def _behind(s: Sequences, media: tuple[int, ...]) -> list[str]:
    """Names of the traces with a term behind one of these ids."""
    seen = np.isin(s.ids, media)
    if s.images is not None:  # there a model is told what is a picture, and what is a word
        seen &= np.repeat(np.diff(s.images.cu_images) == 0, np.diff(s.cu_seqlens))
    if not seen.any():
        return []
    place, starts = np.arange(s.tokens), s.cu_seqlens[:-1]
    first = np.minimum.reduceat(np.where(seen, place, s.tokens), starts)
    last = np.maximum.reduceat(np.where(s.trainable, place, -1), starts)
    return [s.trace_name(int(trace)) for trace in np.unique(s.trace[first < last])]


def check_same(path: Path, progress: Progress, told: dict[str, Any], fingerprint: str) -> None:
    """Refuses to go on from a checkpoint of a run that was told otherwise.

    Args:
        fingerprint: of the data; "" where the run has none, and the options of data are its caller's.
    """
    free = MAY_CHANGE if fingerprint else (*MAY_CHANGE, *OF_DATA)
    for name, value in told.items():
        before = progress.config.get(name)
        if before != value and not name.startswith(free):
            raise ArgumentError(
                f"{path}: {name} was {repr(before)[:80]} and is now {value!r}. The run would not be the one that is "
                f"resumed. Set it back, or start anew with another --out and --model {path}."
            )
    if progress.fingerprint != fingerprint:
        raise ArgumentError(
            f"{path}: the traces are not those that the run was started with. Its steps would be others. "
            f"Give the same traces, or start anew with another --out and --model {path}."
        )
