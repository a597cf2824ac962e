//! Reads the JSON of records into typed token lists and unchanged values. Their meaning is defined elsewhere.
//!
//! A record in an OpenAI-shaped form becomes an `Object`, typed during parsing. A record in any other form becomes an
//! `Outline`, whose values are read on demand. An invalid record becomes a located rejection.
//!
//! There are two readers: `fast_scan` is fast and gives up on text that it does not support. `fallback` splits a text
//! into values that serde reads one by one, and reports which value is wrong.

pub(super) mod diagnose;
mod fallback;
mod fast_scan;
pub(super) mod object;
pub(super) mod outline;
