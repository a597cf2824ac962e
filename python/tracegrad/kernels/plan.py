"""How a head is computed: four plans, chosen from what is needed, and what the choice costs.

Counts alone; no tensors. `head` and `fused` choose by it, `tracegrad.policy` reports it.
"""

from dataclasses import dataclass
from typing import Literal

from tracegrad.errors import ArgumentError

Name = Literal["no-grad", "recompute", "one-pass", "frozen"]

MOST_CHUNK_BYTES = 4 << 30  # beyond it the products with the weight of a real vocabulary get no faster
LEAST_CHUNK_BYTES = 256 << 20  # below it they get slower quickly
FIXED_CHUNK_BYTES = 1 << 30  # where the size must not depend on the memory that happens to be free
_ROWS = 256  # a multiple of the tiles of a matrix product: no tile of a chunk is computed for a few rows


@dataclass(frozen=True)
class Wants:
    """Which gradients are wanted, and whether the loss depends on the entropy with a gradient."""

    hidden: bool = True
    weight: bool = True
    bias: bool = False
    entropy: bool = True

    @property
    def any(self) -> bool:
        """Whether there is a backward pass at all."""
        return self.hidden or self.weight or self.bias

    @property
    def parameters(self) -> bool:
        """Whether the head is trained."""
        return self.weight or self.bias


@dataclass(frozen=True)
class HeadPlan:
    """How the head of U rows is computed.

    Args:
        name: "no-grad": the logits once. "recompute": logits, then again with the gradient, for any loss. "one-pass":
            the loss of a chunk is known while its logits are in memory, so that they become their own gradient.
            "frozen": the head takes no gradient; each row's u = d logp / d hidden is kept in place of its logits.
        why: the reason in words.
        chunk_rows: rows whose logits are in memory at once; the most, where chunks end with traces.
        peak_bytes: most memory beyond hidden states and parameters: one chunk's tables and the gradients.
        flops: of the products with the weight, forward and backward.
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
    """Of a head: rows U, hidden H, vocabulary V; bytes of a hidden state's number, of a chunk's row and of a sum's."""

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

    def gradient_bytes(self, wants: Wants) -> int:
        """Return the bytes of the gradients of hidden states and weight while they are summed."""
        by_hidden = wants.hidden * self.rows * self.hidden * self.item
        return by_hidden + wants.weight * self.vocabulary * self.hidden * self.wide


def device_chunk_bytes(size: Size, wants: Wants, free_bytes: int) -> int:
    """Return the bytes of one chunk's tables on a device with `free_bytes` left: 256 MiB to 4 GiB, a power of two.

    At most half of what is left after the gradients: memory that torch has reserved may be in pieces. Powers of two,
    so that a run that starts again with slightly more or less free memory sums in the same order.

    >>> size, gib = Size(rows=32768, hidden=4096, vocabulary=151936, item=2, row_bytes=2), 1 << 30
    >>> [device_chunk_bytes(size, Wants(), free * gib) >> 20 for free in (1, 4, 6, 10, 70)]
    [256, 512, 1024, 2048, 4096]
    """
    half = max(1, (free_bytes - size.gradient_bytes(wants)) // 2)
    return min(max(1 << (half.bit_length() - 1), LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES)


def choose(
    size: Size, wants: Wants, chunk_rows: int, *, fits: bool = False, unfit: str = "", asked: Name | None = None
) -> HeadPlan:
    """The cheapest plan that is exact, or the one asked for; `unfit` says why the loss cannot be evaluated by chunks.

    >>> choose(Size(1000, 64, 500), Wants(), 100, fits=True).name
    'one-pass'
    """
    frozen = wants.hidden and not wants.parameters and not wants.entropy
    reasons: dict[Name, str] = {}
    if not wants.any:
        reasons["no-grad"] = "nothing takes a gradient"
    else:
        if frozen:
            reasons["frozen"] = "the head takes no gradient and the loss none by the entropy"
        if fits:
            reasons["one-pass"] = "the loss of a chunk is known when its logits are"
        reasons["recompute"] = unfit or "the loss is not known here"
    name = asked or next(iter(reasons))
    if name not in reasons:
        raise ArgumentError(_impossible(name, wants, unfit))
    return _costed(size, wants, chunk_rows, name, reasons[name])


def _impossible(name: Name, wants: Wants, unfit: str) -> str:
    why = {
        "no-grad": "a gradient is wanted",
        "recompute": "nothing takes a gradient",
        "one-pass": unfit or "the loss is not known here",
        "frozen": "the head takes a gradient, or the loss one by the entropy",
    }[name]
    if not wants.any:
        why = "nothing takes a gradient"
    return f"the plan {name!r} is not possible: {why}. Leave plan=None, and one that is will be taken."


def _costed(size: Size, wants: Wants, chunk_rows: int, name: Name, why: str) -> HeadPlan:
    """A product with the weight is 2 U H V FLOPs: for logits, for hidden states and for the weight."""
    products = 1 + wants.hidden + wants.weight + (name == "recompute")
    chunk_rows = max(1, min(chunk_rows, size.rows))
    peak = chunk_rows * size.vocabulary * size.row_bytes
    if name != "no-grad":
        peak += size.gradient_bytes(wants)
    return HeadPlan(name, why, chunk_rows, peak, 2 * products * size.rows * size.hidden * size.vocabulary)
