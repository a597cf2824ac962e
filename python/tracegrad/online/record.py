"""`record`: tasks played and scored into a folder by whole groups, and nothing trained.

The folder is that of a run: `tracegrad.read`, `doctor` and `train` take its files. Called by the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad.errors import ArgumentError
from tracegrad.online import frames
from tracegrad.online.collector import Collector, Counts, contract_of
from tracegrad.online.frames import Follower, Place, Writer
from tracegrad.online.link import Link
from tracegrad.online.options import Online
from tracegrad.online.scoring import GroupScore
from tracegrad.online.signal import Signal
from tracegrad.rollout.server import Servers

POLL_S, LINE_S = 0.05, 10.0
IDLE = ("steps", "max_lag", "refill", "eval_every", "sync")
"""Options of a run that only training gives a meaning."""


@dataclass(frozen=True)
class Recorded:
    """What is in the folder afterwards.

    Args:
        file: the file of this call.
        groups, trajectories, failed: of this call, all whole.
        before: groups that were there already.
        reward: mean of the known ones; NaN where there is none.
    """

    file: Path
    groups: int
    trajectories: int
    failed: int
    before: int
    reward: float


class Kept(Signal):
    """Rewards that nobody trains on yet: their names are free."""

    def check(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Refuses nothing."""


class Tally(Writer):
    """A writer that keeps the known rewards of what it wrote."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rewards: list[float] = []

    def write(self, records: Sequence[dict[str, Any]]) -> Place:
        """Appends one group."""
        place = super().write(records)
        self.rewards += [each["reward"] for each in records if each.get("reward") is not None]
        return place


@dataclass
class Open:
    """So many groups at once, whatever became of those before; what `Pace` is for a run."""

    groups: int
    counts: Counts

    def allowed(self, taken: int, dull: int) -> int:
        """Groups that may have been begun."""
        return self.counts.finished + self.groups


def record(
    tasks: Iterable[Any],
    *,
    rewards: Any = None,
    weights: Sequence[float] | None = None,
    tools: Any = None,
    environment: Any = None,
    agent: Any = None,
    online: Online | None = None,
    servers: Sequence[str],
    key: str | None = None,
    logprob_kind: str = "raw",
    groups: int | None = None,
    parallel: int = 8,
    out: str | Path,
    resume: bool = False,
    say: Callable[[str], None] = print,
) -> Recorded:
    """Plays each task once, as a group, and writes it when all of it is scored.

    Args:
        tasks: a list, or what can be iterated, in its order; a task's number is its group's name.
        rewards, weights, tools, environment, agent: as for `train`.
        online: of playing; those options that only training gives a meaning are not read.
        servers: URLs of OpenAI-compatible servers that return token ids, such as vLLM.
        key: their token.
        logprob_kind: what their logprobs are of: "raw", vLLM's default, or "processed", after temperature and top-p.
        groups: at most so many; default all tasks.
        parallel: groups that are played at once.
        out: the folder.
        resume: leave out the groups that are in `out` already.
        say: takes a line now and then.

    Raises:
        ArgumentError: if arguments do not fit together, or `out` holds groups and `resume` is False.
        TracegradError: if a server, the folder or what plays fails for good.
    """
    told, out = online or Online(), Path(out)
    for name, value in (("groups", 1 if groups is None else groups), ("parallel", parallel)):
        if value < 1:
            raise ArgumentError(f"{name} is {value}. Nothing would be played. It must be at least 1.")
    contract, scored = contract_of(agent, environment, tools, rewards)
    done = _there(out / frames.FOLDER)
    if done and not resume:
        raise ArgumentError(
            f"{out} holds {len(done):,} groups. Others of the same names would be added to them. Go on with "
            "resume=True (--resume), or give another out."
        )
    entries = ((number, task) for number, task in enumerate(islice(tasks, groups)) if number not in done)
    counts = Counts()
    with ExitStack() as stack:
        stack.enter_context(writer := Tally(out / frames.FOLDER))
        score = GroupScore(rewards, weights) if scored else None
        if score is not None:
            stack.callback(score.close)
        link = stack.enter_context(Link(lambda: Servers(servers, model="", key=key)))
        collector = Collector(
            contract,
            entries,
            link,
            writer,
            Open(parallel, counts),  # type: ignore[arg-type]
            told,
            score=score,
            signal=Kept(),
            counts=counts,
            by_address=agent is not None,
            logprob_kind=logprob_kind,
        )
        collector.begin()
        _wait(collector, counts, say)
    mean = float(np.mean(writer.rewards)) if writer.rewards else float("nan")
    return Recorded(writer.folder / writer.name, counts.finished, counts.trajectories, counts.failed, len(done), mean)


def _wait(collector: Collector, counts: Counts, say: Callable[[str], None]) -> None:
    """Until all is played, with a line now and then."""
    next_line = time.monotonic() + LINE_S
    while not collector.over:
        collector.check()
        collector.wait(POLL_S)
        if time.monotonic() > next_line:
            next_line += LINE_S
            say(
                f"playing  {counts.trajectories:,} trajectories in {counts.finished:,} groups, {counts.failed:,} failed"
            )


def _there(folder: Path) -> set[int]:
    """The groups that are whole in a folder."""
    found = Follower(folder).look() if folder.exists() else ()
    names = [next(iter(traces.groups), None) or "" for _, traces in found]
    return {int(name) for name in names if name.isdecimal()}
