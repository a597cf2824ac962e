"""Stop all ranks of a run together.

The first rank decides. The other ranks check for its decision while they wait for the next line of `steps.jsonl`.
"""

import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from tracegrad.errors import TracegradError
from tracegrad.trainer.distributed import Ranks
from tracegrad.trainer.signals import Interrupt


@dataclass(frozen=True)
class RankSync:
    """Stop and error signals between the ranks of a run, outside of their collective calls.

    Args:
        ranks: all ranks of the run.
        interrupt: signal handler of this process.
        name: unique name of the run, since one process group may run several.
    """

    ranks: Ranks
    interrupt: Interrupt
    name: str

    @classmethod
    def of(cls, ranks: Ranks, interrupt: Interrupt) -> "RankSync":
        """Create the object with a name shared by all ranks. Every rank must call this."""
        return cls(ranks, interrupt, ranks.broadcast(secrets.token_hex(4)))

    def should_stop(self) -> bool:
        """Return whether the run must end.

        The first rank decides: it ends the run if it or another rank has received a signal. The other ranks learn this
        through the store.

        Raises:
            TracegradError: if another rank has reported an error.
        """
        if message := self.ranks.stop_message():
            raise TracegradError(f"TG-ONLINE-022: {message} This rank stops too.")
        signalled = self.interrupt.received is not None
        if self.ranks.first:
            return signalled or self.ranks.has_flag(f"signal {self.name}")
        if signalled:
            self.ranks.set_flag(f"signal {self.name}")
        return self.ranks.has_flag(f"over {self.name}")

    def publish_end(self) -> None:
        """Let the first rank publish that no step follows."""
        if self.ranks.first:
            self.ranks.set_flag(f"over {self.name}")

    def propagate_error(self) -> AbstractContextManager[None]:
        """Return `propagate_error` for these ranks."""
        return propagate_error(self.ranks)


@contextmanager
def propagate_error(ranks: Ranks) -> Iterator[None]:
    """Wrap work of the first rank only: if it raises, its error is sent to the other ranks, which stop too."""
    try:
        yield
    except BaseException as error:
        if ranks.first:
            ranks.publish_stop(f"{type(error).__name__}: {error}"[:2000])
        raise
