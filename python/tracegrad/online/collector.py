"""Roll out groups beside the trainer, and write each group when it is whole.

Also the order of tasks, the limit of groups that may be started ahead of the trainer, and the filter of groups whose
rewards do not differ. A group that was started is never dropped.
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
from tracegrad.data.sampling import NEUTRAL, refusal
from tracegrad.data.trace import Traces
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.online.buffer import Follower, Unscored, Writer, unusable
from tracegrad.online.logprob_gap import SyncFault, cached_response
from tracegrad.online.options import Play
from tracegrad.online.server_pool import Link
from tracegrad.rollout.client import measured_kind
from tracegrad.rollout.policy import Limits
from tracegrad.rollout.progress import left
from tracegrad.rollout.run_agent import Played, play, restored
from tracegrad.rollout.token_client import Tokens
from tracegrad.user_code import Failure

if TYPE_CHECKING:
    from tracegrad.rollout.proxy import Proxy


class Tasks:
    """Tasks by the number of their group.

    >>> [task for _, task in zip(range(3), Tasks(["a", "b"], seed=0).after(set()))][2][0]
    2

    Args:
        source: a list, whose tasks come again in another order, or what can be iterated once.
        seed: of the orders.
    """

    def __init__(self, source: Iterable[Any], seed: int = 0) -> None:
        if isinstance(source, (str, bytes)) or not isinstance(source, Iterable):
            raise ArgumentError(f"tasks is a {type(source).__name__}. Each of its entries is played. Pass a list.")
        if isinstance(source, Sequence) and not len(source):
            raise ArgumentError("tasks is empty. There is nothing to play. Pass at least one.")
        self.source, self.seed = source, seed

    def after(self, done: set[int]) -> Iterator[tuple[int, Any]]:
        """(group, task) of all groups but those that are done, from the first."""
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


class Bound(Protocol):
    """What says how many groups may be begun."""

    @property
    def groups(self) -> int:
        """That are wanted at once."""
        ...

    @property
    def most(self) -> int:
        """That are taken at once."""
        ...

    def allowed(self, taken: int, dull: int) -> int:
        """That may have been begun, when so many steps are done and so many groups teach nothing."""
        ...


@dataclass(frozen=True)
class Pace:
    """The bound on groups.

    >>> pace = Pace(groups=16, steps_ahead=1, refill=3)
    >>> pace.allowed(taken=0, dull=0), pace.allowed(taken=2, dull=0), pace.allowed(taken=0, dull=5)
    (32, 64, 37)

    Args:
        groups: whose rewards differ, in one optimizer step.
        steps_ahead: steps whose groups may be begun before they are needed; 0 plays and trains in turns.
        refill: a step is given up to `refill` times as many groups, where the rewards of some are equal.
        steps: of the run; for none after them is played.
    """

    groups: int
    steps_ahead: int = 1
    refill: int = 3
    steps: int = 1 << 31

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("steps_ahead", 0), ("refill", 1)):
            if getattr(self, name) < least:
                raise ArgumentError(
                    f"online.{name} is {getattr(self, name)}. Nothing could be played. It must be at least {least}."
                )

    @property
    def most(self) -> int:
        """Groups of one step, those with equal rewards among them."""
        return self.groups * self.refill

    def allowed(self, taken: int, dull: int) -> int:
        """Groups that may have been begun since the run began.

        Args:
            taken: steps that are done, their weights pushed.
            dull: finished groups whose rewards are equal or unknown.
        """
        steps = min(self.steps_ahead + taken + 1, self.steps)
        return steps * self.groups + min(dull, steps * (self.most - self.groups))


Floats = NDArray[np.float32]
_ENDED = ("stop", "tool_calls", "function_call")


@dataclass(frozen=True)
class Signal:
    """Which reward is trained on, and how.

    Args:
        name: of the reward; "" is the scalar one, as for `train`.
        compared: with the others of its group, so that equal ones teach nothing.
        free: nobody trains on it yet, so that rewards may have any names.
        tolerance: rewards within it of one another are equal.
        zero_truncated: what was cut off, or does not say how it ended, has reward 0.
    """

    name: str = ""
    compared: bool = True
    free: bool = False
    tolerance: float = 0.0
    zero_truncated: bool = False

    @classmethod
    def of(cls, config: Config) -> Signal:
        """As the config of a run says; groups that are to be masked are taken like others."""
        told = config.filter
        compared = config.advantage.baseline != "none" and not told.mask_even
        return cls(config.data.reward, compared, tolerance=told.tolerance, zero_truncated=told.zero_truncated)

    def of_records(self, records: Sequence[Mapping[str, Any]]) -> Floats:
        """[n] float32, NaN where there is none.

        >>> Signal().of_records([{"reward": 1}, {"reward": None}, {"rewards": {"a": 2}}]).tolist()
        [1.0, nan, nan]
        """
        if self.zero_truncated:
            return self.of_traces(Traces.from_records(records))
        places = [{**(record.get("rewards") or {}), "reward": record.get("reward")} for record in records]
        found = [self._of(place) for place in places]
        return np.array([np.nan if value is None else value for value in found], np.float32)

    def _of(self, rewards: Mapping[str, Any]) -> Any:
        """The one that is trained on, None where it is not known; of several names the first that there is."""
        return next((each for each in map(rewards.get, self._names) if each is not None and math.isfinite(each)), None)

    @property
    def _names(self) -> list[str]:
        return [self.name, *split_names(self.name)] if self.name else ["reward"]

    def of_traces(self, traces: Traces) -> Floats:
        """The same of records that were read."""
        found = traces.reward
        if self.name:
            told = [self._of({**trace.rewards, "reward": trace.reward}) for trace in traces]
            found = np.array([np.nan if value is None else value for value in told], np.float32)
        if self.zero_truncated:
            ended = [any(each.finish_reason in _ENDED for each in trace.generations[-1:]) for trace in traces]
            found = np.where(np.isnan(found) | ended, found, np.float32(0))
        return found

    def check(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Refuses rewards by other names than the one that is trained on: no group would ever teach anything.

        One of that name that is not known, as its function failed or does not apply, is not refused.
        """
        names = {name for record in records for name in record.get("rewards") or {}}
        there = names | ({"reward"} if any("reward" in record for record in records) else set())
        wanted = f"data.reward is {self.name!r}" if self.name else "data.reward names none of them"
        if not self.free and names and not there & {*self._names}:
            raise ArgumentError(
                f"the rewards are {', '.join(sorted(names))[:200]}, and {wanted}. Nothing would be trained on. "
                "Set data.reward to the one that is, or return one number."
            )

    def is_dull(self, rewards: Floats) -> bool:
        """Whether a group teaches nothing: no known reward, or where they are compared fewer than two unlike ones.

        >>> [Signal().is_dull(np.float32(group)) for group in ([1, np.nan], [1, 1], [1, 0])]
        [True, True, False]
        """
        known = rewards[~np.isnan(rewards)].astype(np.float64)
        return not len(known) or (self.compared and bool(np.ptp(known) <= self.tolerance))


class Score(Protocol):
    """Scores the trajectories of a group together, in their records."""

    def prepare(self, played: Sequence[Played]) -> None:
        """Makes the records such as they are to be read where they are never scored."""
        ...

    def __call__(self, played: Sequence[Played]) -> Awaitable[list[dict[str, Failure]]]:
        """Sets their rewards; gives for each the functions that failed."""
        ...


@dataclass
class Failures:
    """Failures of one function.

    Args:
        count: trajectories without its reward; of playing, those that failed.
        first: task, trajectory, function, what went wrong, and its line.
        traceback: of the first, "" where there is none.
    """

    count: int
    first: str
    traceback: str


IDS = 65_536
"""Ids of answers that are remembered."""


@dataclass
class Counts:
    """What was played since the collector began; read by the trainer, which need not see one moment.

    Args:
        begun, finished, dull: groups, those on the disk already among them; one is finished when it is there.
        trajectories, failed: of groups that are finished or about to be: who sees one on the disk sees it counted. What
            could not be scored has failed too.
        rewarded, rewards: those whose reward is known, and the sum of these.
        failures: by what failed: "playing", or "reward function NAME".
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
        """Trajectories that did not fail, and to which no function gave a reward."""
        return max(self.trajectories - self.failed - self.rewarded, 0)

    @property
    def reward(self) -> float:
        """Mean of the known ones; NaN where there is none."""
        return self.rewards / self.rewarded if self.rewarded else math.nan

    def add(self, rewards: Floats, dull: bool, failed: int = 0) -> None:
        """Counts what came of a group, by the rewards of its trajectories."""
        known = rewards[~np.isnan(rewards)]
        self.dull += dull
        self.trajectories, self.failed = self.trajectories + len(rewards), self.failed + failed
        self.rewarded, self.rewards = self.rewarded + len(known), self.rewards + float(known.sum(dtype=np.float64))


@dataclass
class Collector:
    """One player of groups.

    Args:
        contract: what plays a task.
        tasks: (group, task) in order, without the groups that are there.
        link: to the servers.
        writer: where groups go; None for what evaluates alone.
        pace: how many may be begun.
        play: how.
        score: of a group, for what scores trajectories together.
        unscored: where groups are kept until they are scored; those that are there are not played again.
        signal: which groups teach something.
        counts: of the groups that are on the disk.
        taken: steps that are done.
        share: which of how many collectors this is; together they begin as many groups as one would.
        by_address: give each trajectory an address that records, for agents that exist.
        logprob_kind: what the servers' logprobs are of; None asks them (`measured_kind`).
        for_training: sample what the trainer can follow: what the model's generation_config.json would change is off,
            and requests with such options are refused, but in evaluations.
        tokenizer: of the policy, for `play.ids` "tokens".
    """

    contract: Any
    tasks: Iterator[tuple[int, Any]]
    link: Link
    writer: Writer | None
    pace: Bound
    play: Play
    score: Score | None = None
    unscored: Unscored | None = None
    signal: Signal = field(default_factory=Signal)
    counts: Counts = field(default_factory=Counts)
    taken: int = 0
    share: tuple[int, int] = (0, 1)
    by_address: bool = False
    logprob_kind: str | None = None
    for_training: bool = True
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        self._wake = asyncio.Event()
        self._under_way: dict[str, float] = {}
        self._chat: Any = None
        self._proxy: Proxy | None = None
        self._row: list[Played] = []
        self._ids: OrderedDict[str, None] = OrderedDict()
        self.exhausted = False
        self.failing: TracegradError | None = None
        self.finished_at = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether all tasks are played; raises `failing`, which is known before the last group counts as finished."""
        ended = self.exhausted and self.counts.finished == self.counts.begun
        if ended and self.failing is not None:
            raise self.failing
        return ended

    @property
    def file(self) -> Path:
        """Where groups go."""
        assert self.writer is not None
        return self.writer.folder / self.writer.name

    @property
    def retried(self) -> int:
        """Calls that were sent again since the link was made."""
        return self.link.servers.retried

    def check(self) -> None:
        """Raises what ended the link, and where nothing has finished for `play.patience` seconds."""
        self.link.check()
        idle = time.monotonic() - self.finished_at
        if idle > self.play.patience and self._under_way:
            name, began = min(self._under_way.items(), key=lambda each: each[1])
            raise TracegradError(
                f"no group has finished for {idle:.0f} s. The oldest trajectory under way is {name}, for "
                f"{time.monotonic() - began:.0f} s. The trainer would wait for ever. Look at its environment and at "
                "the servers, or raise play.patience."
            )

    def wait(self, seconds: float) -> None:
        """Returns once a group has finished or playing has ended since the last call, at the latest after so long."""
        self.link.wait(seconds)

    def begin(self) -> None:
        """Lets groups begin: the servers have the weights they are to have."""
        self.finished_at = time.monotonic()
        self.link.begin(self._playing)

    def step_taken(self, steps: int) -> None:
        """So many steps are done and their weights pushed: more groups may be begun."""
        self.taken = steps
        self.link.soon(self._wake.set)

    def others_dull(self, groups: int) -> None:
        """So many more groups that others played teach nothing: more may be begun in their place."""
        self.counts.dull += groups
        self.link.soon(self._wake.set)

    def evaluate(self, contract: Any, tasks: Sequence[Any], name: str) -> list[Played]:
        """Plays each task once, for the record of an evaluation."""

        done = 0

        def progress(seconds: float) -> str:
            rest = left(seconds, done, len(tasks))
            return f"{name}: {done:,} of {len(tasks):,} tasks played in {seconds:.0f} s, {rest}"

        async def played(*_: Any) -> list[Played]:
            await self._opened()
            some = asyncio.Semaphore(256)

            async def one(number: int, task: Any) -> Played:
                nonlocal done
                async with some:
                    found = await self._play(contract, task, f"{name}-{number}", None)
                [scored] = await self._scored([found])
                done += 1
                return scored

            return list(await asyncio.gather(*(one(number, task) for number, task in enumerate(tasks))))

        return self.link.run(played, progress)

    async def _playing(self) -> None:
        await self._opened()
        running: set[asyncio.Task[Any]] = set()
        wake = asyncio.create_task(self._wake.wait())
        try:
            while True:
                running |= self._begun()
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

    async def _opened(self) -> None:
        if self._chat is None:
            self._chat = await self._road()
            if self.logprob_kind is None:
                heated = "raw" if self.play.temperature == 1.0 else "processed"
                self.logprob_kind = await measured_kind(self.link.servers) or heated
            if self.for_training and (why := refusal({"temperature": self.play.temperature}, self._kind)) is not None:
                raise ArgumentError(f"play.temperature is {self.play.temperature}: {why}")
        if self.by_address and self._proxy is None and self.play.ids == "chat":
            self._proxy = await self.link.stack.enter_async_context(self._recorder())

    def _begun(self) -> set[asyncio.Task[None]]:
        found, (mine, of) = set(), self.share
        allowed = -(-(self.pace.allowed(self.taken, self.counts.dull) - mine) // of)
        while not self.exhausted and self.counts.begun < allowed:
            entry = next(self.tasks, None)
            if entry is None:
                self.exhausted = True
                self.link.news.set()
                break
            self.counts.begun += 1
            found.add(asyncio.create_task(self._group(*entry)))
        return found

    async def _group(self, number: int, task: Any) -> None:
        """Plays one group, keeps it, scores it and writes it."""
        played = None if self.unscored is None else await asyncio.to_thread(self._kept, number, task, self.unscored)
        if played is None:
            names = [f"{number}-{sample}" for sample in range(self.play.samples)]
            plays = (self._play(self.contract, task, name, str(number)) for name in names)
            played = list(await asyncio.gather(*plays))
            if self.score is not None and self.unscored is not None:
                self.score.prepare(played)
                await asyncio.to_thread(self.unscored.keep, number, [each.record for each in played])
        played = await self._scored(played)
        records = [each.record for each in played]
        rewards = self.signal.of_records(records)
        self.counts.add(rewards, self.signal.is_dull(rewards), sum(each.error is not None for each in played))
        self._note_failures(played)
        try:
            self.signal.check(records)
            self._check_ids(records)
        except (ArgumentError, SyncFault) as error:  # what was played is written first
            self.failing = error
        await asyncio.to_thread(self._write, number, records)
        self.counts.finished += 1
        self.finished_at = time.monotonic()
        self.link.news.set()
        if self.failing is not None:
            raise self.failing

    def _check_ids(self, records: list[dict[str, Any]]) -> None:
        """Refuses an answer with the id of another one: it was sampled once, and would be trained twice."""
        for call in (call for record in records for call in record.get("calls") or []):
            response = call.get("response")
            name = response.get("id") if isinstance(response, Mapping) else None
            if not isinstance(name, str) or not name:
                continue
            if name in self._ids:
                raise SyncFault(cached_response(name, "A server"))
            self._ids[name] = None
        while len(self._ids) > IDS:
            self._ids.popitem(last=False)

    def _kept(self, number: int, task: Any, unscored: Unscored) -> list[Played] | None:
        """A group that was played before and not scored; None where it is to be played."""
        if (records := unscored.read(number)) is None:
            return None
        try:
            return [restored(record, task) for record in records]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise unusable(unscored.path(number), error) from error

    def _write(self, number: int, records: list[dict[str, Any]]) -> None:
        assert self.writer is not None
        self.writer.write(records)
        if self.unscored is not None:
            self.unscored.drop([number])

    async def _scored(self, played: list[Played]) -> list[Played]:
        """The trajectories with their rewards; those that failed, or whose scoring did, are counted and say why."""
        for each in played:
            if each.error is not None:
                self._note("playing", each.error, each.failure)
        if self.score is None:
            return played
        self.score.prepare(played)
        found = []
        for each, failures in zip(played, await self.score(played), strict=True):
            group = each.record.get("group")
            where = f"{'' if group is None else f'task {group}, '}trajectory {each.record['id']}"
            lines = {name: f"{where}: reward function {name}: {failure}" for name, failure in failures.items()}
            for name, line in lines.items():
                self._note(f"reward function {name}", line, failures[name])
            first = next(iter(failures), None)
            found.append(each if first is None else replace(each, error=lines[first], failure=failures[first]))
        return found

    def _note(self, what: str, line: str, failure: Failure | None) -> None:
        """Counts a failure; the first of each function is said with its traceback."""
        if (known := self.counts.failures.get(what)) is not None:
            known.count += 1
            return
        traceback = "" if failure is None else failure.traceback
        self.counts.failures[what] = Failures(1, line, traceback)
        for said in (f"failed   {line}", *(f"         {each}" for each in traceback.splitlines())):
            self.link.say(said)

    async def _play(self, contract: Any, task: Any, name: str, group: str | None) -> Played:
        told = self.play
        self._under_way[name] = time.monotonic()
        try:
            # An agent's own client may ask, and be asked again, for what the servers were called when it began.
            with self.link.servers.holding() if self._proxy is not None else nullcontext():
                return await play(
                    contract,
                    task,
                    chat=self._chat,
                    version=lambda: self.link.version,
                    received=lambda: self.link.coming,
                    limits=Limits(turns=told.turns, seconds=told.seconds),
                    id=name,
                    group=group,
                    sampling=self._sampling,
                    logprob_kind=self._kind,
                    for_training=self.for_training and group is not None,
                    proxy=self._proxy,
                )
        finally:
            del self._under_way[name]

    async def _road(self) -> Any:
        """What trajectories ask."""
        if self.play.ids == "chat":
            return self.link.servers.chat
        if self.tokenizer is None:
            raise ArgumentError(
                'play.ids is "tokens", and the policy\'s tokenizer is not known here. No prompt could be written. '
                'Leave it at "chat".'
            )
        tokens = Tokens(self.link.servers, self.tokenizer)
        await tokens.check()
        return tokens

    def _recorder(self) -> Proxy:
        """What agents that bring their own client are given the address of."""
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
        told = {"temperature": self.play.temperature, "max_tokens": self.play.max_tokens}
        return {**NEUTRAL, **told} if self.for_training else told

    @property
    def _kind(self) -> str:
        assert self.logprob_kind is not None
        return self.logprob_kind

    def _note_failures(self, played: list[Played]) -> None:
        """Sets `failing` where nothing but failures has come for a while: the first says why."""
        for each in played:
            self._row = [*self._row, each] if each.error is not None else []
        if len(self._row) >= self.play.failures:
            first = self._row[0]
            self.failing = TracegradError(
                f"{len(self._row)} trajectories in a row have failed. Nothing can be learnt from them. They are on the "
                f"disk; rewards that failed can be scored anew (tracegrad score). The first: {first.error}\n"
                f"{getattr(first.failure, 'traceback', '') or ''}"
            )


def counted(follower: Follower, signal: Signal) -> tuple[set[int], Counts]:
    """Which groups are on the disk and new to the follower, and their counts; they are not kept as unscored ones."""
    done, counts = set(), Counts()
    for _, traces in follower.look():
        group = next(iter(traces.groups), None) or ""
        done |= {int(group)} if group.isdecimal() else set()
        rewards = signal.of_traces(traces)
        counts.begun, counts.finished = counts.begun + 1, counts.finished + 1
        failed = sum(any(mark in trace.record for mark in _FAILED) for trace in traces)
        counts.add(rewards, signal.is_dull(rewards), failed)
    unscored = Unscored(follower.folder.parent)
    unscored.drop(unscored.groups & done)
    return done, counts


_FAILED = (b'"failure":{', b'"reward_failures":{')
"""What the records say of trajectories that failed, or whose scoring did."""
