"""`record`: tasks played and scored into a folder by whole groups, and nothing trained.

The folder is that of a run: `tracegrad.read`, `doctor` and `train` take its files. Called by the command line.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.online import buffer
from tracegrad.online.buffer import Follower, Unscored
from tracegrad.online.collector import Collector, Counts, Failures, Signal, counted
from tracegrad.online.options import Play
from tracegrad.online.rollout_workers import Contract
from tracegrad.online.server_pool import Link
from tracegrad.rollout.client import Servers
from tracegrad.storage.remote import place_here
from tracegrad.storage.run_dir import Mirror

POLL_S, LINE_S = 0.05, 10.0


@dataclass(frozen=True)
class Recorded:
    """What is in the folder afterwards.

    Args:
        file: the file of this call; None where there was nothing to play.
        groups, trajectories, failed: of this call, all whole. What could not be scored has failed too.
        without_reward: trajectories that did not fail, and to which no function gave a reward.
        before: groups that were there already.
        reward: mean of the known ones; NaN where there is none.
        failures: by what failed, "playing" or "reward function NAME": how many trajectories, and the first.
    """

    file: Path | None
    groups: int
    trajectories: int
    failed: int
    before: int
    reward: float
    without_reward: int = 0
    failures: Mapping[str, Failures] = field(default_factory=dict)


@dataclass
class Open:
    """So many groups at once, whatever became of those before; what `Pace` is for a run."""

    groups: int
    counts: Counts

    @property
    def most(self) -> int:
        """No more are taken at once."""
        return self.groups

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
    play: Play | None = None,
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
        play: how.
        servers: URLs of OpenAI-compatible servers that return token ids, such as vLLM.
        key: their token.
        logprob_kind: what their logprobs are of: "raw", vLLM's default, or "processed", after temperature and top-p.
        groups: at most so many; default all tasks.
        parallel: groups that are played at once.
        out: the folder.
        resume: leave out the groups that are in `out` already; those that are played and not scored are scored.
        say: takes a line now and then.

    Raises:
        ArgumentError: if arguments do not fit together, or `out` holds groups and `resume` is False.
        TracegradError: if a server, the folder or what plays fails for good.
    """
    out = place_here(out)
    for name, value in (("groups", 1 if groups is None else groups), ("parallel", parallel)):
        if value < 1:
            raise ArgumentError(f"{name} is {value}. Nothing would be played. It must be at least 1.")
    contract = Contract.of(agent=agent, environment=environment, tools=tools, rewards=rewards, weights=weights)
    with Mirror(out).locked():
        folder, signal = out / buffer.FOLDER, Signal(free=True)
        done, _ = counted(Follower(folder), signal)
        kept = len(Unscored(out).groups)
        if (done or kept) and not resume:
            unscored = f" and {kept:,} that are not scored" if kept else ""
            raise ArgumentError(
                f"{out} holds {len(done):,} groups{unscored}. Others of the same names would be added to them. Go on "
                "with resume=True, or give another out."
            )
        entries = ((number, task) for number, task in enumerate(islice(tasks, groups)) if number not in done)
        counts = Counts()
        with ExitStack() as stack:
            link = Link(lambda: Servers(servers, model="", key=key), say=say)
            known = {"signal": signal, "counts": counts, "logprob_kind": logprob_kind, "for_training": False}
            collector = contract.collector(
                stack, entries, link, folder, Open(parallel, counts), play or Play(), **known
            )
            stack.enter_context(link)
            collector.begin()
            _wait(collector, counts, say)
        file = collector.file if counts.finished else None
        told = counts.finished, counts.trajectories, counts.failed, len(done), counts.reward
        return Recorded(file, *told, counts.without_reward, counts.failures)


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
