//! Caches with a limit in bytes (approximate LRU), and unambiguous byte keys for JSON values.
//!
//! New entries go to the young table. When it is full it becomes the old table, and the entries of the previous old
//! table are dropped. A read moves an entry from the old table to the young one. Callers provide the locks and compare
//! the keys. Every part of a key starts with its type and its length, so that different values have different bytes.
//!
//! `quick_cache` is not used: it hashes a key again, and the first render of a prompt took 6 % more instructions. `lru`
//! limits the number of entries, not their bytes.

use crate::cancel;
use hashbrown::HashTable;
use serde_json::{Map, Number, Value};
use std::mem;

/// A cache of values by the hash of their keys. The caller's function `fits` compares the key of a value with that
/// hash.
#[derive(Debug)]
pub(crate) struct TwoTableCache<T> {
    young: HashTable<Entry<T>>,
    old: HashTable<Entry<T>>,
    bytes: usize,
    limit: usize,
}

#[derive(Debug)]
struct Entry<T> {
    hash: u64,
    bytes: usize,
    value: T,
}

impl<T> TwoTableCache<T> {
    /// Creates an empty cache. Each of its two tables may use at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { young: HashTable::new(), old: HashTable::new(), bytes: 0, limit }
    }

    /// Returns the result of `read` for the value with this hash that fits, and marks it as recently used.
    pub fn read<R>(&mut self, hash: u64, fits: impl Fn(&T) -> bool, read: impl FnOnce(&T) -> R) -> Option<R> {
        let fits = |entry: &Entry<T>| entry.hash == hash && fits(&entry.value);
        if let Some(entry) = self.young.find(hash, fits) {
            return Some(read(&entry.value));
        }
        let (entry, _) = self.old.find_entry(hash, fits).ok()?.remove();
        let result = read(&entry.value);
        self.insert(entry);
        Some(result)
    }

    /// Adds a value of size `bytes`.
    pub fn put(&mut self, hash: u64, bytes: usize, value: T) {
        self.insert(Entry { hash, bytes, value });
    }

    fn insert(&mut self, entry: Entry<T>) {
        if self.bytes + entry.bytes > self.limit {
            self.old = mem::take(&mut self.young);
            self.bytes = 0;
        }
        self.bytes += entry.bytes;
        self.young.insert_unique(entry.hash, entry, |entry| entry.hash);
    }

    /// Returns the number of values.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
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
    cancel::check_before_bytes(text.len());
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
