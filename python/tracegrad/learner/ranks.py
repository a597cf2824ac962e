"""The processes of a run as one: exact sums, maxima and decisions over ranks, on the host.

Here is `Ranks`. Gradients and parameters are the business of `parallel`; nothing here touches a model. Called by the
loop, the step and the checkpoint.
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tracegrad.errors import ArgumentError

TIMEOUT_S = 1800.0
"""Seconds that ranks wait for one another, where a run is not told otherwise."""
_WORD, _HEARD, _AT, _WAITED = "stopped", "heard", "at", "waited"  # keys of the store that all ranks see
_HERE = "tracegrad/here"
_PATIENCE_S = 10.0
_REPORT_S = 5.0


class OtherRankFailed(OSError):
    """Another rank could not do its part, and says why."""


@dataclass(frozen=True)
class Ranks:
    """Which process this is, and how it speaks to the others. Every rank makes the same calls in the same order.

    Args:
        world, rank: how many processes, and which of them this is.
        group: for collectives on the CPU; None where there is one process.
        beside: a second such group, for the thread that prepares the next step.
        token: of this group alone, in the keys of the store that torchrun may keep over restarts.

    >>> Ranks().all_reduce(np.ones(2), "sum").tolist()
    [1.0, 1.0]
    """

    world: int = 1
    rank: int = 0
    group: Any = None
    beside: Any = None
    token: str = ""

    @classmethod
    def join(cls, timeout_s: float = TIMEOUT_S) -> "Ranks":
        """The ranks of the default process group, which torchrun's variables open where nobody has; else one process.

        Args:
            timeout_s: how long ranks wait for one another, here and later.

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
        """The ranks of the default process group as it is; one process where there is none.

        Args:
            timeout_s: how long ranks wait for one another from now on; default as before, or half an hour.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        if not (_kept and _kept[0] is dist.group.WORLD):
            groups: list[Any] = [dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S)) for _ in range(2)]
            token = [secrets.token_hex(8)]
            dist.broadcast_object_list(token, 0, group=groups[0])
            ranks = cls(dist.get_world_size(), dist.get_rank(), groups[0], groups[1], token[0])
            _kept[:] = [dist.group.WORLD, ranks]
        ranks = _kept[1]
        if timeout_s is not None:
            for group in (ranks.group, ranks.beside, dist.group.WORLD):
                _set_timeout(timedelta(seconds=timeout_s), group)
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
            dist.distributed_c10d._get_default_store().set(self._key(word), "")

    def finds_word(self, word: str) -> bool:
        """Whether a rank has left this word."""
        return not self.alone and dist.distributed_c10d._get_default_store().check([self._key(word)])

    def everybody(self, value: Any) -> list[Any]:
        """The value of every rank, in order, on every rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, error: Exception | None) -> None:
        """Raises `error` where there is one, and on the other ranks that one of them failed: nobody waits for it.

        Raises:
            Exception: `error`; OtherRankFailed on a rank whose own work went well while another's did not, with its
                words.
        """
        failed = self.largest(0 if error is None else 1)
        if not failed:
            return
        said = self.everybody("" if error is None else f"{error}"[:2000])
        if error is not None:
            raise error
        rank = next(number for number, words in enumerate(said) if words)
        raise OtherRankFailed(0, f"another rank could not do its part: rank {rank}, {said[rank]}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around work of each rank that needs no other, after which all wait for one another and fail together."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.agree(error)

    def at(self, where: str) -> None:
        """Leaves word of where this rank is, for the others to tell where it hangs."""
        if not self.alone and dist.is_initialized():
            dist.distributed_c10d._get_default_store().set(self._key(_AT, self.rank), f"{time.time():.0f} {where}")

    def absent(self, error: Exception) -> str:
        """Which ranks did not come, after a collective call that has failed; "" where the failure is another.

        The ranks that waited, too, say so. Closes this rank's connections, which wakes the others that wait; the
        process group is gone after this.

        Args:
            error: what the call has raised.
        """
        if self.alone or not dist.is_initialized() or not _of_others(error):
            return ""
        store, until = dist.distributed_c10d._get_default_store(), time.monotonic() + _REPORT_S
        late = any(word in str(error) for word in ("Timed out", "timed out", "timeout"))
        try:
            store.set(self._key(_WAITED, self.rank), "")
            if late:
                store.set(self._key(_WAITED), "")
            dist.destroy_process_group()
            while (gone := self._silent(store)) and time.monotonic() < until:
                time.sleep(0.05)
            how = "did not come within train.timeout" if store.check([self._key(_WAITED)]) else "has ended"
            said = [f"rank {rank} {how}; it was last seen {self._seen(store, rank)}" for rank in gone]
            if self.first:
                time.sleep(min(1.0, max(0.0, until - time.monotonic())))  # the store may be this rank's
        except (RuntimeError, ValueError):  # the store went with the rank that kept it
            return "the rank that kept the store of all ranks has ended"
        return ", ".join(said)

    def _silent(self, store: Any) -> list[int]:
        return [rank for rank in range(self.world) if not store.check([self._key(_WAITED, rank)])]

    def _seen(self, store: Any, rank: int) -> str:
        if not store.check([key := self._key(_AT, rank)]):
            return "before its first step"
        when, _, where = store.get(key).decode().partition(" ")
        return f"at {where}, {max(0, round(time.time() - float(when)))} s ago"

    def _key(self, name: str, rank: int | None = None) -> str:
        return f"tracegrad/{self.token}/{name}" + ("" if rank is None else f"/{rank}")

    def tell(self, said: str) -> None:
        """Leaves word that this rank stops, and closes its connections, which wakes the ranks that wait for it.

        The process group is gone after this. Waits a few seconds until the others have read the word.
        """
        if self.alone or not dist.is_initialized():
            return
        store, until = dist.distributed_c10d._get_default_store(), time.monotonic() + _PATIENCE_S
        with suppress(RuntimeError, ValueError):  # the store went with the rank that kept it, who has ended before
            store.set(self._key(_WORD), f"rank {self.rank}, {said}")
            dist.destroy_process_group()
            while store.add(self._key(_HEARD), 0) < self.world - 1 and time.monotonic() < until:
                time.sleep(0.05)

    def heard(self) -> str:
        """What a rank that stopped has told; "" where none has."""
        if self.alone:
            return ""
        try:
            store = dist.distributed_c10d._get_default_store()
            if not store.check([self._key(_WORD)]):
                return ""
            store.add(self._key(_HEARD), 1)
            return store.get(self._key(_WORD)).decode()
        except (RuntimeError, ValueError):  # the store went with the rank that kept it
            return ""


def _open_group(timeout_s: float) -> None:
    """Opens the default process group by torchrun's variables; says which ranks do not come."""
    from torch.distributed.rendezvous import rendezvous

    backend, wait = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timedelta(seconds=timeout_s)
    lacks = ""
    try:
        store, rank, world = next(rendezvous("env://", timeout=wait))
        store.set_timeout(wait)
        store.set(f"{_HERE}/{rank}", "")
        names = {other: f"{_HERE}/{other}" for other in range(world)}
        try:
            store.wait([*names.values()], wait)
        except RuntimeError:
            lacks = ", ".join(f"rank {other}" for other, name in names.items() if not store.check([name]))
            raise
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
    except (ValueError, RuntimeError) as error:
        why = f"{lacks} did not come within train.timeout" if lacks else str(error).splitlines()[0]
        raise ArgumentError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and the process group does not open: {why}. The ranks cannot "
            "share a gradient. Start the run with torchrun."
        ) from error


def _of_others(error: BaseException) -> bool:
    """Whether a collective call failed by what another rank did, or did not."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _set_timeout(timeout: timedelta, group: Any) -> None:
    public = getattr(dist, "set_timeout", None)  # of torch 2.15
    (public or dist.distributed_c10d._set_pg_timeout)(timeout, group)


_kept: list[Any] = []
"""The default group and its `Ranks`: groups are made once, as making them is a collective call."""
