//! The two float types, with an exponential that a compiler can vectorise.

use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Sub};

/// f32, computed in f32 with sums in f64, and f64, computed as given.
pub trait Real:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Not a number.
    const NAN: Self;
    /// Bits of an absolute value.
    const BITS: u32;
    /// The smallest and the largest argument that [`Real::exp`] takes; below it e^x counts as 0.
    const EXPONENTS: (Self, Self);
    /// The nearest value.
    fn of(value: f64) -> Self;
    /// The same value, wider.
    fn wide(self) -> f64;
    /// The value with these bits.
    fn from_order(bits: u64) -> Self;
    /// The bits of a value that is not negative, which rise with it.
    fn order(self) -> u64;
    /// Without its sign.
    #[must_use]
    fn abs(self) -> Self;
    /// e^x and e^x - 1 - x, the latter without cancellation around 0, of a value within [`Real::EXPONENTS`].
    #[must_use]
    fn exp_k3(self) -> (Self, Self);
    /// The natural logarithm.
    #[must_use]
    fn ln(self) -> Self;

    /// e^x of a value within [`Real::EXPONENTS`].
    #[must_use]
    #[inline(always)]
    fn exp(self) -> Self {
        self.exp_k3().0
    }

    /// The larger; the other one where this is NaN.
    #[must_use]
    #[inline(always)]
    fn at_least(self, low: Self) -> Self {
        if self > low { self } else { low }
    }

    /// The smaller; the other one where this is NaN.
    #[must_use]
    #[inline(always)]
    fn at_most(self, high: Self) -> Self {
        if self < high { self } else { high }
    }

    /// Whether this is a number.
    #[inline(always)]
    #[allow(clippy::eq_op)]
    fn is_known(self) -> bool {
        self == self
    }

    /// This where it is a number, else the other.
    #[must_use]
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        if self.is_known() { self } else { other }
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NAN: Self = Self::NAN;
    const BITS: u32 = 63;
    const EXPONENTS: (Self, Self) = (-708.0, 709.0);
    fn of(value: f64) -> Self {
        value
    }
    fn wide(self) -> f64 {
        self
    }
    fn from_order(bits: u64) -> Self {
        Self::from_bits(bits)
    }
    fn order(self) -> u64 {
        self.to_bits()
    }
    fn abs(self) -> Self {
        Self::abs(self)
    }
    fn exp_k3(self) -> (Self, Self) {
        (Self::exp(self), self.exp_m1() - self)
    }
    fn ln(self) -> Self {
        Self::ln(self)
    }
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NAN: Self = Self::NAN;
    const BITS: u32 = 31;
    const EXPONENTS: (Self, Self) = (-87.0, 88.0);
    #[inline(always)]
    fn of(value: f64) -> Self {
        value as Self
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        f64::from(self)
    }
    fn from_order(bits: u64) -> Self {
        Self::from_bits(bits as u32)
    }
    fn order(self) -> u64 {
        u64::from(self.to_bits())
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self::abs(self)
    }
    /// 2^n (1 + r + q) with x = n ln 2 + r, |r| <= ln 2 / 2: within 1.5e-7 of the true value, relatively.
    ///
    /// No call and no branch, so that a loop over it becomes vector code; separate multiplications and additions, so that
    /// every machine gives the same bits. Where n is 0, q is e^x - 1 - x.
    #[allow(clippy::excessive_precision)]
    #[inline(always)]
    fn exp_k3(self) -> (Self, Self) {
        const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer in the low bits
        const LN2_HIGH: f32 = 0.693_359_375;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        let shifted = self * std::f32::consts::LOG2_E + ROUND;
        let n = shifted - ROUND;
        let r = self - n * LN2_HIGH - n * LN2_LOW;
        let p = 1.987_569_15e-4 * r + 1.398_199_95e-3;
        let p = p * r + 8.333_451_9e-3;
        let p = p * r + 4.166_579_6e-2;
        let p = p * r + 1.666_666_55e-1;
        let p = p * r + 5.000_000_1e-1;
        let q = p * (r * r);
        let power = Self::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
        let exp = (q + r + 1.0) * power;
        (exp, if n == 0.0 { q } else { exp - 1.0 - self })
    }
    #[inline(always)]
    fn ln(self) -> Self {
        Self::ln(self)
    }
}
