//! Numbers: exact float64, float32 of the same bits as by way of float64, token ids, bytes.

use super::super::numbers::MAX_ID;
use super::cursor::Cursor;
use super::text::word_at;

/// Powers of ten that float64 holds exactly.
const POWERS: [f64; 23] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20,
    1e21, 1e22,
];

/// Integers up to here are float64 without rounding.
const EXACT: u64 = 1 << 53;

/// A number as it stands: digits without the point, and how many stood behind it.
struct Decimal {
    negative: bool,
    digits: u64,
    /// All digits, leading zeros not counted; more than 19 do not fit `digits`.
    count: u32,
    fraction: usize,
    /// Whether it has an exponent.
    exponent: bool,
    /// Whether it has a point or an exponent.
    real: bool,
}

impl<'a> Cursor<'a> {
    /// Steps over a number and gives its text.
    #[inline]
    pub fn number(&mut self) -> Option<&'a str> {
        let start = self.place();
        self.decimal()?;
        self.since(start)
    }

    /// A number as JSON has it: an optional minus, an integer without leading zeros, fraction, exponent.
    #[inline]
    fn decimal(&mut self) -> Option<Decimal> {
        let negative = self.peek() == b'-';
        self.advance(usize::from(negative));
        let (mut digits, mut count) = (0, 0);
        if self.peek() == b'0' {
            self.advance(1);
        } else if self.run(&mut digits, &mut count) == 0 {
            return None;
        }
        let (mut fraction, mut real) = (0, false);
        if self.peek() == b'.' {
            self.advance(1);
            real = true;
            fraction = self.run(&mut digits, &mut count);
            if fraction == 0 {
                return None;
            }
        }
        let exponent = matches!(self.peek(), b'e' | b'E');
        if exponent {
            self.advance(1);
            self.advance(usize::from(matches!(self.peek(), b'+' | b'-')));
            if self.run(&mut 0, &mut 0) == 0 {
                return None;
            }
        }
        Some(Decimal { negative, digits, count, fraction, exponent, real: real || exponent })
    }

    /// Appends a run of digits; its length.
    #[inline]
    fn run(&mut self, digits: &mut u64, count: &mut u32) -> usize {
        let rest = self.rest();
        let mut length = 0;
        while let Some(word) = word_at(rest, length) {
            let here = leading_digits(word);
            if here > 0 {
                *digits = digits.wrapping_mul(TENS[here]).wrapping_add(eight_digits(word << (64 - 8 * here)));
                *count += if *count == 0 { significant(*digits) } else { here as u32 };
                length += here;
            }
            if here < 8 {
                self.advance(length);
                return length;
            }
        }
        while let Some(digit) = rest.get(length).map(|byte| byte.wrapping_sub(b'0')).filter(|digit| *digit < 10) {
            *digits = digits.wrapping_mul(10).wrapping_add(u64::from(digit));
            *count += u32::from(*count > 0 || digit > 0);
            length += 1;
        }
        self.advance(length);
        length
    }

    /// A float64 that rounds to the same float32 as the nearest float64 does.
    #[inline]
    pub fn single(&mut self) -> Option<f64> {
        let start = self.place();
        let decimal = self.decimal()?;
        if let Some(value) = decimal.exactly().or_else(|| decimal.nearly()) {
            return Some(value);
        }
        self.since(start)?.parse().ok().filter(|value: &f64| value.is_finite())
    }

    /// A token id.
    #[inline]
    pub fn id(&mut self) -> Option<u32> {
        let decimal = self.decimal()?;
        let is_id = !decimal.real && !decimal.negative && decimal.count <= 10 && decimal.digits <= MAX_ID;
        is_id.then_some(decimal.digits as u32)
    }

    /// A byte as an integer.
    #[inline]
    pub fn byte(&mut self) -> Option<u8> {
        let rest = self.rest();
        let word = word_at(rest, 0).or_else(|| padded(rest))?;
        let length = leading_digits(word);
        let behind = (word >> (8 * length.min(7))) as u8;
        let zero_first = length > 1 && word as u8 == b'0';
        if length == 0 || length > 3 || zero_first || matches!(behind, b'.' | b'e' | b'E') {
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

/// The last few bytes of a text, zeros behind them.
#[cold]
fn padded(rest: &[u8]) -> Option<u64> {
    let mut eight = [0; 8];
    eight.get_mut(..rest.len())?.copy_from_slice(rest);
    Some(u64::from_le_bytes(eight))
}

impl Decimal {
    /// Its value, where one correctly rounded operation gives it.
    #[inline]
    fn exactly(&self) -> Option<f64> {
        let small = self.count <= 19 && self.digits <= EXACT && self.fraction < POWERS.len() && !self.exponent;
        small.then(|| self.signed(self.digits as f64 / POWERS[self.fraction]))
    }

    /// A value at most two steps of float64 away, where that cannot change its float32.
    ///
    /// Digits and quotient are rounded once each, so the result is within 2 ulp of the true value, and the nearest float64
    /// within half of one. Both round to the same float32 unless a midpoint of two float32 lies between them: the lower
    /// 29 bits say how far the next midpoint is. Only magnitudes of ordinary float32 are taken.
    #[inline]
    fn nearly(&self) -> Option<f64> {
        const LOW: u64 = (1 << 29) - 1;
        const MIDPOINT: u64 = 1 << 28;
        const MARGIN: u64 = 8;
        if self.count > 19 || self.exponent || self.fraction >= POWERS.len() {
            return None;
        }
        let value = self.digits as f64 / POWERS[self.fraction];
        let safe = (value.to_bits() & LOW).abs_diff(MIDPOINT) > MARGIN && (1e-30..1e3).contains(&value);
        safe.then(|| self.signed(value))
    }

    #[inline]
    fn signed(&self, value: f64) -> f64 {
        if self.negative { -value } else { value }
    }

    /// As the generic parser has it: an integer where there is neither point nor exponent.
    pub fn into_integer(self) -> Option<(bool, u64)> {
        (!self.real && self.count <= 18).then_some((self.negative, self.digits))
    }
}

impl Cursor<'_> {
    /// A number as a JSON value.
    pub fn number_value(&mut self) -> Option<serde_json::Number> {
        let start = self.place();
        match self.decimal()?.into_integer() {
            Some((false, digits)) => Some(digits.into()),
            Some((true, digits)) if digits > 0 => Some((-(digits as i64)).into()),
            _ => serde_json::from_str(self.since(start)?).ok(),
        }
    }
}

/// Powers of ten by exponent.
const TENS: [u64; 9] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000];

/// How many digits eight bytes begin with.
#[inline]
fn leading_digits(word: u64) -> usize {
    const ZEROS: u64 = 0x3030_3030_3030_3030;
    const HIGHS: u64 = 0x8080_8080_8080_8080;
    // A digit becomes 0 to 9, and no sum of those carries: the first high bit is that of the first other byte.
    let from_zero = word ^ ZEROS;
    let others = (from_zero.wrapping_add(0x7676_7676_7676_7676) | from_zero) & HIGHS;
    (others.trailing_zeros() / 8) as usize
}

/// The number that eight digits spell, the first in the lowest byte.
#[inline]
fn eight_digits(word: u64) -> u64 {
    let pairs = (word & 0x0F0F_0F0F_0F0F_0F0F).wrapping_mul(2561) >> 8;
    let fours = (pairs & 0x00FF_00FF_00FF_00FF).wrapping_mul(6_553_601) >> 16;
    (fours & 0x0000_FFFF_0000_FFFF).wrapping_mul(42_949_672_960_001) >> 32
}

/// How many digits a number has, 0 for 0.
#[inline]
fn significant(digits: u64) -> u32 {
    if digits == 0 { 0 } else { digits.ilog10() + 1 }
}
