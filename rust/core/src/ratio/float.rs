//! Traits of a float and of a vector of floats, with an exponential that a compiler can vectorize.

use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Sub};

/// f32, computed in f32 with sums in f64, and f64, computed in f64.
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
    /// Number of bits of an absolute value.
    const BITS: u32;
    /// The smallest and the largest argument of [`Real::exp`]. Below the smallest, e^x counts as 0.
    const EXPONENTS: (Self, Self);
    /// Returns the nearest value.
    fn of(value: f64) -> Self;
    /// Returns the same value as f64.
    fn wide(self) -> f64;
    /// Returns the value with these bits.
    fn from_order(bits: u64) -> Self;
    /// Returns the bits of a non-negative value. They are in the order of the values.
    fn order(self) -> u64;
    /// Returns the absolute value.
    #[must_use]
    fn abs(self) -> Self;
    /// Returns e^x and e^x - 1 - x, the latter without cancellation around 0, for a value within [`Real::EXPONENTS`].
    #[must_use]
    fn exp_k3(self) -> (Self, Self);
    /// Returns self * by + plus, rounded once.
    #[must_use]
    fn times_plus(self, by: Self, plus: Self) -> Self;
    /// Returns the natural logarithm.
    #[must_use]
    fn ln(self) -> Self;
    /// Runs a kernel with the widest vectors of this type.
    #[doc(hidden)]
    #[allow(private_bounds, reason = "the type is sealed by it")]
    fn dispatch<K: Kernel<Self>>(kernel: K) -> K::Output;

    /// Returns e^x for a value within [`Real::EXPONENTS`].
    #[must_use]
    #[inline(always)]
    fn exp(self) -> Self {
        self.exp_k3().0
    }

    /// Returns the larger value, or `low` if this is NaN.
    #[must_use]
    #[inline(always)]
    fn at_least(self, low: Self) -> Self {
        if self > low { self } else { low }
    }

    /// Returns the smaller value, or `high` if this is NaN.
    #[must_use]
    #[inline(always)]
    fn at_most(self, high: Self) -> Self {
        if self < high { self } else { high }
    }

    /// Returns true if this is a number.
    #[inline(always)]
    #[allow(clippy::eq_op)]
    fn is_known(self) -> bool {
        self == self
    }

    /// Returns this value if it is a number, else `other`.
    #[must_use]
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        if self.is_known() { self } else { other }
    }
}

/// Numbers in a vector.
pub(super) const LANES: usize = 8;

/// A vector of eight numbers.
pub trait Vector: Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> {
    type Element: Real;
    /// A flag for each number.
    type Mask: Copy;
    fn splat(value: Self::Element) -> Self;
    fn load(values: &[Self::Element; LANES]) -> Self;
    fn store(self, out: &mut [Self::Element; LANES]);
    /// Returns self * by + plus, rounded once.
    fn times_plus(self, by: Self, plus: Self) -> Self;
    /// Returns the larger value, or `low` if this is NaN.
    fn at_least(self, low: Self) -> Self;
    /// Returns the smaller value, or `high` if this is NaN.
    fn at_most(self, high: Self) -> Self;
    fn abs(self) -> Self;
    /// Returns e^x, see [`Real::exp`].
    fn exp(self) -> Self;
    /// Returns a mask of the lanes that are numbers.
    fn is_known(self) -> Self::Mask;
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self;
}

/// A computation over any kind of vector. `run` and everything it calls must be `#[inline(always)]`.
pub trait Kernel<F> {
    type Output;
    fn run<V: Vector<Element = F>>(self) -> Self::Output;
}

/// Operations on one f32, or on a vector of them, that the exponential needs.
pub(super) trait Single: Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> {
    fn constant(value: f32) -> Self;
    /// Returns self * by + plus, rounded once.
    fn times_plus(self, by: Self, plus: Self) -> Self;
    /// Returns 2 to the power of the integer in the low bits.
    fn two_to_low_bits(self) -> Self;
    /// Returns `yes` if this is 0, else `no`.
    fn if_zero(self, yes: Self, no: Self) -> Self;
}

/// Computes e^x = 2^n (1 + r + q) with x = n ln 2 + r and |r| <= ln 2 / 2, within a relative error of 1e-7.
///
/// There are no calls and no branches. Fused multiplications are explicit, and nothing else is fused, so every machine
/// gives the same bits. If n is 0, q is e^x - 1 - x. The polynomial minimizes the maximum relative error for its
/// degree (by Lawson's iteration).
#[allow(clippy::excessive_precision)]
#[inline(always)]
pub(super) fn exp_k3<V: Single>(x: V) -> (V, V) {
    let of = V::constant;
    let round = of(12_582_912.0); // 1.5 * 2^23: adding it rounds to an integer in the low bits
    let shifted = x.times_plus(of(std::f32::consts::LOG2_E), round);
    let n = shifted - round;
    let r = n.times_plus(of(-0.693_359_375), x); // ln 2 in two parts
    let r = n.times_plus(of(2.121_944_4e-4), r);
    let square = r * r;
    let low = r.times_plus(of(0.166_665_21), of(0.499_999_94));
    let high = r.times_plus(of(0.008_368_745), of(0.041_668_39));
    let q = square.times_plus(of(0.001_381_454), high).times_plus(square, low) * square;
    let exp = (q + r + of(1.0)) * shifted.two_to_low_bits();
    (exp, n.if_zero(q, exp - of(1.0) - x))
}
