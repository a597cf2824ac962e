"""The processes of a run as one: exact sums, maxima and decisions over ranks, on the host.

Here is `Ranks`. Gradients and parameters are the business of `parallel`; nothing here touches a model. Called by the
loop, the step and the checkpoint.
"""

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tracegrad.errors import ArgumentError

_TIMEOUT = timedelta(minutes=30)
_WORD, _HEARD = "tracegrad/stopped", "tracegrad/heard"  # keys of the store that all ranks see
_PATIENCE_S = 10.0


class OtherRankFailed(OSError):
    """Another rank could not do its part, and says why."""


@dataclass(frozen=True)
class Ranks:
    """Which process this is, and how it speaks to the others. Every rank makes the same calls in the same order.

    Args:
        world, rank: how many processes, and which of them this is.
        group: for collectives on the CPU; None where there is one process.
        beside: a second such group, for the thread that prepares the next step.

    >>> Ranks().all_reduce(np.ones(2), "sum").tolist()
    [1.0, 1.0]
    """

    world: int = 1
    rank: int = 0
    group: Any = None
    beside: Any = None

    @classmethod
    def join(cls) -> "Ranks":
        """The ranks of the default process group, which torchrun's variables open where nobody has; else one process.

        Raises:
            ArgumentError: if torchrun started this process and the group cannot be opened.
        """
        if not dist.is_available() or not (dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1):
            return cls()
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            try:
                dist.init_process_group(backend, timeout=_TIMEOUT)
            except (ValueError, RuntimeError) as error:
                raise ArgumentError(
                    f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and the process group does not open: "
                    f"{str(error).splitlines()[0]}. The ranks cannot share a gradient. Start the run with torchrun."
                ) from error
        return cls.of_open_group()

    @classmethod
    def of_open_group(cls) -> "Ranks":
        """The ranks of the default process group as it is; one process where there is none."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        if _kept and _kept[0] is dist.group.WORLD:
            return _kept[1]
        groups = [dist.new_group(backend="gloo", timeout=_TIMEOUT) for _ in range(2)]
        ranks = cls(dist.get_world_size(), dist.get_rank(), *groups)
        _kept[:] = [dist.group.WORLD, ranks]
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
            dist.distributed_c10d._get_default_store().set(f"tracegrad/{word}", "")

    def finds_word(self, word: str) -> bool:
        """Whether a rank has left this word."""
        return not self.alone and dist.distributed_c10d._get_default_store().check([f"tracegrad/{word}"])

    def agree(self, error: Exception | None) -> None:
        """Raises `error` where there is one, and on the other ranks that one of them failed: nobody waits for it.

        Raises:
            Exception: `error`; OtherRankFailed on a rank whose own work went well while another's did not.
        """
        failed = self.largest(0 if error is None else 1)
        if error is not None:
            raise error
        if failed:
            raise OtherRankFailed(0, "another rank could not do its part")

    def tell(self, said: str) -> None:
        """Leaves word that this rank stops, and closes its connections, which wakes the ranks that wait for it.

        The process group is gone after this. Waits a few seconds until the others have read the word.
        """
        if self.alone or not dist.is_initialized():
            return
        store = dist.distributed_c10d._get_default_store()
        store.set(_WORD, f"rank {self.rank}, {said}")
        dist.destroy_process_group()
        until = time.monotonic() + _PATIENCE_S
        while store.add(_HEARD, 0) < self.world - 1 and time.monotonic() < until:
            time.sleep(0.05)

    def heard(self) -> str:
        """What a rank that stopped has told; "" where none has."""
        if self.alone:
            return ""
        try:
            store = dist.distributed_c10d._get_default_store()
            if not store.check([_WORD]):
                return ""
            store.add(_HEARD, 1)
            return store.get(_WORD).decode()
        except (RuntimeError, ValueError):  # the store went with the rank that kept it
            return ""


_kept: list[Any] = []
"""The default group and its `Ranks`: groups are made once, as making them is a collective call."""
