//! The bytes of every vocabulary entry, and the way back from bytes to ids.
//!
//! Byte-level BPE, exactly; SentencePiece pieces with byte fallback; for any other kind the entry's own text. Built
//! once per tokenizer.

use foldhash::fast::RandomState;
use std::collections::{HashMap, HashSet};
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
    ids: HashMap<Box<[u8]>, u32, RandomState>,
    longest: usize,
    /// Ids whose bytes another id has too, or may show.
    shared: HashSet<u32, RandomState>,
}

impl Pieces {
    /// Takes the ordinary vocabulary; added tokens come later. An id that two entries have is the error.
    pub fn new(vocab: &HashMap<String, u32>, spelling: Spelling, is_added: impl Fn(u32) -> bool) -> Result<Self, u32> {
        let mut pieces =
            Self { ids: HashMap::with_capacity_and_hasher(vocab.len(), RandomState::default()), ..Self::default() };
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
            let other = if canonical {
                pieces.ids.insert(bytes.into(), id)
            } else {
                let first = *pieces.ids.entry(bytes.into()).or_insert(id);
                Some(first).filter(|first| *first != id)
            };
            pieces.shared.extend(other.into_iter().flat_map(|other| [other, id]));
        }
        Ok(pieces)
    }

    /// Sets the bytes of an added token.
    pub fn put_added(&mut self, id: u32, content: &str) {
        self.put(id, content.as_bytes());
        let other = self.ids.get(content.as_bytes()).copied().filter(|other| *other != id);
        self.shared.extend(other.into_iter().flat_map(|other| [other, id]));
    }

    /// Notes entries that another one shows too, when its mark (`##` before it, `</w>` behind it) is taken off.
    pub fn share_marked(&mut self, before: &str, behind: &str) {
        let marked = |bytes: &&[u8]| bytes.starts_with(before.as_bytes()) && bytes.ends_with(behind.as_bytes());
        let bare = |bytes: &[u8]| bytes.get(before.len()..bytes.len() - behind.len()).map(<[u8]>::to_vec);
        let bared: Vec<_> = self.ids.keys().map(AsRef::as_ref).filter(marked).filter_map(bare).collect();
        self.shared.extend(bared.iter().filter_map(|bytes| self.ids.get(bytes.as_slice())));
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
        self.ids.get(bytes).copied()
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
