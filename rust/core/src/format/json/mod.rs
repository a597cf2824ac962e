//! JSON as records hold it: bytes to typed token lists and kept values, without knowing what a producer means by them.
//!
//! In come the bytes of a record; out go an `Object` (the OpenAI-shaped forms, typed while they are parsed) or an `Outline`
//! (all others: values read on demand), or a located rejection. Two readers share the work: `scan` is fast and gives up what
//! it does not know, and `raw` cuts a text into values that serde reads one by one, which says where one is wrong. The
//! files, each using those before it alone: `numbers`, `listed`; `object`, `fields`, `scan`; `raw`, `logprobs`, `generic`,
//! `diagnose`; `outline`.

pub(super) mod diagnose;
pub(super) mod fields;
mod generic;
pub(super) mod listed;
mod logprobs;
pub(super) mod numbers;
pub(super) mod object;
pub(super) mod outline;
mod raw;
mod scan;
