//! Vectors of eight numbers: portable, and in AVX2 if the processor has it. This is the only file with unsafe code.
//!
//! A kernel is written once over [`Vector`] and compiled for each. Multiplications and additions are fused only if the
//! code does so explicitly, so all variants give the same bits. (On a processor without fused operations, that is
//! x86-64 from before 2013, each is a slow call.) f32 and f64 implement [`Real`], each with its widest vectors.
#![allow(unsafe_code, reason = "instructions that not every processor has")]

use super::float::{Kernel, LANES, Real, Single, Vector, exp_k3};
use std::array::from_fn;
use std::ops::{Add, Mul, Sub};

/// Prefetches a cache line that will soon be needed, if the processor supports it. The hardware prefetcher stops at
/// page boundaries.
#[inline(always)]
pub(super) fn prefetch<T>(line: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which has no effect on any value; SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(std::ptr::from_ref(line).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Runs an f32 kernel with the widest vectors of the processor.
pub(super) fn run_single<K: Kernel<f32>>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has both, as the line above has found.
        return unsafe { avx2::run(kernel) };
    }
    run_portable(kernel)
}

/// Runs a kernel without special instructions.
pub(super) fn run_portable<F: Real, K: Kernel<F>>(kernel: K) -> K::Output {
    kernel.run::<Portable<F>>()
}

/// An array whose loops a compiler may vectorize.
#[derive(Clone, Copy)]
struct Portable<F>([F; LANES]);

macro_rules! elementwise {
    ($($name:ident $function:ident $sign:tt;)*) => {
        $(impl<F: Real> $name for Portable<F> {
            type Output = Self;
            #[inline(always)]
            fn $function(self, other: Self) -> Self {
                Self(from_fn(|lane| self.0[lane] $sign other.0[lane]))
            }
        })*
    };
}
elementwise!(Add add +; Sub sub -; Mul mul *;);

impl<F: Real> Vector for Portable<F> {
    type Element = F;
    type Mask = [bool; LANES];
    #[inline(always)]
    fn splat(value: F) -> Self {
        Self([value; LANES])
    }
    #[inline(always)]
    fn load(values: &[F; LANES]) -> Self {
        Self(*values)
    }
    #[inline(always)]
    fn store(self, out: &mut [F; LANES]) {
        *out = self.0;
    }
    #[inline(always)]
    fn times_plus(self, by: Self, plus: Self) -> Self {
        Self(from_fn(|lane| self.0[lane].times_plus(by.0[lane], plus.0[lane])))
    }
    #[inline(always)]
    fn at_least(self, low: Self) -> Self {
        Self(from_fn(|lane| self.0[lane].at_least(low.0[lane])))
    }
    #[inline(always)]
    fn at_most(self, high: Self) -> Self {
        Self(from_fn(|lane| self.0[lane].at_most(high.0[lane])))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(self.0.map(F::abs))
    }
    #[inline(always)]
    fn exp(self) -> Self {
        Self(self.0.map(F::exp))
    }
    #[inline(always)]
    fn is_known(self) -> [bool; LANES] {
        self.0.map(F::is_known)
    }
    #[inline(always)]
    fn select(mask: [bool; LANES], yes: Self, no: Self) -> Self {
        Self(from_fn(|lane| if mask[lane] { yes.0[lane] } else { no.0[lane] }))
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{
        __m256, _CMP_EQ_OQ, _CMP_ORD_Q, _mm256_add_epi32, _mm256_add_ps, _mm256_andnot_ps, _mm256_blendv_ps,
        _mm256_castps_si256, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_max_ps,
        _mm256_min_ps, _mm256_mul_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32,
        _mm256_storeu_ps, _mm256_sub_ps,
    };
    use std::ops::{Add, Mul, Sub};

    use super::super::float::{Kernel, LANES, Single, Vector, exp_k3};

    /// Eight f32. Private, so that only a kernel that [`run`] runs can create one.
    #[derive(Clone, Copy)]
    struct F32x8(__m256);

    /// Runs a kernel compiled for AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn run<K: Kernel<f32>>(kernel: K) -> K::Output {
        kernel.run::<F32x8>()
    }

    /// An instruction of AVX2 or FMA.
    macro_rules! instruction {
        ($call:expr) => {
            // SAFETY: the type is private and only `run` names it, which is called where the processor has both;
            // pointers come from references to as many bytes as are read or written, and need no alignment.
            unsafe { $call }
        };
    }

    macro_rules! elementwise {
        ($($name:ident $function:ident $call:ident;)*) => {
            $(impl $name for F32x8 {
                type Output = Self;
                #[inline(always)]
                fn $function(self, other: Self) -> Self {
                    Self(instruction!($call(self.0, other.0)))
                }
            })*
        };
    }
    elementwise!(Add add _mm256_add_ps; Sub sub _mm256_sub_ps; Mul mul _mm256_mul_ps;);

    impl Single for F32x8 {
        #[inline(always)]
        fn constant(value: f32) -> Self {
            Self::splat(value)
        }
        #[inline(always)]
        fn times_plus(self, by: Self, plus: Self) -> Self {
            Self(instruction!(_mm256_fmadd_ps(self.0, by.0, plus.0)))
        }
        #[inline(always)]
        fn two_to_low_bits(self) -> Self {
            Self(instruction!(_mm256_castsi256_ps(_mm256_add_epi32(
                _mm256_slli_epi32::<23>(_mm256_castps_si256(self.0)),
                _mm256_set1_epi32(127 << 23),
            ))))
        }
        #[inline(always)]
        fn if_zero(self, yes: Self, no: Self) -> Self {
            Self(instruction!(_mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_EQ_OQ>(self.0, _mm256_setzero_ps()))))
        }
    }

    impl Vector for F32x8 {
        type Element = f32;
        type Mask = __m256;
        #[inline(always)]
        fn splat(value: f32) -> Self {
            Self(instruction!(_mm256_set1_ps(value)))
        }
        #[inline(always)]
        fn load(values: &[f32; LANES]) -> Self {
            Self(instruction!(_mm256_loadu_ps(values.as_ptr())))
        }
        #[inline(always)]
        fn store(self, out: &mut [f32; LANES]) {
            instruction!(_mm256_storeu_ps(out.as_mut_ptr(), self.0));
        }
        #[inline(always)]
        fn times_plus(self, by: Self, plus: Self) -> Self {
            Single::times_plus(self, by, plus)
        }
        #[inline(always)]
        fn at_least(self, low: Self) -> Self {
            Self(instruction!(_mm256_max_ps(self.0, low.0)))
        }
        #[inline(always)]
        fn at_most(self, high: Self) -> Self {
            Self(instruction!(_mm256_min_ps(self.0, high.0)))
        }
        #[inline(always)]
        fn abs(self) -> Self {
            Self(instruction!(_mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0)))
        }
        #[inline(always)]
        fn exp(self) -> Self {
            exp_k3(self).0
        }
        #[inline(always)]
        fn is_known(self) -> __m256 {
            instruction!(_mm256_cmp_ps::<_CMP_ORD_Q>(self.0, self.0))
        }
        #[inline(always)]
        fn select(mask: __m256, yes: Self, no: Self) -> Self {
            Self(instruction!(_mm256_blendv_ps(no.0, yes.0, mask)))
        }
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
    fn dispatch<K: Kernel<Self>>(kernel: K) -> K::Output {
        run_portable(kernel)
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
        run_single(kernel)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bits of every vector operation for each eight of the values.
    struct Everything<'a>(&'a [f32]);

    impl Kernel<f32> for Everything<'_> {
        type Output = Vec<u32>;
        #[inline(always)]
        fn run<V: Vector<Element = f32>>(self) -> Vec<u32> {
            let mut bits = Vec::new();
            for values in self.0.as_chunks::<LANES>().0 {
                let x = V::load(values);
                let bounded = x.at_least(V::splat(-20.0)).at_most(V::splat(20.0));
                let exp = bounded.exp();
                let chosen = V::select(x.is_known(), exp + x, exp - exp * x.abs());
                for vector in [exp, chosen, V::select(x.is_known(), x, V::splat(0.0))] {
                    let mut out = [0.0; LANES];
                    vector.store(&mut out);
                    bits.extend(out.map(f32::to_bits));
                }
            }
            bits
        }
    }

    #[test]
    fn the_widest_vectors_give_the_bits_of_the_portable_ones() {
        let mut values: Vec<f32> = (-24_000..24_000).map(|step| step as f32 * 1e-3).collect();
        values.extend([0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-30, -1e-30, f32::MIN_POSITIVE]);
        let (wide, portable) = (run_single(Everything(&values)), run_portable::<f32, _>(Everything(&values)));
        assert_eq!(wide.len(), portable.len());
        for (place, (wide, portable)) in wide.iter().zip(&portable).enumerate() {
            let both_unknown = f32::from_bits(*wide).is_nan() && f32::from_bits(*portable).is_nan();
            assert!(wide == portable || both_unknown, "{place}: {wide:#x} {portable:#x}");
        }
    }
}
