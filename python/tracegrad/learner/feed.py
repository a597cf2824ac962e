"""What a run trains on: which traces, with which advantage, in which steps; and what it refuses to give a ratio.

Here a `Sequences` becomes the steps of each epoch and the held-out traces. No torch, no model. Called by the loop
and by `--dry-run`.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tracegrad.algebra import Objective
from tracegrad.batch import ModelShape, Sharing, Step, pack
from tracegrad.codes import LOGPROB_KINDS, TEXT_TRAINS, TIERS
from tracegrad.config import Config, as_dict, options
from tracegrad.errors import ArgumentError
from tracegrad.learner import filters
from tracegrad.learner.compared import compared, reward_column
from tracegrad.learner.off_policy_value import held_out
from tracegrad.learner.plan import Plan
from tracegrad.learner.reward_kl import needs_of
from tracegrad.sequence import Sequences

_T6 = TIERS.index("T6")


class NothingToLearn(ArgumentError):
    """No trace is left that would move the policy: an error of a run on recorded traces, a step passed over online."""


@dataclass(frozen=True)
class Feed:
    """The traces of a run, as the loop takes them.

    Args:
        sequences: as aligned; `trainable` only where this run trains or measures.
        rewards: [R] float32, the column trained on, 0 where `filter.zero_truncated` says so.
        advantages: [R] float32; 0 for held-out traces. With `reward_kl` what they would be without.
        held: [R] bool, kept out of training.
        objective, config: of the run.
        notes: what a user should know of them, one sentence each.
        ranks, rank: how many processes share each step, and which of them this is.
        shape: of the model, for predictions of what rows cost.
        bucket: rows are padded to a multiple of so many tokens.
        trees: whether the model can run rows that share prefixes, where the config asks for them.
    """

    sequences: Sequences
    rewards: NDArray[np.float32]
    advantages: NDArray[np.float32]
    held: NDArray[np.bool_]
    objective: Objective
    config: Config
    notes: tuple[str, ...]
    ranks: int = 1
    rank: int = 0
    shape: ModelShape | None = None
    bucket: int = 1
    trees: bool = True

    @classmethod
    def of(
        cls,
        sequences: Sequences,
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
        if not sequences.traces:
            raise NothingToLearn(
                "there is no trace: no record that was read holds a call of a model with an answer. Look at the file "
                "with tracegrad doctor."
            )
        check_effective(config, objective)
        objective.check_missing(config.train.missing)
        notes = check_ratios(sequences, objective, config)
        notes += [f"'{part}': the gradient depends on pack.token_budget." for part in objective.per_microbatch]
        rewards = filters.settled(reward_column(sequences, config.data.reward), sequences, config.filter)
        held = held_out(sequences.group, config.data.holdout, config.train.seed)
        notes += _of_old(objective, config, len(np.unique(sequences.group[~held])))
        advantages = np.zeros(sequences.traces, np.float32)
        advantages[~held] = compared(rewards, sequences, ~held, config)
        if not advantages.any():
            if held.any() and compared(rewards, sequences, np.ones_like(held), config).any():
                raise NothingToLearn(
                    "every group whose rewards differ is held out to measure value. There is nothing to learn from the "
                    "others. Set --data.holdout 0, or give more groups."
                )
            raise NothingToLearn(
                f"all {int((~held).sum())} advantages are 0: in no group do rewards differ. There is nothing to learn. "
                "Give traces whose rewards differ within a group, or compare them all: --advantage.baseline batch_mean."
            )
        feed = cls(sequences, rewards, advantages, held, objective, config, tuple(notes), ranks, rank, shape, bucket)
        even = int((~held & ~feed.taken).sum())
        if even == int((~held).sum()):
            raise NothingToLearn(
                "in no group do rewards differ, and filter.even_groups leaves all of them out. There is nothing to "
                "learn. Leave filter.even_groups out, or give traces whose rewards differ within a group."
            )
        if even:
            notes.append(f"{even} traces of groups in which all rewards are equal are left out: filter.even_groups.")
        masks, nothing = filters.check_masked(rewards, sequences, feed.taken, config.filter)
        if nothing:
            raise NothingToLearn(nothing)
        return replace(feed, notes=(*notes, *masks))

    @property
    def trained(self) -> NDArray[np.bool_]:
        """[R] bool: whose terms the steps are made of."""
        return self.taken & ~self.masked

    @property
    def masked(self) -> NDArray[np.bool_]:
        """[R] bool: what the config masks: it has a reward and counts as a trace, and no term."""
        return self.taken & filters.masked(self.rewards, self.sequences, self.config.filter)

    @property
    def taken(self) -> NDArray[np.bool_]:
        """[R] bool: neither held out nor of a group that is left out."""
        return ~self.held & ~filters.left_out(self.rewards, self.sequences.group, self.config)

    def steps(self, plan_seed: int) -> list[Step]:
        """The steps of an epoch, its groups shuffled by a seed."""
        skip = self.config.pack.skip_zero_weight and not self.objective.needs.zero_advantage
        return self._pack(self.trained, plan_seed, self.config.pack.step_groups, skip=skip, counted=self.masked)

    @property
    def shares(self) -> bool:
        """Whether rows share prefixes where that pays."""
        return self.trees and self.config.pack.share_prefixes

    def sharing(self) -> Sharing:
        """What `pack.share_prefixes` would do to the first step: for a dry run."""
        shared = replace(self.config, pack=replace(self.config.pack, share_prefixes=True))
        sharing = replace(self, config=shared).steps(0)[0].sharing
        assert sharing is not None
        return sharing

    @property
    def newest(self) -> int | None:
        """The newest version recorded, None where none is: what lags count from, and nowhere else is that decided.

        The version that the trained policy is of by this count is not known, as a file does not say it.
        """
        version = int(np.max(self.sequences.version, initial=-1))
        return None if version < 0 else version

    def plan(self, steps: int) -> Plan:
        """When what happens, in epochs of so many steps: as many in each, however the groups are shuffled."""
        return Plan.of(self.config, steps, each_update=_each_update(self.objective, self.config))

    def held_step(self) -> Step | None:
        """The held-out traces as one step that is only measured; None where none has a term."""
        owner = np.repeat(self.sequences.trace, np.diff(self.sequences.cu_seqlens))
        if not (self.sequences.trainable & self.held[owner]).any():
            return None
        return self._pack(self.held, None, None)[0]

    def fingerprint(self) -> str:
        """The same for the same terms, rewards and groups."""
        s = self.sequences
        digest = hashlib.sha256()
        for part in (s.ids, s.trainable, s.rollout_logprobs, s.cu_seqlens, s.trace, s.group, self.rewards):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def _pack(
        self,
        traces: NDArray[np.bool_],
        seed: int | None,
        step_groups: int | None,
        *,
        skip: bool = False,
        counted: NDArray[np.bool_] | None = None,
    ) -> list[Step]:
        s = self.sequences
        owner = np.repeat(s.trace, np.diff(s.cu_seqlens))
        return pack(
            replace(s, trainable=s.trainable & traces[owner]),
            self.advantages[owner[s.trainable & traces[owner]]],
            token_budget=self.config.pack.token_budget,
            per="term",
            step_groups=step_groups,
            needs=self.objective.needs,
            too_long=self.config.pack.too_long,
            share_prefixes=self.shares,
            skip_zero_advantage=skip,
            counted=counted,
            shape=self.shape,
            seed=seed,
            ranks=self.ranks,
            rank=self.rank,
            pad_to_multiple_of=self.bucket,
        )


def check_effective(config: Config, objective: Objective) -> None:
    """Refuses options that are set to something else than their default and would do nothing in this run."""
    needs, advantage, kl = needs_of(objective, config), config.advantage, config.reward_kl
    unmeasured = "data.holdout is 0, so value is not measured"
    no_own_reference = "train.ref_model is the reference" if needs.ref else "this objective takes no reference"
    looked_at = [why for why in (needs.zero_advantage, needs.dropped, needs.weightless) if why]
    scalable = advantage.baseline in ("group_mean", "batch_mean")
    even = config.filter.even_groups or config.filter.mask_even
    if kl.coef:
        looked_at = ["with reward_kl.coef the advantages are known after two forward passes"] * 3
    idle = {
        "filter.mask_even": (config.filter.even_groups, "filter.even_groups leaves them out"),
        "filter.tolerance": (not even, "neither filter.even_groups nor filter.mask_even is told"),
        "pack.skip_zero_weight": (len(looked_at) == 3, looked_at[0] if looked_at else ""),
        **{f"reward_kl.{name}": (not kl.coef, "reward_kl.coef is 0") for name in ("kind", "cap", "target")},
        "reward_kl.horizon": (not (kl.coef and kl.target), "reward_kl.coef or reward_kl.target is 0"),
        "schedule.decay": (config.schedule.name != "wsd", f"schedule.name is {config.schedule.name}"),
        "schedule.floor": (config.schedule.name == "constant", "schedule.name is constant"),
        "train.updates_per_old": (not needs.old and not needs.proximal, "this objective takes no old logprobs"),
        "train.ref_model": (not needs.ref, "this objective takes no reference"),
        "train.ref_every": (bool(config.train.ref_model) or not needs.ref, no_own_reference),
        "train.missing": (not needs.rollout, "this objective takes no rollout logprobs"),
        "stop.below_ess": (config.data.holdout == 0, unmeasured),
        "stop.worse": (config.data.holdout == 0, unmeasured),
        "train.off_policy_value_per_epoch": (config.data.holdout == 0, unmeasured),
        "advantage.ddof": (advantage.scale == "none", "advantage.scale is none"),
        "advantage.scale": (not scalable, f"advantage.baseline is {advantage.baseline}"),
        "advantage.singleton": (advantage.baseline == "none", "advantage.baseline is none"),
    }
    values, known = as_dict(config), options()
    for name, (without_effect, why) in idle.items():
        if without_effect and values[name] != known[name][1]:
            raise ArgumentError(
                f"{name} has no effect: {why}. An option that does nothing hides a mistake. Leave it out."
            )
    every = config.train.updates_per_old or int(_each_update(objective, config))
    if kl.coef and config.train.ref_every and (not every or config.train.ref_every % every):
        raise ArgumentError(
            "train.ref_every renews the reference between two measurements of old, and reward_kl needs both of a whole "
            "such batch at once. Set train.updates_per_old to a divisor of train.ref_every."
        )


def check_ratios(sequences: Sequences, objective: Objective, config: Config) -> list[str]:
    """Refuses to form a ratio where none is known, and says what would work instead.

    Returns:
        what a user should know of the ratios that are formed.

    Raises:
        ArgumentError: for an objective with a ratio to rollout, if traces are text of another model, if logprobs are
            of an unknown kind at a temperature that is not known to be 1, or if no trained token has a logprob.
    """
    if not objective.needs.rollout:
        return []
    s = sequences
    owner = np.repeat(s.trace, np.diff(s.cu_seqlens))
    foreign = np.unique(owner[s.tier == _T6])
    dropped = config.data.on_error != "raise" and not config.data.text_only
    if len(foreign) and not dropped:
        raise ArgumentError(
            f"{len(foreign)} of {s.traces} traces, '{s.trace_name(foreign[0])}' first, hold text without logprobs, or "
            "of another model or tokenizer (T6): it has no logprobs of this policy, and a ratio of 1 would be "
            f"invented. Train on it with {TEXT_TRAINS}; or leave such turns out with --on-error skip."
        )
    known = s.trainable & ~np.isnan(s.rollout_logprobs)
    if not known.any():
        raise ArgumentError(
            f"none of {int(s.trainable.sum())} trained tokens has a recorded logprob. No ratio to the policy that "
            "sampled them is known. Train with --objective TOPR_POSITIVE, which takes no ratio."
        )
    measured = np.unique(owner[known])
    _check_kinds(s, measured, explicit=config.data.logprob_kind == "unknown")
    return _notes(s, measured, foreign)


def _check_kinds(s: Sequences, measured: NDArray[np.int32], *, explicit: bool) -> None:
    unknown = s.logprob_kind[measured] == LOGPROB_KINDS.index("unknown")
    open_ = measured[unknown & ~(s.temperature[measured] == 1.0)]
    if len(open_) and not explicit:
        heat = s.temperature[open_[0]]
        told = "is not recorded" if np.isnan(heat) else f"was {heat:g}"
        name = s.trace_name(open_[0])
        raise ArgumentError(
            f"trace '{name}' and {len(open_) - 1} more do not say what their logprobs are of, and the "
            f"temperature {told}. Before or after temperature is a different number, and the ratio would be wrong. "
            "Say --logprob-kind raw (vLLM's default) or processed; or --logprob-kind unknown to take them as they are."
        )


def _each_update(objective: Objective, config: Config) -> bool:
    """Whether `old` is measured before each update: nothing else is told, and there is one pass."""
    needs, train = needs_of(objective, config), config.train
    return needs.old and not needs.proximal and train.epochs == 1 and not train.updates_per_old


def _of_old(objective: Objective, config: Config, groups: int) -> list[str]:
    """How long an `old` stays where nobody said it, and what that stands on."""
    needs, train = needs_of(objective, config), config.train
    if not needs.old or needs.proximal or train.updates_per_old or groups <= config.pack.step_groups:
        return []
    which = "--train.updates_per_old says otherwise; figures of the bundled example, docs/choosing.md."
    if train.epochs == 1:
        return [f"old is measured before each update, as there is one pass: 92 against 82 % with one for all. {which}"]
    return [f"old stays for an epoch, as there are {train.epochs} passes: after four, 91 against 50 %. {which}"]


def _notes(s: Sequences, measured: NDArray[np.int32], foreign: NDArray[np.int32]) -> list[str]:
    notes = []
    raw = s.logprob_kind[measured] == LOGPROB_KINDS.index("raw")
    heat = s.temperature[measured]
    if warm := int((raw & ~np.isnan(heat) & (heat != 1.0)).sum()):
        notes.append(
            f"{warm} traces were sampled at a temperature other than 1 and have raw logprobs: their ratio measures "
            "mismatch and is no sampling ratio."
        )
    if missing := int((s.trainable & np.isnan(s.rollout_logprobs)).sum()):
        notes.append(f"{missing} of {int(s.trainable.sum())} trained tokens have no recorded logprob.")
    if len(foreign):
        empty = len(np.setdiff1d(foreign, np.repeat(s.trace, np.diff(s.cu_seqlens))[s.trainable]))
        notes.append(
            f"{len(foreign)} traces hold text without logprobs, or of another model (T6): such turns are left out, and "
            f"{empty} traces that hold nothing else to train."
        )
    return notes
