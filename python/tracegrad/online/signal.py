"""What a group teaches: its rewards as training takes them, and whether they differ; for who plays and who trains."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.config import Config, split_names
from tracegrad.errors import ArgumentError
from tracegrad.trace import Traces

Floats = NDArray[np.float32]
_ENDED = ("stop", "tool_calls", "function_call")


@dataclass(frozen=True)
class Signal:
    """Which reward is trained on, and how.

    Args:
        name: of the reward; "" is the scalar one, as for `train`.
        compared: with the others of its group, so that equal ones teach nothing.
        free: nobody trains on it yet, so that rewards may have any names.
        tolerance: rewards within it of one another are equal.
        zero_truncated: what was cut off, or does not say how it ended, has reward 0.
    """

    name: str = ""
    compared: bool = True
    free: bool = False
    tolerance: float = 0.0
    zero_truncated: bool = False

    @classmethod
    def of(cls, config: Config) -> "Signal":
        """As the config of a run says; groups that are to be masked are taken like others."""
        told = config.filter
        compared = config.advantage.baseline != "none" and not told.mask_even
        return cls(config.data.reward, compared, tolerance=told.tolerance, zero_truncated=told.zero_truncated)

    def of_records(self, records: Sequence[Mapping[str, Any]]) -> Floats:
        """[n] float32, NaN where there is none.

        >>> Signal().of_records([{"reward": 1}, {"reward": None}, {"rewards": {"a": 2}}]).tolist()
        [1.0, nan, nan]
        """
        if self.zero_truncated:
            return self.of_traces(Traces.from_records(records))
        places = [{**(record.get("rewards") or {}), "reward": record.get("reward")} for record in records]
        found = [self._of(place) for place in places]
        return np.array([np.nan if value is None else value for value in found], np.float32)

    def _of(self, rewards: Mapping[str, Any]) -> Any:
        """The one that is trained on, None where it is not known; of several names the first that there is."""
        return next((each for each in map(rewards.get, self._names) if each is not None and math.isfinite(each)), None)

    @property
    def _names(self) -> list[str]:
        return [self.name, *split_names(self.name)] if self.name else ["reward"]

    def of_traces(self, traces: Traces) -> Floats:
        """The same of records that were read."""
        found = traces.reward
        if self.name:
            told = [self._of({**trace.rewards, "reward": trace.reward}) for trace in traces]
            found = np.array([np.nan if value is None else value for value in told], np.float32)
        if self.zero_truncated:
            ended = [any(each.finish_reason in _ENDED for each in trace.generations[-1:]) for trace in traces]
            found = np.where(np.isnan(found) | ended, found, np.float32(0))
        return found

    def check(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Refuses rewards by other names than the one that is trained on: no group would ever teach anything.

        One of that name that is not known, as its function failed or does not apply, is not refused.
        """
        names = {name for record in records for name in record.get("rewards") or {}}
        there = names | ({"reward"} if any("reward" in record for record in records) else set())
        wanted = f"data.reward is {self.name!r}" if self.name else "data.reward names none of them"
        if not self.free and names and not there & {*self._names}:
            raise ArgumentError(
                f"the rewards are {', '.join(sorted(names))[:200]}, and {wanted}. Nothing would be trained on. "
                "Set data.reward to the one that is, or return one number."
            )

    def is_dull(self, rewards: Floats) -> bool:
        """Whether a group teaches nothing: no known reward, or where they are compared fewer than two unlike ones.

        >>> [Signal().is_dull(np.float32(group)) for group in ([1, np.nan], [1, 1], [1, 0])]
        [True, True, False]
        """
        known = rewards[~np.isnan(rewards)].astype(np.float64)
        return not len(known) or (self.compared and bool(np.ptp(known) <= self.tolerance))
