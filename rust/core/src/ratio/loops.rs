//! Vectorized loops over slices: log-ratios and their exponentials, maps and sums, and the aligned buffers they run
//! over.
//!
//! The compiler vectorizes simple loops; loops with running sums use [`Vector`]. Sums use a fixed number of lanes and
//! are added in the same order on every machine.

use super::float::{LANES, Real, Vector};
use super::plan::{LOG_RATIO_LIMIT, POSITIVE_TOLERANCE, SENTINEL};
use super::simd::prefetch;
use std::ops::{Deref, DerefMut};

/// A computation on one vector of each input. `step` must be `#[inline(always)]`.
trait Pass<V, const I: usize, const O: usize> {
    fn step(&mut self, inputs: [V; I]) -> [V; O];
}

/// Runs a pass over slices of equal length. The last, incomplete vector is filled with `padding`.
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
        let results = pass.step(std::array::from_fn(|n| V::load(&inputs[n].0[chunk])));
        for (output, result) in outputs.iter_mut().zip(results) {
            result.store(&mut output.0[chunk]);
        }
    }
    if !size.is_multiple_of(LANES) {
        let results = pass.step(std::array::from_fn(|n| V::load(&padded(inputs[n].1, padding[n]))));
        for ((_, tail), result) in outputs.iter_mut().zip(results) {
            tail.copy_from_slice(&to_array(result)[..tail.len()]);
        }
    }
}

/// Returns the last few values, filled up with a neutral value.
#[inline(always)]
fn padded<T: Copy>(tail: &[T], neutral: T) -> [T; LANES] {
    let mut array = [neutral; LANES];
    array[..tail.len()].copy_from_slice(tail);
    array
}

/// Returns e^x of a log-ratio clamped to the limit. `log_ratio` must not be NaN.
#[inline(always)]
fn exponential<V: Vector>(log_ratio: V) -> V {
    let limit = |sign: f64| V::splat(V::Element::of(sign * LOG_RATIO_LIMIT));
    log_ratio.at_least(limit(-1.0)).at_most(limit(1.0)).exp()
}

/// Returns a log-ratio, with 0 for NaN.
#[inline(always)]
fn zero_if_nan<V: Vector>(log_ratio: V) -> V {
    V::select(log_ratio.is_known(), log_ratio, V::splat(V::Element::ZERO))
}

/// Computes the ratio from a log-ratio.
struct Exponential;

impl<V: Vector> Pass<V, 1, 1> for Exponential {
    #[inline(always)]
    fn step(&mut self, [log_ratio]: [V; 1]) -> [V; 1] {
        [exponential(zero_if_nan(log_ratio))]
    }
}

/// Writes exp of the clamped log-ratios, with 1 for NaN.
#[inline(always)]
pub(super) fn exponentiate<V: Vector>(log_ratio: &[V::Element], ratio: &mut [V::Element]) {
    each::<V, _, 1, 1>(&mut Exponential, [log_ratio], [V::Element::ZERO], [ratio]);
}

/// Computes log-ratio and ratio from old and rollout logprobs. The extremes ignore NaN.
struct Difference<V, A> {
    /// NaN as soon as an old logprob is not finite.
    zeros: V,
    /// The smallest and the largest rollout logprob.
    least: V,
    most: V,
    /// The largest absolute log-ratio.
    farthest: V,
    /// Cache lines of three columns that are needed next.
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
        let counted = zero_if_nan(log_ratio);
        self.farthest = counted.abs().at_least(self.farthest);
        [log_ratio, exponential(counted)]
    }
}

/// Summary of the log-ratios old/rollout of a block.
pub(super) struct Mismatch {
    /// True if every value is a possible logprob.
    pub is_sound: bool,
    /// The largest absolute log-ratio.
    pub farthest: f64,
}

/// Computes log_ratio = old - rollout (NaN if rollout is), and ratio = exp of the clamped log-ratio (1 for NaN).
/// `ahead` are the slices that are needed next: the columns of the next block, and the destination of this block's
/// weights.
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

/// Returns the numbers of a vector.
#[inline(always)]
pub(super) fn to_array<V: Vector>(vector: V) -> [V::Element; LANES] {
    let mut array = [V::Element::ZERO; LANES];
    vector.store(&mut array);
    array
}

/// Returns the largest number of a vector.
#[inline(always)]
pub(super) fn largest<V: Vector>(vector: V) -> f64 {
    let array = to_array(vector);
    array.iter().fold(array[0], |maximum, lane| lane.at_least(maximum)).wide()
}

/// Returns the largest value, ignoring NaN; minus infinity if there is none.
#[inline(always)]
pub(super) fn maximum<F: Real>(values: &[F]) -> f64 {
    let mut lanes = [F::of(f64::NEG_INFINITY); 2 * LANES];
    let (chunks, tail) = values.as_chunks::<{ 2 * LANES }>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = value.at_least(*lane);
        }
    }
    lanes.iter().chain(tail).fold(f64::NEG_INFINITY, |maximum, value| maximum.max(value.wide()))
}

/// Returns the sum in f64 for any type of values, ignoring NaN.
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

/// Counts the values for which f is true.
#[inline(always)]
pub(super) fn count<F: Real>(values: &[F], f: impl Fn(F) -> bool) -> usize {
    values.iter().map(|&value| u32::from(f(value))).sum::<u32>() as usize
}

/// Counts the true flags. Uses byte counters, of which a vector has the most.
#[inline(always)]
pub(super) fn ones(flags: &[bool]) -> f64 {
    let count = |flags: &[bool]| usize::from(flags.iter().map(|&flag| u8::from(flag)).sum::<u8>());
    flags.chunks(128).map(count).sum::<usize>() as f64
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Numbers whose first one is at the start of a cache line.
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
