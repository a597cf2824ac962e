//! SWE-agent's `.traj`: `{"history": [message, ...], "trajectory", "info", "environment"}`. Text only.
//!
//! Source: SWE-agent 3ea751c `sweagent/types.py`. A message also contains the agent's own fields, which no template
//! uses. A demonstration was not sampled.

use super::helpers::columns::Columns;
use super::helpers::conversation::{ConversationBuilder, message};
use super::interface::{Body, Decoded, Form, Header, Outline, Rejection, Shape, TrajectoryFormat};
use crate::format::fields::Fields;
use crate::format::rejection::not_a_trace;
use serde_json::Value;

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form { name: "swe_agent", reason: "it has `history` of messages" },
    signs: &["history"],
    recognizes: |record| record.is("history", Shape::List) && !record.has("messages") && !record.has("calls"),
    decode,
};

/// Fields that only the agent uses.
const OWN: &[&str] =
    &["agent", "message_type", "thought", "action", "is_demo", "cache_control", "tags", "thinking_blocks"];

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let header = Columns(record).header(&[])?;
    let mut talk = ConversationBuilder::default();
    for (position, value) in record.typed::<Vec<Value>>("history")?.unwrap_or_default().into_iter().enumerate() {
        let place = |rejection: Rejection| rejection.inside(format!("history[{position}]"));
        let Value::Object(mut fields) = value else {
            return Err(place(not_a_trace("TG-FORMAT-077", "a message is not an object")));
        };
        let is_demo = fields.get("is_demo").and_then(Value::as_bool) == Some(true);
        strip(&mut fields);
        let chat_message = message(Value::Object(fields)).map_err(place)?;
        if is_demo {
            talk.add_prompt(chat_message);
        } else {
            talk.add_by_role(chat_message, &header.sampling)?;
        }
    }
    Ok((header, talk.finish()))
}

fn strip(fields: &mut Fields) {
    fields.retain(|key, _| !OWN.contains(&key.as_str()));
    if let Some(Value::Array(mut ids)) = fields.remove("tool_call_ids")
        && ids.len() == 1
        && let Some(id) = ids.pop()
    {
        fields.insert("tool_call_id".to_owned(), id);
    }
}
