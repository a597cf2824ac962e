//! Functions that several trajectory formats share: columns of rows, loss masks, conversations, attributes of spans,
//! and records inside records. Flat tool calls and schemas are converted to the format of the chat completions API.

pub(super) mod columns;
pub(super) mod conversation;
pub(super) mod loss_mask;
mod python_literal;
pub(super) mod span_attributes;

use crate::format::fields::{Fields, schemas};
use crate::format::json::outline::Outline;
use crate::trace::Schemas;
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// Converts a message's tool calls to the format of the chat completions API: name and arguments move to `function`.
pub fn openai(mut message: Fields) -> Fields {
    let Some(Value::Array(calls)) = message.get_mut("tool_calls") else { return message };
    for call in calls.iter_mut().filter_map(Value::as_object_mut) {
        if call.contains_key("function") || !call.contains_key("name") {
            continue;
        }
        let function = json!({"name": call.remove("name"), "arguments": call.remove("arguments")});
        call.insert("type".to_owned(), "function".into());
        call.insert("function".to_owned(), function);
    }
    message
}

/// Converts a flat tool call. The array contains its keys for the id, the name and the arguments.
pub fn function_call(call: &Value, [id, name, arguments]: [&str; 3]) -> Value {
    let part = |key: &str| call.get(key).cloned().unwrap_or(Value::Null);
    json!({"id": part(id), "type": "function", "function": {"name": part(name), "arguments": part(arguments)}})
}

/// Returns schemas in the format of the chat completions API, or `None` if there are none.
pub fn tools(listed: Option<Value>) -> Option<Schemas> {
    let Some(Value::Array(tools)) = listed else { return None };
    let wrap = |tool: Value| match tool {
        Value::Object(mut fields) if fields.contains_key("name") && !fields.contains_key("function") => {
            fields.remove("type");
            json!({"type": "function", "function": Value::Object(fields)})
        }
        tool => tool,
    };
    schemas(tools.into_iter().map(wrap).collect())
}

/// Returns the JSON text of an object with these members.
pub fn splice(parts: &[(&str, &RawValue)]) -> String {
    let length: usize = parts.iter().map(|(key, raw)| key.len() + raw.get().len() + 4).sum();
    let mut text = String::with_capacity(length + 2);
    for (key, raw) in parts {
        text.push(if text.is_empty() { '{' } else { ',' });
        text.push_str(&Value::from(*key).to_string());
        text.push(':');
        text.push_str(raw.get());
    }
    text.push_str(if text.is_empty() { "{}" } else { "}" });
    text
}

/// Returns the members of an object that are not null. If a key occurs twice, the last value counts.
pub fn parts<'o, 'a>(outline: &'o Outline<'a>) -> Vec<(&'o str, &'a RawValue)> {
    let mut keys: Vec<&str> = outline.keys().collect();
    keys.sort_unstable();
    keys.dedup();
    keys.into_iter().filter_map(|key| outline.get(key).map(|raw| (key, raw))).collect()
}
