//! Agent Lightning: a rollout's spans or triplets, `{"rollout_id", "spans": [...]}` or `{"rollout_id", "triplets":
//! [...]}`, or a single span.
//!
//! Source: agentlightning 0.3.0 `types/tracer.py`, `types/core.py`, `adapter/triplet.py`. Spans are ordered by their
//! `sequence_id`, and a repeated response counts once. A reward belongs to the last earlier call without a reward.

use super::helpers::columns::{Columns, tokens_of};
use super::helpers::conversation::message;
use super::helpers::span_attributes::Attributes;
use super::interface::{
    Body, Decoded, Form, Header, Outline, Reason, Rejection, Sampling, Shape, TrajectoryFormat, reject,
};
use crate::format::build::calls::{Call, Log, Request};
use crate::format::build::message::{Entry, plain};
use crate::trace::Message;
use serde_json::Value;
use std::collections::HashSet;

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form { name: "agent_lightning", reason: "it has `rollout_id`, with `spans`, `triplets` or `attributes`" },
    signs: &["rollout_id", "triplets"],
    recognizes: |record| {
        let spans = record.is("spans", Shape::List) || record.is("trace", Shape::List) || record.has("attributes");
        record.is("triplets", Shape::List) || record.has("rollout_id") && spans
    },
    decode,
};

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let mut header = Columns(record).header(&[
        ("id", &["id", "rollout_id"]),
        ("group", &["group", "task_id"]),
        ("reward", &["reward", "final_reward"]),
    ])?;
    if record.is("triplets", Shape::List) {
        let body = triplets(record, &mut header)?;
        return Ok((header, body));
    }
    let spans = if record.has("spans") { record.objects("spans")? } else { record.objects("trace")? };
    let spans = if spans.is_empty() { vec![record.clone()] } else { spans };
    let body = follow(&spans, &mut header)?;
    Ok((header, body))
}

/// Reads the calls of spans in order, each once, and the rewards that follow them.
pub(super) fn follow(spans: &[Outline<'_>], header: &mut Header) -> Decoded<Body> {
    let mut ordered = Vec::with_capacity(spans.len());
    for (position, span) in spans.iter().enumerate() {
        let place = |rejection: Rejection| rejection.inside(format!("spans[{position}]"));
        let key = (span.number("sequence_id").map_err(place)?.unwrap_or(0.0), started(span).map_err(place)?);
        ordered.push((key, position, Attributes::of(span).map_err(place)?));
    }
    ordered.sort_by(|a, b| a.0.0.total_cmp(&b.0.0).then(a.0.1.total_cmp(&b.0.1)));
    let (mut calls, mut seen, mut open) = (Vec::<Call>::new(), HashSet::new(), Vec::new());
    let mut last = None;
    for (_, position, attributes) in &ordered {
        let place = |rejection: Rejection| rejection.inside(format!("spans[{position}]"));
        if attributes.is_call() {
            if attributes.response_id().is_none_or(|id| seen.insert(id)) {
                open.push(calls.len());
                calls.push(attributes.call(header).map_err(place)?);
            }
        } else if let Some(reward) = attributes.reward().map_err(place)? {
            last = Some(reward as f32);
            if let Some(call) = open.pop() {
                calls[call].reward = last;
            }
        }
    }
    header.reward = header.reward.or(last);
    if calls.is_empty() {
        return Err(reject(Reason::Incomplete, "TG-FORMAT-059", "no span contains a call of a model")
            .why("No generation can be read")
            .fix("Write the spans of a rollout as one record: {\"rollout_id\": ..., \"spans\": [...]}"));
    }
    Log::of(header, calls.into_iter().map(Ok))
}

/// Returns the start time of a span in any unit; 0 if it is not a number.
fn started(span: &Outline<'_>) -> Decoded<f64> {
    let key = ["start_time", "startTimeUnixNano"].into_iter().find(|key| span.has(key)).unwrap_or("start_time");
    Ok(match span.value(key)? {
        Some(Value::Number(number)) => number.as_f64().unwrap_or(0.0),
        Some(Value::String(digits)) => digits.parse().unwrap_or(0.0),
        _ => 0.0,
    })
}

fn triplets(record: &Outline<'_>, header: &mut Header) -> Decoded<Body> {
    let call = |(turn, record)| {
        let place = |rejection: Rejection| rejection.inside(format!("triplets[{turn}]")).in_turn(turn);
        triplet(record, &header.sampling).map_err(place)
    };
    let calls = record.objects("triplets")?.iter().enumerate().map(call).collect::<Decoded<Vec<_>>>()?;
    header.reward = header.reward.or_else(|| calls.iter().rev().find_map(|call| call.reward));
    Log::of(header, calls.into_iter().map(Ok))
}

/// Reads `{"prompt": {"token_ids", "raw_content"}, "response": {"token_ids", "logprobs"}, "reward", "metadata"}`.
fn triplet(record: &Outline<'_>, sampling: &Sampling) -> Decoded<Call> {
    let part = |key: &str| if record.is(key, Shape::Object) { record.object(key) } else { Ok(None) };
    let (prompt, response) = (part("prompt")?.unwrap_or_default(), part("response")?.unwrap_or_default());
    let mut generation = sampling.generation();
    let ids = Columns(&response).ids("token_ids")?.filter(|ids| !ids.is_empty());
    generation.tokens = match response.logprobs("logprobs")? {
        Some(tokens) => crate::trace::Tokens { ids: ids.or(tokens.ids), ..tokens },
        None => tokens_of(ids, None),
    };
    let messages = chat(prompt.value("raw_content")?)?;
    let request = Request::of(messages, Columns(&prompt).ids("token_ids")?.filter(|ids| !ids.is_empty()));
    let first_message = chat(response.value("raw_content")?)?.into_iter().next();
    let answer = first_message.filter(|first_message| first_message.role() == "assistant");
    let answer = answer.unwrap_or_else(|| plain("assistant", Value::Null));
    let entry = Entry::sampled(answer, generation, 0);
    let reward = record.number("reward")?.map(|reward| reward as f32);
    Ok(Call { request: Some(request), entry, model: None, reward })
}

/// Reads messages in the adapters' formats: a list, one message, or an object with numbers as keys. A choice is read as
/// its message.
fn chat(value: Option<Value>) -> Decoded<Vec<Message>> {
    let items: Vec<Value> = match value {
        Some(Value::Array(items)) => items,
        Some(Value::Object(fields)) if fields.contains_key("role") => vec![Value::Object(fields)],
        Some(Value::Object(fields)) => {
            let mut numbered: Vec<(u32, Value)> =
                fields.into_iter().filter_map(|(key, value)| Some((key.parse().ok()?, value))).collect();
            numbered.sort_by_key(|(key, _)| *key);
            numbered.into_iter().map(|(_, value)| value).collect()
        }
        _ => Vec::new(),
    };
    let inner = |mut item: Value| item.get_mut("message").map(Value::take).filter(Value::is_object).unwrap_or(item);
    items.into_iter().map(inner).filter(|item| item.get("role").is_some_and(Value::is_string)).map(message).collect()
}
