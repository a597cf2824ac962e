//! What the caller decides.

use crate::server::Server;
use crate::trace::LogprobKind;

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
}
