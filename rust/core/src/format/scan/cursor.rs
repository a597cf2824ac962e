//! A place in JSON text, and the steps from one token to the next.
//!
//! Every step either consumes valid JSON or gives up; no step guesses.

use std::borrow::Cow;

/// Nesting that is followed; deeper records go to the generic parser, which has the documented limit.
const DEPTH: u8 = 64;

const ONES: u64 = u64::MAX / 255;
const HIGHS: u64 = ONES * 0x80;

/// A place in the text of a record.
pub(super) struct Cursor<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    depth: u8,
}

/// A place to come back to.
#[derive(Clone, Copy)]
pub(super) struct Place(usize, u8);

impl<'a> Cursor<'a> {
    pub fn new(text: &'a str) -> Self {
        Self { text, bytes: text.as_bytes(), at: 0, depth: 0 }
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

    /// What is left.
    #[inline]
    pub fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// The text from `start` to here.
    pub fn since(&self, start: Place) -> Option<&'a str> {
        self.text.get(start.0..self.at)
    }

    /// Steps over white space.
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

    /// A key and its colon.
    #[inline]
    pub fn key(&mut self) -> Option<Cow<'a, str>> {
        let (text, escaped) = self.quoted()?;
        let key = if escaped { Cow::Owned(unescaped(text)?) } else { Cow::Borrowed(text) };
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

    /// Steps over null, if it stands here.
    #[inline]
    pub fn null(&mut self) -> Option<()> {
        self.word(b"null")
    }

    /// A string.
    pub fn string(&mut self) -> Option<String> {
        let (text, escaped) = self.quoted()?;
        if escaped { unescaped(text) } else { Some(text.to_owned()) }
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

    /// Steps over a value, which must be valid JSON.
    pub fn skip(&mut self) -> Option<()> {
        match self.peek() {
            b'"' => {
                let (text, escaped) = self.quoted()?;
                if escaped {
                    unescaped(text)?;
                }
            }
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
            _ => {
                self.number()?;
            }
        }
        Some(())
    }

    /// The text of the next value.
    pub fn skipped(&mut self) -> Option<&'a str> {
        let start = self.place();
        self.skip()?;
        self.since(start)
    }
}

/// The first byte from `at` on that is a quote, a backslash or a control character; the length where there is none.
#[inline]
fn plain_end(bytes: &[u8], mut at: usize) -> usize {
    while let Some(eight) = bytes.get(at..at + 8).and_then(|eight| eight.try_into().ok()) {
        let word = u64::from_le_bytes(eight);
        let control = word.wrapping_sub(ONES * 0x20) & !word;
        let found = (control | equals(word, b'"') | equals(word, b'\\')) & HIGHS;
        if found != 0 {
            return at + (found.trailing_zeros() / 8) as usize;
        }
        at += 8;
    }
    while bytes.get(at).is_some_and(|&byte| byte >= 0x20 && byte != b'"' && byte != b'\\') {
        at += 1;
    }
    at.min(bytes.len())
}

/// The high bit of each byte that is `byte`; bytes above the first such one may have it wrongly.
#[inline]
fn equals(word: u64, byte: u8) -> u64 {
    let differs = word ^ (ONES * u64::from(byte));
    differs.wrapping_sub(ONES) & !differs
}

/// A string without its escapes; `None` for escapes that are none, and for half a surrogate pair.
pub(super) fn unescaped(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = memchr::memchr(b'\\', rest.as_bytes()) {
        out.push_str(&rest[..at]);
        let escape = *rest.as_bytes().get(at + 1)?;
        rest = &rest[at + 2..];
        out.push(match escape {
            b'"' => '"',
            b'\\' => '\\',
            b'/' => '/',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => unicode(&mut rest)?,
            _ => return None,
        });
    }
    out.push_str(rest);
    Some(out)
}

/// The character of a `\u` escape or of a surrogate pair of them.
fn unicode(rest: &mut &str) -> Option<char> {
    let first = four_digits(rest)?;
    if !(0xD800..0xE000).contains(&first) {
        return char::from_u32(first);
    }
    *rest = rest.strip_prefix("\\u")?;
    let second = four_digits(rest)?;
    if first >= 0xDC00 || !(0xDC00..0xE000).contains(&second) {
        return None;
    }
    char::from_u32(0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00))
}

fn four_digits(rest: &mut &str) -> Option<u32> {
    let digits = rest.get(..4).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))?;
    *rest = &rest[4..];
    u32::from_str_radix(digits, 16).ok()
}
