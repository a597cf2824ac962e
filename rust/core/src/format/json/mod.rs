//! JSON as records hold it: bytes to typed token lists and kept values, without knowing what a producer means by them.
//!
//! In come the bytes of a record; out go an `Object` (the OpenAI-shaped forms, typed while they are parsed) or an `Outline`
//! (all others: values read on demand), or a located rejection. The files, each using those before it alone: `numbers`,
//! `listed`, `logprobs` (token lists); `object`, `fields`, `scan`, `diagnose`; `outline`.

pub(super) mod diagnose;
pub(super) mod fields;
mod listed;
pub(super) mod logprobs;
pub(super) mod numbers;
pub(super) mod object;
pub(super) mod outline;
mod scan;
