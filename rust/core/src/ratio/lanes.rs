//! Loops over slices that become vector code: by compilers where they are simple, by [`Vector`] where sums run along.
//!
//! Sums run in fixed lanes, in one order on every machine.

use super::real::{LANES, Real, Vector};

/// out = f(a).
#[inline(always)]
pub(super) fn map<F: Real>(out: &mut [F], a: &[F], f: impl Fn(F) -> F) {
    for (out, &a) in out.iter_mut().zip(a) {
        *out = f(a);
    }
}

/// out = f(a, b).
#[inline(always)]
pub(super) fn map2<F: Real>(out: &mut [F], a: &[F], b: &[F], f: impl Fn(F, F) -> F) {
    for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
        *out = f(a, b);
    }
}

/// The numbers of a vector.
#[inline(always)]
pub(super) fn to_array<V: Vector>(vector: V) -> [V::Element; LANES] {
    let mut array = [V::Element::ZERO; LANES];
    vector.store(&mut array);
    array
}

/// The largest number of a vector.
#[inline(always)]
pub(super) fn largest<V: Vector>(vector: V) -> f64 {
    let array = to_array(vector);
    array.iter().fold(array[0], |most, lane| lane.at_least(most)).wide()
}

/// The largest; NaN is passed over, and without any it is minus infinity.
#[inline(always)]
pub(super) fn maximum<F: Real>(values: &[F]) -> f64 {
    let mut lanes = [F::of(f64::NEG_INFINITY); 2 * LANES];
    let (chunks, tail) = values.as_chunks::<{ 2 * LANES }>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = value.at_least(*lane);
        }
    }
    lanes.iter().chain(tail).fold(f64::NEG_INFINITY, |most, value| most.max(value.wide()))
}

/// The sum in f64, whatever the type of the values; NaN is passed over.
#[inline(always)]
pub(super) fn wide_sum<F: Real>(values: &[F]) -> f64 {
    let mut lanes = [0.0; 2 * LANES];
    let (chunks, tail) = values.as_chunks::<{ 2 * LANES }>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value.or(F::ZERO).wide();
        }
    }
    for (lane, value) in lanes.iter_mut().zip(tail) {
        *lane += value.or(F::ZERO).wide();
    }
    lanes.iter().sum()
}

/// How many values f holds for.
#[inline(always)]
pub(super) fn count<F: Real>(values: &[F], f: impl Fn(F) -> bool) -> usize {
    values.iter().map(|&value| u32::from(f(value))).sum::<u32>() as usize
}

/// How many are true; counted in bytes, which a vector holds most of.
#[inline(always)]
pub(super) fn ones(flags: &[bool]) -> f64 {
    let count = |flags: &[bool]| usize::from(flags.iter().map(|&flag| u8::from(flag)).sum::<u8>());
    flags.chunks(128).map(count).sum::<usize>() as f64
}
