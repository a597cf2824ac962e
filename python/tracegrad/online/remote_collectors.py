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
        coming: version that a running weight sync sends; otherwise equal to `version`.
        taken: completed steps whose weights have been pushed.
        servers: URLs that accept requests.
        model: model name of the policy on the servers.
        over: whether the run has ended and rollouts must stop.
    """

    version: int = 0
    coming: int = 0
    taken: int = 0
    servers: tuple[str, ...] = ()
    model: str = ""
    over: bool = False

    def write(self, folder: Path) -> None:
        """Write state.json in the folder of the run, replacing an existing one."""
        write_bytes(folder / NAME, [json.dumps(asdict(self)).encode()])

    @classmethod
    def reopen(cls, folder: Path) -> None:
        """Delete a state.json that marks the run as ended: it is resumed, and its collectors wait for a new one."""
        if (state := cls.read(folder)) is not None and state.over:
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
            counts = {name: count(record[name]) for name in ("version", "coming", "taken")}
            servers = tuple(map(text, record["servers"]))
            return cls(**counts, servers=servers, model=text(record["model"]), over=record["over"] is True)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(
                f"TG-ONLINE-025: {path}: not the state of a run ({str(error)[:80]!r}). Which weights serve is not "
                "known. Start the trainer again, which writes it anew."
            ) from error


LOOK_S = 2.0
"""Seconds between status requests to the servers. Nothing else in this process sends them requests."""
ENDED = re.compile(r"([0-9]{1,6})-of-([0-9]{1,6})\.ended")
"""File names in the rollout folder that mark collectors without remaining tasks."""


@dataclass
class RemoteCollectors:
    """Stand-in for `Collector` in the training loop if collectors in other processes do the rollouts.

    Args:
        link: connection to the servers.
        pace: limit on started groups of the run; each collector applies its share of it.
        folder: rollout folder that the collectors write to.
        patience: seconds without a new group after which the run stops.
        state: first state that is published to the collectors.
    """

    link: ServerPool
    pace: StalenessLimit
    folder: Path
    patience: float
    state: RunState = field(default_factory=RunState)
    failing: ClassVar[None] = None
    """Always None: remote collectors stop by themselves after too many failures in a row."""

    def __post_init__(self) -> None:
        self.counts = RolloutCounters()
        self.finished_at = time.monotonic()
        self._size = -1
        self._looked_at = time.monotonic()
        self._playing = False
        self.link.told = self._weights

    @property
    def over(self) -> bool:
        """Whether every collector has reported that it has no more tasks."""
        matches = [match for path in self.folder.glob("*.ended") if (match := ENDED.fullmatch(path.name))]
        return any(
            len({match[1] for match in matches if match[2] == of}) == int(of) > 0
            for of in {match[2] for match in matches}
        )

    @property
    def retried(self) -> int:
        """Requests that the trainer sent to the servers again; collectors count their own."""
        return self.link.servers.retried

    def check(self) -> None:
        """Raise the error that ended the link, or an error if the folder has not grown for `patience` seconds."""
        self.link.check()
        if time.monotonic() - self._looked_at > LOOK_S:
            self._looked_at = time.monotonic()
            with suppress(Interrupted):
                self.link.run(self._look)
        size = sum(path.stat().st_size for path in self.folder.glob("*.jsonl.zst"))
        if size != self._size:
            self._size, self.finished_at = size, time.monotonic()
        idle = time.monotonic() - self.finished_at
        if self._playing and idle > self.patience:
            raise TracegradError(
                f"TG-ONLINE-026: {self.folder}: no group has come for {idle:.0f} s. The trainer would wait for ever. "
                "Look whether the collectors run and what they say, or raise play.patience."
            )

    def wait(self, seconds: float) -> None:
        """Sleep for this many seconds: new groups of other processes are only visible in the folder."""
        time.sleep(seconds)

    def begin(self) -> None:
        """Publish the state, which lets collectors start."""
        self._playing, self.finished_at = True, time.monotonic()
        self._tell(model=self.link.servers.model)

    def step_taken(self, steps: int) -> None:
        """Publish that this many steps are done and their weights pushed."""
        self.finished_at = time.monotonic()
        self._tell(taken=steps)

    def end(self) -> None:
        """Publish that the run has ended and rollouts must stop."""
        self._tell(over=True)

    async def _look(self, servers: Any, _: Any) -> None:
        """Stop using servers that are gone or were restarted, so that they get the weights once they answer again."""
        for url in servers.urls:
            info = await servers.ask(url, "/weight_info", method="GET")
            version = info.body.get("weight_version") if info.ok and isinstance(info.body, dict) else None
            if info.status == 0 or version not in (None, str(self.state.version)):
                servers.leave_out(url, f"it says that it has version {version}")

    def _weights(self, link: ServerPool, pushed: Any) -> None:
        servers = self.state.servers if pushed is None else tuple(pushed.ok)
        self._tell(version=link.version, coming=link.coming, servers=servers, model=link.servers.model)

    def _tell(self, **changed: Any) -> None:
        self.state = replace(self.state, **changed)
        if self._playing:
            self.state.write(self.folder.parent)
