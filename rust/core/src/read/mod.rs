//! Streams of records: JSONL, a JSON array or pretty-printed objects; plain, gzip or zstd; a file or standard input.
//!
//! Memory is bounded by a chunk of records, which are parsed in parallel and given back in order, and by the longest record:
//! a longer one is never held whole. What a record means is decided in `format`.
//!
//! Its files, each using those before it alone: `waiting`, `source`, `held`, `events`, `nesting`, `split` (bytes to records);
//! `report`, `quarantine`, `outcome`, `plain`; `reader`, `cut`, `frames`; `write`.

mod cut;
mod events;
mod frames;
mod held;
mod nesting;
mod outcome;
mod plain;
mod quarantine;
mod reader;
mod report;
mod source;
mod split;
#[cfg(test)]
mod tests;
mod waiting;
mod write;

pub use cut::{Cut, Made};
pub use frames::{Frame, Frames};
pub use outcome::decode_all;
pub use plain::{open, plain};
pub use reader::{OnError, Options, Reader, read_all};
pub use report::Report;
pub use write::Writer;
