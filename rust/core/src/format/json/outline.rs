//! A JSON object whose values are still unread, and typed readers for them.
//!
//! The forms beside the OpenAI-shaped ones are told apart by their keys and then read value by value; a value that no
//! reader asks for costs one scan and nothing else. Complaints name the key.

use super::fields::{Fields, count_of, name_of, number_of};
use super::logprobs::Logprobs;
use super::numbers::{ID_COMPLAINT, Ids};
use crate::format::rejection::{Decoded, Reason, Rejection, not_a_trace, reject};
use crate::trace::Tokens;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// An object's keys with the JSON text of their values, borrowed from the record.
#[derive(Debug, Clone, Default)]
pub struct Outline<'a> {
    entries: Vec<(Cow<'a, str>, &'a RawValue)>,
}

/// What a JSON value is, told by its first character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Object,
    List,
    Text,
    Number,
    Bool,
    Null,
}

impl Shape {
    /// The shape of a value.
    pub fn of(raw: &RawValue) -> Self {
        match raw.get().as_bytes().first() {
            Some(b'{') => Self::Object,
            Some(b'[') => Self::List,
            Some(b'"') => Self::Text,
            Some(b't' | b'f') => Self::Bool,
            Some(b'n') | None => Self::Null,
            Some(_) => Self::Number,
        }
    }

    fn article(self) -> &'static str {
        match self {
            Self::Object => "an object",
            Self::List => "a list",
            Self::Text => "a string",
            Self::Number => "a number",
            Self::Bool => "a boolean",
            Self::Null => "null",
        }
    }
}

impl<'a> Outline<'a> {
    /// The keys of `raw`, which must be an object; `name` stands for it in the complaint.
    pub fn of(raw: &'a RawValue, name: &str) -> Decoded<Self> {
        match Shape::of(raw) {
            Shape::Object => Self::parse(raw.get()).map_err(|rejection| rejection.inside(name)),
            other => Err(not_a_trace(format!("`{name}` is {}, not an object", other.article()))),
        }
    }

    /// The keys of the JSON object `text`.
    pub fn parse(text: &'a str) -> Decoded<Self> {
        serde_json::from_str(text).map_err(|error| complaint(&error))
    }

    /// The value of a key; null is nothing. Of duplicate keys the last one counts.
    pub fn get(&self, key: &str) -> Option<&'a RawValue> {
        let entry = self.entries.iter().rev().find(|(name, _)| name == key);
        entry.map(|(_, raw)| *raw).filter(|raw| Shape::of(raw) != Shape::Null)
    }

    /// Whether a key has a value that is not null.
    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// Whether a key stands there at all, null included.
    pub fn names(&self, key: &str) -> bool {
        self.entries.iter().any(|(name, _)| name == key)
    }

    /// Whether a key has a value of this shape.
    pub fn is(&self, key: &str, shape: Shape) -> bool {
        self.get(key).is_some_and(|raw| Shape::of(raw) == shape)
    }

    /// The keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|(name, _)| name.as_ref())
    }

    /// The object under a key.
    pub fn object(&self, key: &str) -> Decoded<Option<Self>> {
        self.get(key).map(|raw| Self::of(raw, key)).transpose()
    }

    /// The values of the list under a key.
    pub fn list(&self, key: &str) -> Decoded<Option<Vec<&'a RawValue>>> {
        self.typed(key)
    }

    /// The objects of the list under a key; an empty list where there is none.
    pub fn objects(&self, key: &str) -> Decoded<Vec<Self>> {
        let items = self.list(key)?.unwrap_or_default();
        items.into_iter().enumerate().map(|(index, raw)| Self::of(raw, &format!("{key}[{index}]"))).collect()
    }

    /// The value of a key as `T`.
    pub fn typed<T: Deserialize<'a>>(&self, key: &str) -> Decoded<Option<T>> {
        let Some(raw) = self.get(key) else { return Ok(None) };
        serde_json::from_str(raw.get()).map(Some).map_err(|error| complaint(&error).inside(format!("`{key}`")))
    }

    /// The value of a key as it is; null is nothing.
    pub fn value(&self, key: &str) -> Decoded<Option<Value>> {
        self.typed(key)
    }

    /// A string.
    pub fn text(&self, key: &str) -> Decoded<Option<String>> {
        match self.get(key) {
            Some(raw) if Shape::of(raw) != Shape::Text => {
                Err(not_a_trace(format!("`{key}` is {}, not a string", Shape::of(raw).article())))
            }
            _ => self.typed(key),
        }
    }

    /// A string, or a number as its digits.
    pub fn name(&self, key: &str) -> Decoded<Option<String>> {
        self.value(key)?.map_or(Ok(None), |value| name_of(key, &value))
    }

    /// A finite number; NaN is none.
    pub fn number(&self, key: &str) -> Decoded<Option<f64>> {
        self.value(key)?.map_or(Ok(None), |value| number_of(key, &value))
    }

    /// An integer from 0 to 2147483647, also as a string of digits.
    pub fn count(&self, key: &str) -> Decoded<Option<i32>> {
        self.value(key)?.map_or(Ok(None), |value| count_of(key, &value))
    }

    /// A list of token ids.
    pub fn ids(&self, key: &str) -> Decoded<Option<Vec<u32>>> {
        Ok(self.typed::<Ids>(key)?.map(|ids| ids.0))
    }

    /// Logprobs in any form that a `logprobs` value has.
    pub fn logprobs(&self, key: &str) -> Decoded<Option<Tokens>> {
        Ok(self.typed::<Logprobs>(key)?.and_then(|logprobs| logprobs.0))
    }

    /// All keys but some, as values.
    pub fn fields_without(&self, dropped: &[&str]) -> Decoded<Fields> {
        let mut fields = Fields::new();
        for (name, raw) in &self.entries {
            if !dropped.contains(&name.as_ref()) {
                let value = serde_json::from_str(raw.get()).map_err(|error| complaint(&error).inside(name))?;
                fields.insert(name.clone().into_owned(), value);
            }
        }
        Ok(fields)
    }
}

/// serde's complaint without its line and column, which count within one value.
fn complaint(error: &serde_json::Error) -> Rejection {
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or_default();
    let reason = if what.starts_with(ID_COMPLAINT) { Reason::IdOutOfRange } else { Reason::WrongType };
    reject(reason, what)
        .why("The values of a record must be what they are named for")
        .cure("See docs/trace-format.md for the accepted forms")
}

impl<'de: 'a, 'a> Deserialize<'de> for Outline<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(OutlineVisitor).map(|entries| Self { entries })
    }
}

/// Visits an object without reading its values.
struct OutlineVisitor;

impl<'de> Visitor<'de> for OutlineVisitor {
    type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<Key<'de>>()? {
            entries.push((key.0, map.next_value()?));
        }
        Ok(entries)
    }
}

/// A key, borrowed where it has no escape.
struct Key<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Key<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(KeyVisitor).map(Self)
    }
}

/// Visits a key.
struct KeyVisitor;

impl<'de> Visitor<'de> for KeyVisitor {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_borrowed_str<E>(self, key: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(key))
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(key.to_owned()))
    }
}
