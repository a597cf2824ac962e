//! Vectorised loops over slices: log-ratios and their exponentials, maps and sums, and the aligned buffers they run over.
//!
//! Loops become vector code by compilers where they are simple, by [`Vector`] where sums run along. Sums run in fixed
//! lanes, in one order on every machine.

use super::float::{LANES, Real, Vector};
use super::plan::{LOG_RATIO_LIMIT, POSITIVE_TOLERANCE, SENTINEL};
use super::simd::prefetch;
use std::ops::{Deref, DerefMut};

/// What is done with a vector of each input. `step` must be `#[inline(always)]`.
trait Pass<V, const I: usize, const O: usize> {
    fn step(&mut self, inputs: [V; I]) -> [V; O];
}

/// Runs a pass over slices of one length; the vector behind the last whole one is filled up with `padding`.
#[inline(always)]
fn each<V: Vector, P: Pass<V, I, O>, const I: usize, const O: usize>(
    pass: &mut P,
    inputs: [&[V::Element]; I],
    padding: [V::Element; I],
    outputs: [&mut [V::Element]; O],
) {
    let size = inputs[0].len();
    let inputs = inputs.map(|input| input[..size].as_chunks::<LANES>());
    let mut outputs = outputs.map(|output| output[..size].as_chunks_mut::<LANES>());
    for chunk in 0..size / LANES {
        let found = pass.step(std::array::from_fn(|n| V::load(&inputs[n].0[chunk])));
        for (output, found) in outputs.iter_mut().zip(found) {
            found.store(&mut output.0[chunk]);
        }
    }
    if !size.is_multiple_of(LANES) {
        let found = pass.step(std::array::from_fn(|n| V::load(&padded(inputs[n].1, padding[n]))));
        for ((_, tail), found) in outputs.iter_mut().zip(found) {
            tail.copy_from_slice(&to_array(found)[..tail.len()]);
        }
    }
}

/// The last few values, and something that counts for nothing.
#[inline(always)]
fn padded<T: Copy>(tail: &[T], nothing: T) -> [T; LANES] {
    let mut array = [nothing; LANES];
    array[..tail.len()].copy_from_slice(tail);
    array
}

/// e^x of a log-ratio held within the limit; 1 where it is NaN.
#[inline(always)]
fn exponential<V: Vector>(counted: V) -> V {
    let limit = |sign: f64| V::splat(V::Element::of(sign * LOG_RATIO_LIMIT));
    counted.at_least(limit(-1.0)).at_most(limit(1.0)).exp()
}

/// A log-ratio, 0 where it is NaN.
#[inline(always)]
fn counted<V: Vector>(log_ratio: V) -> V {
    V::select(log_ratio.is_known(), log_ratio, V::splat(V::Element::ZERO))
}

/// A log-ratio to the ratio.
struct Exponential;

impl<V: Vector> Pass<V, 1, 1> for Exponential {
    #[inline(always)]
    fn step(&mut self, [log_ratio]: [V; 1]) -> [V; 1] {
        [exponential(counted(log_ratio))]
    }
}

/// exp of clamped log-ratios, 1 where they are NaN.
#[inline(always)]
pub(super) fn exponentiate<V: Vector>(log_ratio: &[V::Element], ratio: &mut [V::Element]) {
    each::<V, _, 1, 1>(&mut Exponential, [log_ratio], [V::Element::ZERO], [ratio]);
}

/// old, rollout to their log-ratio and their ratio; extremes pass over NaN.
struct Difference<V, A> {
    /// NaN as soon as an old logprob is not finite.
    zeros: V,
    /// The smallest and the largest rollout logprob.
    least: V,
    most: V,
    /// The largest absolute log-ratio.
    farthest: V,
    /// Lines that are needed next, of three columns.
    ahead: A,
}

impl<'a, V: Vector, L: 'a, A: Iterator<Item = ((&'a L, &'a L), &'a L)>> Pass<V, 2, 2> for Difference<V, A> {
    #[inline(always)]
    fn step(&mut self, [old, rollout]: [V; 2]) -> [V; 2] {
        if let Some(((old, rollout), weight)) = self.ahead.next() {
            prefetch(old);
            prefetch(rollout);
            prefetch(weight);
        }
        self.zeros = old.times_plus(V::splat(V::Element::ZERO), self.zeros);
        self.least = rollout.at_most(self.least);
        self.most = rollout.at_least(self.most);
        let log_ratio = old - rollout;
        let counted = counted(log_ratio);
        self.farthest = counted.abs().at_least(self.farthest);
        [log_ratio, exponential(counted)]
    }
}

/// What old/rollout of a block is like.
pub(super) struct Mismatch {
    /// No value that cannot be a logprob.
    pub is_sound: bool,
    /// The largest absolute log-ratio.
    pub farthest: f64,
}

/// log_ratio = old - rollout, NaN where rollout is; ratio = exp of it, clamped, and 1 there. `ahead` is what is needed
/// next: the columns of the next block, and where the weights of this one go.
#[inline(always)]
pub(super) fn mismatch<V: Vector>(
    (old, rollout): (&[V::Element], &[V::Element]),
    (log_ratio, ratio): (&mut [V::Element], &mut [V::Element]),
    ahead: [&[V::Element]; 3],
) -> Mismatch {
    let (zero, infinity) = (V::splat(V::Element::ZERO), V::splat(V::Element::of(f64::INFINITY)));
    let (least, most) = (infinity, zero - infinity);
    let [next_old, next_rollout, weight] = ahead.map(|column| column.as_chunks::<{ 2 * LANES }>().0.iter());
    let ahead = next_old.zip(next_rollout).zip(weight);
    let mut pass = Difference { zeros: zero, least, most, farthest: zero, ahead };
    let padding = [V::Element::ZERO, V::Element::NAN];
    each::<V, _, 2, 2>(&mut pass, [old, rollout], padding, [log_ratio, ratio]);
    let is_finite = largest(V::select(pass.zeros.is_known(), zero, infinity)) == 0.0;
    let is_possible = largest(pass.most) <= POSITIVE_TOLERANCE && largest(zero - pass.least) < -SENTINEL;
    Mismatch { is_sound: is_finite && is_possible, farthest: largest(pass.farthest) }
}

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

/// Bytes of a cache line.
const LINE: usize = 64;

/// Numbers, the first of them at the start of a cache line.
#[derive(Debug, Default)]
pub(super) struct Aligned<F> {
    space: Vec<F>,
    start: usize,
    len: usize,
}

impl<F: Real> Aligned<F> {
    /// Sets the length to `len`; the values are unspecified.
    pub fn resize(&mut self, len: usize) {
        if self.start + len > self.space.len() {
            self.space = vec![F::ZERO; len + LINE];
            self.start = self.space.as_ptr().align_offset(LINE).min(LINE);
        }
        self.len = len;
    }
}

impl<F> Deref for Aligned<F> {
    type Target = [F];
    #[inline(always)]
    fn deref(&self) -> &[F] {
        &self.space[self.start..self.start + self.len]
    }
}

impl<F> DerefMut for Aligned<F> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [F] {
        &mut self.space[self.start..self.start + self.len]
    }
}

impl<'a, F> IntoIterator for &'a Aligned<F> {
    type Item = &'a F;
    type IntoIter = std::slice::Iter<'a, F>;
    #[inline(always)]
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
