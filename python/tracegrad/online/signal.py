"""What a group teaches: its rewards as training takes them, and whether they differ; for who plays and who trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.config import Config
from tracegrad.errors import ArgumentError
from tracegrad.trace import Traces

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Signal:
    """Which reward is trained on, and how.

    Args:
        name: of the reward; "" is the scalar one, as for `train`.
        compared: with the others of its group, so that equal ones teach nothing.
    """

    name: str = ""
    compared: bool = True

    @classmethod
    def of(cls, config: Config) -> Signal:
        """As the config of a run says."""
        return cls(config.data.reward, config.advantage.baseline != "none")

    def of_records(self, records: Sequence[Mapping[str, Any]]) -> Floats:
        """[n] float32, NaN where there is none.

        >>> Signal().of_records([{"reward": 1}, {"reward": None}, {"rewards": {"a": 2}}]).tolist()
        [1.0, nan, nan]
        """
        places = [(record.get("rewards") or {}, self.name) if self.name else (record, "reward") for record in records]
        found = [place.get(name) for place, name in places]
        return np.array([np.nan if value is None else value for value in found], np.float32)

    def of_traces(self, traces: Traces) -> Floats:
        """The same of records that were read."""
        if not self.name:
            return traces.reward
        return np.array([trace.rewards.get(self.name, np.nan) for trace in traces], np.float32)

    def check(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Refuses rewards by other names than the one that is trained on: no group would ever teach anything.

        Raises:
            ArgumentError: if no record of a group has that one, and some have others.
        """
        names = sorted({name for record in records for name in record.get("rewards") or {}} - {self.name})
        wanted = f"data.reward is {self.name!r}" if self.name else "data.reward names none of them"
        if names and np.isnan(self.of_records(records)).all() and not any("failure" in each for each in records):
            raise ArgumentError(
                f"the rewards are {', '.join(names)[:200]}, and {wanted}. Nothing would be trained on. Set data.reward "
                "to the one that is, or return one number."
            )

    def is_dull(self, rewards: Floats) -> bool:
        """Whether a group teaches nothing: no known reward, or where they are compared fewer than two unlike ones.

        >>> [Signal().is_dull(np.float32(group)) for group in ([1, np.nan], [1, 1], [1, 0])]
        [True, True, False]
        """
        known = np.unique(rewards[~np.isnan(rewards)])
        return len(known) < (2 if self.compared else 1)
