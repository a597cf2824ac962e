"""What ranks would say to one another in a step: calls and bytes of parameters and gradients, from a model's shapes.

Here is `Traffic`. Counted as torch's wrappers make their calls: FSDP2 by decoder layer and the rest as one, DDP by its
buckets, from the second step on. Numbers of metrics and agreements, a few hundred bytes each, are left out. Called by
the forecast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from tracegrad.learner.memory import Memory, layers_of

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
