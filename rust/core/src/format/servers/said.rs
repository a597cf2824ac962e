//! Messages in the shape of the chat completions API, from the parts that other APIs have.

use crate::format::json::fields::schemas;
use crate::format::normal::message::plain;
use crate::trace::Schemas;
use serde_json::{Map, Value, json};

/// A message; reasoning and tool calls are left out where there are none, and parts that are no text stand beside the text.
pub fn message(role: &str, text: &str, reasoning: &str, calls: Vec<Value>, media: Vec<Value>) -> Value {
    let content = if media.is_empty() {
        Value::String(text.to_owned())
    } else {
        let text = (!text.is_empty()).then(|| json!({"type": "text", "text": text}));
        Value::Array(text.into_iter().chain(media).collect())
    };
    let mut message = plain(role, content).value;
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    message
}

/// A tool call; arguments become a JSON string as that API has them.
pub fn tool_call(id: Option<&Value>, name: Option<&Value>, arguments: Option<&Value>) -> Value {
    let arguments = match arguments {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Null) | None => "{}".to_owned(),
        Some(other) => other.to_string(),
    };
    let function = json!({"name": name.cloned().unwrap_or_default(), "arguments": arguments});
    let mut call = json!({"type": "function", "function": function});
    if let Some(id) = id.filter(|id| id.is_string()) {
        call["id"] = id.clone();
    }
    call
}

/// The message that answers a tool call.
pub fn tool_result(id: Option<&Value>, name: Option<&Value>, content: &str) -> Value {
    let mut message = json!({"role": "tool", "content": content});
    for (key, value) in [("tool_call_id", id), ("name", name)] {
        if let Some(value) = value.filter(|value| value.is_string()) {
            message[key] = value.clone();
        }
    }
    message
}

/// The schemas of tools, and what says the parameters of one; none where there is no tool.
pub fn tool_schemas<'v>(
    tools: impl Iterator<Item = &'v Value>,
    parameters: impl Fn(&'v Value) -> Option<&'v Value>,
) -> Option<Schemas> {
    let schema = |tool: &'v Value| {
        let mut function = Map::new();
        let parts = [("name", tool.get("name")), ("description", tool.get("description"))];
        for (key, value) in parts.into_iter().chain([("parameters", parameters(tool))]) {
            if let Some(value) = value.filter(|value| !value.is_null()) {
                function.insert(key.into(), value.clone());
            }
        }
        json!({"type": "function", "function": function})
    };
    schemas(tools.map(schema).collect())
}
