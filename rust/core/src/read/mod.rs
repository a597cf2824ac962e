//! Streams of records: JSONL, a JSON array or pretty-printed objects; plain, gzip or zstd; a file or standard input.
//!
//! Memory is bounded by a chunk of records, which are parsed in parallel and given back in order, and by the longest record:
//! a longer one is never held whole. What a record means is decided in `format`.

mod buffer;
mod frames;
mod needs_adapter;
mod quarantine;
mod reader;
mod source;
mod split;
#[cfg(test)]
mod tests;
mod write;

pub use frames::{Frame, Frames};
pub use needs_adapter::{open, plain};
pub use reader::{Cut, Made, OnError, Options, Reader, Report, decode_all, read_all};
pub use write::Writer;
