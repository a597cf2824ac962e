//! A position in JSON text that moves token by token, including strings and numbers.
//!
//! Every step consumes valid JSON or returns `None`. Strings are unescaped in one pass. A number is read as an exact
//! float64, as a float64 that rounds to the correct float32, as a token id or as a byte.
//!
//! Numbers are parsed here because `fast-float2` needed 2 to 8 % more instructions for the same records.

use crate::format::token_list::{BARE, MAX_ID};
use crate::json_number;
use std::borrow::Cow;
use wide::u8x16;

/// Largest nesting depth of this reader. Deeper records go to `fallback`, which has the documented limit.
const DEPTH: u8 = 64;

/// A position in the text of a record.
pub(super) struct Cursor<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    depth: u8,
    /// Whether a number was a bare word (`NaN`), so that the text is not JSON.
    pub bare: bool,
    /// Buffer for the last string with escapes, unescaped. It may be longer than that string.
    scratch: Vec<u8>,
    /// The previous `prompt_token_ids`: the source text between the brackets, and the ids.
    pub prompt: (&'a [u8], Vec<u32>),
}

/// A saved position and nesting depth.
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

    /// Returns the next byte, or 0 at the end. JSON contains no 0 byte outside strings.
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

    /// Returns the next `COUNT` bytes, if there are as many.
    #[inline]
    pub fn ahead<const COUNT: usize>(&self) -> Option<&'a [u8; COUNT]> {
        self.bytes.get(self.at..)?.first_chunk()
    }

    /// Returns the text from `start` to the current position.
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

    /// Returns whether the object or list that was just entered is empty, and steps over its end.
    #[inline]
    pub fn closes(&mut self, bracket: u8) -> bool {
        let ends = self.peek() == bracket;
        self.at += usize::from(ends);
        ends
    }

    /// Steps over the comma or the end after an item. Returns whether another item follows.
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

    /// Leaves the object or list that `open` entered.
    #[inline]
    pub fn close(&mut self) {
        self.depth -= 1;
    }

    /// Steps through a list. `item` reads each value.
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

    /// Steps through an object. `member` reads the value of each key.
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

    /// Reads a key and its colon.
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

    /// Steps over `word` if it is next.
    #[inline]
    pub fn word(&mut self, word: &[u8]) -> Option<()> {
        self.rest().starts_with(word).then(|| self.at += word.len())
    }

    /// Steps over a bare word in place of a number, and returns it. It reads like the same word in quotes. A minus was
    /// consumed before.
    #[cold]
    pub fn bare(&mut self) -> Option<&'static str> {
        let signed = self.bytes.get(..self.at).is_some_and(|before| before.ends_with(b"-"));
        let words = BARE.into_iter().filter(|word| word.starts_with('-') == signed);
        let word = words.into_iter().find(|word| self.word(word.trim_start_matches('-').as_bytes()).is_some())?;
        self.bare = true;
        Some(word)
    }

    /// Returns the unescaped text of a string.
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
        let (string_end, length) = unescape(self.bytes, start, end, &mut self.scratch)?;
        self.at = string_end;
        simdutf8::basic::from_utf8(&self.scratch[..length]).ok()
    }

    /// Returns the text between the quotes, and whether it contains escapes.
    #[inline]
    pub fn quoted(&mut self) -> Option<(&'a str, bool)> {
        if self.peek() != b'"' {
            return None;
        }
        let start = self.at + 1;
        let (mut end, mut escaped) = (plain_end(self.bytes, start), false);
        while *self.bytes.get(end)? == b'\\' {
            escaped = true;
            // An escape is validated when the text is unescaped. Here its second byte must only not end the string.
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

    /// Steps over a value. It must be valid JSON.
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

/// Number of bytes that are compared at once.
const LANE: usize = 16;

/// Returns the index, from `at` on, of the first quote, backslash or control character; the length if there is none.
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

/// Returns a bit mask of the bytes that are a quote, a backslash or a control character.
#[inline]
fn marks(lane: &[u8; LANE]) -> u32 {
    let lane = u8x16::new(*lane);
    let control = lane.min(u8x16::splat(0x1F)).simd_eq(lane);
    (lane.simd_eq(u8x16::splat(b'"')) | lane.simd_eq(u8x16::splat(b'\\')) | control).to_bitmask()
}

/// Returns eight bytes as a number, the first byte lowest.
#[inline]
pub(super) fn word_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().map(u64::from_le_bytes)
}

/// Unescapes a string into the beginning of `out`. The string's first byte is at `start`, its first escape at `escape`.
///
/// `out` grows as needed and never shrinks. Returns the index after the closing quote, and the length of the unescaped
/// text. Returns `None` for invalid escapes, half of a surrogate pair, control characters, and without a closing quote.
pub(super) fn unescape(bytes: &[u8], start: usize, escape: usize, out: &mut Vec<u8>) -> Option<(usize, usize)> {
    let (mut at, mut to) = (escape, escape - start);
    make_room(out, to);
    out[..to].copy_from_slice(&bytes[start..escape]);
    loop {
        make_room(out, to);
        if let Some(lane) = lane_at(bytes, at) {
            // The complete lane is copied. Bytes after a mark are overwritten later.
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

/// Reserves space for the next bytes: a lane, and the character of an escape after it.
#[inline]
fn make_room(out: &mut Vec<u8>, to: usize) {
    if out.len() < to + 2 * LANE {
        out.resize((to + 2 * LANE).max(2 * out.len()).max(1024), 0);
    }
}

/// The byte for the second byte of an escape, 0 for an invalid one. A table, because a branch would be mispredicted.
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

/// Reads the character of a `\u` escape, or of a surrogate pair, whose digits start at `at`.
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

/// Powers of ten that float64 represents exactly.
const POWERS: [f64; 23] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20,
    1e21, 1e22,
];

/// Integers up to this value are exact in float64.
const EXACT: u64 = 1 << 53;

/// A number as written: its digits without the point, and the power of ten that divides them.
pub(super) struct Decimal {
    negative: bool,
    digits: u64,
    /// Whether `digits` contains all digits: at most 19, not counting leading zeros.
    fits: bool,
    power: i64,
    /// Whether the number has a point or an exponent.
    real: bool,
}

/// Larger exponents are treated as this one.
const MOST_EXPONENT: i64 = 1 << 20;

impl Cursor<'_> {
    /// Reads a JSON number: an optional minus, an integer without leading zeros, a fraction, an exponent.
    #[inline]
    pub fn decimal(&mut self) -> Option<Decimal> {
        let negative = self.peek() == b'-';
        self.advance(usize::from(negative));
        let (mut digits, mut integer, mut fraction) = (0, 0, 0);
        if self.peek() == b'0' {
            self.advance(1);
        } else {
            integer = self.run(&mut digits)?;
        }
        let mut real = false;
        let mut zeros = &[][..];
        if self.peek() == b'.' {
            self.advance(1);
            real = true;
            zeros = self.rest();
            fraction = self.run(&mut digits)?;
        }
        let mut power = fraction as i64;
        if matches!(self.peek(), b'e' | b'E') {
            self.advance(1);
            real = true;
            let is_negative_exponent = self.peek() == b'-';
            self.advance(usize::from(matches!(self.peek(), b'+' | b'-')));
            let mut exponent = 0;
            let length = self.run(&mut exponent)?;
            let exponent = if length < 7 { exponent as i64 } else { MOST_EXPONENT };
            power += if is_negative_exponent { exponent } else { -exponent };
        }
        // An integer has no leading zeros, and leading zeros after `0.` do not count.
        let digit_count = integer + fraction;
        let fits = digit_count <= 19 || integer == 0 && zeros.iter().take(digit_count - 19).all(|&zero| zero == b'0');
        Some(Decimal { negative, digits, fits, power, real })
    }

    /// Appends a run of at least one digit, modulo 2^64. Returns its length.
    #[inline]
    fn run(&mut self, digits: &mut u64) -> Option<usize> {
        let rest = self.rest();
        let mut length = 0;
        while let Some(word) = word_at(rest, length) {
            let run = append(digits, word);
            length += run;
            if run < 8 {
                self.advance(length);
                return (length > 0).then_some(length);
            }
        }
        while let Some(digit) = rest.get(length).map(|byte| byte.wrapping_sub(b'0')).filter(|digit| *digit < 10) {
            *digits = digits.wrapping_mul(10).wrapping_add(u64::from(digit));
            length += 1;
        }
        self.advance(length);
        (length > 0).then_some(length)
    }

    /// Reads a number in the usual format of logprobs: a digit, a point, at most 18 digits, no exponent.
    ///
    /// The result equals the result of `exact_value` and `near_value`. There is one quotient here, and its magnitude is
    /// ordinary.
    #[inline(always)]
    pub fn short_decimal(&mut self) -> Option<f64> {
        let next = self.ahead::<27>()?;
        let negative = next[0] == b'-';
        let number = next[usize::from(negative)..].first_chunk::<26>()?;
        let integer = number[0].wrapping_sub(b'0');
        if integer > 9 || number[1] != b'.' {
            return None;
        }
        let (mut digits, mut length) = (u64::from(integer), 0);
        for at in [2, 10, 18] {
            let run = append(&mut digits, word_at(number, at)?);
            length += run;
            if run < 8 {
                break;
            }
        }
        if length == 0 || length + usize::from(integer > 0) > 18 || matches!(number[2 + length], b'e' | b'E') {
            return None;
        }
        let value = digits as i64 as f64 / POWERS[length];
        if digits > EXACT && !off_midpoint(value) {
            return None;
        }
        self.advance(usize::from(negative) + 2 + length);
        Some(if negative { -value } else { value })
    }

    /// Reads a number as a float64 that rounds to the same float32 as the nearest float64 does. Most numbers are read
    /// by `short_decimal`.
    #[cold]
    pub fn float32_value(&mut self) -> Option<f64> {
        let start = self.place();
        let decimal = self.decimal()?;
        if let Some(value) = decimal.exact_value().or_else(|| decimal.near_value()) {
            return Some(value);
        }
        self.since(start)?.parse().ok().filter(|value: &f64| value.is_finite())
    }

    /// Reads a number as the generic parser does: an integer if it has neither point nor exponent.
    pub fn number_value(&mut self) -> Option<serde_json::Value> {
        let start = self.place();
        let Decimal { negative, digits, fits, real, .. } = self.decimal()?;
        if real || !fits || digits >= TENS_18 || negative && digits == 0 {
            return json_number::number(self.since(start)?);
        }
        Some(if negative { (-(digits as i64)).into() } else { digits.into() })
    }

    #[inline]
    pub fn id(&mut self) -> Option<u32> {
        let word = word_at(self.rest(), 0).unwrap_or(0);
        let length = leading_digits(word);
        let next = (word >> (8 * length.min(7))) as u8;
        if (1..8).contains(&length) && matches!(next, b',' | b']') && (length == 1 || word as u8 != b'0') {
            self.advance(length);
            return Some(eight_digits(word << (64 - 8 * length)) as u32);
        }
        let decimal = self.decimal()?;
        let is_id = !decimal.real && !decimal.negative && decimal.fits && decimal.digits <= MAX_ID;
        is_id.then_some(decimal.digits as u32)
    }

    /// Reads a byte that is written as an integer.
    #[inline]
    pub fn byte(&mut self) -> Option<u8> {
        let rest = self.rest();
        let word = word_at(rest, 0).or_else(|| padded(rest))?;
        let length = leading_digits(word);
        let next = (word >> (8 * length.min(7))) as u8;
        let zero_first = length > 1 && word as u8 == b'0';
        if length == 0 || length > 3 || zero_first || matches!(next, b'.' | b'e' | b'E') {
            return None;
        }
        let [hundreds, tens, ones] = {
            let digits = (word << (24 - 8 * length)) & 0x0F_0F0F;
            [digits & 0xFF, digits >> 8 & 0xFF, digits >> 16]
        };
        self.advance(length);
        u8::try_from(hundreds * 100 + tens * 10 + ones).ok()
    }
}

/// Returns the last few bytes of a text, padded with zeros.
#[cold]
fn padded(rest: &[u8]) -> Option<u64> {
    let mut eight = [0; 8];
    eight.get_mut(..rest.len())?.copy_from_slice(rest);
    Some(u64::from_le_bytes(eight))
}

impl Decimal {
    /// Returns the value if one correctly rounded operation computes it.
    #[inline]
    fn exact_value(&self) -> Option<f64> {
        let divisor = *POWERS.get(usize::try_from(self.power).ok()?)?;
        (self.fits && self.digits <= EXACT).then(|| self.signed(self.digits as f64 / divisor))
    }

    /// Returns a value at most four float64 steps from the exact one, if that difference cannot change its float32.
    ///
    /// The digits and both quotients are rounded once each. So the result is within 3 ulp of the true value, and the
    /// nearest float64 within half an ulp. Both round to the same float32 unless the midpoint of two float32 is between
    /// them. The lower 29 bits give the distance to the next midpoint. Only magnitudes of ordinary float32 are
    /// accepted.
    #[inline]
    fn near_value(&self) -> Option<f64> {
        let power = usize::try_from(self.power).ok().filter(|_| self.fits)?;
        let near = power.min(POWERS.len() - 1);
        let value = self.digits as f64 / POWERS[near] / POWERS.get(power - near)?;
        (off_midpoint(value) && (1e-30..1e3).contains(&value)).then(|| self.signed(value))
    }

    #[inline]
    fn signed(&self, value: f64) -> f64 {
        if self.negative { -value } else { value }
    }
}

/// Returns whether a float64 is more than a few steps away from the midpoint of two float32.
#[inline]
fn off_midpoint(value: f64) -> bool {
    const LOW: u64 = (1 << 29) - 1;
    const MIDPOINT: u64 = 1 << 28;
    const MARGIN: u64 = 8;
    (value.to_bits() & LOW).abs_diff(MIDPOINT) > MARGIN
}

/// Smaller integers fit 64 bits with either sign.
const TENS_18: u64 = 1_000_000_000_000_000_000;

/// Powers of ten by exponent.
const TENS: [u64; 9] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000];

/// Appends the digits at the beginning of eight bytes, modulo 2^64. Returns their number.
#[inline]
fn append(digits: &mut u64, word: u64) -> usize {
    let run = leading_digits(word);
    if run == 8 {
        *digits = digits.wrapping_mul(TENS[8]).wrapping_add(eight_digits(word));
    } else if run > 0 {
        *digits = digits.wrapping_mul(TENS[run]).wrapping_add(eight_digits(word << (64 - 8 * run)));
    }
    run
}

/// Returns the number of digits at the beginning of eight bytes.
#[inline]
pub(super) fn leading_digits(word: u64) -> usize {
    const ZEROS: u64 = 0x3030_3030_3030_3030;
    const HIGHS: u64 = 0x8080_8080_8080_8080;
    // A digit becomes 0 to 9 and its sum does not carry. So the first high bit marks the first byte that is not a
    // digit.
    let from_zero = word ^ ZEROS;
    let others = (from_zero.wrapping_add(0x7676_7676_7676_7676) | from_zero) & HIGHS;
    (others.trailing_zeros() / 8) as usize
}

/// Returns the number that eight digits spell, the first digit in the lowest byte.
#[inline]
pub(super) fn eight_digits(word: u64) -> u64 {
    let pairs = (word & 0x0F0F_0F0F_0F0F_0F0F).wrapping_mul(2561) >> 8;
    let fours = (pairs & 0x00FF_00FF_00FF_00FF).wrapping_mul(6_553_601) >> 16;
    (fours & 0x0000_FFFF_0000_FFFF).wrapping_mul(42_949_672_960_001) >> 32
}
