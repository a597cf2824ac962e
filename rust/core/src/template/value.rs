//! Template values: plain JSON, containers that cache their JSON and carry marks, big integers, and lazy iterables.
//!
//! Integers beyond 128 bits can be printed, compared and written as JSON, but not used in arithmetic. The results of
//! Python's lazy filters can be iterated once. They are true, have no length and no JSON form. This module does not
//! interpret messages.

use super::marks::{Marker, UsedCharacters};
use super::rendered::{Field, NO_MESSAGE};
use super::rewrite::UNMARKED;
use crate::{cancel, json_number};
use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, Value, ValueKind};
use serde_json::Value as Json;
use std::cmp::Ordering;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering as AtomicOrdering};
use std::sync::{Arc, OnceLock};

/// Converts JSON unchanged.
pub(super) fn plain(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => Value::from(integer),
            (None, Some(integer)) => Value::from(integer),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => {
            cancel::check_before_bytes(text.len());
            Value::from(text.as_str())
        }
        Json::Array(items) => Value::from(items.iter().map(plain).collect::<Vec<_>>()),
        Json::Object(map) => match json_number::text_in(map) {
            Some(text) => value(text),
            None => record(map.iter().map(|(key, value)| (key.as_str(), plain(value)))),
        },
    }
}

/// Converts tool schemas. Containers cache their JSON. With a marker, every string and container is enclosed in marks.
///
/// Strings that templates compare stay unmarked: types, names of required parameters, and `literals`.
pub(super) fn tools(json: &Json, marker: &mut Option<&mut Marker<'_>>, literals: &[String]) -> Value {
    let inner = match json {
        number if json_number::digits_of(number).is_some() => return plain(number),
        Json::Array(items) => Value::from(items.iter().map(|item| tools(item, marker, literals)).collect::<Vec<_>>()),
        Json::Object(map) => {
            let mut pairs = Vec::with_capacity(map.len());
            for (key, value) in map {
                let is_compared = matches!(key.as_str(), "type" | "required");
                if let Some(marker) = marker {
                    marker.noted.doubt |= !is_compared && UNMARKED.contains(&key.as_str()) && value.is_string();
                }
                pairs.push((key.as_str(), if is_compared { plain(value) } else { tools(value, marker, literals) }));
            }
            record(pairs.into_iter())
        }
        Json::String(text) => {
            return match marker {
                Some(marker) if literals.binary_search(text).is_err() => {
                    Value::from(marker.whole(text, NO_MESSAGE, Field::ToolSchema))
                }
                _ => Value::from(text.as_str()),
            };
        }
        other => return plain(other),
    };
    Tagged::value(inner, marker.as_mut().map(|marker| marker.container(NO_MESSAGE, Field::ToolSchema)))
}

/// Returns a container of a message's tool calls, enclosed in marks if there is a marker.
pub(super) fn contained(inner: Value, message: u32, marker: &mut Option<&mut Marker<'_>>) -> Value {
    match marker {
        Some(marker) => Tagged::value(inner, Some(marker.container(message, Field::ToolCall))),
        None => inner,
    }
}

/// Adds the noncharacters of all strings and keys inside `json`.
pub(super) fn note(used: &mut UsedCharacters, json: &Json) {
    match json {
        Json::String(text) => used.note(text),
        Json::Array(items) => items.iter().for_each(|item| note(used, item)),
        Json::Object(map) => map.iter().for_each(|(key, value)| {
            used.note(key);
            note(used, value);
        }),
        _ => {}
    }
}

/// Returns the approximate number of bytes of the strings inside `json`.
pub(super) fn size(json: &Json) -> usize {
    match json {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(size).sum(),
        Json::Object(map) => map.iter().map(|(key, value)| key.len() + size(value)).sum(),
        _ => 8,
    }
}

/// A container that caches its JSON, optionally enclosed in marks.
#[derive(Debug)]
pub(super) struct Tagged {
    pub inner: Value,
    pub marks: Option<(String, String)>,
    /// The default `tojson`, enclosed in marks.
    pub json: OnceLock<Value>,
}

impl Tagged {
    pub fn value(inner: Value, marks: Option<(String, String)>) -> Value {
        Value::from_object(Self { inner, marks, json: OnceLock::new() })
    }

    /// Returns `text` between the marks of this container.
    pub fn enclose(&self, text: &str) -> String {
        match &self.marks {
            Some((open, close)) => format!("{open}{text}{close}"),
            None => text.to_owned(),
        }
    }
}

impl Object for Tagged {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        if self.inner.kind() == ValueKind::Map { ObjectRepr::Map } else { ObjectRepr::Seq }
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.inner.as_object()?.get_value(key)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.inner.as_object()?.get_value_by_str(key)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.inner.as_object().map_or(Enumerator::Empty, DynObject::enumerate)
    }
}

/// Maximum number of keys of a map that is searched linearly.
const FEW: usize = 16;

/// A map with few keys. Comparing keys is faster than hashing them, and building needs neither.
#[derive(Debug)]
struct Record {
    fields: Vec<(Value, Value)>,
}

/// Returns a map of `pairs` in their order. Their keys must differ.
pub(super) fn record<'a>(pairs: impl ExactSizeIterator<Item = (&'a str, Value)>) -> Value {
    if pairs.len() > FEW {
        return Value::from_pairs(pairs);
    }
    Value::from_object(Record { fields: pairs.map(|(key, value)| (Value::from(key), value)).collect() })
}

/// Same as [`record`], but a repeated key keeps its last value.
pub(super) fn merged<'a>(pairs: impl ExactSizeIterator<Item = (&'a str, Value)>) -> Value {
    if pairs.len() > FEW {
        return Value::from_pairs(pairs);
    }
    let mut fields: Vec<(Value, Value)> = Vec::with_capacity(pairs.len());
    for (key, value) in pairs {
        match fields.iter_mut().find(|(name, _)| name.as_str() == Some(key)) {
            Some(field) => field.1 = value,
            None => fields.push((Value::from(key), value)),
        }
    }
    Value::from_object(Record { fields })
}

/// Returns the fields of a map created by [`record`], with or without marks.
pub(super) fn fields(map: &Value) -> Option<&[(Value, Value)]> {
    let inner = map.downcast_object_ref::<Tagged>().map_or(map, |tagged| &tagged.inner);
    inner.downcast_object_ref::<Record>().map(|record| record.fields.as_slice())
}

impl Object for Record {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.fields.iter().find(|(name, _)| name.as_str() == Some(key)).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::RevKeyValueIter(Box::new(self.fields.clone().into_iter()))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.fields.len())
    }
}

/// An integer in its decimal notation.
#[derive(Debug)]
pub(super) struct Big(String);

impl Big {
    /// Returns the nearest float.
    pub fn float(&self) -> f64 {
        self.0.parse().unwrap_or(f64::NAN)
    }

    /// Returns the number of bytes of its text.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_negative(&self) -> bool {
        self.0.starts_with('-')
    }

    pub fn against(&self, other: &Self) -> Ordering {
        let size = self.len().cmp(&other.len()).then_with(|| self.0.cmp(&other.0));
        match (self.is_negative(), other.is_negative()) {
            (false, false) => size,
            (true, true) => size.reverse(),
            (negative, _) => {
                if negative {
                    Ordering::Less
                } else {
                    Ordering::Greater
                }
            }
        }
    }
}

impl Object for Big {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn custom_cmp(self: &Arc<Self>, other: &DynObject) -> Option<Ordering> {
        Some(self.against(other.downcast_ref::<Self>()?))
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the template value of a number that JSON's own type cannot represent (see `json_number::digits_of`).
pub(super) fn value(text: &str) -> Value {
    if let Ok(integer) = text.parse::<i128>() {
        return Value::from(integer);
    }
    if text.ends_with(|last: char| last.is_ascii_digit()) {
        return Value::from_object(Big(text.to_owned()));
    }
    Value::from(text.parse::<f64>().unwrap_or(f64::NAN))
}

/// Returns the integer if it is one beyond 128 bits.
pub(super) fn big(value: &Value) -> Option<&Big> {
    value.downcast_object_ref()
}

/// Items that can be consumed once.
#[derive(Debug)]
pub(super) struct Generator {
    items: Vec<Value>,
    taken: AtomicUsize,
}

impl Generator {
    pub fn value(items: Vec<Value>) -> Value {
        Value::from_object(Self { items, taken: AtomicUsize::new(0) })
    }

    /// Returns all items, consumed or not.
    pub fn items(&self) -> &[Value] {
        &self.items
    }

    fn take(&self) -> Option<Value> {
        let at = self.taken.fetch_add(1, AtomicOrdering::Relaxed);
        self.items.get(at).cloned()
    }
}

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let generator = Arc::clone(self);
        Enumerator::Iter(Box::new(std::iter::from_fn(move || generator.take())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<generator object>")
    }
}
