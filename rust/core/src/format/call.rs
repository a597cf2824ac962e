//! Reads one call, `{"request", "response"}`, of any server, complete or streamed, as a part of a log.

use super::build::Body;
use super::build::calls::{API_DEFAULTS, Call, Log, Request, chat_request, no_response};
use super::build::message::Entry;
use super::fields::{Header, Sampling, is_partial};
use super::form::Form;
use super::json::diagnose;
use super::json::object::Kind;
use super::json::outline::{Outline, Shape};
use super::rejection::{Decoded, Reason, Rejection, reject};
use super::servers::interface::{CallContext, Server};
use super::servers::{SERVERS, stream};
use crate::server::Server as Producer;

/// Returns the server whose response this is. A server named by the caller must recognise the response, as its reader
/// would find nothing otherwise.
pub(super) fn server_of(response: &Outline<'_>, format_name: Option<&str>) -> Decoded<Option<&'static Server>> {
    let server = choose(SERVERS, format_name, response, |server| server.form, |server| server.recognizes);
    match server {
        Some(server) if format_name.is_some() && !(server.recognizes)(response) => {
            let Form { name, reason: sign } = server.form;
            Err(reject(
                Reason::UnknownForm,
                "TG-FORMAT-017",
                format!("not the response of {name}, which is recognised because {sign}"),
            )
            .why("A record of another form would be misread")
            .fix("Read it with format=\"auto\", or name its own form"))
        }
        server => Ok(server),
    }
}

/// Returns the table's entry with the wanted name, or the first that recognises the record.
pub(super) fn choose<'t, T>(
    table: &'t [T],
    format_name: Option<&str>,
    outline: &Outline<'_>,
    form: fn(&T) -> Form,
    knows: fn(&T) -> fn(&Outline<'_>) -> bool,
) -> Option<&'t T> {
    match format_name {
        Some(name) => table.iter().find(|entry| form(entry).name == name),
        None => table.iter().find(|entry| knows(entry)(outline)),
    }
}

/// Adds `{"request", "response"}` to the log. Returns the producer's form, if it is not the chat completions API.
pub(super) fn add_call(
    log: &mut Log<'_>,
    call: &Outline<'_>,
    choice: Option<i32>,
    format_name: Option<&str>,
) -> Decoded<Option<Form>> {
    let Some(raw) = call.get("response") else { return Err(no_response("the call has no `response`")) };
    let fields = call.fields_without(&["request", "response", "calls"])?;
    let (call_sampling, partial) = (Sampling::read(&fields)?, is_partial(&fields)?);
    let defaults = |defaults: &'static Sampling| if partial { &Sampling::UNKNOWN } else { defaults };
    let choice = call.count("choice")?.or(choice);
    let reward = call.number("reward")?.map(|reward| reward as f32);
    let request = call.object("request")?;
    let inside = |rejection: Rejection| rejection.inside("response");
    let is_whole = Shape::of(raw) == Shape::Object;
    let streamed = (!is_whole).then(|| stream::assemble(raw, choice)).transpose().map_err(inside)?;
    let text = streamed.as_ref().map_or(raw.get(), |full_response| &full_response.text);
    let choice = streamed.as_ref().map_or(choice, |full_response| full_response.choice);
    let response = Outline::parse(text).map_err(inside)?;
    let server = server_of(&response, format_name.filter(|_| is_whole))?;
    let mut new_call = if let Some(server) = server {
        let server_request = request.as_ref().map(server.request).transpose().map_err(|r| r.inside("request"))?;
        let sampling = call_sampling.or(&log.sampling(server_request.as_ref(), defaults(&server.defaults)));
        let context = CallContext { choice, sampling: &sampling, request: request.as_ref() };
        read_response(server, server_request, &response, &context, reward).map_err(inside)?
    } else if response.has("choices") {
        let request = request.as_ref().map(chat_request).transpose()?;
        let sampling = call_sampling.or(&log.sampling(request.as_ref(), defaults(&API_DEFAULTS)));
        let object = diagnose::object(text, Kind::Response)?;
        let model = response.text("model")?;
        let entry = Entry::of_response(object, choice, &sampling).map_err(inside)?;
        Call { request, entry, model, reward }
    } else {
        let failed = response.has("error") || response.keys().next().is_none();
        return Err(if failed { no_response("the response has no `choices`") } else { unknown_response(&response) });
    };
    if let Some(full_response) = &streamed {
        new_call.entry.unused_choices += full_response.unused;
        new_call
            .entry
            .generation
            .iter_mut()
            .for_each(|generation| generation.notes.extend_from_slice(&full_response.notes));
    }
    log.add(new_call)?;
    Ok(if is_whole { server.map(|server| server.form) } else { Some(stream::FORM) })
}

/// Returns the header and body of a record that is one call.
pub(super) fn one_call(header: Header, record: &Outline<'_>, call: &str) -> Decoded<(Header, Body)> {
    let call = Outline::parse(call)?;
    let mut log = Log::new(&header, None);
    add_call(&mut log, &call, record.count("choice")?, None)?;
    let body = log.finish()?;
    Ok((header, body))
}

pub(super) fn read_response(
    server: &Server,
    request: Option<Request>,
    response: &Outline<'_>,
    context: &CallContext<'_>,
    reward: Option<f32>,
) -> Decoded<Call> {
    let mut entry = (server.answer)(response, context)?;
    if let Some(generation) = &mut entry.generation {
        generation.server = producer_of_form(server.form.name);
    }
    let model = response.text("model").unwrap_or_default();
    Ok(Call { request, entry, model, reward })
}

/// Returns the server whose responses have this form.
fn producer_of_form(form: &str) -> Option<Producer> {
    match form {
        "sglang" => Some(Producer::Sglang),
        "tgi" => Some(Producer::Tgi),
        "llama_cpp" => Some(Producer::LlamaCpp),
        name if name.starts_with("vllm") => Some(Producer::Vllm),
        _ => None,
    }
}

fn unknown_response(response: &Outline<'_>) -> Rejection {
    let keys: Vec<&str> = response.keys().collect();
    reject(Reason::UnknownForm, "TG-FORMAT-018", format!("a response with the keys {}", keys.join(", ")))
        .why("No supported server returns these keys, and the sampled tokens cannot be read from them")
        .fix("See docs/reference/trace-format.md for the servers whose responses are read")
}
