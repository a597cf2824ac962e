//! Vectorised loops of the common case: log-ratios old/rollout with their statistics, and weights with theirs.
//!
//! Each keeps its constants and sums in registers, which is why there are several.

use super::lanes::{SHORT, Sums, largest};
use super::limits::{LOG_RATIO_LIMIT, POSITIVE_TOLERANCE, SENTINEL};
use super::real::Real;
use super::real::{LANES, Vector};
use super::simd::prefetch;

/// What is done with a vector of each input. `step` must be `#[inline(always)]`.
trait Pass<V, const I: usize, const O: usize> {
    fn step(&mut self, inputs: [V; I]) -> [V; O];
    /// Called now and then, and at the end: sums go on in f64.
    fn rest(&mut self) {}
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
    for start in (0..size / LANES).step_by(SHORT / LANES) {
        for chunk in start..(start + SHORT / LANES).min(size / LANES) {
            let found = pass.step(std::array::from_fn(|n| V::load(&inputs[n].0[chunk])));
            for (output, found) in outputs.iter_mut().zip(found) {
                found.store(&mut output.0[chunk]);
            }
        }
        pass.rest();
    }
    if !size.is_multiple_of(LANES) {
        let found = pass.step(std::array::from_fn(|n| V::load(&padded(inputs[n].1, padding[n]))));
        for ((_, tail), found) in outputs.iter_mut().zip(found) {
            let mut last = [V::Element::ZERO; LANES];
            found.store(&mut last);
            tail.copy_from_slice(&last[..tail.len()]);
        }
        pass.rest();
    }
}

/// The last few values, and something that counts for nothing.
#[inline(always)]
fn padded<T: Copy>(tail: &[T], nothing: T) -> [T; LANES] {
    let mut array = [nothing; LANES];
    array[..tail.len()].copy_from_slice(tail);
    array
}

/// Smallest and largest; NaN is passed over.
struct Extremes<V> {
    low: V,
    high: V,
}

impl<V: Vector> Extremes<V> {
    #[inline(always)]
    fn new() -> Self {
        let infinity = V::splat(V::Element::of(f64::INFINITY));
        Self { low: infinity, high: V::splat(V::Element::ZERO) - infinity }
    }

    #[inline(always)]
    fn add(&mut self, values: V) {
        self.low = values.at_most(self.low);
        self.high = values.at_least(self.high);
    }

    #[inline(always)]
    fn found(self) -> (f64, f64) {
        (-largest(V::splat(V::Element::ZERO) - self.low), largest(self.high))
    }
}

/// old, rollout to their log-ratio and to the exponent of their ratio.
struct Difference<V> {
    /// NaN as soon as an old logprob is not finite.
    zeros: V,
    rollout: Extremes<V>,
    log_ratio: Extremes<V>,
    sums: Sums<V, 2>,
}

impl<V: Vector> Pass<V, 2, 2> for Difference<V> {
    #[inline(always)]
    fn step(&mut self, [old, rollout]: [V; 2]) -> [V; 2] {
        let zero = V::splat(V::Element::ZERO);
        self.zeros = old.times_plus(zero, self.zeros);
        self.rollout.add(rollout);
        let l = old - rollout;
        self.log_ratio.add(l);
        let counted = V::select(l.is_known(), l, zero);
        self.sums.add([counted, counted.abs()]);
        [l, clamped(counted)]
    }

    #[inline(always)]
    fn rest(&mut self) {
        self.sums.widen();
    }
}

/// A log-ratio held within the limit.
#[inline(always)]
fn clamped<V: Vector>(log_ratio: V) -> V {
    let limit = |sign: f64| V::splat(V::Element::of(sign * LOG_RATIO_LIMIT));
    log_ratio.at_least(limit(-1.0)).at_most(limit(1.0))
}

/// An exponent to the ratio, with the sums of ratio and of ratio - 1 - log-ratio.
struct Ratio<'a, V: Vector> {
    sums: Sums<V, 2>,
    /// What is needed next: the columns of the next block, and where the weights of this one go.
    ahead: [&'a [V::Element]; 3],
}

impl<V: Vector> Pass<V, 1, 1> for Ratio<'_, V> {
    #[inline(always)]
    fn step(&mut self, [exponent]: [V; 1]) -> [V; 1] {
        for column in &mut self.ahead {
            if let Some((line, rest)) = column.split_first_chunk::<{ 2 * LANES }>() {
                prefetch(line);
                *column = rest;
            }
        }
        let (ratio, k3) = exponent.exp_k3();
        self.sums.add([ratio, k3]);
        [ratio]
    }

    #[inline(always)]
    fn rest(&mut self) {
        self.sums.widen();
    }
}

/// A log-ratio to the ratio.
struct Exponential;

impl<V: Vector> Pass<V, 1, 1> for Exponential {
    #[inline(always)]
    fn step(&mut self, [log_ratio]: [V; 1]) -> [V; 1] {
        let counted = V::select(log_ratio.is_known(), log_ratio, V::splat(V::Element::ZERO));
        [clamped(counted).exp_k3().0]
    }
}

/// exp of clamped log-ratios, 1 where they are NaN.
#[inline(always)]
pub(super) fn exponentiate<V: Vector>(log_ratio: &[V::Element], ratio: &mut [V::Element]) {
    each::<V, _, 1, 1>(&mut Exponential, [log_ratio], [V::Element::ZERO], [ratio]);
}

/// What old/rollout adds up to over a block.
pub(super) struct Mismatch {
    /// No value that cannot be a logprob.
    pub is_sound: bool,
    /// Log-ratio and its absolute value.
    pub logs: [f64; 2],
    /// Ratio and ratio - 1 - log-ratio; a ratio of 1 for each unknown term.
    pub ratios: [f64; 2],
    /// The smallest and the largest log-ratio.
    pub extremes: (f64, f64),
}

/// log_ratio = old - rollout, NaN where rollout is; ratio = exp of it, clamped, and 1 there. `exponent` is overwritten.
#[inline(always)]
pub(super) fn mismatch<V: Vector>(
    (old, rollout): (&[V::Element], &[V::Element]),
    (log_ratio, ratio): (&mut [V::Element], &mut [V::Element]),
    exponent: &mut [V::Element],
    ahead: [&[V::Element]; 3],
) -> Mismatch {
    let zero = V::splat(V::Element::ZERO);
    let mut difference =
        Difference { zeros: zero, rollout: Extremes::new(), log_ratio: Extremes::new(), sums: Sums::new() };
    let padding = [V::Element::ZERO, V::Element::NAN];
    each::<V, _, 2, 2>(&mut difference, [old, rollout], padding, [log_ratio, &mut *exponent]);
    let mut sum = Ratio { sums: Sums::new(), ahead };
    each::<V, _, 1, 1>(&mut sum, [exponent], [V::Element::ZERO], [ratio]);
    let mut ratios = sum.sums.total();
    ratios[0] -= (old.len().next_multiple_of(LANES) - old.len()) as f64;
    let infinity = V::splat(V::Element::of(f64::INFINITY));
    let is_finite = largest(V::select(difference.zeros.is_known(), zero, infinity)) == 0.0;
    let (least, most) = difference.rollout.found();
    let is_sound = is_finite && most <= POSITIVE_TOLERANCE && least > SENTINEL;
    Mismatch { is_sound, logs: difference.sums.total(), ratios, extremes: difference.log_ratio.found() }
}

/// A weight, and NaN where it is not known and where it does not count, to the weight that is given out.
struct Weights<V> {
    unknown: V,
    /// Of the weights that count, and of their squares.
    sums: Sums<V, 2>,
}

impl<V: Vector> Pass<V, 3, 1> for Weights<V> {
    #[inline(always)]
    fn step(&mut self, [weight, known, counted]: [V; 3]) -> [V; 1] {
        let here = V::select(counted.is_known(), weight, V::splat(V::Element::ZERO));
        self.sums.add([here, here * here]);
        [V::select(known.is_known(), weight, self.unknown)]
    }

    #[inline(always)]
    fn rest(&mut self) {
        self.sums.widen();
    }
}

/// out = weight where `known` is no NaN, else `unknown`; gives sum and sum of squares where `counted` is none.
#[inline(always)]
pub(super) fn weights<V: Vector>(
    [weight, known, counted]: [&[V::Element]; 3],
    unknown: V::Element,
    out: &mut [V::Element],
) -> [f64; 2] {
    let mut weights = Weights { unknown: V::splat(unknown), sums: Sums::<V, 2>::new() };
    each::<V, _, 3, 1>(&mut weights, [weight, known, counted], [V::Element::NAN; 3], [out]);
    weights.sums.total()
}
