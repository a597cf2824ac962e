//! Strings: where they end, and what they say without their escapes, in one pass.

const ONES: u64 = u64::MAX / 255;
const HIGHS: u64 = ONES * 0x80;
const LOWS: u64 = !HIGHS;

/// Words that are looked at one by one before a search is begun: most keys and tokens end in them.
const FEW: usize = 3;

/// Whether a text has no control character.
pub(super) fn is_printable(bytes: &[u8]) -> bool {
    bytes.chunks(4096).all(|chunk| chunk.iter().fold(u8::MAX, |least, &byte| least.min(byte)) >= 0x20)
}

/// The first byte from `at` on that is a quote, a backslash or a control character; the length where there is none.
/// `printable` says that there are no control characters.
#[inline]
pub(super) fn plain_end(bytes: &[u8], mut at: usize, printable: bool) -> usize {
    let mut words = 0;
    while let Some(word) = word_at(bytes, at) {
        let found = marks(word);
        if found != 0 {
            return at + (found.trailing_zeros() / 8) as usize;
        }
        at += 8;
        words += 1;
        if printable && words == FEW {
            return marked_end(bytes, at);
        }
    }
    while bytes.get(at).is_some_and(|&byte| byte >= 0x20 && byte != b'"' && byte != b'\\') {
        at += 1;
    }
    at.min(bytes.len())
}

/// The first quote or backslash from `at` on; the length where there is none.
#[inline]
fn marked_end(bytes: &[u8], at: usize) -> usize {
    let rest = bytes.get(at..).unwrap_or_default();
    memchr::memchr2(b'"', b'\\', rest).map_or(bytes.len(), |step| at + step)
}

/// Eight bytes, the first in the lowest.
#[inline]
pub(super) fn word_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().map(u64::from_le_bytes)
}

/// The high bit of each byte that is a quote, a backslash or a control character.
#[inline]
fn marks(word: u64) -> u64 {
    // A sum of seven bits each carries into no neighbour. Bytes beyond ASCII have the high bit and are none of them.
    let quote = ((word ^ (ONES * u64::from(b'"'))) & LOWS) + LOWS;
    let escape = ((word ^ (ONES * u64::from(b'\\'))) & LOWS) + LOWS;
    let printable = (word & LOWS) + ONES * 0x60;
    !((quote & escape & printable) | word) & HIGHS
}

/// Puts the string whose first byte stands at `start` and whose first escape at `escape` into `out`: the byte behind its
/// closing quote.
///
/// `None` for escapes that are none, for half a surrogate pair, for control characters and without a closing quote.
pub(super) fn unescape(bytes: &[u8], start: usize, escape: usize, printable: bool, out: &mut Vec<u8>) -> Option<usize> {
    out.clear();
    out.extend_from_slice(&bytes[start..escape]);
    let mut at = escape;
    loop {
        match *bytes.get(at)? {
            b'"' => return Some(at + 1),
            b'\\' => {}
            _ => return None,
        }
        let second = *bytes.get(at + 1)?;
        at += 2;
        if second == b'u' {
            let character = unicode(bytes, &mut at)?;
            out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
        } else {
            let said = SAID[second as usize];
            if said == 0 {
                return None;
            }
            out.push(said);
        }
        if bytes.get(at) != Some(&b'\\') {
            let end = if printable { marked_end(bytes, at) } else { plain_end(bytes, at, false) };
            out.extend_from_slice(&bytes[at..end]);
            at = end;
        }
    }
}

/// What the second byte of an escape stands for, 0 where it is none: looked up, as no branch foretells it.
const SAID: [u8; 256] = {
    let mut said = [0; 256];
    said[b'"' as usize] = b'"';
    said[b'\\' as usize] = b'\\';
    said[b'/' as usize] = b'/';
    said[b'b' as usize] = 8;
    said[b'f' as usize] = 12;
    said[b'n' as usize] = b'\n';
    said[b'r' as usize] = b'\r';
    said[b't' as usize] = b'\t';
    said
};

/// The character of a `\u` escape, or of a surrogate pair of them, whose digits stand at `at`.
fn unicode(bytes: &[u8], at: &mut usize) -> Option<char> {
    let first = four_digits(bytes, at)?;
    if !(0xD800..0xE000).contains(&first) {
        return char::from_u32(first);
    }
    if bytes.get(*at..*at + 2)? != b"\\u" {
        return None;
    }
    *at += 2;
    let second = four_digits(bytes, at)?;
    if first >= 0xDC00 || !(0xDC00..0xE000).contains(&second) {
        return None;
    }
    char::from_u32(0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00))
}

fn four_digits(bytes: &[u8], at: &mut usize) -> Option<u32> {
    let digits: &[u8; 4] = bytes.get(*at..)?.first_chunk()?;
    *at += 4;
    digits.iter().try_fold(0, |value, &digit| Some(value * 16 + char::from(digit).to_digit(16)?))
}
