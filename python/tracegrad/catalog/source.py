"""Where the tokens of some traces are taken from, and the columns of all of them: what a feed asks of its data.

Here are `Source`, the protocol, and `InMemory`, which is `Sequences` that are there as a whole.
"""

import hashlib
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tracegrad import trace_columns
from tracegrad.catalog.select import selected
from tracegrad.catalog.table import Catalog
from tracegrad.sequence import Sequences
from tracegrad.terms import subset


class Source(Protocol):
    """Traces of a run, by their numbers 0 to R-1."""

    @property
    def catalog(self) -> Catalog:
        """The columns of all of them."""
        ...

    @property
    def in_memory(self) -> bool:
        """Whether all tokens are in memory."""
        ...

    @property
    def shows_pictures(self) -> bool:
        """Whether a trace has a picture at a place among its tokens; no token is read to know it."""
        ...

    @property
    def inputs(self) -> int:
        """How many inputs there are; `catalog.source` has their numbers."""
        ...

    def take(self, rows: NDArray[np.integer]) -> Sequences:
        """Traces with their tokens and names, without extras and drift; `group` has the catalog's numbers.

        Args:
            rows: ascending, each once.
        """
        ...

    def kept(self, rows: NDArray[np.integer]) -> Sequences:
        """The same with the names of their groups and what did not fit, to be written or shown."""
        ...

    def parts(self) -> Iterator[Sequences]:
        """All traces, in pieces that memory holds."""
        ...

    def trace_name(self, row: int) -> str:
        """What a trace is called for those who read of it."""
        ...

    def lots(self) -> NDArray[np.float64]:
        """[R] a number in [0, 1) of the name of each trace's group, the same wherever that name stands."""
        ...

    def fingerprint(self, rewards: NDArray[np.float32]) -> str:
        """The same for the same terms, groups and [R] rewards."""
        ...


class InMemory:
    """Sequences as a source.

    Args:
        sequences: R traces, from `align` or `Sequences.from_arrays`.
    """

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self._catalog: Catalog | None = None

    @property
    def catalog(self) -> Catalog:
        """The columns of all traces; groups have the numbers that the sequences give them."""
        if self._catalog is None:
            s = self.sequences
            columns: dict[str, Any] = trace_columns.counted(s.stored())
            columns |= {"group": np.asarray(s.group, np.int32), "reward_names": s.reward_names}
            self._catalog = Catalog(**columns, source=np.zeros(s.traces, np.int32))
        return self._catalog

    @property
    def in_memory(self) -> bool:
        """True."""
        return True

    @property
    def shows_pictures(self) -> bool:
        """As `Source.shows_pictures`."""
        return self.sequences.images is not None

    @property
    def inputs(self) -> int:
        """One."""
        return 1

    def take(self, rows: NDArray[np.integer]) -> Sequences:
        """As `Source.take`; all of them are the sequences themselves."""
        if len(rows) == self.sequences.traces:
            return self.sequences
        return selected(self.sequences, rows)

    def kept(self, rows: NDArray[np.integer]) -> Sequences:
        """As `Source.kept`."""
        return subset(self.sequences, rows)[0]

    def parts(self) -> Iterator[Sequences]:
        """All of them at once."""
        yield self.sequences

    def trace_name(self, row: int) -> str:
        """The trace's id, else its number."""
        return self.sequences.trace_name(row)

    def lots(self) -> NDArray[np.float64]:
        """As `Source.lots`; a group without a name has its number."""
        group = self.sequences.group
        names = self.sequences.group_names or tuple(map(str, range(int(group.max(initial=-1)) + 1)))
        return lots_of(names)[group]

    def fingerprint(self, rewards: NDArray[np.float32]) -> str:
        """As `Source.fingerprint`, of every token."""
        s, digest = self.sequences, hashlib.sha256()
        for part in (s.ids, s.trainable, s.rollout_logprobs, s.cu_seqlens, s.trace, s.group, rewards):
            digest.update(np.ascontiguousarray(part).tobytes())
        if (images := s.images) is not None:
            for part in (images.at, images.cu_features, images.pictures.digest[images.picture]):
                digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()


def lots_of(names: tuple[str, ...]) -> NDArray[np.float64]:
    """[names] numbers in [0, 1), each a function of its name alone."""
    return np.array([zlib.crc32(name.encode("utf-8", "replace")) / 2**32 for name in names], np.float64)


def source_of(data: Sequences | Source) -> Source:
    """Sequences as a source; a source as it is."""
    return InMemory(data) if isinstance(data, Sequences) else data
