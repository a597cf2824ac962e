//! Builds a JSON object from raw values of a record, without parsing them.

use crate::format::json::outline::Outline;
use serde_json::value::RawValue;

/// The text of an object with these members.
pub fn splice(parts: &[(&str, &RawValue)]) -> String {
    let length: usize = parts.iter().map(|(key, raw)| key.len() + raw.get().len() + 4).sum();
    let mut text = String::with_capacity(length + 2);
    for (key, raw) in parts {
        text.push(if text.is_empty() { '{' } else { ',' });
        text.push_str(&serde_json::Value::from(*key).to_string());
        text.push(':');
        text.push_str(raw.get());
    }
    text.push_str(if text.is_empty() { "{}" } else { "}" });
    text
}

/// An object's parts that are not null, of equal keys the last.
pub fn parts<'o, 'a>(outline: &'o Outline<'a>) -> Vec<(&'o str, &'a RawValue)> {
    let mut keys: Vec<&str> = outline.keys().collect();
    keys.sort_unstable();
    keys.dedup();
    keys.into_iter().filter_map(|key| outline.get(key).map(|raw| (key, raw))).collect()
}
