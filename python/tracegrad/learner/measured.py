"""The held-out traces of a run: measured piece by piece, and what is known of the policy's reward by them.

Here is `HeldOut`. The estimate is `off_policy_value`'s, forward passes are the epochs'. Called by the loop.
"""

import numpy as np
from numpy.typing import NDArray

from tracegrad.learner.epochs import Epochs
from tracegrad.learner.feed import Feed
from tracegrad.learner.off_policy_value import OffPolicyValue, difference, estimate, good_and_bad
from tracegrad.learner.planned import Planned


class HeldOut:
    """Held-out traces, under the policy as it is.

    Args:
        feed: whose they are.
        epochs: what measures them.

    Attributes:
        terms: of all held-out traces, L.
        best: [L] float32: logprobs where value was highest, NaN of what is not laid out; None where it was not known.
        worse: whether value is below that by more than the interval of the difference, where `stop.worse` asks.
    """

    def __init__(self, feed: Feed, epochs: Epochs) -> None:
        self._feed, self._epochs, self._pieces = feed, epochs, feed.held_pieces()
        self._only: Planned | None = None
        self.terms = sum(int(feed.catalog.terms[rows].sum(dtype=np.int64)) for rows in self._pieces)
        self.best: NDArray[np.float32] | None = None
        self.worse = False

    def row(self) -> dict[str, float]:
        """Off-policy value and its company under their metrics' names; empty without held-out traces."""
        if not self._pieces:
            return {}
        feed = self._feed
        theta, rollout, trace = self._measured()
        laid, given = ~np.isnan(theta), (feed.rewards, feed.catalog.group)
        beside = (rollout[laid], trace[laid], *given)
        value: OffPolicyValue = estimate(theta[laid], *beside)
        if feed.config.stop.worse and value.known:
            change, half = (1.0, 0.0) if self.best is None else difference(theta[laid], self.best[laid], *beside)
            self.worse = change + half < 0
            self.best = theta if change > 0 else self.best
        good, bad = good_and_bad(theta[laid], trace[laid], *given)
        return {**value.row(), "logprob_good": good, "logprob_bad": bad}

    def _measured(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
        """[L] of all terms, by trace: logprobs of the policy, the recorded ones, and the trace."""
        found = []
        with self._epochs.run.watch("value"):
            for rows in self._pieces:
                planned = self._only or self._feed.held_part(rows)
                if len(self._pieces) == 1:
                    self._only = planned
                found.append((self._epochs.measured(planned, "policy"), planned.rollout, planned.trace))
        theta, rollout, trace = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return theta, rollout, trace
