//! A table of what was made before, bounded in bytes: what was used of late, and what was used before that.
//!
//! When the younger part is full it becomes the older one, whose entries are forgotten unless they are asked for again.
//! Called by the memo of `tokenizer` and the renders of `template`; locks and keys are theirs.

use hashbrown::HashTable;
use std::mem;

/// Values by hash; `fits` of the caller tells equal keys from equal hashes.
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
    /// An empty table, each of whose two parts holds at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { young: HashTable::new(), old: HashTable::new(), bytes: 0, limit }
    }

    /// What `read` takes of the value that was put under `hash` and fits; the value counts as used of late.
    pub fn read<R>(&mut self, hash: u64, fits: impl Fn(&T) -> bool, read: impl FnOnce(&T) -> R) -> Option<R> {
        let fits = |entry: &Entry<T>| entry.hash == hash && fits(&entry.value);
        if let Some(entry) = self.young.find(hash, fits) {
            return Some(read(&entry.value));
        }
        let (entry, _) = self.old.find_entry(hash, fits).ok()?.remove();
        let found = read(&entry.value);
        self.insert(entry);
        Some(found)
    }

    /// Remembers a value that takes `bytes`.
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
