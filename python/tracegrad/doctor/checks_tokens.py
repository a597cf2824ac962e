"""Token and prompt checks, run on each batch: foreign ids, missing ends, lost chunks, the template's additions."""

import re

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core
from tracegrad.alignment.mismatch import turn_messages
from tracegrad.data.codes import ASSUMED_LEVELS, LEVELS
from tracegrad.doctor.finding import Hits, check
from tracegrad.doctor.trace_batch import TraceBatch

CUT = ("length", "max_tokens", "max_output_tokens", "MAX_TOKENS", "abort", "incomplete")
FOREIGN = (25, 26)  # mismatches of turns whose ids or texts are of another tokenizer
OTHER_TOKENIZER = (
    "Pass the model folder that the server loaded as --model: same tokenizer.json, same added tokens. If you do not "
    "have that folder, train on the text without a ratio: --objective TOPR_POSITIVE --text-only."
)
PLACEHOLDERS = 4  # least number of ids for which a repeated or rising id counts as a placeholder
EXPERTS = re.compile(rb'(?<!\\)"(?:[a-z_]*routed_experts|routing_matrix)"\s*:(?!\s*(?:null|\[\]))')
"""Match a record with the routed experts of its tokens. Inside a message text the quotes would be escaped."""
FEW = 8  # most tokens of an empty answer: its end, and the empty reasoning block that some templates write
WORDS = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls", "function_call")
SLACK, SHARE = _core.USAGE_SLACK  # tokens, and their share, that servers count in usage but do not list


@check(
    "token ids or texts of another tokenizer",
    costs=0.0,
    wrong=0.01,
    impact="An id of another vocabulary is a different token. Gradient and ratio would belong to text that was never "
    "sampled. These turns are masked.",
    fix=OTHER_TOKENIZER,
    hides=("no_logprobs", "mismatches", "missing_logprobs", "other_prompt", "missing_stop_tokens"),
)
def wrong_tokenizer(look: TraceBatch) -> Hits:
    """Detect ids that the model does not have (R25), and ids or texts that spell something other than the recorded text
    (R26).

    Threshold: any turn; wrong from 1 % of turns. The right tokenizer causes a few odd turns, another tokenizer causes
    many.
    """
    return look.mismatch_hits(*FOREIGN)


@check(
    "placeholder token ids",
    costs=0.0,
    wrong=0.01,
    impact="The ids are not sampled tokens: one id repeats, or the ids count up. These turns are masked if the "
    "record shows the sampled text.",
    fix="Record the ids that the server returned. Leave the field out if the server returned none.",
)
def placeholder_ids(look: TraceBatch) -> Hits:
    """Detect turns with at least 4 listed ids that are all the same, or count up by one, and do not spell the recorded
    text.

    Threshold: any turn; wrong from 1 % of turns, because the recorder then writes placeholders as a rule.
    """
    hit = np.zeros(look.generations, bool)
    unlike = look.mismatches(25, 26, 28)
    for g in (g for g in unlike if look["tokens"][g] >= PLACEHOLDERS):
        ids = look.traces[int(look.trace[g])].generations[int(look.turn[g])].token_ids
        steps = np.diff(np.asarray([] if ids is None else ids, np.int64))
        hit[g] = len(steps) > 0 and (not steps.any() or bool(np.all(steps == 1)))
    return look.hits(hit, None, lambda g: f"{int(look['tokens'][g])} ids; {unlike[g][1]}")


@check(
    "turns with assumed token ids",
    costs=0.0,
    impact="The record has logprobs but no tokens. The ids are the canonical ids of the text, because their number "
    "matches. A policy that is sampled at a high temperature often writes the same text with other tokens. These "
    "turns are not trained.",
    fix="Record token ids: return_token_ids on vLLM and SGLang. Or accept the assumption with tg.align(..., "
    "assume_canonical=True).",
)
def guessed_ids(look: TraceBatch) -> Hits:
    """Detect turns of alignment levels T4 and T5: the number of logprobs equals the number of canonical tokens of the
    text, or of the message.

    Threshold: any turn. For a policy that was sampled at a high temperature, 26 of 164 such turns had other ids.
    """
    guessed = np.isin(look.sequences.alignment_level[look.sampled], [LEVELS.index(name) for name in ASSUMED_LEVELS])
    hit = np.bincount(look.sampled_generation[guessed], minlength=look.generations) > 0
    return look.hits(hit, None, lambda g: f"{int(look['logprobs'][g])} logprobs and no token")


@check(
    "prompts that start with two BOS tokens",
    costs=0.0,
    impact="The chat template and the server each add a BOS token. The policy was sampled in a context that it did "
    "not see in training and does not see if it is served correctly.",
    fix="If the template writes the BOS token itself, record with add_special_tokens=False. Keep these traces "
    "separate from others.",
)
def double_bos(look: TraceBatch) -> Hits:
    """Detect recorded prompt ids whose first two ids are the same special token, and R16.

    Threshold: any turn, because templates do not write their first special token twice.
    """
    head = look["prompt_head"].reshape(-1, 2)
    twice = (head[:, 0] == head[:, 1]) & look.vocabulary.is_special(head[:, 0])
    mismatches = look.mismatches(16)
    twice[list(mismatches)] = True
    return look.hits(twice, None, lambda g: mismatches.get(g, (0, f"the prompt begins with id {head[g, 0]} twice"))[1])


@check(
    "finished turns without a stop token",
    note=0.0,
    costs=0.01,
    impact="The decision to stop is not trained. The policy learns what to write but not when to end, so answers "
    "grow longer.",
    fix="Record the stop token: return_token_ids on vLLM and SGLang, include_stop_str_in_output, or no_stop_trim.",
)
def missing_stop_tokens(look: TraceBatch) -> Hits:
    """Detect turns that finished by themselves (not by length, not by a stop string) but whose tokens do not contain an
    end (R06).

    Threshold: a note from one turn; costs from 1 % of turns, because the policy's stopping behaviour then starts to
    change.
    """
    return look.mismatch_hits(6)


@check(
    "turns sampled from a mixture of experts",
    note=0.0,
    impact="Because of rounding, trainer and server can choose different experts, so their logprobs differ more than "
    "with a dense model. The recorded experts are stored with the tokens but not replayed.",
    fix="Train with a loss that masks the largest differences: --objective ICEPOP, or GSPO.",
)
def mixture_of_experts(look: TraceBatch) -> Hits:
    """Detect turns in records that contain the experts chosen by the server (routed_experts or routing_matrix).

    Threshold: a note from one turn.
    """
    records = map(look.traces.core.record, range(len(look.traces)))
    has_experts = np.array([_has_experts(record) for record in records], bool)
    return look.hits(has_experts[look.trace], None, lambda _: "the record contains the experts of its tokens")


def _has_experts(record: bytes) -> bool:
    may_have = b"routed_experts" in record or b"routing_matrix" in record  # Much faster than the pattern.
    return may_have and EXPERTS.search(record) is not None


@check(
    "truncated completions",
    note=0.0,
    costs=0.05,
    impact="The reward judges an unfinished text. A good start is penalized because of the length limit.",
    fix="Raise max_tokens when recording, mask truncated completions (DAPO's overlong filtering), or shape the "
    "reward by length.",
)
def truncated(look: TraceBatch) -> Hits:
    """Detect turns that were truncated by length or aborted, and turns without a finish reason whose last token is not
    a special token.

    Threshold: a note from one turn; costs from 5 % of turns. Below that, it is the tail that every length limit
    truncates.
    """
    cut = np.isin(look.finish, CUT)
    unmarked = (look.finish == "") & look.has_known_ids & ~_ends_with_special(look)

    def describe(g: int) -> str:
        return f"finish_reason '{look.finish[g]}'" if cut[g] else "no finish reason, and no end among the tokens"

    return look.hits(cut | unmarked, None, describe)


@check(
    "turns with an incomplete token list",
    costs=0.0,
    wrong=0.1,
    impact="Tokens after a lost piece follow tokens that they were not sampled after, so their ratio belongs to "
    "another text. These turns are not masked.",
    fix="Record ids and logprobs of the full response. For a stream, record them for every chunk, including chunks "
    "with an empty delta.",
)
def lost_chunks(look: TraceBatch) -> Hits:
    """Detect turns whose tokens spell fewer bytes than the message has, or that list fewer tokens than usage counts.
    Turns that another finding explains are skipped: a broken stream, an unlisted tool call, hidden reasoning, another
    tokenizer.

    Threshold: one byte less than the content, because a server only removes content and never adds any. For usage, more
    than 2 tokens and 2 % less than usage.completion_tokens, because some servers count up to 2 tokens more than they
    list. Wrong from 10 % of turns, because the recorder then loses tokens as a rule.
    """
    spelled = _spelled_bytes(look)
    short = look.has_known_ids & (spelled < look["content_bytes"])
    used, thought = look.usage
    fewer = _lists_fewer(look, used) & (thought <= 0) & ~look.unlisted_tool_call
    explained = np.zeros(look.generations, bool)
    explained[list(look.mismatches(25, 26))] = True
    short[list(look.mismatches(28))] = False

    def describe(g: int) -> str:
        if short[g]:
            return f"tokens spell {int(spelled[g])} bytes of a content of {int(look['content_bytes'][g])}"
        return f"{int(look['tokens'][g])} tokens listed, usage counts {int(used[g])}"

    return look.hits((short | fewer) & ~explained, None, describe)


@check(
    "partly recorded turns",
    costs=0.0,
    wrong=0.5,
    impact="A turn that breaks off is trained up to that point. A turn with a gap is not trained, and neither are "
    "the turns after it in its trace, because they were sampled after other tokens.",
    fix="Record the full response. For a stream, record every chunk up to its finish reason, including chunks with "
    "an empty delta.",
)
def broken_turns(look: TraceBatch) -> Hits:
    """Detect streams that stop before their end or inside a chunk, token lists that spell only a part of the message or
    of its tool calls, and streams with fewer ids than usage counts (R28).

    Threshold: any turn; wrong from half of the turns. The other turns are not affected.
    """
    return look.mismatch_hits(28)


@check(
    "tool calls missing from the token list",
    costs=0.0,
    impact="The words before the call are trained, but the decision to call and its arguments are not. Later turns "
    "of the trace are not trained, because their history lacks the tokens of the call.",
    fix="Record token ids (return_token_ids on vLLM and SGLang). Or record calls one by one, without --map.session: "
    "each call then has the full history as its prompt.",
)
def unlisted_calls(look: TraceBatch) -> Hits:
    """Detect turns with tool calls whose token texts spell only the words before the call: the name of the tool does
    not occur in them.

    Threshold: any turn. The trained tokens are correct.
    """
    used, _ = look.usage

    def describe(g: int) -> str:
        counted = f", usage counts {int(used[g])}" if used[g] >= 0 else ""
        return f"{int(look['tokens'][g])} tokens listed, for the words but not for the call{counted}"

    return look.hits(look.unlisted_tool_call, None, describe)


@check(
    "sampled reasoning missing from the record",
    wrong=0.01,
    costs=0.0,
    impact="The answer was sampled after hidden tokens. Its logprobs belong to that context, so a ratio without it "
    "belongs to another distribution.",
    fix="Record from a server that returns its reasoning tokens, or train on the text without a ratio (--text-only).",
)
def hidden_reasoning(look: TraceBatch) -> Hits:
    """Detect turns whose usage counts reasoning tokens that are not in the token list.

    Threshold: the list is more than 2 tokens and 2 % shorter than usage, and usage counts reasoning tokens. Wrong from
    1 % of turns.
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
    "system prompt added by the template",
    costs=0.0,
    impact="The prompt is rendered with a system text that is not in any message. The record does not show whether "
    "the server's template added it too. If it did not, every ratio belongs to another prompt.",
    fix="Record prompt_token_ids, or send the system message in every request.",
)
def injected_system(look: TraceBatch) -> Hits:
    """Detect turns without a system message for which the template adds one, unless recorded prompt ids confirm it.

    Threshold: any turn whose prompt must be rendered, or whose recorded prompt ids differ from the rendered ones (R17,
    R31). The added text is determined by rendering user messages only.
    """
    text = look.vocabulary.injected
    mismatches = look.mismatches(17)
    hit = np.zeros(look.generations, bool)
    if text:
        hit = (look["system"] == 0) & (look["rendered"] == 1) & (look["context"] > 0)
        hit[[g for g in look.mismatches(31) if look["system"][g] == 0]] = True
    hit[list(mismatches)] = True
    return look.hits(hit, None, lambda g: mismatches[g][1] if g in mismatches else f"the template adds {text[:60]!r}")


@check(
    "messages missing from their prompt",
    wrong=0.02,
    costs=0.0,
    impact="The prompt lacks the content of a message. The ratio is then computed after another prompt than the "
    "server's, or the policy learns to answer text that it never saw.",
    fix="Use the server's chat template in the model folder. Send the content in a form that the template accepts, "
    "and roles that it writes. Otherwise record prompt_token_ids.",
)
def missing_messages(look: TraceBatch) -> Hits:
    """Detect turns with a message whose text, tool call or tool result does not occur in the prompt (R36). The prompt
    is the rendered one, or the decoded recorded ids if they differ from it. Texts are compared without white space,
    arguments by value. Reasoning and media may be missing, and so may the text of an assistant message with tool calls
    if the template drops it.

    Threshold: any turn; wrong from 2 % of turns.
    """
    return look.mismatch_hits(36)


@check(
    "recorded prompts that differ from the rendered ones",
    note=0.0,
    impact="Training uses the recorded ids, so these turns are correct. Turns without prompt ids are rendered with a "
    "template that differs from the server's.",
    fix="Use the server's chat template, tools and template_kwargs (date, enable_thinking) in the model folder.",
)
def other_prompt(look: TraceBatch) -> Hits:
    """Detect recorded prompt ids that differ from the rendered messages: R31, and R18 for a date that the template
    adds.

    Threshold: any turn. It is a note because recorded ids override rendering.
    """
    return look.mismatch_hits(18, 31)


@check(
    "empty answers",
    note=0.0,
    costs=0.1,
    impact="Only the end of the turn is trained. Its reward teaches the policy to stop at once, or not to.",
    fix="If these answers were sampled, leave them. If they are failed calls that were logged as answers, remove them.",
)
def empty_answers(look: TraceBatch) -> Hits:
    """Detect turns whose message has no text, no reasoning and no tool call.

    Threshold: a note from one turn; costs from 10 % of turns.
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
    spelled = np.bincount(look.sampled_generation, size(look.sequences.ids[look.sampled]), minlength=look.generations)
    return spelled - np.where(_ends_with_special(look), size(look.last_id), 0)


def _lists_fewer(look: TraceBatch, used: NDArray[np.int64]) -> NDArray[np.bool_]:
    gap = used - look["tokens"]
    return (look["tokens"] > 0) & (gap > SLACK) & (gap > SHARE * used)
