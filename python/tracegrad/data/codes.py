"""Meanings of the integer codes in `Sequences`: token sources, alignment levels, logprob kinds, endings."""

from tracegrad import _core

PROMPT, TEMPLATE, SAMPLED = 0, 1, 2
SOURCES = ("prompt", "template", "sampled")
LEVELS = ("T0", "T1", "T2", "T3", "T4", "T5", "T6", "T7")
LEVEL_TEXT = {
    "T0": "prompt and completion ids recorded",
    "T1": "completion ids recorded",
    "T2": "ids from each token's bytes",
    "T3": "ids from text, one segmentation fits",
    "T4": "canonical tokens of the text: assumed, the count fits",
    "T5": "canonical tokens of the message: assumed, the count fits",
    "T6": "text only: no ratio",
    "T7": "logprob not recorded: tracegrad fill measured it later",
}
"""Meaning of each alignment level."""
MISMATCH_TEXT = {
    "R01 noncanonical_bpe": "the tokenizer encodes the text differently from the sampled ids",
    "R02 partial_utf8": "tokens are parts of a character, and their bytes are not recorded",
    "R03 lossy_text": "U+FFFD replaces lost bytes",
    "R04 glyph_text": "texts use the byte-level alphabet (Ġthe)",
    "R05 special_stripped": "special tokens inside a turn are not in its text",
    "R06 eos_missing_in_record": "the turn stopped, but no stop token is listed",
    "R07 stop_token_differs": "the sampled stop token differs from the one in the later prompt",
    "R08 stop_string_truncated": "tokens follow the end of the recorded text, or it ends inside a token",
    "R09 length_truncated": "max_tokens ended the turn, and the template closed it",
    "R10 think_stripped": "the template drops the thought from the history",
    "R11 think_inserted": "the template writes an empty thought",
    "R12 whitespace_trimmed": "the template trims whitespace",
    "R13 toolcall_reformatted": "arguments are rendered in another form",
    "R14 toolcall_header_changed": "the text before the arguments differs",
    "R15 reasoning_field_split": "the server moved the reasoning out of the content",
    "R16 bos_duplicate": "BOS is in the recorded prompt twice, or missing",
    "R17 system_default_injected": "only one side has a default system prompt",
    "R18 date_injected": "the template prints a date",
    "R19 history_rewritten": "the messages before this turn differ from those that it followed",
    "R20 prefix_not_extended": "the prompt continues at a place where no turn ended",
    "R21 turn_separator_missing": "only one side has the line break after a turn",
    "R22 count_mismatch": "the numbers of tokens and logprobs differ",
    "R23 missing_logprob": "a logprob is null, NaN or -inf",
    "R24 invalid_logprob": "a logprob is positive or the -9999 sentinel, or the sum differs from the recorded one",
    "R25 vocab_out_of_range": "the model does not have an id of the tokens, the prompt or a sampling mask",
    "R26 tokenizer_mismatch": "ids do not spell the recorded text",
    "R27 normalizer_changed": "the tokenizer changes the text before it splits it",
    "R28 stream_incomplete": (
        "chunks are missing, according to their end, to the usage, or to ids that spell only a part of the "
        "text or of its calls; after a gap in the tokens, the turn and everything after it are not trained"
    ),
    "R29 multimodal_expansion": "placeholders of images were expanded",
    "R30 duplicate_generation": "a call was repeated, or listed twice",
    "R31 prompt_mismatch": "the prompt differs in another way, or is not recorded",
    "R32 media_in_prompt": (
        "an image that is not in the record, a sound or a video precedes the turn: kept, not trained"
    ),
    "R33 shared_bytes": "two entries have the recorded bytes (<0x20> and ▁)",
    "R34 picture_unplaced": "the ids of a prompt do not match its images: kept, not trained",
    "R35 picture_expanded": "a prompt was recorded as sent, with one id for each image",
    "R36 message_not_in_prompt": "the text of a message, of a tool call or of a tool result is missing from its prompt",
    "R37 filled_ids_differ": "the filled logprobs belong to other ids",
}
"""Meaning of each mismatch reason of the alignment report."""
TEXT_TRAINS = (
    "--objective TOPR_POSITIVE --text-only, or, on rewards of 0 and more, --objective WEIGHTED_SFT "
    "--advantage.baseline none --text-only"
)
"""Command-line options that train on text without logprobs: the two objectives that support it."""
ASSUMED_LEVELS = ("T4", "T5")
TEXT_ONLY = 6
FILLED = 7
NO_LEVEL = 255
MEDIA = tuple(map(_core.MISMATCH_REASONS.index, ("R32 media_in_prompt", "R34 picture_unplaced")))
LOGPROB_KINDS = ("unknown", "raw", "processed")
SERVERS = ("vllm", "sglang", "llama.cpp", "tgi", "openai")
ENDINGS = ("unknown", "ended", "cut")
TRUNCATED = ENDINGS.index("cut")
