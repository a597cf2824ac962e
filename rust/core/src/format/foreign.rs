//! Records of other producers: which one wrote it, and its calls as a log.
//!
//! Every producer has one file under `server` (a response and its request) or `dump` (a whole trajectory). They are asked
//! in the order of the tables; the first that knows the record reads it.

use super::body::Body;
use super::calls::{Call, Log, Request, no_response, read_request};
use super::diagnose;
use super::dump::{DUMPS, Dump};
use super::fields::{Fields, Header, Sampling};
use super::form::{CALL, CALLS, Form};
use super::message::Entry;
use super::object::{Kind, Node};
use super::outline::{Outline, Shape};
use super::rejection::{Decoded, Reason, Rejection, reject};
use super::server::{Asked, SERVERS, Server, sampling_of, stream};
use serde::de::DeserializeSeed;
use serde_json::value::RawValue;

/// A record read by a producer's own reader.
pub(super) struct Foreign {
    pub form: Form,
    pub header: Header,
    pub body: Body,
}

/// Header keys of a record that is a server's response.
const HEADER_KEYS: &[&str] =
    &["id", "group", "reward", "rewards", "policy_version", "logprob_kind", "template_kwargs", "chat_template_kwargs"];

/// Whether a key on the first level of a record may be a producer's sign, so that the tables are asked.
pub(super) fn is_sign(key: &str) -> bool {
    DUMPS.iter().any(|dump| dump.signs.contains(&key)) || SERVERS.iter().any(|server| server.signs.contains(&key))
}

/// Reads a record by the form that is `wanted` or that knows it; `None` where none does.
pub(super) fn decode(text: &str, wanted: Option<&str>) -> Decoded<Option<Foreign>> {
    let outline = Outline::parse(text)?;
    if let Some(dump) = choose(DUMPS, wanted, &outline, |dump| dump.form, |dump| dump.knows) {
        return decode_dump(dump, &outline).map(Some);
    }
    let header = header_of(&outline)?;
    let choice = outline.count("choice")?;
    let mut log = Log::new(&header, choice);
    let form = if outline.is("calls", Shape::List) {
        let mut form = CALLS;
        for (turn, call) in outline.objects("calls")?.iter().enumerate() {
            let place = |rejection: Rejection| rejection.inside(format!("calls[{turn}]")).in_turn(turn);
            form = add_call(&mut log, call, choice, wanted).map_err(place)?.unwrap_or(form);
        }
        form
    } else if is_call(&outline) {
        add_call(&mut log, &outline, choice, wanted)?.unwrap_or(CALL)
    } else if outline.has("messages") {
        return Ok(None);
    } else if let Some(server) = server_of(&outline, wanted)? {
        let sampling = sampling_of(&outline, "temperature", "top_p").unwrap_or_default().or(&header.sampling);
        let asked = Asked { choice, sampling: &sampling, request: None };
        log.add(answered(server, None, &outline, &asked, None)?)?;
        server.form
    } else {
        return Ok(None);
    };
    let body = log.finish()?;
    Ok(Some(Foreign { form, header, body }))
}

/// Whether a record is one call: a response with its request, or one that cannot be anything else.
fn is_call(outline: &Outline<'_>) -> bool {
    let alone = match outline.get("response").map(Shape::of) {
        Some(Shape::Object | Shape::List) => true,
        Some(Shape::Text) => outline.text("response").ok().flatten().is_some_and(|text| stream::is_events(&text)),
        _ => false,
    };
    outline.has("response") && (outline.has("request") || alone && !outline.has("done") && !outline.has("messages"))
}

/// The server whose response this is. One that is asked for by name must know it: its reader would find nothing.
fn server_of(response: &Outline<'_>, wanted: Option<&str>) -> Decoded<Option<&'static Server>> {
    let server = choose(SERVERS, wanted, response, |server| server.form, |server| server.knows);
    match server {
        Some(server) if wanted.is_some() && !(server.knows)(response) => {
            let Form { name, sign } = server.form;
            Err(reject(Reason::UnknownForm, format!("not the response of {name}, which is known because {sign}"))
                .why("A record of another form would be read as something it is not")
                .cure("Read it with format=\"auto\", or name its own form"))
        }
        server => Ok(server),
    }
}

/// Reads a record as the dump that knows it; `None` where none does.
pub(super) fn dump_that_knows(text: &str) -> Option<Decoded<Foreign>> {
    let outline = Outline::parse(text).ok()?;
    let dump = choose(DUMPS, None, &outline, |dump| dump.form, |dump| dump.knows)?;
    Some(decode_dump(dump, &outline))
}

fn decode_dump(dump: &Dump, outline: &Outline<'_>) -> Decoded<Foreign> {
    if !(dump.knows)(outline) {
        let keys: Vec<&str> = outline.keys().collect();
        let what = format!("not {}: a record with the keys {}", dump.form.name, keys.join(", "));
        return Err(reject(Reason::UnknownForm, what)
            .why(format!("A record is {} where {}", dump.form.name, dump.form.sign))
            .cure("Read it with format=\"auto\", or name its own form"));
    }
    let (header, body) = (dump.decode)(outline)?;
    Ok(Foreign { form: dump.form, header, body })
}

/// The table's entry that is asked for by name, or the first that knows the record.
fn choose<'t, T>(
    table: &'t [T],
    wanted: Option<&str>,
    outline: &Outline<'_>,
    form: fn(&T) -> Form,
    knows: fn(&T) -> fn(&Outline<'_>) -> bool,
) -> Option<&'t T> {
    match wanted {
        Some(name) => table.iter().find(|entry| form(entry).name == name),
        None => table.iter().find(|entry| knows(entry)(outline)),
    }
}

fn header_of(outline: &Outline<'_>) -> Decoded<Header> {
    let mut fields = Fields::new();
    for key in HEADER_KEYS {
        if let Some(value) = outline.value(key)? {
            fields.insert((*key).to_owned(), value);
        }
    }
    Header::read(&fields, None)
}

/// Adds `{"request", "response"}` to the log; the producer's form, where it is not the chat completions API.
pub(super) fn add_call(
    log: &mut Log<'_>,
    call: &Outline<'_>,
    choice: Option<i32>,
    wanted: Option<&str>,
) -> Decoded<Option<Form>> {
    let Some(raw) = call.get("response") else { return Err(no_response("the call has no `response`")) };
    let own = Sampling::read(&call.fields_without(&["request", "response", "calls"])?)?;
    let choice = call.count("choice")?.or(choice);
    let reward = call.number("reward")?.map(|reward| reward as f32);
    let request = call.object("request")?;
    let inside = |rejection: Rejection| rejection.inside("response");
    if Shape::of(raw) != Shape::Object {
        return add_stream(log, call, &Streamed { raw, own, choice, reward }).map(Some);
    }
    let response = Outline::of(raw, "response")?;
    if let Some(server) = server_of(&response, wanted)? {
        let asked_for = request.as_ref().map(server.request).transpose().map_err(|r| r.inside("request"))?;
        let sampling = own.or(&log.sampling_by(asked_for.as_ref(), &server.defaults));
        let asked = Asked { choice, sampling: &sampling, request: request.as_ref() };
        log.add(answered(server, asked_for, &response, &asked, reward).map_err(inside)?)?;
        return Ok(Some(server.form));
    }
    if !response.has("choices") {
        let failed = response.has("error") || response.keys().next().is_none();
        return Err(if failed { no_response("the response has no `choices`") } else { unknown_response(&response) });
    }
    let request = request.as_ref().map(chat_request).transpose()?;
    let sampling = own.or(&log.sampling(request.as_ref()));
    let object = object_of(raw, Kind::Response)?;
    let model = response.text("model")?;
    let entry = Entry::of_response(object, choice, &sampling).map_err(inside)?;
    log.add(Call { request, entry, model, reward })?;
    Ok(None)
}

/// A call whose response was streamed.
struct Streamed<'a> {
    raw: &'a RawValue,
    own: Sampling,
    choice: Option<i32>,
    reward: Option<f32>,
}

/// Puts the response together and reads it as what it then is.
fn add_stream(log: &mut Log<'_>, call: &Outline<'_>, streamed: &Streamed<'_>) -> Decoded<Form> {
    let inside = |rejection: Rejection| rejection.inside("response");
    let stream::Whole { text, notes } = stream::assemble(streamed.raw, streamed.choice).map_err(inside)?;
    let response = Outline::parse(&text).map_err(inside)?;
    let request = call.object("request")?;
    let (choice, reward) = (streamed.choice, streamed.reward);
    let mut found = if let Some(server) = server_of(&response, None)? {
        let asked_for = request.as_ref().map(server.request).transpose().map_err(|r| r.inside("request"))?;
        let sampling = streamed.own.clone().or(&log.sampling_by(asked_for.as_ref(), &server.defaults));
        let asked = Asked { choice, sampling: &sampling, request: request.as_ref() };
        answered(server, asked_for, &response, &asked, reward).map_err(inside)?
    } else {
        let asked_for = request.as_ref().map(chat_request).transpose()?;
        let sampling = streamed.own.clone().or(&log.sampling(asked_for.as_ref()));
        let entry = Entry::of_response(parse_object(&text, Kind::Response)?, choice, &sampling).map_err(inside)?;
        let model = response.text("model")?;
        Call { request: asked_for, entry, model, reward }
    };
    if let Some(generation) = &mut found.entry.generation {
        generation.notes.extend(notes);
    }
    log.add(found)?;
    Ok(stream::FORM)
}

fn answered(
    server: &Server,
    request: Option<Request>,
    response: &Outline<'_>,
    asked: &Asked<'_>,
    reward: Option<f32>,
) -> Decoded<Call> {
    let entry = (server.answer)(response, asked)?;
    let model = response.text("model").unwrap_or_default();
    Ok(Call { request, entry, model, reward })
}

/// A request in the shape of the chat completions API.
pub(super) fn chat_request(request: &Outline<'_>) -> Decoded<Request> {
    object_of_outline(request).and_then(read_request).map_err(|rejection| rejection.inside("request"))
}

fn object_of_outline(outline: &Outline<'_>) -> Decoded<super::object::Object> {
    let fields = outline.fields_without(&[])?;
    let text = serde_json::Value::Object(fields).to_string();
    parse_object(&text, Kind::Request)
}

fn object_of(raw: &RawValue, kind: Kind) -> Decoded<super::object::Object> {
    parse_object(raw.get(), kind)
}

fn parse_object(text: &str, kind: Kind) -> Decoded<super::object::Object> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    match kind.deserialize(&mut deserializer) {
        Ok(Node::Object(object)) => Ok(*object),
        Ok(_) => Err(super::rejection::not_a_trace("not an object")),
        Err(error) => Err(diagnose::explain(text, &error)),
    }
}

fn unknown_response(response: &Outline<'_>) -> Rejection {
    let keys: Vec<&str> = response.keys().collect();
    reject(Reason::UnknownForm, format!("a response with the keys {}", keys.join(", ")))
        .why("No known server answers so, and what the policy sampled cannot be read from it")
        .cure("See docs/trace-format.md for the servers whose responses are read")
}

/// The names that `format=` takes beside those of the OpenAI-shaped forms.
pub(super) fn forms() -> impl Iterator<Item = Form> {
    DUMPS.iter().map(|dump: &Dump| dump.form).chain(SERVERS.iter().map(|server| server.form)).chain([stream::FORM])
}
