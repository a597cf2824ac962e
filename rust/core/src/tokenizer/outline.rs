//! A tokenizer.json without its entries and merges, and what these take, in one pass that keeps none of them.
//!
//! A name that stands twice in the document or in its model is refused: readers of JSON differ in which one counts.
//! Called by `check`, and by all that refuses a file.

use crate::error::{Error, Kind, Result};
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// What a vocabulary holds.
#[derive(Debug, Default)]
pub(super) struct Entries {
    pub count: u64,
    pub largest: u64,
    /// Bytes of the longest.
    pub longest: usize,
}

impl Entries {
    fn add(&mut self, bytes: usize, id: u64) {
        self.count += 1;
        self.largest = self.largest.max(id);
        self.longest = self.longest.max(bytes);
    }
}

/// The document's parts, and its entries counted.
pub(super) fn outline(json: &[u8]) -> Result<(Map<String, Value>, Entries)> {
    let mut entries = Entries::default();
    let mut reader = serde_json::Deserializer::from_slice(json);
    let read = Parts { entries: &mut entries, model: false }.deserialize(&mut reader);
    let document = read.and_then(|document| reader.end().map(|()| document)).map_err(|error| {
        let what = if error.is_data() { "it is no tokenizer" } else { "it is not JSON" };
        refused(&format!("{what}: {error}"))
    })?;
    Ok((document, entries))
}

/// A file that is no tokenizer.
pub(super) fn refused(what: &str) -> Error {
    Error::new(Kind::Tokenizer, what.to_owned())
        .why("Ids are made by the fast tokenizer that tokenizer.json describes")
        .cure("Copy the file again from where the model came from")
}

/// All values under a key, in a part of a document and in all below it.
pub(super) fn values_under<'a>(part: &'a Value, key: &str) -> Vec<&'a Value> {
    match part {
        Value::Object(map) => map.get(key).into_iter().chain(map.values().flat_map(|v| values_under(v, key))).collect(),
        Value::Array(items) => items.iter().flat_map(|item| values_under(item, key)).collect(),
        _ => Vec::new(),
    }
}

/// The parts of the document, or those of its model.
struct Parts<'a> {
    entries: &'a mut Entries,
    model: bool,
}

impl<'de> DeserializeSeed<'de> for Parts<'_> {
    type Value = Map<String, Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Parts<'_> {
    type Value = Map<String, Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.model { "the parts of a model" } else { "the parts of a tokenizer" })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut parts, mut skipped) = (Map::new(), Vec::new());
        while let Some(name) = map.next_key::<String>()? {
            if parts.contains_key(&name) || skipped.contains(&name) {
                return Err(de::Error::custom(format!("'{name}' stands there twice")));
            }
            match (self.model, name.as_str()) {
                (false, "model") => {
                    let model = map.next_value_seed(Parts { entries: self.entries, model: true })?;
                    parts.insert(name, Value::Object(model));
                }
                (true, "vocab") => {
                    map.next_value_seed(Vocabulary(self.entries))?;
                    skipped.push(name);
                }
                (true, "merges") => {
                    map.next_value::<IgnoredAny>()?;
                    skipped.push(name);
                }
                _ => {
                    let value = map.next_value()?;
                    parts.insert(name, value);
                }
            }
        }
        Ok(parts)
    }
}

/// Entries with their ids, or in the order of their ids with a score each.
struct Vocabulary<'a>(&'a mut Entries);

impl<'de> DeserializeSeed<'de> for Vocabulary<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Vocabulary<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a vocabulary")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(Bytes(bytes)) = map.next_key()? {
            let id = map.next_value()?;
            self.0.add(bytes, id);
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some((Bytes(bytes), IgnoredAny)) = seq.next_element()? {
            self.0.add(bytes, self.0.count);
        }
        Ok(())
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }
}

/// How many bytes a string has.
struct Bytes(usize);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Counting).map(Bytes)
    }
}

struct Counting;

impl Visitor<'_> for Counting {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an entry's text")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<usize, E> {
        Ok(text.len())
    }
}
