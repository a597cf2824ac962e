//! Options of `align`, and what it says of a token: where it comes from and how exact it is.

use crate::sampling::{Defaults, TOP_P, left_out};
use crate::server::Server;
use crate::trace::{Generation, LogprobKind};

/// Which ids the sequences have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// Those that were sampled, between what the template supplies.
    #[default]
    Splice,
    /// Those of the rendered conversation, with the logprobs of the sampled tokens they are.
    Align,
}

/// What a rendered token gets that is several sampled ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Merge {
    /// Nothing: its own probability is not known.
    #[default]
    Mask,
    /// The sum of their logprobs: the probability of one way to write it.
    Sum,
}

/// What the caller decides.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools, reason = "independent choices of the caller")]
pub struct Options {
    /// Go on after an id that cannot be known, with the canonical tokens of its text, untrained.
    pub lenient: bool,
    /// Train on text without logprobs (T6): weighted fine-tuning.
    pub text_only: bool,
    /// Which ids the sequences have.
    pub mode: Mode,
    /// In align mode: what a rendered token gets that is several sampled ones.
    pub merge: Merge,
    /// In align mode: mask what follows the first token of a turn that is not the sampled one.
    pub strict: bool,
    /// Train on canonical tokens where only their number is recorded, with their text or without, and it fits (T4, T5).
    pub assume_canonical: bool,
    /// What the logprobs are of, where the record does not say or says it wrongly.
    pub logprob_kind: Option<LogprobKind>,
    /// Who rendered the prompts, over what the records say; `None` for what they say, and vLLM where they say nothing.
    pub server: Option<Server>,
    /// A trace that cannot be aligned: leave it out, counted, instead of raising.
    pub skip_errors: bool,
    /// What a server took where a request leaves something out; `None` takes what does nothing.
    pub sampling_defaults: Option<Defaults>,
}

impl Options {
    /// The temperature that a generation was sampled at, as far as it is known.
    pub fn temperature(&self, generation: &Generation) -> Option<f32> {
        let left_out = generation.left_out & left_out::TEMPERATURE != 0;
        let default = self.sampling_defaults.and_then(|defaults| defaults.temperature).filter(|_| left_out);
        default.or(generation.temperature)
    }

    /// Bits of the sampling options, in `sampling::OPTIONS`, under which it followed another distribution than that of its
    /// temperature.
    pub fn reshaped(&self, generation: &Generation) -> u32 {
        let says_top_p = generation.top_p.is_some() && generation.left_out & left_out::TOP_P == 0;
        let cut = generation.top_p.is_some_and(|top_p| top_p < 1.0);
        let own = generation.options.reshaped() | if cut { TOP_P } else { 0 };
        let named = generation.options.named() | if says_top_p { TOP_P } else { 0 };
        let asked = generation.left_out & left_out::REQUEST != 0;
        let defaults = self.sampling_defaults.filter(|_| asked).map_or(0, |defaults| defaults.reshaped);
        own | defaults & !named
    }
}

/// User, tool, system text; text copied from elsewhere.
pub const GIVEN: u8 = 0;
/// Role headers, separators, closers.
pub const TEMPLATE: u8 = 1;
/// Drawn from the policy.
pub const SAMPLED: u8 = 2;

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
