//! Strings: where they end, and what they say without their escapes, in one pass.

use wide::u8x16;

/// Bytes that are looked at together.
const LANE: usize = 16;

/// The first byte from `at` on that is a quote, a backslash or a control character; the length where there is none.
#[inline]
pub(super) fn plain_end(bytes: &[u8], mut at: usize) -> usize {
    while let Some(lane) = lane_at(bytes, at) {
        let mask = marks(lane);
        if mask != 0 {
            return at + mask.trailing_zeros() as usize;
        }
        at += LANE;
    }
    while bytes.get(at).is_some_and(|&byte| byte >= 0x20 && byte != b'"' && byte != b'\\') {
        at += 1;
    }
    at.min(bytes.len())
}

#[inline]
fn lane_at(bytes: &[u8], at: usize) -> Option<&[u8; LANE]> {
    bytes.get(at..)?.first_chunk()
}

/// A bit for each byte that is a quote, a backslash or a control character.
#[inline]
fn marks(lane: &[u8; LANE]) -> u32 {
    let lane = u8x16::new(*lane);
    let control = lane.min(u8x16::splat(0x1F)).simd_eq(lane);
    (lane.simd_eq(u8x16::splat(b'"')) | lane.simd_eq(u8x16::splat(b'\\')) | control).to_bitmask()
}

/// Eight bytes, the first in the lowest.
#[inline]
pub(super) fn word_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().map(u64::from_le_bytes)
}

/// Writes the string whose first byte stands at `start` and whose first escape at `escape` to the beginning of `out`,
/// which grows as needed and keeps its length: the byte behind its closing quote, and its own length.
///
/// `None` for escapes that are none, for half a surrogate pair, for control characters and without a closing quote.
pub(super) fn unescape(bytes: &[u8], start: usize, escape: usize, out: &mut Vec<u8>) -> Option<(usize, usize)> {
    let (mut at, mut to) = (escape, escape - start);
    make_room(out, to);
    out[..to].copy_from_slice(&bytes[start..escape]);
    loop {
        make_room(out, to);
        if let Some(lane) = lane_at(bytes, at) {
            // Written whole; what is behind a mark is written over.
            out[to..to + LANE].copy_from_slice(lane);
            let mask = marks(lane);
            let plain = (mask.trailing_zeros() as usize).min(LANE);
            at += plain;
            to += plain;
            if mask == 0 {
                continue;
            }
        }
        let byte = *bytes.get(at)?;
        if byte == b'"' {
            return Some((at + 1, to));
        }
        if byte != b'\\' {
            if byte < 0x20 {
                return None;
            }
            out[to] = byte;
            (at, to) = (at + 1, to + 1);
            continue;
        }
        let second = *bytes.get(at + 1)?;
        at += 2;
        if second == b'u' {
            let character = unicode(bytes, &mut at)?;
            to += character.encode_utf8(&mut out[to..to + 4]).len();
        } else {
            let byte = UNESCAPED[second as usize];
            if byte == 0 {
                return None;
            }
            out[to] = byte;
            to += 1;
        }
    }
}

/// Room for the next bytes: a lane, or what an escape stands for behind a lane.
#[inline]
fn make_room(out: &mut Vec<u8>, to: usize) {
    if out.len() < to + 2 * LANE {
        out.resize((to + 2 * LANE).max(2 * out.len()).max(1024), 0);
    }
}

/// What the second byte of an escape stands for, 0 where it is none: looked up, as no branch foretells it.
const UNESCAPED: [u8; 256] = {
    let mut table = [0; 256];
    table[b'"' as usize] = b'"';
    table[b'\\' as usize] = b'\\';
    table[b'/' as usize] = b'/';
    table[b'b' as usize] = 8;
    table[b'f' as usize] = 12;
    table[b'n' as usize] = b'\n';
    table[b'r' as usize] = b'\r';
    table[b't' as usize] = b'\t';
    table
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
