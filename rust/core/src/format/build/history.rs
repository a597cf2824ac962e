//! Merges the request histories of a call log into one pool of distinct messages, and a path of pool indices for each
//! request.
//!
//! A message equals an earlier one if that one was at the same place of a request or response. An assistant message
//! that equals a produced message elsewhere is that one: the history before it was rewritten. Every other message is
//! new.

use crate::cache::{write, write_text};
use crate::json_number;
use crate::trace::Message;
use foldhash::HashMap;
use serde_json::{Map, Value};

/// Node before the first message.
const ROOT: u32 = 0;

/// The pool of messages, and the tree of paths through it.
#[derive(Debug, Default)]
pub struct History {
    /// Every distinct message.
    pub messages: Vec<Message>,
    /// Number of each distinct message key.
    identities: HashMap<Vec<u8>, u32>,
    /// Pool indices of produced messages by key, in the order of the calls.
    produced: HashMap<u32, Vec<u32>>,
    /// Pool index of messages from requests, by key.
    given: HashMap<u32, u32>,
    /// (node, key) -> (next node, pool index).
    steps: HashMap<(u32, u32), (u32, u32)>,
    nodes: u32,
}

/// A path through the pool, and its last node in the tree.
#[derive(Debug, Default)]
pub struct Path {
    pub context: Vec<u32>,
    end: u32,
}

impl History {
    /// Adds the messages of a request and returns their path.
    pub fn follow(&mut self, request: Vec<Message>) -> Path {
        let mut path = Path { context: Vec::with_capacity(request.len()), end: ROOT };
        for message in request {
            let identity = self.identify(&message);
            let next_step = self.steps.get(&(path.end, identity)).copied();
            let (node, index) = next_step.unwrap_or_else(|| {
                let index =
                    self.find(&message, identity, &path.context).unwrap_or_else(|| self.give(message, identity));
                (self.step(path.end, identity, index), index)
            });
            path.context.push(index);
            path.end = node;
        }
        path
    }

    /// Adds the message that was sampled at the end of a path, and returns its index.
    pub fn produce(&mut self, path: &Path, message: Message) -> u32 {
        let identity = self.identify(&message);
        let index = self.push(message);
        self.produced.entry(identity).or_default().push(index);
        self.step(path.end, identity, index);
        index
    }

    fn find(&self, message: &Message, identity: u32, used: &[u32]) -> Option<u32> {
        if message.role() == "assistant" {
            let candidates = self.produced.get(&identity).map_or(&[][..], Vec::as_slice);
            if let Some(index) = candidates.iter().find(|index| !used.contains(index)) {
                return Some(*index);
            }
        }
        self.given.get(&identity).copied()
    }

    fn give(&mut self, message: Message, identity: u32) -> u32 {
        let index = self.push(message);
        self.given.insert(identity, index);
        index
    }

    fn push(&mut self, message: Message) -> u32 {
        self.messages.push(message);
        (self.messages.len() - 1) as u32
    }

    fn step(&mut self, from: u32, identity: u32, index: u32) -> u32 {
        self.nodes += 1;
        self.steps.insert((from, identity), (self.nodes, index));
        self.nodes
    }

    fn identify(&mut self, message: &Message) -> u32 {
        let next = self.identities.len() as u32;
        *self.identities.entry(identity(message)).or_insert(next)
    }
}

/// Returns the key of a message. Different messages have different keys.
fn identity(message: &Message) -> Vec<u8> {
    let empty = Map::new();
    let fields = message.value.as_object().unwrap_or(&empty);
    let mut identity = Vec::with_capacity(256);
    if message.role() == "assistant" {
        identity.push(b'A');
        write_content(&mut identity, fields);
        write_call_parts(&mut identity, fields);
    } else {
        identity.push(b'O');
        write_content(&mut identity, fields);
        write_others(&mut identity, fields);
    }
    identity
}

/// Appends reasoning and tool calls of an assistant message. Other keys of API objects are ignored.
fn write_call_parts(identity: &mut Vec<u8>, fields: &Map<String, Value>) {
    let mut reasoning = ["reasoning_content", "reasoning"].iter().filter_map(|key| fields.get(*key));
    write_said(identity, reasoning.find(|value| says(value)));
    for call in fields.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
        let function = call.get("function").unwrap_or(call);
        write_said(identity, function.get("name"));
        write_said(identity, call.get("id"));
        write_arguments(identity, function.get("arguments"));
    }
}

/// Returns whether a value is neither null nor the empty string.
fn says(value: &Value) -> bool {
    !value.is_null() && value.as_str() != Some("")
}

/// Appends a value. Null and the empty string are equal to a missing value.
fn write_said(identity: &mut Vec<u8>, value: Option<&Value>) {
    write(identity, value.filter(|value| says(value)).unwrap_or(&Value::Null));
}

/// Appends arguments as JSON, whether they are an object or a string that contains one.
fn write_arguments(identity: &mut Vec<u8>, value: Option<&Value>) {
    match value {
        Some(Value::String(text)) => {
            if let Ok(parsed) = json_number::parse(text) {
                write(identity, &parsed);
            } else {
                // No JSON value has this type byte.
                identity.push(b'r');
                write_text(identity, text);
            }
        }
        other => write_said(identity, other),
    }
}

/// Appends the content. Null equals the empty string, and a single text part equals its text.
fn write_content(identity: &mut Vec<u8>, fields: &Map<String, Value>) {
    let content = fields.get("content");
    let part = content.and_then(Value::as_array).and_then(|parts| match &parts[..] {
        [part] if part.get("type").is_some_and(|kind| kind == "text") => {
            part.get("text").filter(|text| text.is_string())
        }
        _ => None,
    });
    write_said(identity, part.or(content));
}

/// Appends all keys except `content` that are not null, sorted by name.
fn write_others(identity: &mut Vec<u8>, fields: &Map<String, Value>) {
    let mut fields: Vec<_> = fields.iter().filter(|(key, value)| *key != "content" && !value.is_null()).collect();
    fields.sort_by_key(|(key, _)| *key);
    for (key, value) in fields {
        write_text(identity, key);
        write(identity, value);
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::plain;
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn written(value: &Value) -> Vec<u8> {
        identity(&Message::new(value.clone(), None))
    }

    #[test]
    fn equal_answers_of_a_rewritten_history_are_each_used_once() {
        let (asked, said) = (|text: &str| plain("user", text), |text: &str| plain("assistant", text));
        let mut history = History::default();
        // Pool: 0 = "a", 1 = the first "ok", 2 = "b", 3 = the second "ok".
        let first = history.follow(vec![asked("a")]);
        assert_eq!((first.context.clone(), history.produce(&first, said("ok"))), (vec![0], 1));
        let second = history.follow(vec![asked("a"), said("ok"), asked("b")]);
        assert_eq!((second.context.clone(), history.produce(&second, said("ok"))), (vec![0, 1, 2], 3));
        // A new beginning: both answers are reused from elsewhere, each once.
        let rewritten = history.follow(vec![asked("c"), said("ok"), asked("d"), said("ok")]);
        assert_eq!(rewritten.context, [4, 1, 5, 3]);
    }

    #[test]
    fn what_is_written_differently_is_another_message() {
        let text = json!([{"type": "image_url", "image_url": "x"}]);
        let cases = [
            // The list, and a text that is the list's JSON.
            json!({"role": "user", "content": text}),
            json!({"role": "user", "content": text.to_string()}),
            // NUL bytes at the seams of content, reasoning and calls.
            json!({"role": "assistant", "content": "a\u{0}b"}),
            json!({"role": "assistant", "content": "a", "reasoning_content": "b"}),
            json!({"role": "assistant", "content": "a", "reasoning_content": "b\u{0}"}),
            json!({"role": "assistant", "content": "", "tool_calls": [{"id": "i", "function": {"name": "f\u{0}i", "arguments": ""}}]}),
            json!({"role": "assistant", "content": "", "tool_calls": [{"id": "i\u{0}", "function": {"name": "f", "arguments": ""}}]}),
            json!({"role": "assistant", "content": "", "tool_calls": [{"id": "i", "function": {"name": "f", "arguments": "x"}}]}),
            json!({"role": "assistant", "content": "", "tool_calls": [{"id": "i", "function": {"name": "f", "arguments": "\"x\""}}]}),
            json!({"role": "user", "content": "q", "name": "n\u{0}x"}),
            json!({"role": "user", "content": "q\u{0}name\u{0}\"n\""}),
            json!({"role": "user", "content": "q", "name": "n"}),
            json!({"role": "user", "content": [{"type": "text", "text": 5}]}),
            json!({"role": "user", "content": ""}),
        ];
        for (at, one) in cases.iter().enumerate() {
            for other in &cases[at + 1..] {
                assert_ne!(written(one), written(other), "{one} {other}");
            }
        }
    }

    #[test]
    fn what_servers_write_in_two_ways_is_one_message() {
        let pairs = json!([
            [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}],
            [{"role": "assistant", "content": null}, {"role": "assistant", "content": "", "refusal": null}],
            [{"role": "assistant", "tool_calls": [{"id": "i", "function": {"name": "f", "arguments": {"a": 1}}}]},
                {"role": "assistant", "tool_calls": [{"id": "i", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}],
        ]);
        for pair in pairs.as_array().expect("a list") {
            assert_eq!(written(&pair[0]), written(&pair[1]), "{pair}");
        }
    }

    fn words() -> impl Strategy<Value = String> {
        let parts = ["a", "\u{0}", "[", "]", "\"", "{}", "name", "other", "assistant"];
        prop::collection::vec(prop::sample::select(parts.to_vec()), 0..4).prop_map(|parts| parts.concat())
    }

    fn contents() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![words().prop_map(Value::from), Just(json!(0)), Just(json!(false))];
        leaf.prop_recursive(2, 6, 3, |inner| {
            let list = prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from);
            let text = inner.clone().prop_map(|value| json!({"text": value}));
            prop_oneof![list.clone(), text, list.prop_map(|value| Value::from(value.to_string()))]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn users_messages_are_one_only_where_their_keys_and_values_are(
            one in (contents(), words(), words()),
            other in (contents(), words(), words()),
        ) {
            let make = |(content, name, value): &(Value, String, String)| {
                json!({"role": "user", "content": content, format!("x{name}"): value})
            };
            let (a, b) = (make(&one), make(&other));
            prop_assert_eq!(written(&a) == written(&b), a == b, "{} {}", a, b);
        }

        #[test]
        fn assistants_messages_are_one_only_where_their_parts_are(
            one in (words(), words(), words(), words()),
            other in (words(), words(), words(), words()),
        ) {
            let make = |(content, reasoning, name, id): &(String, String, String, String)| {
                json!({"role": "assistant", "content": content, "reasoning_content": reasoning,
                    "tool_calls": [{"id": id, "function": {"name": name, "arguments": "{}"}}]})
            };
            let (a, b) = (make(&one), make(&other));
            prop_assert_eq!(written(&a) == written(&b), a == b, "{} {}", a, b);
        }
    }
}
