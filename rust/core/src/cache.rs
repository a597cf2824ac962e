//! A cache with a limit in bytes, and unambiguous byte keys for JSON values.
//!
//! Every part of a key begins with its type and its length, so that different values have different bytes.

use crate::cancel;
use quick_cache::Weighter;
use quick_cache::unsync::{Cache, DefaultLifecycle};
use serde_json::{Map, Number, Value};
use std::hash::BuildHasher;

/// A cache of values by byte keys. Threads share it through a mutex and `pool::soon`, which gives up if a fork left the
/// mutex locked. The locks of `quick_cache::sync` would wait for ever.
pub(crate) type ByteCache<V, W, S> = Cache<Box<[u8]>, V, W, S>;

/// Creates an empty cache. Its entries may use `limit` bytes, by `weigher`; a typical entry uses `typical` bytes.
pub(crate) fn byte_cache<V, W, S>(limit: usize, typical: usize, weigher: W, state: S) -> ByteCache<V, W, S>
where
    W: Weighter<Box<[u8]>, V>,
    S: BuildHasher,
{
    Cache::with(limit / typical, limit as u64, weigher, state, DefaultLifecycle::default())
}

/// Appends a JSON value to a key.
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

/// Appends a number. An integer differs from the float of the same value, and 0.0 from -0.0.
fn write_number(key: &mut Vec<u8>, number: &Number) {
    let (kind, bytes) = match (number.as_u64(), number.as_i64()) {
        (Some(natural), _) => (b'u', natural.to_le_bytes()),
        (None, Some(integer)) => (b'i', integer.to_le_bytes()),
        (None, None) => (b'd', number.as_f64().unwrap_or(f64::NAN).to_le_bytes()),
    };
    key.push(kind);
    key.extend_from_slice(&bytes);
}

/// Appends a text without its type, for callers whose next part is always a text.
pub(crate) fn write_text(key: &mut Vec<u8>, text: &str) {
    cancel::before(text.len());
    key.extend_from_slice(&text.len().to_le_bytes());
    key.extend_from_slice(text.as_bytes());
}

/// Appends an object, with its keys in their order.
pub(crate) fn write_map(key: &mut Vec<u8>, map: &Map<String, Value>) {
    key.extend_from_slice(&map.len().to_le_bytes());
    for (name, value) in map {
        write_text(key, name);
        write(key, value);
    }
}
