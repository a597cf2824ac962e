//! Reads records fast: a scanner of the layouts that producers write.
//!
//! It gives the same as `fallback` or gives up (`None`) at the first byte it does not know: odd escapes, deep nesting,
//! values of another type. Then `fallback` reads the record again and says what is wrong. The law `Some(x) == slowly(x)`
//! is fuzzed in the tests. Tool schemas are repeated by the records of a file: a text that was read before gives the
//! value of then.
#![allow(clippy::option_option, reason = "null is a value, and what is not known is none")]
#![allow(clippy::inline_always, reason = "a call for each value of each entry costs a good part of reading it")]

mod cursor;
mod entries;
#[cfg(test)]
mod tests;

use crate::format::json::object::{Kind, Node, Object, Slot};
use crate::pool::soon;
use crate::trace::{Pieces, Schemas, Tokens};
use cursor::Cursor;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Mutex;

/// The object of some kind that is written as `text`, or `None` where `fallback` has to look.
pub(super) fn object(text: &str, kind: Kind) -> Option<Object> {
    whole(text, |cursor| cursor.object(kind)).map(|object| *object)
}

pub(super) fn ids(text: &str) -> Option<Vec<u32>> {
    whole(text, Cursor::ids)
}

pub(super) fn logprobs(text: &str) -> Option<Option<Tokens>> {
    whole(text, Cursor::logprobs)
}

/// Whether a text is JSON; false where the generic parser has to look.
pub(super) fn is_json(text: &str) -> bool {
    whole(text, |cursor| cursor.skip().filter(|()| !cursor.bare)).is_some()
}

/// The value of a whole text.
fn whole<'a, T>(text: &'a str, read: impl FnOnce(&mut Cursor<'a>) -> Option<T>) -> Option<T> {
    let mut cursor = Cursor::new(text);
    cursor.blank();
    let value = read(&mut cursor)?;
    cursor.blank();
    cursor.at_end().then_some(value)
}

impl<'a> Cursor<'a> {
    /// An object whose keys mean what `kind` says.
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
                object.signed = true;
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

    /// A prompt's ids: each turn of a conversation lists those of the turn before again.
    fn prompt_ids(&mut self) -> Option<Vec<u32>> {
        let start = self.place();
        let (text, before) = std::mem::take(&mut self.prompt);
        let ids = self.ids_behind((text, &before))?;
        let written = self.since(start)?.as_bytes();
        self.prompt = (&written[1..written.len() - 1], ids.clone());
        Some(ids)
    }

    /// A list of ids, which may begin as another did: what was written there, and its ids.
    fn ids_behind(&mut self, (text, before): (&[u8], &[u32])) -> Option<Vec<u32>> {
        // A list of numbers has no bracket inside, so its commas count them.
        let end = memchr::memchr(b']', self.rest())?;
        let mut ids = Vec::with_capacity(1 + memchr::memchr_iter(b',', &self.rest()[..end]).count());
        let behind = self.rest().get(1..end).and_then(|list| list.strip_prefix(text));
        let again = !before.is_empty() && behind.is_some_and(|rest| rest.first().is_none_or(|&byte| byte == b','));
        let start = self.place();
        self.open(b'[')?;
        let mut more = !self.closes(b']');
        if again && self.since(start)?.len() == 1 {
            ids.extend_from_slice(before);
            self.advance(text.len());
            more = self.continues(b']')?;
        }
        while more {
            ids.push(self.id()?);
            more = self.continues(b']')?;
        }
        self.close();
        Some(ids)
    }

    /// `["Hi", null]`: texts of tokens, null where one is unknown.
    fn texts(&mut self) -> Option<Pieces> {
        let mut pieces = Pieces::default();
        self.list(|cursor| {
            let known = cursor.unless_null(|cursor| cursor.spelled(&mut pieces.data))?.is_some();
            pieces.close(known);
            Some(())
        })?;
        Some(pieces)
    }

    /// `[[72, 105], null]`: bytes of tokens, null where they are unknown.
    fn byte_lists(&mut self) -> Option<Pieces> {
        let mut pieces = Pieces::default();
        self.list(|cursor| {
            let known = cursor.byte_list(&mut pieces.data)?;
            pieces.close(known);
            Some(())
        })?;
        Some(pieces)
    }
}

/// Keys for which room is made at once: as many as messages have.
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

/// Texts that are remembered, the last one used first.
const TEXTS: usize = 8;
/// Bytes of the longest text that is remembered.
const TEXT_BYTES: usize = 64 << 10;

static SEEN: Mutex<VecDeque<(Box<str>, Schemas)>> = Mutex::new(VecDeque::new());

impl Cursor<'_> {
    pub fn tools(&mut self) -> Option<Schemas> {
        // A list ends with its own bracket, so what begins with the text of one begins with that list.
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
            && let Some(mut seen) = soon(&SEEN)
        {
            seen.truncate(TEXTS - 1);
            seen.push_front((text.into(), Schemas::clone(&tools)));
        }
        Some(tools)
    }
}

/// The list that `text` begins with, and its length, where it was read before.
fn remembered(text: &[u8]) -> Option<(usize, Schemas)> {
    let mut seen = soon(&SEEN)?;
    let at = seen.iter().position(|(known, _)| text.starts_with(known.as_bytes()))?;
    seen.swap(0, at);
    seen.front().map(|(known, tools)| (known.len(), Schemas::clone(tools)))
}
