"""Dataset-level checks, run after the last batch: bad records, alignment, rewards, duplicates, policy versions."""

import re

import numpy as np

from tracegrad._html import plural
from tracegrad.advantage.outcome import group_counts
from tracegrad.doctor.finding import Hits, Place, check
from tracegrad.doctor.stats import DatasetStats
from tracegrad.errors import CODE

STALE = 8  # policy versions behind the newest
LOCATED = re.compile(
    r"(?P<file>.*?):(?P<line>\d+)(?: record (?P<record>\d+))?(?: trace '(?P<trace>.*?)')?(?: turn (?P<turn>\d+))?"
    r"(?: token (?P<token>\d+))?(?=[: ])",
    re.DOTALL,
)


@check(
    "logprobs of exactly 0 that no model returns",
    "tokens",
    wrong=0.0,
    impact="A logprob of 0 means that no other token could be sampled. The ratio of such a token is the policy's own "
    "probability, which falls with every update.",
    fix="Record the logprobs that the server returned. Write null if it returned none, and no logprob for a token "
    "that it did not sample. Servers with speculative or grammar-guided decoding may write 0: switch that off, or "
    "record text.",
)
def made_up_zeros(stats: DatasetStats) -> Hits:
    """Detect three patterns of exact zeros. At that place, another answer to the same prompt continues with another
    token. Or half of the stop tokens have 0, and hardly any other token has. Or zeros are scattered, without the
    probabilities near 1 that a model returns more often.

    Threshold: for diverging answers, 3 places and 10 % of all places at which two answers to one prompt diverge. Both
    tokens were sampled, so neither had probability 1. For stop tokens, half of at least 8. For scattered zeros, 20
    zeros and 3 % of at least 64 other tokens. The last two need more than ten zeros per logprob between -0.01 and 0;
    recorded answers of four servers had at most 2. They also need a temperature of at least 0.7. Stop tokens without a
    recorded temperature count if under 2 % of other tokens have 0. Greedy turns are skipped, and turns whose truncated
    sampling is replayed, in which a token that is the only one kept has 0. The last two also skip tokens that a grammar
    forces, and logprobs rounded to four decimals.
    """
    return stats.zeros.hits(stats.turns)


@check(
    "records that cannot be read",
    "records",
    costs=0.0,
    wrong=0.5,
    impact="They are skipped. If the failures have one cause (long traces, tool calls), the remaining traces are a "
    "biased sample.",
    fix="tracegrad prepare --on-error quarantine writes them to separate files with their reasons. Repair the "
    "recorder.",
)
def bad_records(stats: DatasetStats) -> Hits:
    """Detect records that are not JSON, have an unknown format, or are truncated, including broken compressed streams.

    Threshold: any record; wrong from half of the records, because the file then contains something other than traces.
    """
    read = stats.read
    reasons = ", ".join(f"{count:,} {name}" for name, count in read.reasons.items())
    error = next(iter(read.errors), "")
    return Hits(read.bad, read.records, place_of(error), f"{reasons}; {error}" if error else reasons)


@check(
    "no token can be trained",
    "traces",
    wrong=0.0,
    impact="A run on this file would not make a single step.",
    fix="It depends on the cause that is found. Without prompts, record the request with each response (or "
    "prompt_token_ids). Without logprobs, record them with ids: logprobs=true and return_token_ids on vLLM and SGLang. "
    "With another tokenizer, pass the server's model folder, or train on the text (--text-only).",
    hides=("mismatches", "other_prompt", "missing_stop_tokens", "no_logprobs"),
)
def nothing_to_train(stats: DatasetStats) -> Hits:
    """Detect a file in which no token would be trained, and report the first cause that applies to most turns.

    Threshold: no trained token although at least one trace was read. Text that has its prompts is a finding of another
    check.
    """
    if stats.terms or not stats.traces or stats.is_text:
        return Hits(0, stats.traces)
    return Hits(stats.traces, stats.traces, None, *stats.untrained_reason())


@check(
    "traces that cannot be aligned",
    "traces",
    costs=0.0,
    wrong=0.5,
    impact="They are not trained, and the baselines of their groups are computed from fewer traces.",
    fix="Read the reason of the first trace. The usual cause is a chat template that rejects the messages.",
)
def unaligned(stats: DatasetStats) -> Hits:
    """Detect traces that `align` rejects: the template raises an error, or does not show the recorded message.

    Threshold: any trace; wrong from half of the traces, because template and traces then do not belong together.
    """
    return Hits(stats.unaligned, stats.traces, place_of(stats.first_error or ""), stats.first_error or "")


@check(
    "recorded tokens without an exact id and logprob",
    "tokens",
    note=0.01,
    costs=0.05,
    impact="These tokens are masked or end their branch. Long answers and rare scripts are trained less than the rest.",
    fix="Record token ids: return_token_ids on vLLM and SGLang. tracegrad prepare lists the reasons.",
)
def mismatches(stats: DatasetStats) -> Hits:
    """Detect recorded tokens that alignment could not give a known id and their logprob, recorded or filled.

    Threshold: a note from 1 % of tokens, costs from 5 %. The bundled example has 0.55 %; three quarters of it have no
    ids, and it contains emoji.
    """
    return Hits(max(stats.recorded - stats.exact - stats.filled, 0), stats.recorded)


@check(
    "zero-std groups: all rewards are equal",
    "groups",
    note=0.0,
    costs=0.5,
    wrong=1.0,
    impact="The advantage of every trace in them is 0. They cost compute and do not change the policy.",
    fix="Drop them (DAPO's dynamic sampling), record more traces per group, or use prompts that the policy solves "
    "sometimes but not always.",
)
def equal_rewards(stats: DatasetStats) -> Hits:
    """Detect groups of two or more traces that all have the same reward.

    Threshold: a note from one group; costs from half of the groups; wrong if no other group remains.
    """
    if not stats.rewards.reward:
        return Hits()
    counts = group_counts(np.concatenate(stats.rewards.reward), np.concatenate(stats.rewards.group))
    if not counts.equal:
        return Hits(0, counts.groups)
    group_id = min(counts.equal_ids, key=lambda candidate: stats.rewards.first[int(candidate)][2])
    first, name, _ = stats.rewards.first[int(group_id)]
    reward = dict(zip(counts.equal_ids, counts.equal_rewards, strict=True))[group_id]
    description = f"group '{name}': every reward is {reward:g}{_without_reward(stats)}"
    return Hits(counts.equal, counts.groups, first, description)


def _without_reward(stats: DatasetStats) -> str:
    """Return the number of groups that a count leaves out, as the end of a description; "" if there are none."""
    count = stats.rewards.groups_without_reward
    return f"; not counted are {plural(count, 'group')} without a reward" if count else ""


@check(
    "groups of a single trace",
    "groups",
    note=0.0,
    costs=0.5,
    wrong=1.0,
    impact="A group baseline needs several traces. Training stops at a group of a single trace, by default.",
    fix="Write the same group id into all traces of a prompt, and record several traces per prompt. Or use a "
    "baseline over the batch (--advantage.baseline batch_mean), or give these traces advantage 0 "
    "(--advantage.single_sample_group zero).",
    hides=("equal_rewards",),
)
def lone_traces(stats: DatasetStats) -> Hits:
    """Detect groups with one scored trace. A trace without a group is a group of one.

    Threshold: a note from one group; costs from half of the groups; wrong if no other group remains.
    """
    if not stats.rewards.reward:
        return Hits()
    counts = group_counts(np.concatenate(stats.rewards.reward), np.concatenate(stats.rewards.group))
    if not counts.singletons:
        return Hits(0, counts.groups)
    first, name, _ = min(
        (stats.rewards.first[int(entry)] for entry in counts.singleton_ids), key=lambda entry: entry[2]
    )
    description = f"group '{name}'" if name else "the record names no group"
    return Hits(counts.singletons, counts.groups, first, f"{description}{_without_reward(stats)}")


@check(
    "equal answers of one record with different rewards",
    "traces",
    note=0.0,
    costs=0.05,
    impact="The same tokens are rewarded differently, so the updates of such answers cancel each other in part.",
    fix="If a judge rated the same answer twice, use the mean. Otherwise remove such answers.",
)
def unlike_rewards(stats: DatasetStats) -> Hits:
    """Detect traces that equal an earlier trace of their record token by token but have another reward.

    Threshold: a note from one trace; costs from 5 % of the traces.
    """
    return Hits(stats.alike.count, stats.traces, stats.alike.first, stats.alike.found)


@check(
    "duplicated generations",
    "traces",
    costs=0.0,
    impact="One sample counts twice. Its gradient is doubled, and the baseline of its group is biased towards it.",
    fix="Keep one of each: run sort -u on the records, or deduplicate by response id. Look for retries and merged "
    "shards.",
)
def duplicated(stats: DatasetStats) -> Hits:
    """Detect traces that occur earlier in the file: the same record, response ids, ids of messages, or tokens.

    Threshold: any trace. Equal tokens count if their logprobs are equal to the bit and their
    probability is below e^-15 (once in three million). Without logprobs they count from 64 tokens. Short answers repeat
    by chance (1,588 turns of the bundled example), and greedy answers always repeat.
    """
    return Hits(stats.copies.count, stats.traces, stats.copies.first, stats.copies.description)


@check(
    "generations that are recorded twice",
    "traces",
    wrong=0.2,
    impact="Many samples count twice, because the input has each of them in several records or files.",
    fix="If files repeat one another, such as predictions and their reviews, pass the key that their records share as "
    "--map.session PATH, or name one of them. If each record has all "
    "messages so far, pass --map.session prefix. If retries were recorded, keep one of each response id.",
    hides=("duplicated",),
)
def recorded_twice(stats: DatasetStats) -> Hits:
    """Detect inputs of which many traces occur twice, by their record, response ids or ids of messages.

    Threshold: 20 % of the traces.
    """
    return Hits(stats.copies.recorded_twice, stats.traces, stats.copies.first, stats.copies.description)


@check(
    "turns of another model",
    "turns",
    costs=0.0,
    impact="A guard, a judge or a writer of summaries is trained as if the policy had sampled its text. With its "
    "logprobs, the ratio compares two models.",
    fix="Write the records of the model that you train to a file of their own: no flag selects turns by model. If the "
    "names are versions of one policy, leave them.",
)
def several_models(stats: DatasetStats) -> Hits:
    """Detect turns whose response names another model than most turns do.

    Threshold: any turn. The first 2,000 traces are counted, without turns that name no model.
    """
    turns = stats.models.turns
    if len(turns) < 2:
        return Hits(0, sum(turns.values()))
    (most, _), *others = turns.most_common()
    names = ", ".join(f"{name!r:.60} in {count:,}" for name, count in others[:4])
    first = stats.models.first[others[0][0]]
    return Hits(sum(count for _, count in others), sum(turns.values()), first, f"{names}; most are of {most!r:.60}")


@check(
    "stale policy versions",
    "tokens",
    note=0.0,
    costs=0.1,
    impact="The older the policy, the further the ratio is from 1. More tokens are clipped or masked, and the rest "
    "is noisier.",
    fix="Drop the oldest traces, or bound the ratio with a preset that has a rejection "
    "(docs/how-to/choose-an-objective.md) and "
    "--min-ope-ess.",
)
def stale_versions(stats: DatasetStats) -> Hits:
    """Detect tokens sampled more than 8 policy versions before the newest version in the file.

    Threshold: 8 versions. AReaL (arXiv 2505.24298) found training unharmed up to this staleness with a decoupled
    objective. Below 10 % of the tokens it is a note.
    """
    tokens = {version: count for version, count in stats.versions.tokens.items() if version >= 0}
    newest = max(tokens, default=0)
    stale = {version: count for version, count in tokens.items() if newest - version > STALE}
    if not stale:
        return Hits(0, sum(tokens.values()))
    first = stats.versions.first[min(stale)]
    return Hits(sum(stale.values()), sum(tokens.values()), first, f"version {min(stale)}, the newest is {newest}")


def place_of(error: str) -> Place | None:
    """Return the place after the code of a tracegrad error message, or None if there is none."""
    match = LOCATED.match(CODE.sub("", error, count=1))
    if match is None:
        return None
    file, *numbers = match.group("file", "line", "turn", "token", "record")
    line, *inner = (None if number is None else int(number) for number in numbers)
    return Place(file, line, match["trace"], *inner)
