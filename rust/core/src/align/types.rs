//! Options of `align`, and the codes that describe a token: its source and its alignment level.

use crate::sampling::{Defaults, TOP_P, omitted};
use crate::server::Server;
use crate::trace::{Generation, LogprobKind};

/// The ids that the sequences consist of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// The sampled ids, and the template's ids between them.
    #[default]
    Splice,
    /// The ids of the rendered conversation, with the logprobs of the matching sampled tokens.
    Align,
}

/// The logprob of a rendered token that covers several sampled ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Merge {
    /// None: the token is masked, because its own probability is unknown.
    #[default]
    Mask,
    /// The sum of their logprobs, which is the probability of one way to write it.
    Sum,
}

/// Options set by the caller.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools, reason = "independent choices of the caller")]
pub struct Options {
    /// Continue after an unknown id with the canonical tokens of its text, untrained.
    pub allow_unknown_ids: bool,
    /// Train on text without logprobs (T6), as in weighted fine-tuning.
    pub text_only: bool,
    /// The ids that the sequences consist of.
    pub mode: Mode,
    /// In align mode: the logprob of a rendered token that covers several sampled ones.
    pub merge: Merge,
    /// In align mode: mask all tokens of a turn after the first one that differs from the sampled one.
    pub strict: bool,
    /// Train on canonical tokens if only the number of tokens is recorded, with or without their text, and it matches
    /// (T4, T5).
    pub assume_canonical: bool,
    /// The kind of the logprobs, if the record does not specify it or specifies it wrongly.
    pub logprob_kind: Option<LogprobKind>,
    /// The server that rendered the prompts; overrides the records. With `None` the records decide, and vLLM is
    /// assumed if they do not specify it.
    pub server: Option<Server>,
    /// Leave out and count a trace that cannot be aligned, instead of returning an error.
    pub skip_errors: bool,
    /// The server's defaults for options that a request leaves out. `None` assumes neutral defaults.
    pub sampling_defaults: Option<Defaults>,
}

impl Options {
    /// Returns the temperature at which a generation was sampled, if it is known.
    pub fn temperature(&self, generation: &Generation) -> Option<f32> {
        let is_omitted = generation.omitted & omitted::TEMPERATURE != 0;
        let default = self.sampling_defaults.and_then(|defaults| defaults.temperature).filter(|_| is_omitted);
        default.or(generation.temperature)
    }

    /// Returns the kind of a generation's logprobs. Those over a sampling mask are always of the sampled distribution.
    pub fn kind(&self, generation: &Generation) -> LogprobKind {
        let stated = self.logprob_kind.unwrap_or(generation.logprob_kind);
        generation.replayed.map_or(stated, |_| LogprobKind::Processed)
    }

    /// Returns the bits (of `sampling::OPTIONS`) of the sampling options that changed the distribution beyond the
    /// temperature.
    pub fn changed_sampling_options(&self, generation: &Generation) -> u32 {
        let sets_top_p = generation.top_p.is_some() && generation.omitted & omitted::TOP_P == 0;
        let truncates = generation.top_p.is_some_and(|top_p| top_p < 1.0);
        let recorded = generation.options.active_bits() | if truncates { TOP_P } else { 0 };
        let set_in_request = generation.options.bits() | if sets_top_p { TOP_P } else { 0 };
        let request_recorded = generation.omitted & omitted::REQUEST != 0;
        let defaults = self.sampling_defaults.filter(|_| request_recorded).map_or(0, |defaults| defaults.active_bits);
        recorded | defaults & !set_in_request
    }
}

/// User, tool and system text, and text copied from other sources.
pub const PROMPT: u8 = 0;
/// Role headers, separators and closers.
pub const TEMPLATE: u8 = 1;
/// Sampled from the policy.
pub const SAMPLED: u8 = 2;

/// Prompt ids and completion ids are recorded.
pub const IDS_AND_PROMPT: u8 = 0;
/// Completion ids are recorded.
pub const IDS: u8 = 1;
/// The token's own bytes are recorded, and one vocabulary entry has them.
pub const BYTES: u8 = 2;
/// Text, or bytes shared by a run of tokens, that only one segmentation fits.
pub const TEXT: u8 = 3;
/// Text without tokens. The canonical ids are assumed because their count matches.
pub const ASSUMED_TEXT: u8 = 4;
/// Logprobs without text. Their count matches the count of the canonical tokens.
pub const ASSUMED_LENGTH: u8 = 5;
/// Text only.
pub const TEXT_ONLY: u8 = 6;
/// The logprob was not recorded but measured afterwards.
pub const FILLED: u8 = 7;
/// Not sampled.
pub const NONE: u8 = 255;
