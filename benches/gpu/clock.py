"""Milliseconds and peak memory of something that runs on the device: medians, interleaved, separate from failures."""

from __future__ import annotations

import statistics
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """Counts what torch allocates on the CPU while entered: storages that operations make, until they are freed.

    For a tensor that wraps others, such as a shard of FSDP, the others are counted; a storage that is emptied and
    filled again, as FSDP's full parameters are, has the size that it has. Memory that an operation allocates and frees
    internally is not counted.
    """

    supports_higher_order_operators = True  # flex_attention is one

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Any:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = self._resize(storage, size)
            if storage._cdata in self._seen:
                self._grow(storage._cdata, size)
            return out

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile while this counts; it would run flex_attention unfused otherwise."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given and storage._cdata not in self._seen:
                self._take(storage)
        return out

    def _take(self, storage: torch.UntypedStorage) -> None:
        self._seen[storage._cdata] = 0
        self._grow(storage._cdata, storage.nbytes())
        weakref.finalize(storage, self._free, storage._cdata)

    def _grow(self, place: int, size: int) -> None:
        self.now += size - self._seen[place]
        self._seen[place] = size
        self.peak = max(self.peak, self.now)

    def _free(self, place: int) -> None:
        self.now -= self._seen.pop(place)


def _storages(found: Any) -> Iterator[torch.UntypedStorage]:
    """Bytes of all tensors in it; for a tensor that wraps others, of these."""
    for tensor in tree_leaves(found):
        if isinstance(tensor, torch.Tensor):
            if is_traceable_wrapper_subclass(tensor):
                yield from _storages([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
            else:
                yield tensor.untyped_storage()


class Clock:
    """Times functions on one device.

    Args:
        device: "cuda", or "cpu" to see that everything runs.
        warm: runs before the first that counts.
        repeat: runs that count; their median is reported with their spread.
    """

    def __init__(self, device: str, warm: int = 3, repeat: int = 10) -> None:
        self.device, self.warm, self.repeat = device, warm, repeat
        self.cuda = device.startswith("cuda")
        self.until = float("inf")  # no arm and no round is started after this time of `time.perf_counter`
        self.report: Callable[[dict[str, dict[str, Any]]], None] = lambda _: None  # called with the results so far

    def ms(self, run: Callable[[], Any]) -> float:
        """One run."""
        if not self.cuda:
            began = time.perf_counter()
            run()
            return 1000 * (time.perf_counter() - began)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        return began.elapsed_time(ended)

    def peak(self, run: Callable[[], Any]) -> int:
        """Bytes in addition to those allocated before."""
        if not self.cuda:
            with Allocated() as allocated:
                run()
            return allocated.peak
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def compare(self, arms: Mapping[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
        """Each arm's median, spread and peak; runs are interleaved. An arm that cannot run has a reason instead."""
        found: dict[str, dict[str, Any]] = {}
        for name, run in arms.items():
            late = found and time.perf_counter() > self.until
            found[name] = {"skipped": "not started: the time of this row is over"} if late else self._first(run)
            self.report(found)
        runs: dict[str, list[float]] = {name: [] for name, told in found.items() if "skipped" not in told}
        for number in range(self.repeat):
            if number and time.perf_counter() > self.until:
                break
            for name, taken in runs.items():
                taken.append(self.ms(arms[name]))
                spread = max(taken) - min(taken)
                found[name] |= {"ms": statistics.median(taken), "spread_ms": spread, "runs": len(taken)}
            self.report(found)
        return found

    def _first(self, run: Callable[[], Any]) -> dict[str, Any]:
        try:
            peak = self.peak(run)
            for _ in range(self.warm):
                self.ms(run)
        except Exception as error:
            if self.cuda:
                torch.cuda.empty_cache()
            return skipped(error)
        return {"peak_bytes": peak}


def skipped(error: Exception) -> dict[str, str]:
    """The report of an arm or a row that is not installed, does not run here, or fails: nothing stops the others."""
    where = traceback.extract_tb(error.__traceback__)[-1:]
    lines = [f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in where]
    first = (str(error).strip().splitlines() or [""])[0]
    return {"skipped": f"{type(error).__name__}: {first[:200]}", "raised_at": " ".join(lines)}


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: if the process is killed, the old file remains."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
