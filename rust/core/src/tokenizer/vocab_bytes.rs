//! The bytes of every vocabulary entry, the way back from bytes to ids, and the entries that hold a part of a character.
//!
//! Byte-level BPE, exactly; SentencePiece pieces with byte fallback; for any other kind the entry's own text. Built
//! once per tokenizer. Recorders lose or mangle the bytes of partial entries and of no others.

use foldhash::fast::RandomState;
use hashbrown::hash_table::{Entry, HashTable};
use std::collections::{HashMap, HashSet};
use std::hash::BuildHasher;
use std::sync::LazyLock;

/// How vocabulary entries spell bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Spelling {
    /// GPT-2's alphabet: one character for each byte.
    ByteLevel,
    /// `▁` for a space and `<0xE2>` for a byte.
    SentencePiece,
    /// None of these: entries are taken as they are written, and byte ends come from the tokenizer's offsets.
    Other,
}

/// GPT-2's alphabet, indexed by byte.
static GLYPHS: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut next = 256_u32;
    std::array::from_fn(|byte| {
        let printable = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if printable {
            byte as u32
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
    })
});

/// The alphabet's inverse for U+0000 to U+0143.
static BYTES: LazyLock<[Option<u8>; 324]> = LazyLock::new(|| {
    let mut bytes = [None; 324];
    for (byte, glyph) in GLYPHS.iter().enumerate() {
        bytes[*glyph as usize] = Some(byte as u8);
    }
    bytes
});

/// The bytes that `text` spells in GPT-2's alphabet, `None` where a character is not of it.
pub(super) fn glyphs_to_bytes(text: &str) -> Option<Vec<u8>> {
    text.chars().map(|glyph| BYTES.get(glyph as usize).copied().flatten()).collect()
}

/// `bytes` in GPT-2's alphabet.
pub(super) fn glyphs(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| GLYPHS[*byte as usize]).collect()
}

/// All entries' bytes, end to end.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// Start and end of each id's bytes; start is `u32::MAX` where the id is not in use.
    ranges: Vec<(u32, u32)>,
    /// Ordinary entries by their bytes.
    ids: HashTable<u32>,
    hasher: RandomState,
    longest: usize,
    /// Ids whose bytes another id has too, or may show.
    shared: HashSet<u32, RandomState>,
}

impl Pieces {
    /// Takes the ordinary vocabulary; added tokens come later. An id that two entries have is the error.
    pub fn new(vocab: &HashMap<String, u32>, spelling: Spelling, is_added: impl Fn(u32) -> bool) -> Result<Self, u32> {
        let mut pieces = Self { ids: HashTable::with_capacity(vocab.len()), ..Self::default() };
        let mut entries: Vec<(&str, u32)> = vocab.iter().map(|(text, id)| (text.as_str(), *id)).collect();
        entries.sort_unstable_by_key(|(_, id)| *id);
        if let Some(pair) = entries.windows(2).find(|pair| pair[0].1 == pair[1].1) {
            return Err(pair[0].1);
        }
        for (text, id) in entries {
            let (bytes, canonical) = spelled(text, spelling);
            pieces.put(id, &bytes);
            if is_added(id) {
                continue;
            }
            let other = pieces.own(id, canonical);
            pieces.shared.extend(other.into_iter().flat_map(|other| [other, id]));
        }
        Ok(pieces)
    }

    /// Makes `id` the entry of its bytes, another one only where it is `preferred`; gives back that other one.
    fn own(&mut self, id: u32, preferred: bool) -> Option<u32> {
        let Self { bytes, ranges, ids, hasher, .. } = self;
        let of = |id: u32| &bytes[ranges[id as usize].0 as usize..ranges[id as usize].1 as usize];
        let hash = |id: &u32| hasher.hash_one(of(*id));
        match ids.entry(hash(&id), |other| of(*other) == of(id), hash) {
            Entry::Occupied(mut entry) if preferred => Some(std::mem::replace(entry.get_mut(), id)),
            Entry::Occupied(entry) => Some(*entry.get()),
            Entry::Vacant(entry) => {
                entry.insert(id);
                None
            }
        }
    }

    /// What [`Pieces::from_parts`] takes: all bytes; start and end of each id in them, one after another, ids that are
    /// found by their bytes, shared ids.
    pub fn parts(&self) -> (&[u8], [Vec<u32>; 3]) {
        let sorted = |ids: &mut dyn Iterator<Item = &u32>| {
            let mut ids: Vec<u32> = ids.copied().collect();
            ids.sort_unstable();
            ids
        };
        let ranges = self.ranges.iter().flat_map(|range| [range.0, range.1]).collect();
        (&self.bytes, [ranges, sorted(&mut self.ids.iter()), sorted(&mut self.shared.iter())])
    }

    /// The same again from its parts, `None` where they do not fit together.
    pub fn from_parts(bytes: Vec<u8>, [ranges, ids, shared]: &[Vec<u32>; 3]) -> Option<Self> {
        let (ranges, odd) = ranges.as_chunks();
        let ranges: Vec<(u32, u32)> = ranges.iter().map(|[start, end]| (*start, *end)).collect();
        let unused = |range: &(u32, u32)| range.0 == u32::MAX;
        let fits = |range: &(u32, u32)| range.0 <= range.1 && range.1 as usize <= bytes.len();
        let longest = ranges.iter().filter(|range| !unused(range)).map(|range| range.1.saturating_sub(range.0)).max();
        let known = |id: &u32| ranges.get(*id as usize).is_some_and(|range| !unused(range));
        let whole = ranges.iter().all(|range| unused(range) || fits(range)) && ids.iter().chain(shared).all(known);
        let (longest, shared) = (longest.unwrap_or(0) as usize, shared.iter().copied().collect());
        let ids_by_bytes = HashTable::with_capacity(ids.len());
        let mut pieces = Self { bytes, ranges, ids: ids_by_bytes, longest, shared, ..Self::default() };
        (whole && odd.is_empty() && ids.iter().all(|id| pieces.own(*id, false).is_none())).then_some(pieces)
    }

    /// Sets the bytes of an added token.
    pub fn put_added(&mut self, id: u32, content: &str) {
        self.put(id, content.as_bytes());
        let other = self.id(content.as_bytes()).filter(|other| *other != id);
        self.shared.extend(other.into_iter().flat_map(|other| [other, id]));
    }

    /// Notes entries that another one shows too, when its mark (`##` before it, `</w>` behind it) is taken off.
    pub fn share_marked(&mut self, before: &str, behind: &str) {
        let marked = |bytes: &&[u8]| bytes.starts_with(before.as_bytes()) && bytes.ends_with(behind.as_bytes());
        let bare = |bytes: &[u8]| bytes.get(before.len()..bytes.len() - behind.len()).map(<[u8]>::to_vec);
        let bared: Vec<_> = self.ids.iter().filter_map(|id| self.get(*id)).filter(marked).filter_map(bare).collect();
        let shared: Vec<u32> = bared.iter().filter_map(|bytes| self.id(bytes)).collect();
        self.shared.extend(shared);
    }

    /// Whether the bytes of `id` may have been shown by another one.
    pub fn is_shared(&self, id: u32) -> bool {
        self.shared.contains(&id)
    }

    /// Whether any two ids show the same.
    pub fn has_shared(&self) -> bool {
        !self.shared.is_empty()
    }

    /// Whether some id below the size is not in use.
    pub fn has_gaps(&self) -> bool {
        self.ranges.iter().any(|range| range.0 == u32::MAX)
    }

    pub fn put(&mut self, id: u32, bytes: &[u8]) {
        let index = id as usize;
        if self.ranges.len() <= index {
            self.ranges.resize(index + 1, (u32::MAX, 0));
        }
        let start = self.bytes.len() as u32;
        self.bytes.extend_from_slice(bytes);
        self.ranges[index] = (start, self.bytes.len() as u32);
        self.longest = self.longest.max(bytes.len());
    }

    pub fn get(&self, id: u32) -> Option<&[u8]> {
        let (start, end) = *self.ranges.get(id as usize)?;
        self.bytes.get(start as usize..end as usize)
    }

    /// The ordinary entry with exactly these bytes.
    pub fn id(&self, bytes: &[u8]) -> Option<u32> {
        self.ids.find(self.hasher.hash_one(bytes), |id| self.get(*id) == Some(bytes)).copied()
    }

    /// One more than the largest id.
    pub fn size(&self) -> u32 {
        self.ranges.len() as u32
    }

    /// Bytes of the longest entry.
    pub fn longest(&self) -> usize {
        self.longest
    }
}

/// The bytes of an entry, and whether it is the preferred one among entries with the same bytes.
fn spelled(text: &str, spelling: Spelling) -> (Vec<u8>, bool) {
    match spelling {
        Spelling::ByteLevel => match glyphs_to_bytes(text) {
            Some(bytes) => (bytes, true),
            None => (text.as_bytes().to_vec(), false),
        },
        Spelling::SentencePiece => match fallback_byte(text) {
            Some(byte) => (vec![byte], false),
            None => (text.replace('\u{2581}', " ").into_bytes(), true),
        },
        Spelling::Other => (text.as_bytes().to_vec(), true),
    }
}

/// The byte of a fallback piece such as `<0xE2>`.
fn fallback_byte(text: &str) -> Option<u8> {
    let code = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (code.len() == 2).then(|| u8::from_str_radix(code, 16).ok()).flatten()
}

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
    fn the_alphabet_is_gpt2s() {
        assert_eq!(glyphs_to_bytes("Ġthat").unwrap(), b" that");
        assert_eq!(glyphs_to_bytes("Ċæĺ¯").unwrap(), "\n是".as_bytes());
        assert_eq!(glyphs_to_bytes("是"), None);
        assert_eq!(glyphs_to_bytes("a b"), None);
        let all: String = GLYPHS.iter().collect();
        assert_eq!(glyphs_to_bytes(&all).unwrap(), (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn what_two_entries_may_show_is_shared() {
        let vocab = [("ing", 1), ("##ing", 2), ("##ed", 3), ("play", 4), ("at</w>", 5), ("at", 6)];
        let vocab = vocab.map(|(t, i)| (t.to_owned(), i)).into();
        let mut pieces = Pieces::new(&vocab, Spelling::Other, |_| false).unwrap();
        let shared = |pieces: &Pieces| (0..9).filter(|&id| pieces.is_shared(id)).collect::<Vec<u32>>();
        assert!(!pieces.has_shared());
        pieces.share_marked("##", "");
        assert_eq!(shared(&pieces), [1]);
        pieces.share_marked("", "</w>");
        assert_eq!(shared(&pieces), [1, 6]);
        pieces.put_added(8, "play");
        assert_eq!(shared(&pieces), [1, 4, 6, 8]);
    }

    #[test]
    fn parts_that_do_not_fit_together_are_none() {
        let parts = |ranges: &[(u32, u32)], ids: &[u32], shared: &[u32]| {
            let ranges = ranges.iter().flat_map(|range| [range.0, range.1]).collect();
            Pieces::from_parts(b"abab".to_vec(), &[ranges, ids.to_vec(), shared.to_vec()])
        };
        let ranges = [(0, 2), (u32::MAX, 0), (2, 4), (1, 4)];
        let pieces = parts(&ranges, &[2, 3], &[0, 2]).unwrap();
        assert_eq!((pieces.id(b"ab"), pieces.id(b"bab"), pieces.id(b"a")), (Some(2), Some(3), None));
        assert_eq!((pieces.get(0), pieces.get(1), pieces.longest()), (Some(&b"ab"[..]), None, 3));
        let numbers = [vec![0, 2, u32::MAX, 0, 2, 4, 1, 4], vec![2, 3], vec![0, 2]];
        assert_eq!(pieces.parts(), (&b"abab"[..], numbers));
        assert!(Pieces::from_parts(b"abab".to_vec(), &[vec![0], vec![], vec![]]).is_none(), "half a range");
        assert!(parts(&[(0, 5)], &[], &[]).is_none(), "behind the end");
        assert!(parts(&[(3, 2)], &[], &[]).is_none(), "backwards");
        assert!(parts(&ranges, &[1], &[]).is_none() && parts(&ranges, &[], &[4]).is_none(), "no such id");
        assert!(parts(&ranges, &[0, 2], &[]).is_none(), "two ids of the same bytes");
    }

    #[test]
    fn a_sentencepiece_byte_gives_way_to_the_written_piece() {
        let vocab = [("<0x41>", 3), ("A", 9), ("▁Hi", 10), ("<0xE2>", 4)].map(|(t, i)| (t.to_owned(), i)).into();
        let pieces = Pieces::new(&vocab, Spelling::SentencePiece, |_| false).unwrap();
        assert_eq!(pieces.id(b"A"), Some(9));
        assert_eq!(pieces.get(3), Some(&b"A"[..]));
        assert_eq!(pieces.id(b" Hi"), Some(10));
        assert_eq!(pieces.id(&[0xE2]), Some(4));
        assert_eq!((pieces.get(5), pieces.size(), pieces.longest()), (None, 11, 3));
        let shared: Vec<u32> = (0..11).filter(|&id| pieces.is_shared(id)).collect();
        assert_eq!((shared, pieces.has_gaps()), (vec![3, 9], true));
    }
}

#[cfg(test)]
mod partial_tests {
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
