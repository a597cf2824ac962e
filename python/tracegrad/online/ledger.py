"""Which groups each step took: a file that only grows, so that a run can be cut anywhere and made again bit for bit.

`steps.jsonl` has a line for each step. The first rank writes it before the step is taken; the other ranks, a run that
goes on, and a replay read it.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracegrad import outputs
from tracegrad.errors import FormatError, TracegradError
from tracegrad.manifest import count
from tracegrad.online.frames import Place

NAME = "steps.jsonl"


@dataclass(frozen=True)
class Taken:
    """The groups of one step, in their order.

    Args:
        step: from 0.
        version: of the policy before it.
        groups: where they stand.
        dull: those of `groups` that are left out, as their rewards are equal or unknown.
    """

    step: int
    version: int
    groups: tuple[Place, ...]
    dull: tuple[int, ...] = ()

    @property
    def trained(self) -> tuple[Place, ...]:
        """The groups that the step is made of."""
        left_out = set(self.dull)
        return tuple(place for index, place in enumerate(self.groups) if index not in left_out)


class Ledger:
    """The steps of a run.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.steps: list[Taken] = []
        self._read = 0
        self.refresh()

    def refresh(self) -> None:
        """Takes up the lines that others have added; a last line that was cut off is not there."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self.steps.append(_taken(line, self.path, len(self.steps)))
        self._read += len(whole)

    def add(self, version: int, groups: Sequence[Place], dull: Sequence[int] = ()) -> Taken:
        """Writes the line of the next step; it is on the disk when this returns."""
        taken = Taken(len(self.steps), version, tuple(groups), tuple(dull))
        line = json.dumps(_plain(taken), separators=(",", ":")) + "\n"
        try:
            file = outputs.descriptor(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.ftruncate(file, self._read)  # a line that a killed run has begun
                os.pwrite(file, line.encode(), self._read)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise TracegradError(
                f"{self.path}: {error.strerror}. The step could not be made again. Make room and go on from here."
            ) from error
        self.steps.append(taken)
        self._read += len(line)
        return taken

    def wait(self, step: int, stopped: Callable[[], bool], poll_s: float = 0.05) -> Taken | None:
        """The line of a step as soon as it is there: for ranks that do not write. None where the run was stopped."""
        while len(self.steps) <= step:
            over = stopped()
            self.refresh()  # a line may have come just before the end
            if over and len(self.steps) <= step:
                return None
            time.sleep(poll_s if len(self.steps) <= step else 0.0)
        return self.steps[step]


def _plain(taken: Taken) -> dict[str, Any]:
    groups = [[place.file, place.offset, place.length] for place in taken.groups]
    return {"step": taken.step, "version": taken.version, "groups": groups, "dull": list(taken.dull)}


def _taken(line: bytes, path: Path, number: int) -> Taken:
    try:
        told = json.loads(line)
        groups = tuple(_place(*each) for each in told["groups"])
        taken = Taken(count(told["step"]), count(told["version"]), groups, tuple(map(count, told["dull"])))
        if taken.step != number or any(index >= len(groups) for index in taken.dull):
            raise ValueError("it is not the line that stands here")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(
            f"{path}:{number + 1}: not the line of a step ({str(error)[:80]!r}). Which groups it took is not known. "
            "Copy the run again."
        ) from error
    return taken


def _place(file: Any, offset: Any, length: Any) -> Place:
    if not isinstance(file, str) or not file.endswith(".jsonl.zst") or "/" in file:
        raise ValueError("a file leads out of the folder")
    return Place(file, count(offset), count(length))
