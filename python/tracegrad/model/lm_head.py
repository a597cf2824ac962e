"""Compute token logprobs and entropies of a batch, choosing the implementation for its device and size."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from tracegrad.errors import ArgumentError
from tracegrad.model.lm_head_chunked import (
    Chunk,
    GradientSums,
    Head,
    RowGradients,
    Rows,
    Statistics,
    SupportChunk,
    logits_of,
    slices,
    wide_dtype,
)
from tracegrad.packing.support import Support

__all__ = ["Head", "HeadProblem", "chunk_kind", "logits_of", "token_logprobs"]


Name = Literal["no-grad", "recompute", "one-pass", "frozen"]

MAX_CHUNK_BYTES = 4 << 30  # larger chunks do not make products with the weight of a real vocabulary faster
MIN_CHUNK_BYTES = 256 << 20  # smaller chunks make these products much slower
FIXED_CHUNK_BYTES = 1 << 30  # used if the size must not depend on the free memory
_ROWS = 256  # a multiple of the tile sizes of matrix products, so that no tile is computed for only a few rows


@dataclass(frozen=True)
class Gradients:
    """The gradients to compute, and whether the loss has a gradient by the entropy, and by logprobs over the whole
    vocabulary of rows with support."""

    hidden: bool = True
    weight: bool = True
    bias: bool = False
    entropy: bool = True
    vocabulary_logp: bool = False

    @property
    def any(self) -> bool:
        """Whether any gradient is computed."""
        return self.hidden or self.weight or self.bias

    @property
    def parameters(self) -> bool:
        """Whether the head is trained."""
        return self.weight or self.bias


@dataclass(frozen=True)
class HeadPlan:
    """The method by which the head of U rows is computed.

    Args:
        name: "no-grad": compute the logits once. "recompute": compute the logits, then compute them again with the
            gradient; correct for any loss. "one-pass": evaluate the loss of a chunk while its logits are in memory, and
            turn them into their gradient in place. "frozen": the head has no gradient, and u = d logp / d hidden of
            each row is kept instead of its logits.
        why: the reason for the choice, in words.
        chunk_rows: rows whose logits are in memory at once. If chunks end with traces, it is the maximum.
        peak_bytes: most memory in addition to hidden states and parameters: one chunk's tables and the gradients.
        flops: of the products with the weight, forward and backward.

    >>> plan = choose_plan(Size(rows=1000, hidden=64, vocabulary=500), Gradients(), 100, fits=True)
    >>> plan.name, plan.flops == 6 * 1000 * 64 * 500, plan.why
    ('one-pass', True, 'the loss of a chunk is known when its logits are')
    """

    name: Name
    why: str
    chunk_rows: int
    peak_bytes: int
    flops: int

    def __str__(self) -> str:
        cost = f"{self.flops:.2e} FLOPs, {self.peak_bytes / 2**20:,.0f} MiB"
        return f"{self.name}: {self.why} (chunks of {self.chunk_rows:,} rows, {cost})"


@dataclass(frozen=True)
class Size:
    """The size of a head.

    Args:
        rows: U.
        hidden: H.
        vocabulary: V.
        item: bytes of one number of the hidden states.
        row_bytes: bytes per vocabulary entry of a chunk's row.
        wide: bytes of one number of a sum.
    """

    rows: int
    hidden: int
    vocabulary: int
    item: int = 4
    row_bytes: int = 8
    wide: int = 4

    def chunk(self, chunk_bytes: int) -> int:
        """Return the rows of a chunk: those that fit `chunk_bytes`, at least one.

        If there are more rows than fit, it is a multiple of 256 from 256 on.
        """
        rows = chunk_bytes // (self.row_bytes * self.vocabulary)
        return max(1, rows if rows < _ROWS or rows >= self.rows else rows - rows % _ROWS)

    def gradient_bytes(self, wants: Gradients) -> int:
        """Return the bytes of the gradients of hidden states and weight while they are summed."""
        by_hidden = wants.hidden * self.rows * self.hidden * self.item
        return by_hidden + wants.weight * self.vocabulary * self.hidden * self.wide


def device_chunk_bytes(size: Size, wants: Gradients, free_bytes: int) -> int:
    """Return the bytes of one chunk's tables on a device with `free_bytes` of free memory: 256 MiB to 4 GiB.

    A chunk takes at most half of the memory that is free after the gradients (but at least 256 MiB), because the memory
    that torch has reserved may be fragmented. The size is a power of two, so that a restarted run with slightly more or
    less free memory sums in the same order.

    >>> size, gib = Size(rows=32768, hidden=4096, vocabulary=151936, item=2, row_bytes=2), 1 << 30
    >>> [device_chunk_bytes(size, Gradients(), free * gib) >> 20 for free in (1, 4, 6, 10, 70)]
    [256, 512, 1024, 2048, 4096]
    """
    half = max(1, (free_bytes - size.gradient_bytes(wants)) // 2)
    return min(max(1 << (half.bit_length() - 1), MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


def choose_plan(
    size: Size,
    wants: Gradients,
    chunk_rows: int,
    *,
    fits: bool = False,
    reason_unfit: str | None = None,
    requested: Name | None = None,
) -> HeadPlan:
    """Return the cheapest plan that is exact, or the plan `requested` if it is set.

    Args:
        size: of the head.
        wants: the gradients to compute.
        chunk_rows: rows of a chunk.
        fits: whether the loss can be evaluated chunk by chunk.
        reason_unfit: the reason why it cannot.
        requested: the name of a plan; None chooses.

    Raises:
        ArgumentError: if the plan `requested` is not possible.

    >>> choose_plan(Size(1000, 64, 500), Gradients(), 100, fits=True).name
    'one-pass'
    """
    frozen = wants.hidden and not wants.parameters and not wants.entropy and not wants.vocabulary_logp
    reasons: dict[Name, str] = {}
    if not wants.any:
        reasons["no-grad"] = "nothing takes a gradient"
    else:
        if frozen:
            reasons["frozen"] = "the head takes no gradient and the loss none by the entropy"
        if fits:
            reasons["one-pass"] = "the loss of a chunk is known when its logits are"
        reasons["recompute"] = reason_unfit or "the loss is not known here"
    chosen = requested or next(iter(reasons))
    if chosen not in reasons:
        raise ArgumentError(_impossible_plan_message(chosen, wants, reason_unfit))
    return _plan_with_costs(size, wants, chunk_rows, chosen, reasons[chosen])


def _impossible_plan_message(name: Name, wants: Gradients, reason_unfit: str | None) -> str:
    reason = {
        "no-grad": "a gradient is wanted",
        "recompute": "nothing takes a gradient",
        "one-pass": reason_unfit or "the loss is not known here",
        "frozen": "the head takes a gradient, or the loss one by the entropy or by logprobs over the vocabulary",
    }[name]
    if not wants.any:
        reason = "nothing takes a gradient"
    return f"TG-MODEL-025: the plan {name!r} is not possible: {reason}. Leave plan=None, and one that is will be taken."


def _plan_with_costs(size: Size, wants: Gradients, chunk_rows: int, name: Name, reason: str) -> HeadPlan:
    """Return the plan with its memory and FLOPs. Each product with the weight costs 2 U H V FLOPs.

    The products are the logits (twice with "recompute"), the gradient of hidden states and the gradient of the weight.
    """
    products = 1 + wants.hidden + wants.weight + (name == "recompute")
    chunk_rows = max(1, min(chunk_rows, size.rows))
    peak_bytes = chunk_rows * size.vocabulary * size.row_bytes
    if name != "no-grad":
        peak_bytes += size.gradient_bytes(wants)
    return HeadPlan(name, reason, chunk_rows, peak_bytes, 2 * products * size.rows * size.hidden * size.vocabulary)


Epilogue = Literal["torch", "compile", "triton"]

_CPU_CHUNK = 4 << 20  # fits into a cache
_CPU_ROWS = 64  # with fewer rows, adding up the gradient of the weight costs more than computing it


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    inv_temperature: Tensor | float = 1.0,
    support: Support | None = None,
    entropy_over_support: bool = False,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    chunk_bytes: int | None = None,
    epilogue: Epilogue | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each target and the entropy of its distribution, without a table [U, V].

        z = inv_temperature * cap(logit_scale * (hidden @ weight.T + bias)),    cap(x) = softcap * tanh(x / softcap)
        logp = z[target] - logsumexp(z),    entropy = logsumexp(z) - sum softmax(z) * z

    Logits are computed for one chunk of rows at a time, and again in the backward pass. Sums are float32, or float64
    for float64 input. If the head has no gradient, d logp / d hidden is kept instead. The backward pass then computes
    no logits unless the loss depends on the entropy.

    A row with `support` was sampled from a part of the vocabulary (top-p, top-k or min-p), or with penalties. Its
    logprob is z[target] - logsumexp(z[support]) of the changed scores, and its gradient is that of this logprob.

    Args:
        hidden: [U, H].
        weight: [V, H]; used in the dtype of `hidden`. A copy in that dtype is kept for backward.
        target: [U] int64.
        inv_temperature: [U] or one number. It has no gradient.
        support: `Batch.support`, of U rows; None if the sampler changed no distribution.
        entropy_over_support: whether the entropy of a row with support is that over its support.
        bias: [V].
        softcap: of the logits, as in Gemma 2.
        logit_scale: as in Cohere.
        logits_dtype: the dtype to which logits are rounded before the sums; None: the dtype of `hidden`. Use the
            dtype of the sampler.
        chunk_bytes: memory for the tables of one chunk of logits. The default on CUDA is 256 MiB to 4 GiB, depending on
            the free memory (1 GiB under `torch.use_deterministic_algorithms`); on CPU it is 4 MiB or 64 rows. It
            affects the results only by the order of float32 sums.
        epilogue: the implementation that reads the logits: "triton" (the default on CUDA if it is installed), "compile"
            (torch.compile) or "torch" (the default elsewhere).

    Returns:
        logp [U] and entropy [U], float32 or float64, nats; both differentiable once.

    Raises:
        ArgumentError: if the shapes do not match, or the epilogue cannot run here.

    >>> logp, entropy = token_logprobs(torch.zeros(2, 3), torch.ones(4, 3), torch.tensor([0, 3]))
    >>> [round(x, 4) for x in (logp.exp()[0].item(), entropy.exp()[1].item())]
    [0.25, 4.0]
    """
    check_shapes(hidden, weight, target, bias)
    setting = HeadSettings(softcap, float(logit_scale), logits_dtype, chunk_kind(hidden, logits_dtype, epilogue))
    rows = Rows(
        target, inverse_of(inv_temperature, hidden), support and support.to(hidden.device), entropy_over_support
    )
    with torch.autocast(hidden.device.type, enabled=False):
        return _TokenLogprobs.apply(hidden, weight, bias, *rows[:4], setting, chunk_bytes)


@dataclass(frozen=True)
class HeadSettings:
    """The settings of a head, except for its parameters: softcap, scale, dtype of the logits, kind of chunk."""

    softcap: float | None
    logit_scale: float
    dtype: torch.dtype | None
    kind: type[Chunk]


@dataclass(frozen=True)
class HeadProblem:
    """A head over U rows, to be computed in chunks.

    Args:
        hidden: [U, H].
        head: weight and bias in the dtype of `hidden`.
        rows: the inputs of all U rows.
        setting: the settings of the head.
    """

    hidden: Tensor
    head: Head
    rows: Rows
    setting: HeadSettings

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, setting: HeadSettings
    ) -> "HeadProblem":
        """Create a problem with the parameters in the dtype of the hidden states."""
        bias = None if bias is None else bias.to(hidden.dtype)
        return cls(hidden, Head(weight.to(hidden.dtype), bias, setting.softcap, setting.logit_scale), rows, setting)

    def chunk(self, here: slice) -> Chunk | SupportChunk:
        """Return the chunk of some rows."""
        rows = self.rows.at(here)
        # Only the table of a `Chunk` has the precision in which samplers apply penalties.
        kind = Chunk if rows.support and rows.support.has_changed_vocabulary else self.setting.kind
        chunk = kind(self.hidden[here], self.head, rows._replace(support=None), self.setting.dtype)
        return chunk if rows.support is None else SupportChunk(chunk, rows)

    def statistics(self, chunk_rows: int) -> Statistics:
        """Compute the statistics of all rows."""
        statistics = self._empty()
        for rows in slices(len(self.hidden), chunk_rows):
            statistics.set(rows, self.chunk(rows).statistics())
        return statistics

    def statistics_and_gradient(self, chunk_rows: int) -> tuple[Statistics, Tensor]:
        """Compute the statistics of all rows, and d logp / d hidden [U, H]."""
        statistics = self._empty()
        sums = GradientSums(self.hidden, self.head, (True, False, False))
        ones = statistics.lse.new_ones(min(chunk_rows, len(self.hidden)))
        for rows in slices(len(self.hidden), chunk_rows):
            chunk = self.chunk(rows)
            chunk_statistics = chunk.statistics()
            statistics.set(rows, chunk_statistics)
            sums.add(rows, chunk.gradient(chunk_statistics, ones[: rows.stop - rows.start], None))
            del chunk  # free its table now: the next chunk is made before the name is bound again
        assert sums.hidden is not None
        return statistics, sums.hidden

    def gradient(self, known: Statistics, by: RowGradients, sums: GradientSums, chunk_rows: int) -> None:
        """Compute the logits of all rows again, and add their gradient to `sums`.

        Args:
            known: statistics of all rows.
            by: the gradient of the loss, of all rows.
            sums: the gradients to add to.
            chunk_rows: rows of a chunk.
        """
        for rows in slices(len(self.hidden), chunk_rows):
            sums.add(rows, by.at(rows).through(self.chunk(rows), known.at(rows)))

    def size(self) -> Size:
        """Return the size, by which a plan is chosen."""
        wide = wide_dtype(self.hidden.dtype)
        chunk_class, dtype = self.setting.kind, self.setting.dtype or self.hidden.dtype
        table_bytes = dtype.itemsize + (self.hidden.element_size() if dtype != self.hidden.dtype else 0)
        row_bytes = table_bytes if chunk_class.narrow else chunk_class.tables * wide.itemsize
        if self.rows.needs_vocabulary_logp and self.rows.support and self.rows.support.has_changed_vocabulary:
            row_bytes *= 2  # `SupportChunk` copies rows
        rows, width = self.hidden.shape
        item = self.hidden.element_size()
        return Size(rows, width, len(self.head.weight), item=item, row_bytes=row_bytes, wide=wide.itemsize)

    def chunk_rows(self, chunk_bytes: int | None, wants: Gradients) -> int:
        """Return the number of rows whose tables fit `chunk_bytes`; None selects the default of the device."""
        size = self.size()
        if chunk_bytes is not None:
            return size.chunk(chunk_bytes)
        if self.hidden.device.type == "cpu":
            return max(size.chunk(_CPU_CHUNK), _CPU_ROWS)
        if size.rows <= size.chunk(MIN_CHUNK_BYTES):
            return size.chunk(MIN_CHUNK_BYTES)
        if not self.hidden.is_cuda or torch.are_deterministic_algorithms_enabled():
            return size.chunk(FIXED_CHUNK_BYTES)
        return size.chunk(device_chunk_bytes(size, wants, free_bytes(self.hidden.device)))

    def _empty(self) -> Statistics:
        count = 4 if self.rows.needs_vocabulary_logp else 3
        return Statistics(*(self.hidden.new_empty(len(self.hidden), dtype=self.wide) for _ in range(count)))

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums."""
        return wide_dtype(self.hidden.dtype)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that torch can still allocate on a CUDA device: unused, or reserved and not allocated.

    It does not synchronize with the device.
    """
    unused, _ = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    reserved, allocated = (stats.get(f"{kind}_bytes.all.current", 0) for kind in ("reserved", "allocated"))
    return unused + reserved - allocated


def chunk_kind(hidden: Tensor, dtype: torch.dtype | None, epilogue: Epilogue | None) -> type[Chunk]:
    """Return the class that computes a chunk for an epilogue.

    The default is Triton on CUDA if it is installed and sums are float32, and plain torch otherwise.

    Raises:
        ArgumentError: if the epilogue does not exist or cannot run here.
    """
    is_float32 = hidden.dtype != torch.float64 and dtype != torch.float64
    if epilogue is None:
        epilogue = "triton" if hidden.is_cuda and is_float32 and find_spec("triton") else "torch"
    if epilogue == "torch":
        return Chunk
    if not is_float32:
        raise ArgumentError(
            f"TG-MODEL-009: the epilogue {epilogue!r} sums in float32 and the hidden states are float64. Use 'torch'."
        )
    if epilogue == "compile":
        from tracegrad.model.lm_head_chunked import CompiledChunk

        return CompiledChunk
    if epilogue != "triton" or not find_spec("triton"):
        raise ArgumentError(
            f"TG-MODEL-010: there is no epilogue {epilogue!r} here. Use 'torch', 'compile', or 'triton' on CUDA."
        )
    from tracegrad.model.lm_head_triton import INTERPRETED, TritonChunk

    if not hidden.is_cuda and not INTERPRETED:
        raise ArgumentError(
            f"TG-MODEL-011: the hidden states are on {hidden.device} and Triton kernels run on CUDA. Use 'torch' or "
            "'compile'. TRITON_INTERPRET=1 tries the kernels on CPU."
        )
    return TritonChunk


def inverse_of(inv_temperature: Tensor | float, hidden: Tensor) -> Tensor | None:
    """Return the inverse temperatures [U] in the dtype of the sums; None if they are 1.

    The values of a tensor are checked only on CPU.
    """
    if not isinstance(inv_temperature, Tensor):
        if inv_temperature == 1.0:
            return None
        inv_temperature = hidden.new_tensor(inv_temperature, dtype=wide_dtype(hidden.dtype))
    inverse = inv_temperature.detach().to(hidden.device, wide_dtype(hidden.dtype)).expand(len(hidden))
    return None if inverse.device.type == "cpu" and bool((inverse == 1).all()) else inverse


def check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """Raise ArgumentError unless the shapes are [U, H], [V, H], [U] and [V]."""
    fits = hidden.ndim == 2 and weight.ndim == 2 and hidden.shape[1] == weight.shape[1]
    if not fits or target.shape != hidden.shape[:1] or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = ", ".join(str(list(x.shape)) for x in (hidden, weight, target))
        raise ArgumentError(
            f"TG-MODEL-012: hidden, weight and target have shapes {shapes}, bias "
            f"{None if bias is None else list(bias.shape)}. "
            "They must be [U, H], [V, H], [U] and [V]. Select the rows to score before the call."
        )


class _TokenLogprobs(torch.autograd.Function):
    """Logprobs and entropies by chunks of rows. Backward computes the logits again, or scales the kept gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        inverse: Tensor | None,
        support: Support | None,
        entropy_over_support: bool,
        setting: HeadSettings,
        chunk_bytes: int | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.restriction = (support, entropy_over_support)
        problem = HeadProblem.of(hidden, weight, bias, Rows(target, inverse, *ctx.restriction), setting)
        wants = Gradients(*ctx.needs_input_grad[:3], entropy=False)  # the loss is unknown here, so never "one-pass"
        ctx.chunk_rows = problem.chunk_rows(chunk_bytes, wants)
        ctx.set_materialize_grads(False)
        slopes = None
        if choose_plan(problem.size(), wants, ctx.chunk_rows).name == "frozen":
            statistics, slopes = problem.statistics_and_gradient(ctx.chunk_rows)
        else:
            statistics = problem.statistics(ctx.chunk_rows)
        # Save the parameters after their cast: otherwise backward would cast the weight of a float32 model again.
        ctx.save_for_backward(hidden, problem.head.weight, problem.head.bias, target, inverse, *statistics[:3], slopes)
        ctx.setting, ctx.dtypes = setting, (weight.dtype, None if bias is None else bias.dtype)
        return statistics.logp, statistics.entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_logp, d_entropy = grad_outputs
        hidden, weight, bias, target, inverse, lse, logp, entropy, slopes = ctx.saved_tensors
        if d_logp is None and d_entropy is None:
            return (None,) * 9
        d_logp = torch.zeros_like(lse) if d_logp is None else d_logp
        if slopes is not None and d_entropy is None:
            return (d_logp[:, None] * slopes).to(hidden.dtype), *(None,) * 8
        problem = HeadProblem.of(hidden, weight, bias, Rows(target, inverse, *ctx.restriction), ctx.setting)
        sums = GradientSums(hidden, problem.head, ctx.needs_input_grad[:3])
        problem.gradient(Statistics(lse, logp, entropy), RowGradients(d_logp, d_entropy), sums, ctx.chunk_rows)
        return *sums.gradients(*ctx.dtypes), *(None,) * 6
