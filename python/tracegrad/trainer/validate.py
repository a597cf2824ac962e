"""Checks before a run that objective, options and traces fit together, without a model.

They reject options without effect and ratios that are not known, and return notes about the ratios for the user.
"""

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.sequences import Sequences
from tracegrad.config import Config, as_dict, options
from tracegrad.data.codes import LOGPROB_KINDS, TEXT_TRAINS
from tracegrad.data.sampling import ACCEPT, options_on
from tracegrad.errors import ArgumentError
from tracegrad.objective import Objective
from tracegrad.trainer.advantages import needs_of
from tracegrad.trainer.dataset import Dataset, TraceTable, as_dataset


def check_effective(config: Config, objective: Objective) -> None:
    """Reject options that differ from their defaults but would have no effect in this run."""
    needs, advantage, kl = needs_of(objective, config), config.advantage, config.reward_kl
    unmeasured = "data.holdout is 0, so value is not measured"
    no_own_reference = "train.ref_model is the reference" if needs.ref else "this objective takes no reference"
    reasons = [reason for reason in (needs.zero_advantage, needs.dropped, needs.weightless) if reason]
    scalable = advantage.baseline in ("group_mean", "batch_mean")
    even = config.filter.even_groups or config.filter.mask_even
    if kl.coef:
        reasons = ["with reward_kl.coef the advantages are known after two forward passes"] * 3
    no_effect_options = {
        "advantage.several": (not config.data.reward_weights, "data.reward_weights is empty"),
        "filter.mask_even": (config.filter.even_groups, "filter.even_groups leaves them out"),
        "filter.tolerance": (not even, "neither filter.even_groups nor filter.mask_even is told"),
        "pack.skip_zero_weight": (len(reasons) == 3, reasons[0] if reasons else ""),
        **{f"reward_kl.{name}": (not kl.coef, "reward_kl.coef is 0") for name in ("kind", "cap", "target")},
        "reward_kl.horizon": (not (kl.coef and kl.target), "reward_kl.coef or reward_kl.target is 0"),
        "schedule.decay": (config.schedule.name != "wsd", f"schedule.name is {config.schedule.name}"),
        "schedule.floor": (
            config.schedule.name not in ("linear", "cosine", "wsd"),
            f"schedule.name is {config.schedule.name}",
        ),
        "train.updates_per_old": (not needs.old and not needs.proximal, "this objective takes no old logprobs"),
        "train.ref_model": (not needs.ref, "this objective takes no reference"),
        "train.ref_every": (bool(config.train.ref_model) or not needs.ref, no_own_reference),
        "train.ref_mixup_alpha": (not config.train.ref_every, "train.ref_every is 0, so the reference stays"),
        "train.missing": (not needs.rollout, "this objective takes no rollout logprobs"),
        "stop.below_ess": (config.data.holdout == 0, unmeasured),
        "stop.worse": (config.data.holdout == 0, unmeasured),
        "train.off_policy_value_per_epoch": (config.data.holdout == 0, unmeasured),
        "advantage.ddof": (advantage.scale == "none", "advantage.scale is none"),
        "advantage.scale": (not scalable, f"advantage.baseline is {advantage.baseline}"),
        "advantage.singleton": (advantage.baseline == "none", "advantage.baseline is none"),
    }
    values, defaults = as_dict(config), options()
    for name, (without_effect, reason) in no_effect_options.items():
        if without_effect and values[name] != defaults[name][1]:
            raise ArgumentError(
                f"TG-TRAIN-085: {name} has no effect: {reason}. An option that does nothing hides a mistake. "
                f"Leave it out."
            )
    if advantage.several == "normalize_then_sum":
        sum_changes = [kl.coef and "reward_kl.coef", config.filter.zero_truncated and "filter.zero_truncated"]
        if changed_option := next(filter(None, sum_changes), None):
            raise ArgumentError(
                "TG-TRAIN-086: advantage.several normalize_then_sum compares each reward as it was recorded, and "
                f"{changed_option} changes their sum. Leave one of the two out."
            )
        if (advantage.baseline, advantage.scale) != ("group_mean", "std"):
            raise ArgumentError(
                "TG-TRAIN-087: advantage.several normalize_then_sum divides each reward by its group's deviation. Set "
                "advantage.baseline group_mean and advantage.scale std."
            )
    every = config.train.updates_per_old or int(refreshes_old_each_update(objective, config))
    if kl.coef and config.train.ref_every and (not every or config.train.ref_every % every):
        raise ArgumentError(
            "TG-TRAIN-088: train.ref_every renews the reference between two measurements of old, and reward_kl needs "
            "both of a whole such batch at once. Set train.updates_per_old to a divisor of train.ref_every."
        )


def check_ratios(data: Sequences | Dataset, objective: Objective, config: Config) -> list[str]:
    """Check that the ratio to the rollout policy is known, if the objective needs one. Errors suggest alternatives.

    Returns:
        Notes for the user about the ratios.

    Raises:
        ArgumentError: if the objective needs rollout logprobs and one of these holds: traces are text without logprobs
            or of another model; logprobs have an unknown kind at a temperature that may not be 1; tokens were sampled
            with top_p, top_k, penalties and the like, and this was not accepted; no trained token has a logprob.
    """
    if not objective.needs.rollout:
        return []
    source = as_dataset(data)
    catalog = source.catalog
    foreign = np.flatnonzero(catalog.foreign)
    dropped = config.data.on_error != "raise" and not config.data.text_only
    if len(foreign) and not dropped:
        raise ArgumentError(
            f"TG-TRAIN-089: {len(foreign)} of {catalog.traces} traces, '{source.trace_name(int(foreign[0]))}' first, "
            "hold text without logprobs, or of another model or tokenizer (T6): it has no logprobs of this policy, "
            f"and a ratio of 1 would be invented. Train on it with {TEXT_TRAINS}; or leave such turns out with "
            "--on-error skip."
        )
    measured = np.flatnonzero(catalog.known > 0)
    if not len(measured):
        raise ArgumentError(
            f"TG-TRAIN-090: none of {catalog.all_terms} trained tokens has a recorded logprob. No ratio to the policy "
            "that sampled them is known. Train with --objective TOPR_POSITIVE, which takes no ratio."
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
    subject = f"{len(reshaped)} of {len(measured)} traces, '{first}' first, were sampled with {names}"
    if accepted:
        return [f"{subject}: their ratio is off by the kept mass S at each token, as {flag} says. S is in no record."]
    raise ArgumentError(
        f"TG-TRAIN-091: {subject}: their tokens were drawn from another distribution than the one that the trainer "
        "computes. With processed logprobs the ratio is the kept mass S at each token although nothing changed; with "
        "raw ones it is 1 instead of S. S is not measured here: tracegrad doctor --rescore measures it. Sample "
        f"without them; train what is recorded with {TEXT_TRAINS}; or take the ratio as it is with {flag}."
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
            f"TG-TRAIN-092: trace '{name}' and {len(ambiguous) - 1} more do not say what their logprobs are of, and "
            f"the temperature {temperature_note}. Before or after temperature is a different number, and the ratio "
            "would be wrong. Say --logprob-kind raw (vLLM's default) or processed; or --logprob-kind unknown to take "
            "them as they are."
        )


def refreshes_old_each_update(objective: Objective, config: Config) -> bool:
    """Return whether `old` is recomputed before each update: the default for one epoch."""
    needs, train = needs_of(objective, config), config.train
    return needs.old and not needs.proximal and train.epochs == 1 and not train.updates_per_old


def old_logprob_notes(objective: Objective, config: Config, groups: int) -> list[str]:
    """Describe how often `old` is recomputed, if the user did not set it, with the measurements behind the default."""
    needs, train = needs_of(objective, config), config.train
    if not needs.old or needs.proximal or train.updates_per_old or groups <= config.pack.step_groups:
        return []
    hint = "--train.updates_per_old says otherwise; figures of the bundled example, docs/choosing.md."
    if train.epochs == 1:
        return [f"old is measured before each update, as there is one pass: 92 against 82 % with one for all. {hint}"]
    return [f"old stays for an epoch, as there are {train.epochs} passes: after four, 91 against 50 %. {hint}"]


def _notes(catalog: TraceTable, measured: NDArray[np.int64], foreign: NDArray[np.int64]) -> list[str]:
    notes: list[str] = []
    raw = catalog.logprob_kind[measured] == LOGPROB_KINDS.index("raw")
    temperature = catalog.temperature[measured]
    if tempered := int((raw & ~np.isnan(temperature) & (temperature != 1.0)).sum()):
        notes.append(
            f"{tempered} traces were sampled at a temperature other than 1 and have raw logprobs: their ratio measures "
            "mismatch and is no sampling ratio."
        )
    if missing := catalog.all_terms - int(catalog.known.sum(dtype=np.int64)):
        notes.append(f"{missing} of {catalog.all_terms} trained tokens have no recorded logprob.")
    if len(foreign):
        empty = int((catalog.terms[foreign] == 0).sum())
        notes.append(
            f"{len(foreign)} traces hold text without logprobs, or of another model (T6): such turns are left out, and "
            f"{empty} traces that hold nothing else to train."
        )
    return notes
