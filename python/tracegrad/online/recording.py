"""Roll out and score tasks into a folder, group by group, without training: `record`.

The folder has the layout of a run: `tracegrad.read`, `doctor` and `train` accept its files.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
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
from tracegrad.progress import ProgressPrinter, progress_line
from tracegrad.rollout.client import Servers
from tracegrad.storage.remote import require_local_path
from tracegrad.storage.run_dir import RunDirectory

POLL_S = 0.05


@dataclass(frozen=True)
class RecordResult:
    """Result of `record`.

    Args:
        file: file written by this call; None if there was nothing to roll out.
        groups, trajectories, failed: counts of this call; all groups are complete. A trajectory whose scoring failed
            counts as failed.
        without_reward: trajectories that did not fail and got no reward from any function.
        existing_groups: groups that existed before.
        reward: mean of the known rewards; NaN without any.
        failures: by source, "playing" or "reward function NAME": number of trajectories, and the first failure.

    ```python
    import tracegrad as tg


    def short(completions, **columns):
        return [float(len(text) < 3) for text in completions]


    result = tg.online.record(["2+2?"], rewards=[short], servers=["http://127.0.0.1:8000"], out="recorded")
    print(result.groups, result.failed, result.reward)
    traces = tg.read(result.file)
    ```
    """

    file: Path | None
    groups: int
    trajectories: int
    failed: int
    existing_groups: int
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
    def max_groups_per_step(self) -> int:
        """Maximum number of groups consumed at once."""
        return self.groups

    def max_started(self, steps_done: int, zero_std_groups: int) -> int:
        """Return how many groups may have been started."""
        return self.counts.finished + self.groups


def record(
    tasks: Iterable[Any],
    *,
    rewards: Any = None,
    reward_weights: Sequence[float] | None = None,
    tools: Any = None,
    environment: Any = None,
    agent: Any = None,
    rollout: RolloutConfig | None = None,
    servers: Sequence[str],
    key: str | None = None,
    logprob_kind: str = "raw",
    groups: int | None = None,
    concurrency: int = 8,
    out: str | Path,
    resume: bool = False,
    log: Callable[[str], None] = print,
) -> RecordResult:
    """Roll out each task once, as a group, and write the group once all of it is scored.

    Args:
        tasks: a list or iterable, read in order; the number of a task is the name of its group.
        rewards, reward_weights, tools, environment, agent: as for `train`.
        rollout: rollout options.
        servers: URLs of OpenAI-compatible servers that return token ids, such as vLLM.
        key: token of the servers.
        logprob_kind: kind of their logprobs: "raw", vLLM's default, or "processed", after temperature and top-p.
        groups: maximum number of groups; default: all tasks.
        concurrency: groups in flight at once.
        out: output folder.
        resume: leave out the groups that are in `out` already; groups that are rolled out but not scored are scored.
        log: receives log lines.

    Raises:
        ArgumentError: if arguments do not fit together, or `out` contains groups and `resume` is False.
        TracegradError: if a server, the folder or the rollouts fail permanently.

    ```python
    import tracegrad as tg
    from tracegrad.online import RolloutConfig


    def short(completions, **columns):
        return [float(len(text) < 3) for text in completions]


    result = tg.online.record(
        ["2+2?", "3+4?"],
        rewards=[short],
        rollout=RolloutConfig(group_size=4),
        servers=["http://127.0.0.1:8000"],
        out="recorded",
    )
    traces = tg.read(result.file)  # two groups of four traces
    ```
    """
    out = require_local_path(out)
    for name, value in (("groups", 1 if groups is None else groups), ("parallel", concurrency)):
        if value < 1:
            raise ArgumentError(f"TG-ONLINE-023: {name} is {value}. It must be at least 1.")
    rollout_spec = RolloutSpec.of(
        agent=agent, environment=environment, tools=tools, rewards=rewards, weights=reward_weights
    )
    with RunDirectory(out).lock():
        folder, group_filter = out / buffer.ROLLOUT_FOLDER, GroupFilter(any_reward_name=True)
        done, _ = count_groups_on_disk(GroupReader(folder), group_filter)
        stored = len(UnscoredGroups(out).groups)
        if (done or stored) and not resume:
            unscored = f" and {stored:,} unscored groups" if stored else ""
            raise ArgumentError(
                f"TG-ONLINE-024: {out} already contains {len(done):,} groups{unscored}. New groups would have the same "
                "names. Pass resume=True to continue, or another out."
            )
        entries = ((number, task) for number, task in enumerate(islice(tasks, groups)) if number not in done)
        counts = RolloutCounters()
        with ExitStack() as stack:
            server_pool = ServerPool(lambda: Servers(servers, model="", key=key), log=log)
            collector = rollout_spec.collector(
                stack,
                entries,
                server_pool,
                folder,
                FixedConcurrency(concurrency, counts),
                rollout or RolloutConfig(),
                group_filter=group_filter,
                counts=counts,
                logprob_kind=logprob_kind,
                for_training=False,
            )
            stack.enter_context(server_pool)
            collector.start()
            total = len(tasks) if isinstance(tasks, Sized) else None
            total = groups if total is None else min(total, groups or total)
            _wait(collector, counts, None if total is None else max(total - len(done), 0), log)
        file = collector.file if counts.finished else None
        counters = counts.finished, counts.trajectories, counts.failed, len(done), counts.reward
        return RecordResult(file, *counters, counts.without_reward, counts.failures)


def _wait(collector: Collector, counts: RolloutCounters, total: int | None, log: Callable[[str], None]) -> None:
    """Wait until all tasks are rolled out, and print a line every ten seconds.

    Args:
        total: number of groups to roll out; None if it is unknown.
    """
    printer = ProgressPrinter(log)

    def words(seconds: float) -> str:
        details = [
            f"{counts.trajectories:,} trajectories in {counts.finished:,} groups",
            *([f"{counts.failed:,} failed"] if counts.failed else []),
        ]
        return progress_line("rollout", details, seconds=seconds, done=counts.finished, total=total or 0)

    while not collector.is_finished:
        collector.check()
        collector.wait(POLL_S)
        printer.tick(words)
