//! Two-generation cache with a byte bound (approximate LRU).
//!
//! New entries go to the young table. When that is full it becomes the old one, and what the old one held is dropped; an
//! entry that is read there moves back to the young table. Called by `tokenizer::memo` and `template::renders`, which bring
//! the locks and compare the keys.

use hashbrown::HashTable;
use std::mem;

/// Values by the hash of their keys; the caller's `fits` says whether a value with that hash has the key.
#[derive(Debug)]
pub(crate) struct Generations<T> {
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

impl<T> Generations<T> {
    /// An empty cache, each of whose two tables holds at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { young: HashTable::new(), old: HashTable::new(), bytes: 0, limit }
    }

    /// What `read` returns for the value with this hash that fits, which counts as recently used.
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

    /// Adds a value that takes `bytes`.
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

    /// How many values are held.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
}
