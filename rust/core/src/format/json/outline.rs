//! A JSON object whose values are still unread, and typed readers for them.
//!
//! The forms beside the OpenAI-shaped ones are told apart by their keys and then read value by value; a value that no
//! reader asks for costs one scan and nothing else. Complaints name the key.

pub use super::fallback::Shape;
use super::fallback::{self, Fault, Members, Read, ids, members, parse};
use super::fast_scan;
use crate::format::fields::{Fields, count_of, name_of, number_of};
use crate::format::rejection::{Decoded, Rejection, not_a_trace, reject};
use crate::trace::Tokens;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// An object's keys with the JSON text of their values, borrowed from the record.
#[derive(Debug, Clone, Default)]
pub struct Outline<'a> {
    members: Members<'a>,
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
        Ok(Self { members: members(text).map_err(|fault| complaint(&fault))? })
    }

    /// The value of a key; null is nothing. Of duplicate keys the last one counts.
    pub fn get(&self, key: &str) -> Option<&'a RawValue> {
        let entry = self.members.iter().rev().find(|(name, _)| name == key);
        entry.map(|(_, raw)| *raw).filter(|raw| Shape::of(raw) != Shape::Null)
    }

    /// Whether a key has a value that is not null.
    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// Whether a key stands there at all, null included.
    pub fn names(&self, key: &str) -> bool {
        self.members.iter().any(|(name, _)| name == key)
    }

    /// Whether a key has a value of this shape.
    pub fn is(&self, key: &str, shape: Shape) -> bool {
        self.get(key).is_some_and(|raw| Shape::of(raw) == shape)
    }

    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(|(name, _)| name.as_ref())
    }

    pub fn object(&self, key: &str) -> Decoded<Option<Self>> {
        self.get(key).map(|raw| Self::of(raw, key)).transpose()
    }

    pub fn list(&self, key: &str) -> Decoded<Option<Vec<&'a RawValue>>> {
        self.typed(key)
    }

    /// The objects of the list under a key; an empty list where there is none.
    pub fn objects(&self, key: &str) -> Decoded<Vec<Self>> {
        let items = self.list(key)?.unwrap_or_default();
        items.into_iter().enumerate().map(|(index, raw)| Self::of(raw, &format!("{key}[{index}]"))).collect()
    }

    pub fn typed<T: Deserialize<'a>>(&self, key: &str) -> Decoded<Option<T>> {
        self.read(key, |raw| parse(raw.get()))
    }

    /// The first object of the list under a key, where it is one of objects alone.
    pub fn first_of(&self, key: &str) -> Option<Self> {
        self.objects(key).ok()?.into_iter().next()
    }

    /// The value of a key by a reader of its own.
    fn read<T>(&self, key: &str, read: impl FnOnce(&'a RawValue) -> Read<'a, T>) -> Decoded<Option<T>> {
        let Some(raw) = self.get(key) else { return Ok(None) };
        read(raw).map(Some).map_err(|fault| complaint(&fault).inside(format!("`{key}`")))
    }

    /// The value of a key as it is; null is nothing.
    pub fn value(&self, key: &str) -> Decoded<Option<Value>> {
        self.read(key, fallback::value).map(|found| found.filter(|value| !value.is_null()))
    }

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

    pub fn ids(&self, key: &str) -> Decoded<Option<Vec<u32>>> {
        self.read(key, |raw| fast_scan::ids(raw.get()).map_or_else(|| ids(raw), Ok))
    }

    /// Logprobs in any form that a `logprobs` value has.
    pub fn logprobs(&self, key: &str) -> Decoded<Option<Tokens>> {
        self.read(key, |raw| logprobs_in(raw.get())).map(Option::flatten)
    }

    pub fn fields_without(&self, dropped: &[&str]) -> Decoded<Fields> {
        self.fields_of(|key| !dropped.contains(&key))
    }

    /// The fields whose keys are wanted.
    pub fn fields_of(&self, wanted: impl Fn(&str) -> bool) -> Decoded<Fields> {
        let mut fields = Fields::new();
        for (name, raw) in &self.members {
            if wanted(name) {
                let value = fallback::value(raw).map_err(|fault| complaint(&fault).inside(name))?;
                fields.insert(name.clone().into_owned(), value);
            }
        }
        Ok(fields)
    }
}

/// A `logprobs` value of any form, by the scanner where it knows it.
pub fn logprobs_in(text: &str) -> Read<'_, Option<Tokens>> {
    fast_scan::logprobs(text).map_or_else(|| fallback::read_logprobs(parse(text)?), Ok)
}

/// A fault within one value as a rejection of the record.
fn complaint(fault: &Fault<'_>) -> Rejection {
    reject(fault.reason(), fault.complaint())
        .why("The values of a record must be what they are named for")
        .cure("See docs/trace-format.md for the accepted forms")
}
