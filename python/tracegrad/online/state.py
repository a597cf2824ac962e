"""What the trainer tells collectors in other processes: which weights serve, where, and how far the run is.

`state.json` in the folder of the run, written by the first rank and replaced as a whole.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tracegrad.errors import FormatError
from tracegrad.manifest import count, text
from tracegrad.shards import read_text, write_bytes

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
