"""Describe columns, alignment levels and mismatch reasons in one sentence each, for tooltips."""

from tracegrad.data.codes import LEVEL_TEXT, MISMATCH_TEXT

COLUMN_TEXT = {
    "reward": "Reward of the trace.",
    "advantage": "With a run: mean advantage of the trained tokens, in the newest step. Otherwise: reward minus the "
    "mean reward of the group.",
    "length": "Number of sampled tokens whose ids alignment determines, with --model or a run. Otherwise as recorded, "
    "and empty if a turn is recorded as text alone.",
    "recorded tokens": "Number of sampled tokens that the record lists, of the model that was recorded.",
    "turns": "Number of answers of the model.",
    "messages": "Number of messages.",
    "calls": "Number of tool calls.",
    "characters": "Number of characters in all messages.",
    "level": "Worst alignment level of the trace: how exactly its ids and logprobs are determined, from T0 to T7.",
    "mismatches": "Number of different mismatch reasons in the alignment report of the trace.",
    "staleness": "Policy versions between the oldest sampled token of the trace and the newest version in the list.",
    "source": "Number of the file or folder that the trace is from.",
    "gradient": "Gradient magnitude: sum over the trained tokens of |d loss / d logprob|, in the newest step.",
    "ratio": "Mean ratio of the trained tokens, in the newest step.",
    "weight": "Mean weight of the trained tokens, in the newest step.",
    "clipped": "Share of the trained tokens whose gradient the clip removed, in the newest step.",
    "masked": "Share of the trained tokens that a rejection or a mask removed, in the newest step.",
    "entropy": "Mean entropy of the policy at the trained tokens in nats, in the newest step.",
}
"""One sentence for each column of the list."""
NOT_ALIGNABLE = "could not be aligned"
"""Reason of a trace for which `align` failed."""
UNALIGNED = "Between T2 and T5: name the tokenizer with --model to align the trace."
"""Tooltip of a trace whose level only alignment can determine."""


def level_text(level: str) -> str:
    """Return the sentence of an alignment level.

    >>> level_text("T0")
    'Alignment level T0: prompt and completion ids recorded.'
    """
    return f"Alignment level {level}: {LEVEL_TEXT[level]}."


def mismatch_text(reason: str) -> str:
    """Return the sentence of a mismatch reason, or "" if it has none.

    >>> mismatch_text("R18 date_injected")
    'Mismatch R18: the template prints a date.'
    """
    meaning = MISMATCH_TEXT.get(reason)
    return f"Mismatch {reason.partition(' ')[0]}: {meaning}." if meaning else ""


def meanings() -> dict[str, str]:
    """Return sentences by column (`staleness`) and by tag (`level:T0`, `mismatch:R18 date_injected`)."""
    levels = {f"level:{level}": level_text(level) for level in LEVEL_TEXT}
    reasons = {f"mismatch:{reason}": mismatch_text(reason) for reason in MISMATCH_TEXT}
    reasons[f"mismatch:{NOT_ALIGNABLE}"] = "The trace could not be aligned, and it is not trained."
    return {**COLUMN_TEXT, **levels, **reasons, "unaligned": UNALIGNED}
