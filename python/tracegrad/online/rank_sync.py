"""How the ranks of a run end together: the first one decides, the others hear of it while they wait for its steps.

The sums are `trainer.distributed`'; the steps are the ledger's. Called by `loop`.
"""

import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from tracegrad.errors import TracegradError
from tracegrad.trainer.distributed import Ranks
from tracegrad.trainer.signals import Interrupt


@dataclass(frozen=True)
class Bond:
    """What ties this process to the other ranks of a run between their collective calls.

    Args:
        ranks: all of them.
        interrupt: of this process.
        name: of the run, as one group of processes may do several.
    """

    ranks: Ranks
    interrupt: Interrupt
    name: str

    @classmethod
    def of(cls, ranks: Ranks, interrupt: Interrupt) -> "Bond":
        """Every rank calls this."""
        return cls(ranks, interrupt, ranks.shared(secrets.token_hex(4)))

    def over(self) -> bool:
        """Whether the run is to end: the first rank is asked by a signal, its own or another's; it tells the others."""
        if told := self.ranks.heard():
            raise TracegradError(f"{told} This rank stops with it.")
        signalled = self.interrupt.received is not None
        if self.ranks.first:
            return signalled or self.ranks.finds_word(f"signal {self.name}")
        if signalled:
            self.ranks.leave_word(f"signal {self.name}")
        return self.ranks.finds_word(f"over {self.name}")

    def end(self) -> None:
        """No step follows: the first rank says so."""
        if self.ranks.first:
            self.ranks.leave_word(f"over {self.name}")

    def first(self) -> AbstractContextManager[None]:
        """As `telling`."""
        return telling(self.ranks)


@contextmanager
def telling(ranks: Ranks) -> Iterator[None]:
    """Around what the first rank does alone: where that fails, the others are told and stop too."""
    try:
        yield
    except BaseException as error:
        if ranks.first:
            ranks.tell(f"{type(error).__name__}: {error}"[:2000])
        raise
