"""Choose and order the traces of each optimizer step: filters, mixture weights, and packing one step at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad._html import plural
from tracegrad.alignment.sequences import Sequences
from tracegrad.config import Config, Filter
from tracegrad.data.codes import ENDINGS, LEVELS, NO_LEVEL, TRUNCATED
from tracegrad.errors import ArgumentError
from tracegrad.objective import Objective
from tracegrad.packing import ModelShape, Sharing, Step, measure, nothing_to_train, pack, steps_of
from tracegrad.recipes import Recipe
from tracegrad.recipes.config_file import describe_unused_logprobs
from tracegrad.trainer.advantages import compute_advantages, reward_column
from tracegrad.trainer.dataset import Dataset, TraceTable, as_dataset
from tracegrad.trainer.off_policy_eval import choose_held_out
from tracegrad.trainer.schedule import Schedule
from tracegrad.trainer.validate import check_effective, check_ratios, old_logprob_notes, refreshes_old_each_update

Floats, Flags = NDArray[np.float32], NDArray[np.bool_]


def effective_rewards(rewards: Floats, source: Dataset, options: Filter) -> Floats:
    """Return [R] rewards, with 0 for truncated traces if `filter.zero_truncated` is set; unknown rewards stay NaN."""
    if not options.zero_truncated:
        return rewards
    has_reward = np.isfinite(rewards)
    catalog = source.catalog
    _check_endings_known(source, has_reward & (catalog.terms > 0), "filter.zero_truncated", "would keep their reward")
    return np.where(has_reward & (catalog.ending == TRUNCATED), np.float32(0), rewards)


def filter_traces(rewards: Floats, catalog: TraceTable, candidates: Flags, options: Filter) -> tuple[Flags, list[str]]:
    """Apply the filters that look at one trace at a time.

    A trace without a reward passes the reward bounds. A trace with a token of unknown version fails `max_staleness`.

    Args:
        rewards: [R] rewards.
        catalog: table of the R traces.
        candidates: [R] bool, the traces to filter.
        options: section `filter` of the config.

    Returns:
        [R] bool, the traces that pass; and one sentence per active filter.

    Raises:
        ArgumentError: for `max_staleness` if no token has a version.
    """
    newest = int(catalog.version_max.max(initial=-1))
    if options.max_staleness >= 0 and newest < 0:
        raise ArgumentError(
            "TG-TRAIN-070: filter.max_staleness has no effect: no trace records the policy version that sampled it. "
            "Leave the option out, or pass the field that contains the version: map.version "
            "PATH."
        )
    worst = LEVELS.index(options.worst_level)
    rejected = {
        "min_reward": rewards < options.min_reward,
        "max_reward": rewards > options.max_reward,
        "min_turns": catalog.turns < options.min_turns,
        "max_turns": (catalog.turns > options.max_turns) & (options.max_turns > 0),
        "worst_level": (catalog.alignment_level > worst) & (catalog.alignment_level != NO_LEVEL),
        "max_staleness": ((catalog.version_min < 0) | (catalog.version_min < newest - options.max_staleness))
        & (options.max_staleness >= 0),
    }
    remaining, notes, default = candidates.copy(), [], Filter()
    for name, dropped in rejected.items():
        if getattr(options, name) != getattr(default, name):
            left_out = f"{int((remaining & dropped).sum()):,} of {int(remaining.sum()):,}"
            notes.append(f"{left_out} traces are left out by filter.{name}.")
            remaining &= ~dropped
    return remaining, notes


def zero_std_groups(rewards: Floats, group: NDArray[np.int32], used: Flags, config: Config) -> Flags:
    """Return [R] bool: traces of zero-std groups, if `filter.drop_zero_std_groups` drops them.

    A group counts as zero-std if no two known rewards of its used traces differ by more than
    `filter.zero_std_tolerance`. A single trace is not dropped if `advantage.single_sample_group` keeps its reward.
    """
    if not config.filter.drop_zero_std_groups:
        return np.zeros(len(rewards), bool)
    spread, count = _spread(rewards, group, np.isfinite(rewards) & used)
    keeps_single = (count == 1) & (config.advantage.single_sample_group == "keep")
    return ~(spread > config.filter.zero_std_tolerance) & ~keeps_single


def find_masked_traces(rewards: Floats, catalog: TraceTable, of: Flags, options: Filter) -> Flags:
    """Return [R] bool: the traces among `of` to mask, which are truncated or in a zero-std group.

    Only groups with several trainable traces count as zero-std here.
    """
    truncated = of & (catalog.ending == TRUNCATED) & options.mask_truncated
    if not options.mask_zero_std_groups:
        return truncated
    trainable = of & np.isfinite(rewards) & ~truncated & (catalog.terms > 0)
    spread, count = _spread(rewards, catalog.group, trainable)
    return truncated | (of & (count > 1) & ~(spread > options.zero_std_tolerance))


def describe_masked(rewards: Floats, source: Dataset, taken: Flags, options: Filter) -> tuple[list[str], str]:
    """Describe the masking of the traces that a run uses.

    Returns:
        Sentences about what is masked; and the reason if nothing is left to train, else "".
    """
    if not (options.mask_truncated or options.mask_zero_std_groups):
        return [], ""
    catalog = source.catalog
    trainable = taken & (catalog.terms > 0)
    if options.mask_truncated:
        _check_endings_known(source, trainable, "filter.mask_truncated", "would be trained on")
    masked_traces = find_masked_traces(rewards, catalog, taken, options)
    truncated_traces = masked_traces & (catalog.ending == TRUNCATED) & options.mask_truncated
    truncated_count, even, notes = int(truncated_traces.sum()), int((masked_traces & ~truncated_traces).sum()), []
    if truncated_count:
        notes.append(
            f"{truncated_count:,} of {int(trainable.sum()):,} traces are truncated and masked (filter.mask_truncated)."
        )
    if even:
        notes.append(
            f"{even:,} traces are masked because all rewards of their group are equal (filter.mask_zero_std_groups)."
        )
    if (trainable & ~masked_traces).any():
        return notes, ""
    if not even:
        return notes, (
            f"all {truncated_count:,} traces are truncated, and filter.mask_truncated masks them. There is "
            f"nothing to learn. "
            "Record with a higher token limit, or leave filter.mask_truncated out."
        )
    return notes, (
        f"rewards do not differ within any group, and filter.mask_zero_std_groups masks {even:,} traces. There is "
        f"nothing "
        "to learn. Leave filter.mask_zero_std_groups out, or pass traces whose rewards differ within a group."
    )


def _spread(
    rewards: Floats, group: NDArray[np.int32], included: Flags
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return [R] range of the known rewards in each trace's group (-inf if there are none), and [R] their number."""
    ids, at = np.unique(group, return_inverse=True)
    low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.minimum.at(low, at[included], rewards[included])
    np.maximum.at(high, at[included], rewards[included])
    return (high - low)[at], np.bincount(at[included], minlength=len(ids))[at]


def _check_endings_known(source: Dataset, traces: Flags, option: str, consequence: str) -> None:
    unknown = np.flatnonzero(traces & (source.catalog.ending == ENDINGS.index("unknown")))
    if len(unknown):
        name = source.trace_name(int(unknown[0]))
        raise ArgumentError(
            f"TG-TRAIN-071: the end of trace '{name}' and {len(unknown) - 1:,} more is unknown: the last generation "
            "has neither a finish_reason nor a stop token, or was prepared by an older version. Truncated traces "
            f"{consequence}. Record finish_reason, prepare again, or leave {option} out."
        )


_SEED_TAG = 0x6D6978


def input_weights(source: Dataset, config: Config) -> tuple[float, ...]:
    """Return the weight of each input relative to the largest; () if all weights are equal or none are set.

    Raises:
        ArgumentError: unless there is one positive number for each of several inputs, or if a group is in two inputs of
            different weights.
    """
    weights = config.mixture.weights
    if not weights:
        return ()
    if source.inputs < 2:
        raise ArgumentError(
            "TG-TRAIN-072: mixture.weights has no effect: there is only one input. Leave the option out, or pass "
            "several prepared folders."
        )
    if len(weights) != source.inputs or not all(0 < weight < float("inf") for weight in weights):
        raise ArgumentError(
            f"TG-TRAIN-073: mixture.weights is {list(weights)!s:.80}, but there are {source.inputs} inputs. "
            "Pass one number above 0 for each input."
        )
    relative = tuple(weight / max(weights) for weight in weights)
    catalog = source.catalog
    of_trace = np.array(relative)[catalog.source]
    low, high = np.full(int(catalog.group.max(initial=-1)) + 1, 2.0), np.zeros(int(catalog.group.max(initial=-1)) + 1)
    np.minimum.at(low, catalog.group, of_trace)
    np.maximum.at(high, catalog.group, of_trace)
    if len(mixed := np.flatnonzero((low < high)[catalog.group])):
        raise ArgumentError(
            f"TG-TRAIN-074: the group of trace '{source.trace_name(int(mixed[0]))}' is in inputs with different "
            "weights, and a group cannot be split. Use other group names, or the same weight for these inputs."
        )
    return relative if min(relative) < 1 else ()


def draw_groups(source: Dataset, there: NDArray[np.bool_], shares: tuple[float, ...], seed: int) -> NDArray[np.bool_]:
    """Return [R] bool: the traces of the groups that an epoch uses, among those in `there`.

    Of the n groups of an input, max(1, round(share * n)) are drawn, differently for each seed.
    """
    if not shares:
        return there
    catalog, out = source.catalog, np.zeros(len(there), bool)
    for number, share in enumerate(shares):
        candidates = there & (catalog.source == number)
        groups = np.unique(catalog.group[candidates])
        count = max(round(share * len(groups)), 1)
        chosen = np.random.default_rng([seed, _SEED_TAG, number]).permutation(len(groups))[:count]
        out |= candidates & np.isin(catalog.group, groups[chosen])
    return out


Rows = NDArray[np.int64]

TOKENS_AT_ONCE = 1 << 20
"""Approximate tokens per piece when traces are only measured, or checked before the first step."""


@dataclass(frozen=True, eq=False)
class StepAssignment:
    """The traces of each step in one epoch.

    Args:
        rows: traces ordered by step, ascending within a step.
        first: [steps + 1] offset of each step in `rows`.
    """

    rows: Rows
    first: Rows

    def __len__(self) -> int:
        return len(self.first) - 1

    def of(self, step: int) -> Rows:
        """Return the traces of a step, ascending."""
        return self.rows[self.first[step] : self.first[step + 1]]

    @classmethod
    def by(cls, step: NDArray[np.int32], member: NDArray[np.bool_]) -> "StepAssignment":
        """Build it from the step number of each trace. The number of steps is the highest number in `step` plus 1.

        Args:
            step: [R], -1 for traces of no step.
            member: [R] bool, the traces to include.
        """
        rows = np.flatnonzero(member & (step >= 0))
        step_of_row = step[rows]
        steps = int(step.max(initial=-1)) + 1
        first = np.concatenate([[0], np.cumsum(np.bincount(step_of_row, minlength=steps))]).astype(np.int64)
        return cls(rows[np.argsort(step_of_row, kind="stable")], first)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One rank's part of a packed step, and the positions of its trained tokens in the whole data set.

    Args:
        step: the packed step; traces, tokens, branches and groups are numbered as in the whole data set.
        terms: [L] int64, ascending: trained tokens of the step's traces on all ranks, numbered in the whole data set.
        here: [M] int64, index into `terms` of each trained token of `step`.
        trace: [L] int64, trace of each entry of `terms`.
        rollout: [L] float32, recorded logprob of each entry of `terms`.
    """

    step: Step
    terms: Rows
    here: Rows
    trace: Rows
    rollout: NDArray[np.float32]


def array_bytes(value: object) -> int:
    """Return the number of bytes of an array, or of the arrays in a dataclass or tuple.

    >>> array_bytes((np.zeros(3), (np.zeros(2, np.int32), "text"), Sharing(True, 9, 5, 1.4, False)))
    32
    """
    if isinstance(value, np.ndarray):
        return value.nbytes
    parts = value if isinstance(value, tuple) else vars(value).values() if is_dataclass(value) else ()
    return sum(map(array_bytes, parts))


def pack_step(
    source: Dataset,
    rows: Rows,
    advantages: NDArray[np.float32],
    trained: NDArray[np.bool_],
    counted: NDArray[np.bool_] | None,
    **how: Any,
) -> PlannedStep:
    """Pack one step from some traces. The result is the same as when all traces are packed at once.

    Args:
        source: the data set.
        rows: trace numbers, ascending.
        advantages: [R], for all traces.
        trained: [R] bool, traces whose tokens are laid out.
        counted: [R] bool, traces that count in the denominators without a token, as for `pack`; None for no trace.
        how: further arguments of `pack`.
    """
    catalog, sequences = source.catalog, source.take(rows)
    recorded, rollout = sequences.trainable, np.asarray(sequences.rollout_logprobs)[sequences.trainable]
    if not trained[rows].all():
        sequences = replace(sequences, trainable=sequences.trainable & np.repeat(trained[rows], catalog.tokens[rows]))
    count_always = None if counted is None else counted[rows]
    [step] = pack(sequences, advantages[rows], per="trace", count_always=count_always, **how)
    here = np.cumsum(recorded, dtype=np.int64)[step.origin] - 1
    if len(rows) < catalog.traces:
        step = _of_all(step, rows, catalog)
    count = catalog.terms[rows].astype(np.int64)
    shift = catalog.first_term[rows] - (np.cumsum(count) - count)
    return PlannedStep(step, np.arange(len(rollout)) + np.repeat(shift, count), here, np.repeat(rows, count), rollout)


def count_laid_out_tokens(source: Dataset, rows: Rows, **how: Any) -> NDArray[np.int64]:
    """Return [rows] the number of trained tokens of each trace that `pack` lays out; some traces may be too long.

    Args:
        source: the data set.
        rows: trace numbers, ascending.
        how: further arguments of `packing.measure`.

    Raises:
        ArgumentError: if a trace is too long and `too_long` is "error".
    """
    refuses = how["too_long"] == "error"
    options = {**how, "too_long": "drop"} if refuses else how
    laid_out = np.concatenate([measure(source.take(part), **options) for part in pieces(rows, source.catalog)])
    shortened = rows[laid_out < source.catalog.terms[rows]]
    if refuses and len(shortened):
        measure(source.take(shortened), **how)  # Raises the error, which describes the longest trace.
    return laid_out


def pieces(rows: Rows, catalog: TraceTable) -> Iterator[Rows]:
    """Yield traces in order, in pieces of about `TOKENS_AT_ONCE` tokens."""
    piece_index = np.cumsum(catalog.tokens[rows], dtype=np.int64) // TOKENS_AT_ONCE
    yield from (part for part in np.split(rows, np.flatnonzero(np.diff(piece_index)) + 1) if len(part))


def _of_all(step: Step, rows: Rows, catalog: TraceTable) -> Step:
    """Renumber a step of some traces as in the whole data set."""
    tokens, branches = catalog.tokens[rows].astype(np.int64), catalog.branches[rows].astype(np.int64)
    origin = step.origin + (catalog.first_token[rows] - (np.cumsum(tokens) - tokens))[step.trace]
    branch = step.branch + (catalog.first_branch[rows] - (np.cumsum(branches) - branches))[step.trace]
    return replace(step, origin=origin, branch=branch.astype(np.int32), trace=rows[step.trace].astype(np.int32))


class NothingToLearn(ArgumentError):
    """Raised if no trace would change the policy. It ends an offline run; an online run skips the step."""


@dataclass(frozen=True)
class StepSize:
    """The size of one step.

    Args:
        rows: per row, the number of tokens and of logit rows.
        terms: trained tokens in all rows.
        imbalance: as `Step.imbalance`.
    """

    rows: tuple[tuple[int, int], ...]
    terms: int
    imbalance: float


@dataclass(frozen=True)
class TrainingData:
    """The traces of a run, split into training and held-out traces, filtered and with advantages.

    Args:
        source: the data set.
        rewards: [R] float32, the trained reward; 0 for truncated traces if `filter.zero_truncated` is set.
        advantages: [R] float32; 0 for held-out traces. With `reward_kl`, the advantages before the penalty.
        held_out: [R] bool, held-out traces.
        eligible: [R] bool, traces that are not held out and pass the per-trace filters; advantages compare these.
        objective, config: the objective and the options of the run; `data.holdout` is the share that is held out.
        notes: sentences for the user about the traces.
        ranks, rank: number of processes that share each step, and the number of this process.
        shape: model shape, for estimates of the cost of rows.
        bucket: row lengths are padded to a multiple of this number of tokens.
        allow_prefix_sharing: whether the model can run rows with shared prefixes, if the config enables them.
        input_weights: the result of `input_weights`.
    """

    source: Dataset
    rewards: NDArray[np.float32]
    advantages: NDArray[np.float32]
    held_out: NDArray[np.bool_]
    eligible: NDArray[np.bool_]
    objective: Objective
    config: Config
    notes: tuple[str, ...]
    ranks: int = 1
    rank: int = 0
    shape: ModelShape | None = None
    bucket: int = 1
    allow_prefix_sharing: bool = True
    input_weights: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        data: Sequences | Dataset,
        objective: Objective,
        config: Config,
        *,
        ranks: int = 1,
        rank: int = 0,
        shape: ModelShape | None = None,
        bucket: int = 1,
    ) -> "TrainingData":
        """Filter and split the traces, compute advantages, and check that they fit the objective.

        Args:
            data: the traces.
            objective: the objective of the run.
            config: the options of the run.
            ranks, rank: number of processes that share each step, and the number of this process.
            shape: model shape, for estimates of the cost of rows.
            bucket: row lengths are padded to a multiple of this number of tokens.

        Raises:
            NothingToLearn: if no trace has both a trained token and a nonzero advantage.
            ArgumentError: if the objective needs a ratio that these traces lack, or an option would have no effect.
        """
        source = as_dataset(data)
        catalog = source.catalog
        if not catalog.traces:
            raise NothingToLearn(
                "TG-TRAIN-075: the input has no traces: no record contains a model call with an answer. "
                "Inspect the file with tracegrad doctor."
            )
        has_logprobs = bool(((catalog.known == catalog.terms) & (catalog.terms > 0)).any())
        share = config.data.holdout_share(has_logprobs=has_logprobs)
        config = replace(config, data=replace(config.data, holdout=share))
        check_effective(config, objective)
        objective.check_missing(config.train.missing_logprobs)
        notes = check_ratios(source, objective, config)
        notes += [
            f"the gradient depends on pack.tokens_per_row because of '{part}'."
            for part in objective.microbatch_components
        ]
        rewards = effective_rewards(
            reward_column(catalog, config.data.reward, config.data.reward_weights), source, config.filter
        )
        held = choose_held_out(catalog.group, config.data.holdout, config.train.seed)
        used, filter_notes = filter_traces(rewards, catalog, ~held, config.filter)
        if filter_notes and not (used & (catalog.terms > 0)).any():
            raise NothingToLearn(
                f"TG-TRAIN-076: nothing is left to train on: {' '.join(filter_notes)} Loosen the filter options."
            )
        notes += filter_notes
        notes += old_logprob_notes(objective, config, len(np.unique(catalog.group[used])))
        advantages = np.zeros(catalog.traces, np.float32)
        advantages[used] = compute_advantages(rewards, source, used, config)
        if not advantages.any():
            raise _nothing_to_learn(rewards, source, held, used, config)
        feed = cls(source, rewards, advantages, held, used, objective, config, tuple(notes), ranks, rank, shape, bucket)
        even = int((used & ~feed.count_eligible).sum())
        if even == int(used.sum()):
            raise NothingToLearn(
                "TG-TRAIN-077: rewards do not differ within any group, and filter.drop_zero_std_groups leaves "
                "all groups "
                "out. There is nothing to learn. Leave filter.drop_zero_std_groups out, or pass traces whose rewards "
                "differ within a group."
            )
        if even:
            notes.append(
                f"{even:,} traces are left out because all rewards of their group are equal "
                f"(filter.drop_zero_std_groups)."
            )
        mask_notes, reason = describe_masked(rewards, source, feed.count_eligible, config.filter)
        if reason:
            raise NothingToLearn(f"TG-TRAIN-097: {reason}")
        return replace(feed, notes=(*notes, *mask_notes), input_weights=input_weights(source, config))

    @property
    def catalog(self) -> TraceTable:
        """The table of all traces."""
        return self.source.catalog

    def warnings(self, recipe: Recipe | None = None) -> list[str]:
        """Return warnings for the user.

        Args:
            recipe: the recipe that the run started from, if there is one.
        """
        warnings = []
        if not self.objective.requirements.rollout and self.catalog.known.any():
            source = recipe.source if recipe is not None and recipe.objective == self.objective else ""
            warnings.append(describe_unused_logprobs(source))
        recorded = np.unique(self.catalog.temperature[~np.isnan(self.catalog.temperature)])
        wanted = None if recipe is None else recipe.temperature
        if wanted is not None and len(recorded) and not np.allclose(recorded, wanted):
            values = f"{recorded[0]:g}" if len(recorded) == 1 else f"{recorded[0]:g} to {recorded[-1]:g}"
            warnings.append(f"the temperature {wanted:g} of the config is not used: the traces record {values}.")
        return warnings

    @cached_property
    def trained(self) -> NDArray[np.bool_]:
        """[R] bool: traces whose tokens are trained."""
        return self.count_eligible & ~self.masked

    @cached_property
    def masked(self) -> NDArray[np.bool_]:
        """[R] bool: masked traces. Such a trace counts as a trace and has a reward, but no trained token."""
        return find_masked_traces(self.rewards, self.catalog, self.count_eligible, self.config.filter)

    @cached_property
    def count_eligible(self) -> NDArray[np.bool_]:
        """[R] bool: traces that are neither held out nor dropped by a filter, per trace or per group."""
        return self.eligible & ~zero_std_groups(self.rewards, self.catalog.group, self.eligible, self.config)

    def assign_steps(self, plan_seed: int, *, all_groups: bool = False) -> StepAssignment:
        """Assign the traces of an epoch to steps, with shuffled groups. Only the table of traces is needed.

        The tokens are read only of traces that may be too long for a row, once.

        Args:
            plan_seed: seed for drawing and shuffling groups.
            all_groups: use all groups regardless of `mixture.weights`.

        Raises:
            ArgumentError: if no token can be trained, or a trace is too long and `pack.too_long` is "error".
        """
        trained_counts = np.where(self.trained, self._laid_out, 0)
        present = (trained_counts > 0) | self.masked
        if not present.any():
            raise nothing_to_train()
        chosen = draw_groups(self.source, present, () if all_groups else self.input_weights, plan_seed)
        step = steps_of(self.catalog.group, chosen, self.config.train.groups_per_step, plan_seed)
        # Count a dropped trace in its group's step, or in the first step if all of its group was dropped.
        dropped = self.trained & (trained_counts == 0) & (self.catalog.terms > 0)
        if dropped.any():
            step[dropped & (steps_of(self.catalog.group, present, None, None) < 0)] = 0
        return StepAssignment.by(step, present | dropped)

    def pack_step(self, rows: Rows) -> PlannedStep:
        """Pack one step from its traces, which a `StepAssignment` assigned to it."""
        skip = self.config.pack.skip_zero_weight and not self.objective.requirements.zero_advantage_reason
        return pack_step(
            self.source,
            rows,
            self.advantages,
            self.trained,
            self.masked,
            skip_zero_advantage=skip,
            **self._pack_options(),
        )

    def steps(self, plan_seed: int) -> list[Step]:
        """Return all steps of an epoch as a list."""
        return list(self.each_step(plan_seed))

    def each_step(self, plan_seed: int) -> Iterator[Step]:
        """Yield the steps of an epoch."""
        cut = self.assign_steps(plan_seed)
        yield from (self.pack_step(cut.of(number)).step for number in range(len(cut)))

    @cached_property
    def sizes(self) -> list[StepSize]:
        """Sizes of the steps of the first epoch, for estimates. Each step is packed once."""
        return [
            StepSize(tuple((len(batch.ids), len(batch.read)) for batch in step.batches), len(step), step.imbalance)
            for step in self.each_step(0)
        ]

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows share prefixes if that is faster."""
        return self.allow_prefix_sharing and self.config.pack.share_prefixes

    def sharing(self) -> Sharing:
        """Estimate the effect of `pack.share_prefixes` on the first step, for a dry run."""
        sharing_config = replace(self.config, pack=replace(self.config.pack, share_prefixes=True))
        sharing = next(replace(self, config=sharing_config).each_step(0)).sharing
        assert sharing is not None
        return sharing

    @property
    def newest_version(self) -> int | None:
        """The newest recorded version, or None if no token has a version. Staleness is relative to it in offline runs.

        Files do not record the version of the policy that is trained.
        """
        version = int(self.catalog.version_max.max(initial=-1))
        return None if version < 0 else version

    def plan(self, steps: int) -> Schedule:
        """Build the schedule for `steps` steps per epoch. Every epoch has the same number, however it is shuffled."""
        return Schedule.of(self.config, steps, each_update=refreshes_old_each_update(self.objective, self.config))

    def held_pieces(self) -> list[Rows]:
        """Return the held-out traces with a token that is laid out, in pieces.

        Raises:
            ArgumentError: if one of them is too long for a row and `pack.too_long` is "error".
        """
        rows = np.flatnonzero(self.held_out & (self._laid_out > 0))
        return list(pieces(rows, self.catalog)) if len(rows) else []

    def pack_held_out(self, rows: Rows) -> PlannedStep:
        """Pack one piece of the held-out traces as a step."""
        return pack_step(self.source, rows, self.advantages, self.held_out, None, **self._pack_options())

    def plan_hash(self, cut: StepAssignment) -> str:
        """Return a hash of the table, the advantages, the held-out traces and the steps of an epoch.

        It is equal on all ranks that plan the same steps.
        """
        digest = blake2b(self.catalog.hash.encode(), digest_size=16)
        for part in (self.advantages, self.held_out, cut.rows, cut.first):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Return a hash of the trained tokens, the rewards and the groups."""
        return self.source.fingerprint(self.rewards)

    @cached_property
    def _laid_out(self) -> NDArray[np.int64]:
        """[R]: tokens laid out per trained or held-out trace; traces that may be too long are read and measured."""
        catalog, pack = self.catalog, self.config.pack
        used = (self.trained | self.held_out) & (catalog.terms > 0)
        counts = np.where(used, catalog.terms, 0).astype(np.int64)
        whole_traces = self.objective.requirements.trace_ratio
        lengths = catalog.tokens if whole_traces else catalog.longest
        if len(rows := np.flatnonzero(used & (lengths > pack.tokens_per_row))):
            counts[rows] = count_laid_out_tokens(
                self.source,
                rows,
                too_long=pack.too_long,
                tokens_per_row=pack.tokens_per_row,
                whole_traces=whole_traces,
                share_prefixes=self.shares_prefixes,
            )
        return counts

    def lines(self) -> list[str]:
        """Return lines about the traces that `pack.too_long` drops or truncates, for a terminal."""
        counts, limit = self.counts(), f"longer than {self.config.pack.tokens_per_row:,} tokens"
        texts = {
            name: f"{plural(part['traces'], 'trace')}, {plural(part['tokens'], 'trainable token')}: {limit}"
            for name, part in counts.items()
            if part["traces"]
        }
        heads = {"dropped": "left out", "truncated": "cut     "}
        return [f"{head} {texts[name]}" for name, head in heads.items() if name in texts]

    @property
    def longest(self) -> int:
        """Tokens of the longest branch that is laid out, at least 1."""
        lengths = np.minimum(self.catalog.longest[self._laid_out > 0], self.config.pack.tokens_per_row)
        return int(lengths.max(initial=1))

    def counts(self) -> dict[str, dict[str, int]]:
        """Count the traces and the tokens that an epoch trains, holds out, and loses to `pack.too_long`.

        Returns:
            {"trained", "held_out", "dropped", "truncated"}, each with "traces" and "tokens". The tokens of the last two
            are those that are lost, of trained and of held-out traces.
        """
        laid_out, lost = self._laid_out, np.where(self.trained | self.held_out, self.catalog.terms - self._laid_out, 0)
        parts = {
            "trained": (self.trained & (laid_out > 0), laid_out),
            "held_out": (self.held_out & (laid_out > 0), laid_out),
            "dropped": ((laid_out == 0) & (lost > 0), lost),
            "truncated": ((laid_out > 0) & (lost > 0), lost),
        }
        return {
            name: {"traces": int(traces.sum()), "tokens": int(tokens[traces].sum())}
            for name, (traces, tokens) in parts.items()
        }

    def _pack_options(self) -> dict[str, Any]:
        """Return the arguments of `pack` that are the same for each step."""
        return {
            "tokens_per_row": self.config.pack.tokens_per_row,
            "requirements": self.objective.requirements,
            "too_long": self.config.pack.too_long,
            "share_prefixes": self.shares_prefixes,
            "shape": self.shape,
            "ranks": self.ranks,
            "rank": self.rank,
            "pad_to_multiple_of": self.bucket,
        }


def _nothing_to_learn(
    rewards: NDArray[np.float32], source: Dataset, held: NDArray[np.bool_], used: NDArray[np.bool_], config: Config
) -> NothingToLearn:
    """Return the error that explains why all advantages are 0."""
    if held.any() and compute_advantages(rewards, source, used | held, config).any():
        return NothingToLearn(
            "TG-TRAIN-078: every group with different rewards is reserved for the off-policy estimate. There is "
            "nothing to learn from the others. Set data.holdout 0, or pass more groups."
        )
    return NothingToLearn(
        f"TG-TRAIN-079: all {int(used.sum()):,} advantages are 0: rewards do not differ within any group. There is "
        "nothing to learn. Pass traces whose rewards differ within a group, or compare all traces: "
        "advantage.baseline batch_mean."
    )
