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
from tracegrad.config import Config, split_names
from tracegrad.data.sampling import NEUTRAL, refusal_reason
from tracegrad.data.trace import Traces
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.online.buffer import GroupReader, GroupWriter, UnscoredGroups, unscorable_error
from tracegrad.online.logprob_gap import SyncFault, cached_response
from tracegrad.online.options import RolloutConfig
from tracegrad.online.server_pool import ServerPool
from tracegrad.rollout.client import measure_logprob_kind
from tracegrad.rollout.policy import Limits
from tracegrad.rollout.progress import format_time_left
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
                f"TG-ONLINE-009: tasks is a {type(source).__name__}. Each of its entries is played. Pass a list."
            )
        if isinstance(source, Sequence) and not len(source):
            raise ArgumentError("TG-ONLINE-010: tasks is empty. There is nothing to play. Pass at least one.")
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
    def most(self) -> int:
        """Maximum number of groups consumed at once."""
        ...

    def allowed(self, taken: int, dull: int) -> int:
        """Return how many groups may have started after `taken` steps and `dull` groups without a training signal."""
        ...


@dataclass(frozen=True)
class StalenessLimit:
    """Staleness limit of a run: how many groups may be started ahead of the trainer.

    >>> pace = StalenessLimit(groups=16, steps_ahead=1, refill=3)
    >>> pace.allowed(taken=0, dull=0), pace.allowed(taken=2, dull=0), pace.allowed(taken=0, dull=5)
    (32, 64, 37)

    Args:
        groups: groups with differing rewards in one optimizer step.
        steps_ahead: steps whose groups may be started before the trainer needs them; 0 alternates rollout and training.
        refill: a step consumes at most `refill` times `groups` groups, if the rewards of some are equal.
        steps: steps of the run; no group is rolled out for a later step.
    """

    groups: int
    steps_ahead: int = 1
    refill: int = 3
    steps: int = 1 << 31

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("steps_ahead", 0), ("refill", 1)):
            if getattr(self, name) < least:
                raise ArgumentError(
                    f"TG-ONLINE-011: online.{name} is {getattr(self, name)}. Nothing could be played. It must "
                    f"be at least {least}."
                )

    @property
    def most(self) -> int:
        """Maximum number of groups that one step consumes, including those with equal rewards."""
        return self.groups * self.refill

    def allowed(self, taken: int, dull: int) -> int:
        """Return how many groups may have been started since the start of the run.

        Args:
            taken: completed steps whose weights have been pushed.
            dull: finished groups whose rewards are equal or unknown.
        """
        steps = min(self.steps_ahead + taken + 1, self.steps)
        return steps * self.groups + min(dull, steps * (self.most - self.groups))


Floats = NDArray[np.float32]
_COMPLETE_REASONS = ("stop", "tool_calls", "function_call")


@dataclass(frozen=True)
class GroupFilter:
    """Reward that is trained on, and the filter of groups without a training signal.

    Args:
        name: name of the reward; "" is the scalar reward, as for `train`.
        compared: whether rewards are compared within their group, so that equal rewards have no gradient.
        free: whether any reward names are accepted, since nothing is trained yet.
        tolerance: rewards that differ by at most this count as equal.
        zero_truncated: whether a trajectory that was truncated, or has no finish reason, gets reward 0.
    """

    name: str = ""
    compared: bool = True
    free: bool = False
    tolerance: float = 0.0
    zero_truncated: bool = False

    @classmethod
    def of(cls, config: Config) -> GroupFilter:
        """Create the filter from a training config; zero-std groups that will be masked are kept."""
        options = config.filter
        compared = config.advantage.baseline != "none" and not options.mask_even
        return cls(config.data.reward, compared, tolerance=options.tolerance, zero_truncated=options.zero_truncated)

    def of_records(self, records: Sequence[Mapping[str, Any]]) -> Floats:
        """Return the reward of each record: [n] float32, NaN if unknown.

        >>> GroupFilter().of_records([{"reward": 1}, {"reward": None}, {"rewards": {"a": 2}}]).tolist()
        [1.0, nan, nan]
        """
        if self.zero_truncated:
            return self.of_traces(Traces.from_records(records))
        mappings = [{**(record.get("rewards") or {}), "reward": record.get("reward")} for record in records]
        values = [self._trained_reward(mapping) for mapping in mappings]
        return np.array([np.nan if value is None else value for value in values], np.float32)

    def _trained_reward(self, rewards: Mapping[str, Any]) -> Any:
        """Return the trained reward, or None if it is unknown; if several names are set, the first that has a value."""
        return next(
            (value for value in map(rewards.get, self._names) if value is not None and math.isfinite(value)), None
        )

    @property
    def _names(self) -> list[str]:
        return [self.name, *split_names(self.name)] if self.name else ["reward"]

    def of_traces(self, traces: Traces) -> Floats:
        """Return the reward of each trace: [n] float32, NaN if unknown."""
        rewards = traces.reward
        if self.name:
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
        wanted = f"data.reward is {self.name!r}" if self.name else "data.reward names none of them"
        if not self.free and names and not available & {*self._names}:
            raise ArgumentError(
                f"TG-ONLINE-012: the rewards are {', '.join(sorted(names))[:200]}, and {wanted}. Nothing would be "
                "trained on. Set data.reward to the one that is, or return one number."
            )

    def is_dull(self, rewards: Floats) -> bool:
        """Return whether a group has no training signal.

        That is so if no reward is known. If rewards are compared, it is also so if all known rewards are equal.

        >>> [GroupFilter().is_dull(np.float32(group)) for group in ([1, np.nan], [1, 1], [1, 0])]
        [True, True, False]
        """
        known_rewards = rewards[~np.isnan(rewards)].astype(np.float64)
        return not len(known_rewards) or (self.compared and bool(np.ptp(known_rewards) <= self.tolerance))


class GroupScorer(Protocol):
    """Scores the trajectories of a group together and writes the rewards to their records."""

    def prepare(self, played: Sequence[RolloutResult]) -> None:
        """Change the records to the form that they must have if they are read without ever being scored."""
        ...

    def __call__(self, played: Sequence[RolloutResult]) -> Awaitable[list[dict[str, Failure]]]:
        """Set the rewards of the records; return for each trajectory the reward functions that failed."""
        ...


@dataclass
class Failures:
    """Failures of one function.

    Args:
        count: trajectories without its reward; for rollouts, the trajectories that failed.
        first: task, trajectory, function, error and source line of the first failure.
        traceback: traceback of the first failure, "" if there is none.
    """

    count: int
    first: str
    traceback: str


MAX_RESPONSE_IDS = 65_536
"""Number of response ids that are remembered."""


@dataclass
class RolloutCounters:
    """Rollout counters since the start of the collector.

    The trainer reads them without a lock, so different fields may be of slightly different moments.

    Args:
        begun, finished, dull: groups, including those already on disk. A group is finished once it is written.
        trajectories, failed: trajectories of groups that are finished or about to be written. They are counted before
            the group is on disk. A trajectory whose scoring failed counts as failed.
        rewarded, rewards: trajectories with a known reward, and the sum of these rewards.
        failures: by source of the failure: "playing", or "reward function NAME".
    """

    begun: int = 0
    finished: int = 0
    dull: int = 0
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
        """Mean of the known rewards; NaN if there are none."""
        return self.rewards / self.rewarded if self.rewarded else math.nan

    def add(self, rewards: Floats, dull: bool, failed: int = 0) -> None:
        """Count one group by the rewards of its trajectories."""
        known_rewards = rewards[~np.isnan(rewards)]
        self.dull += dull
        self.trajectories, self.failed = self.trajectories + len(rewards), self.failed + failed
        self.rewarded, self.rewards = (
            self.rewarded + len(known_rewards),
            self.rewards + float(known_rewards.sum(dtype=np.float64)),
        )


@dataclass
class Collector:
    """Rolls out groups in this process.

    Args:
        contract: agent, environment or function that does a rollout.
        tasks: (group, task) in order, without the groups that exist already.
        link: connection to the servers.
        writer: writer of the groups; None for a collector that only evaluates.
        pace: limit on started groups.
        play: rollout options.
        score: scores the trajectories of a group together.
        unscored: store of groups until they are scored; stored groups are not rolled out again.
        signal: filter of groups without a training signal.
        counts: counters, which include the groups on disk.
        taken: completed steps.
        share: (index, number of collectors); all collectors together start as many groups as one would.
        by_address: whether each trajectory gets a recording address, for existing agents with their own client.
        logprob_kind: "raw" or "processed" logprobs of the servers; None measures it (`measure_logprob_kind`).
        for_training: whether to sample only in ways that the trainer can reproduce. Overrides from the model's
            generation_config.json are then disabled, and requests with other such options are refused, except in
            evaluations.
        tokenizer: tokenizer of the policy, for `play.ids` "tokens".
    """

    contract: Any
    tasks: Iterator[tuple[int, Any]]
    link: ServerPool
    writer: GroupWriter | None
    pace: GroupLimit
    play: RolloutConfig
    score: GroupScorer | None = None
    unscored: UnscoredGroups | None = None
    signal: GroupFilter = field(default_factory=GroupFilter)
    counts: RolloutCounters = field(default_factory=RolloutCounters)
    taken: int = 0
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
        self.failing: TracegradError | None = None
        self.finished_at = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether all tasks are rolled out.

        Raises:
            TracegradError: `failing`, which is set before the last group counts as finished.
        """
        ended = self.exhausted and self.counts.finished == self.counts.begun
        if ended and self.failing is not None:
            raise self.failing
        return ended

    @property
    def file(self) -> Path:
        """File that the groups are written to."""
        assert self.writer is not None
        return self.writer.folder / self.writer.name

    @property
    def retried(self) -> int:
        """Requests that were sent again since the link was created."""
        return self.link.servers.retried

    def check(self) -> None:
        """Raise the error that ended the link, or an error if no group has finished for `play.patience` seconds."""
        self.link.check()
        idle = time.monotonic() - self.finished_at
        if idle > self.play.patience and self._started_at:
            name, began = min(self._started_at.items(), key=lambda item: item[1])
            raise TracegradError(
                f"TG-ONLINE-013: no group has finished for {idle:.0f} s. The oldest trajectory under way is {name}, "
                f"for {time.monotonic() - began:.0f} s. The trainer would wait for ever. Look at its environment and "
                "at the servers, or raise play.patience."
            )

    def wait(self, seconds: float) -> None:
        """Wait until a group has finished or rollout has ended since the last call, at most this many seconds."""
        self.link.wait(seconds)

    def begin(self) -> None:
        """Start rollouts. Call this once the servers have the initial weights."""
        self.finished_at = time.monotonic()
        self.link.begin(self._roll_out_groups)

    def step_taken(self, steps: int) -> None:
        """Set the number of completed steps whose weights are pushed, which allows more groups to start."""
        self.taken = steps
        self.link.soon(self._wake.set)

    def others_dull(self, groups: int) -> None:
        """Count groups of other collectors that have no training signal, so that more may start in their place."""
        self.counts.dull += groups
        self.link.soon(self._wake.set)

    def evaluate(self, contract: Any, tasks: Sequence[Any], name: str) -> list[RolloutResult]:
        """Roll out each task once and return the trajectories of the evaluation."""

        done = 0

        def progress(seconds: float) -> str:
            time_left = format_time_left(seconds, done, len(tasks))
            return f"{name}: {done:,} of {len(tasks):,} tasks played in {seconds:.0f} s, {time_left}"

        async def roll_out_all(*_: Any) -> list[RolloutResult]:
            await self._open()
            limit = asyncio.Semaphore(256)

            async def roll_out_task(number: int, task: Any) -> RolloutResult:
                nonlocal done
                async with limit:
                    rollout = await self._play(contract, task, f"{name}-{number}", None)
                [scored] = await self._score_rollouts([rollout])
                done += 1
                return scored

            return list(await asyncio.gather(*(roll_out_task(number, task) for number, task in enumerate(tasks))))

        return self.link.run(roll_out_all, progress)

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
                assumed = "raw" if self.play.temperature == 1.0 else "processed"
                self.logprob_kind = await measure_logprob_kind(self.link.servers) or assumed
            if (
                self.for_training
                and (reason := refusal_reason({"temperature": self.play.temperature}, self._kind)) is not None
            ):
                raise ArgumentError(f"TG-ONLINE-014: play.temperature is {self.play.temperature}: {reason}")
        if self.by_address and self._proxy is None and self.play.ids == "chat":
            self._proxy = await self.link.stack.enter_async_context(self._recorder())

    def _start_groups(self) -> set[asyncio.Task[None]]:
        started, (mine, collectors) = set(), self.share
        allowed = -(-(self.pace.allowed(self.taken, self.counts.dull) - mine) // collectors)
        while not self.exhausted and self.counts.begun < allowed:
            entry = next(self.tasks, None)
            if entry is None:
                self.exhausted = True
                self.link.news.set()
                break
            self.counts.begun += 1
            started.add(asyncio.create_task(self._group(*entry)))
        return started

    async def _group(self, number: int, task: Any) -> None:
        """Roll out one group, store it unscored, score it and write it."""
        rollouts = (
            None if self.unscored is None else await asyncio.to_thread(self._read_unscored, number, task, self.unscored)
        )
        if rollouts is None:
            names = [f"{number}-{sample}" for sample in range(self.play.samples)]
            pending = (self._play(self.contract, task, name, str(number)) for name in names)
            rollouts = list(await asyncio.gather(*pending))
            if self.score is not None and self.unscored is not None:
                self.score.prepare(rollouts)
                await asyncio.to_thread(self.unscored.keep, number, [rollout.record for rollout in rollouts])
        rollouts = await self._score_rollouts(rollouts)
        records = [rollout.record for rollout in rollouts]
        rewards = self.signal.of_records(records)
        self.counts.add(rewards, self.signal.is_dull(rewards), sum(rollout.error is not None for rollout in rollouts))
        self._note_failures(rollouts)
        try:
            self.signal.check(records)
            self._check_ids(records)
        except (ArgumentError, SyncFault) as error:  # write the rollouts first
            self.failing = error
        await asyncio.to_thread(self._write, number, records)
        self.counts.finished += 1
        self.finished_at = time.monotonic()
        self.link.news.set()
        if self.failing is not None:
            raise self.failing

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
            self.unscored.drop([number])

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
        traceback = "" if failure is None else failure.traceback
        self.counts.failures[source] = Failures(1, line, traceback)
        for text in (f"failed   {line}", *(f"         {traceback_line}" for traceback_line in traceback.splitlines())):
            self.link.say(text)

    async def _play(self, contract: Any, task: Any, name: str, group: str | None) -> RolloutResult:
        options = self.play
        self._started_at[name] = time.monotonic()
        try:
            # An agent's own client may use the model name from its start until it ends, also for retries.
            with self.link.servers.holding() if self._proxy is not None else nullcontext():
                return await run_rollout(
                    contract,
                    task,
                    chat=self._chat,
                    version=lambda: self.link.version,
                    received=lambda: self.link.coming,
                    limits=Limits(turns=options.turns, seconds=options.seconds),
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
        if self.play.ids == "chat":
            return self.link.servers.chat
        if self.tokenizer is None:
            raise ArgumentError(
                'TG-ONLINE-015: play.ids is "tokens", and the policy\'s tokenizer is not known here. No prompt '
                'could be written. Leave it at "chat".'
            )
        tokens = Tokens(self.link.servers, self.tokenizer)
        await tokens.check()
        return tokens

    def _recorder(self) -> Proxy:
        """Create the recording proxy, whose address agents with their own client get."""
        from tracegrad.rollout.proxy import Proxy

        return Proxy(
            self.link.servers,
            upstream_key=self.link.servers.key,
            model=lambda: self.link.servers.model,
            version=lambda: self.link.version,
            sampling=self._sampling,
            logprob_kind=self._kind,
        )

    @property
    def _sampling(self) -> dict[str, Any]:
        options = {"temperature": self.play.temperature, "max_tokens": self.play.max_tokens}
        return {**NEUTRAL, **options} if self.for_training else options

    @property
    def _kind(self) -> str:
        assert self.logprob_kind is not None
        return self.logprob_kind

    def _note_failures(self, rollouts: list[RolloutResult]) -> None:
        """Set `failing` after `play.failures` failed trajectories in a row; its text quotes the first error."""
        for rollout in rollouts:
            self._row = [*self._row, rollout] if rollout.error is not None else []
        if len(self._row) >= self.play.failures:
            first = self._row[0]
            self.failing = TracegradError(
                f"TG-ONLINE-016: {len(self._row)} trajectories in a row have failed. Nothing can be learnt from them. "
                "They are on the disk; rewards that failed can be scored anew (tracegrad score). The first: "
                f"{first.error}\n{getattr(first.failure, 'traceback', '') or ''}"
            )


def count_groups_on_disk(follower: GroupReader, signal: GroupFilter) -> tuple[set[int], RolloutCounters]:
    """Return numbers and counts of groups that are new to the follower; delete their unscored copies."""
    done, counts = set(), RolloutCounters()
    for _, traces in follower.look():
        group = next(iter(traces.groups), None) or ""
        done |= {int(group)} if group.isdecimal() else set()
        rewards = signal.of_traces(traces)
        counts.begun, counts.finished = counts.begun + 1, counts.finished + 1
        failed = sum(any(mark in trace.record for mark in _FAILURE_MARKS) for trace in traces)
        counts.add(rewards, signal.is_dull(rewards), failed)
    unscored = UnscoredGroups(follower.folder.parent)
    unscored.drop(unscored.groups & done)
    return done, counts


_FAILURE_MARKS = (b'"failure":{', b'"reward_failures":{')
"""Bytes in the records of trajectories that failed or whose scoring failed."""
