//! The vocabulary entries that are no text of their own: their bytes hold a part of a character.
//!
//! Recorders lose or mangle the bytes of these and of no others. Built once per tokenizer, when first asked for.

use std::collections::HashMap;

/// Entries whose bytes are not UTF-8, by their bytes and by what they decode to.
#[derive(Debug, Default)]
pub struct Partial {
    /// Bytes and id, sorted by bytes.
    sorted: Vec<(Box<[u8]>, u32)>,
    /// Ids by lossy text.
    by_text: HashMap<Box<str>, Vec<u32>>,
    /// Ids whose lossy text ends in U+FFFD: recorders that correct by context show nothing for them.
    open: Vec<u32>,
}

impl Partial {
    pub(super) fn new<'a>(entries: impl Iterator<Item = (u32, &'a [u8])>) -> Self {
        let mut partial = Self::default();
        for (id, bytes) in entries {
            let text = String::from_utf8_lossy(bytes);
            if !text.contains('\u{FFFD}') {
                continue;
            }
            if text.ends_with('\u{FFFD}') {
                partial.open.push(id);
            }
            partial.by_text.entry(text.into()).or_default().push(id);
            partial.sorted.push((bytes.into(), id));
        }
        partial.sorted.sort_unstable();
        partial
    }

    /// Entries whose bytes begin with `prefix`.
    pub fn beginning_with(&self, prefix: &[u8]) -> impl Iterator<Item = (&[u8], u32)> {
        let start = self.sorted.partition_point(|(bytes, _)| bytes.as_ref() < prefix);
        let found = self.sorted[start..].iter().take_while(move |(bytes, _)| bytes.starts_with(prefix));
        found.map(|(bytes, id)| (bytes.as_ref(), *id))
    }

    /// Entries that decode to `text`.
    pub fn decoding_to(&self, text: &str) -> &[u32] {
        self.by_text.get(text).map_or(&[], Vec::as_slice)
    }

    /// Entries that end inside a character, or in bytes that are none.
    pub fn open(&self) -> &[u32] {
        &self.open
    }
}
