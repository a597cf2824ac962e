//! An `Object` from the values of a record one by one, each of which may be at fault: for records that the scanner gives up.

use super::logprobs;
use super::numbers::TokenText;
use super::object::{Kind, Node, Object, Slot};
use super::raw::{Read, Shape, bytes, each, ids, members, parse, value};
use crate::trace::{Pieces, Schemas};
use serde_json::value::RawValue;

/// What stands in `text`, where an object of this kind is expected.
pub fn read(text: &str, kind: Kind) -> Read<'_, Node> {
    node(parse(text)?, kind)
}

/// What stands in `raw`, where an object of this kind is expected.
pub fn node(raw: &RawValue, kind: Kind) -> Read<'_, Node> {
    match Shape::of(raw) {
        Shape::Object => object(raw, kind).map(|object| Node::Object(Box::new(object))),
        Shape::List => {
            let mut nodes = Vec::new();
            each(raw, "a list", |item| node(item, kind).map(|node| nodes.push(node)))?;
            Ok(Node::List(nodes))
        }
        _ => value(raw).map(Node::Other),
    }
}

fn object(raw: &RawValue, kind: Kind) -> Read<'_, Object> {
    let mut object = Object::default();
    for (key, value) in members(raw.get())? {
        member(&mut object, kind, &key, value).map_err(|fault| fault.under(&key))?;
    }
    Ok(object)
}

fn member<'a>(object: &mut Object, kind: Kind, key: &str, raw: &'a RawValue) -> Read<'a, ()> {
    let numbers = &mut object.numbers;
    match kind.slot(key) {
        Slot::Logprobs => numbers.logprobs = logprobs::read(raw)?.map(Box::new),
        Slot::TokenIds => numbers.token_ids = unless_null(raw, ids)?,
        Slot::PromptIds => numbers.prompt_token_ids = unless_null(raw, ids)?,
        Slot::Texts => numbers.texts = unless_null(raw, texts)?.map(Box::new),
        Slot::Bytes => numbers.bytes = unless_null(raw, byte_lists)?.map(Box::new),
        Slot::Nested(name, kind) => object.put(name, node(raw, kind)?),
        Slot::Tools => object.tools = Some(Schemas::new(value(raw)?)),
        Slot::Keep => {
            object.fields.insert(key.to_owned(), value(raw)?);
        }
        Slot::Sign => object.signed = true,
        Slot::Skip => {}
    }
    Ok(())
}

fn unless_null<'a, T>(raw: &'a RawValue, read: fn(&'a RawValue) -> Read<'a, T>) -> Read<'a, Option<T>> {
    if Shape::of(raw) == Shape::Null { Ok(None) } else { read(raw).map(Some) }
}

/// `["Hi", null]`: texts of tokens, null where one is unknown.
fn texts(raw: &RawValue) -> Read<'_, Pieces> {
    let mut pieces = Pieces::default();
    each(raw, "a list of token texts or null", |item| {
        parse::<TokenText>(item.get()).map(|text| pieces.push(text.0.as_deref()))
    })?;
    Ok(pieces)
}

/// `[[72, 105], null]`: bytes of tokens, null where they are unknown.
fn byte_lists(raw: &RawValue) -> Read<'_, Pieces> {
    let mut pieces = Pieces::default();
    each(raw, "a list of byte lists or null", |item| bytes(item).map(|bytes| pieces.push(bytes.as_deref())))?;
    Ok(pieces)
}
