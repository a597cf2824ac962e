"""Trace checks, run on each batch: histories of later turns, length, tools, rewards, held-out prompts, choices."""

import hashlib
import itertools
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core
from tracegrad.alignment.mismatch import turn_messages
from tracegrad.data import chat
from tracegrad.data.trace import Trace, Traces
from tracegrad.doctor.finding import Hits, check
from tracegrad.doctor.trace_batch import TraceBatch

OPENER, CLOSER = b"<think>", b"</think>"
_NUMBERED = re.compile(rb'"index"\s*:\s*[1-9]')
REWRITTEN, NOT_EXTENDED, STRIPPED = 19, 20, 10


@check(
    "reasoning missing from later prompts",
    note=0.0,
    costs=0.05,
    impact="Later turns were sampled from a history without the reasoning. Each such turn opens a new branch, so its "
    "prompt is computed again. The policy learns to continue without its own reasoning.",
    fix="If the template drops reasoning by design (Qwen3 does), leave it. Otherwise serve a template that keeps the "
    "reasoning, and send the reasoning back in the messages.",
)
def dropped_reasoning(look: TraceBatch) -> Hits:
    """Detect turns whose sampled reasoning is missing from the next prompt (R10, or a fork whose branch lost it). An
    empty reasoning block does not count.

    Threshold: a note from one turn; costs from 5 % of turns, because their prompts are computed twice.
    """
    lost = {
        turn: finding for turn, finding in look.mismatches(STRIPPED).items() if _closes_thought(_turn_bytes(look, turn))
    }
    for generation in look.mismatches(NOT_EXTENDED):
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
    return look.sampled[slice(*np.searchsorted(look.sampled_generation, [generation, generation + 1]))]


def _turn_bytes(look: TraceBatch, generation: int) -> bytes:
    """Return the bytes that the sampled tokens of a turn spell."""
    return look.vocabulary.tokenizer.decode_bytes(look.sequences.ids[_token_positions(look, generation)])


def _closes_thought(turn_bytes: bytes) -> bool:
    """Return whether a turn closes a thought that is not empty."""
    thought, closer, _ = turn_bytes.partition(CLOSER)
    return bool(closer and thought.replace(OPENER, b"").strip())


@check(
    "history rewritten between turns",
    note=0.0,
    costs=0.05,
    impact="The turn was not sampled from the history that the trace records before it. It opens a new branch, so "
    "its prompt is computed again. Tokens shared with earlier turns are trained only once.",
    fix="If you compact the history on purpose, leave it. Otherwise append messages and never edit earlier ones: no "
    "trimming, no re-parsed tool calls, no changed dates. If the text is unchanged, the server tokenized it again: "
    "send the token ids back.",
)
def history_rewritten(look: TraceBatch) -> Hits:
    """Detect turns whose prompt does not extend any earlier turn of the trace (R19, R20). Reasoning that the template
    drops is a separate finding (`dropped_reasoning`).

    Threshold: a note from one turn; costs from 5 % of turns, because their prompts are computed twice.
    """
    mismatches = {**look.mismatches(NOT_EXTENDED), **look.mismatches(REWRITTEN)}
    thoughts = {generation + 1 for generation in look.mismatches(STRIPPED)}
    hit = np.zeros(look.generations, bool)
    for generation in mismatches:
        if look.turn[generation] > 0 and generation not in thoughts:
            hit[generation] = not _thought_is_lost(look, generation - 1, generation)
    return look.hits(hit, None, lambda g: mismatches[g][1])


@check(
    "turns right after another turn",
    costs=0.0,
    wrong=0.05,
    impact="The record has parts of one answer as several messages, or messages of several agents. The chat template "
    "writes a header between them, which the model did not see when it sampled.",
    fix="Record one message per answer of the model, with its reasoning, content and tool calls, or record "
    'prompt_token_ids. Mark answers of other agents with "sampled": false.',
)
def consecutive_turns(look: TraceBatch) -> Hits:
    """Detect turns whose prompt ends with the previous turn, if the ids of the prompt are not recorded.

    Threshold: any turn; from 5 % of turns on it is wrong.
    """
    context = look["context"]
    hit = np.zeros(look.generations, bool)
    hit[1:] = (np.diff(look.trace) == 0) & (np.diff(context) == 1) & (look["prompt_ids"][1:] < 0)
    for row, generations in itertools.groupby(np.flatnonzero(hit), key=lambda generation: int(look.trace[generation])):
        trace = look.traces[row]
        turns = trace.generations
        for generation in generations:
            last = trace.pool[turns[int(look.turn[generation])].context[-1]]
            hit[generation] = chat.role(last) == "assistant"
    return look.hits(hit)


@check(
    "tool calls without recorded tool schemas",
    costs=0.0,
    impact="The chat template writes the tool schemas into the prompt. Without them, tokens are trained after a "
    "different prompt than the policy saw, and a ratio is wrong.",
    fix='Record the schemas next to the messages, {"messages": [...], "tools": [...]}, or the full request, or '
    "prompt_token_ids. If logprobs are recorded, tracegrad doctor --check-logprobs measures how far they are off.",
)
def unrecorded_tools(look: TraceBatch) -> Hits:
    """Detect turns in traces in which a turn ended with tool calls, if neither tools nor prompt ids are recorded. In
    text without logprobs, a message with tool calls is such a turn.

    Threshold: any turn, because its prompt is not the one it was sampled from.
    """
    rendered = look["prompt_ids"] < 0
    calls = np.isin(look.finish, ["tool_calls", "tool_use"])
    for trace in np.unique(look.trace[~look.has_logprobs & rendered]):
        if not look.traces.core.tools(int(trace)):
            called = [bool(message.get("tool_calls")) for message in turn_messages(look.traces.core, int(trace))]
            calls[look.trace == trace] |= called
    bare = [trace for trace in np.unique(look.trace[calls & rendered]) if not look.traces.core.tools(int(trace))]
    return look.hits(rendered & np.isin(look.trace, bare))


@check(
    "traces longer than the model's context",
    "traces",
    costs=0.0,
    impact="The model was never trained on positions past its limit. Such traces are trained anyway, unless the "
    "model code fails there, and their logprobs are unreliable.",
    fix="If the model reads more, pass a larger --max-tokens. Otherwise remove these traces, or train with "
    "--pack.tokens_per_row at the limit and --pack.too_long drop or truncate. Truncated traces lose their end.",
)
def overlong(look: TraceBatch) -> Hits:
    """Detect traces with a branch longer than --max-tokens, by default the config's max_position_embeddings.

    Threshold: any trace, because a model is not trained past its positions, and a forward pass may fail there.
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
    impact="A trace without a reward has no advantage, so it is not trained. The baseline of its group is computed "
    "from fewer traces.",
    fix="If the records store the reward, pass --map.reward PATH; likely fields are printed as `guess`. Otherwise "
    "score the traces with tracegrad score.",
    hides=("equal_rewards",),
)
def no_rewards(look: TraceBatch) -> Hits:
    """Detect traces without a finite reward: neither `reward`, nor any of `rewards`, nor a reward on a message.

    Threshold: any trace costs; wrong if no trace has a reward.
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
    impact="An evaluation on prompts that were trained on measures memory. Its result does not apply to new prompts.",
    fix="Remove these traces from the training file, or evaluate on other prompts.",
)
def contaminated(look: TraceBatch) -> Hits:
    """Detect traces whose first prompt equals a prompt in the file passed as --held-out, message by message.

    Threshold: any trace. Two prompts are equal if a model reads the same in all messages before the first turn. System
    and developer messages are ignored, and so are white space at the ends, and ids and times of messages. If a record
    has no messages, prompt ids are compared.
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
    impact="The last sampled turn is not the end of the conversation. A reward for the missing answer is assigned to "
    "an earlier turn.",
    fix="If the trajectories were truncated, leave them. If the answer was recorded separately, append it to the "
    'messages, or write {"request": {"messages": [...]}, "response": {...}}.',
)
def unanswered(look: TraceBatch) -> Hits:
    """Detect traces whose last message was not sampled although an earlier message was. A trace may end with the result
    of a tool, as those of agents that submit their work by a tool do.

    Threshold: a note from one trace, because a limit on turns leaves such traces; costs from 5 % of traces.
    """
    unfinished = [row for row in look.traces.core.open() if not _ends_with_tool_result(look.traces[row])]
    return Hits(len(unfinished), len(look.traces), look.trace_at(unfinished[0]) if unfinished else None)


def _ends_with_tool_result(trace: Trace) -> bool:
    return chat.role(trace.messages[-1]) in ("tool", "function")


@check(
    "response choices that are not read",
    "choices",
    costs=0.0,
    wrong=0.01,
    impact="If a response has several choices, only the first choice is read. The single reward next to them may "
    "belong to another choice, and the text of the other choices is lost.",
    fix='Name the choice that was used: "choice": 2, counted from 0. Or write one reward per choice as a list next '
    "to the response; each choice then becomes a trace.",
)
def unused_choices(look: TraceBatch) -> Hits:
    """Detect single calls whose response has several choices, if the record does not name the choice that was used.

    Threshold: any choice; wrong from 1 % of the choices. In a conversation of several calls, the next call shows which
    choice was used.
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
    return chat.prompt_key({**message, "content": _plain(message.get("content"))} for message in user_messages)


def _plain(content: Any) -> Any:
    text = chat.text_of(content)
    return text.strip() if isinstance(text, str) else text


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
