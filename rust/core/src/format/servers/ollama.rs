//! Ollama's `/api/generate` and `/api/chat`: `{"response" | "message", "done", "logprobs": [{"token", "logprob",
//! "bytes"}]}`.
//!
//! Source: ollama 0.6.3 `_types.py` (the client) and ollama issue 13497: if a token is only a part of a character, its
//! `bytes` are those of U+FFFD. Such bytes are treated as unknown and reported. The kind of the logprobs is not
//! documented. `context` is not read, because it does not show which of its ids were sampled.

use super::interface::{
    CallContext, Decoded, Entry, Form, Outline, Request, Server, Shape, finish_under, sampling_under, spoken,
};
use crate::findings;
use crate::format::build::calls::chat_request;
use crate::format::build::message::{message_of, plain};
use crate::format::fields::{Fields, Sampling};
use crate::trace::{Generation, LogprobKind, Note, Pieces, Prompt};
use serde_json::Value;

pub(super) const SERVER: Server = Server {
    form: Form { name: "ollama", reason: "it has `done` beside `response` or `message`" },
    signs: &["done", "done_reason"],
    recognizes: |response| {
        let has_answer = response.is("response", Shape::Text) || response.is("message", Shape::Object);
        response.is("done", Shape::Bool) && has_answer
    },
    answer,
    request,
    defaults: Sampling::UNKNOWN,
};

/// The bytes that Ollama reports for a part of a character.
const REPLACEMENT: &[u8] = "\u{FFFD}".as_bytes();

fn answer(response: &Outline<'_>, context: &CallContext<'_>) -> Decoded<Entry> {
    let mut generation = context.generation(LogprobKind::Unknown);
    generation.tokens = response.logprobs("logprobs")?.unwrap_or_default();
    drop_replacement_bytes(&mut generation);
    generation.finish_reason = finish_under(response, "done_reason")?;
    let message = if let Some(message) = response.object("message")? {
        message_of(with_reasoning_key(message.fields_without(&["images"])?))?
    } else {
        let text = response.text("response")?.unwrap_or_default();
        let mut message = spoken(&text);
        if let Some(thinking) = response.text("thinking")?.filter(|thinking| !thinking.is_empty()) {
            message.value["reasoning_content"] = Value::String(thinking);
        }
        generation.text = Some(text);
        message
    };
    Ok(Entry::sampled(message, generation, 0))
}

/// Drops bytes that are U+FFFD, because they do not describe the token.
fn drop_replacement_bytes(generation: &mut Generation) {
    let Some(bytes) = &generation.tokens.bytes else { return };
    let mut result = Pieces::default();
    let mut lies = 0;
    for index in 0..bytes.len() {
        let piece = bytes.get(index).filter(|piece| memchr::memmem::find(piece, REPLACEMENT).is_none());
        lies += u32::from(piece.is_none() && bytes.get(index).is_some());
        result.push(piece);
    }
    if lies > 0 {
        generation.tokens.bytes = Some(result).filter(|result| result.known.contains(&true));
        let detail = format!("{lies} tokens are given the bytes of U+FFFD, which are not theirs");
        generation.notes.push(Note { reason: findings::Reason::LossyText, count: lies, detail });
    }
}

/// Renames `thinking` to the key that templates read.
fn with_reasoning_key(mut message: Fields) -> Fields {
    if let Some(thinking) = message.remove("thinking").filter(|thinking| thinking.as_str() != Some("")) {
        message.entry("reasoning_content").or_insert(thinking);
    }
    message.entry("role").or_insert_with(|| "assistant".into());
    message
}

/// Reads a request: `/api/chat` has `messages`; `/api/generate` has a `prompt`, which the server's template renders
/// unless `raw` is set.
fn request(request: &Outline<'_>) -> Decoded<Request> {
    let sampling = sampling_under(request, "options")?;
    if request.has("messages") {
        let mut chat = chat_request(request)?;
        for message in &mut chat.messages {
            if let Value::Object(fields) = &mut message.value {
                *fields = with_reasoning_key(std::mem::take(fields));
            }
        }
        return Ok(Request { sampling, ..chat });
    }
    let model = request.text("model")?;
    let prompt = request.text("prompt")?.unwrap_or_default();
    if request.value("raw")? == Some(Value::Bool(true)) {
        return Ok(Request { model, prompt: Prompt::Text(prompt), sampling, ..Request::default() });
    }
    let system = request.text("system")?.filter(|system| !system.is_empty());
    let system = system.map(|system| plain("system", system));
    let messages = system.into_iter().chain([plain("user", prompt)]).collect();
    Ok(Request { messages, model, sampling, ..Request::default() })
}
