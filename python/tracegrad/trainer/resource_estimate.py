"""Estimate memory, time and traffic of a run from the model's configuration, without its weights.

The model is built on the meta device and run there: what its layers save for backward is counted. `--dry-run` prints
it.
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
from tracegrad.model.lm_head import MOST_CHUNK_BYTES, Size
from tracegrad.trainer.advantages import needs_of
from tracegrad.trainer.load_model import empty_model, model_config, refused
from tracegrad.trainer.lora import Adapted
from tracegrad.trainer.memory import Memory, layers_of
from tracegrad.trainer.setup import is_mixed, precision_of
from tracegrad.trainer.steps import Feed

_FLOAT = 4  # bytes; gradients are summed in float32


@dataclass(frozen=True)
class Traffic:
    """Of one rank in one step, by the size of what is put together: a tensor that is gathered whole, or summed.

    Args:
        ranks: how many share it.
        gathers, gather_bytes: all-gathers of parameters in the forward and backward passes of the step.
        measure_gathers, measure_bytes: in the passes without gradient that measure `old` and `ref` for the step.
        sums, sum_bytes: reductions of the gradient.
        halves: what a reduction is: "reduce-scatter" under FSDP, "all-reduce" under DDP.
    """

    ranks: int
    gathers: int
    gather_bytes: int
    measure_gathers: int
    measure_bytes: int
    sums: int
    sum_bytes: int
    halves: Literal["reduce-scatter", "all-reduce"]

    @property
    def sent_bytes(self) -> float:
        """What a rank sends in a ring: (n - 1) / n of each size, twice that for an all-reduce.

        >>> Traffic(4, 2, 800, 0, 0, 1, 400, "all-reduce").sent_bytes
        1200.0
        """
        twice = 2 if self.halves == "all-reduce" else 1
        return (self.gather_bytes + self.measure_bytes + twice * self.sum_bytes) * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Group:
    """Parameters that travel together: their shapes, those that are trained apart."""

    frozen: Sequence[Sequence[int]]
    trained: Sequence[Sequence[int]]

    def bytes(self, ranks: int, size: int, trained_only: bool = False) -> int:
        """As FSDP lays them out: the first dimension of each is padded to a multiple of the ranks."""
        shapes = [*self.trained, *(() if trained_only else self.frozen)]
        return sum(size * _elements(shape, ranks) for shape in shapes)


def traffic(
    groups: Sequence[Group],
    *,
    fsdp: bool,
    ranks: int,
    rows: int,
    measured: int,
    frozen: int,
    memory: Memory,
    gathered_in: int = _FLOAT,
) -> Traffic:
    """Counts a step.

    Args:
        groups: of the model, from `groups_of`.
        fsdp: or DDP.
        rows: forward passes of the step.
        measured: how often the policy measures the step without gradient: for `old`, and for `ref` where it is its own.
        frozen: how often another model does.
        memory: whether layers are gathered twice, and gradients reduced with each row.
        gathered_in: bytes of a parameter under FSDP: 2 in bfloat16.
    """
    if not fsdp:
        shapes = [shape for group in groups for shape in group.trained]
        total = sum(_FLOAT * _elements(shape) for shape in shapes)
        return Traffic(ranks, 0, 0, 0, 0, _buckets(shapes), total, "all-reduce")
    whole = [group.bytes(ranks, gathered_in) for group in groups]
    again = sum(whole[:-1]) if memory.reshard else 0  # layers, for the backward pass
    reduced = [group.bytes(ranks, _FLOAT, trained_only=True) for group in groups if group.trained]
    times = rows if memory.reduce_each else 1
    layers, kept = len(groups) - 1, rows if memory.reshard else 1  # without, layers stay gathered in a pass
    return Traffic(
        ranks,
        rows * (len(groups) + (layers if memory.reshard else 0)),
        rows * (sum(whole) + again),
        measured * (kept * layers + 1) + frozen * rows * len(groups),
        measured * (kept * sum(whole[:-1]) + whole[-1]) + frozen * rows * sum(whole),
        times * len(reduced),
        times * sum(reduced),
        "reduce-scatter",
    )


def groups_of(model: nn.Module, adapters: int = 0) -> list[Group]:
    """The layers, and what is in none of them, last.

    Args:
        model: a transformers causal LM, on the meta device or another, without adapters.
        adapters: rank of LoRA on all linear layers, which alone are then trained; 0 trains all.
    """
    found: list[Group] = []
    seen: set[int] = set()
    for part in [*layers_of(model), model]:
        own = [p for p in part.parameters() if id(p) not in seen]
        seen |= {id(p) for p in own}
        shapes = [tuple(p.shape) for p in own]
        if not adapters:
            found.append(Group((), shapes))
            continue
        inside = part is not model
        linear = [m for m in part.modules() if isinstance(m, nn.Linear)] if inside else []
        lora = [s for m in linear for s in ((adapters, m.in_features), (m.out_features, adapters))]
        found.append(Group(shapes, lora))
    return found


def _elements(shape: Sequence[int], ranks: int = 1) -> int:
    first, *rest = shape or (1,)
    return -(-first // ranks) * ranks * math.prod(rest)


def _buckets(shapes: Sequence[Sequence[int]]) -> int:
    """How many buckets DDP sums: the first is full at 1 MiB, others at 25, in the order in which gradients come."""
    full, held, count = 1 << 20, 0, 0
    for shape in reversed(shapes):
        held += _FLOAT * _elements(shape)
        if held >= full:
            full, held, count = 25 << 20, 0, count + 1
    return count + (held > 0)


_SAMPLE = 64  # tokens run on the meta device; what is saved and computed beside attention grows with their number


@dataclass(frozen=True)
class Forecast:
    """Of one rank. Attention is taken as computed without a score matrix in memory.

    Args:
        parameters, trained: of the whole model.
        state_bytes: what this rank holds at its peak beside a row: float32 parameters, AdamW's two moments, the
            gradient of the rows before; under FSDP what is gathered, under DDP its buckets, and a reference model of
            its own.
        row_bytes: what the row of the peak takes: its activations, the logits' chunk, and the head's gradient.
        flops: of the longest step on this rank: forward and backward, recomputation included, attention aside.
        rate: FLOP/s of a matrix product, measured here.
        ranks: how many share a step.
        imbalance: of the most uneven step, the busiest rank over the mean, as planned.
        traffic: of the step with most rows, where there are several ranks.
    """

    parameters: int
    trained: int
    state_bytes: float
    row_bytes: float
    flops: float
    rate: float
    ranks: int
    imbalance: float = 1.0
    traffic: Traffic | None = None

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), **({"sent_bytes": self.traffic.sent_bytes} if self.traffic else {})}

    def lines(self) -> list[str]:
        """For a terminal."""
        total = self.state_bytes + self.row_bytes
        return [
            f"model    {self.parameters:,} parameters, {self.trained:,} of them trained, from config.json alone",
            f"memory   {_size(total)} a rank at most: {_size(self.state_bytes)} for parameters, gradient and AdamW, "
            f"{_size(self.row_bytes)} for the activations of one row",
            f"time     {self.flops / self.rate:.3g} s a step at least: {self.flops / 1e12:.3g} TFLOP a rank, attention "
            f"aside, at the {self.rate / 1e12:.3g} TFLOP/s of a matrix product measured here",
            *self._between(),
        ]

    def _between(self) -> list[str]:
        if (said := self.traffic) is None:
            return []
        gathers = [f"{said.gathers:,} all-gathers of {_size(said.gather_bytes)}"] if said.gathers else []
        if said.measure_gathers:
            gathers.append(f"{said.measure_gathers:,} of {_size(said.measure_bytes)} to measure old and ref")
        sums = f"{said.sums:,} {said.halves}{'' if said.sums == 1 else 's'} of {_size(said.sum_bytes)}"
        return [
            f"ranks    {self.ranks}: the busiest has {self.imbalance:.3f} of the mean's work in the most uneven step",
            f"traffic  {', '.join([*gathers, sums])} a step; a rank sends {_size(said.sent_bytes)} in a ring",
        ]


def forecast(model: Path, config: Config, feed: Feed, ranks: int) -> Forecast:
    """Predicts a run."""
    empty = _empty(model)
    cuda = torch.cuda.is_available() if config.train.device == "auto" else config.train.device.startswith("cuda")
    low = precision_of(config, "cuda" if cuda else "cpu") == torch.bfloat16
    memory = Memory.of(config.train.memory)
    mode = config.parallel.mode if config.parallel.mode != "auto" else "fsdp" if cuda else "ddp"
    shards = ranks if ranks > 1 and mode == "fsdp" else 1
    adapted = Adapted.read(model)
    rank = config.train.lora_rank or (0 if adapted is None else adapted.rank)
    groups = groups_of(empty, rank)
    parameters = sum(p.numel() for p in empty.parameters())
    trained = sum(group.bytes(1, 1, trained_only=True) for group in groups)
    with _of_config(model):
        saved, flops = _counted(empty.to(torch.bfloat16 if low else torch.float32))
    layers, hidden = len(layers_of(empty)), int(empty.config.get_text_config().hidden_size)
    inputs = layers * hidden * (2 if low and shards > 1 else 4)  # autocast leaves what layers add up in float32
    kept, again = (inputs, saved / layers) if memory.recompute else (saved, 0.0)
    steps = feed.sizes
    longest = max(sum(tokens for tokens, _ in step.rows) for step in steps)
    most = max(len(step.rows) for step in steps)
    rows = {(number > 0, *row) for step in steps for number, row in enumerate(step.rows)}
    needs = needs_of(feed.objective, config)
    other = int(bool(needs.ref and config.train.ref_model) or is_mixed(feed.objective, config))
    between = {"rows": most, "memory": memory, "gathered_in": 2 if low else 4}
    between |= {"measured": int(needs.old) + int(needs.ref) - other, "frozen": other, "fsdp": mode == "fsdp"}
    passes = (3 if not rank else 2) + int(memory.recompute)
    text, head = empty.config.get_text_config(), empty.get_output_embeddings().weight.numel()
    held = _Held.of(groups, shards, other, memory, copies=ranks > 1 and shards == 1, low=low)
    taken = [held.after(foreach=cuda and memory.foreach is None)]
    copies = 2 * head if low and shards == 1 else 0  # its weight in bfloat16
    for is_next, width, scored in rows:
        tables = _logits_bytes(int(text.vocab_size), scored, memory, cuda, low) + copies + (0 if rank else 4 * head)
        taken.append((held.during(is_next), width * kept + max(tables, width * again)))
    state_bytes, row_bytes = max(taken, key=sum)
    return Forecast(
        parameters=parameters,
        trained=trained,
        state_bytes=state_bytes,
        row_bytes=row_bytes,
        flops=passes * flops * longest,
        rate=_matrix_rate(torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if low else torch.float32),
        ranks=ranks,
        imbalance=max(step.imbalance for step in steps),
        traffic=traffic(groups, ranks=ranks, **between) if ranks > 1 else None,
    )


@dataclass(frozen=True)
class _Held:
    """Bytes that a rank holds whatever row it works on.

    Args:
        always: parameters, of another model too, and moments.
        buckets: of DDP, in which gradients are summed.
        gathered: parameters that are whole while a row is worked on: FSDP's, or their copies in bfloat16 of autocast.
        before: gradients of the rows before.
        reduced: gradients as the optimizer reads them.
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
        """While a row is worked on, which is not the first of its step, or is."""
        return self.always + self.buckets + self.gathered + (self.before if is_next else 0)

    def after(self, *, foreach: bool) -> tuple[float, float]:
        """While the optimizer steps; and the copy that it makes if it takes all parameters together."""
        return self.always + self.buckets + self.reduced, self.reduced if foreach else 0.0


def _logits_bytes(vocabulary: int, scored: int, memory: Memory, cuda: bool, low: bool) -> int:
    """Tables of one chunk of the head's rows: as many as fit the chunk, at most all that are scored.

    On CUDA the largest default chunk is counted; a device with less free memory gets a smaller one.
    """
    if cuda:  # one table in the logits' dtype
        size = Size(scored, 0, vocabulary, row_bytes=2 if low else 4)
        return min(scored, size.chunk(memory.chunk_bytes or MOST_CHUNK_BYTES)) * vocabulary * size.row_bytes
    size = Size(scored, 0, vocabulary)  # the chunk is counted as two tables of float32, and entropy takes a third
    rows = size.chunk(memory.chunk_bytes) if memory.chunk_bytes else max(size.chunk(4 << 20), 64)
    return min(scored, rows) * vocabulary * 12


def _empty(model: Path) -> Any:
    model_config(model)
    with _of_config(model):
        return empty_model(model, [])


def _of_config(model: Path) -> AbstractContextManager[None]:
    because = "Memory and time cannot be told. Give --model a folder of save_pretrained"
    return refused(f"{model}: no causal language model can be built from its config.json", because)


def _counted(model: Any) -> tuple[float, float]:
    """Bytes saved for the backward pass, and operations of the forward pass with its head, per token."""
    seen: dict[int, int] = {}
    weights = {p.untyped_storage()._cdata for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            seen[storage._cdata] = storage.nbytes()
            held.append(tensor)
        return tensor

    class Attention(torch.autograd.Function):
        """What attention that holds no scores keeps; on the meta device torch would take the one that does."""

        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = query.new_empty((*query.shape[:-1], value.shape[-1]))
            ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
            return out

    held: list[Tensor] = []
    real = torch.nn.functional.scaled_dot_product_attention
    ids = torch.zeros(1, _SAMPLE, dtype=torch.long, device="meta")
    mask = torch.ones(1, 1, _SAMPLE, _SAMPLE, dtype=torch.bool, device="meta")
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    masks = mask if len(kinds) < 2 else dict.fromkeys(kinds, mask)
    torch.nn.functional.scaled_dot_product_attention = lambda query, key, value, *_, **__: Attention.apply(
        query, key, value
    )
    try:
        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model.get_decoder()(input_ids=ids, attention_mask=masks, use_cache=False)
    finally:
        torch.nn.functional.scaled_dot_product_attention = real
    head = 2 * model.get_output_embeddings().weight.numel()
    return sum(seen.values()) / _SAMPLE, counter.get_total_flops() / _SAMPLE + head


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square product, the best of a few."""
    size = 8192 if device.type == "cuda" else 768
    a = torch.ones(size, size, dtype=dtype, device=device)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return 2.0 * size**3 / float(np.min(times))


def _size(count: float) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**29 else f"{count / 2**20:.3g} MiB"
