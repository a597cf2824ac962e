"""Token and prompt checks, run on each batch: foreign ids, missing ends, lost chunks, the template's additions."""

import re

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core
from tracegrad.alignment.mismatch import turn_messages
from tracegrad.data.codes import ASSUMED_LEVELS, TIERS
from tracegrad.doctor.finding import Hits, check
from tracegrad.doctor.trace_batch import TraceBatch

CUT = ("length", "max_tokens", "max_output_tokens", "MAX_TOKENS", "abort", "incomplete")
PLACEHOLDERS = 4  # least number of ids for which a repeated or rising id counts as a placeholder
EXPERTS = re.compile(rb'(?<!\\)"(?:[a-z_]*routed_experts|routing_matrix)"\s*:(?!\s*(?:null|\[\]))')
"""Match a record with the routed experts of its tokens. Inside a message text the quotes would be escaped."""
FEW = 8  # most tokens of an empty answer: its end, and the empty reasoning block that some templates write
WORDS = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls", "function_call")
SLACK, SHARE = _core.USAGE_SLACK  # tokens, and their share, that servers count in usage but do not list


@check(
    "ids or token texts of another tokenizer",
    costs=0.0,
    wrong=0.01,
    hurts="An id of another vocabulary is another token: gradient and ratio would be of text that nobody sampled. "
    "These turns are masked.",
    cure="Give --model the folder that the server loaded: same tokenizer.json, same added tokens. What a model said "
    "whose folder you do not have trains as text, without a ratio: --objective TOPR_POSITIVE --text-only.",
    hides=("no_logprobs", "drift", "missing_logprobs", "other_prompt", "missing_stop_tokens"),
)
def wrong_tokenizer(look: TraceBatch) -> Hits:
    """Sees ids that the model does not have (R25), and ids or texts that spell something else than the record (R26).

    Threshold: any turn; wrong from 1 % of turns, as one tokenizer makes a few odd turns and another makes most.
    """
    return look.drift_hits(25, 26)


@check(
    "ids that stand for no text",
    costs=0.0,
    wrong=0.01,
    hurts="They are placeholders: one id again and again, or a count. Nobody sampled them. These turns are masked "
    "where the record says what was sampled.",
    cure="Record the ids that the server returned; leave the field out where there are none.",
)
def placeholder_ids(look: TraceBatch) -> Hits:
    """Sees turns of at least 4 listed ids that are all one id, or count up by one, and do not spell what was said.

    Threshold: any turn; wrong from 1 % of turns, where it is the recorder's habit.
    """
    hit = np.zeros(look.generations, bool)
    unlike = look.drift(25, 26, 28)
    for g in (g for g in unlike if look["tokens"][g] >= PLACEHOLDERS):
        ids = look.traces[int(look.trace[g])].generations[int(look.turn[g])].token_ids
        steps = np.diff(np.asarray([] if ids is None else ids, np.int64))
        hit[g] = len(steps) > 0 and (not steps.any() or bool(np.all(steps == 1)))
    return look.hits(hit, None, lambda g: f"{int(look['tokens'][g])} ids; {unlike[g][1]}")


@check(
    "turns whose ids are guessed",
    costs=0.0,
    hurts="There are logprobs and no tokens: the ids are the canonical ones of the text, because their number fits. A "
    "policy that is sampled hot often writes the same text with other tokens. These turns are not trained.",
    cure="Record token ids: return_token_ids on vLLM and SGLang; or tg.align(..., assume_canonical=True), a guess.",
)
def guessed_ids(look: TraceBatch) -> Hits:
    """Sees turns of tiers T4 and T5: as many logprobs as the text, or the message, has canonical tokens.

    Threshold: any turn: of a policy that was sampled hot, 26 of 164 such turns had other ids.
    """
    guessed = np.isin(look.sequences.tier[look.own], [TIERS.index(name) for name in ASSUMED_LEVELS])
    hit = np.bincount(look.own_generation[guessed], minlength=look.generations) > 0
    return look.hits(hit, None, lambda g: f"{int(look['logprobs'][g])} logprobs and no token")


@check(
    "prompts that begin with two BOS tokens",
    costs=0.0,
    hurts="Chat template and server each put one. The policy was sampled in a context that it has not seen in training "
    "and will not see when it is served rightly.",
    cure="Record with add_special_tokens=False where the template writes the BOS itself; keep these traces apart.",
)
def double_bos(look: TraceBatch) -> Hits:
    """Sees recorded prompt ids whose first two are one special token, and R16.

    Threshold: any turn: no template writes its first special token twice.
    """
    head = look["prompt_head"].reshape(-1, 2)
    twice = (head[:, 0] == head[:, 1]) & look.vocabulary.is_special(head[:, 0])
    mismatches = look.drift(16)
    twice[list(mismatches)] = True
    return look.hits(twice, None, lambda g: mismatches.get(g, (0, f"the prompt begins with id {head[g, 0]} twice"))[1])


@check(
    "turns that stopped, without the stop token",
    note=0.0,
    costs=0.01,
    hurts="The decision to stop is not trained: the policy learns what to say and never when to end, and answers grow.",
    cure="Record the stop token: return_token_ids on vLLM and SGLang, include_stop_str_in_output, or no_stop_trim.",
)
def missing_stop_tokens(look: TraceBatch) -> Hits:
    """Sees turns that finished by themselves (not by length, not by a stop string) whose tokens hold no end (R06).

    Threshold: any turn is a note; it costs from 1 % of turns, where the habit of stopping begins to move.
    """
    return look.drift_hits(6)


@check(
    "turns of a mixture of experts",
    note=0.0,
    hurts="Trainer and server choose experts by rounding apart, so their logprobs differ more than those of a dense "
    "model. The recorded experts are kept beside the tokens and not replayed.",
    cure="Train with a loss that masks what differs most: --objective ICEPOP, or GSPO.",
)
def mixture_of_experts(look: TraceBatch) -> Hits:
    """Sees turns of records that hold the experts a server chose (routed_experts, or routing_matrix).

    Threshold: any turn is a note.
    """
    records = map(look.traces.core.record, range(len(look.traces)))
    has_experts = np.array([EXPERTS.search(record) is not None for record in records], bool)
    return look.hits(has_experts[look.trace], None, lambda _: "the record holds the experts of its tokens")


@check(
    "completions cut before their end",
    note=0.0,
    costs=0.05,
    hurts="The reward judges a text that the policy had not finished; a good start is punished for the limit.",
    cure="Raise max_tokens when recording, or mask them (DAPO's overlong filtering), or shape the reward by length.",
)
def truncated(look: TraceBatch) -> Hits:
    """Sees turns cut by length or aborted, and turns without a finish reason whose last token is no special one.

    Threshold: any turn is a note; it costs from 5 % of turns: below, it is the tail that every limit cuts.
    """
    cut = np.isin(look.finish, CUT)
    unmarked = (look.finish == "") & look.known & ~_ends_with_special(look)

    def describe(g: int) -> str:
        return f"finish_reason '{look.finish[g]}'" if cut[g] else "no finish reason, and no end among the tokens"

    return look.hits(cut | unmarked, None, describe)


@check(
    "turns whose token list lacks a part of what was said",
    costs=0.0,
    wrong=0.1,
    hurts="What follows a lost piece stands after tokens it was not sampled after: its ratio is of another text. "
    "Nothing leaves these turns out.",
    cure="Record ids and logprobs of the whole response, of a stream those of every chunk, with an empty delta too.",
)
def lost_chunks(look: TraceBatch) -> Hits:
    """Sees turns whose tokens spell fewer bytes than the message has, or that list fewer than usage counts, and that
    no other finding explains: a broken stream, a call that is not listed, hidden reasoning, another tokenizer.

    Threshold: one byte less than the content (a server only ever cuts content, never adds), or more than 2 tokens and
    2 % less than usage.completion_tokens: servers were seen to count 0 to 2 more than they list. Wrong from 10 %,
    where it is the recorder's habit.
    """
    spelled = _spelled_bytes(look)
    short = look.known & (spelled < look["content_bytes"])
    used, thought = look.usage
    fewer = _lists_fewer(look, used) & (thought <= 0) & ~look.unlisted
    explained = np.zeros(look.generations, bool)
    explained[list(look.drift(25, 26))] = True
    short[list(look.drift(28))] = False

    def describe(g: int) -> str:
        if short[g]:
            return f"tokens spell {int(spelled[g])} bytes of a content of {int(look['content_bytes'][g])}"
        return f"{int(look['tokens'][g])} tokens listed where usage counts {int(used[g])}"

    return look.hits((short | fewer) & ~explained, None, describe)


@check(
    "turns that were recorded in part",
    costs=0.0,
    wrong=0.5,
    hurts="A turn that breaks off is trained as far as it goes. One with a gap is not trained, nor is what stands "
    "behind it in its trace: it was sampled after other tokens.",
    cure="Record the whole response; of a stream every chunk, with an empty delta too, up to its finish reason.",
)
def broken_turns(look: TraceBatch) -> Hits:
    """Sees streams that end without their end, or within a chunk, and token lists that spell a part of the message or
    of its tool calls, or of a stream fewer ids than its usage counts (R28).

    Threshold: any turn; wrong from half of them, as the others are left as they are.
    """
    return look.drift_hits(28)


@check(
    "tool calls that the token list does not hold",
    costs=0.0,
    hurts="The words before the call are trained, the choice to call and its arguments are not. In a trace that goes "
    "on, what stands behind is not trained: its history has no tokens of the call.",
    cure="Record token ids (return_token_ids on vLLM and SGLang), or calls one by one, without --map.session: then "
    "each has the whole history as its prompt.",
)
def unlisted_calls(look: TraceBatch) -> Hits:
    """Sees turns with tool calls whose tokens, by their texts, spell the words and no call: its name is not there.

    Threshold: any turn; what is trained is as it was sampled.
    """
    used, _ = look.usage

    def describe(g: int) -> str:
        counted = f", usage counts {int(used[g])}" if used[g] >= 0 else ""
        return f"{int(look['tokens'][g])} tokens listed, of the words and not of the call{counted}"

    return look.hits(look.unlisted, None, describe)


@check(
    "sampled reasoning that the record does not have",
    wrong=0.01,
    costs=0.0,
    hurts="The answer was sampled after hidden tokens. Its logprobs belong to that context, and the ratio without it "
    "is of another distribution.",
    cure="Record from a server that returns its reasoning tokens, or train the text without a ratio (--text-only).",
)
def hidden_reasoning(look: TraceBatch) -> Hits:
    """Sees turns whose usage counts reasoning tokens that the token list lacks.

    Threshold: a list shorter than usage by more than 2 tokens and 2 %, with reasoning counted. Wrong from 1 %.
    """
    used, thought = look.usage
    return look.hits(
        _lists_fewer(look, used) & (thought > 0),
        None,
        lambda g: (
            f"{int(look['tokens'][g])} tokens listed, usage counts {int(used[g])}, {int(thought[g])} of reasoning"
        ),
    )


@check(
    "a system prompt that the template puts in",
    costs=0.0,
    hurts="The prompt is rendered with a system text that no message says. Whether the server's template put it too is "
    "not recorded; if not, every ratio is of another prompt.",
    cure="Record prompt_token_ids, or say the system message in every request.",
)
def injected_system(look: TraceBatch) -> Hits:
    """Sees turns without a system message that the template would give one, unless recorded prompt ids confirm it.

    Threshold: any turn whose prompt must be rendered, or whose recorded prompt ids are not what the template gives
    (R17, R31). What a template puts in is found by rendering one user message.
    """
    text = look.vocabulary.injected
    mismatches = look.drift(17)
    hit = np.zeros(look.generations, bool)
    if text:
        hit = (look["system"] == 0) & (look["rendered"] == 1) & (look["context"] > 0)
        hit[[g for g in look.drift(31) if look["system"][g] == 0]] = True
    hit[list(mismatches)] = True
    return look.hits(hit, None, lambda g: mismatches[g][1] if g in mismatches else f"the template adds {text[:60]!r}")


@check(
    "messages that are not in their prompt",
    wrong=0.02,
    costs=0.0,
    hurts="The prompt lacks what a message says: the ratio is formed behind another prompt than the server's, or the "
    "policy learns to answer what it never saw.",
    cure="Give the model folder the template of the server. Send the content as that template takes it, "
    "and roles that it writes; else record prompt_token_ids.",
)
def missing_messages(look: TraceBatch) -> Hits:
    """Sees turns with a message of which the text, a tool call or a tool result is nowhere in the prompt (R36): the
    rendered one, or the recorded ids decoded where they differ from it. Texts are compared without white space,
    arguments by their values. Reasoning and media may be missing, and what an assistant says beside its tool calls
    where the template drops it.

    Threshold: any turn; wrong from 2 %.
    """
    return look.drift_hits(36)


@check(
    "recorded prompts that the template does not give",
    note=0.0,
    hurts="The recorded ids are what is trained, so these turns are right. Turns without prompt ids are rendered by a "
    "template that is not the server's.",
    cure="Give the model folder the chat template, tools and template_kwargs (date, enable_thinking) of the server.",
)
def other_prompt(look: TraceBatch) -> Hits:
    """Sees recorded prompt ids that are not those of the rendered messages: R31, and R18 for an injected date.

    Threshold: any turn; a note, because recorded ids win over rendering.
    """
    return look.drift_hits(18, 31)


@check(
    "answers without a word",
    note=0.0,
    costs=0.1,
    hurts="Only the end of the turn is trained: its reward teaches the policy to stop at once, or not to.",
    cure="Were they sampled, leave them. Else they are failed calls that were logged as answers: leave them out.",
)
def empty_answers(look: TraceBatch) -> Hits:
    """Sees turns whose message has neither text nor reasoning nor a tool call.

    Threshold: any turn is a note; it costs from 10 % of turns.
    """
    hit = np.zeros(look.generations, bool)
    short = np.flatnonzero((look.aligned > 0) & (look.aligned <= FEW) & (look["tokens"] <= 1))
    for trace in np.unique(look.trace[short]):
        messages = turn_messages(look.traces.core, int(trace))
        for g in short[look.trace[short] == trace]:
            words = [messages[int(look.turn[g])].get(key) for key in WORDS]
            hit[g] = not any(field.strip() if isinstance(field, str) else field for field in words)
    return look.hits(hit)


def _ends_with_special(look: TraceBatch) -> NDArray[np.bool_]:
    """Return [G] bool: whether the last id is a special token."""
    return look.vocabulary.is_special(look.last_id)


def _spelled_bytes(look: TraceBatch) -> NDArray[np.int64]:
    """Return [G] bytes that the ids in a branch spell, without a final special token."""
    size = look.vocabulary.spelled
    spelled = np.bincount(look.own_generation, size(look.sequences.ids[look.own]), minlength=look.generations)
    return spelled - np.where(_ends_with_special(look), size(look.last_id), 0)


def _lists_fewer(look: TraceBatch, used: NDArray[np.int64]) -> NDArray[np.bool_]:
    gap = used - look["tokens"]
    return (look["tokens"] > 0) & (gap > SLACK) & (gap > SHARE * used)
