//! What is asked of a float and of a vector of floats, with an exponential that a compiler can vectorise.

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
    /// self * by + plus, rounded once.
    #[must_use]
    fn times_plus(self, by: Self, plus: Self) -> Self;
    /// The natural logarithm.
    #[must_use]
    fn ln(self) -> Self;
    /// Runs a kernel in the widest vectors of this type.
    #[doc(hidden)]
    #[allow(private_bounds, reason = "the type is sealed by it")]
    fn dispatch<K: Kernel<Self>>(kernel: K) -> K::Output;

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

/// Numbers in a vector.
pub(super) const LANES: usize = 8;

/// Eight numbers at a time.
pub trait Vector: Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> {
    type Element: Real;
    /// A flag for each number.
    type Mask: Copy;
    fn splat(value: Self::Element) -> Self;
    fn load(values: &[Self::Element; LANES]) -> Self;
    fn store(self, out: &mut [Self::Element; LANES]);
    /// self * by + plus, rounded once.
    fn times_plus(self, by: Self, plus: Self) -> Self;
    /// The larger; the other one where this is NaN.
    fn at_least(self, low: Self) -> Self;
    /// The smaller; the other one where this is NaN.
    fn at_most(self, high: Self) -> Self;
    fn abs(self) -> Self;
    /// e^x, see [`Real::exp`].
    fn exp(self) -> Self;
    /// Where this is a number.
    fn is_known(self) -> Self::Mask;
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self;
}

/// A computation over vectors of some kind. `run` must be `#[inline(always)]`, as all that it calls.
pub trait Kernel<F> {
    type Output;
    fn run<V: Vector<Element = F>>(self) -> Self::Output;
}

/// What the exponential needs of one f32, or of a vector of them.
pub(super) trait Single: Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> {
    fn constant(value: f32) -> Self;
    /// self * by + plus, rounded once.
    fn times_plus(self, by: Self, plus: Self) -> Self;
    /// 2 to the power of the integer in the low bits.
    fn two_to_low_bits(self) -> Self;
    /// One of two values, by whether this is 0.
    fn if_zero(self, yes: Self, no: Self) -> Self;
}

/// e^x = 2^n (1 + r + q) with x = n ln 2 + r and |r| <= ln 2 / 2: within 1e-7 of the true value, relatively.
///
/// No call and no branch. Fused multiplications are written out, and nothing else is fused, so that every machine gives the
/// same bits. Where n is 0, q is e^x - 1 - x. The polynomial has the smallest largest relative error of its degree (by
/// Lawson's iteration).
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
