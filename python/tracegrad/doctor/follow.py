"""The command that goes on from a diagnosis, as it may be typed: what was told, and what the records seem to hold.

It is printed and never run: nothing is taken that was not told.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from tracegrad import inputs
from tracegrad.config import Data, Map
from tracegrad.doctor.finding import Finding, Hits, Severity
from tracegrad.doctor.whole import Whole
from tracegrad.errors import TracegradError
from tracegrad.inputs.candidates import Candidates
from tracegrad.inputs.mapping import which_reward
from tracegrad.trace import Traces

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
        return inputs.together(inputs.stream(list(named), map=kept, on_error="skip", limit=SAMPLE))
    except TracegradError:
        return None
