//! The closed list of reasons for differences between recorded tokens and the trainer's, and the findings that use it.
//!
//! `format` reports how a recorder changed its data. `align` detects the rest.

/// One reason of the closed list. Its number is part of its name and never changes.
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
    FilledIdsDiffer,
}

/// Number and share of tokens that a server may count in usage without listing them, as observed.
pub const USAGE_SLACK: (u64, f64) = (2, 0.02);

/// Returns whether a list misses more tokens of the usage count than servers usually omit.
pub fn lists_fewer(listed: u64, counted: u64) -> bool {
    let gap = counted.saturating_sub(listed);
    gap > USAGE_SLACK.0 && gap as f64 > USAGE_SLACK.1 * counted as f64
}

/// Names of the reasons. Index 0 is unused, so that `NAMES[code]` is the name of `R<code>`.
pub const NAMES: [&str; 38] = [
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
    "R37 filled_ids_differ",
];

/// One finding: its place, the number of affected tokens, and the details.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Reason from the closed list.
    pub reason: Reason,
    /// Index of the generation in the trace; -1 if it concerns no single one.
    pub turn: i32,
    /// First affected token of the turn; -1 means unknown.
    pub token: i32,
    /// Number of affected tokens.
    pub count: i32,
    /// Details of the finding.
    pub detail: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_in_the_name_is_the_code() {
        assert_eq!(Reason::FilledIdsDiffer as usize, NAMES.len() - 1);
        for (code, name) in NAMES.iter().enumerate() {
            assert!(name.starts_with(&format!("R{code:02} ")), "{name}");
        }
        assert!(NAMES[Reason::TokenizerMismatch as usize].ends_with("tokenizer_mismatch"));
    }
}
