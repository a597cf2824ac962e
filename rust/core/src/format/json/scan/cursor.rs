//! A position in JSON text that moves token by token.
//!
//! Every step consumes valid JSON or returns `None`; nothing is guessed.

use super::text::{plain_end, unescape};
use crate::format::json::numbers::BARE;
use std::borrow::Cow;

/// Levels of nesting that are read here; deeper records go to `generic`, which has the documented limit.
const DEPTH: u8 = 64;

/// A place in the text of a record.
pub(super) struct Cursor<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    depth: u8,
    /// Whether a number was a bare word (`NaN`), so that the text is not JSON.
    pub bare: bool,
    /// Buffer for the last string that had escapes, unescaped; longer than that string.
    scratch: Vec<u8>,
    /// (source text between the brackets, ids) of the previous `prompt_token_ids`.
    pub prompt: (&'a [u8], Vec<u32>),
}

/// A position and its depth, to rewind to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place(usize, u8);

impl<'a> Cursor<'a> {
    pub fn new(text: &'a str) -> Self {
        let bytes = text.as_bytes();
        Self { text, bytes, at: 0, depth: 0, bare: false, scratch: Vec::new(), prompt: (&[], Vec::new()) }
    }

    pub fn place(&self) -> Place {
        Place(self.at, self.depth)
    }

    pub fn rewind(&mut self, place: Place) {
        (self.at, self.depth) = (place.0, place.1);
    }

    pub fn at_end(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// The next byte, 0 at the end, which no JSON has outside strings.
    #[inline]
    pub fn peek(&self) -> u8 {
        self.bytes.get(self.at).copied().unwrap_or(0)
    }

    #[inline]
    pub fn advance(&mut self, count: usize) {
        self.at += count;
    }

    #[inline]
    pub fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// The next bytes, where there are as many.
    #[inline]
    pub fn ahead<const COUNT: usize>(&self) -> Option<&'a [u8; COUNT]> {
        self.bytes.get(self.at..)?.first_chunk()
    }

    /// The text from `start` to here.
    pub fn since(&self, start: Place) -> Option<&'a str> {
        self.text.get(start.0..self.at)
    }

    pub fn between(&self, start: Place, end: Place) -> Option<&'a str> {
        self.text.get(start.0..end.0)
    }

    #[inline]
    pub fn blank(&mut self) {
        while matches!(self.peek(), b' ' | b'\n' | b'\r' | b'\t') {
            self.at += 1;
        }
    }

    /// Enters an object or a list.
    #[inline]
    pub fn open(&mut self, bracket: u8) -> Option<()> {
        if self.peek() != bracket || self.depth == DEPTH {
            return None;
        }
        self.depth += 1;
        self.at += 1;
        self.blank();
        Some(())
    }

    /// Whether an object or a list that was just opened is empty; steps over its end.
    #[inline]
    pub fn closes(&mut self, bracket: u8) -> bool {
        let ends = self.peek() == bracket;
        self.at += usize::from(ends);
        ends
    }

    /// After an item: whether another follows; steps over the comma or the end.
    #[inline]
    pub fn continues(&mut self, bracket: u8) -> Option<bool> {
        self.blank();
        let byte = self.peek();
        self.at += 1;
        if byte == b',' {
            self.blank();
            return Some(true);
        }
        (byte == bracket).then_some(false)
    }

    /// Leaves what `open` entered.
    #[inline]
    pub fn close(&mut self) {
        self.depth -= 1;
    }

    /// Steps through a list; `item` reads each of its values.
    #[inline]
    pub fn list(&mut self, mut item: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.open(b'[')?;
        let mut more = !self.closes(b']');
        while more {
            item(self)?;
            more = self.continues(b']')?;
        }
        self.close();
        Some(())
    }

    /// Steps through an object; `member` reads the value of each key.
    #[inline]
    pub fn members(&mut self, mut member: impl FnMut(&mut Self, Cow<'a, str>) -> Option<()>) -> Option<()> {
        self.open(b'{')?;
        let mut more = !self.closes(b'}');
        while more {
            let key = self.key()?;
            member(self, key)?;
            more = self.continues(b'}')?;
        }
        self.close();
        Some(())
    }

    /// A key and its colon.
    #[inline]
    pub fn key(&mut self) -> Option<Cow<'a, str>> {
        let start = self.at;
        let (text, escaped) = self.quoted()?;
        let key = if escaped {
            self.at = start;
            Cow::Owned(self.unquoted()?.to_owned())
        } else {
            Cow::Borrowed(text)
        };
        self.colon()?;
        Some(key)
    }

    #[inline]
    pub fn colon(&mut self) -> Option<()> {
        self.blank();
        if self.peek() != b':' {
            return None;
        }
        self.at += 1;
        self.blank();
        Some(())
    }

    /// Steps over `word`, if it stands here.
    #[inline]
    pub fn word(&mut self, word: &[u8]) -> Option<()> {
        self.rest().starts_with(word).then(|| self.at += word.len())
    }

    /// Steps over a bare word in place of a number, which reads as the same word in quotes; a minus is already passed.
    #[cold]
    pub fn bare(&mut self) -> Option<&'static str> {
        let signed = self.bytes.get(..self.at).is_some_and(|before| before.ends_with(b"-"));
        let words = BARE.into_iter().filter(|word| word.starts_with('-') == signed);
        let word = words.into_iter().find(|word| self.word(word.trim_start_matches('-').as_bytes()).is_some())?;
        self.bare = true;
        Some(word)
    }

    /// What a string says.
    #[inline]
    pub fn unquoted(&mut self) -> Option<&str> {
        if self.peek() != b'"' {
            return None;
        }
        let start = self.at + 1;
        let end = plain_end(self.bytes, start);
        if *self.bytes.get(end)? == b'"' {
            self.at = end + 1;
            return self.text.get(start..end);
        }
        let (behind, length) = unescape(self.bytes, start, end, &mut self.scratch)?;
        self.at = behind;
        simdutf8::basic::from_utf8(&self.scratch[..length]).ok()
    }

    /// What stands between the quotes, and whether it has escapes.
    #[inline]
    pub fn quoted(&mut self) -> Option<(&'a str, bool)> {
        if self.peek() != b'"' {
            return None;
        }
        let start = self.at + 1;
        let (mut end, mut escaped) = (plain_end(self.bytes, start), false);
        while *self.bytes.get(end)? == b'\\' {
            escaped = true;
            // The escape is checked when the text is taken; here only its second byte must not end the string.
            end = plain_end(self.bytes, end + 2);
        }
        if self.bytes[end] != b'"' {
            return None;
        }
        self.at = end + 1;
        self.text.get(start..end).map(|text| (text, escaped))
    }

    #[inline]
    fn skip_string(&mut self) -> Option<()> {
        let start = self.at + 1;
        let end = plain_end(self.bytes, start);
        if *self.bytes.get(end)? == b'"' {
            self.at = end + 1;
            return Some(());
        }
        self.unquoted().map(|_| ())
    }

    /// Steps over a value, which must be valid JSON.
    pub fn skip(&mut self) -> Option<()> {
        match self.peek() {
            b'"' => self.skip_string()?,
            b'{' => {
                self.open(b'{')?;
                let mut more = !self.closes(b'}');
                while more {
                    self.key()?;
                    self.skip()?;
                    more = self.continues(b'}')?;
                }
                self.close();
            }
            b'[' => {
                self.open(b'[')?;
                let mut more = !self.closes(b']');
                while more {
                    self.skip()?;
                    more = self.continues(b']')?;
                }
                self.close();
            }
            b't' => self.word(b"true")?,
            b'f' => self.word(b"false")?,
            b'n' => self.word(b"null")?,
            _ => return self.decimal().map(|_| ()).or_else(|| self.bare().map(|_| ())),
        }
        Some(())
    }
}
