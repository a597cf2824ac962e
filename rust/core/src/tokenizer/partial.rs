//! Vocabulary entries that contain a part of a character, and the decoder of characters that several tokens share.
//!
//! Recorders lose or mangle the bytes of these entries only.

use foldhash::fast::RandomState;
use std::collections::{BTreeMap, HashMap};

/// U+FFFD in UTF-8.
pub const REPLACEMENT: &[u8] = "\u{FFFD}".as_bytes();

/// Up to three bytes that start a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct Pending {
    bytes: [u8; 3],
    length: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The byte is pending with those before it.
    Waits,
    /// The byte completes a character of `.1` bytes.
    Character([u8; 4], usize),
    /// The byte is not part of a valid character.
    Broken,
}

impl Pending {
    /// Returns the pending bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length as usize]
    }

    pub fn is_empty(self) -> bool {
        self.length == 0
    }

    /// Returns the representative of all beginnings that accept the same following bytes for equally long. Beginnings
    /// of U+FFFD form their own class.
    pub fn class(self) -> Self {
        let (first, second) = match (self.bytes[0], self.length) {
            (0xC2..=0xDF, _) => (0xC2, 0),
            (0xEF, 2..) if self.bytes[1] == 0xBF => (0xEF, 0xBF),
            (0xE0..=0xEF, 2..) => (0xE1, 0x80),
            (0xE1..=0xEC | 0xEE, 1) => (0xE1, 0),
            (0xF0..=0xF4, 2..) => (0xF1, 0x80),
            (0xF1..=0xF3, 1) => (0xF1, 0),
            (first, _) => (first, 0),
        };
        let third = if self.length == 3 { 0x80 } else { 0 };
        Self { bytes: [first, second, third], length: self.length }
    }

    /// Decodes one byte. Returns true next to the step if the pending bytes turned out invalid first and count as one
    /// U+FFFD.
    pub fn feed(&mut self, byte: u8) -> (bool, Step) {
        if self.length > 0 {
            if self.takes(byte) {
                let mut character = [0; 4];
                character[..self.length as usize].copy_from_slice(self.bytes());
                character[self.length as usize] = byte;
                let length = self.length as usize + 1;
                if length == width(self.bytes[0]) {
                    *self = Self::default();
                    return (false, Step::Character(character, length));
                }
                self.bytes[length - 1] = byte;
                self.length += 1;
                return (false, Step::Waits);
            }
            *self = Self::default();
            return (true, self.begin(byte));
        }
        (false, self.begin(byte))
    }

    fn begin(&mut self, byte: u8) -> Step {
        match width(byte) {
            1 => Step::Character([byte, 0, 0, 0], 1),
            0 => Step::Broken,
            _ => {
                self.bytes[0] = byte;
                self.length = 1;
                Step::Waits
            }
        }
    }

    /// Returns true if `byte` may follow the pending bytes. UTF-8 excludes overlong forms, surrogates and code points
    /// above U+10FFFF.
    fn takes(self, byte: u8) -> bool {
        if self.length > 1 {
            return matches!(byte, 0x80..=0xBF);
        }
        match self.bytes[0] {
            0xE0 => matches!(byte, 0xA0..=0xBF),
            0xED => matches!(byte, 0x80..=0x9F),
            0xF0 => matches!(byte, 0x90..=0xBF),
            0xF4 => matches!(byte, 0x80..=0x8F),
            _ => matches!(byte, 0x80..=0xBF),
        }
    }
}

/// Returns the number of bytes of the character that starts with `byte`, or 0 if none does.
fn width(byte: u8) -> usize {
    match byte {
        0x00..=0x7F => 1,
        0xC2..=0xDF => 2,
        0xE0..=0xEF => 3,
        0xF0..=0xF4 => 4,
        _ => 0,
    }
}

/// Entries whose bytes are not UTF-8, by their bytes and by their lossy text.
#[derive(Debug, Default)]
pub struct Partial {
    /// Sorted by bytes.
    sorted: Vec<PartialEntry>,
    /// Indices into `sorted` by lossy text.
    by_text: HashMap<Box<str>, Vec<u32>, RandomState>,
    /// Ids whose lossy text ends in U+FFFD.
    open: Vec<u32>,
    /// The same entries in groups.
    groups: Vec<OpenGroup>,
}

/// Entries whose lossy text ends in U+FFFD and which lead a decoder to the same state, if U+FFFD comes next in its text
/// both before and after them.
#[derive(Debug)]
pub struct OpenGroup {
    /// True if they start inside a character: with a continuation byte.
    pub starts_inside: bool,
    /// The lossy text of their bytes without the incomplete character at their end.
    pub text: Box<[u8]>,
    /// True if they do not end inside a character.
    pub is_complete: bool,
    pub members: Members,
}

/// Bytes and id of each member.
type Members = Vec<(Box<[u8]>, u32)>;

/// What the members of an [`OpenGroup`] have in common.
type GroupKey = (Option<Box<[u8]>>, Box<[u8]>, Pending);

fn group_key(bytes: &[u8]) -> GroupKey {
    let (text, pending) = decode_lossy(bytes);
    let inside = match *bytes {
        // What a character accepts next depends on these ranges; the two bytes may become part of U+FFFD.
        [byte @ (0xBD | 0xBF)] => Some([byte].into()),
        [0x80..=0x8F] => Some([0x80].into()),
        [0x90..=0x9F] => Some([0x90].into()),
        [0xA0..=0xBF] => Some([0xA0].into()),
        [0x80..=0xBF, ..] => Some(bytes.into()),
        _ => None,
    };
    (inside, text.into(), pending.class())
}

/// Decodes bytes, with U+FFFD for invalid ones. Returns the text and the incomplete character at the end.
fn decode_lossy(bytes: &[u8]) -> (Vec<u8>, Pending) {
    let (mut text, mut pending) = (Vec::new(), Pending::default());
    for &byte in bytes {
        let (broken, step) = pending.feed(byte);
        if broken {
            text.extend_from_slice(REPLACEMENT);
        }
        match step {
            Step::Waits => {}
            Step::Character(character, length) => text.extend_from_slice(&character[..length]),
            Step::Broken => text.extend_from_slice(REPLACEMENT),
        }
    }
    (text, pending)
}

#[derive(Debug)]
struct PartialEntry {
    bytes: Box<[u8]>,
    id: u32,
    /// True if its lossy text ends in U+FFFD. Recorders that correct by context show nothing for it.
    is_open: bool,
}

impl PartialEntry {
    fn parts(&self) -> (&[u8], u32) {
        (&self.bytes, self.id)
    }
}

impl Partial {
    pub(super) fn new<'a>(entries: impl Iterator<Item = (u32, &'a [u8])>) -> Self {
        let is_partial = |bytes: &[u8]| String::from_utf8_lossy(bytes).contains('\u{FFFD}');
        let is_open = |bytes: &[u8]| String::from_utf8_lossy(bytes).ends_with('\u{FFFD}');
        let entries = entries.filter(|(_, bytes)| is_partial(bytes));
        let mut sorted: Vec<PartialEntry> =
            entries.map(|(id, bytes)| PartialEntry { bytes: bytes.into(), id, is_open: is_open(bytes) }).collect();
        let open = sorted.iter().filter(|entry| entry.is_open).map(|entry| entry.id).collect();
        sorted.sort_unstable_by(|one, other| one.parts().cmp(&other.parts()));
        let mut by_text: HashMap<Box<str>, Vec<u32>, RandomState> = HashMap::default();
        for (index, entry) in sorted.iter().enumerate() {
            by_text.entry(String::from_utf8_lossy(&entry.bytes).into()).or_default().push(index as u32);
        }
        let mut groups: BTreeMap<GroupKey, Members> = BTreeMap::new();
        for entry in sorted.iter().filter(|entry| entry.is_open) {
            groups.entry(group_key(&entry.bytes)).or_default().push((entry.bytes.clone(), entry.id));
        }
        let group = |((inside, text, pending), members): (GroupKey, _)| OpenGroup {
            starts_inside: inside.is_some(),
            text,
            is_complete: pending.is_empty(),
            members,
        };
        Self { sorted, by_text, open, groups: groups.into_iter().map(group).collect() }
    }

    /// Returns the entries whose bytes start with `prefix` and whose lossy text ends in U+FFFD.
    pub fn open_and_beginning_with(&self, prefix: &[u8]) -> impl Iterator<Item = (&[u8], u32)> {
        let start = self.sorted.partition_point(|entry| entry.bytes.as_ref() < prefix);
        let entries = self.sorted[start..].iter().take_while(move |entry| entry.bytes.starts_with(prefix));
        entries.filter(|entry| entry.is_open).map(PartialEntry::parts)
    }

    /// Returns the entries that start inside a character.
    pub fn continuing(&self) -> impl Iterator<Item = (&[u8], u32)> {
        let index_of = |first: u8| self.sorted.partition_point(|entry| entry.bytes[0] < first);
        self.sorted[index_of(0x80)..index_of(0xC0)].iter().map(PartialEntry::parts)
    }

    /// Returns the entries that decode to `text`.
    pub fn decoding_to(&self, text: &str) -> impl Iterator<Item = (&[u8], u32)> {
        let indices = self.by_text.get(text).map_or(&[][..], Vec::as_slice);
        indices.iter().map(|&index| self.sorted[index as usize].parts())
    }

    /// Returns the entries that end inside a character or in invalid bytes, in groups.
    pub fn open_groups(&self) -> &[OpenGroup] {
        &self.groups
    }

    /// Returns the entries that end inside a character or in invalid bytes.
    pub fn open(&self) -> &[u32] {
        &self.open
    }
}

#[cfg(test)]
mod partial_tests {
    use super::*;

    #[test]
    fn entries_that_hold_a_part_of_a_character_are_found_by_bytes_and_by_text() {
        // A complete word; two entries with the first two bytes of "日" (E6 97 A5), by themselves and after a space;
        // its last byte; one that starts inside a character and ends after a complete one; one with an invalid byte
        // inside.
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
        let ids = |entries: &mut dyn Iterator<Item = (&[u8], u32)>| entries.map(|(_, id)| id).collect::<Vec<_>>();
        let open = |prefix: &[u8]| ids(&mut partial.open_and_beginning_with(prefix));
        assert_eq!(open(b""), [3, 2, 4, 8]);
        assert_eq!(open(b"\xA5"), [2]);
        assert_eq!(open(b"\xE6\x97"), [4]);
        assert!(open(b"\xE6\x97\xA5").is_empty());
        assert!(open(b"d").is_empty());
        assert_eq!(partial.open_and_beginning_with(b" ").next(), Some((&b" \xE6\x97"[..], 3)));
        assert_eq!(ids(&mut partial.continuing()), [2, 1]);
        let decoding = |text: &str| ids(&mut partial.decoding_to(text));
        assert_eq!(decoding("\u{FFFD}"), [2, 4, 8]);
        assert_eq!(decoding(" \u{FFFD}"), [3]);
        assert_eq!(decoding("a\u{FFFD}b"), [9]);
        assert!(decoding("day").is_empty());
        assert_eq!(partial.open(), [4, 3, 2, 8]);
    }

    #[test]
    fn entries_that_lead_to_the_same_state_are_in_one_group() {
        let entries: [&[u8]; 11] = [
            b"\xE6\x97",
            b"\xE7\x98",
            b"\xE6",
            b"\xEF\xBF",
            b"\x81",
            b"\x8F",
            b"\xBD",
            b"\xA5",
            b"\x81\xE6",
            b" \xE6\x97",
            b"\xFF",
        ];
        let partial = Partial::new((0..).zip(entries));
        let mut groups: Vec<_> = partial
            .open_groups()
            .iter()
            .map(|group| {
                let ids: Vec<u32> = group.members.iter().map(|(_, id)| *id).collect();
                (ids, group.starts_inside, String::from_utf8_lossy(&group.text).into_owned(), group.is_complete)
            })
            .collect();
        groups.sort();
        let group = |ids: &[u32], starts_inside, text: &str, is_complete| {
            (ids.to_vec(), starts_inside, text.to_owned(), is_complete)
        };
        let expected = [
            group(&[0, 1], false, "", false),
            group(&[2], false, "", false),
            group(&[3], false, "", false),
            group(&[4, 5], true, "\u{FFFD}", true),
            group(&[6], true, "\u{FFFD}", true),
            group(&[7], true, "\u{FFFD}", true),
            group(&[8], true, "\u{FFFD}", false),
            group(&[9], false, " ", false),
            group(&[10], false, "\u{FFFD}", true),
        ];
        assert_eq!(groups, expected);
    }
}

#[cfg(test)]
mod utf8_tests {
    use super::*;
    use proptest::prelude::*;

    fn decoded(bytes: &[u8]) -> Vec<u8> {
        let (mut text, pending) = decode_lossy(bytes);
        if !pending.is_empty() {
            text.extend_from_slice(REPLACEMENT);
        }
        text
    }

    #[test]
    fn beginnings_are_of_one_class_where_the_same_bytes_end_them() {
        let class = |bytes: &[u8]| {
            let mut pending = Pending::default();
            for &byte in bytes {
                assert_eq!(pending.feed(byte), (false, Step::Waits));
            }
            pending.class().bytes().to_vec()
        };
        assert_eq!([class(&[0xE3, 0x81]), class(&[0xEF, 0xBC])], [[0xE1, 0x80]; 2]);
        assert_eq!(class(&[0xEF, 0xBF]), [0xEF, 0xBF]); // U+FFFD may become of it
    }

    proptest! {
        #[test]
        fn it_decodes_as_the_standard_library_does(bytes in proptest::collection::vec(
            prop_oneof![any::<u8>(), Just(0xE3), Just(0x81), Just(0xF0), Just(0x9F), Just(0xED), Just(0xA0), Just(0xF4)], 0..24)
        ) {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            prop_assert_eq!(decoded(&bytes), text.into_bytes());
        }
    }
}
