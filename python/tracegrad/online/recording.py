"""Roll out and score tasks into a folder, group by group, without training: `record`.

The folder has the layout of a run: `tracegrad.read`, `doctor` and `train` accept its files.
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
from tracegrad.online.buffer import GroupReader, UnscoredGroups
from tracegrad.online.collector import Collector, Failures, GroupFilter, RolloutCounters, count_groups_on_disk
from tracegrad.online.options import RolloutConfig
from tracegrad.online.rollout_workers import RolloutSpec
from tracegrad.online.server_pool import ServerPool
from tracegrad.rollout.client import Servers
from tracegrad.storage.remote import require_local_path
from tracegrad.storage.run_dir import RunDirectory

POLL_S, LINE_S = 0.05, 10.0


@dataclass(frozen=True)
class RecordResult:
    """Result of `record`.

    Args:
        file: file written by this call; None if there was nothing to roll out.
        groups, trajectories, failed: counts of this call; all groups are complete. A trajectory whose scoring failed
            counts as failed.
        without_reward: trajectories that did not fail and got no reward from any function.
        before: groups that existed before.
        reward: mean of the known rewards; NaN if there are none.
        failures: by source, "playing" or "reward function NAME": number of trajectories, and the first failure.
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
class FixedConcurrency:
    """Limit of `record`: a fixed number of groups in flight, whatever their rewards; `StalenessLimit` is the limit of
    a run."""

    groups: int
    counts: RolloutCounters

    @property
    def most(self) -> int:
        """Maximum number of groups consumed at once."""
        return self.groups

    def allowed(self, taken: int, dull: int) -> int:
        """Return how many groups may have been started."""
        return self.counts.finished + self.groups


def record(
    tasks: Iterable[Any],
    *,
    rewards: Any = None,
    weights: Sequence[float] | None = None,
    tools: Any = None,
    environment: Any = None,
    agent: Any = None,
    play: RolloutConfig | None = None,
    servers: Sequence[str],
    key: str | None = None,
    logprob_kind: str = "raw",
    groups: int | None = None,
    parallel: int = 8,
    out: str | Path,
    resume: bool = False,
    say: Callable[[str], None] = print,
) -> RecordResult:
    """Roll out each task once, as a group, and write the group once all of it is scored.

    Args:
        tasks: a list or iterable, read in order; the number of a task is the name of its group.
        rewards, weights, tools, environment, agent: as for `train`.
        play: rollout options.
        servers: URLs of OpenAI-compatible servers that return token ids, such as vLLM.
        key: token of the servers.
        logprob_kind: kind of their logprobs: "raw", vLLM's default, or "processed", after temperature and top-p.
        groups: maximum number of groups; default: all tasks.
        parallel: groups in flight at once.
        out: output folder.
        resume: leave out the groups that are in `out` already; groups that are rolled out but not scored are scored.
        say: receives log lines.

    Raises:
        ArgumentError: if arguments do not fit together, or `out` contains groups and `resume` is False.
        TracegradError: if a server, the folder or the rollouts fail permanently.
    """
    out = require_local_path(out)
    for name, value in (("groups", 1 if groups is None else groups), ("parallel", parallel)):
        if value < 1:
            raise ArgumentError(f"TG-ONLINE-023: {name} is {value}. Nothing would be played. It must be at least 1.")
    contract = RolloutSpec.of(agent=agent, environment=environment, tools=tools, rewards=rewards, weights=weights)
    with RunDirectory(out).locked():
        folder, signal = out / buffer.ROLLOUT_FOLDER, GroupFilter(free=True)
        done, _ = count_groups_on_disk(GroupReader(folder), signal)
        stored = len(UnscoredGroups(out).groups)
        if (done or stored) and not resume:
            unscored = f" and {stored:,} that are not scored" if stored else ""
            raise ArgumentError(
                f"TG-ONLINE-024: {out} holds {len(done):,} groups{unscored}. Others of the same names would be added "
                "to them. Go on with resume=True, or give another out."
            )
        entries = ((number, task) for number, task in enumerate(islice(tasks, groups)) if number not in done)
        counts = RolloutCounters()
        with ExitStack() as stack:
            link = ServerPool(lambda: Servers(servers, model="", key=key), say=say)
            settings = {"signal": signal, "counts": counts, "logprob_kind": logprob_kind, "for_training": False}
            collector = contract.collector(
                stack, entries, link, folder, FixedConcurrency(parallel, counts), play or RolloutConfig(), **settings
            )
            stack.enter_context(link)
            collector.begin()
            _wait(collector, counts, say)
        file = collector.file if counts.finished else None
        counters = counts.finished, counts.trajectories, counts.failed, len(done), counts.reward
        return RecordResult(file, *counters, counts.without_reward, counts.failures)


def _wait(collector: Collector, counts: RolloutCounters, say: Callable[[str], None]) -> None:
    """Wait until all tasks are rolled out, and print a line every `LINE_S` seconds."""
    next_line = time.monotonic() + LINE_S
    while not collector.over:
        collector.check()
        collector.wait(POLL_S)
        if time.monotonic() > next_line:
            next_line += LINE_S
            say(
                f"playing  {counts.trajectories:,} trajectories in {counts.finished:,} groups, {counts.failed:,} failed"
            )
