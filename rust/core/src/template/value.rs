//! JSON to template values: as it is, or in containers that remember their JSON and carry marks.
//!
//! What a message means is not known here. Called by `conversation` and, for tool schemas, by `marking`.

use super::json::{Style, dumps};
use super::marks::{Marker, Used};
use super::{Field, NO_MESSAGE};
use crate::stop;
use minijinja::Error;
use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, Value, ValueKind};
use serde_json::Value as Json;
use std::sync::{Arc, OnceLock};

/// A container whose JSON is remembered, and enclosed by marks where it has some.
#[derive(Debug)]
pub(super) struct Tagged {
    inner: Value,
    marks: Option<(String, String)>,
    /// The default `tojson`, enclosed.
    json: OnceLock<Value>,
}

impl Tagged {
    fn value(inner: Value, marks: Option<(String, String)>) -> Value {
        Value::from_object(Self { inner, marks, json: OnceLock::new() })
    }

    /// `text` between the marks of this container.
    pub fn enclose(&self, text: &str) -> String {
        match &self.marks {
            Some((open, close)) => format!("{open}{text}{close}"),
            None => text.to_owned(),
        }
    }

    /// The default `tojson` of the container, enclosed.
    pub fn json(&self) -> Result<Value, Error> {
        if let Some(json) = self.json.get() {
            return Ok(json.clone());
        }
        let json = Value::from(self.enclose(&dumps(&self.inner, &Style::default())?));
        Ok(self.json.get_or_init(|| json).clone())
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

/// Keys of a map that is searched one by one.
const FEW: usize = 16;

/// A map of few keys: found faster by comparing than by hashing, and made without either.
#[derive(Debug)]
struct Record {
    fields: Vec<(Value, Value)>,
}

/// A map of `pairs`, whose keys differ, in their order.
pub(super) fn record<'a>(pairs: impl ExactSizeIterator<Item = (&'a str, Value)>) -> Value {
    if pairs.len() > FEW {
        return Value::from_pairs(pairs);
    }
    Value::from_object(Record { fields: pairs.map(|(key, value)| (Value::from(key), value)).collect() })
}

/// As [`record`]; of a key that is there twice the last value counts.
pub(super) fn merged<'a>(pairs: impl ExactSizeIterator<Item = (&'a str, Value)>) -> Value {
    if pairs.len() > FEW {
        return Value::from_pairs(pairs);
    }
    let mut fields: Vec<(Value, Value)> = Vec::with_capacity(pairs.len());
    for (key, value) in pairs {
        match fields.iter_mut().find(|(known, _)| known.as_str() == Some(key)) {
            Some(field) => field.1 = value,
            None => fields.push((Value::from(key), value)),
        }
    }
    Value::from_object(Record { fields })
}

/// The fields of a map that was made by [`record`], with marks or without.
pub(super) fn fields(map: &Value) -> Option<&[(Value, Value)]> {
    let inner = map.downcast_object_ref::<Tagged>().map_or(map, |tagged| &tagged.inner);
    inner.downcast_object_ref::<Record>().map(|record| record.fields.as_slice())
}

impl Object for Record {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.fields.iter().find(|(known, _)| known.as_str() == Some(key)).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::RevKeyValueIter(Box::new(self.fields.clone().into_iter()))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.fields.len())
    }
}

/// JSON as it is.
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
            stop::before(text.len());
            Value::from(text.as_str())
        }
        Json::Array(items) => Value::from(items.iter().map(plain).collect::<Vec<_>>()),
        Json::Object(map) => record(map.iter().map(|(key, value)| (key.as_str(), plain(value)))),
    }
}

/// Tool schemas: containers remember their JSON; with a marker every string and container is enclosed.
///
/// Strings that templates compare with others stay as they are: types, names of required parameters, and `literals`.
pub(super) fn tools(json: &Json, marker: &mut Option<&mut Marker<'_, '_>>, literals: &[String]) -> Value {
    let inner = match json {
        Json::Array(items) => Value::from(items.iter().map(|item| tools(item, marker, literals)).collect::<Vec<_>>()),
        Json::Object(map) => {
            let mut pairs = Vec::with_capacity(map.len());
            for (key, value) in map {
                let compared = matches!(key.as_str(), "type" | "required");
                pairs.push((key.as_str(), if compared { plain(value) } else { tools(value, marker, literals) }));
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

/// A container of a message's tool calls, enclosed where there is a marker.
pub(super) fn contained(inner: Value, message: u32, marker: &mut Option<&mut Marker<'_, '_>>) -> Value {
    match marker {
        Some(marker) => Tagged::value(inner, Some(marker.container(message, Field::ToolCall))),
        None => inner,
    }
}

/// Adds the noncharacters of all strings and keys below `json`.
pub(super) fn note(used: &mut Used, json: &Json) {
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

/// Bytes of the strings below `json`, about.
pub(super) fn size(json: &Json) -> usize {
    match json {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(size).sum(),
        Json::Object(map) => map.iter().map(|(key, value)| key.len() + size(value)).sum(),
        _ => 8,
    }
}
