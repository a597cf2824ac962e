"""Decide which command to run after `doctor`, with the flags that make it work on the file."""

import contextlib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import data
from tracegrad._html import plural
from tracegrad.advantage.outcome import GroupedRewards
from tracegrad.alignment.align import align
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import Data, FieldMap, Pack, join_list
from tracegrad.data.field_map import describe_reward_choice
from tracegrad.data.infer_fields import Candidates
from tracegrad.data.trace import Trace, Traces
from tracegrad.doctor.finding import Finding, Severity
from tracegrad.doctor.stats import DatasetStats
from tracegrad.doctor.trace_batch import lacks_logprobs, unknown_kind
from tracegrad.errors import TracegradError

SAMPLE, MOST_COMPARED = 200, 2000
FIXED_BY_FLAG = ("no_rewards", "lone_traces", "bad_records", "no_logprobs", "nothing_to_train")
"""Findings that a flag of the suggested command fixes."""
LOGPROB_FINDINGS = (
    "raw_at_temperature",
    "reshaped_sampling",
    "wrong_tokenizer",
    "placeholder_ids",
    "filled_logprobs",
    "made_up_zeros",
    "wrong_sum",
    "impossible_logprobs",
)
"""Findings that spoil the logprobs but not the text: an objective without a ratio can still train on it."""
TEXT = ("--objective", "TOPR_POSITIVE", "--text-only")
ZERO = ("--advantage.single_sample_group", "zero")


def next_command(
    sources: Sequence[str],
    model: Path,
    tokenizer: Tokenizer,
    mapping: FieldMap,
    kind: str | None,
    findings: Sequence[Finding],
    stats: DatasetStats,
    guesses: tuple[Candidates, Sequence[str]],
    rescored: bool = False,
    defaults: str | None = None,
) -> str | None:
    """Return the command to run next; None if no command would work, such as for rewards that do not differ.

    It is `tracegrad train` in most cases, or `score` if nothing looks like a reward. It is `doctor --check-logprobs` if
    only bigram counts suggest shifted logprobs. It is `doctor` with a flag if the temperature is stored in a field that
    is not mapped.
    """
    by_name = {finding.name: finding for finding in findings}
    wrong = {finding.name for finding in findings if finding.severity == Severity.WRONG}
    fixable = {*FIXED_BY_FLAG, *LOGPROB_FINDINGS, "shifted_logprobs"}
    if guesses[0].of("session") and "session" in guesses[1]:
        fixable.add("recorded_twice")
    if list(sources) == ["-"] or wrong - fixable or (rescored and "shifted_logprobs" in wrong):
        return None
    candidates, missing = guesses
    map_flags = [part for name, path in mapping.paths().items() for part in (f"--map.{name}", path)]
    if "shifted_logprobs" in wrong:
        options = [
            *(["--logprob-kind", kind] if kind else []),
            *(["--sampling-defaults", defaults] if defaults else []),
        ]
        return shlex.join(
            ["tracegrad", "doctor", *sources, "--model", str(model), *map_flags, *options, "--check-logprobs"]
        )
    map_flags += candidates.flags(missing)
    if "sampling" in missing and {"--map.sampling", "--map.temperature"} & {*map_flags}:
        # The temperature decides which distribution the logprobs come from, so the doctor must run again with it.
        options = ["--logprob-kind", kind] if kind else []
        return shlex.join(["tracegrad", "doctor", *sources, "--model", str(model), *map_flags, *options])
    is_new = any(candidates.of(name) for name in ("logprobs", "token_ids") if name in missing)
    if is_new or "recorded_twice" in wrong:
        # Most findings depend on the ids and logprobs, and on which calls are a conversation.
        options = [
            *(["--logprob-kind", kind] if kind else []),
            *(["--sampling-defaults", defaults] if defaults else []),
        ]
        return shlex.join(["tracegrad", "doctor", *sources, "--model", str(model), *map_flags, *options])
    no_logprobs = by_name["no_logprobs"].hits if "no_logprobs" in by_name else None
    foreign_ids = by_name["wrong_tokenizer"].hits if "wrong_tokenizer" in wrong else None
    text_only = no_logprobs is not None and no_logprobs.count == no_logprobs.total
    text_only = text_only or bool(wrong.intersection(LOGPROB_FINDINGS) - {"wrong_tokenizer"})
    text_only = text_only or (foreign_ids is not None and foreign_ids.count * 2 > foreign_ids.total)
    sample = None if stats.traces and not text_only else _sample(sources, map_flags)
    if not stats.traces:
        if not sample:
            return None
        turns = [turn for trace in sample for turn in trace.generations]
        text_only = all(turn.logprobs is None and turn.filled_logprobs is None for turn in turns)
    elif "nothing_to_train" in wrong and not (foreign_ids and text_only):
        return None
    if text_only and sample and not _trains(sample, tokenizer, text_only).any():
        return None
    if "reward" in missing and "--map.reward" not in map_flags:
        # Text lacks tool calls, so a function could not see what an agent did.
        looked = stats.few.traces() if stats.traces else sample
        reward_input = "messages" if any(map(_calls_tools, looked or ())) else "text"
        score_flags = ["--reward", "mine.py:right", "--reward-input", reward_input, "--out", "scored.jsonl"]
        score_flags += ["--model", str(model)]
        skip = ["--on-error", "skip"] if stats.read.bad else []
        return shlex.join(["tracegrad", "score", *sources, *map_flags, *score_flags, *skip])
    names = _selected_rewards(stats)
    reward_flag = ["--data.reward", join_list(names)] if names else []
    flags = [*map_flags, *reward_flag, *(TEXT if text_only else ())]
    if names or candidates.flags(missing) or stats.traces <= SAMPLE:
        scored = _scored(sources, map_flags, names, tokenizer, text_only)
    else:
        scored = np.concatenate(stats.rewards.reward), np.concatenate(stats.rewards.group)
    has_group = "group" not in missing or "--map.group" in map_flags
    share = Data(text_only=text_only).holdout_share(has_logprobs=True)
    if (comparison := comparison_flags(*scored, has_group=has_group, share=share)) is None:
        return None
    if any(candidate.partial for candidate in candidates.best(missing)) and not comparison:
        comparison = [*ZERO]
    flags += comparison
    partly = (no_logprobs is not None or foreign_ids is not None) and not text_only
    if stats.traces and (stats.read.bad or stats.unaligned or partly):
        flags += ["--on-error", "skip"]
    if stats.longest_branch > Pack().tokens_per_row:
        flags += ["--pack.tokens_per_row", str(-(-stats.longest_branch // 1024) * 1024)]
    if not text_only and (kind is not None or stats.unknown_logprob_kind):
        flags += ["--logprob-kind", kind or "raw"]
    flags += ["--sampling-defaults", defaults] if defaults == "model" else []
    return _train_command(sources, str(model), flags)


def _train_command(sources: Sequence[str], model: str, flags: Sequence[str]) -> str:
    return shlex.join(["tracegrad", "train", *sources, "--model", model, "--out", "runs/first", *flags])


@dataclass
class RecordTotals:
    """What records alone say about the command to run next, without a tokenizer.

    Args:
        turns, without_logprobs, without_kind: number of turns, of those without logprobs, and of those whose kind of
            logprobs is unknown.
        rewards, groups: reward and group of each trace. Without a group, a trace is a group of its own.

    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> totals = RecordTotals()
    >>> totals.add(Traces.from_records([{"messages": messages, "group": "sum", "reward": reward} for reward in (1, 0)]))
    >>> totals.train_command("scored.jsonl", "MODEL")
    'tracegrad train scored.jsonl --model MODEL --out runs/first --objective TOPR_POSITIVE --text-only'
    """

    turns: int = 0
    without_logprobs: int = 0
    without_kind: int = 0
    rewards: list[float] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    grouped: int = 0

    def add(self, traces: Traces) -> None:
        """Add a batch of traces."""
        columns = traces.core.columns()
        lacking = lacks_logprobs(columns, columns["filled"])
        self.turns += len(lacking)
        self.without_logprobs += int(lacking.sum())
        self.without_kind += int(unknown_kind(columns, columns["filled"]).sum())
        self.rewards += [float("nan") if trace.reward is None else trace.reward for trace in traces]
        self.grouped += sum(group is not None for group in traces.groups)
        self.groups += [f"\x1f{trace.id}" if trace.group is None else trace.group for trace in traces]

    def counting(self, parts: Iterable[Traces]) -> Iterator[Traces]:
        """Yield the batches, and add each."""
        for part in parts:
            self.add(part)
            yield part

    @property
    def text_only(self) -> bool:
        """Whether no turn has logprobs."""
        return self.without_logprobs == self.turns

    def reason(self) -> str | None:
        """Return why no training command is proposed; None if one is."""
        known = sorted({reward for reward in self.rewards if reward == reward})
        if len(known) < 2:
            return equal_rewards_advice(known[0], self.text_only) if known else "no trace has a reward"
        if not self.turns:
            return "no trace has an answer of the model"
        return f"the logprob kind of {plural(self.without_kind, 'turn')} is not recorded" if self.without_kind else None

    def train_command(self, source: str, model: str) -> str | None:
        """Return the command that trains on a file with these records; None if there is a `reason`."""
        if self.reason() is not None:
            return None
        has_group = self.grouped * 2 > len(self.groups)
        flags = [*(TEXT if self.text_only else ())]
        flags += comparison_flags(self.rewards, self.groups, has_group=has_group) or ()
        flags += ["--on-error", "skip"] if self.without_logprobs and not self.text_only else []
        return _train_command([source], model, flags)


def equal_rewards_advice(reward: float, text_only: bool) -> str:
    """Return what to do if all rewards are equal."""
    flags = "--objective WEIGHTED_SFT --advantage.baseline none" + " --text-only" * text_only
    return f"every reward is {reward:g}, so no trace is better than another. To imitate those above 0: {flags}"


def comparison_flags(
    rewards: ArrayLike, groups: ArrayLike, *, has_group: bool, share: float = 0.05
) -> list[str] | None:
    """Return the flags with which traces can be compared, whichever groups are held out; None if all rewards are equal.

    Args:
        rewards: [R], NaN if unknown.
        groups: [R] ids.
        has_group: whether most traces have a group.
        share: fraction of the groups that are held out without a flag.

    >>> comparison_flags([1, 0, 1], [7, 7, 9], has_group=True)
    ['--advantage.single_sample_group', 'zero', '--data.holdout', '0']
    >>> comparison_flags([1, 0], [7, 8], has_group=False), comparison_flags([1, 1], [7, 8], has_group=True)
    (['--advantage.baseline', 'batch_mean', '--data.holdout', '0'], None)
    """
    group = GroupedRewards.of(rewards, groups)
    known = group.reward[group.scored]
    if not len(known) or known.min() == known.max():
        return None
    count = len(group.names)
    held_out = min(max(round(share * count), 1), count - 1)
    differing = int(((group.count > 1) & ~group.equal).sum())
    if differing and has_group:
        flags, remaining = [*ZERO] if (group.count == 1).any() else [], differing
    else:
        flags = ["--advantage.baseline", "batch_mean"]
        values, counts = np.unique(known, return_counts=True)
        has_usual = group.sum((group.reward == values[counts.argmax()]).astype(np.float64))
        remaining = min(int((has_usual > 0).sum()), int((has_usual < group.count).sum()))
    return flags if not share or remaining > held_out else [*flags, "--data.holdout", "0"]


def _selected_rewards(stats: DatasetStats) -> list[str]:
    """Return the names of the rewards to train on if there are several and none of them is the total.

    The first is the first reward that differs between traces. Traces that never have it, such as those of another task,
    use the first of their own.
    """
    spans, chosen = stats.rewards.spans, list[str]()
    varying = [name for name, (low, high) in spans.items() if low < high]
    for name in varying:
        overlaps = any(name in names and set(chosen) & set(names) for names in stats.rewards.together)
        if not (chosen and overlaps):
            chosen.append(name)
    return chosen if "reward" not in spans and len(spans) > 1 else []


def unspecified_lines(stats: DatasetStats) -> list[str]:
    """Return lines about what the records leave open: which reward to train on, and the kind of the logprobs."""
    lines = []
    if names := _selected_rewards(stats):
        flag = ["--data.reward", join_list(names)]
        spans = list(stats.rewards.spans.items())[:8]
        names = ", ".join(f"{name} ({low:g} to {high:g})" for name, (low, high) in spans)
        lines.append(f"guess    several rewards and no total, {names}: {shlex.join(flag)}")
    lines += describe_reward_choice(list(stats.rewards.distinct))
    known = np.unique([reward for part in stats.rewards.reward for reward in part if reward == reward])
    if len(known) == 1:
        text_only = bool(stats.turns) and stats.without_logprobs == stats.turns
        lines.append(f"guess    {equal_rewards_advice(known[0], text_only)}")
    if stats.unknown_logprob_kind:
        kinds = "--logprob-kind raw, vLLM's default, or processed"
        lines.append(f"guess    {stats.unknown_logprob_kind:,} turns do not record their logprob kind: {kinds}")
    return lines


def _sample(named: Sequence[str], flags: Sequence[str]) -> Traces | None:
    """Return the first traces, read with these flags but not joined into sessions; None if they cannot be read."""
    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    mapping = {name.removeprefix("--map."): path for name, path in pairs.items()}
    unjoined = {name: path for name, path in mapping.items() if name not in ("session", "order")}
    try:
        return data.concatenate(data.stream(list(named), map=unjoined, on_error="skip", limit=SAMPLE))
    except TracegradError:
        return None


def _calls_tools(trace: Trace) -> bool:
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in trace.pool)


def _trains(traces: Traces, tokenizer: Tokenizer, text_only: bool) -> NDArray[np.bool_]:
    """Return [R] bool: whether a token of each trace can be trained."""
    sequences = align(traces, tokenizer, text_only=text_only, on_error="skip")
    branches = np.repeat(np.arange(sequences.branches), np.diff(sequences.cu_seqlens))
    rows = np.delete(np.arange(len(traces)), sequences.alignment_report.left_out)
    result = np.zeros(len(traces), bool)
    result[rows[np.unique(sequences.trace[branches[sequences.trainable]])]] = True
    return result


def _scored(
    named: Sequence[str], flags: Sequence[str], names: Sequence[str], tokenizer: Tokenizer, text_only: bool
) -> tuple[list[float], list[str]]:
    """Return the rewards and groups of the first traces, read with these flags.

    The reward of a trace is the first of `names` that it has, by default its total or its first one. Among the first
    `SAMPLE` traces, those without a token to train have none.
    """
    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    mapping = {name.removeprefix("--map."): path for name, path in pairs.items()}
    rewards, groups = list[float](), list[str]()
    with contextlib.suppress(TracegradError):
        for part in data.stream(list(named), map=mapping, on_error="skip", batch=SAMPLE, limit=MOST_COMPARED):
            trains = _trains(part, tokenizer, text_only) if len(rewards) < SAMPLE else np.ones(len(part), bool)
            for trace, is_trained in zip(part, trains, strict=True):
                known = {name: value for name, value in trace.rewards.items() if value == value}
                known = known if trace.reward is None else {"reward": trace.reward, **known}
                chosen = [known[name] for name in names or known if name in known and is_trained]
                rewards.append(chosen[0] if chosen else float("nan"))
                groups.append(f"\x1f{trace.id}" if trace.group is None else trace.group)
    return rewards, groups
