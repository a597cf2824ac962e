//! One call, `{"request", "response"}`, of any server, whole or streamed, as a part of a log.

use super::form::Form;
use super::json::diagnose;
use super::json::fields::Sampling;
use super::json::object::Kind;
use super::json::outline::{Outline, Shape};
use super::normal::calls::{Call, Log, Request, chat_request, no_response};
use super::normal::message::Entry;
use super::rejection::{Decoded, Reason, Rejection, reject};
use super::servers::contract::{Asked, Server};
use super::servers::{SERVERS, stream};
use serde_json::value::RawValue;

/// The server whose response this is. One that is asked for by name must know it: its reader would find nothing.
pub(super) fn server_of(response: &Outline<'_>, wanted: Option<&str>) -> Decoded<Option<&'static Server>> {
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

/// The table's entry that is asked for by name, or the first that knows the record.
pub(super) fn choose<'t, T>(
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
    let object = diagnose::object(raw.get(), Kind::Response)?;
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
        let entry = Entry::of_response(diagnose::object(&text, Kind::Response)?, choice, &sampling).map_err(inside)?;
        let model = response.text("model")?;
        Call { request: asked_for, entry, model, reward }
    };
    if let Some(generation) = &mut found.entry.generation {
        generation.notes.extend(notes);
    }
    log.add(found)?;
    Ok(stream::FORM)
}

pub(super) fn answered(
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

fn unknown_response(response: &Outline<'_>) -> Rejection {
    let keys: Vec<&str> = response.keys().collect();
    reject(Reason::UnknownForm, format!("a response with the keys {}", keys.join(", ")))
        .why("No known server answers so, and what the policy sampled cannot be read from it")
        .cure("See docs/trace-format.md for the servers whose responses are read")
}
