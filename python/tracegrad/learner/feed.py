"""What a run trains on: which traces, with which advantage, in which steps.

Here the columns of all traces become the plan of each epoch and the held-out traces; a step is packed when it is asked
for. No torch, no model. Called by the loop and by `--dry-run`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.algebra import Objective
from tracegrad.batch import ModelShape, Sharing, Step, nothing_to_train, steps_of
from tracegrad.catalog import Catalog, Source, source_of
from tracegrad.config import Config
from tracegrad.errors import ArgumentError
from tracegrad.learner import filters, mixture
from tracegrad.learner.compared import compared, reward_column
from tracegrad.learner.fitting import check_effective, check_ratios, each_update, of_old
from tracegrad.learner.off_policy_value import held_out
from tracegrad.learner.plan import Plan
from tracegrad.learner.planned import Cut, Planned, Rows, pack_alone, pieces, terms_laid_out
from tracegrad.sequence import Sequences


class NothingToLearn(ArgumentError):
    """No trace is left that would move the policy: an error of a run on recorded traces, a step passed over online."""


@dataclass(frozen=True)
class Sizes:
    """Of a step.

    Args:
        rows: of each row, its tokens and how many of them are scored.
        terms: of all rows.
        imbalance: as of the step.
    """

    rows: tuple[tuple[int, int], ...]
    terms: int
    imbalance: float


@dataclass(frozen=True)
class Feed:
    """The traces of a run, as the loop takes them.

    Args:
        source: where their tokens are.
        rewards: [R] float32, the column trained on, 0 where `filter.zero_truncated` says so.
        advantages: [R] float32; 0 for held-out traces. With `reward_kl` what they would be without.
        held: [R] bool, kept out of training.
        used: [R] bool: neither held out nor left out by what `[filter]` says of a trace alone: what is compared.
        objective, config: of the run.
        notes: what a user should know of them, one sentence each.
        ranks, rank: how many processes share each step, and which of them this is.
        shape: of the model, for predictions of what rows cost.
        bucket: rows are padded to a multiple of so many tokens.
        trees: whether the model can run rows that share prefixes, where the config asks for them.
        shares_of_inputs: what `mixture.shares` gave.
    """

    source: Source
    rewards: NDArray[np.float32]
    advantages: NDArray[np.float32]
    held: NDArray[np.bool_]
    used: NDArray[np.bool_]
    objective: Objective
    config: Config
    notes: tuple[str, ...]
    ranks: int = 1
    rank: int = 0
    shape: ModelShape | None = None
    bucket: int = 1
    trees: bool = True
    shares_of_inputs: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        data: Sequences | Source,
        objective: Objective,
        config: Config,
        *,
        ranks: int = 1,
        rank: int = 0,
        shape: ModelShape | None = None,
        bucket: int = 1,
    ) -> "Feed":
        """Splits, checks and scores.

        Raises:
            NothingToLearn: if no trace is left that has a term and an advantage.
            ArgumentError: if the objective needs a ratio that these traces cannot have, or an option would have no
                effect.
        """
        source = source_of(data)
        catalog = source.catalog
        if not catalog.traces:
            raise NothingToLearn(
                "there is no trace: no record that was read holds a call of a model with an answer. Look at the file "
                "with tracegrad doctor."
            )
        check_effective(config, objective)
        objective.check_missing(config.train.missing)
        notes = check_ratios(source, objective, config)
        notes += [f"'{part}': the gradient depends on pack.token_budget." for part in objective.per_microbatch]
        rewards = filters.settled(
            reward_column(catalog, config.data.reward, config.data.reward_weights), source, config.filter
        )
        held = held_out(catalog.group, config.data.holdout, config.train.seed)
        used, said = filters.kept(rewards, catalog, ~held, config.filter)
        if said and not (used & (catalog.terms > 0)).any():
            raise NothingToLearn(f"nothing is left to train on: {' '.join(said)} Loosen what filter says.")
        notes += said
        notes += of_old(objective, config, len(np.unique(catalog.group[used])))
        advantages = np.zeros(catalog.traces, np.float32)
        advantages[used] = compared(rewards, source, used, config)
        if not advantages.any():
            raise _nothing(rewards, source, held, used, config)
        feed = cls(source, rewards, advantages, held, used, objective, config, tuple(notes), ranks, rank, shape, bucket)
        even = int((used & ~feed.taken).sum())
        if even == int(used.sum()):
            raise NothingToLearn(
                "in no group do rewards differ, and filter.even_groups leaves all of them out. There is nothing to "
                "learn. Leave filter.even_groups out, or give traces whose rewards differ within a group."
            )
        if even:
            notes.append(f"{even} traces of groups in which all rewards are equal are left out: filter.even_groups.")
        masks, nothing = filters.check_masked(rewards, source, feed.taken, config.filter)
        if nothing:
            raise NothingToLearn(nothing)
        return replace(feed, notes=(*notes, *masks), shares_of_inputs=mixture.shares(source, config))

    @property
    def catalog(self) -> Catalog:
        """The columns of all traces."""
        return self.source.catalog

    @cached_property
    def trained(self) -> NDArray[np.bool_]:
        """[R] bool: whose terms the steps are made of."""
        return self.taken & ~self.masked

    @cached_property
    def masked(self) -> NDArray[np.bool_]:
        """[R] bool: what the config masks: it has a reward and counts as a trace, and no term."""
        return filters.masked(self.rewards, self.catalog, self.taken, self.config.filter)

    @cached_property
    def taken(self) -> NDArray[np.bool_]:
        """[R] bool: neither held out nor left out, itself or with its group."""
        return self.used & ~filters.left_out(self.rewards, self.catalog.group, self.used, self.config)

    def cut(self, plan_seed: int, *, whole: bool = False) -> Cut:
        """The traces of each step of an epoch, its groups shuffled by a seed: from the columns alone.

        Only traces that may be too long for a row are looked at, once.

        Args:
            plan_seed: what groups are drawn and shuffled by.
            whole: take all groups, whatever `mixture.weights` says.

        Raises:
            ArgumentError: if no token can be trained, or a trace is too long and `pack.too_long` refuses it.
        """
        there = (self._left > 0) | self.masked
        if not there.any():
            raise nothing_to_train()
        drawn = mixture.taken(self.source, there, () if whole else self.shares_of_inputs, plan_seed)
        step = steps_of(self.catalog.group, drawn, self.config.pack.step_groups, plan_seed)
        # What was dropped is counted where its group is, or in the first step where all of its group was.
        dropped = self.trained & (self._left == 0) & (self.catalog.terms > 0)
        if dropped.any():
            step[dropped & (steps_of(self.catalog.group, there, None, None) < 0)] = 0
        return Cut.by(step, there | dropped)

    def planned(self, rows: Rows) -> Planned:
        """A step of some traces of a cut."""
        skip = self.config.pack.skip_zero_weight and not self.objective.needs.zero_advantage
        return pack_alone(
            self.source,
            rows,
            self.advantages,
            self.trained,
            self.masked,
            skip_zero_advantage=skip,
            **self._how(),
        )

    def steps(self, plan_seed: int) -> list[Step]:
        """All steps of an epoch, in memory."""
        return list(self.each_step(plan_seed))

    def each_step(self, plan_seed: int) -> Iterator[Step]:
        """The steps of an epoch, one after the other."""
        cut = self.cut(plan_seed)
        yield from (self.planned(cut.of(number)).step for number in range(len(cut)))

    @cached_property
    def sizes(self) -> list[Sizes]:
        """Of the steps of an epoch, each of which is packed once: for what is said before a run."""
        return [
            Sizes(tuple((len(batch.ids), len(batch.read)) for batch in step.batches), len(step), step.imbalance)
            for step in self.each_step(0)
        ]

    @property
    def shares(self) -> bool:
        """Whether rows share prefixes where that pays."""
        return self.trees and self.config.pack.share_prefixes

    def sharing(self) -> Sharing:
        """What `pack.share_prefixes` would do to the first step: for a dry run."""
        shared = replace(self.config, pack=replace(self.config.pack, share_prefixes=True))
        sharing = next(replace(self, config=shared).each_step(0)).sharing
        assert sharing is not None
        return sharing

    @property
    def newest(self) -> int | None:
        """The newest version of a term, None where none is known: what lags count from, here and nowhere else.

        The version that the trained policy is of by this count is not known, as a file does not say it.
        """
        version = int(self.catalog.version_max.max(initial=-1))
        return None if version < 0 else version

    def plan(self, steps: int) -> Plan:
        """When what happens, in epochs of so many steps: as many in each, however the groups are shuffled."""
        return Plan.of(self.config, steps, each_update=each_update(self.objective, self.config))

    def held_pieces(self) -> list[Rows]:
        """The held-out traces in pieces that are only measured; none where none has a term.

        Raises:
            ArgumentError: if all of them, or one where that is refused, are too long for a row.
        """
        if not len(rows := np.flatnonzero(self.held & (self.catalog.terms > 0))):
            return []
        rows = rows[self._laid_out(rows) > 0]
        if not len(rows):
            raise nothing_to_train()
        return list(pieces(rows, self.catalog))

    def held_part(self, rows: Rows) -> Planned:
        """One of the pieces, as a step."""
        return pack_alone(self.source, rows, self.advantages, self.held, None, **self._how())

    def plan_hash(self, cut: Cut) -> str:
        """The same on every rank that plans the same: of the columns, the advantages and the steps of an epoch."""
        digest = blake2b(self.catalog.hash.encode(), digest_size=16)
        for part in (self.advantages, self.held, cut.rows, cut.first):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """The same for the same terms, rewards and groups."""
        return self.source.fingerprint(self.rewards)

    @cached_property
    def _left(self) -> NDArray[np.int64]:
        """[R]: terms of trained traces that are laid out."""
        left = np.zeros(self.catalog.traces, np.int64)
        rows = np.flatnonzero(self.trained & (self.catalog.terms > 0))
        left[rows] = self._laid_out(rows)
        return left

    def _laid_out(self, rows: Rows) -> NDArray[np.int64]:
        """[rows]: terms that are laid out; tokens are looked at where a trace may be too long for a row."""
        pack, whole = self.config.pack, self.objective.needs.trace_ratio
        left = self.catalog.terms[rows].astype(np.int64)
        size = (self.catalog.tokens if whole else self.catalog.longest)[rows]
        if len(long := np.flatnonzero(size > pack.token_budget)):
            how = {"token_budget": pack.token_budget, "whole_traces": whole, "share_prefixes": self.shares}
            left[long] = terms_laid_out(self.source, rows[long], too_long=pack.too_long, **how)
        return left

    def _how(self) -> dict[str, Any]:
        """What `pack` takes, the same for each step."""
        return {
            "token_budget": self.config.pack.token_budget,
            "needs": self.objective.needs,
            "too_long": self.config.pack.too_long,
            "share_prefixes": self.shares,
            "shape": self.shape,
            "ranks": self.ranks,
            "rank": self.rank,
            "pad_to_multiple_of": self.bucket,
        }


def _nothing(
    rewards: NDArray[np.float32], source: Source, held: NDArray[np.bool_], used: NDArray[np.bool_], config: Config
) -> NothingToLearn:
    """Why all advantages are 0."""
    if held.any() and compared(rewards, source, used | held, config).any():
        return NothingToLearn(
            "every group whose rewards differ is held out to measure value. There is nothing to learn from the "
            "others. Set --data.holdout 0, or give more groups."
        )
    return NothingToLearn(
        f"all {int(used.sum())} advantages are 0: in no group do rewards differ. There is nothing to learn. "
        "Give traces whose rewards differ within a group, or compare them all: --advantage.baseline batch_mean."
    )
