//! JSON as records hold it: bytes to typed token lists and kept values, without knowing what a producer means by them.
//!
//! The bytes of a record become an `Object` (the OpenAI-shaped forms, typed while they are parsed) or an `Outline` (all
//! others: values read on demand), or a located rejection. Two readers share the work: `fast_scan` is fast and gives up
//! what it does not know, and `fallback` cuts a text into values that serde reads one by one, which says where one is wrong.

pub(super) mod diagnose;
mod fallback;
mod fast_scan;
pub(super) mod object;
pub(super) mod outline;
