//! Langfuse: a trace with its observations `{"id", "observations": [{"type": "GENERATION", "input", "output", ...}]}`,
//! or one observation.
//!
//! Source: langfuse 5.0.4 `langfuse/api` (TraceWithFullDetails, ObservationsView). Text only: `output` contains the
//! message of a response and nothing else.

use super::helpers::columns::Columns;
use super::helpers::conversation::message;
use super::helpers::tools;
use super::interface::{
    Body, Decoded, Form, Header, Outline, Reason, Rejection, Sampling, Shape, TrajectoryFormat, reject,
};
use crate::format::build::calls::{Call, Log, Request, no_response};
use crate::format::build::message::{Entry, message_of, plain};
use crate::trace::Message;
use serde_json::Value;

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form { name: "langfuse", reason: "it has `observations`, or `traceId`, `type` and `output`" },
    signs: &["observations", "traceId"],
    recognizes: |record| {
        let is_observation = record.has("traceId") && record.is("type", Shape::Text) && record.has_key("output");
        record.is("observations", Shape::List) && (record.has("id") || record.has("scores")) || is_observation
    },
    decode,
};

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let mut header = Columns(record).header_without(&["model"], &[("group", &["group", "sessionId"])])?;
    scores(record, &mut header)?;
    let observations = if record.has("observations") { record.objects("observations")? } else { vec![record.clone()] };
    let mut calls = Vec::new();
    for (position, observation) in observations.iter().enumerate() {
        let place = |rejection: Rejection| rejection.inside(format!("observations[{position}]"));
        if observation.text("type").map_err(place)?.is_some_and(|kind| kind.eq_ignore_ascii_case("generation")) {
            let began = ["startTime", "start_time"].into_iter().find_map(|key| observation.text(key).ok().flatten());
            calls.push((began.unwrap_or_default(), call(observation, &header).map_err(place)?));
        }
    }
    if calls.is_empty() {
        return Err(reject(Reason::Incomplete, "TG-FORMAT-070", "no observation is a generation")
            .why("There is nothing that a policy sampled")
            .fix("Export observations of type GENERATION, or leave the record out"));
    }
    calls.sort_by(|a, b| a.0.cmp(&b.0));
    let body = Log::of(&header, calls.into_iter().map(|(_, call)| Ok(call)))?;
    Ok((header, body))
}

/// Reads numeric scores by name. The one called "reward" is the reward.
fn scores(record: &Outline<'_>, header: &mut Header) -> Decoded<()> {
    if !record.is("scores", Shape::List) {
        return Ok(());
    }
    for score in record.objects("scores")? {
        if let (Some(name), true) = (score.text("name")?, score.is("value", Shape::Number)) {
            let value = score.number("value")?.map_or(f32::NAN, |value| value as f32);
            if name == "reward" {
                header.reward = header.reward.or(Some(value));
            } else {
                header.rewards.push((name, value));
            }
        }
    }
    Ok(())
}

fn call(observation: &Outline<'_>, header: &Header) -> Decoded<Call> {
    let parameters = observation.object("modelParameters")?.unwrap_or_default();
    let call_sampling = Sampling::read(&parameters.fields_without(&["policy_version", "logprob_kind"])?)?;
    let (messages, tool_list) = match observation.value("input")? {
        Some(Value::Array(items)) => (chat(items)?, None),
        Some(Value::Object(mut fields)) => match fields.remove("messages") {
            Some(Value::Array(items)) => (chat(items)?, fields.remove("tools")),
            _ => (Vec::new(), None),
        },
        Some(Value::String(text)) => (vec![plain("user", text)], None),
        _ => (Vec::new(), None),
    };
    let answer = match observation.value("output")? {
        Some(Value::Array(items)) => spoken(items.into_iter().next().filter(Value::is_object))?,
        answer => spoken(answer)?,
    };
    let model = observation.text("model")?;
    let request = Request { messages, tools: tools(tool_list), model, ..Request::default() };
    let generation = call_sampling.or(&header.sampling).generation();
    Ok(Call { request: Some(request), entry: Entry::sampled(answer, generation, 0), model: None, reward: None })
}

fn chat(items: Vec<Value>) -> Decoded<Vec<Message>> {
    items.into_iter().filter(|item| item.get("role").is_some()).map(message).collect()
}

/// Returns the response message, which may be recorded as plain text.
fn spoken(output: Option<Value>) -> Decoded<Message> {
    match output {
        Some(Value::Object(mut fields)) => {
            fields.entry("role").or_insert_with(|| "assistant".into());
            message_of(fields)
        }
        Some(Value::String(text)) => Ok(plain("assistant", text)),
        _ => Err(no_response("a generation without `output`")),
    }
}
