//! Why recorded tokens and the trainer's differ: a closed list, and the findings that use it.
//!
//! `format` notes what a recorder did to its numbers; `align` finds the rest.

/// One reason of the closed list. The number is part of the name and never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
#[allow(missing_docs, reason = "the names below are the documentation, one line each")]
pub enum Reason {
    NoncanonicalBpe = 1,
    PartialUtf8,
    LossyText,
    GlyphText,
    SpecialStripped,
    EosMissingInRecord,
    StopTokenDiffers,
    StopStringTruncated,
    LengthTruncated,
    ThinkStripped,
    ThinkInserted,
    WhitespaceTrimmed,
    ToolCallReformatted,
    ToolCallHeaderChanged,
    ReasoningFieldSplit,
    BosDuplicate,
    SystemDefaultInjected,
    DateInjected,
    HistoryRewritten,
    PrefixNotExtended,
    TurnSeparatorMissing,
    CountMismatch,
    MissingLogprob,
    InvalidLogprob,
    VocabOutOfRange,
    TokenizerMismatch,
    NormalizerChanged,
    StreamIncomplete,
    MultimodalExpansion,
    DuplicateGeneration,
    PromptMismatch,
    MediaInPrompt,
    SharedBytes,
    PictureUnplaced,
    PictureExpanded,
    MessageNotInPrompt,
}

/// Tokens, and share of them, that servers were seen to count in usage and not to list.
pub const USAGE_SLACK: (u64, f64) = (2, 0.02);

/// Whether a list of tokens lacks more of those that usage counts than servers leave out.
pub fn lists_fewer(listed: u64, counted: u64) -> bool {
    let gap = counted.saturating_sub(listed);
    gap > USAGE_SLACK.0 && gap as f64 > USAGE_SLACK.1 * counted as f64
}

/// Names of the reasons; index 0 is unused so that `NAMES[code]` is the name of `R<code>`.
pub const NAMES: [&str; 37] = [
    "R00 none",
    "R01 noncanonical_bpe",
    "R02 partial_utf8",
    "R03 lossy_text",
    "R04 glyph_text",
    "R05 special_stripped",
    "R06 eos_missing_in_record",
    "R07 stop_token_differs",
    "R08 stop_string_truncated",
    "R09 length_truncated",
    "R10 think_stripped",
    "R11 think_inserted",
    "R12 whitespace_trimmed",
    "R13 toolcall_reformatted",
    "R14 toolcall_header_changed",
    "R15 reasoning_field_split",
    "R16 bos_duplicate",
    "R17 system_default_injected",
    "R18 date_injected",
    "R19 history_rewritten",
    "R20 prefix_not_extended",
    "R21 turn_separator_missing",
    "R22 count_mismatch",
    "R23 missing_logprob",
    "R24 invalid_logprob",
    "R25 vocab_out_of_range",
    "R26 tokenizer_mismatch",
    "R27 normalizer_changed",
    "R28 stream_incomplete",
    "R29 multimodal_expansion",
    "R30 duplicate_generation",
    "R31 prompt_mismatch",
    "R32 media_in_prompt",
    "R33 shared_bytes",
    "R34 picture_unplaced",
    "R35 picture_expanded",
    "R36 message_not_in_prompt",
];

/// One finding: where, how many tokens, what was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Why.
    pub reason: Reason,
    /// Generation of the trace, -1 where it is not of one.
    pub turn: i32,
    /// First token of the turn it concerns, -1 unknown.
    pub token: i32,
    /// Tokens it concerns.
    pub count: i32,
    /// What was found.
    pub detail: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_in_the_name_is_the_code() {
        assert_eq!(Reason::MessageNotInPrompt as usize, NAMES.len() - 1);
        for (code, name) in NAMES.iter().enumerate() {
            assert!(name.starts_with(&format!("R{code:02} ")), "{name}");
        }
        assert!(NAMES[Reason::TokenizerMismatch as usize].ends_with("tokenizer_mismatch"));
    }
}
