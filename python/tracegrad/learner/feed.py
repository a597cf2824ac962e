"""What a run trains on: which traces, with which advantage, in which steps; and what it refuses to give a ratio.

Here a `Sequences` becomes the steps of each epoch and the held-out traces. No torch, no model. Called by the loop
and by `--dry-run`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import advantage
from tracegrad.algebra import Objective
from tracegrad.batch import ModelShape, Sharing, Step, pack
from tracegrad.config import Config, as_dict, nearest, options
from tracegrad.errors import ArgumentError
from tracegrad.learner.plan import Plan
from tracegrad.learner.value import held_out
from tracegrad.sequence import LOGPROB_KINDS, TIERS, Sequences

_SHARED: dict[str, Any] = {"nothing": "repeats", "repeats": "repeats", "idle": "both", "both": "both"}
_T6 = TIERS.index("T6")


@dataclass(frozen=True)
class Feed:
    """The traces of a run, as the loop takes them.

    Args:
        sequences: as aligned; `trainable` only where this run trains or measures.
        rewards: [R] float32, the column trained on.
        advantages: [R] float32; 0 for held-out traces.
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
    ) -> Feed:
        """Splits, checks and scores.

        Raises:
            ArgumentError: if the objective needs a ratio that these traces cannot have, an option would have no
                effect, or there is nothing to learn.
        """
        check_effective(config, objective)
        objective.check_missing(config.train.missing)
        notes = check_ratios(sequences, objective, config)
        notes += [f"'{part}': the gradient depends on pack.token_budget." for part in objective.per_microbatch]
        rewards = reward_column(sequences, config.data.reward)
        held = held_out(sequences.group, config.data.holdout, config.train.seed)
        advantages = np.zeros(sequences.traces, np.float32)
        advantages[~held] = _advantages(rewards, sequences, ~held, config)
        if not advantages.any():
            raise ArgumentError(
                f"all {int((~held).sum())} advantages are 0: in no group do rewards differ. There is nothing to learn. "
                "Give traces whose rewards differ within a group, or set advantage.baseline."
            )
        return cls(sequences, rewards, advantages, held, objective, config, tuple(notes), ranks, rank, shape, bucket)

    def steps(self, plan_seed: int) -> list[Step]:
        """The steps of an epoch, its groups shuffled by a seed."""
        skip = self.config.pack.skip_idle and not self.objective.needs.zero_advantage
        return self._pack(~self.held, plan_seed, self.config.pack.step_groups, skip=skip)

    @property
    def shares(self) -> bool:
        """Whether rows share prefixes where that pays."""
        return self.trees and self.config.pack.share_prefixes

    def sharing(self) -> Sharing:
        """What `pack.share_prefixes` would do to the first step: for a dry run."""
        told = replace(self.config, pack=replace(self.config.pack, leave_out=_SHARED[self.config.pack.leave_out]))
        found = replace(self, config=told).steps(0)[0].sharing
        assert found is not None
        return found

    @property
    def newest(self) -> int | None:
        """The newest version recorded, None where none is: what lags count from, and nowhere else is that decided.

        The version that the trained policy is of by this count is not known, as a file does not say it.
        """
        found = int(np.max(self.sequences.version, initial=-1))
        return None if found < 0 else found

    def plan(self, steps: int) -> Plan:
        """When what happens, in epochs of so many steps: as many in each, however the groups are shuffled."""
        return Plan.of(self.config, steps)

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
        self, traces: NDArray[np.bool_], seed: int | None, step_groups: int | None, *, skip: bool = False
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
            shape=self.shape,
            seed=seed,
            ranks=self.ranks,
            rank=self.rank,
            pad_to_multiple_of=self.bucket,
        )


def reward_column(sequences: Sequences, name: str) -> NDArray[np.float32]:
    """[R] float32: the rewards called `name`, the first column for "".

    Raises:
        ArgumentError: if there is no such column, with the nearest name.
    """
    names = sequences.reward_names
    if name and name not in names:
        raise ArgumentError(f"data.reward is {name!r}, and no trace has such a reward. {nearest(name, names)}")
    if not names or not np.isfinite(sequences.rewards).any():
        raise ArgumentError(
            "no trace has a reward. Without one no trace is better than another. Record a reward in each trace."
        )
    return np.ascontiguousarray(sequences.rewards[:, names.index(name) if name else 0])


def _advantages(
    rewards: NDArray[np.float32], sequences: Sequences, used: NDArray[np.bool_], config: Config
) -> NDArray[np.float32]:
    """The advantages of the traces that are used, compared with one another."""
    told, reward, group = config.advantage, rewards[used], sequences.group[used]
    if told.baseline == "none":
        return np.nan_to_num(reward, nan=0.0)
    if told.baseline == "rloo":
        return advantage.rloo(reward, group, singleton=told.singleton)
    if told.baseline == "max_rl":
        return advantage.max_rl(reward, group, singleton=told.singleton)
    if told.baseline == "opo":
        owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
        lengths = np.bincount(owner[sequences.trainable], minlength=sequences.traces)
        return advantage.opo(reward, lengths[used], group, singleton=told.singleton)
    groups = np.zeros_like(group) if told.baseline == "batch_mean" else group
    ddof = None if told.scale == "none" else told.ddof
    return advantage.group_mean(reward, groups, scale=told.scale, ddof=ddof, singleton=told.singleton)


def check_effective(config: Config, objective: Objective) -> None:
    """Refuses options that are set to something else than their default and would do nothing in this run.

    Raises:
        ArgumentError: with the option and what makes it idle.
    """
    needs, told = objective.needs, config.advantage
    unmeasured = "data.holdout is 0, so value is not measured"
    no_own_reference = "train.ref_model is the reference" if needs.ref else "this objective takes no reference"
    told_pack = config.pack.leave_out
    looked_at = [why for why in (needs.zero_advantage, needs.dropped, needs.weightless) if why]
    scalable = told.baseline in ("group_mean", "batch_mean")
    idle = {
        "pack.leave_out": (told_pack == "idle" and len(looked_at) == 3, looked_at[0] if looked_at else ""),
        "train.updates_per_old": (not needs.old and not needs.proximal, "this objective takes no old logprobs"),
        "train.ref_model": (not needs.ref, "this objective takes no reference"),
        "train.ref_every": (bool(config.train.ref_model) or not needs.ref, no_own_reference),
        "train.missing": (not needs.rollout, "this objective takes no rollout logprobs"),
        "train.stop_below_ess": (config.data.holdout == 0, unmeasured),
        "train.value_per_epoch": (config.data.holdout == 0, unmeasured),
        "advantage.ddof": (told.scale == "none", "advantage.scale is none"),
        "advantage.scale": (not scalable, f"advantage.baseline is {told.baseline}"),
        "advantage.singleton": (told.baseline == "none", "advantage.baseline is none"),
    }
    values, known = as_dict(config), options()
    for name, (without_effect, why) in idle.items():
        if without_effect and values[name] != known[name][1]:
            raise ArgumentError(
                f"{name} has no effect: {why}. An option that does nothing hides a mistake. Leave it out."
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
            f"{len(foreign)} of {s.traces} traces, '{s.trace_name(foreign[0])}' first, are text of another model or "
            "tokenizer (T6): they have no logprobs of this policy, and a ratio of 1 would be invented. Train on them "
            "with --objective WEIGHTED_SFT --text-only, or leave them out with --on-error skip."
        )
    known = s.trainable & ~np.isnan(s.rollout_logprobs)
    if not known.any():
        raise ArgumentError(
            f"none of {int(s.trainable.sum())} trained tokens has a recorded logprob. No ratio to the policy that "
            "sampled them is known. Record logprobs, or train with --objective WEIGHTED_SFT, which takes no ratio."
        )
    measured = np.unique(owner[known])
    _check_kinds(s, measured, explicit=config.data.logprob_kind == "unknown")
    return _notes(s, measured, len(foreign))


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


def _notes(s: Sequences, measured: NDArray[np.int32], foreign: int) -> list[str]:
    notes = []
    raw = s.logprob_kind[measured] == LOGPROB_KINDS.index("raw")
    heat = s.temperature[measured]
    warm = int((raw & ~np.isnan(heat) & (heat != 1.0)).sum())
    if warm:
        notes.append(
            f"{warm} traces were sampled at a temperature other than 1 and have raw logprobs: their ratio measures "
            "mismatch and is no sampling ratio."
        )
    missing = int((s.trainable & np.isnan(s.rollout_logprobs)).sum())
    if missing:
        notes.append(f"{missing} of {int(s.trainable.sum())} trained tokens have no recorded logprob.")
    if foreign:
        notes.append(f"{foreign} traces are text of another model (T6) and are left out.")
    return notes
