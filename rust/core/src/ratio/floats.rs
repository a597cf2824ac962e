//! f32 and f64 as [`Real`], each with the widest vectors it has.

use super::real::{Kernel, Real, Single, exp_k3};
use super::simd;

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
    fn dispatch<K: Kernel<Self>>(kernel: K) -> K::Output {
        simd::run_portable(kernel)
    }
    fn times_plus(self, by: Self, plus: Self) -> Self {
        self.mul_add(by, plus)
    }
    #[inline(always)]
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
    #[inline(always)]
    fn exp_k3(self) -> (Self, Self) {
        exp_k3(self)
    }
    fn dispatch<K: Kernel<Self>>(kernel: K) -> K::Output {
        simd::run_single(kernel)
    }
    #[inline(always)]
    fn times_plus(self, by: Self, plus: Self) -> Self {
        self.mul_add(by, plus)
    }
    #[inline(always)]
    fn ln(self) -> Self {
        Self::ln(self)
    }
}

impl Single for f32 {
    #[inline(always)]
    fn constant(value: f32) -> Self {
        value
    }
    #[inline(always)]
    fn times_plus(self, by: Self, plus: Self) -> Self {
        self.mul_add(by, plus)
    }
    #[inline(always)]
    fn two_to_low_bits(self) -> Self {
        Self::from_bits((self.to_bits() << 23).wrapping_add(127 << 23))
    }
    #[inline(always)]
    fn if_zero(self, yes: Self, no: Self) -> Self {
        if self == 0.0 { yes } else { no }
    }
}
