//! Recorded formats: one small file for each. All are converted to the common form of `trace`.
//!
//! To add a format of complete trajectories, write a file in `trajectories` that fills in `trajectories::interface`,
//! and add its line to the table of `trajectories`. For a server's responses do the same in `servers`.
//! examples/extending/format.patch is an example.
//!
//! The bytes of a record become a `Trace` with the name of its form, or a located rejection. This file decides whether
//! a record is OpenAI-shaped (`chat`, `native`, and the logs of `build::calls`) or another producer's (`detect`). The
//! bytes come from `read`. No code here uses files, templates or tokenizers. docs/reference/trace-format.md is the specification.

mod build;
mod call;
mod chat;
mod detect;
mod fields;
mod filled;
mod form;
mod json;
mod native;
mod rejection;
mod servers;
#[cfg(test)]
mod tests;
mod token_list;
mod trajectories;

pub(crate) use detect::is_recorders;
pub use form::Form;
pub(crate) use rejection::reject;
pub use rejection::{Decoded, Reason, Rejection};

use crate::error::Location;
use crate::images::Image;
use crate::media;
use crate::record_bytes::Raw;
use crate::trace::Trace;
use build::message::fill;
use build::{Body, calls};
use detect::ProducerRecord;
use fields::{Header, get, not_finite};
use json::diagnose;
use json::object::Object;
use serde_json::Value;

/// A decoded record.
#[derive(Debug)]
pub struct Record {
    /// The trace.
    pub trace: Trace,
    /// The form that the record had.
    pub form: Form,
    /// Number of ignored choices of its responses: the record names none as chosen, so the first was used.
    pub unused_choices: u32,
}

/// Decodes one record: the bytes of one JSON object. The trace refers to them by `raw`.
///
/// The result does not depend on other records. `place` is the file and line for errors, and for the id of a record
/// without one. `format_name` is the name of the form to read; `None` detects the form from the structure.
pub fn decode(record: &[u8], raw: Raw, place: &Location, format_name: Option<&str>) -> Decoded<Record> {
    let mut place = place.clone();
    let mut media_left_out = None;
    let (form, header, body) = match parse(record, format_name) {
        Ok(Parsed::Foreign(foreign)) => {
            let mut body = foreign.body;
            if media::may_contain_media(record) {
                let value = serde_json::from_str(&diagnose::text(record)?).unwrap_or_default();
                if let Some(images) = media::list_of(&value) {
                    fill(&mut body.messages, &images);
                }
                media_left_out = media::missing_media(&value, &body.messages);
            }
            Ok((foreign.form, foreign.header, body))
        }
        Ok(Parsed::Shaped(object)) => {
            media_left_out = media::column_of(&object.fields).map(str::to_owned);
            let images = media_left_out.as_ref().and_then(|_| media::list_in(&object.fields));
            let read = decode_shaped(*object, record, format_name, &mut place);
            read.map(|(form, header, mut body)| {
                if images.is_some_and(|images| fill(&mut body.messages, &images)) {
                    media_left_out = None;
                }
                (form, header, body)
            })
        }
        Err(rejection) => Err(rejection),
    }
    .map_err(|rejection| rejection.at(&place))?;
    let unused_choices = body.unused_choices;
    let mut trace = Trace { missing_media: media_left_out, ..assemble(header, body, raw, place) };
    filled::read(record, &mut trace.generations).map_err(|rejection| rejection.at(&trace.location))?;
    check_finite(&trace).map_err(|rejection| rejection.at(&trace.location))?;
    Ok(Record { trace, form, unused_choices })
}

/// Rejects numbers that a sum, a product or the conversion to float32 made infinite, in any form.
fn check_finite(trace: &Trace) -> Decoded<()> {
    let rewards = trace.rewards.iter().map(|(name, value)| (name.as_str(), Some(*value)));
    let messages = trace.messages.iter().map(|message| ("reward", message.reward));
    let sampling = trace.generations.iter().flat_map(|g| [("temperature", g.temperature), ("top_p", g.top_p)]);
    let mut numbers = [("reward", trace.reward)].into_iter().chain(rewards).chain(messages).chain(sampling);
    let infinite =
        numbers.find_map(|(name, value)| value.filter(|value| value.is_infinite()).map(|value| (name, value)));
    infinite.map_or(Ok(()), |(name, value)| Err(not_finite(name, value.into())))
}

/// A parsed record, by the kind of its reader.
enum Parsed {
    Shaped(Box<Object>),
    Foreign(Box<ProducerRecord>),
}

fn parse(record: &[u8], format_name: Option<&str>) -> Decoded<Parsed> {
    let shaped = format_name.is_none_or(|name| form::SHAPED.iter().any(|form| form.name == name));
    let object = if shaped { Some(diagnose::parse(record, detect::is_sign)) } else { None };
    let native = |object: &Object| get(&object.fields, "format").is_some_and(|name| name == native::NAME);
    let plain =
        |object: &Object| format_name.is_some() || native(object) || !object.has_sign && object.is_chat_completion();
    let foreign = |foreign| Parsed::Foreign(Box::new(foreign));
    match object {
        Some(Ok(object)) if plain(&object) => Ok(Parsed::Shaped(Box::new(object))),
        Some(Ok(object)) => {
            let foreign_record = detect::decode(&diagnose::text(record)?, format_name)?;
            Ok(foreign_record.map_or_else(|| Parsed::Shaped(Box::new(object)), foreign))
        }
        Some(Err(rejection)) if rejection.reason == Reason::WrongType => {
            // A producer may use one of these keys for something else.
            let text = diagnose::text(record)?;
            if let Some(dumped) = detect::recognized_format(&text).filter(|_| format_name.is_none()) {
                return dumped.map(foreign);
            }
            detect::decode(&text, format_name).ok().flatten().map(foreign).ok_or(rejection)
        }
        Some(Err(rejection)) => Err(rejection),
        None => detect::decode(&diagnose::text(record)?, format_name)?.map(foreign).ok_or_else(|| unknown_form(record)),
    }
}

fn decode_shaped(
    mut object: Object,
    record: &[u8],
    format_name: Option<&str>,
    place: &mut Location,
) -> Decoded<(Form, Header, Body)> {
    let header = Header::read(&object.fields, object.tools.clone())?;
    place.trace.clone_from(&header.id);
    let form = detect(&object, record)?;
    if let Some(name) = format_name.filter(|name| *name != form.name) {
        let what = format!("the form is {} because {}, not {name}", form.name, form.reason);
        return Err(reject(Reason::UnknownForm, "TG-FORMAT-041", what)
            .why("A record of another form would be misread")
            .fix("Read it with format=\"auto\", or name its own form"));
    }
    let body = match form {
        form::NATIVE => native::decode(&mut object, &header.sampling),
        form::CHAT => chat::decode(&mut object, &header.sampling),
        form::CALLS => calls::decode(&mut object, &header),
        form::CALL => calls::decode_single(object, &header),
        _ => calls::decode_response(object, &header),
    }?;
    Ok((form, header, body))
}

/// Returns all forms that can be read: the names that `format=` accepts.
pub fn forms() -> impl Iterator<Item = Form> {
    form::SHAPED.into_iter().chain(detect::forms())
}

/// Returns the OpenAI-shaped form of a record. `Form::reason` is the reason for the choice.
fn detect(object: &Object, record: &[u8]) -> Decoded<Form> {
    match get(&object.fields, "format").and_then(Value::as_str) {
        Some(native::NAME) => return Ok(form::NATIVE),
        Some(other) if other.starts_with("tracegrad/") => return Err(unknown_version(other)),
        _ => {}
    }
    if object.has_list("calls") {
        return Ok(form::CALLS);
    }
    if object.has("messages") && object.has_object("response") && !object.has("request") {
        return Err(reject(Reason::UnknownForm, "TG-FORMAT-042", "the record has both `messages` and `response`")
            .why("It is ambiguous whether the response is among the messages")
            .fix("Put the messages under `request`: {\"request\": {\"messages\": ...}, \"response\": ...}"));
    }
    if object.has("messages") {
        return Ok(form::CHAT);
    }
    if object.has("request") && object.has("response") {
        return Ok(form::CALL);
    }
    if object.has("choices") {
        return Ok(form::RESPONSE);
    }
    if object.has("calls") { Ok(form::CALLS) } else { Err(unknown_form(record)) }
}

fn unknown_version(version: &str) -> Rejection {
    reject(
        Reason::UnknownForm,
        "TG-FORMAT-043",
        format!("`format` is \"{version}\", and this version reads {}", native::NAME),
    )
    .why("A field may mean something else there")
    .fix("Update tracegrad, or write the record as tracegrad/1")
}

fn unknown_form(record: &[u8]) -> Rejection {
    let keys = diagnose::keys(record);
    let description = if keys.is_empty() { "no key".to_owned() } else { format!("the keys {}", keys.join(", ")) };
    reject(Reason::UnknownForm, "TG-FORMAT-044", format!("a record with {description}"))
        .why("None of messages, calls, request with response, or choices is there, so it is in no accepted form")
        .fix("See docs/reference/trace-format.md for the accepted forms")
}

fn assemble(header: Header, mut body: Body, raw: Raw, place: Location) -> Trace {
    body.take_greetings();
    let mut template_kwargs = body.template_kwargs;
    let mut generations = body.generations;
    for generation in &mut generations {
        generation.server = header.server.or(generation.server);
        // Template variables of the record override those of its requests.
        if let Some(request) = &mut generation.request {
            request.retain(|key, _| !header.template_kwargs.contains_key(key));
        }
    }
    template_kwargs.extend(header.template_kwargs);
    let id = header.id.unwrap_or_else(|| place.to_string());
    let location = Location { trace: Some(id.clone()), ..place };
    let mut images: Vec<Image> = Vec::new();
    for image in body.messages.iter().flat_map(|message| &message.images) {
        if !images.iter().any(|other| other.digest == image.digest) {
            images.push(image.clone());
        }
    }
    Trace {
        id,
        location,
        group: header.group,
        reward: header.reward,
        rewards: header.rewards,
        messages: body.messages,
        generations,
        conversation: body.conversation,
        tools: header.tools.or(body.tools),
        template_kwargs,
        model: header.model.or(body.model),
        images,
        missing_media: None,
        raw,
    }
}
