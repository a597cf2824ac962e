"""Trace checks, run on each batch: histories of later turns, length, tools, rewards, held-out prompts, choices."""

import hashlib
import json
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core
from tracegrad.data.trace import Trace, Traces
from tracegrad.doctor.finding import Hits, check
from tracegrad.doctor.trace_batch import TraceBatch

OPENER, CLOSER = b"<think>", b"</think>"
_NUMBERED = re.compile(rb'"index"\s*:\s*[1-9]')
REWRITTEN, NOT_EXTENDED, STRIPPED = 19, 20, 10


@check(
    "reasoning that later turns no longer have",
    note=0.0,
    costs=0.05,
    hurts="Later turns were sampled after a history without it: each opens a branch, whose prompt is computed again, "
    "and the policy learns to go on without its thoughts.",
    cure="Intended (Qwen3's own template does it): leave it. Else serve a template that keeps the reasoning, and send "
    "it back in the messages.",
)
def dropped_reasoning(look: TraceBatch) -> Hits:
    """Sees turns whose sampled reasoning is gone from the next prompt (R10, or a fork whose branch lost it). An
    empty thought is none.

    Threshold: any turn is a note; it costs from 5 % of turns, where prompts are mostly computed twice.
    """
    lost = {turn: finding for turn, finding in look.drift(STRIPPED).items() if _closes_thought(_turn_bytes(look, turn))}
    for generation in look.drift(NOT_EXTENDED):
        before = generation - 1
        if look.turn[generation] > 0 and before not in lost and _thought_is_lost(look, before, generation):
            lost[before] = (-1, "sampled reasoning, and the next recorded prompt does not have it")
    hit = np.zeros(look.generations, bool)
    hit[list(lost)] = True
    return look.hits(hit, None, lambda g: lost[g][1])


def _thought_is_lost(look: TraceBatch, before: int, after: int) -> bool:
    """Return whether turn `before` closed a non-empty thought that is missing from the prompt of turn `after`."""
    turn_bytes, span = _turn_bytes(look, before), _token_positions(look, after)
    if not len(span) or not _closes_thought(turn_bytes):
        return False
    start = int(look.sequences.cu_seqlens[look.branch[span[0]]])
    return turn_bytes not in look.vocabulary.tokenizer.decode_bytes(look.sequences.ids[start : span[0]])


def _token_positions(look: TraceBatch, generation: int) -> NDArray[np.int64]:
    """Return the positions of a turn's sampled tokens."""
    return look.own[slice(*np.searchsorted(look.own_generation, [generation, generation + 1]))]


def _turn_bytes(look: TraceBatch, generation: int) -> bytes:
    """Return the bytes that the sampled tokens of a turn spell."""
    return look.vocabulary.tokenizer.decode_bytes(look.sequences.ids[_token_positions(look, generation)])


def _closes_thought(turn_bytes: bytes) -> bool:
    """Return whether a turn closes a thought that is not empty."""
    thought, closer, _ = turn_bytes.partition(CLOSER)
    return bool(closer and thought.replace(OPENER, b"").strip())


@check(
    "a history rewritten between turns",
    note=0.0,
    costs=0.05,
    hurts="The turn was not sampled after what the trace says came before: it opens a branch, its prompt is computed "
    "again, and what it shares with earlier turns is trained once only.",
    cure="Compaction on purpose: leave it. Else append to the messages and never edit them: no trimming, no re-parsed "
    "tool calls, no changed dates. If the text is the same, the server tokenised it anew: send the ids back.",
)
def history_rewritten(look: TraceBatch) -> Hits:
    """Sees turns whose prompt extends no earlier turn of their trace (R19, R20), reasoning dropped by templates apart.

    Threshold: any turn is a note; it costs from 5 % of turns, where most prompts are computed twice.
    """
    mismatches = {**look.drift(NOT_EXTENDED), **look.drift(REWRITTEN)}
    thoughts = {generation + 1 for generation in look.drift(STRIPPED)}
    hit = np.zeros(look.generations, bool)
    for generation in mismatches:
        if look.turn[generation] > 0 and generation not in thoughts:
            hit[generation] = not _thought_is_lost(look, generation - 1, generation)
    return look.hits(hit, None, lambda g: mismatches[g][1])


@check(
    "calls of tools that were not recorded",
    costs=0.0,
    hurts="Templates write the tools into the prompt. Without them each turn is computed after another text than the "
    "policy saw, and the ratio is of that text.",
    cure='Record the schemas beside the messages, {"messages": [...], "tools": [...]}, or the whole request, or '
    "prompt_token_ids. tracegrad doctor --rescore says how far the logprobs are off.",
)
def unrecorded_tools(look: TraceBatch) -> Hits:
    """Sees turns with logprobs of traces in which a turn ended with tool calls, and no tools or prompt ids stand.

    Threshold: any turn, as its prompt is not the one it was sampled after.
    """
    calls = np.isin(look.finish, ["tool_calls", "tool_use"])
    rendered = (look["logprobs"] > 0) & (look["prompt_ids"] < 0)
    bare = [trace for trace in np.unique(look.trace[calls & rendered]) if not look.traces.core.tools(int(trace))]
    return look.hits(rendered & np.isin(look.trace, bare))


@check(
    "traces longer than the model reads",
    "traces",
    costs=0.0,
    hurts="What stands past its positions the model never learned to read: it is trained all the same, on logprobs "
    "that mean little, if its code does not fail there.",
    cure="Tell doctor a larger --max-tokens if the model reads more. Else leave them out of the records, or train with "
    "--pack.token_budget at the limit and --pack.too_long drop or truncate: cut, they lose their end.",
)
def overlong(look: TraceBatch) -> Hits:
    """Sees traces with a branch longer than --max-tokens, by default the config's max_position_embeddings.

    Threshold: any trace; past its positions a model was never trained, and a forward pass may fail.
    """
    if not (limit := getattr(look.options, "max_tokens", None)):
        return Hits()
    sequences = look.sequences
    longest = np.zeros(sequences.traces, np.int64)
    np.maximum.at(longest, sequences.trace, np.diff(sequences.cu_seqlens))
    over = np.flatnonzero(longest > limit)
    if not len(over):
        return Hits(0, sequences.traces)
    first = look.trace_at(int(look.rows[over[0]]))
    return Hits(len(over), sequences.traces, first, f"{longest[over[0]]:,} tokens, the limit is {limit:,}")


@check(
    "traces without a reward",
    "traces",
    costs=0.0,
    wrong=1.0,
    hurts="Without a reward there is no advantage: such a trace trains nothing, and its group has a baseline of fewer.",
    cure="Say where the records hold it: --map.reward PATH; what seems to be meant is listed as `found`. Else score "
    "them: tracegrad score.",
    hides=("equal_rewards",),
)
def no_rewards(look: TraceBatch) -> Hits:
    """Sees traces that have no finite reward, neither `reward` nor any of `rewards`, nor one on a message.

    Threshold: any trace costs itself; wrong where none has one.
    """
    sequences = look.sequences
    owner = np.repeat(np.arange(sequences.traces), np.diff(sequences.cu_turns))
    has_turn_reward = np.bincount(owner, ~np.isnan(sequences.turn_rewards), minlength=sequences.traces) > 0
    unscored = np.flatnonzero(np.isnan(sequences.rewards).all(axis=1) & ~has_turn_reward)
    return Hits(len(unscored), sequences.traces, look.trace_at(int(look.rows[unscored[0]])) if len(unscored) else None)


@check(
    "prompts that are held out for evaluation",
    "traces",
    wrong=0.0,
    hurts="An evaluation on prompts that were trained on measures memory: its figure says nothing of new prompts.",
    cure="Take these traces out of the training file, or other prompts for the evaluation.",
)
def contaminated(look: TraceBatch) -> Hits:
    """Sees traces whose first prompt is, message for message, one of the file given with --held-out.

    Threshold: any trace. Equal are role and content of all messages before the first turn but system ones, white space
    at the ends aside; prompt ids where a record has no messages.
    """
    held_out = getattr(look.options, "held_out", None)
    if held_out is None:
        return Hits()
    matches = np.flatnonzero(np.isin(prompt_hashes(look.traces), held_out))
    first = look.trace_at(int(matches[0])) if len(matches) else None
    return Hits(
        len(matches), len(look.traces), first, f"{len(held_out):,} prompts are held out" if len(matches) else ""
    )


@check(
    "conversations that end before an answer",
    "traces",
    note=0.0,
    costs=0.05,
    hurts="What was sampled last is not where they end: a reward for the answer that would follow is given to an "
    "earlier one.",
    cure="Trajectories that were cut off: leave them. Else the answer was recorded apart: put it behind the messages, "
    'or write {"request": {"messages": [...]}, "response": {...}}.',
)
def unanswered(look: TraceBatch) -> Hits:
    """Sees traces whose last message was not sampled, though one before it was.

    Threshold: any trace is a note, as a limit of turns leaves such ones; it costs from 5 % of traces.
    """
    unfinished = look.traces.core.open()
    return Hits(len(unfinished), len(look.traces), look.trace_at(unfinished[0]) if unfinished else None)


@check(
    "choices of a response that are not read",
    "choices",
    costs=0.0,
    wrong=0.01,
    hurts="Of several choices the first is read. One reward stands beside them: it may be that of another, and what "
    "the others said is lost.",
    cure='Name the one that was used, "choice": 2 counted from 0; or write one reward for each of them as a list '
    "beside the response: then each is a trace.",
)
def unused_choices(look: TraceBatch) -> Hits:
    """Sees single calls whose response has several choices, of which the record does not say which one was used.

    Threshold: any choice; wrong from 1 % of the choices. In a conversation of several calls the next one says it.
    """
    counts = np.diff(look.first_generation)
    unused, first = 0, None
    for at in np.flatnonzero(counts == 1):
        record = look.traces.core.record(int(at))
        if _NUMBERED.search(record):
            unread = _core.Traces.decode([record], "<record>", 1, look.traces.core.format)[1]["unused_choices"]
            unused, first = unused + unread, first or (look.trace_at(int(at)) if unread else None)
    return Hits(unused, unused + int(counts[counts == 1].sum()), first)


def prompt_hashes(traces: Traces) -> NDArray[np.uint64]:
    """Return [R] uint64: a hash of the messages (or prompt ids) before each trace's first turn."""
    return np.fromiter((_hash(_prompt(trace)) for trace in traces), np.uint64, len(traces))


def _prompt(trace: Trace) -> bytes:
    generations = trace.core.generations(trace.index)[:1]
    context = generations[0]["context"] if generations else range(len(trace.pool))
    messages = [trace.pool[index] for index in context]
    user_messages = [message for message in messages if message.get("role") not in ("system", "developer")] or messages
    if not user_messages and generations and generations[0]["prompt_token_ids"] is not None:
        return generations[0]["prompt_token_ids"].tobytes()
    key = [[message.get("role"), _plain(message.get("content"))] for message in user_messages]
    return json.dumps(key, ensure_ascii=True, sort_keys=True).encode()


def _plain(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
