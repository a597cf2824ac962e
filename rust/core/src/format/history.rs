//! Request histories of a call log become one pool of distinct messages and a path of indices for each request.
//!
//! A message at a place where an earlier request or response had an equal one is that one. An assistant message that
//! equals a produced one elsewhere is the produced one: its history was rewritten before it. Everything else is new.

use crate::trace::Message;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::fmt::Write;

/// Before any message.
const ROOT: u32 = 0;

/// The pool and the tree of paths through it.
#[derive(Debug, Default)]
pub(super) struct History {
    /// Every distinct message.
    pub messages: Vec<Message>,
    /// Number of each distinct identity.
    identities: HashMap<String, u32>,
    /// Pool indices of produced messages by identity, in the order of the calls.
    produced: HashMap<u32, Vec<u32>>,
    /// Pool index of given messages by identity.
    given: HashMap<u32, u32>,
    /// (node, identity) -> (next node, pool index).
    steps: HashMap<(u32, u32), (u32, u32)>,
    nodes: u32,
}

/// A path through the pool, and where it ends in the tree.
#[derive(Debug, Default)]
pub(super) struct Path {
    pub context: Vec<u32>,
    end: u32,
}

impl History {
    /// The path of a request's messages.
    pub fn follow(&mut self, request: Vec<Message>) -> Path {
        let mut path = Path { context: Vec::with_capacity(request.len()), end: ROOT };
        for message in request {
            let identity = self.identify(&message);
            let known = self.steps.get(&(path.end, identity)).copied();
            let (node, index) = known.unwrap_or_else(|| {
                let index =
                    self.find(&message, identity, &path.context).unwrap_or_else(|| self.give(message, identity));
                (self.step(path.end, identity, index), index)
            });
            path.context.push(index);
            path.end = node;
        }
        path
    }

    /// Adds the message that was produced at the end of a path.
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

/// What makes two messages equal, as one string.
fn identity(message: &Message) -> String {
    let empty = Map::new();
    let fields = message.value.as_object().unwrap_or(&empty);
    if message.role() == "assistant" { assistant_identity(fields) } else { other_identity(fields) }
}

/// Role, content, reasoning and tool calls; keys that API objects add beside them do not count.
fn assistant_identity(fields: &Map<String, Value>) -> String {
    let reasoning = ["reasoning_content", "reasoning"]
        .iter()
        .find_map(|key| fields.get(*key).and_then(Value::as_str).filter(|text| !text.is_empty()))
        .unwrap_or("");
    let mut identity = format!("assistant\u{0}{}\u{0}{reasoning}\u{0}", content(fields));
    for call in fields.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
        let function = call.get("function").unwrap_or(call);
        let name = function.get("name").and_then(Value::as_str).unwrap_or("");
        let id = call.get("id").and_then(Value::as_str).unwrap_or("");
        let _ = write!(identity, "{name}\u{0}{id}\u{0}{}\u{0}", arguments(function.get("arguments")));
    }
    identity
}

/// Arguments as JSON, whether they were kept as an object or as a string that holds one.
fn arguments(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => {
            serde_json::from_str::<Value>(text).map_or_else(|_| text.clone(), |parsed| parsed.to_string())
        }
        Some(other) => other.to_string(),
    }
}

/// Content with null equal to the empty string and one text part equal to its text.
fn content(fields: &Map<String, Value>) -> String {
    match fields.get("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) if parts.len() == 1 && parts[0].get("type").is_some_and(|kind| kind == "text") => {
            parts[0].get("text").and_then(Value::as_str).unwrap_or("").to_owned()
        }
        Some(other) => other.to_string(),
    }
}

/// Content, and all other keys that are not null, in the order of their names.
fn other_identity(fields: &Map<String, Value>) -> String {
    let mut rest: Vec<_> = fields.iter().filter(|(key, value)| *key != "content" && !value.is_null()).collect();
    rest.sort_by_key(|(key, _)| *key);
    let mut identity = format!("other\u{0}{}\u{0}", content(fields));
    for (key, value) in rest {
        let _ = write!(identity, "{key}\u{0}{value}\u{0}");
    }
    identity
}
