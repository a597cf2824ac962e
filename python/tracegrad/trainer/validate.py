"""Checks before a run that objective, options and traces fit together, without a model.

They reject options without effect and unknown ratios, and return notes about the ratios for the user.
"""

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.sequences import Sequences
from tracegrad.config import Config, as_dict, options
from tracegrad.data.codes import FILLED, LOGPROB_KINDS, TEXT_TRAINS
from tracegrad.data.sampling import ACCEPT, options_on
from tracegrad.errors import ArgumentError
from tracegrad.objective import Objective
from tracegrad.trainer.advantages import needs_of
from tracegrad.trainer.dataset import Dataset, TraceTable, as_dataset


def check_effective(config: Config, objective: Objective) -> None:
    """Reject options that differ from their defaults but would have no effect in this run."""
    needs, advantage, kl = needs_of(objective, config), config.advantage, config.reward_kl
    unmeasured = "no group is held out (data.holdout), so there is no off-policy estimate"
    no_own_reference = "train.ref_model is the reference" if needs.ref else "this objective needs no reference"
    reasons = [
        reason for reason in (needs.zero_advantage_reason, needs.dropped_reason, needs.zero_weight_reason) if reason
    ]
    scalable = advantage.baseline in ("group_mean", "batch_mean")
    even = config.filter.drop_zero_std_groups or config.filter.mask_zero_std_groups
    if kl.coef:
        reasons = ["with reward_kl.coef, advantages are computed after two forward passes"] * 3
    no_effect_options = {
        "advantage.multi_objective_aggregation": (not config.data.reward_weights, "data.reward_weights is empty"),
        "filter.mask_zero_std_groups": (
            config.filter.drop_zero_std_groups,
            "filter.drop_zero_std_groups leaves them out",
        ),
        "filter.zero_std_tolerance": (
            not even,
            "neither filter.drop_zero_std_groups nor filter.mask_zero_std_groups is set",
        ),
        "pack.skip_zero_weight": (len(reasons) == 3, reasons[0] if reasons else ""),
        **{f"reward_kl.{name}": (not kl.coef, "reward_kl.coef is 0") for name in ("kind", "cap", "target_kl")},
        "reward_kl.horizon": (not (kl.coef and kl.target_kl), "reward_kl.coef or reward_kl.target_kl is 0"),
        "schedule.decay_ratio": (config.schedule.name != "wsd", f"schedule.name is {config.schedule.name}"),
        "schedule.min_lr_ratio": (
            config.schedule.name not in ("linear", "cosine", "wsd"),
            f"schedule.name is {config.schedule.name}",
        ),
        "train.updates_per_old_logprobs": (
            not needs.old and not needs.proximal,
            "this objective needs no old logprobs",
        ),
        "train.ref_model": (not needs.ref, "this objective needs no reference"),
        "train.ref_sync_steps": (bool(config.train.ref_model) or not needs.ref, no_own_reference),
        "train.ref_mixup_alpha": (
            not config.train.ref_sync_steps,
            "train.ref_sync_steps is 0, so the reference is fixed",
        ),
        "train.missing_logprobs": (not needs.rollout, "this objective needs no rollout logprobs"),
        "stop.min_ope_ess": (config.data.holdout == 0, unmeasured),
        "stop.ope_falls": (config.data.holdout == 0, unmeasured),
        "eval.ope_per_epoch": (config.data.holdout == 0, unmeasured),
        "advantage.ddof": (advantage.scale == "none", "advantage.scale is none"),
        "advantage.scale": (not scalable, f"advantage.baseline is {advantage.baseline}"),
        "advantage.single_sample_group": (advantage.baseline == "none", "advantage.baseline is none"),
    }
    values, defaults = as_dict(config), options()
    for name, (without_effect, reason) in no_effect_options.items():
        if without_effect and values[name] != defaults[name][1]:
            raise ArgumentError(f"TG-TRAIN-085: {name} has no effect: {reason}. Leave it out.")
    if advantage.multi_objective_aggregation == "normalize_then_sum":
        sum_changes = [kl.coef and "reward_kl.coef", config.filter.zero_truncated and "filter.zero_truncated"]
        if changed_option := next(filter(None, sum_changes), None):
            raise ArgumentError(
                "TG-TRAIN-086: advantage.multi_objective_aggregation normalize_then_sum uses each reward as recorded, "
                f"but {changed_option} changes their sum. Leave one of the two out."
            )
        if (advantage.baseline, advantage.scale) != ("group_mean", "std"):
            raise ArgumentError(
                "TG-TRAIN-087: advantage.multi_objective_aggregation normalize_then_sum divides each reward by its "
                "group's standard deviation. Set advantage.baseline group_mean and advantage.scale std."
            )
    if kl.coef and objective.requirements.ref_over == "vocabulary":
        raise ArgumentError(
            "TG-TRAIN-098: reward_kl compares old and ref over the ids that the sampler kept, and a penalty of the "
            "objective reads ref over the vocabulary. Each token has one logprob of ref. Set the penalty's over to "
            "support, or leave one of the two out."
        )
    every = config.train.updates_per_old_logprobs or int(refreshes_old_each_update(objective, config))
    if kl.coef and config.train.ref_sync_steps and (not every or config.train.ref_sync_steps % every):
        raise ArgumentError(
            "TG-TRAIN-088: train.ref_sync_steps updates the reference between two computations of old, but reward_kl "
            "needs both for the same batch. Set train.updates_per_old_logprobs to a divisor of train.ref_sync_steps."
        )


def check_ratios(data: Sequences | Dataset, objective: Objective, config: Config) -> list[str]:
    """Check that the ratio to the rollout policy is defined, if the objective needs one. Errors suggest alternatives.

    Returns:
        Notes for the user about the ratios.

    Raises:
        ArgumentError: if the objective needs rollout logprobs and one of these holds: traces are text without logprobs
            or of another model; logprobs have an unknown kind at a temperature that may not be 1; tokens were sampled
            with top_p, top_k, penalties and the like, and this was not accepted; no trained token has a logprob.
    """
    if not objective.requirements.rollout:
        return []
    source = as_dataset(data)
    catalog = source.catalog
    foreign = np.flatnonzero(catalog.foreign)
    dropped = config.data.on_error != "raise" and not config.data.text_only
    if len(foreign) and not dropped:
        raise ArgumentError(
            f"TG-TRAIN-089: {len(foreign):,} of {catalog.traces:,} traces, '{source.trace_name(int(foreign[0]))}' "
            "first, contain text without logprobs, or text of another model or tokenizer (level T6). The ratio to "
            f"this policy is unknown. Train on such text with {TEXT_TRAINS}, or leave such turns out with "
            "data.on_error skip."
        )
    measured = np.flatnonzero(catalog.known > 0)
    if not len(measured):
        raise ArgumentError(
            f"TG-TRAIN-090: none of {catalog.all_terms:,} trained tokens has a recorded logprob, so the ratio to the "
            "policy that sampled them is unknown. Train with objective TOPR_POSITIVE, which needs no ratio."
        )
    _check_kinds(source, measured, explicit=config.data.logprob_kind == "unknown")
    accepted = _check_sampling(source, measured, config.data.accept_truncated_sampling)
    return [*accepted, *_notes(catalog, measured, foreign)]


def _check_sampling(source: Dataset, measured: NDArray[np.int64], accepted: bool) -> list[str]:
    """Reject traces sampled from a modified distribution (top_p, ...); return a note instead if this is accepted."""
    catalog = source.catalog
    reshaped = measured[catalog.reshaped[measured] != 0]
    if not len(reshaped):
        return []
    bits = int(np.bitwise_or.reduce(catalog.reshaped[reshaped]))
    names, flag = ", ".join(options_on(bits)), f"--{ACCEPT.replace('_', '-')}"
    first = source.trace_name(int(reshaped[0]))
    subject = f"{len(reshaped):,} of {len(measured):,} traces, '{first}' first, were sampled with {names}"
    if accepted:
        return [
            f"{subject}: with {flag}, their ratio is off by the kept mass S at each token. Records do not contain S."
        ]
    raise ArgumentError(
        f"TG-TRAIN-091: {subject}: their tokens were sampled from another distribution than the one that the trainer "
        "computes. For an unchanged policy, the ratio of a token is the kept mass S with processed logprobs, and 1 "
        "instead of S with raw ones. To measure S, run tracegrad doctor --check-logprobs. Sample "
        f"without these options, train with {TEXT_TRAINS}, or accept the ratio with {flag}."
    )


def _check_kinds(source: Dataset, measured: NDArray[np.int64], *, explicit: bool) -> None:
    catalog = source.catalog
    unknown = catalog.logprob_kind[measured] == LOGPROB_KINDS.index("unknown")
    ambiguous = measured[unknown & ~(catalog.temperature[measured] == 1.0)]
    if len(ambiguous) and not explicit:
        temperature = catalog.temperature[ambiguous[0]]
        temperature_note = "is not recorded" if np.isnan(temperature) else f"was {temperature:g}"
        name = source.trace_name(int(ambiguous[0]))
        raise ArgumentError(
            f"TG-TRAIN-092: trace '{name}' and {len(ambiguous) - 1:,} more do not specify their kind of logprobs, and "
            f"the temperature {temperature_note}. Logprobs before and after temperature differ, and the ratio "
            "would be wrong. Set data.logprob_kind raw (vLLM's default) or processed; or data.logprob_kind unknown to "
            "use them unchanged."
        )


def refreshes_old_each_update(objective: Objective, config: Config) -> bool:
    """Return whether `old` is recomputed before each update: the default for one epoch."""
    needs, train = needs_of(objective, config), config.train
    return needs.old and not needs.proximal and train.epochs == 1 and not train.updates_per_old_logprobs


def old_logprob_notes(objective: Objective, config: Config, groups: int) -> list[str]:
    """Describe how often `old` is recomputed, if the user did not set it."""
    needs, train = needs_of(objective, config), config.train
    if not needs.old or needs.proximal or train.updates_per_old_logprobs or groups <= config.train.groups_per_step:
        return []
    hint = "(train.updates_per_old_logprobs changes it)."
    if train.epochs == 1:
        return [f"old logprobs are recomputed before every update, the default for one epoch {hint}"]
    return [f"old logprobs are recomputed once per epoch, the default for {train.epochs} epochs {hint}"]


def _notes(catalog: TraceTable, measured: NDArray[np.int64], foreign: NDArray[np.int64]) -> list[str]:
    notes: list[str] = []
    raw = catalog.logprob_kind[measured] == LOGPROB_KINDS.index("raw")
    temperature = catalog.temperature[measured]
    if tempered := int((raw & ~np.isnan(temperature) & (temperature != 1.0)).sum()):
        notes.append(
            f"{tempered:,} traces have raw logprobs and a sampling temperature other than 1: their ratio measures the "
            "mismatch and is not a sampling ratio."
        )
    if missing := catalog.all_terms - int(catalog.known.sum(dtype=np.int64)):
        notes.append(
            f"{missing:,} of {catalog.all_terms:,} trained tokens have no logprob, neither recorded nor filled."
        )
    if filled := int((catalog.alignment_level[measured] == FILLED).sum()):
        notes.append(
            f"{filled:,} traces have logprobs that tracegrad fill measured afterwards (level T7), not recorded."
        )
    if len(foreign):
        empty = int((catalog.terms[foreign] == 0).sum())
        notes.append(
            f"{len(foreign):,} traces contain text without logprobs, or text of another model (level T6): such turns "
            f"are left out, and {empty:,} traces have nothing else to train."
        )
    return notes
