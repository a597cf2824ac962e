//! The bytes of every vocabulary entry, and the lookup from bytes to ids.
//!
//! Byte-level BPE is decoded exactly, SentencePiece pieces with byte fallback. For any other kind the bytes are the
//! entry's own text. The tables are built once per tokenizer.

use foldhash::fast::RandomState;
use hashbrown::hash_table::{Entry, HashTable};
use std::collections::{HashMap, HashSet};
use std::hash::BuildHasher;
use std::sync::LazyLock;

/// How vocabulary entries represent bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Spelling {
    /// GPT-2's alphabet: one character for each byte.
    ByteLevel,
    /// `▁` for a space and `<0xE2>` for a byte.
    SentencePiece,
    /// Neither: entries are literal, and byte ends come from the tokenizer's offsets.
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

/// Decodes `text` from GPT-2's alphabet. Returns `None` if a character is not in it.
pub(super) fn glyphs_to_bytes(text: &str) -> Option<Vec<u8>> {
    text.chars().map(|glyph| BYTES.get(glyph as usize).copied().flatten()).collect()
}

/// Encodes `bytes` in GPT-2's alphabet.
pub(super) fn glyphs(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| GLYPHS[*byte as usize]).collect()
}

/// The bytes of all entries, concatenated.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// Start and end of each id's bytes; start is `u32::MAX` if the id is unused.
    ranges: Vec<(u32, u32)>,
    /// Ordinary entries by their bytes.
    ids: HashTable<u32>,
    hasher: RandomState,
    longest: usize,
    /// Ids whose bytes another id has too, or may show.
    shared: HashSet<u32, RandomState>,
}

impl Pieces {
    /// Adds the ordinary vocabulary; added tokens come later. Returns an id as the error if two entries have it.
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

    /// Makes `id` the entry of its bytes, replacing another one only if `preferred`. Returns the other entry.
    fn own(&mut self, id: u32, preferred: bool) -> Option<u32> {
        let Self { bytes, ranges, ids, hasher, .. } = self;
        let bytes_of = |id: u32| &bytes[ranges[id as usize].0 as usize..ranges[id as usize].1 as usize];
        let hash = |id: &u32| hasher.hash_one(bytes_of(*id));
        match ids.entry(hash(&id), |other| bytes_of(*other) == bytes_of(id), hash) {
            Entry::Occupied(mut entry) if preferred => Some(std::mem::replace(entry.get_mut(), id)),
            Entry::Occupied(entry) => Some(*entry.get()),
            Entry::Vacant(entry) => {
                entry.insert(id);
                None
            }
        }
    }

    /// Returns the arguments of [`Pieces::from_parts`]: all bytes, the start and end of each id in them, ids that are
    /// found by their bytes, and shared ids.
    pub fn parts(&self) -> (&[u8], [Vec<u32>; 3]) {
        let sorted = |ids: &mut dyn Iterator<Item = &u32>| {
            let mut ids: Vec<u32> = ids.copied().collect();
            ids.sort_unstable();
            ids
        };
        let ranges = self.ranges.iter().flat_map(|range| [range.0, range.1]).collect();
        (&self.bytes, [ranges, sorted(&mut self.ids.iter()), sorted(&mut self.shared.iter())])
    }

    /// Creates the same pieces from their parts, or returns `None` if the parts are inconsistent.
    pub fn from_parts(bytes: Vec<u8>, [ranges, ids, shared]: &[Vec<u32>; 3]) -> Option<Self> {
        let (ranges, odd) = ranges.as_chunks();
        let ranges: Vec<(u32, u32)> = ranges.iter().map(|[start, end]| (*start, *end)).collect();
        let is_unused = |range: &(u32, u32)| range.0 == u32::MAX;
        let fits = |range: &(u32, u32)| range.0 <= range.1 && range.1 as usize <= bytes.len();
        let longest =
            ranges.iter().filter(|range| !is_unused(range)).map(|range| range.1.saturating_sub(range.0)).max();
        let is_used = |id: &u32| ranges.get(*id as usize).is_some_and(|range| !is_unused(range));
        let is_consistent =
            ranges.iter().all(|range| is_unused(range) || fits(range)) && ids.iter().chain(shared).all(is_used);
        let (longest, shared) = (longest.unwrap_or(0) as usize, shared.iter().copied().collect());
        let ids_by_bytes = HashTable::with_capacity(ids.len());
        let mut pieces = Self { bytes, ranges, ids: ids_by_bytes, longest, shared, ..Self::default() };
        (is_consistent && odd.is_empty() && ids.iter().all(|id| pieces.own(*id, false).is_none())).then_some(pieces)
    }

    /// Sets the bytes of an added token.
    pub fn put_added(&mut self, id: u32, content: &str) {
        self.put(id, content.as_bytes());
        let other = self.id(content.as_bytes()).filter(|other| *other != id);
        self.shared.extend(other.into_iter().flat_map(|other| [other, id]));
    }

    /// Marks entries as shared if another entry shows the same text once its mark (`##` before it, `</w>` after it) is
    /// removed.
    pub fn share_marked(&mut self, prefix: &str, suffix: &str) {
        let has_mark = |bytes: &&[u8]| bytes.starts_with(prefix.as_bytes()) && bytes.ends_with(suffix.as_bytes());
        let without_mark = |bytes: &[u8]| bytes.get(prefix.len()..bytes.len() - suffix.len()).map(<[u8]>::to_vec);
        let texts: Vec<_> =
            self.ids.iter().filter_map(|id| self.get(*id)).filter(has_mark).filter_map(without_mark).collect();
        let shared: Vec<u32> = texts.iter().filter_map(|bytes| self.id(bytes)).collect();
        self.shared.extend(shared);
    }

    /// Returns true if another id may show the bytes of `id`.
    pub fn is_shared(&self, id: u32) -> bool {
        self.shared.contains(&id)
    }

    /// Returns true if any two ids show the same bytes.
    pub fn has_shared(&self) -> bool {
        !self.shared.is_empty()
    }

    /// Returns true if some id below the size is unused.
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

    /// Returns the ordinary entry with exactly these bytes.
    pub fn id(&self, bytes: &[u8]) -> Option<u32> {
        self.ids.find(self.hasher.hash_one(bytes), |id| self.get(*id) == Some(bytes)).copied()
    }

    /// Returns one more than the largest id.
    pub fn size(&self) -> u32 {
        self.ranges.len() as u32
    }

    /// Returns the number of bytes of the longest entry.
    pub fn longest(&self) -> usize {
        self.longest
    }
}

/// Returns the bytes of an entry, and whether it is preferred among entries with the same bytes.
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

/// Returns the byte of a fallback piece such as `<0xE2>`.
fn fallback_byte(text: &str) -> Option<u8> {
    let code = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (code.len() == 2).then(|| u8::from_str_radix(code, 16).ok()).flatten()
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
        let alphabet: String = GLYPHS.iter().collect();
        assert_eq!(glyphs_to_bytes(&alphabet).unwrap(), (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn entries_that_may_show_the_same_bytes_are_shared() {
        let vocab = [("ing", 1), ("##ing", 2), ("##ed", 3), ("rollout", 4), ("at</w>", 5), ("at", 6)];
        let vocab = vocab.map(|(t, i)| (t.to_owned(), i)).into();
        let mut pieces = Pieces::new(&vocab, Spelling::Other, |_| false).unwrap();
        let shared = |pieces: &Pieces| (0..9).filter(|&id| pieces.is_shared(id)).collect::<Vec<u32>>();
        assert!(!pieces.has_shared());
        pieces.share_marked("##", "");
        assert_eq!(shared(&pieces), [1]);
        pieces.share_marked("", "</w>");
        assert_eq!(shared(&pieces), [1, 6]);
        pieces.put_added(8, "rollout");
        assert_eq!(shared(&pieces), [1, 4, 6, 8]);
    }

    #[test]
    fn inconsistent_parts_are_rejected() {
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
