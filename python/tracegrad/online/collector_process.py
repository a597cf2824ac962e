"""Roll out for a trainer in another process, alone or as one of several collectors: `collect`.

Rollouts are written to the run's folder. The limit on groups and the weight versions come from the run's `state.json`.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import load as load_config
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.online import buffer
from tracegrad.online.buffer import GroupReader
from tracegrad.online.collector import Collector, GroupFilter, RolloutCounters, Tasks, count_groups_on_disk
from tracegrad.online.remote_collectors import RunState
from tracegrad.online.rollout_workers import RolloutSpec, staleness_limit_of
from tracegrad.online.run_info import RunInfo
from tracegrad.online.server_pool import ServerPool
from tracegrad.progress import ProgressPrinter, progress_line
from tracegrad.rollout.client import Servers
from tracegrad.storage.remote import require_local_path
from tracegrad.storage.safetensors_file import write_bytes
from tracegrad.trainer.signals import Interrupt

POLL_S = 0.05


@dataclass(frozen=True)
class CollectResult:
    """Result of `collect`.

    Args:
        groups, trajectories, failed: counts of this call; all groups are complete.
        stopped: "done" if the run ended, "tasks" if the tasks ended first, or "signal".
        exit_code: 0, or 128 + signal number.

    ```python
    import tracegrad as tg


    def short(completions, **columns):
        return [float(len(text) < 3) for text in completions]


    result = tg.online.collect("out/online", ["2+2?", "3+4?"], rewards=[short])
    print(result.groups, result.failed, result.stopped)
    ```
    """

    groups: int = 0
    trajectories: int = 0
    failed: int = 0
    stopped: str = "signal"
    exit_code: int = 0


def collect(
    run: str | Path,
    tasks: Iterable[Any],
    *,
    rewards: Any = None,
    reward_weights: Sequence[float] | None = None,
    tools: Any = None,
    environment: Any = None,
    agent: Any = None,
    share: tuple[int, int] = (0, 1),
    key: str | None = None,
    wait_s: float = 600.0,
    log: Callable[[str], None] = print,
) -> CollectResult:
    """Roll out for a run whose `train` has no tasks, until the run ends, the tasks end, or a signal comes.

    Args:
        run: folder of the run, on a disk that both processes can access.
        tasks, rewards, reward_weights, tools, environment, agent: as for `train`.
        share: (i, n): this is collector i of n, from 0. Each collector gets the same tasks and rolls out every n-th.
        key: token of the servers.
        wait_s: seconds to wait for a trainer that has not started.
        log: receives the log lines for the user.

    Returns:
        how much was rolled out.

    Raises:
        ArgumentError: if arguments do not fit together.
        TracegradError: if no trainer starts, or the rollouts fail permanently.

    ```python
    import tracegrad as tg


    def short(completions, **columns):
        return [float(len(text) < 3) for text in completions]


    # Another process runs tg.online.train("model", None, out="out/online").
    result = tg.online.collect("out/online", ["2+2?", "3+4?"], rewards=[short], share=(0, 2))
    print(result.groups, result.stopped)
    ```
    """
    run, (mine, collectors) = require_local_path(run), share
    if not 0 <= mine < collectors:
        raise ArgumentError(f"TG-ONLINE-017: share is {share}. Pass (i, n) with i from 0 to n - 1.")
    rollout_spec = RolloutSpec.of(
        agent=agent, environment=environment, tools=tools, rewards=rewards, weights=reward_weights
    )
    with ExitStack() as stack, Interrupt() as interrupt:
        state = _wait_for_state(run, wait_s, interrupt, ProgressPrinter(log))
        if state is None:
            return CollectResult(exit_code=interrupt.code("signal"))
        run_info, config = RunInfo.read(run), load_config(run / "config.toml")
        folder, group_filter = run / buffer.ROLLOUT_FOLDER, GroupFilter.of(config)
        others = GroupReader(folder)
        done, counts_on_disk = count_groups_on_disk(others, group_filter)
        before = len([number for number in done if number % collectors == mine])
        counts = RolloutCounters(started=before, finished=before, zero_std=counts_on_disk.zero_std)
        numbered = (
            (number, task)
            for number, task in Tasks(tasks, config.train.seed).after(done)
            if number % collectors == mine
        )
        server_pool = ServerPool(
            partial(Servers, state.servers, model=state.model, key=key), version=state.version, log=log
        )
        tokenizer = Tokenizer.from_pretrained(run_info.model) if run_info.rollout.input == "token_ids" else None
        staleness_limit = staleness_limit_of(config, run_info.online)
        rollout_worker = rollout_spec.collector(
            stack,
            numbered,
            server_pool,
            folder,
            staleness_limit,
            run_info.rollout,
            group_filter=group_filter,
            counts=counts,
            share=share,
            tokenizer=tokenizer,
        )
        stack.enter_context(server_pool)
        others.skipped_file = rollout_worker.file.name
        log(f"collector {mine} of {collectors}, from 0, writes rollouts to {rollout_worker.file}")
        _follow(run, state, rollout_worker, others, interrupt, ProgressPrinter(log))
        if rollout_worker.is_finished:
            write_bytes(folder / f"{mine}-of-{collectors}.ended", [b""])
        stopped = "tasks" if rollout_worker.is_finished else "done" if interrupt.received is None else "signal"
    counters = counts.finished - before, counts.trajectories, counts.failed
    return CollectResult(*counters, stopped, interrupt.code(stopped))


def _wait_for_state(run: Path, wait_s: float, interrupt: Interrupt, printer: ProgressPrinter) -> RunState | None:
    """Wait for the state of a run that has started; None if a signal came first."""
    deadline = time.monotonic() + wait_s
    while interrupt.received is None:
        if (state := RunState.read(run)) is not None and state.servers:
            return state
        if time.monotonic() > deadline:
            raise TracegradError(
                f"TG-ONLINE-018: {run}: no trainer has started within {wait_s:.0f} s. Start train with tasks=None and "
                "this folder as out."
            )
        printer.tick(lambda seconds: progress_line(f"waiting for a trainer in {run}", seconds=seconds))
        time.sleep(POLL_S)
    return None


def _follow(
    run: Path,
    state: RunState,
    rollout_worker: Collector,
    others: GroupReader,
    interrupt: Interrupt,
    printer: ProgressPrinter,
) -> None:
    """Apply the states that the trainer publishes, until the run ends."""
    counts = rollout_worker.counts
    admission = _ServerAdmission(rollout_worker.server_pool.servers, state)
    rollout_worker.server_pool.servers.admission = admission.admit
    _apply_state(rollout_worker, admission, state)
    rollout_worker.start()
    while interrupt.received is None and not admission.state.is_finished and not rollout_worker.is_finished:
        rollout_worker.check()
        state = RunState.read(run) or state
        if not set(state.servers) <= set(admission.pool):
            raise TracegradError(
                f"TG-ONLINE-019: {run}: servers were added to the run after this collector started. Start the "
                f"collector again."
            )
        if state != admission.state:
            _apply_state(rollout_worker, admission, state)
        zero_std_groups = sum(
            rollout_worker.group_filter.has_no_signal(rollout_worker.group_filter.rewards_of_traces(traces))
            for _, traces in others.read_new()
        )
        if zero_std_groups:
            rollout_worker.add_zero_std_groups(zero_std_groups)
        printer.tick(
            lambda seconds: progress_line(
                "rollout",
                [f"{counts.trajectories:,} trajectories in {counts.finished:,} groups, {counts.failed:,} failed"],
                seconds=seconds,
            )
        )
        time.sleep(POLL_S)


def _apply_state(rollout_worker: Collector, admission: "_ServerAdmission", state: RunState) -> None:
    """Apply a state: versions, completed steps, and the servers that must not be used now."""

    def apply() -> None:
        rollout_worker.server_pool.version, rollout_worker.server_pool.next_version = state.version, state.next_version
        for url in set(admission.state.servers) - set(state.servers):
            admission.servers.suspend(url, f"it has not received version {state.version} from the trainer")
        admission.state = state

    rollout_worker.server_pool.call_soon(apply)
    rollout_worker.set_steps_done(state.steps_done)


class _ServerAdmission:
    """Admission of servers after an outage: a server is used again once it has the published version."""

    def __init__(self, servers: Servers, state: RunState) -> None:
        self.servers, self.state, self.pool = servers, state, state.servers

    async def admit(self, url: str) -> bool:
        """Return whether the server may be used; if it reports no version, whether the trainer uses it."""
        info = await self.servers.request(url, "/weight_info", method="GET")
        if info.ok and isinstance(info.body, dict) and "weight_version" in info.body:
            return info.body["weight_version"] == str(self.state.version)
        return url in self.state.servers
