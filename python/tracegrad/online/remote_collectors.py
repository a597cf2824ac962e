"""Work with collectors in other processes: `state.json` tells them the serving weights and the progress of the run."""

import json
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from tracegrad.errors import FormatError, TracegradError
from tracegrad.online.collector import Counts, Pace
from tracegrad.online.server_pool import Interrupted, Link
from tracegrad.storage.manifest import count, text
from tracegrad.storage.safetensors_file import read_text, write_bytes

NAME = "state.json"
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class State:
    """A moment of a run.

    Args:
        version: of the weights that each of `servers` has.
        coming: the version that a push is bringing, or the same.
        taken: steps that are done, their weights pushed.
        servers: URLs that may be asked.
        model: the name by which they know the policy.
        over: the run has ended; nothing more is to be played.
    """

    version: int = 0
    coming: int = 0
    taken: int = 0
    servers: tuple[str, ...] = ()
    model: str = ""
    over: bool = False

    def write(self, folder: Path) -> None:
        """Replaces what the folder says."""
        write_bytes(folder / NAME, [json.dumps(asdict(self)).encode()])

    @classmethod
    def reopen(cls, folder: Path) -> None:
        """Takes away what says that a run is over: it goes on, and its collectors wait for what it will say."""
        if (state := cls.read(folder)) is not None and state.over:
            (folder / NAME).unlink()

    @classmethod
    def read(cls, folder: Path) -> "State | None":
        """What the folder says; None where it says nothing yet."""
        path = folder / NAME
        if not path.exists():
            return None
        try:
            told = json.loads(read_text(path, MOST_BYTES))
            counts = {name: count(told[name]) for name in ("version", "coming", "taken")}
            servers = tuple(map(text, told["servers"]))
            return cls(**counts, servers=servers, model=text(told["model"]), over=told["over"] is True)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(
                f"{path}: not the state of a run ({str(error)[:80]!r}). Which weights serve is not known. Start the "
                "trainer again, which writes it anew."
            ) from error


LOOK_S = 2.0
"""Seconds between looks at the servers, which nobody else asks from this process."""
ENDED = re.compile(r"([0-9]{1,6})-of-([0-9]{1,6})\.ended")
"""Files in the folder of what is played: collectors that have no more tasks."""


@dataclass
class Elsewhere:
    """What the loop asks, where others play.

    Args:
        link: to the servers.
        pace: of the run; each collector keeps its share of it.
        folder: where they write.
        patience: seconds without a new group after which the run stops.
        state: as the collectors are to be told it first.
    """

    link: Link
    pace: Pace
    folder: Path
    patience: float
    state: State = field(default_factory=State)
    failing: ClassVar[None] = None
    """Collectors stop by themselves where nothing but failures comes."""

    def __post_init__(self) -> None:
        self.counts = Counts()
        self.finished_at = time.monotonic()
        self._size = -1
        self._looked = time.monotonic()
        self._playing = False
        self.link.told = self._weights

    @property
    def over(self) -> bool:
        """Whether each of the collectors has said that it has no more tasks."""
        ended = [found for path in self.folder.glob("*.ended") if (found := ENDED.fullmatch(path.name))]
        return any(len({each[1] for each in ended if each[2] == of}) == int(of) > 0 for of in {m[2] for m in ended})

    @property
    def retried(self) -> int:
        """Requests to the servers that were sent again by the trainer; collectors say their own."""
        return self.link.servers.retried

    def check(self) -> None:
        """Raises what ended the link, and where the folder has not grown for `patience` seconds."""
        self.link.check()
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            with suppress(Interrupted):
                self.link.run(self._look)
        size = sum(path.stat().st_size for path in self.folder.glob("*.jsonl.zst"))
        if size != self._size:
            self._size, self.finished_at = size, time.monotonic()
        idle = time.monotonic() - self.finished_at
        if self._playing and idle > self.patience:
            raise TracegradError(
                f"{self.folder}: no group has come for {idle:.0f} s. The trainer would wait for ever. Look whether the "
                "collectors run and what they say, or raise play.patience."
            )

    def wait(self, seconds: float) -> None:
        """Returns after so long: what others play is seen in the folder alone."""
        time.sleep(seconds)

    def begin(self) -> None:
        """Lets collectors begin."""
        self._playing, self.finished_at = True, time.monotonic()
        self._tell(model=self.link.servers.model)

    def step_taken(self, steps: int) -> None:
        """Tells that so many steps are done and their weights pushed."""
        self.finished_at = time.monotonic()
        self._tell(taken=steps)

    def end(self) -> None:
        """Tells that nothing more is to be played."""
        self._tell(over=True)

    async def _look(self, servers: Any, _: Any) -> None:
        """Sets aside servers that are gone or began anew, so that they get the weights when they answer."""
        for url in servers.urls:
            info = await servers.ask(url, "/weight_info", method="GET")
            told = info.body.get("weight_version") if info.ok and isinstance(info.body, dict) else None
            if info.status == 0 or told not in (None, str(self.state.version)):
                servers.leave_out(url, f"it says that it has version {told}")

    def _weights(self, link: Link, pushed: Any) -> None:
        servers = self.state.servers if pushed is None else tuple(pushed.ok)
        self._tell(version=link.version, coming=link.coming, servers=servers, model=link.servers.model)

    def _tell(self, **changed: Any) -> None:
        self.state = replace(self.state, **changed)
        if self._playing:
            self.state.write(self.folder.parent)
