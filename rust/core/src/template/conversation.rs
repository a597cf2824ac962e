//! Messages as transformers passes them to a template, with marks around their strings if requested.
//!
//! All normalization of messages happens in this module.

use super::cache::same;
use super::marks::{Marker, UsedCharacters};
use super::rendered::Field;
use super::rewrite::UNMARKED;
use super::server_message::Rules;
use super::value::{contained, merged, note, plain, record, size};
use crate::error::{Error, Kind, Result};
use crate::json_number;
use crate::trace::value_of;
use minijinja::value::Value;
use serde_json::{Map, Value as Json};

/// Names under which a message's reasoning is passed. Templates read the first one.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

#[derive(Debug)]
struct CheckedMessage<'a> {
    original: &'a Json,
    map: &'a Map<String, Json>,
    /// Its content in the server's form, if that differs.
    content: Option<Json>,
    /// For each tool call, its arguments as parsed, if that differs from how they are written.
    parsed: Vec<Option<Json>>,
    has_null: bool,
    used: UsedCharacters,
    /// Approximate number of bytes of its strings.
    bytes: usize,
}

/// Messages as a server or transformers passes them on, for example with JSON-string arguments parsed.
#[derive(Debug, Default)]
pub(super) struct Conversation<'a> {
    rules: Rules,
    messages: Vec<CheckedMessage<'a>>,
}

impl<'a> Conversation<'a> {
    /// Creates a conversation after checking that every message is an object with a role.
    pub fn new(messages: &[&'a Json], rules: Rules) -> Result<Self> {
        let mut conversation = Self { rules, ..Self::default() };
        conversation.follow(messages)?;
        Ok(conversation)
    }

    /// Replaces the messages with `messages`, and returns how many leading messages stay.
    pub fn follow(&mut self, messages: &[&'a Json]) -> Result<usize> {
        let is_same = |(checked, message): &(&CheckedMessage<'a>, &&'a Json)| {
            std::ptr::eq(checked.original, **message) || same(checked.original, message)
        };
        let common = self.messages.iter().zip(messages).take_while(is_same).count();
        self.messages.truncate(common);
        for (index, &original) in messages.iter().enumerate().skip(common) {
            let Json::Object(map) = original else {
                return Err(Error::new(
                    Kind::Argument,
                    "TG-TEMPLATE-002",
                    format!("message {index} is not a JSON object"),
                )
                .why("A chat template reads role and content of each message")
                .fix("Pass messages as a list of {\"role\": ..., \"content\": ...}"));
            };
            let content = self.rules.content(map, index);
            let parsed = parsed_arguments(map, self.rules);
            let mut used = UsedCharacters::default();
            map.values().chain(&content).chain(parsed.iter().flatten()).for_each(|value| note(&mut used, value));
            let has_null = self.rules.server.is_none() && map.values().any(Json::is_null);
            let bytes = map.values().chain(&content).map(size).sum();
            self.messages.push(CheckedMessage { original, map, content, parsed, has_null, used, bytes });
        }
        Ok(common)
    }

    /// Returns true if a message has a key with value null.
    pub fn has_null(&self) -> bool {
        self.messages.iter().any(|message| message.has_null)
    }

    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Returns the approximate number of bytes of the messages' strings.
    pub fn bytes(&self) -> usize {
        self.messages.iter().map(|message| message.bytes).sum()
    }

    /// Returns the strings of reasoning and content, in order.
    pub fn leaves(&self) -> Vec<(u32, Field, &str)> {
        let mut leaves = Vec::new();
        for (index, CheckedMessage { map, content, .. }) in self.messages.iter().enumerate() {
            for (key, field) in
                REASONING.map(|name| (name, Field::Reasoning)).into_iter().chain([("content", Field::Content)])
            {
                let server_form = content.as_ref().filter(|_| key == "content");
                match server_form.or_else(|| value_of(map, key)) {
                    Some(Json::String(text)) => leaves.push((index as u32, field, text.as_str())),
                    Some(Json::Array(parts)) => {
                        let texts =
                            parts.iter().filter_map(|part| part.as_str().or_else(|| part.get("text")?.as_str()));
                        leaves.extend(texts.map(|text| (index as u32, field, text)));
                    }
                    _ => {}
                }
            }
        }
        leaves
    }

    /// Returns the noncharacters of all strings.
    pub fn used(&self) -> UsedCharacters {
        self.messages.iter().fold(UsedCharacters::default(), |used, message| used.with(message.used))
    }

    /// Returns a message as a template value. `marks` are a marker and the selection of messages to mark.
    pub fn value(&self, index: usize, keep_null: bool, marks: Option<(&mut Marker<'_>, &Selection)>) -> Value {
        let checked = &self.messages[index];
        let CheckedMessage { map, .. } = checked;
        let role = value_of(map, "role").and_then(Json::as_str).unwrap_or("");
        let marker = marks.and_then(|(marker, selection)| {
            marker.inside = selection.inside(role);
            selection.takes(index).then_some(marker)
        });
        match self.rules.keys(map) {
            Some(keys) => self.served_value(checked, keys, index as u32, marker),
            None => self.message_value(checked, keep_null, index as u32, marker),
        }
    }

    /// Returns a message with the keys that a server passes on.
    fn served_value(
        &self,
        checked: &CheckedMessage<'_>,
        keys: Vec<(&str, &Json)>,
        index: u32,
        mut marker: Option<&mut Marker<'_>>,
    ) -> Value {
        let pairs = keys.into_iter().map(|(key, value)| {
            let value = match key {
                "role" => Value::from(self.rules.role(value.as_str().unwrap_or_default())),
                "content" => text_value(checked.content.as_ref().unwrap_or(value), index, Field::Content, &mut marker),
                "thinking" | "reasoning" | "reasoning_content" => {
                    text_value(value, index, Field::Reasoning, &mut marker)
                }
                "tool_calls" => self.calls_value(value, &checked.parsed, index, &mut marker),
                _ => plain(value),
            };
            (key, value)
        });
        record(pairs)
    }

    /// Returns a message with its own keys.
    fn message_value(
        &self,
        checked: &CheckedMessage<'_>,
        keep_null: bool,
        index: u32,
        mut marker: Option<&mut Marker<'_>>,
    ) -> Value {
        let CheckedMessage { map, content, parsed, .. } = checked;
        let mut pairs: Vec<(&str, Value)> = Vec::with_capacity(map.len() + 3);
        let reasoning = REASONING.iter().find_map(|name| value_of(map, name).filter(|value| !value.is_null()));
        let reasoning = reasoning.map(|value| text_value(value, index, Field::Reasoning, &mut marker));
        let has_reasoning = reasoning.is_some();
        if let Some(reasoning) = &reasoning {
            pairs.push(("thinking", reasoning.clone()));
        }
        for (key, value) in *map {
            let value = content.as_ref().filter(|_| key == "content").unwrap_or(value);
            if value.is_null() && !keep_null {
                continue;
            }
            let converted = match key.as_str() {
                "content" => text_value(value, index, Field::Content, &mut marker),
                "role" => Value::from(self.rules.role(value.as_str().unwrap_or_default())),
                "thinking" | "reasoning" => text_value(value, index, Field::Reasoning, &mut marker),
                "reasoning_content" if reasoning.is_some() => continue,
                "tool_calls" => self.calls_value(value, parsed, index, &mut marker),
                _ => plain(value),
            };
            pairs.push((key, converted));
        }
        if let Some(content) = content.as_ref().filter(|_| !map.contains_key("content")) {
            pairs.push(("content", text_value(content, index, Field::Content, &mut marker)));
        }
        if let Some(reasoning) = reasoning {
            pairs.push(("reasoning_content", reasoning));
        }
        if has_reasoning { merged(pairs.into_iter()) } else { record(pairs.into_iter()) }
    }

    /// Returns tool calls with arguments as objects. With a marker, names and arguments are marked and ids are not.
    fn calls_value(
        &self,
        json: &Json,
        parsed: &[Option<Json>],
        message: u32,
        marker: &mut Option<&mut Marker<'_>>,
    ) -> Value {
        let Json::Array(calls) = json else { return plain(json) };
        let calls: Vec<Value> = calls
            .iter()
            .enumerate()
            .map(|(index, call)| self.call_value(call, parsed.get(index).and_then(Option::as_ref), message, marker))
            .collect();
        contained(Value::from(calls), message, marker)
    }

    fn call_value(
        &self,
        call: &Json,
        arguments: Option<&Json>,
        message: u32,
        marker: &mut Option<&mut Marker<'_>>,
    ) -> Value {
        let Json::Object(map) = call else { return plain(call) };
        let mut pairs = Vec::with_capacity(map.len() + 1);
        for (key, value) in self.rules.call_keys(map) {
            let converted = match key {
                "function" => self.call_value(value, arguments, message, marker),
                "arguments" => argument_value(arguments.unwrap_or(value), message, marker),
                "name" => argument_value(value, message, marker),
                _ => plain(value),
            };
            pairs.push((key, converted));
        }
        // A call without arguments gets those that its server assumes.
        if let Some(arguments) = arguments.filter(|_| !map.contains_key("arguments") && !map.contains_key("function")) {
            pairs.push(("arguments", argument_value(arguments, message, marker)));
        }
        contained(record(pairs.into_iter()), message, marker)
    }
}
/// The messages that are marked, and the position of the marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Selection {
    /// All messages, marks outside whitespace.
    Outside,
    /// All messages, marks inside whitespace in assistant messages only.
    AssistantInside,
    /// All messages, marks inside whitespace.
    Inside,
    /// One message, marks inside whitespace.
    Only(usize),
    /// No message, only tool schemas.
    Schemas,
}

impl Selection {
    fn inside(self, role: &str) -> bool {
        match self {
            Self::Outside => false,
            Self::AssistantInside => role == "assistant",
            _ => true,
        }
    }

    fn takes(self, index: usize) -> bool {
        match self {
            Self::Only(only) => only == index,
            Self::Schemas => false,
            _ => true,
        }
    }
}

fn tool_calls(map: &Map<String, Json>) -> &[Json] {
    value_of(map, "tool_calls").and_then(Json::as_array).map_or(&[], Vec::as_slice)
}

/// Returns, for each tool call, its arguments as parsed, if that differs from how they are written.
fn parsed_arguments(map: &Map<String, Json>, rules: Rules) -> Vec<Option<Json>> {
    tool_calls(map).iter().map(|call| rules.arguments(call.get("function").unwrap_or(call).get("arguments"))).collect()
}

/// Returns a string, or a list of parts whose texts are marked.
fn text_value(json: &Json, message: u32, field: Field, marker: &mut Option<&mut Marker<'_>>) -> Value {
    let Some(marker) = marker else { return plain(json) };
    match json {
        Json::String(text) => Value::from(marker.leaf(text, message, field)),
        Json::Array(parts) => {
            Value::from(parts.iter().map(|part| part_value(part, message, field, marker)).collect::<Vec<_>>())
        }
        other => plain(other),
    }
}

fn part_value(part: &Json, message: u32, field: Field, marker: &mut Marker<'_>) -> Value {
    match part {
        Json::String(text) => Value::from(marker.leaf(text, message, field)),
        Json::Object(map) => record(map.iter().map(|(key, value)| {
            let value = match value {
                Json::String(text) if key == "text" => Value::from(marker.leaf(text, message, field)),
                other => plain(other),
            };
            (key.as_str(), value)
        })),
        other => plain(other),
    }
}

fn argument_value(json: &Json, message: u32, marker: &mut Option<&mut Marker<'_>>) -> Value {
    let Some(active) = marker else { return plain(json) };
    match json {
        number if json_number::digits_of(number).is_some() => plain(number),
        Json::String(text) => Value::from(active.leaf(text, message, Field::ToolCall)),
        Json::Array(items) => {
            let items: Vec<Value> = items.iter().map(|item| argument_value(item, message, marker)).collect();
            contained(Value::from(items), message, marker)
        }
        Json::Object(map) => {
            active.noted.doubt |= map.keys().any(|key| UNMARKED.contains(&key.as_str()));
            let pairs: Vec<(&str, Value)> =
                map.iter().map(|(key, value)| (key.as_str(), argument_value(value, message, marker))).collect();
            contained(record(pairs.into_iter()), message, marker)
        }
        other => plain(other),
    }
}
