//! Detects the producer of a record, and reads the record's header and body with that producer's reader.
//!
//! The tables of recorders and servers are searched in their order. The first entry that recognises a record reads it.

use super::build::Body;
use super::build::calls::Log;
use super::call::{add_call, choose, read_response, server_of};
use super::fields::{Fields, HEADER_KEYS, Header};
use super::form::{CALL, CALLS, Form};
use super::json::outline::{Outline, Shape};
use super::rejection::{Decoded, Reason, Rejection, reject};
use super::servers::interface::{CallContext, sampling_of};
use super::servers::{SERVERS, stream};
use super::trajectories::DUMPS;
use super::trajectories::interface::TrajectoryFormat;

/// A record decoded by a producer's own reader.
pub(super) struct ProducerRecord {
    pub form: Form,
    pub header: Header,
    pub body: Body,
}

/// Returns whether a top-level key may be a producer's sign, so that the tables must be searched.
pub(super) fn is_sign(key: &str) -> bool {
    DUMPS.iter().any(|dump| dump.signs.contains(&key)) || SERVERS.iter().any(|server| server.signs.contains(&key))
}

/// Reads a record in the form `format_name`, or in the first form that recognises it. Returns `None` if none does.
pub(super) fn decode(text: &str, format_name: Option<&str>) -> Decoded<Option<ProducerRecord>> {
    let outline = Outline::parse(text)?;
    if let Some(dump) = choose(DUMPS, format_name, &outline, |dump| dump.form, |dump| dump.recognizes) {
        return decode_dump(dump, &outline).map(Some);
    }
    let header = header_of(&outline)?;
    let choice = outline.count("choice")?;
    let mut log = Log::new(&header, choice);
    let form = if outline.is("calls", Shape::List) {
        let mut form = CALLS;
        for (turn, call) in outline.objects("calls")?.iter().enumerate() {
            let place = |rejection: Rejection| rejection.inside(format!("calls[{turn}]")).in_turn(turn);
            form = add_call(&mut log, call, choice, format_name).map_err(place)?.unwrap_or(form);
        }
        form
    } else if is_call(&outline) {
        add_call(&mut log, &outline, choice, format_name)?.unwrap_or(CALL)
    } else if outline.has("messages") {
        return Ok(None);
    } else if let Some(server) = server_of(&outline, format_name)? {
        let sampling = sampling_of(&outline, "top_p").unwrap_or_default().or(&header.sampling);
        let context = CallContext { choice, sampling: &sampling, request: None };
        log.add(read_response(server, None, &outline, &context, None)?)?;
        server.form
    } else {
        return Ok(None);
    };
    let body = log.finish()?;
    Ok(Some(ProducerRecord { form, header, body }))
}

/// Returns whether a record is one call: a response with its request, or a response that can be nothing else.
fn is_call(outline: &Outline<'_>) -> bool {
    let is_complete = match outline.get("response").map(Shape::of) {
        Some(Shape::Object | Shape::List) => true,
        Some(Shape::Text) => outline.text("response").ok().flatten().is_some_and(|text| stream::is_events(&text)),
        _ => false,
    };
    outline.has("response")
        && (outline.has("request") || is_complete && !outline.has("done") && !outline.has("messages"))
}

/// Reads a record with the first recorder that recognises it. Returns `None` if none does.
pub(super) fn recognized_format(text: &str) -> Option<Decoded<ProducerRecord>> {
    let outline = Outline::parse(text).ok()?;
    let dump = choose(DUMPS, None, &outline, |dump| dump.form, |dump| dump.recognizes)?;
    Some(decode_dump(dump, &outline))
}

fn decode_dump(dump: &TrajectoryFormat, outline: &Outline<'_>) -> Decoded<ProducerRecord> {
    if !(dump.recognizes)(outline) {
        let keys: Vec<&str> = outline.keys().collect();
        let what = format!("not {}: a record with the keys {}", dump.form.name, keys.join(", "));
        return Err(reject(Reason::UnknownForm, "TG-FORMAT-020", what)
            .why(format!("A record is {} where {}", dump.form.name, dump.form.reason))
            .fix("Read it with format=\"auto\", or name its own form"));
    }
    let (header, body) = (dump.decode)(outline)?;
    Ok(ProducerRecord { form: dump.form, header, body })
}

fn header_of(outline: &Outline<'_>) -> Decoded<Header> {
    let mut fields = Fields::new();
    for key in HEADER_KEYS {
        if let Some(value) = outline.value(key)? {
            fields.insert(key.to_owned(), value);
        }
    }
    Header::read(&fields, None)
}

/// Returns the forms of producers: the names that `format=` accepts in addition to those of OpenAI-shaped forms.
pub(super) fn forms() -> impl Iterator<Item = Form> {
    DUMPS
        .iter()
        .map(|dump: &TrajectoryFormat| dump.form)
        .chain(SERVERS.iter().map(|server| server.form))
        .chain([stream::FORM])
}

/// Returns whether a form is a recorder's own, whose records describe themselves.
pub fn is_recorders(form: &Form) -> bool {
    DUMPS.iter().any(|dump| dump.form == *form)
}
