//! Exactness of a token, as `Sequences.tier` has it.

/// Prompt ids and completion ids recorded.
pub const IDS_AND_PROMPT: u8 = 0;
/// Completion ids recorded.
pub const IDS: u8 = 1;
/// The token's own bytes recorded, one vocabulary entry has them.
pub const BYTES: u8 = 2;
/// Text, or bytes shared by a run of tokens, that only one segmentation fits.
pub const TEXT: u8 = 3;
/// Text without tokens, canonical ids because the count fits: assumed, not known.
pub const ASSUMED: u8 = 4;
/// Logprobs without text: the count equals that of the canonical tokenization.
pub const COUNT: u8 = 5;
/// Text only.
pub const TEXT_ONLY: u8 = 6;
/// Not sampled.
pub const NONE: u8 = 255;
