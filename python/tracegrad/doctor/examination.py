"""Run all checks over a file in bounded memory (`examine`), and suggest the command to run next."""

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tracegrad import _html, data
from tracegrad.alignment.align import align
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import Data, Map
from tracegrad.data import Progress, infer_fields, stream
from tracegrad.data.field_map import which_reward
from tracegrad.data.infer_fields import Candidates
from tracegrad.data.sampling import model_defaults
from tracegrad.data.trace import Traces
from tracegrad.doctor import (
    checks_dataset,
    checks_images,
    checks_logprobs,
    checks_shift,
    checks_tokens,
    checks_trace,
    rescore,
)
from tracegrad.doctor.checks_trace import prompt_hashes
from tracegrad.doctor.finding import Check, Finding, Hits, Severity
from tracegrad.doctor.stats import Spread, Whole
from tracegrad.doctor.trace_batch import Look, Vocabulary
from tracegrad.errors import ArgumentError, ReadError, TracegradError
from tracegrad.recipes import Advice
from tracegrad.storage.files import read_json

SAMPLE = 200
TOLD = ("no_rewards", "lone_traces", "bad_records", "no_logprobs", "nothing_to_train")
"""Findings that a flag of the command mends."""
NUMBERS = (
    "raw_at_temperature",
    "reshaped_sampling",
    "wrong_tokenizer",
    "placeholder_ids",
    "filled_logprobs",
    "made_up_zeros",
    "wrong_sum",
    "impossible_logprobs",
)
"""Findings that spoil logprobs and leave the text as it was said: an objective without a ratio takes it."""
TEXT = ("--objective", "TOPR_POSITIVE", "--text-only")


def command(
    named: Sequence[str],
    model: Path,
    told: Map,
    kind: str | None,
    found: Sequence[Finding],
    whole: Whole,
    seems: tuple[Candidates, Sequence[str]],
    rescored: bool = False,
    defaults: str | None = None,
) -> str:
    """`tracegrad train`, or `score` where nothing looks like a reward; `doctor --rescore` where only counts speak
    against it; "" where none could work.
    """
    by_name = {finding.name: finding for finding in found}
    wrong = {finding.name for finding in found if finding.severity == Severity.WRONG}
    mended = {*TOLD, *NUMBERS, "shifted_logprobs"}
    if list(named) == ["-"] or wrong - mended or (rescored and "shifted_logprobs" in wrong):
        return ""
    candidates, missing = seems
    mapped = [part for name, path in told.told().items() for part in (f"--map.{name}", path)]
    if "shifted_logprobs" in wrong:
        said = [*(["--logprob-kind", kind] if kind else []), *(["--sampling-defaults", defaults] if defaults else [])]
        return shlex.join(["tracegrad", "doctor", *named, "--model", str(model), *mapped, *said, "--rescore"])
    mapped += candidates.flags(missing)
    if "sampling" in missing and {"--map.sampling", "--map.temperature"} & {*mapped}:
        # What the numbers are of depends on the temperature: the doctor looks again, with it.
        said = ["--logprob-kind", kind] if kind else []
        return shlex.join(["tracegrad", "doctor", *named, "--model", str(model), *mapped, *said])
    bare = by_name["no_logprobs"].hits if "no_logprobs" in by_name else None
    foreign = by_name["wrong_tokenizer"].hits if "wrong_tokenizer" in wrong else None
    text = bare is not None and bare.count == bare.of
    text = text or bool(wrong.intersection(NUMBERS) - {"wrong_tokenizer"})
    text = text or (foreign is not None and foreign.count * 2 > foreign.of)
    if not whole.traces:
        if not (sample := _sample(named, mapped)):
            return ""
        text = all(turn.logprobs is None for trace in sample for turn in trace.generations)
    elif "nothing_to_train" in wrong and not (foreign and text):
        return ""
    if "reward" in missing and "--map.reward" not in mapped:
        out = ["--reward", "mine.py:right", "--text", "--out", "scored.jsonl", "--model", str(model)]
        skip = ["--on-error", "skip"] if whole.read.bad else []
        return shlex.join(["tracegrad", "score", *named, *mapped, *out, *skip])
    flags = [*mapped, *_which(whole), *(TEXT if text else ())]
    if ("lone_traces" in wrong or "group" in missing) and "--map.group" not in mapped:
        flags += ["--advantage.baseline", "batch_mean"]
    elif "lone_traces" in by_name or any(each.partial for each in candidates.taken(missing)):
        flags += ["--advantage.singleton", "zero"]
    partly = (bare is not None or foreign is not None) and not text
    if whole.traces and (whole.read.bad or whole.unaligned or partly):
        flags += ["--on-error", "skip"]
    if "equal_rewards" in by_name and not _may_hold_out(by_name["equal_rewards"].hits):
        flags += ["--data.holdout", "0"]
    if not text and (kind is not None or whole.unsaid):
        flags += ["--logprob-kind", kind or "raw"]
    flags += ["--sampling-defaults", defaults] if defaults == "model" else []
    return shlex.join(["tracegrad", "train", *named, "--model", str(model), "--out", "runs/first", *flags])


def _may_hold_out(equal: Hits) -> bool:
    """Whether a group whose rewards differ is left to train on where the usual share of groups is held out."""
    return equal.of - equal.count > max(round(Data().holdout * equal.of), 1)


def _which(whole: Whole) -> list[str]:
    """Which of several rewards, where none is the total: the first that differs between traces, and of traces that
    never have that one, as those of another task, the first of theirs.
    """
    spans, chosen = whole.rewards.spans, list[str]()
    apart = [name for name, (low, high) in spans.items() if low < high]
    for name in apart:
        beside = any(name in each and set(chosen) & set(each) for each in whole.rewards.together)
        if not chosen or not (beside or "," in name + chosen[0]):
            chosen.append(name)
    return ["--data.reward", ",".join(chosen)] if "reward" not in spans and len(spans) > 1 and apart else []


def untold(whole: Whole) -> list[str]:
    """What the records leave open and the user must say: which reward, and what logprobs are of."""
    out = []
    if which := _which(whole):
        spans = list(whole.rewards.spans.items())[:8]
        names = ", ".join(f"{name} ({low:g} to {high:g})" for name, (low, high) in spans)
        out.append(f"found    several rewards and no total, {names}: {shlex.join(which)}")
    out += which_reward(list(whole.rewards.spans))
    if whole.unsaid:
        kinds = "--logprob-kind raw, vLLM's default, or processed"
        out.append(f"found    {whole.unsaid:,} turns do not say what their logprobs are of: {kinds}")
    return out


def _sample(named: Sequence[str], flags: Sequence[str]) -> Traces | None:
    """The first traces as they would be read, joined or not."""
    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    told = {name.removeprefix("--map."): path for name, path in pairs.items()}
    kept = {name: path for name, path in told.items() if name not in ("session", "order")}
    try:
        return data.together(data.stream(list(named), map=kept, on_error="skip", limit=SAMPLE))
    except TracegradError:
        return None


BATCH = 128
SHOWN = 10

OF_BATCHES: tuple[Check, ...] = (
    checks_tokens.wrong_tokenizer,
    checks_tokens.placeholder_ids,
    checks_images.media,
    checks_images.picture_unplaced,
    checks_images.doubled_pictures,
    checks_logprobs.count_mismatch,
    checks_tokens.lost_chunks,
    checks_tokens.broken_turns,
    checks_tokens.unlisted_calls,
    checks_tokens.hidden_reasoning,
    checks_logprobs.filled_logprobs,
    checks_logprobs.raw_at_temperature,
    checks_logprobs.reshaped_sampling,
    checks_logprobs.server_defaults,
    checks_logprobs.wrong_sum,
    checks_logprobs.impossible_logprobs,
    checks_trace.contaminated,
    checks_logprobs.no_logprobs,
    checks_trace.no_rewards,
    checks_trace.unanswered,
    checks_trace.unused_choices,
    checks_tokens.guessed_ids,
    checks_tokens.missing_stop_tokens,
    checks_tokens.double_bos,
    checks_tokens.injected_system,
    checks_trace.dropped_reasoning,
    checks_trace.history_rewritten,
    checks_tokens.mixture_of_experts,
    checks_tokens.truncated,
    checks_tokens.empty_answers,
    checks_trace.unrecorded_tools,
    checks_trace.overlong,
    checks_logprobs.missing_logprobs,
    checks_tokens.missing_messages,
    checks_tokens.other_prompt,
    checks_images.pictures_as_sent,
)
OF_FILES: tuple[Check, ...] = (
    checks_shift.shifted_logprobs,
    checks_dataset.made_up_zeros,
    checks_dataset.nothing_to_train,
    checks_dataset.unaligned,
    checks_dataset.bad_records,
    checks_dataset.lone_traces,
    checks_dataset.equal_rewards,
    checks_dataset.unlike_rewards,
    checks_dataset.duplicated,
    checks_dataset.stale_versions,
    checks_dataset.drift,
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
        return _html.table(repr(self), ("", "finding", "count", "of"), rows)

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
        told = checks_shift.against_model(again)
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
    seems = infer_fields.find(named, map, missing) if missing else infer_fields.Candidates(0, ())
    about = (map, logprob_kind, findings, whole, (seems, missing), bool(again), sampling_defaults)
    following = command(named, model, *about)
    if server_profile and following.startswith(("tracegrad train ", "tracegrad doctor ")):
        following = f"{following} --server-profile {server_profile}"
    counts, lines = (whole.traces, whole.turns, whole.terms), (*seems.lines(missing), *untold(whole))
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
