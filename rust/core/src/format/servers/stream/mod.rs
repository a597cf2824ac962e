//! Assembles streamed responses: a list of chunks, or the text of server-sent events.
//!
//! A stream becomes the JSON of the response that the server would have returned without streaming. The server's own
//! reader reads that JSON, so a stream and its unstreamed response produce the same generation. Servers that return `n`
//! complete responses in a list do not stream: one of them is read, the others are counted as unused choices.

mod chunks;
mod events;

pub(in super::super) use events::is_events;

use super::SERVERS;
use super::interface::{Decoded, Form, Outline, Reason, Rejection, Shape, reject};
use crate::format::build::calls::no_response;
use crate::format::build::message::no_choice;
use crate::trace::Note;
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::HashSet;

pub(in super::super) const FORM: Form =
    Form { name: "stream", reason: "its response is a list of chunks or the text of events" };

/// The complete response of a stream.
pub(in super::super) struct CompleteResponse {
    pub text: String,
    /// Number of the choice of `text` that was used, if the record contains it.
    pub choice: Option<i32>,
    /// Number of other complete responses that are ignored: the record names none, so the first was used.
    pub unused: u32,
    /// Observations about how the stream was recorded.
    pub notes: Vec<Note>,
}

/// Assembles a list of chunks or a text of events, or selects one of a list of complete responses. `choice` is the
/// number of the choice that was used, if the record contains it.
pub(in super::super) fn assemble(raw: &RawValue, choice: Option<i32>) -> Decoded<CompleteResponse> {
    let (events, mut notes) = events::read(raw)?;
    if events.len() > 1 {
        let answers = parsed(&events)?.into_iter().enumerate().filter(|(_, chunk)| !failed(chunk)).collect::<Vec<_>>();
        if are_whole(&answers) {
            let (at, choice, unused) = pick(&answers, choice)?;
            return Ok(CompleteResponse { text: events[at].clone(), choice, unused, notes });
        }
    }
    let events = events::without_repeats(events, &mut notes);
    let chunks = parsed(&events)?;
    let kind = chunks.iter().find_map(kind_of).ok_or_else(|| no_chunk(&chunks))?;
    let text = match kind {
        Kind::Parts(assemble) => assemble(&chunks, &mut notes)?,
        Kind::Sglang => chunks::sglang(&chunks, &events, choice)?,
        Kind::Whole if events.len() > 1 => {
            return Err(events::not_a_stream("some of its elements are whole responses"));
        }
        Kind::Whole => events.first().cloned().unwrap_or_default(),
    };
    Ok(CompleteResponse { text, choice, unused: 0, notes })
}

fn parsed(events: &[String]) -> Decoded<Vec<Outline<'_>>> {
    events.iter().enumerate().map(|(at, event)| chunk(event, at)).collect()
}

/// Returns whether these are complete responses and not parts of one.
///
/// Each must contain its end. Of responses whose choices may arrive in separate chunks, at least two must have the same
/// id and choice number.
fn are_whole(answers: &[(usize, Outline<'_>)]) -> bool {
    let mut keys = HashSet::new();
    let mut repeats = |answer: &Outline<'_>| !keys.insert(key_of(answer));
    answers.len() > 1
        && answers.iter().all(|(_, answer)| is_whole(answer))
        && (!is_piecewise(&answers[0].1) || answers.iter().any(|(_, answer)| repeats(answer)))
}

/// Returns whether the choices of such a stream may arrive complete, each in a separate chunk.
fn is_piecewise(answer: &Outline<'_>) -> bool {
    answer.first_of("choices").is_some_and(|choice| !choice.has("message"))
}

/// Returns the id of a chunk's stream, and the number of its choice.
fn key_of(answer: &Outline<'_>) -> (Option<String>, i32) {
    let index = answer.first_of("choices").and_then(|choice| choice.count("index").ok().flatten());
    (answer.text("id").ok().flatten(), index.unwrap_or(0))
}

/// Returns whether a response of any server is complete: it contains how it ended.
fn is_whole(answer: &Outline<'_>) -> bool {
    if let Some(choice) = answer.first_of("choices") {
        return choice.has("message") || !choice.has_key("delta") && choice.has("finish_reason");
    }
    let is_true = |key: &str| answer.value(key).ok().flatten() == Some(Value::Bool(true));
    match kind_of(answer) {
        Some(Kind::Sglang) => answer.object("meta_info").ok().flatten().is_some_and(|meta| meta.has("finish_reason")),
        Some(Kind::Whole) => true,
        Some(Kind::Parts(_)) => is_true("done") || is_true("stop") && !answer.has("token"),
        None => SERVERS.iter().any(|server| (server.recognizes)(answer)),
    }
}

/// Returns whether an element of a list contains only the error of a failed call.
fn failed(answer: &Outline<'_>) -> bool {
    answer.has("error") && answer.first_of("choices").is_none()
}

/// Returns the index of the response that contains choice `choice_number`, the choice's number in that response, and the
/// number of ignored choices.
fn pick(answers: &[(usize, Outline<'_>)], choice_number: Option<i32>) -> Decoded<(usize, Option<i32>, u32)> {
    let (mut before, first) = (0, choice_number.unwrap_or(0));
    let mut selected = None;
    for (at, answer) in answers {
        let choices = answer.objects("choices")?;
        let count = choices.len().max(1) as i32;
        if selected.is_none() && first < before + count {
            let inside = (first - before) as usize;
            let index = choices.get(inside).map_or(Ok(None), |choice| choice.count("index"))?;
            selected = Some((*at, (!choices.is_empty()).then(|| index.unwrap_or(inside as i32))));
        }
        before = before.saturating_add(count);
    }
    let (at, choice) = selected.ok_or_else(|| no_choice(first, before as usize, "choices"))?;
    Ok((at, choice, if choice_number.is_some() { 0 } else { (before - 1) as u32 }))
}

fn chunk(event: &str, at: usize) -> Decoded<Outline<'_>> {
    Outline::parse(event).map_err(|rejection| rejection.inside(format!("chunk {at}")))
}

/// Type of the chunks of a stream.
enum Kind {
    /// Parts of a response, with the function that assembles them.
    Parts(fn(&[Outline<'_>], &mut Vec<Note>) -> Decoded<String>),
    /// SGLang's chunks: parts, or each the complete text so far.
    Sglang,
    /// A complete response.
    Whole,
}

/// Returns the type that one chunk shows, if it has one. A chunk with an empty list of choices shows none.
fn kind_of(chunk: &Outline<'_>) -> Option<Kind> {
    if let Some(choice) = chunk.first_of("choices") {
        return Some(if choice.has("message") {
            Kind::Whole
        } else if choice.has_key("delta") {
            Kind::Parts(chunks::chat)
        } else {
            Kind::Parts(chunks::completions)
        });
    }
    let event = chunk.text("type").ok().flatten().unwrap_or_default();
    if event.starts_with("response.") {
        return Some(Kind::Parts(chunks::responses));
    }
    if ["message_start", "message_delta", "message_stop", "content_block_start", "content_block_delta"]
        .contains(&&*event)
    {
        return Some(Kind::Parts(chunks::anthropic));
    }
    let signs = [
        (chunk.is("meta_info", Shape::Object), Kind::Sglang),
        (chunk.is("token", Shape::Object), Kind::Parts(chunks::tgi)),
        (chunk.is("details", Shape::Object), Kind::Whole),
        (chunk.is("done", Shape::Bool), Kind::Parts(chunks::ollama)),
        (chunk.is("candidates", Shape::List), Kind::Parts(chunks::gemini)),
        (chunk.is("content", Shape::Text) && chunk.has_key("stop"), Kind::Parts(chunks::llama_cpp)),
    ];
    signs.into_iter().find_map(|(is, kind)| is.then_some(kind))
}

fn no_chunk(chunks: &[Outline<'_>]) -> Rejection {
    if chunks.iter().any(|chunk| chunk.has("error")) {
        return no_response("the stream is an error");
    }
    let keys: Vec<&str> = chunks.first().map(|chunk| chunk.keys().collect()).unwrap_or_default();
    reject(
        Reason::UnknownForm,
        "TG-FORMAT-057",
        format!("a stream of {} chunks with the keys {}", chunks.len(), keys.join(", ")),
    )
    .why("No supported server streams these keys, and the sampled tokens cannot be read from them")
    .fix("See docs/reference/trace-format.md for the servers whose streams are read")
}
