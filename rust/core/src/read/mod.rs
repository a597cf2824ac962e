//! Streams of records: JSONL, a JSON array or pretty-printed objects; plain, gzip or zstd; from a file or standard
//! input.
//!
//! A chunk of records is parsed in parallel and returned in order. Memory is bounded by the size of a chunk plus the
//! longest allowed record; a longer record is never completely in memory. The module `format` defines the meaning of a
//! record.

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
pub use needs_adapter::{needs_no_adapter, unanswered_traces};
pub use reader::{Converted, OnError, Options, RawRecord, Reader, Report, decode_all, read_all};
pub use write::Writer;
