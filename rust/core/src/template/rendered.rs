//! Rendered text with provenance spans: which bytes are content, and of which message.

use std::sync::Arc;

/// `Span::message` of spans that belong to no message.
pub const NO_MESSAGE: u32 = u32::MAX;

/// The field whose content a span is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Field {
    /// `content`, or the text parts of it.
    Content = 0,
    /// Name and arguments in `tool_calls`.
    ToolCall = 1,
    /// `reasoning_content`, `thinking` or `reasoning`.
    Reasoning = 2,
    /// Tool schemas; `message` is [`NO_MESSAGE`].
    ToolSchema = 3,
}

/// Bytes of rendered text that are content of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
    /// Index of the message, or [`NO_MESSAGE`].
    pub message: u32,
    /// The field of the message.
    pub field: Field,
}

/// A conversation as text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The text that the model reads. It is shared, because it may be long.
    pub text: Arc<str>,
    /// Byte ranges of content, sorted and disjoint. Every other byte belongs to the template, including bare numbers,
    /// roles and ids.
    pub spans: Vec<Span>,
    /// Byte ranges that `{% generation %}` encloses, sorted.
    pub generation: Vec<(usize, usize)>,
    /// False if the template splits or tests strings, so that some span was found by searching or not at all.
    pub exact_provenance: bool,
}
