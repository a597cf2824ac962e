"""What was mapped, joined, converted and left out, as counts: added up over the parts of an input, and said in lines.

`InputStream` keeps them of what it reads, `prepare` adds up those of its parts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tracegrad.config import Map
from tracegrad.inputs import adapters
from tracegrad.inputs.mapping import Mapper
from tracegrad.read_report import ReadReport


@dataclass
class Tally:
    """Counts of one stream.

    Args:
        empty: empty files, which are left out.
        bare: files without a record of a call, and `first_bare`, the error of the first of them.
        promptless: traces without a prompt, where groups are by prompt.
        adapted: records that adapters took, by what they are, and `callless`, those that hold no call.
        mapper: what the mapping found: the fields of `Mapper` but `told`.
        sessions: lines about conversations that were joined.
    """

    empty: int = 0
    bare: int = 0
    first_bare: str = ""
    promptless: int = 0
    adapted: dict[str, int] = field(default_factory=dict)
    callless: dict[str, int] = field(default_factory=dict)
    mapper: dict[str, Any] = field(default_factory=dict)
    sessions: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return asdict(self)

    def check(self, told: Map) -> None:
        """Refuses a mapping of which a path matches nothing.

        Raises:
            ArgumentError: with the nearest path that there is.
        """
        _mapper(told, [self.mapper]).check()

    def lines(self, told: Map, report: ReadReport, blank: str) -> list[str]:
        """The same for a terminal; `blank` is what the reader says of a file without records."""
        count = report.reasons.get("failed_call", 0)
        calls = "1 call failed: no answer in it" if count == 1 else f"{count:,} calls failed: no answer in them"
        adapted = adapters.Adapted()
        adapted.counts, adapted.empty = Counter(self.adapted), Counter(self.callless)
        first = self.first_bare.partition(f": {blank}")[0]
        alone = f"map      group: {self.promptless:,} traces have no prompt and are alone"
        return [
            *([f"         {self.empty:,} empty files are left out"] if self.empty else []),
            *(
                [f"         {self.bare:,} files without a record of a call are left out, {first} first"]
                if self.bare
                else []
            ),
            *adapted.lines(),
            *([f"         {calls}"] if count else []),
            *_mapper(told, [self.mapper]).lines(),
            *self.sessions,
            *([alone] if self.promptless else []),
        ]


def state(mapper: Mapper) -> dict[str, Any]:
    """What a mapper has found, as JSON has it."""
    return {
        "seen": {name: dict(kinds) for name, kinds in mapper.seen.items()},
        "records": mapper.records,
        "bounds": [mapper.low, mapper.high] if mapper.low <= mapper.high else [],
        "names": sorted(mapper.names),
        "words": mapper.words,
        "paths": list(mapper.paths),
    }


def _mapper(told: Map, states: Sequence[dict[str, Any]]) -> Mapper:
    """One mapper that has found what several have."""
    out = Mapper(told)
    for each in states:
        for name, kinds in each.get("seen", {}).items():
            out.seen.setdefault(name, Counter()).update(kinds)
        out.records += each.get("records", 0)
        for bound in each.get("bounds", ()):
            out.low, out.high = min(out.low, bound), max(out.high, bound)
        out.names.update(each.get("names", ()))
        out.words = {**out.words, **each.get("words", {})}
        out.paths |= dict.fromkeys(each.get("paths", ()))
    return out


def added(tallies: Sequence[Tally], told: Map) -> Tally:
    """The counts of several streams together, in their order."""
    out = Tally(mapper=state(_mapper(told, [each.mapper for each in tallies])))
    for each in tallies:
        out.empty, out.bare = out.empty + each.empty, out.bare + each.bare
        out.promptless += each.promptless
        out.first_bare = out.first_bare or each.first_bare
        out.adapted = _plus(out.adapted, each.adapted)
        out.callless = _plus(out.callless, each.callless)
        out.sessions += each.sessions
    return out


def _plus(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in [*one, *other]}
