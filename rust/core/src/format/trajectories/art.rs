//! ART's `Trajectory`: `{"messages_and_choices": [message | choice], "additional_histories", "reward", "metrics",
//! ...}`.
//!
//! Source: openpipe-art 0.5.18 `art/trajectories.py`. A choice is the API's choice with its logprobs; a message is a
//! dict. Each additional history is a separate conversation, which becomes a branch of the trace.

use super::helpers::columns::{Columns, numbers_of};
use super::helpers::conversation::ConversationBuilder;
use super::interface::{
    Body, Decoded, Form, Header, Outline, Reason, Rejection, Sampling, Shape, TrajectoryFormat, reject,
};
use crate::format::build::message::Entry;
use crate::format::json::diagnose;
use crate::format::json::object::{Kind, Node};
use crate::format::rejection::not_a_trace;
use serde_json::Value;
use serde_json::value::RawValue;

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form { name: "art", reason: "it has `messages_and_choices`" },
    signs: &["messages_and_choices", "trajectories"],
    recognizes: |record| record.is("messages_and_choices", Shape::List) || is_group(record),
    decode,
};

fn is_group(record: &Outline<'_>) -> bool {
    let first = record.list("trajectories").ok().flatten().and_then(|list| list.first().copied());
    first.is_some_and(|raw| Outline::of(raw, "trajectory").is_ok_and(|item| item.has("messages_and_choices")))
}

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    if !record.has("messages_and_choices") {
        return Err(group(record));
    }
    let mut header = Columns(record)
        .header(&[("policy_version", &["policy_version", "initial_policy_version", "final_policy_version"])])?;
    if let (true, Some(Value::Object(metrics))) = (header.rewards.is_empty(), record.value("metrics")?) {
        let number = |value: &Value| value.as_f64().or(value.as_bool().map(f64::from)).map_or(f32::NAN, |v| v as f32);
        header.rewards = numbers_of(&metrics).iter().map(|(name, value)| (name.clone(), number(value))).collect();
    }
    let mut talk = ConversationBuilder::default();
    history(record, &mut talk, &header.sampling)?;
    for (index, branch) in record.objects("additional_histories")?.iter().enumerate() {
        talk.end_branch();
        history(branch, &mut talk, &header.sampling)
            .map_err(|rejection| rejection.inside(format!("additional_histories[{index}]")))?;
    }
    Ok((header, talk.finish()))
}

fn history(record: &Outline<'_>, talk: &mut ConversationBuilder, sampling: &Sampling) -> Decoded<()> {
    for (position, raw) in record.list("messages_and_choices")?.unwrap_or_default().into_iter().enumerate() {
        let place = |rejection: Rejection| rejection.inside(format!("messages_and_choices[{position}]"));
        let entry = entry(raw, sampling).map_err(place)?;
        match entry.generation {
            Some(generation) => talk.add_sampled(entry.message, generation)?,
            None => drop(talk.add_prompt(entry.message)),
        }
    }
    Ok(())
}

/// Reads a message, a choice or a complete response.
fn entry(raw: &RawValue, sampling: &Sampling) -> Decoded<Entry> {
    match diagnose::node(raw.get(), Kind::Item) {
        Ok(Node::Object(object)) => Entry::read(*object, sampling),
        Ok(_) => Err(not_a_trace("TG-FORMAT-060", "it is not an object")),
        Err(fault) => Err(not_a_trace("TG-FORMAT-061", fault.complaint())),
    }
}

fn group(record: &Outline<'_>) -> Rejection {
    let count = record.list("trajectories").ok().flatten().map_or(0, |list| list.len());
    reject(Reason::UnknownForm, "TG-FORMAT-062", format!("a TrajectoryGroup of {count} trajectories"))
        .why("A record is one trace: each has its own reward")
        .fix("Write a line for each: for t in group.trajectories: json.dumps({\"group\": name, **t.model_dump(mode=\"json\")})")
}
