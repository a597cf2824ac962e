"""Meanings of the integer codes in `Sequences`: token sources, alignment levels, logprob kinds, endings."""

from tracegrad import _core

PROMPT, TEMPLATE, SAMPLED = 0, 1, 2
SOURCES = ("given", "template", "sampled")
TIERS = ("T0", "T1", "T2", "T3", "T4", "T5", "T6")
TIER_TEXT = {
    "T0": "prompt and completion ids recorded",
    "T1": "completion ids recorded",
    "T2": "ids from each token's bytes",
    "T3": "ids from text, one segmentation fits",
    "T4": "canonical tokens of the text: assumed, the count fits",
    "T5": "canonical tokens of the message: assumed, the count fits",
    "T6": "text only: no ratio",
}
TEXT_TRAINS = (
    "--objective TOPR_POSITIVE --text-only, or, on rewards of 0 and more, --objective WEIGHTED_SFT "
    "--advantage.baseline none --text-only"
)
"""Command-line options that train on text without logprobs: the two objectives that support it."""
ASSUMED_LEVELS = ("T4", "T5")
TEXT_ONLY = 6
NO_TIER = 255
MEDIA = tuple(map(_core.DRIFT_REASONS.index, ("R32 media_in_prompt", "R34 picture_unplaced")))
LOGPROB_KINDS = ("unknown", "raw", "processed")
SERVERS = ("vllm", "sglang", "llama.cpp", "tgi", "openai")
ENDINGS = ("unknown", "ended", "cut")
TRUNCATED = ENDINGS.index("cut")
