//! JSON to template values: as it is, or in containers that remember their JSON and carry marks.
//!
//! What a message means is not known here. Called by `conversation` and, for tool schemas, by `marking`.

use super::containers::{Tagged, record};
use super::integers;
use super::marks::{Marker, Used};
use super::rendered::{Field, NO_MESSAGE};
use super::rewrite::UNMARKED;
use crate::{exact, stop};
use minijinja::value::Value;
use serde_json::Value as Json;

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
        Json::Object(map) => match exact::text_in(map) {
            Some(text) => integers::value(text),
            None => record(map.iter().map(|(key, value)| (key.as_str(), plain(value)))),
        },
    }
}

/// Tool schemas: containers remember their JSON; with a marker every string and container is enclosed.
///
/// Strings that templates compare with others stay as they are: types, names of required parameters, and `literals`.
pub(super) fn tools(json: &Json, marker: &mut Option<&mut Marker<'_>>, literals: &[String]) -> Value {
    let inner = match json {
        kept if exact::text(kept).is_some() => return plain(kept),
        Json::Array(items) => Value::from(items.iter().map(|item| tools(item, marker, literals)).collect::<Vec<_>>()),
        Json::Object(map) => {
            let mut pairs = Vec::with_capacity(map.len());
            for (key, value) in map {
                let compared = matches!(key.as_str(), "type" | "required");
                if let Some(marker) = marker {
                    marker.noted.doubt |= !compared && UNMARKED.contains(&key.as_str()) && value.is_string();
                }
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
pub(super) fn contained(inner: Value, message: u32, marker: &mut Option<&mut Marker<'_>>) -> Value {
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
