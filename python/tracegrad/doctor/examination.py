"""Run all checks over a file in bounded memory (`diagnose`), and suggest the command to run next."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tracegrad import _html
from tracegrad.alignment.align import align
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import FieldMap
from tracegrad.data import Progress, infer_fields, stream
from tracegrad.data.reward_columns import columns_of, columns_of_trace
from tracegrad.data.sampling import model_defaults
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
from tracegrad.doctor.next_command import next_command, unspecified_lines
from tracegrad.doctor.reading_summary import ReadingSummary
from tracegrad.doctor.stats import DatasetStats, SpreadSample
from tracegrad.doctor.trace_batch import TraceBatch, Vocabulary
from tracegrad.errors import ArgumentError, ExitCode, ReadError
from tracegrad.recipes import Advice
from tracegrad.storage.files import read_json

BATCH = 128
SHOWN = 10

BATCH_CHECKS: tuple[Check, ...] = (
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
    checks_logprobs.replayed_sampling,
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
    checks_trace.consecutive_turns,
    checks_tokens.mixture_of_experts,
    checks_tokens.truncated,
    checks_tokens.empty_answers,
    checks_trace.unrecorded_tools,
    checks_trace.overlong,
    checks_logprobs.missing_logprobs,
    checks_logprobs.measured_logprobs,
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
    checks_dataset.recorded_twice,
    checks_dataset.several_models,
    checks_dataset.stale_versions,
    checks_dataset.mismatches,
)
OF_MODELS: tuple[Check, ...] = (
    rescore.other_model,
    rescore.own_logprobs,
    rescore.other_pictures,
    rescore.broken_pictures,
)
CHECKS: tuple[Check, ...] = (BATCH_CHECKS[0], OF_FILES[0], *BATCH_CHECKS[1:], *OF_FILES[1:], *OF_MODELS)


@dataclass(frozen=True)
class Options:
    """Options of `diagnose` that the checks read.

    Args:
        max_tokens: longest branch, in tokens; None means no limit.
        held_out: sorted prompt hashes of the held-out files; None if there are none.
    """

    max_tokens: int | None = None
    held_out: NDArray[np.uint64] | None = None


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Result of `diagnose`.

    Args:
        source: the file as the user named it.
        traces, turns, trained_tokens: number of traces read, of sampled turns, and of tokens that would be trained.
        findings: the worst first; within a severity, the largest share first.
        rewards: a line with their range, their mean and the number of groups; None if no trace has a reward.
        advice: the recipe recommended for the rescored traces; None if none were rescored.
        mapping_notes: lines about what was mapped, joined and converted.
        suggestions: lines about fields that look like the reward, group or session, if you did not specify them, each
            with the flag to pass.
        next_command: the command to run next; None if there is none.
        summary: totals of what was read for each producer, and of what was left out.
        reward_columns: the columns that a reward function gets, if the command is `tracegrad score`.
        is_text: whether no turn has logprobs and most turns have a prompt: they can be trained as text.

    >>> import json
    >>> from tempfile import TemporaryDirectory
    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> messages[1] |= {"token_ids": [22, 2], "logprobs": [-0.5, -0.1]}
    >>> records = [{"messages": messages, "reward": reward, "group": "sum"} for reward in (1, 0)]
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "traces.jsonl")
    ...     _ = path.write_text("\\n".join(map(json.dumps, records)))
    ...     diagnosis = diagnose(path, "examples/quickstart/model")
    >>> diagnosis.trained_tokens, diagnosis.findings, diagnosis.rewards
    (4, (), 'rewards 0 to 1, mean 0.5; 1 groups of 2 traces')
    """

    source: str
    traces: int
    turns: int
    trained_tokens: int
    findings: tuple[Finding, ...]
    rewards: str | None = None
    advice: Advice | None = None
    mapping_notes: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    next_command: str | None = None
    summary: ReadingSummary = field(default_factory=ReadingSummary)
    reward_columns: tuple[str, ...] = ()
    is_text: bool = False

    @property
    def severity(self) -> Severity | None:
        """Severity of the worst finding; None if there is no finding."""
        return max((finding.severity for finding in self.findings), default=None)

    @property
    def exit_code(self) -> int:
        """1 if training on the file would be wrong, else 0."""
        return (ExitCode.ERROR if self.severity == Severity.WRONG else ExitCode.DONE).value

    def __repr__(self) -> str:
        verdict = "clean" if self.severity is None else self.severity.name.lower()
        read = f"{self.traces} traces, {self.trained_tokens} tokens to train"
        return f"Diagnosis({verdict}: {len(self.findings)} findings in {read})"

    def _repr_html_(self) -> str:
        rows = [
            (finding.severity.name, finding.check.title, finding.hits.count, finding.hits.total)
            for finding in self.findings
        ]
        return _html.table(repr(self), ("", "finding", "count", "of"), rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints: at most ten findings, and the names of the others."""
        result = {
            "format": "tracegrad-doctor/1",
            "source": self.source,
            "traces": self.traces,
            "turns": self.turns,
            "trained_tokens": self.trained_tokens,
            "rewards": self.rewards,
            "verdict": "clean" if self.severity is None else self.severity.name.lower(),
            "exit_code": self.exit_code,
            "findings": [finding.as_dict() for finding in self.findings[:SHOWN]],
            "more": [finding.name for finding in self.findings[SHOWN:]],
            "mapped": list(self.mapping_notes),
            "summary": self.summary.as_dict(),
            "found": list(self.suggestions),
            "next": self.next_command,
            "reward_columns": list(self.reward_columns),
        }
        return result if self.advice is None else {**result, "advice": self.advice.as_dict()}


def diagnose(
    source: str | os.PathLike[str] | Sequence[str],
    model: str | os.PathLike[str],
    *,
    max_tokens: int | None = None,
    held_out: Sequence[str] = (),
    logprob_kind: str | None = None,
    sampling_defaults: Literal["neutral", "model"] | None = None,
    server_profile: str | None = None,
    check_logprobs: int = 0,
    map: FieldMap | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Diagnosis:
    """Check a file of any size. Memory grows with groups and long traces (a hash each), not with tokens.

    Args:
        source: one or several names, as for `tracegrad.read`.
        model: folder with tokenizer.json, chat template and config.json.
        max_tokens: longest trace that can be trained, in tokens; default max_position_embeddings of config.json, if
            present.
        held_out: files of traces whose prompts must not be trained on.
        logprob_kind: "raw", "processed" or "unknown"; overrides the kind in the records.
        sampling_defaults: how to read options that a request leaves out: as off ("neutral"), or as the model's
            generation_config.json sets them ("model"). None reads them as off, and a finding lists what that file sets.
        server_profile: server that rendered prompts which are not recorded, as for `align`.
        check_logprobs: number of traces to compare with the model's own logprobs as well; needs torch and transformers.
        map: where the records store the fields of a trace.
        progress: called with the progress of reading.

    Raises:
        ReadError: if a file cannot be read, is empty, or has no trace.
        TokenizerError, TemplateError: if the model folder has no usable tokenizer or chat template.
        ArgumentError: if an argument has an invalid value.

    >>> import json
    >>> from tempfile import TemporaryDirectory
    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> messages[1] |= {"token_ids": [22, 2], "logprobs": [-0.5, -0.1]}
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "traces.jsonl")
    ...     _ = path.write_text(2 * (json.dumps({"messages": messages, "reward": 1.0, "group": "sum"}) + "\\n"))
    ...     diagnosis = diagnose(path, "examples/quickstart/model")
    >>> diagnosis.exit_code, [(finding.name, finding.severity.name) for finding in diagnosis.findings]
    (1, [('equal_rewards', 'WRONG')])
    """
    if max_tokens is not None and max_tokens < 1:
        raise ArgumentError(
            f"TG-DOCTOR-001: max_tokens is {max_tokens}. A trace has at least one token. "
            "Omit it, or pass a number from 1."
        )
    paths, model = [os.fspath(source)] if isinstance(source, (str, os.PathLike)) else list(source), Path(model)
    source = ", ".join(paths)
    if check_logprobs < 0:
        raise ArgumentError(
            f"TG-DOCTOR-002: check_logprobs is {check_logprobs}. It is a number of traces. Omit it, or pass a "
            f"number from 1."
        )
    tokenizer = Tokenizer.from_pretrained(model)
    options = Options(max_tokens or max_position_embeddings(model), _held_out(held_out))
    vocabulary = Vocabulary.of(tokenizer)
    defaults = model_defaults(model)
    server_defaults = defaults if sampling_defaults == "model" else None
    stats, hits = DatasetStats(source), {check.name: Hits() for check in BATCH_CHECKS}
    traces = stream(paths, map=map, batch=BATCH, on_error="skip", progress=progress)
    sample, summary = SpreadSample(check_logprobs), ReadingSummary()
    for part in traces:
        sequences = align(
            part,
            tokenizer,
            logprob_kind=logprob_kind,
            server_profile=server_profile,
            sampling_defaults=server_defaults,
            on_error="skip",
        )
        look = TraceBatch(part, sequences, vocabulary, options, logprob_kind, defaults, sampling_defaults)
        stats.add(look)
        summary.add(look, traces.producers(part))
        for check in BATCH_CHECKS:
            hits[check.name] += check.run(look)
        sample.add(part)
    stats.read = traces.read_report
    summary.close(traces)
    hits |= {check.name: check.run(stats) for check in OF_FILES}
    sampling = (logprob_kind, server_defaults, server_profile)
    comparison = rescore.rescore(sample.traces(), model, tokenizer, *sampling) if sample.kept else None
    if comparison is not None:
        hits |= {check.name: check.run(comparison) for check in OF_MODELS}
        if (mass := comparison.advice.measured.kept) is not None:
            hits["reshaped_sampling"] = _with_kept_mass(hits["reshaped_sampling"], mass)
        shift = checks_shift.model_shift_hits(comparison)
        hits["shifted_logprobs"] = hits["shifted_logprobs"] if shift is None else shift
    results = [check.finding(hits.get(check.name, Hits())) for check in CHECKS]
    findings, advice = (
        _sorted([finding for finding in results if finding is not None]),
        comparison and comparison.advice,
    )
    if not stats.traces and not findings:
        notes = "; ".join(" ".join(line.split()) for line in traces.lines())
        raise ReadError(
            f"TG-DOCTOR-003: {source}: it contains no trace{f' ({notes})' if notes else ''}. None of its records is "
            "a model call with an answer. Check that it is the right file, and that its recorder did not stop early."
        )
    map, names = map or FieldMap(), {finding.name for finding in results if finding is not None}
    missing = _unspecified(map, stats)
    guesses = infer_fields.infer(paths, map, missing) if missing else infer_fields.Candidates(0, ())
    if not stats.without_temperature and not guesses.of("logprobs"):
        missing = [name for name in missing if name != "sampling"]  # The temperature of text does not matter.
    context = (map, logprob_kind, findings, stats, (guesses, missing), bool(comparison), sampling_defaults)
    following = next_command(paths, model, tokenizer, *context)
    if server_profile and following and following.startswith(("tracegrad train ", "tracegrad doctor ")):
        following = f"{following} --server-profile {server_profile}"
    scores = following is not None and following.startswith("tracegrad score ")
    columns = columns_of([columns_of_trace(trace) for trace in stats.few.traces()]) if scores else ()
    recorded = f"group    {stats.grouped_traces:,} of {stats.traces:,} traces have a recorded group, which is used"
    lines = (*guesses.lines(missing), *unspecified_lines(stats))
    lines = (recorded, *lines) if "lone_traces" in names and stats.grouped and not map.group else lines
    totals = (stats.traces, stats.turns, stats.terms)
    return Diagnosis(
        source,
        *totals,
        findings,
        stats.rewards.line(),
        advice,
        tuple(traces.lines()),
        lines,
        following,
        summary,
        tuple(columns),
        stats.is_text,
    )


def _with_kept_mass(hits: Hits, mass: tuple[float, float]) -> Hits:
    """Return the hits of truncated sampling, with the kept mass that rescoring measured."""
    description = hits.description.partition(";")[0]
    return replace(
        hits,
        description=f"{description}; kept mass S {mass[0]:.3f} on average, {mass[1]:.3f} at least, by --check-logprobs",
    )


def _unspecified(mapping: FieldMap, stats: DatasetStats) -> list[str]:
    """Return which of reward, group, sampling and session neither the records nor the user specify."""
    missing = ["reward"] * (not stats.traces or not stats.rewards.spans)
    missing += ["group"] * (not stats.grouped)
    may_have_logprobs = stats.without_temperature or stats.without_logprobs or not stats.traces
    missing += ["sampling"] * bool(may_have_logprobs and not mapping.temperature)
    missing += ["logprobs"] * bool(stats.without_logprobs or not stats.traces)
    missing += ["token_ids"] * bool(stats.without_ids or not stats.traces)
    return [name for name in [*missing, "session"] if not getattr(mapping, name)]


def _sorted(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings, the worst first, without those that only repeat a WRONG one."""
    hidden = {name for finding in findings if finding.severity == Severity.WRONG for name in finding.check.hides}
    shown = [finding for finding in findings if finding.name not in hidden]
    return tuple(sorted(shown, key=lambda finding: (-finding.severity, -(finding.share or 1.0))))


def max_position_embeddings(model: Path) -> int | None:
    """Return max_position_embeddings of the model's config.json; None if it is not there."""
    try:
        config = read_json(model / "config.json")
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text_config = config.get("text_config")
    limit = config.get(
        "max_position_embeddings", text_config.get("max_position_embeddings") if isinstance(text_config, dict) else 0
    )
    return limit if isinstance(limit, int) and limit > 0 else None


def _held_out(files: Sequence[str]) -> NDArray[np.uint64] | None:
    if not files:
        return None
    parts = (part for file in files for part in stream(file, batch=BATCH, on_error="skip"))
    return np.unique(np.concatenate([np.unique(prompt_hashes(part)) for part in parts]))
