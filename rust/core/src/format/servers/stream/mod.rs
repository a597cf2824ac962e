//! Streamed responses put together again: a list of chunks, or the text of server-sent events.
//!
//! A stream becomes the whole response that the server would have given without streaming, as JSON; that is then read by
//! the server's own reader. So a stream and its whole response give the same generation. The files, each using those
//! before it alone: `pieces`, `events`, `chat`, `typed`.

mod chat;
mod events;
mod pieces;
mod typed;

use super::contract::{Decoded, Form, Outline, Reason, Rejection, Shape, reject};
use crate::format::normal::calls::no_response;
use crate::trace::Note;
pub(in super::super) use events::is_events;
use serde_json::value::RawValue;

pub(in super::super) const FORM: Form =
    Form { name: "stream", sign: "its response is a list of chunks or the text of events" };

/// The response that a stream stands for.
pub(in super::super) struct Whole {
    pub text: String,
    /// What was found about how it was recorded.
    pub notes: Vec<Note>,
}

/// Puts a list of chunks or a text of events together. `choice` is the one that is used, where the record says.
pub(in super::super) fn assemble(raw: &RawValue, choice: Option<i32>) -> Decoded<Whole> {
    let (events, mut notes) = events::read(raw)?;
    let chunks: Vec<Outline<'_>> =
        events.iter().enumerate().map(|(at, event)| chunk(event, at)).collect::<Decoded<_>>()?;
    let kind = chunks.iter().find_map(kind_of).ok_or_else(|| no_chunk(&chunks))?;
    let text = match kind {
        Kind::Parts(assemble) => assemble(&chunks, &mut notes)?,
        Kind::Sglang => pieces::sglang(&chunks, &events, choice)?,
        Kind::Whole => events.first().cloned().unwrap_or_default(),
    };
    Ok(Whole { text, notes })
}

fn chunk(event: &str, at: usize) -> Decoded<Outline<'_>> {
    Outline::parse(event).map_err(|rejection| rejection.inside(format!("chunk {at}")))
}

/// What chunks are.
enum Kind {
    /// Parts of a response, and what puts them together.
    Parts(fn(&[Outline<'_>], &mut Vec<Note>) -> Decoded<String>),
    /// SGLang's: parts, or each the whole so far.
    Sglang,
    /// A whole response in a list of its own.
    Whole,
}

/// What one chunk tells; a chunk without choices tells nothing.
fn kind_of(chunk: &Outline<'_>) -> Option<Kind> {
    if let Some(choice) = chunk.first_of("choices") {
        return Some(if choice.has("message") {
            Kind::Whole
        } else if choice.names("delta") {
            Kind::Parts(chat::assemble)
        } else {
            Kind::Parts(pieces::completions)
        });
    }
    let event = chunk.text("type").ok().flatten().unwrap_or_default();
    if event.starts_with("response.") {
        return Some(Kind::Parts(typed::responses));
    }
    if ["message_start", "message_delta", "message_stop", "content_block_start", "content_block_delta"]
        .contains(&&*event)
    {
        return Some(Kind::Parts(typed::anthropic));
    }
    let found = [
        (chunk.is("meta_info", Shape::Object), Kind::Sglang),
        (chunk.is("token", Shape::Object), Kind::Parts(pieces::tgi)),
        (chunk.is("details", Shape::Object), Kind::Whole),
        (chunk.is("done", Shape::Bool), Kind::Parts(pieces::ollama)),
        (chunk.is("candidates", Shape::List), Kind::Parts(pieces::gemini)),
        (chunk.is("content", Shape::Text) && chunk.names("stop"), Kind::Parts(pieces::llama_cpp)),
    ];
    found.into_iter().find_map(|(is, kind)| is.then_some(kind))
}

fn no_chunk(chunks: &[Outline<'_>]) -> Rejection {
    if chunks.iter().any(|chunk| chunk.has("error")) {
        return no_response("the stream is an error");
    }
    let keys: Vec<&str> = chunks.first().map(|chunk| chunk.keys().collect()).unwrap_or_default();
    reject(Reason::UnknownForm, format!("a stream of {} chunks with the keys {}", chunks.len(), keys.join(", ")))
        .why("No known server streams so, and what the policy sampled cannot be read from it")
        .cure("See docs/trace-format.md for the servers whose streams are read")
}
