//! A fast reader of records: a scanner for the JSON layouts that producers usually write.
//!
//! It returns the same value as `fallback`, or `None` at the first construct that it does not support: rare escapes,
//! deep nesting, values of another type. Then `fallback` reads the record again and reports the error. The tests fuzz
//! this property, `Some(x) == parse_generic(x)`.
//!
//! The records of a file usually repeat their tool schemas, so a schema text that was parsed before is taken from a
//! cache.
#![allow(clippy::option_option, reason = "null is a value, and what is not known is none")]
#![allow(clippy::inline_always, reason = "a call for each value of each entry costs a good part of reading it")]

mod cursor;
mod entries;
#[cfg(test)]
mod tests;

use crate::format::json::object::{Kind, Node, Object, Slot};
use crate::pool::try_lock_briefly;
use crate::trace::{Pieces, Schemas, Tokens};
use cursor::Cursor;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Mutex;

/// Returns the object that `text` contains, or `None` if `fallback` must read it.
pub(super) fn object(text: &str, kind: Kind) -> Option<Object> {
    whole(text, |cursor| cursor.object(kind)).map(|object| *object)
}

pub(super) fn ids(text: &str) -> Option<Vec<u32>> {
    whole(text, Cursor::ids)
}

pub(super) fn logprobs(text: &str) -> Option<Option<Tokens>> {
    whole(text, Cursor::logprobs)
}

/// Returns whether a text is JSON. False also means that the generic parser must decide.
pub(super) fn is_json(text: &str) -> bool {
    whole(text, |cursor| cursor.skip().filter(|()| !cursor.bare)).is_some()
}

/// Reads one value that must span the complete text.
fn whole<'a, T>(text: &'a str, read: impl FnOnce(&mut Cursor<'a>) -> Option<T>) -> Option<T> {
    let mut cursor = Cursor::new(text);
    cursor.blank();
    let value = read(&mut cursor)?;
    cursor.blank();
    cursor.at_end().then_some(value)
}

impl<'a> Cursor<'a> {
    /// Reads an object. `kind` defines the meaning of its keys.
    fn object(&mut self, kind: Kind) -> Option<Box<Object>> {
        let mut object = Box::<Object>::default();
        self.members(|cursor, key| cursor.member(&mut object, kind, key))?;
        Some(object)
    }

    #[inline]
    fn member(&mut self, object: &mut Object, kind: Kind, key: Cow<'a, str>) -> Option<()> {
        let numbers = &mut object.numbers;
        match kind.slot(&key) {
            Slot::Logprobs => numbers.logprobs = self.logprobs()?.map(Box::new),
            Slot::TokenIds => numbers.token_ids = self.unless_null(Self::ids)?,
            Slot::PromptIds => numbers.prompt_token_ids = self.unless_null(Self::prompt_ids)?,
            Slot::Texts => numbers.texts = self.unless_null(Self::texts)?.map(Box::new),
            Slot::Bytes => numbers.bytes = self.unless_null(Self::byte_lists)?.map(Box::new),
            Slot::Nested(name, kind) => object.put(name, self.node(kind)?),
            Slot::Tools => object.tools = Some(self.tools()?),
            Slot::Keep => {
                let value = self.value()?;
                if object.fields.is_empty() {
                    object.fields = Map::with_capacity(FEW);
                }
                object.fields.insert(key.into_owned(), value);
            }
            Slot::Sign => {
                self.skip()?;
                object.has_sign = true;
            }
            Slot::Skip => self.skip()?,
        }
        Some(())
    }

    #[inline]
    fn unless_null<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<Option<T>> {
        if self.word(b"null").is_some() { Some(None) } else { read(self).map(Some) }
    }

    fn node(&mut self, kind: Kind) -> Option<Node> {
        match self.peek() {
            b'{' => self.object(kind).map(Node::Object),
            b'[' => {
                let mut nodes = Vec::new();
                self.list(|cursor| cursor.node(kind).map(|node| nodes.push(node)))?;
                Some(Node::List(nodes))
            }
            _ => self.value().map(Node::Other),
        }
    }

    fn ids(&mut self) -> Option<Vec<u32>> {
        self.ids_behind((&[], &[]))
    }

    /// Reads the ids of a prompt. In a conversation each prompt usually starts with the ids of the one before.
    fn prompt_ids(&mut self) -> Option<Vec<u32>> {
        let start = self.place();
        let (text, known_ids) = std::mem::take(&mut self.prompt);
        let ids = self.ids_behind((text, &known_ids))?;
        let written = self.since(start)?.as_bytes();
        self.prompt = (&written[1..written.len() - 1], ids.clone());
        Some(ids)
    }

    /// Reads a list of ids that may start with a known text. The pair is that text and its ids.
    fn ids_behind(&mut self, (known_text, known_ids): (&[u8], &[u32])) -> Option<Vec<u32>> {
        // A list of numbers contains no brackets, so its commas give the number of ids.
        let end = memchr::memchr(b']', self.rest())?;
        let mut ids = Vec::with_capacity(1 + memchr::memchr_iter(b',', &self.rest()[..end]).count());
        let following = self.rest().get(1..end).and_then(|list| list.strip_prefix(known_text));
        let repeats =
            !known_ids.is_empty() && following.is_some_and(|rest| rest.first().is_none_or(|&byte| byte == b','));
        let start = self.place();
        self.open(b'[')?;
        let mut more = !self.closes(b']');
        if repeats && self.since(start)?.len() == 1 {
            ids.extend_from_slice(known_ids);
            self.advance(known_text.len());
            more = self.continues(b']')?;
        }
        while more {
            ids.push(self.id()?);
            more = self.continues(b']')?;
        }
        self.close();
        Some(ids)
    }

    /// Reads texts of tokens, `["Hi", null]`. Null means unknown.
    fn texts(&mut self) -> Option<Pieces> {
        let mut pieces = Pieces::default();
        self.list(|cursor| {
            let is_known = cursor.unless_null(|cursor| cursor.spelled(&mut pieces.data))?.is_some();
            pieces.close(is_known);
            Some(())
        })?;
        Some(pieces)
    }

    /// Reads bytes of tokens, `[[72, 105], null]`. Null means unknown.
    fn byte_lists(&mut self) -> Option<Pieces> {
        let mut pieces = Pieces::default();
        self.list(|cursor| {
            let is_known = cursor.byte_list(&mut pieces.data)?;
            pieces.close(is_known);
            Some(())
        })?;
        Some(pieces)
    }
}

/// Initial capacity of an object, in keys: that of a typical message.
const FEW: usize = 4;

impl Cursor<'_> {
    pub fn value(&mut self) -> Option<Value> {
        Some(match self.peek() {
            b'"' => Value::String(self.unquoted()?.to_owned()),
            b'{' => Value::Object(self.map()?),
            b'[' => {
                let mut items = Vec::new();
                self.list(|cursor| cursor.value().map(|item| items.push(item)))?;
                Value::Array(items)
            }
            b't' => self.word(b"true").map(|()| Value::Bool(true))?,
            b'f' => self.word(b"false").map(|()| Value::Bool(false))?,
            b'n' => self.word(b"null").map(|()| Value::Null)?,
            _ => match self.number_value() {
                Some(number) => number,
                None => self.bare()?.into(),
            },
        })
    }

    fn map(&mut self) -> Option<Map<String, Value>> {
        let mut map = Map::new();
        self.members(|cursor, key| {
            let value = cursor.value()?;
            if map.is_empty() {
                map = Map::with_capacity(FEW);
            }
            map.insert(key.into_owned(), value);
            Some(())
        })?;
        Some(map)
    }
}

/// Number of cached texts. The most recently used one is first.
const TEXTS: usize = 8;
/// Bytes of the longest text that is cached.
const TEXT_BYTES: usize = 64 << 10;

static SEEN: Mutex<VecDeque<(Box<str>, Schemas)>> = Mutex::new(VecDeque::new());

impl Cursor<'_> {
    pub fn tools(&mut self) -> Option<Schemas> {
        // A list ends with its own bracket, so a text that starts with a cached list starts with exactly that list.
        if self.peek() != b'[' {
            return self.value().map(Schemas::new);
        }
        if let Some((length, tools)) = remembered(self.rest()) {
            self.advance(length);
            return Some(tools);
        }
        let start = self.place();
        let tools = self.value().map(Schemas::new)?;
        let text = self.since(start)?;
        if text.len() <= TEXT_BYTES
            && let Some(mut cache) = try_lock_briefly(&SEEN)
        {
            cache.truncate(TEXTS - 1);
            cache.push_front((text.into(), Schemas::clone(&tools)));
        }
        Some(tools)
    }
}

/// Returns the cached list that `text` starts with, and its length in bytes.
fn remembered(text: &[u8]) -> Option<(usize, Schemas)> {
    let mut cache = try_lock_briefly(&SEEN)?;
    let at = cache.iter().position(|(source, _)| text.starts_with(source.as_bytes()))?;
    cache.swap(0, at);
    cache.front().map(|(source, tools)| (source.len(), Schemas::clone(tools)))
}
