//! A JSON object whose values are read on demand, and typed readers for them.
//!
//! Forms other than the OpenAI-shaped ones are detected by their keys and then read value by value. A value that is not
//! read costs one scan. Errors contain the key.

pub use super::fallback::Shape;
use super::fallback::{self, Fault, Members, Read, ids, members, parse};
use super::fast_scan;
use crate::format::fields::{Fields, count_of, name_of, number_of};
use crate::format::rejection::{Decoded, Rejection, not_a_trace, reject};
use crate::trace::Tokens;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// Keys of an object with the JSON text of their values, borrowed from the record.
#[derive(Debug, Clone, Default)]
pub struct Outline<'a> {
    members: Members<'a>,
}

impl<'a> Outline<'a> {
    /// Creates the outline of `raw`, which must be an object. `name` is its name in errors.
    pub fn of(raw: &'a RawValue, name: &str) -> Decoded<Self> {
        match Shape::of(raw) {
            Shape::Object => Self::parse(raw.get()).map_err(|rejection| rejection.inside(name)),
            other => Err(not_a_trace("TG-FORMAT-039", format!("`{name}` is {}, not an object", other.article()))),
        }
    }

    /// Creates the outline of the JSON object `text`.
    pub fn parse(text: &'a str) -> Decoded<Self> {
        Ok(Self { members: members(text).map_err(|fault| complaint(&fault))? })
    }

    /// Returns the value of a key. Null counts as missing. If a key occurs twice, the last value counts.
    pub fn get(&self, key: &str) -> Option<&'a RawValue> {
        let entry = self.members.iter().rev().find(|(name, _)| name == key);
        entry.map(|(_, raw)| *raw).filter(|raw| Shape::of(raw) != Shape::Null)
    }

    /// Returns whether a key has a value other than null.
    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// Returns whether a key occurs, including with the value null.
    pub fn has_key(&self, key: &str) -> bool {
        self.members.iter().any(|(name, _)| name == key)
    }

    /// Returns whether a key has a value of this type.
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

    /// Returns the objects of the list under a key; an empty list if the key is missing.
    pub fn objects(&self, key: &str) -> Decoded<Vec<Self>> {
        let items = self.list(key)?.unwrap_or_default();
        items.into_iter().enumerate().map(|(index, raw)| Self::of(raw, &format!("{key}[{index}]"))).collect()
    }

    pub fn typed<T: Deserialize<'a>>(&self, key: &str) -> Decoded<Option<T>> {
        self.read(key, |raw| parse(raw.get()))
    }

    /// Returns the first object of the list under a key, if all items of the list are objects.
    pub fn first_of(&self, key: &str) -> Option<Self> {
        self.objects(key).ok()?.into_iter().next()
    }

    /// Reads the value of a key with the function `read`.
    fn read<T>(&self, key: &str, read: impl FnOnce(&'a RawValue) -> Read<'a, T>) -> Decoded<Option<T>> {
        let Some(raw) = self.get(key) else { return Ok(None) };
        read(raw).map(Some).map_err(|fault| complaint(&fault).inside(format!("`{key}`")))
    }

    /// Returns the value of a key unchanged. Null counts as missing.
    pub fn value(&self, key: &str) -> Decoded<Option<Value>> {
        self.read(key, fallback::value).map(|value| value.filter(|value| !value.is_null()))
    }

    pub fn text(&self, key: &str) -> Decoded<Option<String>> {
        match self.get(key) {
            Some(raw) if Shape::of(raw) != Shape::Text => {
                Err(not_a_trace("TG-FORMAT-040", format!("`{key}` is {}, not a string", Shape::of(raw).article())))
            }
            _ => self.typed(key),
        }
    }

    /// Returns a string. A number is returned as its digits.
    pub fn name(&self, key: &str) -> Decoded<Option<String>> {
        self.value(key)?.map_or(Ok(None), |value| name_of(key, &value))
    }

    /// Returns a finite number. NaN counts as missing.
    pub fn number(&self, key: &str) -> Decoded<Option<f64>> {
        self.value(key)?.map_or(Ok(None), |value| number_of(key, &value))
    }

    /// Returns an integer from 0 to 2147483647. It may be written as a string of digits.
    pub fn count(&self, key: &str) -> Decoded<Option<i32>> {
        self.value(key)?.map_or(Ok(None), |value| count_of(key, &value))
    }

    pub fn ids(&self, key: &str) -> Decoded<Option<Vec<u32>>> {
        self.read(key, |raw| fast_scan::ids(raw.get()).map_or_else(|| ids(raw), Ok))
    }

    /// Returns logprobs in any form of a `logprobs` value.
    pub fn logprobs(&self, key: &str) -> Decoded<Option<Tokens>> {
        self.read(key, |raw| logprobs_in(raw.get())).map(Option::flatten)
    }

    pub fn fields_without(&self, dropped: &[&str]) -> Decoded<Fields> {
        self.fields_of(|key| !dropped.contains(&key))
    }

    /// Returns the fields whose keys the predicate accepts.
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

/// Reads a `logprobs` value of any form, with the fast scanner if it supports it.
pub fn logprobs_in(text: &str) -> Read<'_, Option<Tokens>> {
    fast_scan::logprobs(text).map_or_else(|| fallback::read_logprobs(parse(text)?), Ok)
}

/// Turns a fault within one value into a rejection of the record.
fn complaint(fault: &Fault<'_>) -> Rejection {
    reject(fault.reason(), "TG-FORMAT-084", fault.complaint())
        .why("The values of a record must have the content that their names state")
        .fix("See docs/reference/trace-format.md for the accepted forms")
}
