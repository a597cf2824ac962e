"""Dataset-level checks, run after the last batch: bad records, alignment, rewards, duplicates, policy versions."""

import re

import numpy as np

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
    "logprobs of exactly 0 that no model gave",
    "tokens",
    wrong=0.0,
    hurts="A logprob of 0 says that no other token could be drawn: the ratio of such a token is the policy's own "
    "probability, and falls with every update.",
    cure="Record the logprobs that the server gave: null where it gave none, and none for a token that it did not "
    "sample. Servers that decode speculatively or by a grammar may write 0: switch it off, or record text.",
)
def made_up_zeros(whole: DatasetStats) -> Hits:
    """Sees exact zeros where another answer to the same prompt went on with another token; at half of the stop tokens,
    and hardly elsewhere; scattered, without the probabilities near 1 that a model gives more often.

    Threshold: 10 % of the places where two answers to one prompt part, and 3 of them: both tokens were drawn, so
    neither had probability 1. Else more than ten zeros for each logprob between -0.01 and 0, at a temperature from
    0.7, or of stop tokens where none is recorded and under 2 % of other tokens have 0: on recorded answers of four
    servers there were at most 2. At least 8 stop tokens, or 20 zeros and 3 % of 64 other tokens. Greedy turns are not
    looked at; nor, but where answers part, zeros of tokens that a grammar forces, or that are rounded to four decimals.
    """
    return whole.zeros.hits(whole.turns)


@check(
    "records that cannot be read",
    "records",
    costs=0.0,
    wrong=0.5,
    hurts="They are left out. Where failures have one cause (long traces, tool calls), the rest is a biased sample.",
    cure="tracegrad prepare --on-error quarantine writes them aside with their reasons; mend the recorder.",
)
def bad_records(whole: DatasetStats) -> Hits:
    """Sees records that are not JSON, of no known form, or cut off; a broken compressed stream among them.

    Threshold: any record; wrong from half of them, where the file is something else than traces.
    """
    read = whole.read
    reasons = ", ".join(f"{count:,} {name}" for name, count in read.reasons.items())
    error = next(iter(read.errors), "")
    return Hits(read.bad, read.records, place_of(error), f"{reasons}; {error}" if error else reasons)


@check(
    "no token can be trained",
    "traces",
    wrong=0.0,
    hurts="A run on it would take no step.",
    cure="Record the request beside each response (or prompt_token_ids), and logprobs with ids: logprobs=true and "
    "return_token_ids on vLLM and SGLang.",
    hides=("drift", "other_prompt", "missing_stop_tokens", "no_logprobs"),
)
def nothing_to_train(whole: DatasetStats) -> Hits:
    """Sees a file of which no token would be trained, and says the first cause that holds for most turns.

    Threshold: none trained, where at least one trace was read; text that has its prompts is another check's.
    """
    if whole.terms or not whole.traces or whole.is_text:
        return Hits(0, whole.traces)
    return Hits(whole.traces, whole.traces, None, whole.hindered())


@check(
    "traces that cannot be aligned",
    "traces",
    costs=0.0,
    wrong=0.5,
    hurts="They are left out of training, and their groups have a baseline of fewer.",
    cure="The reason stands with the first one; a chat template that refuses the messages is the usual one.",
)
def unaligned(whole: DatasetStats) -> Hits:
    """Sees traces that `align` refuses: the template raises, or does not show what was said.

    Threshold: any trace; wrong from half of them, where template and traces do not belong together.
    """
    return Hits(whole.unaligned, whole.traces, place_of(whole.first_error), whole.first_error)


@check(
    "recorded tokens without an exact id and logprob",
    "tokens",
    note=0.01,
    costs=0.05,
    hurts="These tokens are masked or end their branch: long answers and rare scripts are trained less than the rest.",
    cure="Record token ids: return_token_ids on vLLM and SGLang. tracegrad prepare lists the reasons.",
)
def drift(whole: DatasetStats) -> Hits:
    """Sees the drift rate: recorded tokens that are not held with a known id and their logprob.

    Threshold: a note from 1 %, it costs from 5 %: the bundled example, three quarters of it without ids and with
    emoji, has 0.55 %.
    """
    return Hits(whole.recorded - whole.exact, whole.recorded)


@check(
    "groups whose rewards are all equal",
    "groups",
    note=0.0,
    costs=0.5,
    wrong=1.0,
    hurts="The advantage of every trace in them is 0: they are computed and teach nothing.",
    cure="Drop them (DAPO's dynamic sampling), record more traces a group, or take prompts that are neither solved nor "
    "hopeless.",
)
def equal_rewards(whole: DatasetStats) -> Hits:
    """Sees groups of two or more traces with one reward throughout.

    Threshold: any group is a note; it costs from half of the groups, and is wrong where no group teaches anything.
    """
    if not whole.rewards.reward:
        return Hits()
    counts = group_counts(np.concatenate(whole.rewards.reward), np.concatenate(whole.rewards.group))
    if not counts.equal:
        return Hits(0, counts.groups)
    group_id = min(counts.equal_ids, key=lambda candidate: whole.rewards.first[int(candidate)][2])
    first, name, _ = whole.rewards.first[int(group_id)]
    reward = dict(zip(counts.equal_ids, counts.equal_rewards, strict=True))[group_id]
    return Hits(counts.equal, counts.groups, first, f"group '{name}': every reward is {reward:g}")


@check(
    "groups of a single trace",
    "groups",
    note=0.0,
    costs=0.5,
    wrong=1.0,
    hurts="A group baseline needs mates: alone, a trace's advantage is 0.",
    cure="Write one group id into all traces of a prompt, and record several of each; or a baseline over the batch.",
    hides=("equal_rewards",),
)
def lone_traces(whole: DatasetStats) -> Hits:
    """Sees groups with one scored trace; a trace without a group is alone.

    Threshold: any group is a note; it costs from half of the groups, and is wrong where there is no other group.
    """
    if not whole.rewards.reward:
        return Hits()
    counts = group_counts(np.concatenate(whole.rewards.reward), np.concatenate(whole.rewards.group))
    if not counts.singletons:
        return Hits(0, counts.groups)
    first, name, _ = min(
        (whole.rewards.first[int(entry)] for entry in counts.singleton_ids), key=lambda entry: entry[2]
    )
    return Hits(counts.singletons, counts.groups, first, f"group '{name}'" if name else "the record names no group")


@check(
    "equal answers of one record, with unlike rewards",
    "traces",
    note=0.0,
    costs=0.05,
    hurts="The same words are praised and blamed: what one answer teaches the other takes back.",
    cure="Where a judge rated the same words twice, take the mean; else leave such answers out.",
)
def unlike_rewards(whole: DatasetStats) -> Hits:
    """Sees traces that say, token for token, what an earlier one of their record says, and have another reward.

    Threshold: any trace is a note; it costs from 5 % of the traces.
    """
    return Hits(whole.alike.count, whole.traces, whole.alike.first, whole.alike.found)


@check(
    "duplicated generations",
    "traces",
    costs=0.0,
    hurts="One draw counts twice: its gradient is doubled, and the baseline of its group leans to it.",
    cure="Keep one of each: sort -u on the records, or by response id; look for retries and merged shards.",
)
def duplicated(whole: DatasetStats) -> Hits:
    """Sees traces that stand in the file before: the same record, response ids, or tokens.

    Threshold: any trace. Tokens count with logprobs equal to the bit and a probability below e^-15 (once in three
    million), or, without logprobs, from 64 tokens: short answers are drawn twice by chance (1,588 turns of the
    bundled example), and greedy ones always.
    """
    return Hits(whole.copies.count, whole.traces, whole.copies.first, whole.copies.found)


@check(
    "stale policy versions",
    "tokens",
    note=0.0,
    costs=0.1,
    hurts="The older the policy, the further the ratio from 1: more terms are clipped or masked, the rest is noisier.",
    cure="Leave the oldest out, or bound the ratio: a preset with a gate (docs/choosing.md) and --stop-below-ess.",
)
def stale_versions(whole: DatasetStats) -> Hits:
    """Sees tokens sampled more than 8 policy versions before the newest one in the file.

    Threshold: 8, the staleness to which AReaL (arXiv 2505.24298) found training unharmed with a decoupled objective; a
    note below 10 % of the tokens.
    """
    tokens = {version: count for version, count in whole.versions.tokens.items() if version >= 0}
    newest = max(tokens, default=0)
    stale = {version: count for version, count in tokens.items() if newest - version > STALE}
    if not stale:
        return Hits(0, sum(tokens.values()))
    first = whole.versions.first[min(stale)]
    return Hits(sum(stale.values()), sum(tokens.values()), first, f"version {min(stale)}, the newest is {newest}")


def place_of(error: str) -> Place | None:
    """Return the place after the code of a tracegrad error message, or None if there is none."""
    match = LOCATED.match(CODE.sub("", error, count=1))
    if match is None:
        return None
    file, *numbers = match.group("file", "line", "turn", "token", "record")
    line, *inner = (None if number is None else int(number) for number in numbers)
    return Place(file, line, match["trace"], *inner)
