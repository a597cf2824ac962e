//! Recorded LLM trajectories become exactly aligned token arrays.
//!
//! Pure Rust: no Python, no network, no torch. The walk: [`read`] turns bytes into [`trace::Trace`]s through
//! [`format`], [`template`] and [`tokenizer`] supply the text and ids that were not sampled, [`align`] gives every
//! token one source, [`ratio`] computes detached weights, [`pack`] lays traces into rows.
#![deny(unsafe_code)]

pub mod align;
mod caught;
pub mod drift;
pub mod error;
pub mod exact;
mod files;
pub mod format;
mod generations;
mod media;
pub mod pack;
pub mod pictures;
pub mod ratio;
pub mod raw;
pub mod read;
pub mod sampling;
pub mod server;
pub mod stop;
pub mod template;
pub mod threads;
pub mod tokenizer;
pub mod trace;
mod written;

pub use caught::caught;
pub use error::{At, Error, Kind, Location, Result};
