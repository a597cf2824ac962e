//! A cache bounded in bytes, and JSON values as bytes for cache keys: different values have different bytes.
//!
//! Every part of a key begins with its kind and its length, so that no text can look like another value.

use crate::cancel;
use quick_cache::Weighter;
use quick_cache::unsync::{Cache, DefaultLifecycle};
use serde_json::{Map, Number, Value};
use std::hash::BuildHasher;

/// Values by keys of bytes. Threads share it behind a lock that gives up after a fork (`pool::soon`), which the
/// crate's own lock does not.
pub(crate) type ByteCache<V, W, S> = Cache<Box<[u8]>, V, W, S>;

/// Returns an empty cache for entries of `limit` bytes in all, by their weights, and of `typical` bytes each.
pub(crate) fn byte_cache<V, W, S>(limit: usize, typical: usize, weigher: W, state: S) -> ByteCache<V, W, S>
where
    W: Weighter<Box<[u8]>, V>,
    S: BuildHasher,
{
    Cache::with(limit / typical, limit as u64, weigher, state, DefaultLifecycle::default())
}

/// A value.
pub(crate) fn write(key: &mut Vec<u8>, json: &Value) {
    match json {
        Value::Null => key.push(b'n'),
        Value::Bool(value) => key.push(if *value { b't' } else { b'f' }),
        Value::Number(number) => write_number(key, number),
        Value::String(text) => {
            key.push(b's');
            write_text(key, text);
        }
        Value::Array(items) => {
            key.push(b'a');
            key.extend_from_slice(&items.len().to_le_bytes());
            for item in items {
                write(key, item);
            }
        }
        Value::Object(map) => {
            key.push(b'o');
            write_map(key, map);
        }
    }
}

/// An integer is not the float of its value, and 0.0 is not -0.0.
fn write_number(key: &mut Vec<u8>, number: &Number) {
    let (kind, bytes) = match (number.as_u64(), number.as_i64()) {
        (Some(natural), _) => (b'u', natural.to_le_bytes()),
        (None, Some(integer)) => (b'i', integer.to_le_bytes()),
        (None, None) => (b'd', number.as_f64().unwrap_or(f64::NAN).to_le_bytes()),
    };
    key.push(kind);
    key.extend_from_slice(&bytes);
}

/// A text, of which everybody who reads it knows that it is one.
pub(crate) fn write_text(key: &mut Vec<u8>, text: &str) {
    cancel::before(text.len());
    key.extend_from_slice(&text.len().to_le_bytes());
    key.extend_from_slice(text.as_bytes());
}

/// An object, its keys in their order.
pub(crate) fn write_map(key: &mut Vec<u8>, map: &Map<String, Value>) {
    key.extend_from_slice(&map.len().to_le_bytes());
    for (name, value) in map {
        write_text(key, name);
        write(key, value);
    }
}
