//! The fast road into a record: a scanner of the layouts that producers write.
//!
//! It gives the same as `generic` or gives up (`None`) at the first byte it does not know: odd escapes, deep
//! nesting, values of another type. Then `generic` reads the record again and says what is wrong. The law
//! `Some(x) == slowly(x)` is fuzzed in the tests. The files, each using those before it alone: `text`, `cursor`,
//! `number`, `value`, `tools`, `entries`.

#![allow(clippy::option_option, reason = "null is a value, and what is not known is none")]
#![allow(clippy::inline_always, reason = "a call for each value of each entry costs a good part of reading it")]

mod cursor;
mod entries;
mod number;
#[cfg(test)]
mod tests;
mod text;
mod tools;
mod value;

use crate::format::json::object::{Kind, Node, Object, Slot};
use crate::trace::{Pieces, Tokens};
use cursor::Cursor;
use serde_json::Map;
use std::borrow::Cow;
use value::FEW;

/// The object of some kind that is written as `text`, or `None` where `generic` has to look.
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
