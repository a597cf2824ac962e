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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_that_hold_a_part_of_a_character_are_found_by_bytes_and_by_text() {
        // A whole word; two first bytes of "日" (E6 97 A5), alone and behind a space; its last; one that begins inside and
        // ends whole; one that is broken inside.
        let entries: [(u32, &[u8]); 7] = [
            (5, b"day"),
            (4, b"\xE6\x97"),
            (3, b" \xE6\x97"),
            (2, b"\xA5"),
            (1, b"\xA5a"),
            (9, b"a\xFFb"),
            (8, "\u{FFFD}".as_bytes()),
        ];
        let partial = Partial::new(entries.into_iter());
        let beginning = |prefix: &[u8]| partial.beginning_with(prefix).map(|(_, id)| id).collect::<Vec<_>>();
        assert_eq!(beginning(b""), [3, 9, 2, 1, 4, 8]);
        assert_eq!(beginning(b"\xA5"), [2, 1]);
        assert_eq!(beginning(b"\xE6\x97"), [4]);
        assert!(beginning(b"\xE6\x97\xA5").is_empty());
        assert!(beginning(b"d").is_empty());
        assert_eq!(partial.beginning_with(b" ").next(), Some((&b" \xE6\x97"[..], 3)));
        assert_eq!(partial.decoding_to("\u{FFFD}"), [4, 2, 8]);
        assert_eq!(partial.decoding_to(" \u{FFFD}"), [3]);
        assert_eq!(partial.decoding_to("a\u{FFFD}b"), [9]);
        assert!(partial.decoding_to("day").is_empty());
        assert_eq!(partial.open(), [4, 3, 2, 8]);
    }
}
