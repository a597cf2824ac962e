//! Converts recorded LLM trajectories to exactly aligned token arrays.
//!
//! Pure Rust: no Python, no network, no torch. [`read`] and [`format`] decode bytes into [`trace::Trace`]s.
//! [`template`] and [`tokenizer`] supply the text and the ids that were not sampled. [`align`] determines one source
//! for every token, [`ratio`] computes detached weights, and [`pack`] packs traces into rows.
#![deny(unsafe_code)]

pub mod align;
mod cache;
pub mod cancel;
pub mod error;
mod files;
pub mod findings;
pub mod format;
pub mod images;
pub mod json_number;
mod media;
pub mod pack;
mod panic;
pub mod pool;
pub mod ratio;
pub mod read;
pub mod record_bytes;
pub mod sampling;
pub mod server;
pub mod template;
pub mod token_sets;
pub mod tokenizer;
pub mod trace;

pub use error::{Error, Kind, Location, RecordPlace, Result};
pub use panic::catch_panic;
