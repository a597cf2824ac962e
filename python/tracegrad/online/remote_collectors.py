"""Coordinate with collectors in other processes; `state.json` has the servers' weights and the run's progress."""

import json
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from tracegrad.errors import FormatError, TracegradError
from tracegrad.online.collector import RolloutCounters, StalenessLimit
from tracegrad.online.server_pool import Interrupted, ServerPool
from tracegrad.storage.manifest import count, text
from tracegrad.storage.safetensors_file import read_text, write_bytes

NAME = "state.json"
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class RunState:
    """State of a run that the trainer publishes.

    Args:
        version: policy version that each of `servers` has.
        next_version: version that a running weight sync sends; otherwise equal to `version`.
        steps_done: completed steps whose weights have been pushed.
        servers: URLs that accept requests.
        model: model name of the policy on the servers.
        is_finished: whether the run has ended and rollouts must stop.
    """

    version: int = 0
    next_version: int = 0
    steps_done: int = 0
    servers: tuple[str, ...] = ()
    model: str = ""
    is_finished: bool = False

    def write(self, folder: Path) -> None:
        """Write state.json in the folder of the run, replacing an existing one."""
        write_bytes(folder / NAME, [json.dumps(asdict(self)).encode()])

    @classmethod
    def reopen(cls, folder: Path) -> None:
        """Delete a state.json that marks the run as ended: it is resumed, and its collectors wait for a new one."""
        if (state := cls.read(folder)) is not None and state.is_finished:
            (folder / NAME).unlink()

    @classmethod
    def read(cls, folder: Path) -> "RunState | None":
        """Read state.json from the folder of a run; None if it does not exist yet.

        Raises:
            FormatError: if the file is not valid.
        """
        path = folder / NAME
        if not path.exists():
            return None
        try:
            record = json.loads(read_text(path, MOST_BYTES))
            counts = {name: count(record[name]) for name in ("version", "next_version", "steps_done")}
            servers = tuple(map(text, record["servers"]))
            return cls(
                **counts, servers=servers, model=text(record["model"]), is_finished=record["is_finished"] is True
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(
                f"TG-ONLINE-025: {path}: not the state of a run ({str(error)[:80]!r}), so the servers' version is "
                "unknown. Restart the trainer to write the file again."
            ) from error


LOOK_S = 2.0
"""Seconds between status requests to the servers. Nothing else in this process sends them requests."""
ENDED = re.compile(r"([0-9]{1,6})-of-([0-9]{1,6})\.ended")
"""File names in the rollout folder that mark collectors without remaining tasks."""


@dataclass
class RemoteCollectors:
    """Stand-in for `Collector` in the training loop if collectors in other processes do the rollouts.

    Args:
        server_pool: connection to the servers.
        staleness_limit: limit on started groups of the run; each collector applies its share of it.
        folder: rollout folder that the collectors write to.
        stall_timeout_s: seconds without a new group after which the run stops.
        state: first state that is published to the collectors.
    """

    server_pool: ServerPool
    staleness_limit: StalenessLimit
    folder: Path
    stall_timeout_s: float
    state: RunState = field(default_factory=RunState)
    fatal_error: ClassVar[None] = None
    """Always None: remote collectors stop by themselves after too many failures in a row."""

    def __post_init__(self) -> None:
        self.counts = RolloutCounters()
        self.finished_at = time.monotonic()
        self._size = -1
        self._looked_at = time.monotonic()
        self._started = False
        self.server_pool.on_change = self._weights

    @property
    def is_finished(self) -> bool:
        """Whether every collector has reported that it has no more tasks."""
        matches = [match for path in self.folder.glob("*.ended") if (match := ENDED.fullmatch(path.name))]
        return any(
            len({match[1] for match in matches if match[2] == of}) == int(of) > 0
            for of in {match[2] for match in matches}
        )

    @property
    def retried(self) -> int:
        """Requests that the trainer sent to the servers again; collectors count their own."""
        return self.server_pool.servers.retried

    def check(self) -> None:
        """Raise the error that ended the thread of the servers, or an error if rollouts have stalled.

        Rollouts have stalled if the folder has not grown for `stall_timeout_s` seconds.
        """
        self.server_pool.check()
        if time.monotonic() - self._looked_at > LOOK_S:
            self._looked_at = time.monotonic()
            with suppress(Interrupted):
                self.server_pool.run(self._look)
        size = sum(path.stat().st_size for path in self.folder.glob("*.jsonl.zst"))
        if size != self._size:
            self._size, self.finished_at = size, time.monotonic()
        idle = time.monotonic() - self.finished_at
        if self._started and idle > self.stall_timeout_s:
            raise TracegradError(
                f"TG-ONLINE-026: {self.folder}: no new group for {idle:.0f} s. Check whether the collectors run, read "
                "their output, or raise rollout.stall_timeout_s."
            )

    def wait(self, seconds: float) -> None:
        """Sleep for this many seconds: new groups of other processes are only visible in the folder."""
        time.sleep(seconds)

    def start(self) -> None:
        """Publish the state, which lets collectors start."""
        self._started, self.finished_at = True, time.monotonic()
        self._publish(model=self.server_pool.servers.model)

    def set_steps_done(self, steps: int) -> None:
        """Publish that this many steps are done and their weights pushed."""
        self.finished_at = time.monotonic()
        self._publish(steps_done=steps)

    def end(self) -> None:
        """Publish that the run has ended and rollouts must stop."""
        self._publish(is_finished=True)

    async def _look(self, servers: Any, _: Any) -> None:
        """Suspend servers that do not answer or were restarted, so that they get the weights once they answer again."""
        for url in servers.urls:
            info = await servers.request(url, "/weight_info", method="GET")
            version = info.body.get("weight_version") if info.ok and isinstance(info.body, dict) else None
            if info.status == 0 or version not in (None, str(self.state.version)):
                servers.suspend(url, f"it reports version {version}")

    def _weights(self, server_pool: ServerPool, sync_result: Any) -> None:
        servers = self.state.servers if sync_result is None else tuple(sync_result.updated)
        self._publish(
            version=server_pool.version,
            next_version=server_pool.next_version,
            servers=servers,
            model=server_pool.servers.model,
        )

    def _publish(self, **changed: Any) -> None:
        self.state = replace(self.state, **changed)
        if self._started:
            self.state.write(self.folder.parent)
