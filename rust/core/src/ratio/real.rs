//! The two float types, with an exponential that a compiler can vectorise.

use std::ops::{Add, Div, Mul, Sub};

/// f32, computed in f32 with sums in f64, and f64, computed as given.
pub trait Real:
    Copy + PartialOrd + Send + Sync + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// The nearest value.
    fn of(value: f64) -> Self;
    /// The same value, wider.
    fn wide(self) -> f64;
    /// The larger; the other one where this is NaN.
    #[must_use]
    fn at_least(self, low: Self) -> Self;
    /// The smaller; the other one where this is NaN.
    #[must_use]
    fn at_most(self, high: Self) -> Self;
    /// Whether this is a number.
    fn is_known(self) -> bool;
    /// Whether this is neither NaN nor infinite.
    fn is_finite(self) -> bool;
    /// Without its sign.
    #[must_use]
    fn abs(self) -> Self;
    /// exp(x) - 1 - x without the cancellation around 0, given exp(x).
    #[must_use]
    fn k3(self, exp: Self) -> Self;
    /// e to the power of a value within [`super::LOG_RATIO_LIMIT`].
    #[must_use]
    fn exp(self) -> Self;
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    fn of(value: f64) -> Self {
        value
    }
    fn wide(self) -> f64 {
        self
    }
    fn at_least(self, low: Self) -> Self {
        if self > low { self } else { low }
    }
    fn at_most(self, high: Self) -> Self {
        if self < high { self } else { high }
    }
    fn is_known(self) -> bool {
        !self.is_nan()
    }
    fn is_finite(self) -> bool {
        Self::is_finite(self)
    }
    fn abs(self) -> Self {
        Self::abs(self)
    }
    fn k3(self, _: Self) -> Self {
        self.exp_m1() - self
    }
    fn exp(self) -> Self {
        Self::exp(self)
    }
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    fn of(value: f64) -> Self {
        value as Self
    }
    fn wide(self) -> f64 {
        f64::from(self)
    }
    fn at_least(self, low: Self) -> Self {
        if self > low { self } else { low }
    }
    fn at_most(self, high: Self) -> Self {
        if self < high { self } else { high }
    }
    fn is_known(self) -> bool {
        !self.is_nan()
    }
    fn is_finite(self) -> bool {
        Self::is_finite(self)
    }
    fn abs(self) -> Self {
        Self::abs(self)
    }
    fn k3(self, exp: Self) -> Self {
        let x = self;
        let series = x * x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0))));
        if x.abs() < 0.06 { series } else { exp - 1.0 - x }
    }
    /// 2^n * p(r) with x = n ln 2 + r and |r| <= ln 2 / 2: within 1.5e-7 of the true value, relatively.
    ///
    /// No call and no branch, so that a loop over it becomes vector code; separate multiplications and additions, so that
    /// every machine gives the same bits.
    #[allow(clippy::excessive_precision)]
    #[inline]
    fn exp(self) -> Self {
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
        let p = p * (r * r) + r + 1.0;
        let power = Self::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
        p * power
    }
}
