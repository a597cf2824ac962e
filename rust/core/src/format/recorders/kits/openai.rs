//! Tool calls and tool schemas that are kept flat, as the chat completions API has them.

use crate::format::json::fields::{Fields, schemas};
use crate::trace::Schemas;
use serde_json::{Value, json};

/// A message with its tool calls as the chat completions API has them: name and arguments stand in `function`.
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

/// A call that is kept flat as the chat completions API has it, by its names for the id, the name and the arguments.
pub fn function_call(call: &Value, [id, name, arguments]: [&str; 3]) -> Value {
    let part = |key: &str| call.get(key).cloned().unwrap_or(Value::Null);
    json!({"id": part(id), "type": "function", "function": {"name": part(name), "arguments": part(arguments)}})
}

/// Schemas as the chat completions API has them; none where there are none.
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
