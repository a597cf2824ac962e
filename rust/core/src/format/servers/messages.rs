//! Builds messages in the format of the chat completions API from the parts of other APIs.

use crate::format::build::message::plain_value;
use crate::format::fields::schemas;
use crate::trace::Schemas;
use serde_json::{Map, Value, json};

/// Content of a message: its text, or the list of its parts if some are not text.
#[derive(Default)]
pub struct Content {
    parts: Vec<Value>,
    any: bool,
}

impl Content {
    /// Appends text.
    pub fn text(&mut self, text: &str) {
        match self.parts.last_mut().and_then(|part| part.get_mut("text")) {
            Some(Value::String(last_text)) => last_text.push_str(text),
            _ if text.is_empty() => {}
            _ => self.parts.push(json!({"type": "text", "text": text})),
        }
    }

    /// Appends a part that is not text.
    pub fn part(&mut self, part: Value) {
        self.parts.push(part);
        self.any = true;
    }

    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        let mut content = Self::default();
        content.text(text);
        content
    }
}

impl From<Content> for Value {
    fn from(content: Content) -> Self {
        if content.any {
            return Self::Array(content.parts);
        }
        let text = content.parts.into_iter().next().and_then(|mut part| part.get_mut("text").map(Self::take));
        text.unwrap_or_else(|| Self::String(String::new()))
    }
}

/// Creates a message. Reasoning and tool calls are omitted if empty.
pub fn message(role: &str, content: impl Into<Content>, reasoning: &str, calls: Vec<Value>) -> Value {
    let mut message = plain_value(role, content.into());
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    message
}

/// Creates a tool call. Arguments become a JSON string, as in the chat completions API.
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

/// Creates the message with the result of a tool call.
pub fn tool_result(id: Option<&Value>, name: Option<&Value>, content: impl Into<Value>) -> Value {
    let mut message = plain_value("tool", content);
    for (key, value) in [("tool_call_id", id), ("name", name)] {
        if let Some(value) = value.filter(|value| value.is_string()) {
            message[key] = value.clone();
        }
    }
    message
}

/// Returns the schemas of tools, or `None` without tools. `parameters` returns the parameters of a tool.
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
