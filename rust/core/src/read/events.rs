//! Server-sent events among the lines of a file: one stream is one record.
//!
//! It begins with a line that is a field of an event, and ends with `data: [DONE]`, before a line that is an object or begins another
//! stream, or with the file. Its record is `{"response": "its text"}`: a record is one line of JSON, and nothing of the
//! stream is lost in it.

use std::sync::Arc;

/// How the lines of an event stream begin.
const FIELDS: [&[u8]; 5] = [b"data:", b"event:", b"id:", b"retry:", b":"];

/// Events that only stand at the beginning of a stream.
const FIRST: [&[u8]; 2] = [b"event: message_start", b"event: response.created"];

/// Whether a line is a field of an event.
pub(super) fn is_field(line: &[u8]) -> bool {
    FIELDS.iter().any(|field| line.starts_with(field))
}

/// Whether a line says that the stream has ended.
pub(super) fn is_done(line: &[u8]) -> bool {
    line.strip_prefix(b"data:").is_some_and(|data| data.trim_ascii() == b"[DONE]")
}

/// Whether a line in a stream is not of it.
pub(super) fn begins_another(line: &[u8]) -> bool {
    line.starts_with(b"{") || FIRST.contains(&line.trim_ascii_end())
}

/// The record of a stream; bytes that are not UTF-8 stay as they are, and are refused as such.
pub(super) fn record(stream: &[u8]) -> Arc<[u8]> {
    let Ok(text) = std::str::from_utf8(stream) else { return stream.into() };
    format!("{{\"response\":{}}}", serde_json::Value::from(text)).into_bytes().into()
}
