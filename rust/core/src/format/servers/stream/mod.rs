//! Streamed responses put together again: a list of chunks, or the text of server-sent events.
//!
//! A stream becomes the whole response that the server would have given without streaming, as JSON; that is then read by
//! the server's own reader. So a stream and its whole response give the same generation. The files, each using those
//! before it alone: `events`, `pieces`, `chat`, `typed`.

mod chat;
mod events;
mod pieces;
mod typed;

use crate::format::form::Form;
use crate::format::json::outline::{Outline, Shape};
use crate::format::rejection::{Decoded, Reason, Rejection, reject};
use crate::trace::Note;
pub(in super::super) use events::is_events;
use serde_json::value::RawValue;

pub(in super::super) const FORM: Form =
    Form { name: "stream", sign: "its response is a list of chunks or the text of events" };

/// The response that a stream stands for.
pub(in super::super) struct Whole {
    /// Its JSON.
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
        Kind::Chat => chat::assemble(&chunks, &mut notes)?,
        Kind::Completions => pieces::completions(&chunks, &mut notes)?,
        Kind::Responses => typed::responses(&chunks, &mut notes)?,
        Kind::Anthropic => typed::anthropic(&chunks, &mut notes)?,
        Kind::Sglang => pieces::sglang(&chunks, &events, choice)?,
        Kind::Tgi => pieces::tgi(&chunks, &mut notes)?,
        Kind::LlamaCpp => pieces::llama_cpp(&chunks, &mut notes)?,
        Kind::Ollama => pieces::ollama(&chunks, &mut notes)?,
        Kind::Gemini => pieces::gemini(&chunks, &mut notes)?,
        Kind::Whole(at) => events.get(at).cloned().unwrap_or_default(),
    };
    Ok(Whole { text, notes })
}

fn chunk(event: &str, at: usize) -> Decoded<Outline<'_>> {
    Outline::parse(event).map_err(|rejection| rejection.inside(format!("chunk {at}")))
}

/// Whose chunks they are.
enum Kind {
    Chat,
    Completions,
    Responses,
    Anthropic,
    Sglang,
    Tgi,
    LlamaCpp,
    Ollama,
    Gemini,
    /// A whole response in a list of its own.
    Whole(usize),
}

/// What one chunk tells; a chunk without choices tells nothing.
fn kind_of(chunk: &Outline<'_>) -> Option<Kind> {
    if let Some(choice) = chunk.objects("choices").ok().and_then(|choices| choices.into_iter().next()) {
        return Some(if choice.has("message") {
            Kind::Whole(0)
        } else if choice.names("delta") {
            Kind::Chat
        } else {
            Kind::Completions
        });
    }
    let event = chunk.text("type").ok().flatten().unwrap_or_default();
    if event.starts_with("response.") {
        return Some(Kind::Responses);
    }
    if ["message_start", "message_delta", "message_stop", "content_block_start", "content_block_delta"]
        .contains(&&*event)
    {
        return Some(Kind::Anthropic);
    }
    let found = [
        (chunk.is("meta_info", Shape::Object), Kind::Sglang),
        (chunk.is("token", Shape::Object), Kind::Tgi),
        (chunk.is("details", Shape::Object), Kind::Whole(0)),
        (chunk.is("done", Shape::Bool), Kind::Ollama),
        (chunk.is("candidates", Shape::List), Kind::Gemini),
        (chunk.is("content", Shape::Text) && chunk.names("stop"), Kind::LlamaCpp),
    ];
    found.into_iter().find_map(|(is, kind)| is.then_some(kind))
}

fn no_chunk(chunks: &[Outline<'_>]) -> Rejection {
    if chunks.iter().any(|chunk| chunk.has("error")) {
        return crate::format::normal::calls::no_response("the stream is an error");
    }
    let keys: Vec<&str> = chunks.first().map(|chunk| chunk.keys().collect()).unwrap_or_default();
    reject(Reason::UnknownForm, format!("a stream of {} chunks with the keys {}", chunks.len(), keys.join(", ")))
        .why("No known server streams so, and what the policy sampled cannot be read from it")
        .cure("See docs/trace-format.md for the servers whose streams are read")
}
