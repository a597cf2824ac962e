"""Plays groups beside the trainer, in a thread with an event loop of its own, and writes each when it is whole.

Nothing passes from here to the trainer but what stands in the folder, and errors. Weights are pushed through this
loop, as the servers are its own. Made by `loop`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent import futures
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.online.frames import Writer
from tracegrad.online.options import Online
from tracegrad.online.pace import Pace
from tracegrad.online.serve import model_of
from tracegrad.online.signal import Signal
from tracegrad.rollout.adapters import one_turn, with_tools
from tracegrad.rollout.play import Played, play
from tracegrad.rollout.policy import Limits
from tracegrad.rollout.tokens import Tokens
from tracegrad.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tracegrad.rollout.proxy import Proxy

T = TypeVar("T")
Score = Callable[[Sequence[Played]], Awaitable[None]]
"""Scores the trajectories of a group together, in their records."""


@dataclass
class Counts:
    """What was played since the collector began; read by the trainer, which need not see one moment.

    Args:
        begun, finished, dull: groups, those on the disk already among them.
        trajectories, failed: of finished groups.
    """

    begun: int = 0
    finished: int = 0
    dull: int = 0
    trajectories: int = 0
    failed: int = 0


@dataclass
class Collector:
    """One player of groups.

    Args:
        contract: what plays a task.
        tasks: (group, task) in order, without the groups that are there.
        servers: makes the pool of servers; an async context manager.
        sync: makes what pushes weights to it.
        writer: where groups go.
        pace: how many may be begun.
        options: of the run.
        score: of a group, for what scores trajectories together.
        signal: which groups teach something.
        counts: of the groups that are on the disk.
        taken: steps that are done.
        version: of the policy that the servers are given first.
        by_address: give each trajectory an address that records, for agents that exist.
        logprob_kind: what the servers' logprobs are of; by default as those that a run starts are told, processed
            where the temperature is not 1.
        tokenizer: of the policy, for `options.ids` "tokens".
    """

    contract: Any
    tasks: Iterator[tuple[int, Any]]
    servers: Callable[[], Any]
    sync: Callable[[Any], Any]
    writer: Writer
    pace: Pace
    options: Online
    score: Score | None = None
    signal: Signal = field(default_factory=Signal)
    counts: Counts = field(default_factory=Counts)
    taken: int = 0
    version: int = 0
    by_address: bool = False
    logprob_kind: str | None = None
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._open = threading.Event()
        self._held = asyncio.Event()
        self._news = threading.Event()
        self._under_way: dict[str, float] = {}
        self._proxy: Proxy | None = None
        self._row: list[Played] = []
        self._stopping = False
        self.error: BaseException | None = None
        self.exhausted = False
        self.finished_at = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="tracegrad-collector", daemon=True)

    def start(self) -> None:
        """Begins; returns when the servers can be asked.

        Raises:
            BaseException: what opening the servers raised.
        """
        self._thread.start()
        self._open.wait()
        self.check()

    def stop(self) -> None:
        """Ends: what is under way is let go."""
        self._stopping = True
        self._tell(self._wake.set)
        self._thread.join(30)

    def __enter__(self) -> Collector:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check(self) -> None:
        """Raises what ended the collector, and where nothing has finished for `options.patience` seconds."""
        if self.error is not None:
            raise self.error
        idle = time.monotonic() - self.finished_at
        if idle > self.options.patience and self._under_way:
            name, began = min(self._under_way.items(), key=lambda each: each[1])
            raise TracegradError(
                f"no group has finished for {idle:.0f} s. The oldest trajectory under way is {name}, for "
                f"{time.monotonic() - began:.0f} s. The trainer would wait for ever. Look at its environment and at "
                "the servers, or raise online.patience."
            )

    def wait(self, seconds: float) -> None:
        """Returns once a group has finished or playing has ended since the last call, at the latest after so long."""
        self._news.wait(seconds)
        self._news.clear()

    def run(self, work: Callable[[Any, Any], Coroutine[Any, Any, T]]) -> T:
        """Runs `work(servers, sync)` in the collector's loop, and waits for what it gives."""
        coroutine = work(self._servers, self._sync)
        if not self._thread.is_alive():
            coroutine.close()
            self.check()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        while not futures.wait([future], timeout=1.0).done:
            if not self._thread.is_alive():
                self.check()
                raise TracegradError("what plays has ended. Nothing can be asked of the servers. Start the run again.")
        return future.result()

    def push(self, weights: Any, version: int) -> Any:
        """Brings weights to all servers; calls under way are sampled by two versions."""

        async def pushed(_: Any, sync: Any) -> Any:
            try:
                return await sync.push(weights, version)
            finally:
                self.version = version

        return self.run(pushed)

    def begin_playing(self) -> None:
        """Lets groups begin: the servers have the weights they are to have."""
        self.finished_at = time.monotonic()
        self._tell(self._held.set)

    def step_taken(self, steps: int) -> None:
        """So many steps are done and their weights pushed: more groups may be begun."""
        self.taken = steps
        self._tell(self._wake.set)

    def evaluate(self, contract: Any, tasks: Sequence[Any], name: str) -> list[Played]:
        """Plays each task once, for the record of an evaluation."""

        async def played(servers: Any, _: Any) -> list[Played]:
            some = asyncio.Semaphore(256)

            async def one(number: int, task: Any) -> Played:
                async with some:
                    found = await self._play(servers, contract, task, f"{name}-{number}", None)
                if self.score is not None:
                    await self.score([found])
                return found

            return list(await asyncio.gather(*(one(number, task) for number, task in enumerate(tasks))))

        return self.run(played)

    def _tell(self, what: Callable[[], None]) -> None:
        """Has the loop do something; where it has ended, `check` says why."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:
            self.error = error
        finally:
            self._open.set()
            self._news.set()
            with suppress(Exception):
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _main(self) -> None:
        async with AsyncExitStack() as stack:
            self._servers = await stack.enter_async_context(self.servers())
            if not self._servers.model:
                self._servers.model = await model_of(self._servers)
            self._sync = self.sync(self._servers)
            self._chat = await self._road()
            if self.by_address and self.options.ids == "chat":
                self._proxy = await stack.enter_async_context(self._recorder())
            self._open.set()
            running: set[asyncio.Task[None]] = set()
            try:
                await self._first(self._held, self._wake)
                while not self._stopping:
                    self._wake.clear()
                    running |= self._begun()
                    wake = asyncio.create_task(self._wake.wait())
                    done, _ = await asyncio.wait({wake, *running}, return_when=asyncio.FIRST_COMPLETED)
                    wake.cancel()
                    for task in done - {wake}:
                        running.discard(task)
                        task.result()
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _first(self, *events: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _begun(self) -> set[asyncio.Task[None]]:
        found = set()
        while not self.exhausted and self.counts.begun < self.pace.allowed(self.taken, self.counts.dull):
            entry = next(self.tasks, None)
            if entry is None:
                self.exhausted = True
                self._news.set()
                break
            self.counts.begun += 1
            found.add(asyncio.create_task(self._group(*entry)))
        return found

    async def _group(self, number: int, task: Any) -> None:
        """Plays, scores and writes one group."""
        names = [f"{number}-{sample}" for sample in range(self.options.samples)]
        plays = (self._play(self._servers, self.contract, task, name, str(number)) for name in names)
        played = list(await asyncio.gather(*plays))
        if self.score is not None:
            await self.score(played)
        records = [each.record for each in played]
        self.signal.check(records)
        await asyncio.to_thread(self.writer.write, records)
        self.counts.finished += 1
        self.counts.dull += self.signal.is_dull(self.signal.of_records(records))
        self.counts.trajectories += len(played)
        self.counts.failed += sum(each.error is not None for each in played)
        self.finished_at = time.monotonic()
        self._news.set()
        self._note_failures(played)

    async def _play(self, servers: Any, contract: Any, task: Any, name: str, group: str | None) -> Played:
        told = self.options
        self._under_way[name] = time.monotonic()
        try:
            # An agent's own client may ask, and be asked again, for what the servers were called when it began.
            with servers.holding() if self._proxy is not None else nullcontext():
                return await play(
                    contract,
                    task,
                    chat=self._chat,
                    version=lambda: self.version,
                    limits=Limits(turns=told.turns, seconds=told.seconds),
                    id=name,
                    group=group,
                    sampling=self._sampling,
                    logprob_kind=self._kind,
                    proxy=self._proxy,
                )
        finally:
            del self._under_way[name]

    async def _road(self) -> Any:
        """What trajectories ask."""
        if self.options.ids == "chat":
            return self._servers.chat
        if self.tokenizer is None:
            raise ArgumentError(
                'online.ids is "tokens", and the policy\'s tokenizer is not known here. No prompt could be written. '
                'Leave it at "chat".'
            )
        tokens = Tokens(self._servers, self.tokenizer)
        await tokens.check()
        return tokens

    def _recorder(self) -> Proxy:
        """What agents that bring their own client are given the address of."""
        from tracegrad.rollout.proxy import Proxy

        return Proxy(
            self._servers.where,
            upstream_key=self._servers.key,
            model=lambda: self._servers.model,
            version=lambda: self.version,
            sampling=self._sampling,
            logprob_kind=self._kind,
        )

    @property
    def _sampling(self) -> dict[str, Any]:
        return {"temperature": self.options.temperature, "max_tokens": self.options.max_tokens}

    @property
    def _kind(self) -> str:
        return self.logprob_kind or ("raw" if self.options.temperature == 1.0 else "processed")

    def _note_failures(self, played: list[Played]) -> None:
        """Stops the run where nothing but failures has come for a while: the first says why."""
        for each in played:
            self._row = [*self._row, each] if each.error is not None else []
        if len(self._row) >= self.options.failures:
            first = self._row[0]
            raise TracegradError(
                f"{len(self._row)} trajectories in a row have failed. Nothing can be learnt from them. The first: "
                f"{first.error}\n{getattr(first.failure, 'traceback', '') or ''}"
            )


def contract_of(agent: Any, environment: Any, tools: Any, rewards: Any) -> tuple[Any, bool]:
    """What plays a task, and whether groups are scored by reward functions afterwards.

    Raises:
        ArgumentError: for two of them, or none.
    """
    given = [name for name, value in (("agent", agent), ("environment", environment), ("tools", tools)) if value]
    if len(given) > 1:
        raise ArgumentError(f"{given[0]} and {given[1]} are both given. Each says how a task is played. Pass one.")
    if agent is not None or environment is not None:
        return (agent if agent is not None else environment), rewards is not None
    if not rewards:
        raise ArgumentError(
            "neither an agent, an environment nor rewards are given. What is good would not be known. Pass rewards=."
        )
    return (with_tools(tools) if tools else one_turn()), True
