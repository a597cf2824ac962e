"""`examine`: a file of traces through all checks, in bounded memory, to a `Diagnosis`."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tracegrad import notebook
from tracegrad.alignment import align
from tracegrad.config import Map
from tracegrad.doctor import file, follow, history, numbers, pictures, rescore, shift, tokens
from tracegrad.doctor.finding import Check, Finding, Hits, Severity
from tracegrad.doctor.history import prompt_hashes
from tracegrad.doctor.look import Look
from tracegrad.doctor.vocabulary import Vocabulary
from tracegrad.doctor.whole import Spread, Whole
from tracegrad.errors import ArgumentError, ReadError
from tracegrad.inputs import Progress, candidates, stream
from tracegrad.plain_files import read_json
from tracegrad.recipes import Advice
from tracegrad.sampling import model_defaults
from tracegrad.tokenizer import Tokenizer

BATCH = 128
SHOWN = 10

OF_BATCHES: tuple[Check, ...] = (
    tokens.wrong_tokenizer,
    tokens.placeholder_ids,
    pictures.media,
    pictures.picture_unplaced,
    pictures.doubled_pictures,
    numbers.count_mismatch,
    tokens.lost_chunks,
    tokens.broken_turns,
    tokens.unlisted_calls,
    tokens.hidden_reasoning,
    numbers.filled_logprobs,
    numbers.raw_at_temperature,
    numbers.reshaped_sampling,
    numbers.server_defaults,
    numbers.wrong_sum,
    numbers.impossible_logprobs,
    history.contaminated,
    numbers.no_logprobs,
    history.no_rewards,
    history.unanswered,
    history.unused_choices,
    tokens.guessed_ids,
    tokens.missing_stop_tokens,
    tokens.double_bos,
    tokens.injected_system,
    history.dropped_reasoning,
    history.history_rewritten,
    tokens.mixture_of_experts,
    tokens.truncated,
    tokens.empty_answers,
    history.unrecorded_tools,
    history.overlong,
    numbers.missing_logprobs,
    tokens.missing_messages,
    tokens.other_prompt,
    pictures.pictures_as_sent,
)
OF_FILES: tuple[Check, ...] = (
    shift.shifted_logprobs,
    file.made_up_zeros,
    file.nothing_to_train,
    file.unaligned,
    file.bad_records,
    file.lone_traces,
    file.equal_rewards,
    file.unlike_rewards,
    file.duplicated,
    file.stale_versions,
    file.drift,
)
OF_MODELS: tuple[Check, ...] = (
    rescore.other_model,
    rescore.own_logprobs,
    rescore.other_pictures,
    rescore.broken_pictures,
)
CHECKS: tuple[Check, ...] = (OF_BATCHES[0], OF_FILES[0], *OF_BATCHES[1:], *OF_FILES[1:], *OF_MODELS)


@dataclass(frozen=True)
class Options:
    """What the user asked.

    Args:
        max_tokens: longest branch, None for no limit.
        held_out: sorted prompt hashes of held-out files, None where none is given.
    """

    max_tokens: int | None = None
    held_out: NDArray[np.uint64] | None = None


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What was found in a file.

    Args:
        source: the file as the user named it.
        traces, turns, terms: read, sampled, and tokens that would be trained.
        findings: the worst first; within a severity, the larger share first.
        rewards: their span and mean, and how many groups they stand in, as a line; "" where no trace has one.
        advice: the recipe for the traces that were rescored; None where none were.
        mapped: what was mapped, joined and converted, as lines.
        found: where rewards, groups or sessions are not told, what the records seem to hold, with the flag to type.
        following: the command that goes on from here, "" where there is none.
    """

    source: str
    traces: int
    turns: int
    terms: int
    findings: tuple[Finding, ...]
    rewards: str = ""
    advice: Advice | None = None
    mapped: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    following: str = ""

    @property
    def severity(self) -> Severity | None:
        """That of the worst finding, None where there is none."""
        return max((finding.severity for finding in self.findings), default=None)

    @property
    def exit_code(self) -> int:
        """1 where training on the file would be wrong."""
        return int(self.severity == Severity.WRONG)

    def __repr__(self) -> str:
        verdict = "clean" if self.severity is None else self.severity.name.lower()
        return (
            f"Diagnosis({verdict}: {len(self.findings)} findings in {self.traces} traces, {self.terms} tokens to train)"
        )

    def _repr_html_(self) -> str:
        rows = [(each.severity.name, each.check.title, each.hits.count, each.hits.of) for each in self.findings]
        return notebook.table(repr(self), ("", "finding", "count", "of"), rows)

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints: at most ten findings, and the names of the others."""
        told = {
            "format": "tracegrad-doctor/1",
            "source": self.source,
            "traces": self.traces,
            "turns": self.turns,
            "trained_tokens": self.terms,
            "rewards": self.rewards,
            "verdict": "clean" if self.severity is None else self.severity.name.lower(),
            "exit_code": self.exit_code,
            "findings": [finding.as_dict() for finding in self.findings[:SHOWN]],
            "more": [finding.name for finding in self.findings[SHOWN:]],
            "mapped": list(self.mapped),
            "found": list(self.found),
            "next": self.following,
        }
        return told if self.advice is None else {**told, "advice": self.advice.as_dict()}


def examine(
    source: str | os.PathLike[str] | Sequence[str],
    model: str | os.PathLike[str],
    *,
    max_tokens: int | None = None,
    held_out: Sequence[str] = (),
    logprob_kind: str | None = None,
    sampling_defaults: Literal["neutral", "model"] | None = None,
    server_profile: str | None = None,
    rescored: int = 0,
    map: Map | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Diagnosis:
    """Looks through a file of any size; memory grows with groups and long traces (a hash each), not with tokens.

    Args:
        source: what `tracegrad.read` takes as names, one or several.
        model: folder with tokenizer.json, chat template and config.json.
        max_tokens: longest trace that can be trained; default max_position_embeddings of config.json, where there.
        held_out: files of traces whose prompts must not be trained on.
        logprob_kind: "raw", "processed" or "unknown", over what the records say.
        sampling_defaults: how options that requests leave out are read: as off ("neutral"), or as the model's
            generation_config.json sets them ("model"); None: as off, and a finding says what the file sets.
        server_profile: which server rendered prompts that are not recorded, as for `align`.
        rescored: how many traces to compare with the model's own logprobs as well; needs torch and transformers.
        map: where the records hold what a trace needs.
        progress: called with how far reading is.

    Raises:
        ReadError: if a file cannot be read, is empty, or holds no trace.
        TokenizerError, TemplateError: if the model folder is not what it should be.
        ArgumentError: if an argument is none of its values.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ArgumentError(f"max_tokens is {max_tokens}. A trace holds at least one token. Leave it out.")
    named, model = [os.fspath(source)] if isinstance(source, (str, os.PathLike)) else list(source), Path(model)
    source = ", ".join(named)
    if rescored < 0:
        raise ArgumentError(f"rescored is {rescored}. It is a number of traces. Leave it out, or give one from 1.")
    tokenizer = Tokenizer.from_pretrained(model)
    options = Options(max_tokens or positions(model), _held_out(held_out))
    vocabulary = Vocabulary.of(tokenizer)
    defaults = model_defaults(model)
    taken = defaults if sampling_defaults == "model" else None
    whole, hits = Whole(source), {check.name: Hits() for check in OF_BATCHES}
    traces = stream(named, map=map, batch=BATCH, on_error="skip", progress=progress)
    sample = Spread(rescored)
    for part in traces:
        told = {"logprob_kind": logprob_kind, "server_profile": server_profile, "sampling_defaults": taken}
        sequences = align(part, tokenizer, **told, on_error="skip")
        look = Look(part, sequences, vocabulary, options, logprob_kind, defaults, sampling_defaults)
        whole.add(look)
        for check in OF_BATCHES:
            hits[check.name] += check.run(look)
        sample.add(part)
    whole.read = traces.read_report
    hits |= {check.name: check.run(whole) for check in OF_FILES}
    how = (logprob_kind, taken, server_profile)
    again = rescore.rescore(sample.traces(), model, tokenizer, *how) if sample.kept else None
    if again is not None:
        hits |= {check.name: check.run(again) for check in OF_MODELS}
        if (mass := again.advice.measured.kept) is not None:
            hits["reshaped_sampling"] = _measured(hits["reshaped_sampling"], mass)
        told = shift.against_model(again)
        hits["shifted_logprobs"] = hits["shifted_logprobs"] if told is None else told
    found = [check.finding(hits.get(check.name, Hits())) for check in CHECKS]
    findings, advice = _sorted([finding for finding in found if finding is not None]), again and again.advice
    if not whole.traces and not findings:
        said = "; ".join(" ".join(line.split()) for line in traces.lines())
        raise ReadError(
            f"{source}: no trace was found in it{f' ({said})' if said else ''}. Its records hold no call of a model "
            "with an answer. Check that it is the right file, and that what wrote it did not break off."
        )
    map, names = map or Map(), {finding.name for finding in found if finding is not None}
    missing = _missing(map, names, whole)
    seems = candidates.find(named, map, missing) if missing else candidates.Candidates(0, ())
    about = (map, logprob_kind, findings, whole, (seems, missing), bool(again), sampling_defaults)
    following = follow.command(named, model, *about)
    if server_profile and following.startswith(("tracegrad train ", "tracegrad doctor ")):
        following = f"{following} --server-profile {server_profile}"
    counts, lines = (whole.traces, whole.turns, whole.terms), (*seems.lines(missing), *follow.untold(whole))
    return Diagnosis(source, *counts, findings, whole.rewards.line(), advice, tuple(traces.lines()), lines, following)


def _measured(hits: Hits, mass: tuple[float, float]) -> Hits:
    """Hits of cut distributions with the kept mass that rescoring measured."""
    said = hits.found.partition(";")[0]
    return replace(hits, found=f"{said}; kept mass S {mass[0]:.3f} on average, {mass[1]:.3f} at least, by --rescore")


def _missing(told: Map, names: set[str], whole: Whole) -> list[str]:
    """What neither the records nor the user say."""
    missing = ["reward"] * (not whole.traces or not whole.rewards.spans)
    missing += ["group"] * ("lone_traces" in names or not whole.grouped)
    missing += ["sampling"] * bool(whole.heatless and not told.temperature)
    return [name for name in [*missing, "session"] if not getattr(told, name)]


def _sorted(found: list[Finding]) -> tuple[Finding, ...]:
    """Worst first; what only repeats a wrong one is left out."""
    hidden = {name for finding in found if finding.severity == Severity.WRONG for name in finding.check.hides}
    shown = [finding for finding in found if finding.name not in hidden]
    return tuple(sorted(shown, key=lambda finding: (-finding.severity, -(finding.share or 1.0))))


def positions(model: Path) -> int | None:
    """max_position_embeddings of the model's config.json, None where it does not say."""
    try:
        config = read_json(model / "config.json")
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    inner = config.get("text_config")
    found = config.get(
        "max_position_embeddings", inner.get("max_position_embeddings") if isinstance(inner, dict) else 0
    )
    return found if isinstance(found, int) and found > 0 else None


def _held_out(files: Sequence[str]) -> NDArray[np.uint64] | None:
    if not files:
        return None
    parts = (part for each in files for part in stream(each, batch=BATCH, on_error="skip"))
    return np.unique(np.concatenate([np.unique(prompt_hashes(part)) for part in parts]))
