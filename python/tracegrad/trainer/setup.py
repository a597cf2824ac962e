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
from tracegrad.model.attention import BLOCK, enable_flex_attention
from tracegrad.model.structure import (
    BLOCK_ATTENTION,
    attention_of,
    dense_attention,
    media_ids,
    unwrap_adapters,
    vision_encoder_modules,
)
from tracegrad.objective import Objective
from tracegrad.packing import Step
from tracegrad.trainer.advantages import needs_of
from tracegrad.trainer.checkpoint import Progress
from tracegrad.trainer.dataset import Dataset, InMemoryDataset, as_dataset
from tracegrad.trainer.distributed import DistributedModel, Ranks, auto_mode, device_named, wrap
from tracegrad.trainer.lora import has_adapters, load_model, with_adapters
from tracegrad.trainer.memory import Memory, compile_layers, recompute_layers
from tracegrad.trainer.optim import lr_factor


def is_mixed(objective: Objective, config: Config) -> bool:
    """Return whether the reference is a moving mixture of the policy and the previous reference."""
    train = config.train
    return bool(needs_of(objective, config).ref and train.ref_sync_steps) and train.ref_mixup_alpha < 1


@torch.no_grad()
def update_reference(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """Set each trained parameter of `reference` to alpha * policy + (1 - alpha) * reference, in place.

    Args:
        reference: a model of the architecture of `policy`, with parameters on the same devices and sharded equally.
        policy: the trained model. Its frozen parameters are skipped, as both models have the same ones.
        alpha: share of the policy, in (0, 1].

    >>> old, new = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> _ = old.weight.data.fill_(1.0), new.weight.data.fill_(2.0)
    >>> update_reference(old, new, 0.75)
    >>> old.weight.item()
    1.75
    """
    for mixed, trained in zip(reference.parameters(), policy.parameters(), strict=True):
        if trained.requires_grad:
            mixed.mul_(1.0 - alpha).add_(trained, alpha=alpha)


RESUMABLE_OPTIONS = (
    *(f"train.{name}" for name in ("epochs", "max_steps", "report_to", "memory_mode", "timeout_s")),
    "checkpoint.",
    "eval.",
    "stop.",
    "parallel.",
    "schedule.steps",
)
"""Options that may differ between a run and its resume. `optim.check_rates` checks `schedule.steps`."""
OF_DATA = (
    "data.",
    "filter.",
    "advantage.",
    "train.seed",
    *(f"pack.{name}" for name in ("tokens_per_row", "too_long")),
    "train.groups_per_step",
)
"""Options about the data. A run without a data set leaves them to its caller."""


Optimizers = torch.optim.Optimizer | Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""An optimizer over the model's parameters, or a function that makes one from parameter groups."""


def adamw(model: torch.nn.Module, config: Config) -> torch.optim.AdamW:
    """Make AdamW with the options of the config. Vectors (norms, biases) get no weight decay."""
    options = config.optimizer
    implementation: dict[str, Any] = {"foreach": Memory.of(config.train.memory_mode).foreach}
    if implementation["foreach"] is None and next(model.parameters()).is_cuda:
        implementation = {"fused": True}
    return torch.optim.AdamW(
        groups_of(model, options.weight_decay),
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        **implementation,
    )


def groups_of(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups of the trained parameters: those with weight decay, and vectors without it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


class ParametersByName:
    """The parameters of the user's optimizer by name. Sharding replaces the model's parameters.

    Args:
        optimizer: an optimizer over parameters of the model.
        model: the model before sharding.

    Raises:
        ArgumentError: if the optimizer has a parameter that is not the model's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        self.optimizer = optimizer
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        try:
            self.names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        except KeyError:
            raise ArgumentError(
                f"TG-TRAIN-056: {type(optimizer).__name__} has a parameter that does not belong to the model. "
                "Create it from model.parameters() after adapters are added, or pass a function of the parameter "
                "groups."
            ) from None

    def of(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Set the model's current parameters in the optimizer, and return it.

        Raises:
            ArgumentError: if the optimizer has state and the parameters were replaced.
        """
        current = dict(model.named_parameters())
        for group, names in zip(self.optimizer.param_groups, self.names, strict=True):
            new_parameters = [current[name] for name in names]
            if self.optimizer.state and any(a is not b for a, b in zip(new_parameters, group["params"], strict=True)):
                raise ArgumentError(
                    f"TG-TRAIN-057: {type(self.optimizer).__name__} has state from earlier steps, but the model is "
                    "sharded now. The state belongs to the unsharded parameters. Pass a new optimizer, and resume from "
                    "a checkpoint."
                )
            group["params"] = new_parameters
        return self.optimizer


def device_of(config: Config) -> torch.device:
    """Return the training device.

    Raises:
        ArgumentError: if the device is not usable.
    """
    name = config.train.device
    try:
        device = device_named(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"TG-TRAIN-058: train.device is {name!r}: {str(error).splitlines()[0]}. The model cannot be moved there. "
            f"Leave the option out for auto."
        ) from error
    return device


def precision_of(config: Config, device: str) -> torch.dtype:
    """Return the dtype of the forward pass on a type of device."""
    bf16 = config.train.dtype == "bf16" or (config.train.dtype == "auto" and device == "cuda")
    return torch.bfloat16 if bf16 else torch.float32


def row_padding(config: Config) -> int:
    """Return the multiple to which row lengths are padded. On CUDA it is 1/8 of the budget, to compile few lengths.

    A short last row is padded by at most 1/8 of the budget.
    """
    if device_of(config).type != "cuda":
        return 1
    return min(config.pack.tokens_per_row, -(-config.pack.tokens_per_row // (8 * BLOCK)) * BLOCK)


def place(model: Any, config: Config, ranks: Ranks) -> tuple[DistributedModel, torch.dtype]:
    """Move the model to its device and ranks, without dropout; also return the dtype of the forward pass.

    Trained parameters are float32. Frozen parameters of a model with adapters get the dtype of the forward pass, except
    with FSDP, which needs one dtype.
    """
    device = device_of(config)
    precision = precision_of(config, device.type)
    memory = Memory.of(config.train.memory_mode)
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
    return wrap(model, mode, ranks=ranks, device=device, precision=precision, memory=memory), precision


def choose_attention(model: Any, config: Config) -> None:
    """Switch a model on CUDA to the attention of `attention.implementation`, where its architecture has it."""
    if config.attention.implementation == "auto":
        enable_flex_attention(model)
    elif attention_of(model) in BLOCK_ATTENTION:
        unwrap_adapters(model).set_attn_implementation(dense_attention(model))


@dataclass(frozen=True)
class PreparedPolicy:
    """A policy that is ready to train.

    Args:
        target: the model on its device and ranks.
        precision: dtype of the forward pass.
        optimizer: optimizer over its parameters.
        rates: full learning rate of each parameter group; None if all use `optimizer.lr` of the config.
    """

    target: DistributedModel
    precision: torch.dtype
    optimizer: torch.optim.Optimizer
    rates: tuple[float, ...] | None = None

    def set_rates(self, config: Config, step: int, steps: int | None) -> float:
        """Set the learning rate for optimizer step `step` out of `steps`; return the rate of the first group."""
        groups, part = self.optimizer.param_groups, lr_factor(config.schedule, step, steps, config.optimizer.lr)
        for group, full in zip(groups, self.rates or (config.optimizer.lr,) * len(groups), strict=True):
            group["lr"] = full * part
        return float(groups[0]["lr"])

    def sentence(self, config: Config) -> str:
        """Describe device, ranks, dtype and memory mode in one sentence for the user."""
        ranks = self.target.ranks
        where = "one process" if ranks.is_single else f"{ranks.world} ranks ({self.target.mode})"
        dtype = "bf16" if self.precision == torch.bfloat16 else "fp32"
        memory = config.train.memory_mode
        effects = self.target.memory.sentence(self.target.mode == "fsdp")
        device = self.target.device.type
        return f"{where} on {device}, {dtype} forward, fp32 parameters; train.memory_mode {memory}: {effects}."


def prepare_policy(
    model: Any, config: Config, ranks: Ranks, optimizer: Optimizers | None
) -> tuple[Any, PreparedPolicy]:
    """Add the adapters that the config sets, move the model, and make the optimizer. Returns the model and policy."""
    frozen = vision_encoder_modules(model) if config.images.vision_encoder == "frozen" else []
    for part in frozen:
        part.requires_grad_(False)
    if config.train.lora_rank:
        with torch.random.fork_rng(devices=[]):  # The adapters must be equal on all ranks.
            torch.manual_seed(config.train.seed)
            model = with_adapters(model, config.train.lora_rank, exclude=frozen)
    by_name = ParametersByName(optimizer, model) if isinstance(optimizer, torch.optim.Optimizer) else None
    if optimizer is not None:
        check_optimizer(config)
    target, precision = place(model, config, ranks)
    if optimizer is None:
        return model, PreparedPolicy(target, precision, adamw(model, config))
    if by_name is not None:
        optimizer = by_name.of(model)
    else:
        assert callable(optimizer)
        optimizer = optimizer(groups_of(model, 0.0))
    rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
    return model, PreparedPolicy(target, precision, optimizer, rates)


def other_model(reference: Any, config: Config, policy: PreparedPolicy) -> DistributedModel | None:
    """Return the reference model on its device; None if logprobs of the policy itself serve as reference."""
    if reference is None and not config.train.ref_model:
        return None
    model = reference if reference is not None else load_model(Path(config.train.ref_model))
    model.to(dtype=torch.float32).eval().requires_grad_(False)
    target = policy.target
    if target.device.type == "cuda":
        choose_attention(model, config)
    mode = target.mode if target.mode == "fsdp" else "none"
    ranks = target.ranks if mode == "fsdp" else Ranks()
    return wrap(model, mode, ranks=ranks, device=target.device, precision=policy.precision, memory=target.memory)


def first_reference(reference: Any, model: Any, objective: Objective, config: Config, *, keep_start: bool) -> Any:
    """Return the initial reference model if it is a model of its own, else None.

    Args:
        reference: the caller's reference model, or None.
        model: the policy before the first step and before the config's adapters are added.
        objective: the objective of the run.
        config: the options of the run.
        keep_start: copy the model if it is the reference and training is about to change it.

    Raises:
        ArgumentError: if `reference` would have no effect, or the reference would be a mixture of models with adapters.
    """
    train = config.train
    if reference is not None:
        if not needs_of(objective, config).ref or train.ref_sync_steps or train.ref_model:
            raise ArgumentError(
                "TG-TRAIN-059: reference has no effect: the objective needs no reference, or train.ref_sync_steps or "
                "train.ref_model defines it. Leave the argument out."
            )
        return reference
    adapters = train.lora_rank or has_adapters(model)
    if is_mixed(objective, config):
        if adapters:
            raise ArgumentError(
                f"TG-TRAIN-060: train.ref_mixup_alpha is {train.ref_mixup_alpha:g}, but the model has adapters. A "
                "reference with mixed weights would be a second full model. Set train.ref_mixup_alpha to 1, or train "
                "without adapters."
            )
        return deepcopy(model)
    is_fixed = objective.requirements.ref and not (train.ref_model or train.ref_sync_steps or adapters)
    return deepcopy(model) if keep_start and is_fixed else None


def check_optimizer(config: Config) -> None:
    """Reject optimizer options of the config if the user passed an optimizer."""
    values, defaults = as_dict(config), options()
    for name in ("lr", "beta1", "beta2", "eps", "weight_decay"):
        if values[f"optimizer.{name}"] != defaults[f"optimizer.{name}"][1]:
            raise ArgumentError(
                f"TG-TRAIN-061: optimizer.{name} has no effect: you passed an optimizer. "
                "Set the value in that optimizer, and leave the option out."
            )


def check_vocabulary(data: Sequences | Dataset, model: Any) -> None:
    """Reject ids beyond the model's embeddings. On CUDA they would abort the process without a useful message."""
    size, source = embeddings_of(model), as_dataset(data)
    highest = source.catalog.max_id
    if len(invalid := np.flatnonzero(highest >= size)):
        row = int(invalid[highest[invalid].argmax()])
        raise _vocabulary_error(f"trace '{source.trace_name(row)}'", int(highest[row]), size)
    if (
        isinstance(source, InMemoryDataset) and source.sequences.tokens
    ):  # The reader of files rejects negative ids itself.
        sequences = source.sequences
        if (token := int(sequences.ids[position := int(sequences.ids.argmin())])) < 0:
            row = int(sequences.trace[int(np.searchsorted(sequences.cu_seqlens, position, side="right")) - 1])
            raise _vocabulary_error(f"trace '{sequences.trace_name(row)}'", token, size)


def check_step(step: Step, model: Any) -> None:
    """Reject ids of a step beyond the model's embeddings."""
    size = embeddings_of(model)
    for row, batch in enumerate(step.batches):
        for token in (int(np.max(batch.ids, initial=0)), int(np.min(batch.ids, initial=0))):
            if not 0 <= token < size:
                raise _vocabulary_error(f"row {row} of the step", token, size)


def embeddings_of(model: Any) -> int:
    """Return the number of ids that both the input embedding and the LM head have."""
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    return min(table.weight.shape[0] for table in tables if getattr(table, "weight", None) is not None)


def _vocabulary_error(where: str, token: int, size: int) -> ArgumentError:
    return ArgumentError(
        f"TG-TRAIN-062: {where}: token id {token} occurs, but the model has {size} embeddings. The ids belong to "
        "another tokenizer. Align with the tokenizer of the model that you train."
    )


def check_media(data: Sequences | Dataset, model: Any) -> list[str]:
    """Reject traces with tokens sampled after media that the model would not see.

    Returns:
        Notes for the user about traces with media.
    """
    source, media = as_dataset(data), media_ids(model)
    affected = [trace for part in (source.parts() if media else ()) for trace in _traces_after_media(part, media)]
    if affected:
        raise ArgumentError(
            f"TG-TRAIN-063: {len(affected):,} of {source.catalog.traces:,} traces, '{affected[0]}' first, are trained "
            f"after an image, video or audio. {type(model).__name__} would run without its encoder for these media, "
            "so logprobs would be wrong by nats. Leave these traces out."
        )
    if not vision_encoder_modules(model) and source.has_images:
        raise ArgumentError(
            f"TG-TRAIN-064: the traces contain images, but {type(model).__name__} does not accept images. "
            "Pass model with the image-text model that sampled them."
        )
    count = int(source.catalog.media.sum())
    return [f"{count} traces contain images, videos or audio: tokens after them are not trained."] if count else []


def check_images_on_ranks(data: Sequences | Dataset, target: DistributedModel, config: Config) -> None:
    """Reject images if all ranks must run the vision encoder equally often: rows differ in their number of images."""
    if target.mode != "fsdp" and (target.ranks.is_single or config.images.vision_encoder == "frozen"):
        return
    if as_dataset(data).has_images:
        is_fsdp = target.mode == "fsdp"
        setting = "parallel.mode is fsdp" if is_fsdp else "images.vision_encoder is trained on several ranks"
        advice = (
            "Set parallel.mode ddp or none" if is_fsdp else "Leave images.vision_encoder frozen, or train on one rank"
        )
        raise ArgumentError(
            f"TG-TRAIN-065: the traces contain images, and {setting}. Every rank would have to run the vision encoder "
            f"equally often, but rows differ in their number of images. {advice}."
        )


def _traces_after_media(sequences: Sequences, media: tuple[int, ...]) -> list[str]:
    """Return the names of traces that have a trained token after one of the ids `media`."""
    is_media = np.isin(sequences.ids, media)
    if sequences.images is not None:  # Then the images are passed to the model, and only other media count.
        is_media &= np.repeat(np.diff(sequences.images.cu_images) == 0, np.diff(sequences.cu_seqlens))
    if not is_media.any():
        return []
    position, starts = np.arange(sequences.tokens), sequences.cu_seqlens[:-1]
    first = np.minimum.reduceat(np.where(is_media, position, sequences.tokens), starts)
    last = np.maximum.reduceat(np.where(sequences.trainable, position, -1), starts)
    return [sequences.trace_name(int(trace)) for trace in np.unique(sequences.trace[first < last])]


def check_same(path: Path, progress: Progress, options: dict[str, Any], fingerprint: str | None) -> None:
    """Reject a resume if its options or data differ from the checkpoint's.

    Args:
        path: the checkpoint.
        progress: its progress.
        options: the options of this run, by dotted name.
        fingerprint: hash of the data; None if the run has no data set, and options about data are not compared.
    """
    exempt = RESUMABLE_OPTIONS if fingerprint else (*RESUMABLE_OPTIONS, *OF_DATA)
    for name, value in options.items():
        saved = progress.config.get(name)
        if saved != value and not name.startswith(exempt):
            raise ArgumentError(
                f"TG-TRAIN-066: {path}: {name} was {repr(saved)[:80]} and is now {value!r}. A resumed run must keep "
                f"it. Set it back, or start again with another out and model {path}."
            )
    if progress.fingerprint != fingerprint:
        raise ArgumentError(
            f"TG-TRAIN-067: {path}: the traces differ from the traces with which the run was started. "
            f"Pass the same traces, or start again with another out and model {path}."
        )
