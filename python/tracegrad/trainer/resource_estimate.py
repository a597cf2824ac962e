"""Estimates of memory, time and communication of a run from the model's config.json, without its weights.

The model is built and run on the meta device, which counts what its layers save for the backward pass. `--dry-run`
prints the estimates.
"""

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tracegrad.config import Config
from tracegrad.model.lm_head import MAX_CHUNK_BYTES, Size
from tracegrad.trainer.advantages import needs_of
from tracegrad.trainer.load_model import empty_model, model_config, reading_errors
from tracegrad.trainer.lora import LoraFolder
from tracegrad.trainer.memory import Memory, layers_of
from tracegrad.trainer.setup import is_mixed, precision_of
from tracegrad.trainer.steps import TrainingData

_FLOAT32_BYTES = 4  # Gradients are summed in float32.


@dataclass(frozen=True)
class CommunicationEstimate:
    """Communication of one rank in one step. Sizes refer to the full tensor that is gathered or summed.

    Args:
        ranks: number of ranks that share the step.
        gathers, gather_bytes: all-gathers of parameters in the forward and backward passes.
        measure_gathers, measure_bytes: all-gathers in the passes without gradient that compute `old` and `ref`.
        sums, sum_bytes: reductions of the gradient.
        reduction: collective of a reduction: "reduce-scatter" for FSDP, "all-reduce" for DDP.
    """

    ranks: int
    gathers: int
    gather_bytes: int
    measure_gathers: int
    measure_bytes: int
    sums: int
    sum_bytes: int
    reduction: Literal["reduce-scatter", "all-reduce"]

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends in a ring: (n - 1) / n of each size, and twice that for an all-reduce.

        >>> CommunicationEstimate(4, 2, 800, 0, 0, 1, 400, "all-reduce").sent_bytes
        1200.0
        """
        factor = 2 if self.reduction == "all-reduce" else 1
        return (self.gather_bytes + self.measure_bytes + factor * self.sum_bytes) * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Group:
    """Shapes of parameters that are gathered together, frozen and trained ones separately."""

    frozen: Sequence[Sequence[int]]
    trained: Sequence[Sequence[int]]

    def bytes(self, ranks: int, size: int, trained_only: bool = False) -> int:
        """Return the bytes of the parameters in FSDP's layout: each first dimension is padded to a multiple of ranks.

        Args:
            ranks: number of ranks.
            size: bytes per element.
            trained_only: leave out frozen parameters.
        """
        shapes = [*self.trained, *(() if trained_only else self.frozen)]
        return sum(size * _elements(shape, ranks) for shape in shapes)


def estimate_communication(
    groups: Sequence[Group],
    *,
    fsdp: bool,
    ranks: int,
    rows: int,
    policy_passes: int,
    reference_passes: int,
    memory: Memory,
    gathered_in: int = _FLOAT32_BYTES,
) -> CommunicationEstimate:
    """Count the communication of one step.

    Args:
        groups: parameters of the model, from `groups_of`.
        fsdp: True for FSDP, False for DDP.
        ranks: number of ranks.
        rows: number of forward passes in the step.
        policy_passes: number of passes of the policy over the step without gradient, for `old`, and for `ref` if the
            policy is its own reference.
        reference_passes: number of such passes of a separate reference model.
        memory: memory mode: whether layers are gathered twice, and gradients reduced with each row.
        gathered_in: bytes per gathered parameter with FSDP; 2 for bfloat16.
    """
    if not fsdp:
        shapes = [shape for group in groups for shape in group.trained]
        total = sum(_FLOAT32_BYTES * _elements(shape) for shape in shapes)
        return CommunicationEstimate(ranks, 0, 0, 0, 0, _buckets(shapes), total, "all-reduce")
    full_bytes = [group.bytes(ranks, gathered_in) for group in groups]
    regathered = sum(full_bytes[:-1]) if memory.reshard else 0  # Layers are gathered again for the backward pass.
    reduced = [group.bytes(ranks, _FLOAT32_BYTES, trained_only=True) for group in groups if group.trained]
    reductions = rows if memory.reduce_each else 1
    # Without resharding, layers stay gathered during a pass.
    layers, passes = len(groups) - 1, rows if memory.reshard else 1
    return CommunicationEstimate(
        ranks,
        rows * (len(groups) + (layers if memory.reshard else 0)),
        rows * (sum(full_bytes) + regathered),
        policy_passes * (passes * layers + 1) + reference_passes * rows * len(groups),
        policy_passes * (passes * sum(full_bytes[:-1]) + full_bytes[-1]) + reference_passes * rows * sum(full_bytes),
        reductions * len(reduced),
        reductions * sum(reduced),
        "reduce-scatter",
    )


def groups_of(model: nn.Module, adapters: int = 0) -> list[Group]:
    """Return one group of parameters per layer, and last the parameters outside layers.

    Args:
        model: a transformers causal LM without adapters, on any device.
        adapters: rank of LoRA adapters on all linear layers, then the only trained parameters; 0 trains all.
    """
    groups: list[Group] = []
    counted: set[int] = set()
    for part in [*layers_of(model), model]:
        new = [p for p in part.parameters() if id(p) not in counted]
        counted |= {id(p) for p in new}
        shapes = [tuple(p.shape) for p in new]
        if not adapters:
            groups.append(Group((), shapes))
            continue
        is_layer = part is not model
        linear = [m for m in part.modules() if isinstance(m, nn.Linear)] if is_layer else []
        lora = [s for m in linear for s in ((adapters, m.in_features), (m.out_features, adapters))]
        groups.append(Group(shapes, lora))
    return groups


def _elements(shape: Sequence[int], ranks: int = 1) -> int:
    first, *rest = shape or (1,)
    return -(-first // ranks) * ranks * math.prod(rest)


def _buckets(shapes: Sequence[Sequence[int]]) -> int:
    """Return the number of DDP's buckets: the first has 1 MiB, others 25, filled in the order of the gradients."""
    limit, bucket, count = 1 << 20, 0, 0
    for shape in reversed(shapes):
        bucket += _FLOAT32_BYTES * _elements(shape)
        if bucket >= limit:
            limit, bucket, count = 25 << 20, 0, count + 1
    return count + (bucket > 0)


_SAMPLE_TOKENS = 64  # Tokens run on the meta device. Outside attention, memory and FLOPs are linear in their number.


@dataclass(frozen=True)
class ResourceEstimate:
    """Memory, time and communication estimate of one rank. Attention is assumed not to store a score matrix.

    Args:
        parameters, trained: number of all parameters of the model, and of trained ones.
        state_bytes: peak memory of this rank without a row: float32 parameters, AdamW's two moments, the gradient of
            previous rows, parameters gathered by FSDP or buckets of DDP, and a separate reference model.
        row_bytes: memory of a row at the peak: activations, a chunk of logits, and the gradient of the LM head.
        flops: FLOPs of the longest step on this rank: forward and backward, with recomputation, without attention.
        rate: FLOP/s of a matrix product, measured on this machine.
        ranks: number of ranks that share a step.
        imbalance: planned work of the busiest rank over the mean, in the most uneven step.
        traffic: communication of the step with most rows; None for one rank.
    """

    parameters: int
    trained: int
    state_bytes: float
    row_bytes: float
    flops: float
    rate: float
    ranks: int
    imbalance: float = 1.0
    traffic: CommunicationEstimate | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON-serializable values."""
        return {**asdict(self), **({"sent_bytes": self.traffic.sent_bytes} if self.traffic else {})}

    def lines(self) -> list[str]:
        """Return the estimate as lines for a terminal."""
        total = self.state_bytes + self.row_bytes
        return [
            f"model    {self.parameters:,} parameters, {self.trained:,} of them trained, estimated from config.json",
            f"memory   at most {_size(total)} per rank: {_size(self.state_bytes)} for parameters, gradient and AdamW, "
            f"{_size(self.row_bytes)} for the activations of one row",
            f"time     at least {self.flops / self.rate:.3g} s per step: {self.flops / 1e12:.3g} TFLOP per rank, "
            f"at {self.rate / 1e12:.3g} TFLOP/s (a matrix product measured on this machine), without attention,",
            "         old and reference logprobs, evaluations, checkpoints, and the check of attention before step 1",
            *self._traffic_lines(),
        ]

    def _traffic_lines(self) -> list[str]:
        if (traffic := self.traffic) is None:
            return []
        gathers = [f"{traffic.gathers:,} all-gathers of {_size(traffic.gather_bytes)}"] if traffic.gathers else []
        if traffic.measure_gathers:
            gathers.append(f"{traffic.measure_gathers:,} of {_size(traffic.measure_bytes)} to compute old and ref")
        sums = f"{traffic.sums:,} {traffic.reduction}{'' if traffic.sums == 1 else 's'} of {_size(traffic.sum_bytes)}"
        return [
            f"ranks    {self.ranks}: in the most uneven step, the busiest rank has {self.imbalance:.3f} times "
            f"the mean work",
            f"traffic  {', '.join([*gathers, sums])} per step; a rank sends {_size(traffic.sent_bytes)} in a ring",
        ]


def estimate_resources(model: Path, config: Config, feed: TrainingData, ranks: int) -> ResourceEstimate:
    """Estimate memory, time and communication of a run.

    Args:
        model: folder of the model; only its configs are read, and the shapes of adapters.
        config: the options of the run.
        feed: the data of the run.
        ranks: number of ranks.
    """
    model_on_meta = _build_empty(model)
    cuda = torch.cuda.is_available() if config.train.device == "auto" else config.train.device.startswith("cuda")
    is_bf16 = precision_of(config, "cuda" if cuda else "cpu") == torch.bfloat16
    memory = Memory.of(config.train.memory_mode)
    mode = config.parallel.mode if config.parallel.mode != "auto" else "fsdp" if cuda else "ddp"
    shards = ranks if ranks > 1 and mode == "fsdp" else 1
    adapted = LoraFolder.read(model)
    rank = config.train.lora_rank or (0 if adapted is None else adapted.rank)
    groups = groups_of(model_on_meta, rank)
    parameters = sum(p.numel() for p in model_on_meta.parameters())
    trained = sum(group.bytes(1, 1, trained_only=True) for group in groups)
    with _config_errors(model):
        activation_bytes, flops = _count_per_token(model_on_meta.to(torch.bfloat16 if is_bf16 else torch.float32))
    layers, hidden = len(layers_of(model_on_meta)), int(model_on_meta.config.get_text_config().hidden_size)
    # Autocast leaves the residual stream in float32.
    inputs = layers * hidden * (2 if is_bf16 and shards > 1 else 4)
    stored, layer_activations = (inputs, activation_bytes / layers) if memory.recompute else (activation_bytes, 0.0)
    steps = feed.sizes
    longest = max(sum(tokens for tokens, _ in step.rows) for step in steps)
    max_rows = max(len(step.rows) for step in steps)
    rows = {(number > 0, *row) for step in steps for number, row in enumerate(step.rows)}
    needs = needs_of(feed.objective, config)
    reference_models = int(bool(needs.ref and config.train.ref_model) or is_mixed(feed.objective, config))
    traffic = None
    if ranks > 1:
        traffic = estimate_communication(
            groups,
            fsdp=mode == "fsdp",
            ranks=ranks,
            rows=max_rows,
            policy_passes=int(needs.old) + int(needs.ref) - reference_models,
            reference_passes=reference_models,
            memory=memory,
            gathered_in=2 if is_bf16 else 4,
        )
    passes = (3 if not rank else 2) + int(memory.recompute)
    text, head = model_on_meta.config.get_text_config(), model_on_meta.get_output_embeddings().weight.numel()
    rank_bytes = _Held.of(groups, shards, reference_models, memory, copies=ranks > 1 and shards == 1, low=is_bf16)
    peaks = [rank_bytes.after(foreach=cuda and memory.foreach is None)]
    copies = 2 * head if is_bf16 and shards == 1 else 0  # The bfloat16 copy of the head's weight.
    for is_next, width, scored in rows:
        tables = _logits_bytes(int(text.vocab_size), scored, memory, cuda, is_bf16) + copies + (0 if rank else 4 * head)
        peaks.append((rank_bytes.during(is_next), width * stored + max(tables, width * layer_activations)))
    state_bytes, row_bytes = max(peaks, key=sum)
    return ResourceEstimate(
        parameters=parameters,
        trained=trained,
        state_bytes=state_bytes,
        row_bytes=row_bytes,
        flops=passes * flops * longest,
        rate=_matrix_rate(torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if is_bf16 else torch.float32),
        ranks=ranks,
        imbalance=max(step.imbalance for step in steps),
        traffic=traffic,
    )


@dataclass(frozen=True)
class _Held:
    """Memory of a rank in bytes that does not depend on the row.

    Args:
        always: parameters, including those of a separate reference model, and the moments.
        buckets: DDP's buckets, in which gradients are summed.
        gathered: full parameters during a row: those that FSDP gathers, or the bfloat16 copies of autocast.
        before: gradients of the previous rows.
        reduced: gradients in the form that the optimizer reads.
    """

    always: float
    buckets: float
    gathered: float
    before: float
    reduced: float

    @classmethod
    def of(
        cls, groups: Sequence[Group], shards: int, other: int, memory: Memory, *, copies: bool, low: bool
    ) -> "_Held":
        parameters = sum(group.bytes(shards, 4) for group in groups)
        trained = sum(group.bytes(shards, 4, trained_only=True) for group in groups)
        *layers, rest = [group.bytes(shards, 2 if low else 4) for group in groups]
        gathered = float(sum(layers) if low else 0)
        if shards > 1:
            gathered = rest + (2 * max(layers) if memory.reshard else sum(layers))
        return cls(
            always=((1 + other) * parameters + 2 * trained) / shards,
            buckets=trained if copies else 0,
            gathered=gathered,
            before=trained / shards if memory.reduce_each else trained,
            reduced=trained / shards,
        )

    def during(self, is_next: bool) -> float:
        """Return the bytes during a row; `is_next` is True unless it is the first row of its step."""
        return self.always + self.buckets + self.gathered + (self.before if is_next else 0)

    def after(self, *, foreach: bool) -> tuple[float, float]:
        """Return the bytes during the optimizer's update, and those for its copy of all parameters with `foreach`."""
        return self.always + self.buckets + self.reduced, self.reduced if foreach else 0.0


def _logits_bytes(vocabulary: int, scored: int, memory: Memory, cuda: bool, low: bool) -> int:
    """Return the bytes of the tables for one chunk of logit rows, at most all scored rows.

    On CUDA this assumes the largest default chunk; with little free memory, the device uses a smaller one.
    """
    if cuda:  # There is one table, in the dtype of the logits.
        size = Size(scored, 0, vocabulary, row_bytes=2 if low else 4)
        return min(scored, size.chunk(memory.chunk_bytes or MAX_CHUNK_BYTES)) * vocabulary * size.row_bytes
    # The chunk size counts two float32 tables. Entropy needs a third one.
    size = Size(scored, 0, vocabulary)
    rows = size.chunk(memory.chunk_bytes) if memory.chunk_bytes else max(size.chunk(4 << 20), 64)
    return min(scored, rows) * vocabulary * 12


def _build_empty(model: Path) -> Any:
    model_config(model)
    with _config_errors(model):
        return empty_model(model, [])


def _config_errors(model: Path) -> AbstractContextManager[None]:
    advice = "Memory and time cannot be estimated. Pass model with a folder written by save_pretrained"
    return reading_errors(f"{model}: no causal language model can be built from its config.json", advice)


def _count_per_token(model: Any) -> tuple[float, float]:
    """Return the bytes saved for the backward pass, and the FLOPs of the forward pass with the LM head, per token."""
    saved: dict[int, int] = {}
    weights = {p.untyped_storage()._cdata for p in model.parameters()}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    class Attention(torch.autograd.Function):
        """Attention that saves no scores. On the meta device, torch would use the implementation that saves them."""

        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = query.new_empty((*query.shape[:-1], value.shape[-1]))
            ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
            return out

    alive: list[Tensor] = []
    original = torch.nn.functional.scaled_dot_product_attention
    ids = torch.zeros(1, _SAMPLE_TOKENS, dtype=torch.long, device="meta")
    mask = torch.ones(1, 1, _SAMPLE_TOKENS, _SAMPLE_TOKENS, dtype=torch.bool, device="meta")
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    masks = mask if len(kinds) < 2 else dict.fromkeys(kinds, mask)
    torch.nn.functional.scaled_dot_product_attention = lambda query, key, value, *_, **__: Attention.apply(
        query, key, value
    )
    try:
        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
            model.get_decoder()(input_ids=ids, attention_mask=masks, use_cache=False)
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
    head_flops = 2 * model.get_output_embeddings().weight.numel()
    return sum(saved.values()) / _SAMPLE_TOKENS, counter.get_total_flops() / _SAMPLE_TOKENS + head_flops


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a square matrix product, the best of four."""
    size = 8192 if device.type == "cuda" else 768
    a = torch.ones(size, size, dtype=dtype, device=device)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2.0 * size**3 / float(np.min(times))


def _size(count: float) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**29 else f"{count / 2**20:.3g} MiB"
