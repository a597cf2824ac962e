"""Recorded traces as a source of steps: epoch after epoch, `old` and reference measured for the steps ahead.

Here is `Epochs`. Which step comes when is the plan's, what is done with it the run's. Called by the loop.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from tracegrad.batch import Step
from tracegrad.correction import Corrected, proximal_alpha
from tracegrad.errors import ArgumentError
from tracegrad.learner import checkpoint
from tracegrad.learner.feed import Feed
from tracegrad.learner.known import scratch
from tracegrad.learner.planned import Cut, Planned, Rows
from tracegrad.learner.progress import Progress
from tracegrad.learner.reward_kl import Charge, needs_of
from tracegrad.learner.run import Run

Floats = NDArray[np.float32]

Made = TypeVar("Made")

_HELD = 2
"""Steps that are held packed: the one that is taken, and the one that is made beside it."""


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
    """The steps of a run over a file, by their number; each is packed when it is needed, at most one ahead.

    Args:
        feed: what the run trains on.
        run: what measures and corrects them.

    Attributes:
        plan: when what happens.
        known: `old` and `ref` of every term of the data, as far as they are measured; float32 each, NaN elsewhere.
    """

    def __init__(self, feed: Feed, run: Run) -> None:
        self.feed, self.run = feed, run
        self._cuts: dict[int, Cut] = {0: feed.cut(feed.plan(1).shuffle_seed(0))}
        self._packed: dict[int, Planned] = {}
        self._check_plan()
        self.plan = feed.plan(len(self._cuts[0]))
        needs = needs_of(feed.objective, feed.config)
        folder = None if feed.source.in_memory else run.out
        names = [name for name in ("old", "ref") if getattr(needs, name)]
        self.known = {name: scratch(feed.catalog.all_terms, folder) for name in names}
        charged = Charge(feed.source, feed.rewards, feed.used, feed.config)
        self.charge = charged if feed.config.reward_kl.coef else None
        self._ahead = Ahead(self._make)

    def _check_plan(self) -> None:
        """That every rank has the first one's plan: another would wait for steps that never come."""
        ranks = self.run.ranks
        mine = "" if ranks.alone else self.feed.plan_hash(self._cuts[0])
        other = ranks.shared(mine) != mine
        if ranks.largest(int(other)):
            who = f"rank {ranks.rank} plans" if other else "another rank plans"
            raise ArgumentError(
                f"{who} other steps than the first: its traces or options are others. Each would wait for steps that "
                "never come. Give every rank the same."
            )

    def packed(self, index: int) -> Planned:
        """A step as it was packed; the last few are held, and the plans of two epochs."""
        epoch, place = index // self.plan.steps_per_epoch, self.plan.packed(index)
        index = epoch * self.plan.steps_per_epoch + place
        if index not in self._packed:
            if epoch not in self._cuts:
                self._cuts = {e: cut for e, cut in self._cuts.items() if e == epoch - 1}
                self._cuts[epoch] = self.feed.cut(self.plan.shuffle_seed(epoch))
            made = self.feed.planned(self._cuts[epoch].of(place))
            kept = list(self._packed.items())[1 - _HELD :]
            self._packed = {**dict(kept), index: made}
        return self._packed[index]

    def refresh(self, index: int, stops: Callable[[], bool]) -> bool:
        """Measures what is due before a step; False where the run was to stop first, and a resumed one must."""
        ref, old = self._due(index)
        if ref and not self._refresh("ref", "reference", self.plan.ref_window(index), stops):
            return False
        if old:
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

    def measured(self, planned: Planned, of: Literal["policy", "reference"]) -> Floats:
        """[L] logprobs of `planned.terms`, those of all ranks; NaN where no rank lays a term out."""
        logprobs, held = np.zeros(len(planned.terms), np.float32), np.zeros(len(planned.terms), bool)
        logprobs[planned.here], held[planned.here] = self.run.measure(planned.step, of=of), True
        return self.run.ranks.merge(logprobs, held)

    def logprobs(self) -> dict[str, Floats]:
        """What is known, by term, as a checkpoint keeps it."""
        return dict(self.known)

    def restore(self, path: Path, progress: Progress) -> None:
        """Takes up what a checkpoint knows."""
        for name, values in self.known.items():
            values[:] = checkpoint.logprobs_of(path, progress, name, len(values))
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
        """Measures `known[name]` for the terms of a window; those of other steps stay what they were."""
        late: list[tuple[Rows, Floats]] = []  # a run that stops in between charges the batch before again
        with self.run.watch(name):
            for planned in self._steps(name, window):
                if stops():
                    return False
                logprobs = self.measured(planned, of)
                laid = ~np.isnan(logprobs)
                late.append((planned.terms[laid], logprobs[laid]))
                if self.charge is None:
                    self._keep(name, late)
        self._keep(name, late)
        return True

    def _steps(self, name: str, window: range) -> Iterator[Planned]:
        """The steps of a window; for a reference that stays, of every group that any epoch may take."""
        if name == "ref" and not self.plan.ref_every and self.feed.shares_of_inputs and self.plan.epochs > 1:
            cut = self.feed.cut(self.plan.shuffle_seed(0), whole=True)
            yield from (self.feed.planned(cut.of(number)) for number in range(len(cut)))
        else:
            once = {(self.plan.epoch_of(index), self.plan.packed(index)): index for index in reversed(window)}
            yield from map(self.packed, sorted(once.values()))

    def _keep(self, name: str, found: list[tuple[Rows, Floats]]) -> None:
        """Puts what was measured where it is looked up."""
        while found:
            terms, logprobs = found.pop()
            self.known[name][terms] = logprobs

    def _charge(self, first: int) -> None:
        """Takes KL out of the rewards of the batch that begins with a step, where a run is to."""
        if self.charge is None:
            return
        traces, found = 0, []
        for index in self.plan.window(first):
            planned = self.packed(index)
            traces += planned.step.totals.traces
            found.append(planned.terms)
        terms = np.unique(np.concatenate(found))
        trace = np.searchsorted(self.feed.catalog.first_term, terms, side="right") - 1
        old, ref = (self.known[name][terms] for name in ("old", "ref"))
        laid = ~np.isnan(old)
        self.charge.batch(traces, trace[laid], old[laid], ref[laid])

    def _make(self, index: int, beside: bool) -> tuple[Step, Corrected]:
        planned = self.packed(index)
        step, terms = planned.step, planned.terms[planned.here]
        if self.charge is not None:
            step = replace(step, advantages=self.charge.advantages[step.trace])
        if self.feed.objective.needs.proximal:
            # The newest policy recorded is taken for the one that the run began with, and each update for one more.
            lag = np.maximum(step.lag(self.feed.newest), 0)
            step = replace(step, alpha=proximal_alpha(-lag, self.plan.refreshed(index), index))
        step = step.with_logprobs(**{name: values[terms] for name, values in self.known.items()})
        return step, self.run.correct(step, beside=beside)
