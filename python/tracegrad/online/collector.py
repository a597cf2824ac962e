"""Roll out groups while the trainer trains, and write each group once it is complete.

Also the order of tasks, the limit on groups started ahead of the trainer, and the filter of groups with equal rewards.
A started group is never dropped.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import Config, join_list
from tracegrad.data.sampling import NEUTRAL, PENALTIES, REPLAYED, refusal_reason
from tracegrad.data.trace import Traces
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.online.buffer import GroupReader, GroupWriter, UnscoredGroups, unscorable_error
from tracegrad.online.logprob_gap import SyncFault, cached_response
from tracegrad.online.options import RolloutConfig
from tracegrad.online.server_pool import ServerPool
from tracegrad.progress import time_left
from tracegrad.rollout.client import measure_logprob_kind
from tracegrad.rollout.policy import Limits
from tracegrad.rollout.run_agent import RolloutResult, rollout_from_record, run_rollout
from tracegrad.rollout.token_client import Tokens
from tracegrad.user_code import Failure

if TYPE_CHECKING:
    from tracegrad.rollout.proxy import Proxy


class Tasks:
    """Tasks numbered by their group.

    >>> [task for _, task in zip(range(3), Tasks(["a", "b"], seed=0).after(set()))][2][0]
    2

    Args:
        source: a list, which is repeated in a new order each time, or an iterable that is read once.
        seed: seed of the orders.
    """

    def __init__(self, source: Iterable[Any], seed: int = 0) -> None:
        if isinstance(source, (str, bytes)) or not isinstance(source, Iterable):
            raise ArgumentError(
                f"TG-ONLINE-009: tasks is a {type(source).__name__}. Pass a list with one entry per task."
            )
        if isinstance(source, Sequence) and not len(source):
            raise ArgumentError("TG-ONLINE-010: tasks is empty. Pass at least one task.")
        self.source, self.seed = source, seed

    def after(self, done: set[int]) -> Iterator[tuple[int, Any]]:
        """Yield (group, task) of every group that is not in `done`, in order."""
        for number, task in enumerate(self._all()):
            if number not in done:
                yield number, task

    def _all(self) -> Iterator[Any]:
        if not isinstance(self.source, Sequence):
            yield from self.source
            return
        time = 0
        while True:
            order = np.random.default_rng([self.seed, time]).permutation(len(self.source))
            yield from (self.source[int(index)] for index in order)
            time += 1


class GroupLimit(Protocol):
    """Limit on the number of started groups."""

    @property
    def groups(self) -> int:
        """Groups in flight at once."""
        ...

    @property
    def max_groups_per_step(self) -> int:
        """Maximum number of groups consumed at once."""
        ...

    def max_started(self, steps_done: int, zero_std_groups: int) -> int:
        """Return how many groups may have started.

        Args:
            steps_done: completed steps.
            zero_std_groups: finished groups without a training signal.
        """
        ...


@dataclass(frozen=True)
class StalenessLimit:
    """Staleness limit of a run: how many groups may be started ahead of the trainer.

    >>> limit = StalenessLimit(groups=16, steps_ahead=1, max_resample_factor=3)
    >>> [limit.max_started(steps_done, zero_std) for steps_done, zero_std in ((0, 0), (2, 0), (0, 5))]
    [32, 64, 37]

    Args:
        groups: groups with differing rewards in one optimizer step.
        steps_ahead: steps whose groups may be started before the trainer needs them; 0 alternates rollout and training.
        max_resample_factor: a step consumes at most this many times `groups` groups. More than `groups` are consumed
            only if some have equal rewards.
        steps: steps of the run; no group is rolled out for a later step.
    """

    groups: int
    steps_ahead: int = 1
    max_resample_factor: int = 3
    steps: int = 1 << 31

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("steps_ahead", 0), ("max_resample_factor", 1)):
            if getattr(self, name) < least:
                raise ArgumentError(
                    f"TG-ONLINE-011: online.{name} is {getattr(self, name)}, and no group could start. It must be at "
                    f"least {least}."
                )

    @property
    def max_groups_per_step(self) -> int:
        """Maximum number of groups that one step consumes, including those with equal rewards."""
        return self.groups * self.max_resample_factor

    def max_started(self, steps_done: int, zero_std_groups: int) -> int:
        """Return how many groups may have been started since the start of the run.

        Args:
            steps_done: completed steps whose weights have been pushed.
            zero_std_groups: finished groups whose rewards are equal or unknown.
        """
        steps = min(self.steps_ahead + steps_done + 1, self.steps)
        return steps * self.groups + min(zero_std_groups, steps * (self.max_groups_per_step - self.groups))


Floats = NDArray[np.float32]
_COMPLETE_REASONS = ("stop", "tool_calls", "function_call")


@dataclass(frozen=True)
class GroupFilter:
    """Reward that is trained on, and the filter of groups without a training signal.

    Args:
        reward_names: names of the reward, as in `data.reward`; without a name, the scalar reward.
        is_group_relative: whether rewards are compared within their group, so that equal rewards have no gradient.
        any_reward_name: whether any reward names are accepted, since nothing is trained yet.
        tolerance: rewards that differ by at most this count as equal.
        zero_truncated: whether a trajectory that was truncated, or has no finish reason, gets reward 0.
    """

    reward_names: tuple[str, ...] = ()
    is_group_relative: bool = True
    any_reward_name: bool = False
    tolerance: float = 0.0
    zero_truncated: bool = False

    @classmethod
    def of(cls, config: Config) -> GroupFilter:
        """Create the filter from a training config; zero-std groups that will be masked are kept."""
        options = config.filter
        compared = config.advantage.baseline != "none" and not options.mask_zero_std_groups
        return cls(
            config.data.reward, compared, tolerance=options.zero_std_tolerance, zero_truncated=options.zero_truncated
        )

    def rewards_of_records(self, records: Sequence[Mapping[str, Any]]) -> Floats:
        """Return the reward of each record: [n] float32, NaN if unknown.

        >>> GroupFilter().rewards_of_records([{"reward": 1}, {"reward": None}, {"rewards": {"a": 2}}]).tolist()
        [1.0, nan, nan]
        """
        if self.zero_truncated:
            return self.rewards_of_traces(Traces.from_records(records))
        mappings = [{**(record.get("rewards") or {}), "reward": record.get("reward")} for record in records]
        values = [self._trained_reward(mapping) for mapping in mappings]
        return np.array([np.nan if value is None else value for value in values], np.float32)

    def _trained_reward(self, rewards: Mapping[str, Any]) -> Any:
        """Return the trained reward, or None if it is unknown; if several names are set, the first that has a value."""
        return next(
            (value for value in map(rewards.get, self._names) if value is not None and math.isfinite(value)), None
        )

    @property
    def _names(self) -> tuple[str, ...]:
        return self.reward_names or ("reward",)

    def rewards_of_traces(self, traces: Traces) -> Floats:
        """Return the reward of each trace: [n] float32, NaN if unknown."""
        rewards = traces.reward
        if self.reward_names:
            values = [self._trained_reward({**trace.rewards, "reward": trace.reward}) for trace in traces]
            rewards = np.array([np.nan if value is None else value for value in values], np.float32)
        if self.zero_truncated:
            ended = [
                any(generation.finish_reason in _COMPLETE_REASONS for generation in trace.generations[-1:])
                for trace in traces
            ]
            rewards = np.where(np.isnan(rewards) | ended, rewards, np.float32(0))
        return rewards

    def check(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Raise an error if the rewards have other names than the trained one: no group would have a training signal.

        A reward of that name without a value is accepted: its function may have failed or may not apply.
        """
        names = {name for record in records for name in record.get("rewards") or {}}
        available = names | ({"reward"} if any("reward" in record for record in records) else set())
        setting = (
            f"data.reward is {join_list(self.reward_names)!r}"
            if self.reward_names
            else "data.reward names none of them"
        )
        if not self.any_reward_name and names and not available & {*self._names}:
            raise ArgumentError(
                f"TG-ONLINE-012: the rewards are {', '.join(sorted(names))[:200]}, and {setting}. Set data.reward to "
                "the reward to train on, or return one number."
            )

    def has_no_signal(self, rewards: Floats) -> bool:
        """Return whether a group has no training signal.

        That is so if no reward is known. If rewards are compared, it is also so if all known rewards are equal.

        >>> [GroupFilter().has_no_signal(np.float32(group)) for group in ([1, np.nan], [1, 1], [1, 0])]
        [True, True, False]
        """
        known_rewards = rewards[~np.isnan(rewards)].astype(np.float64)
        return not len(known_rewards) or (self.is_group_relative and bool(np.ptp(known_rewards) <= self.tolerance))


class GroupScorer(Protocol):
    """Scores the trajectories of a group together and writes the rewards to their records."""

    def prepare(self, rollouts: Sequence[RolloutResult]) -> None:
        """Change the records to the form for records that are never scored."""
        ...

    def __call__(self, rollouts: Sequence[RolloutResult]) -> Awaitable[list[dict[str, Failure]]]:
        """Set the rewards of the records; return for each trajectory the reward functions that failed."""
        ...


@dataclass
class Failures:
    """Failures of one function.

    Args:
        count: trajectories without its reward; for rollouts, the trajectories that failed.
        first: task, trajectory, function, error and source line of the first failure.
        traceback: traceback of the first failure; None without one.
    """

    count: int
    first: str
    traceback: str | None


MAX_RESPONSE_IDS = 65_536
"""Number of response ids that are remembered."""


@dataclass
class RolloutCounters:
    """Rollout counters since the start of the collector.

    The trainer reads them without a lock, so different fields may be of slightly different moments.

    Args:
        started, finished, zero_std: groups, including those already on disk. A group is finished once it is written.
        trajectories, failed: trajectories of groups that are finished or about to be written. They are counted before
            the group is on disk. A trajectory whose scoring failed counts as failed.
        rewarded, rewards: number of trajectories with a known reward, and sum of the known rewards.
        failures: by source of the failure: "playing", or "reward function NAME".
    """

    started: int = 0
    finished: int = 0
    zero_std: int = 0
    trajectories: int = 0
    failed: int = 0
    rewarded: int = 0
    rewards: float = 0.0
    failures: dict[str, Failures] = field(default_factory=dict)

    @property
    def without_reward(self) -> int:
        """Trajectories that did not fail and got no reward from any function."""
        return max(self.trajectories - self.failed - self.rewarded, 0)

    @property
    def reward(self) -> float:
        """Mean of the known rewards; NaN without any."""
        return self.rewards / self.rewarded if self.rewarded else math.nan

    def add(self, rewards: Floats, has_no_signal: bool, failed: int = 0) -> None:
        """Count one group by the rewards of its trajectories."""
        known_rewards = rewards[~np.isnan(rewards)]
        self.zero_std += has_no_signal
        self.trajectories, self.failed = self.trajectories + len(rewards), self.failed + failed
        self.rewarded, self.rewards = (
            self.rewarded + len(known_rewards),
            self.rewards + float(known_rewards.sum(dtype=np.float64)),
        )


@dataclass
class Collector:
    """Rolls out groups in this process.

    Args:
        agent: agent, environment or function that does a rollout.
        tasks: (group, task) in order, without the groups that exist already.
        server_pool: connection to the servers.
        writer: writer of the groups; None for a collector that only evaluates.
        staleness_limit: limit on started groups.
        rollout: rollout options.
        score: scores the trajectories of a group together.
        unscored: store of groups until they are scored; stored groups are not rolled out again.
        group_filter: filter of groups without a training signal.
        counts: counters, which include the groups on disk.
        steps_done: completed steps.
        share: (index, number of collectors); all collectors together start as many groups as one would.
        by_address: whether each trajectory gets a recording address, for existing agents with their own client.
        logprob_kind: "raw" or "processed" logprobs of the servers; None measures it (`measure_logprob_kind`).
        for_training: whether to sample only with settings that the trainer can reproduce. Overrides from the model's
            generation_config.json are then disabled, and requests with other such options are refused, except in
            evaluations.
        tokenizer: tokenizer of the policy, for `rollout.input` "token_ids".
    """

    agent: Any
    tasks: Iterator[tuple[int, Any]]
    server_pool: ServerPool
    writer: GroupWriter | None
    staleness_limit: GroupLimit
    rollout: RolloutConfig
    score: GroupScorer | None = None
    unscored: UnscoredGroups | None = None
    group_filter: GroupFilter = field(default_factory=GroupFilter)
    counts: RolloutCounters = field(default_factory=RolloutCounters)
    steps_done: int = 0
    share: tuple[int, int] = (0, 1)
    by_address: bool = False
    logprob_kind: str | None = None
    for_training: bool = True
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        self._wake = asyncio.Event()
        self._started_at: dict[str, float] = {}
        self._chat: Any = None
        self._proxy: Proxy | None = None
        self._row: list[RolloutResult] = []
        self._ids: OrderedDict[str, None] = OrderedDict()
        self.exhausted = False
        self.fatal_error: TracegradError | None = None
        self.finished_at = time.monotonic()

    @property
    def is_finished(self) -> bool:
        """Whether all tasks are rolled out.

        Raises:
            TracegradError: `fatal_error`, which is set before the last group counts as finished.
        """
        ended = self.exhausted and self.counts.finished == self.counts.started
        if ended and self.fatal_error is not None:
            raise self.fatal_error
        return ended

    @property
    def file(self) -> Path:
        """File that the groups are written to."""
        assert self.writer is not None
        return self.writer.folder / self.writer.name

    @property
    def retried(self) -> int:
        """Requests that were sent again since the start."""
        return self.server_pool.servers.retried

    def check(self) -> None:
        """Raise the error that ended the thread of the servers, or an error if rollouts have stalled.

        Rollouts have stalled if no group has finished for `rollout.stall_timeout_s` seconds.
        """
        self.server_pool.check()
        idle = time.monotonic() - self.finished_at
        if idle > self.rollout.stall_timeout_s and self._started_at:
            name, began = min(self._started_at.items(), key=lambda item: item[1])
            raise TracegradError(
                f"TG-ONLINE-013: no group has finished for {idle:.0f} s. The oldest trajectory in flight is {name}, "
                f"which started {time.monotonic() - began:.0f} s ago. Check its environment and the servers, or raise "
                "rollout.stall_timeout_s."
            )

    def wait(self, seconds: float) -> None:
        """Wait until a group has finished or rollout has ended since the last call, at most this many seconds."""
        self.server_pool.wait(seconds)

    def start(self) -> None:
        """Start rollouts. Call this once the servers have the initial weights."""
        self.finished_at = time.monotonic()
        self.server_pool.begin(self._roll_out_groups)

    def set_steps_done(self, steps: int) -> None:
        """Set the number of completed steps whose weights are pushed, which allows more groups to start."""
        self.steps_done = steps
        self.server_pool.call_soon(self._wake.set)

    def add_zero_std_groups(self, groups: int) -> None:
        """Count groups of other collectors that have no training signal, so that more may start in their place."""
        self.counts.zero_std += groups
        self.server_pool.call_soon(self._wake.set)

    def evaluate(self, agent: Any, tasks: Sequence[Any], name: str) -> list[RolloutResult]:
        """Roll out each task once and return the trajectories of the evaluation."""

        done = 0

        def progress(seconds: float) -> str:
            remaining = time_left(seconds, done, len(tasks)) or "none is done yet"
            return f"{name}: {done:,} of {len(tasks):,} tasks rolled out in {seconds:.0f} s, {remaining}"

        async def roll_out_all(*_: Any) -> list[RolloutResult]:
            await self._open()
            limit = asyncio.Semaphore(256)

            async def roll_out_task(number: int, task: Any) -> RolloutResult:
                nonlocal done
                async with limit:
                    rollout = await self._play(agent, task, f"{name}-{number}", None)
                [scored] = await self._score_rollouts([rollout])
                done += 1
                return scored

            return list(await asyncio.gather(*(roll_out_task(number, task) for number, task in enumerate(tasks))))

        return self.server_pool.run(roll_out_all, progress)

    async def _roll_out_groups(self) -> None:
        await self._open()
        running: set[asyncio.Task[Any]] = set()
        wake = asyncio.create_task(self._wake.wait())
        try:
            while True:
                running |= self._start_groups()
                done, _ = await asyncio.wait({wake, *running}, return_when=asyncio.FIRST_COMPLETED)
                if wake in done:
                    self._wake.clear()
                    wake = asyncio.create_task(self._wake.wait())
                for task in done & running:
                    running.discard(task)
                    task.result()
        finally:
            running.add(wake)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _open(self) -> None:
        if self._chat is None:
            self._chat = await self._open_client()
            if self.logprob_kind is None:
                assumed = "raw" if self.rollout.temperature == 1.0 else "processed"
                self.logprob_kind = await measure_logprob_kind(self.server_pool.servers) or assumed
            if self.for_training and (reason := refusal_reason(self._sampling, self._kind)) is not None:
                raise ArgumentError(f"TG-ONLINE-014: the options in [rollout] cannot be trained on: {reason}")
        if self.by_address and self._proxy is None and self.rollout.input == "messages":
            self._proxy = await self.server_pool.stack.enter_async_context(self._recorder())

    def _start_groups(self) -> set[asyncio.Task[None]]:
        started, (mine, collectors) = set(), self.share
        allowed = -(-(self.staleness_limit.max_started(self.steps_done, self.counts.zero_std) - mine) // collectors)
        while not self.exhausted and self.counts.started < allowed:
            entry = next(self.tasks, None)
            if entry is None:
                self.exhausted = True
                self.server_pool.news.set()
                break
            self.counts.started += 1
            started.add(asyncio.create_task(self._group(*entry)))
        return started

    async def _group(self, number: int, task: Any) -> None:
        """Roll out one group, store it unscored, score it and write it."""
        rollouts = (
            None if self.unscored is None else await asyncio.to_thread(self._read_unscored, number, task, self.unscored)
        )
        if rollouts is None:
            names = [f"{number}-{sample}" for sample in range(self.rollout.group_size)]
            pending = (self._play(self.agent, task, name, str(number)) for name in names)
            rollouts = list(await asyncio.gather(*pending))
            if self.score is not None and self.unscored is not None:
                self.score.prepare(rollouts)
                await asyncio.to_thread(self.unscored.write, number, [rollout.record for rollout in rollouts])
        rollouts = await self._score_rollouts(rollouts)
        records = [rollout.record for rollout in rollouts]
        rewards = self.group_filter.rewards_of_records(records)
        self.counts.add(
            rewards, self.group_filter.has_no_signal(rewards), sum(rollout.error is not None for rollout in rollouts)
        )
        self._note_failures(rollouts)
        try:
            self.group_filter.check(records)
            self._check_ids(records)
        except (ArgumentError, SyncFault) as error:  # write the rollouts first
            self.fatal_error = error
        await asyncio.to_thread(self._write, number, records)
        self.counts.finished += 1
        self.finished_at = time.monotonic()
        self.server_pool.news.set()
        if self.fatal_error is not None:
            raise self.fatal_error

    def _check_ids(self, records: list[dict[str, Any]]) -> None:
        """Refuse a response with the id of an earlier one: it was sampled once and would be trained on twice."""
        for call in (call for record in records for call in record.get("calls") or []):
            response = call.get("response")
            name = response.get("id") if isinstance(response, Mapping) else None
            if not isinstance(name, str) or not name:
                continue
            if name in self._ids:
                raise SyncFault(cached_response(name, "A server"))
            self._ids[name] = None
        while len(self._ids) > MAX_RESPONSE_IDS:
            self._ids.popitem(last=False)

    def _read_unscored(self, number: int, task: Any, unscored: UnscoredGroups) -> list[RolloutResult] | None:
        """Return a group that was rolled out before and not scored; None if it must be rolled out."""
        if (records := unscored.read(number)) is None:
            return None
        try:
            return [rollout_from_record(record, task) for record in records]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise unscorable_error(unscored.path(number), error) from error

    def _write(self, number: int, records: list[dict[str, Any]]) -> None:
        assert self.writer is not None
        self.writer.write(records)
        if self.unscored is not None:
            self.unscored.delete([number])

    async def _score_rollouts(self, rollouts: list[RolloutResult]) -> list[RolloutResult]:
        """Return the trajectories with rewards. Failed rollouts and failed scoring are counted, and `error` is set."""
        for rollout in rollouts:
            if rollout.error is not None:
                self._note("playing", rollout.error, rollout.failure)
        if self.score is None:
            return rollouts
        self.score.prepare(rollouts)
        scored = []
        for rollout, failures in zip(rollouts, await self.score(rollouts), strict=True):
            group = rollout.record.get("group")
            where = f"{'' if group is None else f'task {group}, '}trajectory {rollout.record['id']}"
            lines = {name: f"{where}: reward function {name}: {failure}" for name, failure in failures.items()}
            for name, line in lines.items():
                self._note(f"reward function {name}", line, failures[name])
            first = next(iter(failures), None)
            scored.append(rollout if first is None else replace(rollout, error=lines[first], failure=failures[first]))
        return scored

    def _note(self, source: str, line: str, failure: Failure | None) -> None:
        """Count a failure and log the first one of each function with its traceback."""
        if (previous := self.counts.failures.get(source)) is not None:
            previous.count += 1
            return
        traceback = None if failure is None else failure.traceback
        self.counts.failures[source] = Failures(1, line, traceback)
        for text in (
            f"failed   {line}",
            *(f"         {traceback_line}" for traceback_line in (traceback or "").splitlines()),
        ):
            self.server_pool.log(text)

    async def _play(self, agent: Any, task: Any, name: str, group: str | None) -> RolloutResult:
        options = self.rollout
        self._started_at[name] = time.monotonic()
        try:
            # An agent's own client may use the model name from its start until it ends, also for retries.
            with self.server_pool.servers.hold_model() if self._proxy is not None else nullcontext():
                return await run_rollout(
                    agent,
                    task,
                    chat=self._chat,
                    version=lambda: self.server_pool.version,
                    received=lambda: self.server_pool.next_version,
                    limits=Limits(max_turns=options.max_turns, timeout_s=options.timeout_s),
                    id=name,
                    group=group,
                    sampling=self._sampling,
                    logprob_kind=self._kind,
                    for_training=self.for_training and group is not None,
                    proxy=self._proxy,
                )
        finally:
            del self._started_at[name]

    async def _open_client(self) -> Any:
        """Return the function that sends the requests of trajectories."""
        if self.rollout.input == "messages":
            return self.server_pool.servers.chat
        if self.tokenizer is None:
            raise ArgumentError(
                'TG-ONLINE-015: rollout.input is "token_ids", but this collector has no tokenizer to encode prompts '
                'with. Set rollout.input to "messages".'
            )
        tokens = Tokens(self.server_pool.servers, self.tokenizer)
        await tokens.check()
        return tokens

    def _recorder(self) -> Proxy:
        """Create the recording proxy, whose address agents with their own client get."""
        from tracegrad.rollout.proxy import Proxy

        return Proxy(
            self.server_pool.servers,
            upstream_key=self.server_pool.servers.key,
            model=lambda: self.server_pool.servers.model,
            version=lambda: self.server_pool.version,
            sampling=self._sampling,
            logprob_kind=self._kind,
        )

    @property
    def _sampling(self) -> dict[str, Any]:
        rollout = self.rollout
        options = {"temperature": rollout.temperature, "max_tokens": rollout.max_tokens}
        changes = {name: getattr(rollout, name) for name in (*REPLAYED, *PENALTIES, "top_logprobs")}
        if self.for_training:
            return {**NEUTRAL, **options, **changes}
        return {**options, **{name: value for name, value in changes.items() if value != NEUTRAL.get(name, 0)}}

    @property
    def _kind(self) -> str:
        assert self.logprob_kind is not None
        return self.logprob_kind

    def _note_failures(self, rollouts: list[RolloutResult]) -> None:
        """Set `fatal_error` after `rollout.max_consecutive_failures` failed trajectories in a row.

        Its text quotes the first error.
        """
        for rollout in rollouts:
            self._row = [*self._row, rollout] if rollout.error is not None else []
        if len(self._row) >= self.rollout.max_consecutive_failures:
            first = self._row[0]
            self.fatal_error = TracegradError(
                f"TG-ONLINE-016: {len(self._row)} trajectories in a row have failed. They are written to disk; you can "
                "repeat failed reward functions with `tracegrad score`. The first failure: "
                f"{first.error}\n{getattr(first.failure, 'traceback', '') or ''}"
            )


def count_groups_on_disk(reader: GroupReader, group_filter: GroupFilter) -> tuple[set[int], RolloutCounters]:
    """Return the numbers and the counters of groups that are new to the reader; delete their unscored copies."""
    done, counts = set(), RolloutCounters()
    for _, traces in reader.read_new():
        group = next(iter(traces.groups), None) or ""
        done |= {int(group)} if group.isdecimal() else set()
        rewards = group_filter.rewards_of_traces(traces)
        counts.started, counts.finished = counts.started + 1, counts.finished + 1
        failed = sum(any(mark in trace.record for mark in _FAILURE_MARKS) for trace in traces)
        counts.add(rewards, group_filter.has_no_signal(rewards), failed)
    unscored = UnscoredGroups(reader.folder.parent)
    unscored.delete(unscored.groups & done)
    return done, counts


_FAILURE_MARKS = (b'"failure":{', b'"reward_failures":{')
"""Bytes in the records of trajectories that failed or whose scoring failed."""
