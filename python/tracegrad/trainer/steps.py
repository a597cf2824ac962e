"""Choose and order the traces of each optimizer step (`Feed`): filters, mixture weights, packing one step at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.sequences import Sequences
from tracegrad.config import Config, Filter, split_names
from tracegrad.data.codes import CUT, ENDINGS, NO_TIER, TIERS
from tracegrad.errors import ArgumentError
from tracegrad.objective import Objective
from tracegrad.packing import ModelShape, Sharing, Step, measure, nothing_to_train, pack, steps_of
from tracegrad.trainer.advantages import compared, reward_column
from tracegrad.trainer.dataset import Catalog, Source, source_of
from tracegrad.trainer.off_policy_eval import held_out
from tracegrad.trainer.schedule import Plan
from tracegrad.trainer.validate import check_effective, check_ratios, each_update, of_old

Floats, Flags = NDArray[np.float32], NDArray[np.bool_]


def settled(rewards: Floats, source: Source, options: Filter) -> Floats:
    """[R] rewards as they are compared: 0 for what was cut off, where that is asked; what is not known stays NaN."""
    if not options.zero_truncated:
        return rewards
    known = np.isfinite(rewards)
    catalog = source.catalog
    _refuse_unsaid(source, known & (catalog.terms > 0), "filter.zero_truncated", "would keep their reward")
    return np.where(known & (catalog.ending == CUT), np.float32(0), rewards)


def kept(rewards: Floats, catalog: Catalog, of: Flags, options: Filter) -> tuple[Flags, list[str]]:
    """[R] bool: the traces of some that no filter of a trace alone leaves out; and in words what each does.

    A trace without a reward is within any bounds of rewards; one with a term of an unknown version is within no lag.

    Raises:
        ArgumentError: for a lag where no term says its version.
    """
    newest = int(catalog.version_max.max(initial=-1))
    if options.max_lag >= 0 and newest < 0:
        raise ArgumentError(
            "filter.max_lag has no effect: no trace says which version of the policy sampled it. An option that does "
            "nothing hides a mistake. Leave it out, or say where the records hold it: --map.version PATH."
        )
    worst = TIERS.index(options.worst_tier)
    out = {
        "min_reward": rewards < options.min_reward,
        "max_reward": rewards > options.max_reward,
        "min_turns": catalog.turns < options.min_turns,
        "max_turns": (catalog.turns > options.max_turns) & (options.max_turns > 0),
        "worst_tier": (catalog.tier > worst) & (catalog.tier != NO_TIER),
        "max_lag": ((catalog.version_min < 0) | (catalog.version_min < newest - options.max_lag))
        & (options.max_lag >= 0),
    }
    left, said, default = of.copy(), [], Filter()
    for name, gone in out.items():
        if getattr(options, name) != getattr(default, name):
            said.append(f"{int((left & gone).sum())} of {int(left.sum())} traces are left out: filter.{name}.")
            left &= ~gone
    return left, said


def left_out(rewards: Floats, group: NDArray[np.int32], used: Flags, config: Config) -> Flags:
    """[R] bool: of groups in which no two known rewards of used traces differ, where `even_groups` says so.

    A trace that is alone in its group is not left out where `advantage.singleton` has it keep its reward.
    """
    if not config.filter.even_groups:
        return np.zeros(len(rewards), bool)
    spread, count = _spread(rewards, group, np.isfinite(rewards) & used)
    lone = (count == 1) & (config.advantage.singleton == "keep")
    return ~(spread > config.filter.tolerance) & ~lone


def masked(rewards: Floats, catalog: Catalog, of: Flags, options: Filter) -> Flags:
    """[R] bool, of some traces: what was cut off; and groups of several with terms left whose rewards are equal."""
    cut = of & (catalog.ending == CUT) & options.truncated
    if not options.mask_even:
        return cut
    live = of & np.isfinite(rewards) & ~cut & (catalog.terms > 0)
    spread, count = _spread(rewards, catalog.group, live)
    return cut | (of & (count > 1) & ~(spread > options.tolerance))


def check_masked(rewards: Floats, source: Source, taken: Flags, options: Filter) -> tuple[list[str], str]:
    """What is masked of the traces that a run takes, in words; and why nothing is left to train, "" where some is."""
    if not (options.truncated or options.mask_even):
        return [], ""
    catalog = source.catalog
    of = taken & (catalog.terms > 0)
    if options.truncated:
        _refuse_unsaid(source, of, "filter.truncated", "would be trained on")
    hidden = masked(rewards, catalog, taken, options)
    short = hidden & (catalog.ending == CUT) & options.truncated
    cut, even, said = int(short.sum()), int((hidden & ~short).sum()), []
    if cut:
        said.append(f"{cut} of {int(of.sum())} traces were cut off and are masked: filter.truncated.")
    if even:
        said.append(f"{even} traces of groups in which all rewards are equal are masked: filter.mask_even.")
    if (of & ~hidden).any():
        return said, ""
    if not even:
        return said, (
            f"all {cut} traces were cut off, and filter.truncated masks them. There is nothing to learn. "
            "Record with a higher limit of tokens, or leave filter.truncated out."
        )
    return said, (
        f"in no group do rewards differ, and filter.mask_even masks {even} traces. There is nothing to learn. Leave "
        "filter.mask_even out, or give traces whose rewards differ within a group."
    )


def _spread(rewards: Floats, group: NDArray[np.int32], known: Flags) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """[R] each: between the highest and the lowest known reward of a trace's group (-inf without one); how many."""
    ids, at = np.unique(group, return_inverse=True)
    low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.minimum.at(low, at[known], rewards[known])
    np.maximum.at(high, at[known], rewards[known])
    return (high - low)[at], np.bincount(at[known], minlength=len(ids))[at]


def _refuse_unsaid(source: Source, of: Flags, option: str, else_: str) -> None:
    unsaid = np.flatnonzero(of & (source.catalog.ending == ENDINGS.index("unknown")))
    if len(unsaid):
        name = source.trace_name(int(unsaid[0]))
        raise ArgumentError(
            f"trace '{name}' and {len(unsaid) - 1} more do not say how they ended: the last generation has neither a "
            "finish_reason nor a stop token, or was prepared before endings were kept. Those that were cut off "
            f"{else_}. Record finish_reason, prepare again, or leave {option} out."
        )


_DRAWN = 0x6D6978


def shares(source: Source, config: Config) -> tuple[float, ...]:
    """The weight of each input over the largest; () where no weights are told, or all are equal.

    Raises:
        ArgumentError: for other than one positive number for each of several inputs, or a group that stands in two of
            unlike weights.
    """
    told = config.mixture.weights
    if not told:
        return ()
    if source.inputs < 2:
        raise ArgumentError(
            "mixture.weights has no effect: there is one input. An option that does nothing hides a mistake. Leave it "
            "out, or give several prepared folders."
        )
    try:
        weights = [float(each) for each in split_names(told)]
    except ValueError:
        weights = []
    if len(weights) != source.inputs or not all(0 < weight < float("inf") for weight in weights):
        raise ArgumentError(
            f"mixture.weights is {told!r:.80}, and there are {source.inputs} inputs. How often each is taken is not "
            "known. Give one number above 0 for each, with commas between."
        )
    found = tuple(weight / max(weights) for weight in weights)
    catalog = source.catalog
    of_trace = np.array(found)[catalog.source]
    low, high = np.full(int(catalog.group.max(initial=-1)) + 1, 2.0), np.zeros(int(catalog.group.max(initial=-1)) + 1)
    np.minimum.at(low, catalog.group, of_trace)
    np.maximum.at(high, catalog.group, of_trace)
    if len(both := np.flatnonzero((low < high)[catalog.group])):
        raise ArgumentError(
            f"the group of trace '{source.trace_name(int(both[0]))}' stands in inputs of unlike weights, and a group "
            "is taken whole or not. Give its traces other groups, or the inputs one weight."
        )
    return found if min(found) < 1 else ()


def taken(source: Source, there: NDArray[np.bool_], shares: tuple[float, ...], seed: int) -> NDArray[np.bool_]:
    """[R] bool: of the traces that are there, those of the groups that an epoch takes.

    Of the n groups of an input it takes round(share * n), at least one, drawn anew for each seed.
    """
    if not shares:
        return there
    catalog, out = source.catalog, np.zeros(len(there), bool)
    for number, share in enumerate(shares):
        own = there & (catalog.source == number)
        groups = np.unique(catalog.group[own])
        count = max(round(share * len(groups)), 1)
        drawn = np.random.default_rng([seed, _DRAWN, number]).permutation(len(groups))[:count]
        out |= own & np.isin(catalog.group, groups[drawn])
    return out


Rows = NDArray[np.int64]

TOKENS_AT_ONCE = 1 << 20
"""Traces that are only measured, or looked at before the first step, come in pieces of about so many tokens."""


@dataclass(frozen=True, eq=False)
class Cut:
    """The steps of a pass over the data.

    Args:
        rows: traces step by step, ascending in each.
        first: [steps + 1]: where each step's begin.
    """

    rows: Rows
    first: Rows

    def __len__(self) -> int:
        return len(self.first) - 1

    def of(self, step: int) -> Rows:
        """The traces of a step, ascending."""
        return self.rows[self.first[step] : self.first[step + 1]]

    @classmethod
    def by(cls, step: NDArray[np.int32], member: NDArray[np.bool_]) -> "Cut":
        """Of the step of each trace, for the traces that are members; there are as many steps as the highest says.

        Args:
            step: [R], -1 for traces of none.
            member: [R].
        """
        rows = np.flatnonzero(member & (step >= 0))
        of = step[rows]
        steps = int(step.max(initial=-1)) + 1
        first = np.concatenate([[0], np.cumsum(np.bincount(of, minlength=steps))]).astype(np.int64)
        return cls(rows[np.argsort(of, kind="stable")], first)


@dataclass(frozen=True, eq=False)
class Planned:
    """A step as one rank holds it, and where its terms stand among those of all traces.

    Args:
        step: numbers of traces, tokens, branches and groups are those of the whole data.
        terms: [L] int64: all terms of its traces, of every rank, by their number among those of all traces; ascending.
        here: [M] int64: of each term of `step`, its place in `terms`.
        trace: [L] int64: the trace of each of `terms`.
        rollout: [L] float32: their recorded logprobs.
    """

    step: Step
    terms: Rows
    here: Rows
    trace: Rows
    rollout: NDArray[np.float32]


def pack_alone(
    source: Source,
    rows: Rows,
    advantages: NDArray[np.float32],
    trained: NDArray[np.bool_],
    counted: NDArray[np.bool_] | None,
    **how: Any,
) -> Planned:
    """One step of some traces, which is that of packing all of them at once.

    Args:
        rows: ascending.
        advantages: [R], of all traces.
        trained: [R] bool: whose terms are laid out.
        counted: [R] bool: who counts without a term, as for `pack`; None where nobody does.
        how: what `pack` takes beside.
    """
    catalog, s = source.catalog, source.take(rows)
    recorded, rollout = s.trainable, np.asarray(s.rollout_logprobs)[s.trainable]
    if not trained[rows].all():
        s = replace(s, trainable=s.trainable & np.repeat(trained[rows], catalog.tokens[rows]))
    more = {} if counted is None else {"counted": counted[rows]}
    [step] = pack(s, advantages[rows], per="trace", **more, **how)
    here = np.cumsum(recorded, dtype=np.int64)[step.origin] - 1
    if len(rows) < catalog.traces:
        step = _of_all(step, rows, catalog)
    count = catalog.terms[rows].astype(np.int64)
    moved = catalog.first_term[rows] - (np.cumsum(count) - count)
    return Planned(step, np.arange(len(rollout)) + np.repeat(moved, count), here, np.repeat(rows, count), rollout)


def terms_laid_out(source: Source, rows: Rows, **how: Any) -> NDArray[np.int64]:
    """[rows]: terms of each trace that `pack` lays out, where some of them may be too long for a row.

    Args:
        rows: ascending.
        how: what `batch.measure` takes beside.

    Raises:
        ArgumentError: for a trace that is too long, where that is refused.
    """
    refuses = how["too_long"] == "refuse"
    told = {**how, "too_long": "drop"} if refuses else how
    left = np.concatenate([measure(source.take(part), **told) for part in pieces(rows, source.catalog)])
    lost = rows[left < source.catalog.terms[rows]]
    if refuses and len(lost):
        measure(source.take(lost), **how)  # which says of the longest what the others are told of as a number
    return left


def pieces(rows: Rows, catalog: Catalog) -> Iterator[Rows]:
    """Traces in order, in pieces of about `TOKENS_AT_ONCE`."""
    at = np.cumsum(catalog.tokens[rows], dtype=np.int64) // TOKENS_AT_ONCE
    yield from (part for part in np.split(rows, np.flatnonzero(np.diff(at)) + 1) if len(part))


def _of_all(step: Step, rows: Rows, catalog: Catalog) -> Step:
    """A step of some traces by the numbers of all."""
    tokens, branches = catalog.tokens[rows].astype(np.int64), catalog.branches[rows].astype(np.int64)
    origin = step.origin + (catalog.first_token[rows] - (np.cumsum(tokens) - tokens))[step.trace]
    branch = step.branch + (catalog.first_branch[rows] - (np.cumsum(branches) - branches))[step.trace]
    return replace(step, origin=origin, branch=branch.astype(np.int32), trace=rows[step.trace].astype(np.int32))


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
        shares_of_inputs: what `shares` gave.
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
        rewards = settled(reward_column(catalog, config.data.reward, config.data.reward_weights), source, config.filter)
        held = held_out(catalog.group, config.data.holdout, config.train.seed)
        used, said = kept(rewards, catalog, ~held, config.filter)
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
        masks, nothing = check_masked(rewards, source, feed.taken, config.filter)
        if nothing:
            raise NothingToLearn(nothing)
        return replace(feed, notes=(*notes, *masks), shares_of_inputs=shares(source, config))

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
        return masked(self.rewards, self.catalog, self.taken, self.config.filter)

    @cached_property
    def taken(self) -> NDArray[np.bool_]:
        """[R] bool: neither held out nor left out, itself or with its group."""
        return self.used & ~left_out(self.rewards, self.catalog.group, self.used, self.config)

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
        drawn = taken(self.source, there, () if whole else self.shares_of_inputs, plan_seed)
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
