//! The fast road into a record: a scanner of the layouts that producers write, in front of the generic parser.
//!
//! It gives the same `Object` as the generic parser or gives up (`None`) at the first byte it does not know: odd escapes,
//! bare NaN, deep nesting, values of another type. Then the generic parser reads the record again and says what is wrong.
//! The law `Some(x) == generic(x)` is fuzzed in the tests. The files, each using those before it alone: `text`, `cursor`,
//! `number`, `value`, `tools`, `entries`.

mod cursor;
mod entries;
mod number;
#[cfg(test)]
mod tests;
mod text;
mod tools;
mod value;

use crate::format::json::logprobs::Logprobs;
use crate::format::json::numbers::PieceList;
use crate::format::json::object::{Kind, Node, Object, Slot};
use crate::trace::Pieces;
use cursor::Cursor;
use serde::Deserialize;
use serde::de::DeserializeSeed;
use serde_json::Map;
use value::FEW;

/// The record as an object, or `None` where the generic parser has to look.
pub(super) fn record(text: &str, is_sign: fn(&str) -> bool) -> Option<Object> {
    let mut cursor = Cursor::new(text);
    cursor.blank();
    let object = cursor.object(Kind::Record(is_sign))?;
    cursor.blank();
    cursor.at_end().then_some(*object)
}

/// Whether a text is JSON; false where the generic parser has to look.
pub(super) fn is_json(text: &str) -> bool {
    let mut cursor = Cursor::new(text);
    cursor.blank();
    let skipped = cursor.skip();
    cursor.blank();
    skipped.is_some() && cursor.at_end()
}

impl<'a> Cursor<'a> {
    /// An object whose keys mean what `kind` says.
    fn object(&mut self, kind: Kind) -> Option<Box<Object>> {
        let mut object = Box::<Object>::default();
        self.open(b'{')?;
        let mut more = !self.closes(b'}');
        while more {
            let key = self.key()?;
            match kind.slot(&key) {
                Slot::Logprobs => object.numbers.logprobs = self.logprobs()?.0.map(Box::new),
                Slot::TokenIds if self.null().is_some() => object.numbers.token_ids = None,
                Slot::TokenIds => object.numbers.token_ids = Some(self.ids()?),
                Slot::PromptIds if self.null().is_some() => object.numbers.prompt_token_ids = None,
                Slot::PromptIds => object.numbers.prompt_token_ids = Some(self.prompt_ids()?),
                Slot::Texts => object.numbers.texts = self.pieces(PieceList::Texts)?,
                Slot::Bytes => object.numbers.bytes = self.pieces(PieceList::Bytes)?,
                Slot::Nested(name, kind) => {
                    let node = self.node(kind)?;
                    object.put(name, node);
                }
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
            more = self.continues(b'}')?;
        }
        self.close();
        Some(object)
    }

    fn node(&mut self, kind: Kind) -> Option<Node> {
        match self.peek() {
            b'{' => self.object(kind).map(Node::Object),
            b'[' => {
                let mut nodes = Vec::new();
                self.open(b'[')?;
                let mut more = !self.closes(b']');
                while more {
                    nodes.push(self.node(kind)?);
                    more = self.continues(b']')?;
                }
                self.close();
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

    fn logprobs(&mut self) -> Option<Logprobs> {
        let start = self.place();
        self.known_logprobs().or_else(|| {
            self.rewind(start);
            self.generic(|json| Logprobs::deserialize(json))
        })
    }

    #[allow(clippy::option_option, reason = "null is no list, and what is not known is neither")]
    fn pieces(&mut self, list: PieceList) -> Option<Option<Box<Pieces>>> {
        self.generic(|json| list.deserialize(json)).map(|pieces| pieces.map(Box::new))
    }

    /// Reads the next value by the generic parser.
    fn generic<T>(
        &mut self,
        read: impl FnOnce(&mut serde_json::Deserializer<serde_json::de::StrRead<'a>>) -> serde_json::Result<T>,
    ) -> Option<T> {
        let text = self.skipped()?;
        read(&mut serde_json::Deserializer::from_str(text)).ok()
    }
}
