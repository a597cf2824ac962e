//! Numbers: exact float64, float32 of the same bits as by way of float64, token ids, bytes.

use super::cursor::Cursor;
use super::text::word_at;
use crate::exact;
use crate::format::json::numbers::MAX_ID;

/// Powers of ten that float64 holds exactly.
const POWERS: [f64; 23] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20,
    1e21, 1e22,
];

/// Integers up to here are float64 without rounding.
const EXACT: u64 = 1 << 53;

/// A number as it stands: digits without the point, and the power of ten that divides them.
pub(super) struct Decimal {
    negative: bool,
    digits: u64,
    /// Whether `digits` holds all of them: at most 19, leading zeros not counted.
    fits: bool,
    power: i64,
    /// Whether it has a point or an exponent.
    real: bool,
}

/// Exponents are told apart up to here.
const MOST_EXPONENT: i64 = 1 << 20;

impl Cursor<'_> {
    /// A number as JSON has it: an optional minus, an integer without leading zeros, fraction, exponent.
    #[inline]
    pub fn decimal(&mut self) -> Option<Decimal> {
        let negative = self.peek() == b'-';
        self.advance(usize::from(negative));
        let (mut digits, mut whole, mut fraction) = (0, 0, 0);
        if self.peek() == b'0' {
            self.advance(1);
        } else {
            whole = self.run(&mut digits)?;
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
            let lowers = self.peek() == b'-';
            self.advance(usize::from(matches!(self.peek(), b'+' | b'-')));
            let mut exponent = 0;
            let length = self.run(&mut exponent)?;
            let exponent = if length < 7 { exponent as i64 } else { MOST_EXPONENT };
            power += if lowers { exponent } else { -exponent };
        }
        // An integer has no leading zero; behind `0.` they do not count.
        let counted = whole + fraction;
        let fits = counted <= 19 || whole == 0 && zeros.iter().take(counted - 19).all(|&zero| zero == b'0');
        Some(Decimal { negative, digits, fits, power, real })
    }

    /// Appends a run of at least one digit, modulo 2 to the 64; its length.
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

    /// A number as most logprobs are written, where it is one: a digit, a point, at most 18 digits, no exponent. As
    /// `exactly` and `nearly` give it, whose one quotient is of ordinary magnitude here.
    #[inline(always)]
    pub fn common(&mut self) -> Option<f64> {
        let next = self.ahead::<27>()?;
        let negative = next[0] == b'-';
        let number = next[usize::from(negative)..].first_chunk::<26>()?;
        let whole = number[0].wrapping_sub(b'0');
        if whole > 9 || number[1] != b'.' {
            return None;
        }
        let (mut digits, mut length) = (u64::from(whole), 0);
        for at in [2, 10, 18] {
            let run = append(&mut digits, word_at(number, at)?);
            length += run;
            if run < 8 {
                break;
            }
        }
        if length == 0 || length + usize::from(whole > 0) > 18 || matches!(number[2 + length], b'e' | b'E') {
            return None;
        }
        let value = digits as i64 as f64 / POWERS[length];
        if digits > EXACT && !off_midpoint(value) {
            return None;
        }
        self.advance(usize::from(negative) + 2 + length);
        Some(if negative { -value } else { value })
    }

    /// A float64 that rounds to the same float32 as the nearest float64 does; most are read by `common`.
    #[cold]
    pub fn single(&mut self) -> Option<f64> {
        let start = self.place();
        let decimal = self.decimal()?;
        if let Some(value) = decimal.exactly().or_else(|| decimal.nearly()) {
            return Some(value);
        }
        self.since(start)?.parse().ok().filter(|value: &f64| value.is_finite())
    }

    /// A number as the generic parser has it: an integer where there is neither point nor exponent.
    pub fn number_value(&mut self) -> Option<serde_json::Value> {
        let start = self.place();
        let Decimal { negative, digits, fits, real, .. } = self.decimal()?;
        if real || !fits || digits >= TENS_18 || negative && digits == 0 {
            return exact::number(self.since(start)?);
        }
        Some(if negative { (-(digits as i64)).into() } else { digits.into() })
    }

    #[inline]
    pub fn id(&mut self) -> Option<u32> {
        let word = word_at(self.rest(), 0).unwrap_or(0);
        let length = leading_digits(word);
        let behind = (word >> (8 * length.min(7))) as u8;
        if (1..8).contains(&length) && matches!(behind, b',' | b']') && (length == 1 || word as u8 != b'0') {
            self.advance(length);
            return Some(eight_digits(word << (64 - 8 * length)) as u32);
        }
        let decimal = self.decimal()?;
        let is_id = !decimal.real && !decimal.negative && decimal.fits && decimal.digits <= MAX_ID;
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
        let divisor = *POWERS.get(usize::try_from(self.power).ok()?)?;
        (self.fits && self.digits <= EXACT).then(|| self.signed(self.digits as f64 / divisor))
    }

    /// A value at most four steps of float64 away, where that cannot change its float32.
    ///
    /// Digits and both quotients are rounded once each, so the result is within 3 ulp of the true value, and the nearest
    /// float64 within half of one. Both round to the same float32 unless a midpoint of two float32 lies between them: the
    /// lower 29 bits say how far the next midpoint is. Only magnitudes of ordinary float32 are taken.
    #[inline]
    fn nearly(&self) -> Option<f64> {
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

/// Whether a float64 is further from the middle between two float32 than a few steps.
#[inline]
fn off_midpoint(value: f64) -> bool {
    const LOW: u64 = (1 << 29) - 1;
    const MIDPOINT: u64 = 1 << 28;
    const MARGIN: u64 = 8;
    (value.to_bits() & LOW).abs_diff(MIDPOINT) > MARGIN
}

/// Below it an integer is one of 64 bits, with either sign.
const TENS_18: u64 = 1_000_000_000_000_000_000;

/// Powers of ten by exponent.
const TENS: [u64; 9] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000];

/// Appends the digits that eight bytes begin with, modulo 2 to the 64; how many.
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

/// How many digits eight bytes begin with.
#[inline]
pub(super) fn leading_digits(word: u64) -> usize {
    const ZEROS: u64 = 0x3030_3030_3030_3030;
    const HIGHS: u64 = 0x8080_8080_8080_8080;
    // A digit becomes 0 to 9, and no sum of those carries: the first high bit is that of the first other byte.
    let from_zero = word ^ ZEROS;
    let others = (from_zero.wrapping_add(0x7676_7676_7676_7676) | from_zero) & HIGHS;
    (others.trailing_zeros() / 8) as usize
}

/// The number that eight digits spell, the first in the lowest byte.
#[inline]
pub(super) fn eight_digits(word: u64) -> u64 {
    let pairs = (word & 0x0F0F_0F0F_0F0F_0F0F).wrapping_mul(2561) >> 8;
    let fours = (pairs & 0x00FF_00FF_00FF_00FF).wrapping_mul(6_553_601) >> 16;
    (fours & 0x0000_FFFF_0000_FFFF).wrapping_mul(42_949_672_960_001) >> 32
}
