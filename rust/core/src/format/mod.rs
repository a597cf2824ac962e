//! Recorded formats: one small file each, all read into the one normal form of `trace`.
//!
//! `detect` says which form a record has and why; `decode` reads it. Bytes come from `read`; nothing here touches
//! files, templates or tokenizers. docs/trace-format.md is the specification.

mod body;
mod calls;
mod chat;
mod diagnose;
mod fields;
mod history;
mod logprobs;
mod message;
mod native;
mod numbers;
mod object;
mod rejection;
#[cfg(test)]
mod tests;

use crate::error::Location;
use crate::trace::Trace;
use body::Body;
use fields::Header;
use object::Object;
pub(crate) use rejection::reject;
pub use rejection::{Decoded, Reason, Rejection};
use serde_json::Value;
use std::sync::Arc;

/// The accepted forms of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Form {
    /// `{"format": "tracegrad/1", "messages": [...]}`
    Native,
    /// `{"calls": [{"request", "response"}, ...]}`
    Calls,
    /// `{"messages": [...]}`
    Chat,
    /// `{"request", "response"}`
    Call,
    /// `{"choices": [...], "prompt_token_ids": [...]}`
    Response,
}

/// A decoded record.
#[derive(Debug)]
pub struct Record {
    /// The trace.
    pub trace: Trace,
    /// The form it had.
    pub form: Form,
    /// Choices of its responses that were not used, because the record names none and the first was taken.
    pub unused_choices: u32,
}

/// Reads one record: the bytes of one JSON object.
///
/// Raises nothing that depends on other records. `place` gives the file and line for errors and for the id of a record
/// that has none.
pub fn decode(record: &Arc<[u8]>, place: &Location) -> Decoded<Record> {
    let object = diagnose::parse(record).map_err(|rejection| rejection.at(place))?;
    let mut place = place.clone();
    let decoded = Header::read(&object.fields).and_then(|header| {
        place.trace.clone_from(&header.id);
        let form = detect(&object, record)?;
        let body = decode_form(form, object, &header)?;
        Ok((form, header, body))
    });
    let (form, header, body) = decoded.map_err(|rejection| rejection.at(&place))?;
    let unused_choices = body.unused_choices;
    Ok(Record { trace: assemble(header, body, record, place), form, unused_choices })
}

fn decode_form(form: Form, mut object: Object, header: &Header) -> Decoded<Body> {
    match form {
        Form::Native => native::decode(&mut object, &header.sampling),
        Form::Chat => chat::decode(&mut object, &header.sampling),
        Form::Calls => calls::decode(&mut object, header),
        Form::Call => calls::decode_single(object, header),
        Form::Response => calls::decode_response(object, header),
    }
}

impl Form {
    /// The sign by which the form is known.
    pub fn sign(self) -> &'static str {
        match self {
            Self::Native => "`format` is tracegrad/1",
            Self::Calls => "it has `calls`",
            Self::Chat => "it has `messages`",
            Self::Call => "it has `request` and `response`",
            Self::Response => "it has `choices`",
        }
    }
}

/// Which form a record has; `Form::sign` says why.
fn detect(object: &Object, record: &[u8]) -> Decoded<Form> {
    match object.fields.get("format").and_then(Value::as_str) {
        Some(native::NAME) => return Ok(Form::Native),
        Some(other) if other.starts_with("tracegrad/") => return Err(unknown_version(other)),
        _ => {}
    }
    if object.has_list("calls") {
        return Ok(Form::Calls);
    }
    if object.has("messages") && object.has_object("response") && !object.has("request") {
        return Err(reject(Reason::UnknownForm, "the record has both `messages` and `response`")
            .why("Whether the response is among the messages cannot be known")
            .cure("Put the messages under `request`: {\"request\": {\"messages\": ...}, \"response\": ...}"));
    }
    if object.has("messages") {
        return Ok(Form::Chat);
    }
    if object.has("request") && object.has("response") {
        return Ok(Form::Call);
    }
    if object.has("choices") {
        return Ok(Form::Response);
    }
    if object.has("calls") { Ok(Form::Calls) } else { Err(unknown_form(record)) }
}

fn unknown_version(version: &str) -> Rejection {
    reject(Reason::UnknownForm, format!("`format` is \"{version}\", and this version reads {}", native::NAME))
        .why("A field may mean something else there")
        .cure("Update tracegrad, or write the record as tracegrad/1")
}

fn unknown_form(record: &[u8]) -> Rejection {
    let keys = diagnose::keys(record);
    let found = if keys.is_empty() { "no key".to_owned() } else { format!("the keys {}", keys.join(", ")) };
    reject(Reason::UnknownForm, format!("a record with {found}"))
        .why("None of messages, calls, request with response, or choices is there, so it is in no accepted form")
        .cure("See docs/trace-format.md for the accepted forms")
}

fn assemble(header: Header, body: Body, record: &Arc<[u8]>, place: Location) -> Trace {
    let mut template_kwargs = body.template_kwargs;
    template_kwargs.extend(header.template_kwargs);
    let id = header.id.unwrap_or_else(|| place.to_string());
    let location = Location { trace: Some(id.clone()), ..place };
    Trace {
        id,
        location,
        group: header.group,
        reward: header.reward,
        rewards: header.rewards,
        messages: body.messages,
        generations: body.generations,
        conversation: body.conversation,
        tools: header.tools.or(body.tools),
        template_kwargs,
        model: header.model.or(body.model),
        record: Arc::clone(record),
    }
}
