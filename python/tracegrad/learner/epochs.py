"""Recorded sequences as a source of steps: epoch after epoch, `old` and reference measured for the steps ahead.

Here is `Epochs`. Which step comes when is the plan's, what is done with it the run's. Called by the loop.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from tracegrad.batch import Step
from tracegrad.correction import Corrected, proximal_alpha
from tracegrad.learner import checkpoint
from tracegrad.learner.feed import Feed
from tracegrad.learner.progress import Progress
from tracegrad.learner.reward_kl import Charge, needs_of
from tracegrad.learner.run import Run

Floats = NDArray[np.float32]

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """Builds item n when it is asked for, or before that in a background thread if it was announced.

    What `make` raises is raised by `take`. Nothing runs in the thread between a `take` and the next `announce`.

    Args:
        make: builds an item from (its number, whether it runs in the thread).

    >>> ahead = Ahead(lambda number, beside: (number, beside))
    >>> ahead.announce(3)
    >>> ahead.take(3), ahead.take(4)
    ((3, True), (4, False))
    >>> ahead.close()
    """

    def __init__(self, make: Callable[[int, bool], Made]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, "tracegrad-next-step")
        self._coming: tuple[int, Future[Made]] | None = None

    def announce(self, number: int) -> None:
        """Starts building item `number` in the thread."""
        self._coming = number, self._thread.submit(self._make, number, True)

    def take(self, number: int) -> Made:
        """Item `number`: waits for the thread if it was announced, else builds it now."""
        coming, self._coming = self._coming, None
        if coming is None:
            return self._make(number, False)
        made = coming[1].result()
        return made if coming[0] == number else self._make(number, False)

    def close(self) -> None:
        """Waits for what is being made and lets the thread go."""
        self._thread.shutdown(wait=True)


class Epochs:
    """The steps of a run over a file, by their number.

    Args:
        feed: what the run trains on.
        run: what measures and corrects them.

    Attributes:
        plan: when what happens.
        known: `old` and `ref` of every token, as far as they are measured; [T] float32 each, NaN elsewhere.
    """

    def __init__(self, feed: Feed, run: Run) -> None:
        self.feed, self.run = feed, run
        self._packed: dict[int, list[Step]] = {0: feed.steps(feed.plan(1).shuffle_seed(0))}
        self.plan = feed.plan(len(self._packed[0]))
        needs, tokens = needs_of(feed.objective, feed.config), feed.sequences.tokens
        self.known = {n: np.full(tokens, np.nan, np.float32) for n in ("old", "ref") if getattr(needs, n)}
        charged = Charge(feed.sequences, feed.rewards, feed.held, feed.config)
        self.charge = charged if feed.config.reward_kl.coef else None
        self._ahead = Ahead(self._make)

    def packed(self, index: int) -> Step:
        """A step as it was packed; at most two epochs are held."""
        epoch, place = divmod(index, self.plan.steps_per_epoch)
        if epoch not in self._packed:
            self._packed = {e: s for e, s in self._packed.items() if e >= epoch - 1}
            self._packed[epoch] = self.feed.steps(self.plan.shuffle_seed(epoch))
        return self._packed[epoch][place]

    def refresh(self, index: int, stops: Callable[[], bool]) -> bool:
        """Measures what is due before a step; False where the run was to stop first, and a resumed one must."""
        ref, old = self._due(index)
        if ref and not self._refresh("ref", "reference", self.plan.ref_window(index), stops):
            return False
        if old:
            self.known["old"][:] = np.nan
            if not self._refresh("old", "policy", self.plan.window(index), stops):
                return False
            self._charge(index)
        return True

    def take(self, index: int) -> tuple[Step, Corrected]:
        """A step with its logprobs and its correction, waited for or made now; the one after it is then begun.

        It is not where something must be measured in between.
        """
        ready, following = self._ahead.take(index), index + 1
        if following < self.plan.total and not any(self._due(following)):
            self._ahead.announce(following)
        return ready

    def measured(
        self, steps: list[Step], of: Literal["policy", "reference"], stops: Callable[[], bool] | None = None
    ) -> Floats | None:
        """[T] logprobs of the terms of the steps on all ranks, NaN elsewhere; None where the run was to stop first."""
        logprobs, measured = (
            np.zeros(self.feed.sequences.tokens, np.float32),
            np.zeros(self.feed.sequences.tokens, bool),
        )
        for step in steps:
            if stops is not None and stops():
                return None
            logprobs[step.origin], measured[step.origin] = self.run.measure(step, of=of), True
        return self.run.ranks.merge(logprobs, measured)

    def logprobs(self) -> dict[str, Floats]:
        """What is known, by term, as a checkpoint keeps it."""
        return {name: values[self.feed.sequences.terms] for name, values in self.known.items()}

    def restore(self, path: Path, progress: Progress) -> None:
        """Takes up what a checkpoint knows."""
        terms = self.feed.sequences.terms
        for name, values in self.known.items():
            values[terms] = checkpoint.logprobs_of(path, progress, name, len(terms))
        if self.charge is not None and progress.step:
            self.charge.restore(progress.control)
            self._charge(self.plan.refreshed(progress.step - 1))

    def control(self) -> dict[str, float]:
        """What adapts from batch to batch, as a checkpoint keeps it."""
        return {} if self.charge is None else self.charge.state()

    def row(self) -> dict[str, float]:
        """Metrics of the batch that is trained on."""
        return {} if self.charge is None else self.charge.row()

    def close(self) -> None:
        """Waits for the step that is being made."""
        self._ahead.close()

    def _due(self, index: int) -> tuple[bool, bool]:
        """Whether the reference and `old` are measured before a step."""
        plan = self.plan
        return "ref" in self.known and plan.refreshes_ref(index), "old" in self.known and plan.refreshes_old(index)

    def _refresh(self, name: str, of: Literal["policy", "reference"], window: range, stops: Callable[[], bool]) -> bool:
        """Measures `known[name]` for the terms of a window."""
        steps = [self.packed(index) for index in window]
        with self.run.watch(name):
            logprobs = self.measured(steps, of, stops)
        if logprobs is not None:
            self.known[name][:] = np.where(np.isnan(logprobs), self.known[name], logprobs)
        return logprobs is not None

    def _charge(self, first: int) -> None:
        """Takes KL out of the rewards of the batch that begins with a step, where a run is to."""
        if self.charge is not None:
            traces = sum(self.packed(index).totals.traces for index in self.plan.window(first))
            self.charge.batch(traces, self.known["old"], self.known["ref"])

    def _make(self, index: int, beside: bool) -> tuple[Step, Corrected]:
        step = self.packed(index)
        if self.charge is not None:
            step = replace(step, advantages=self.charge.advantages[step.trace])
        if self.feed.objective.needs.proximal:
            # The newest policy recorded is taken for the one that the run began with, and each update for one more.
            lag = np.maximum(step.lag(self.feed.newest), 0)
            step = replace(step, alpha=proximal_alpha(-lag, self.plan.refreshed(index), index))
        step = step.with_logprobs(**{name: values[step.origin] for name, values in self.known.items()})
        return step, self.run.correct(step, beside=beside)
