//! The loops that every step runs, over vectors: old/rollout with its statistics, and the weights with theirs.
//!
//! Each keeps its constants and sums in registers, which is why there are several.

use super::lanes::{SHORT, Sums, largest};
use super::simd::{LANES, Vector};
use super::{LOG_RATIO_LIMIT, POSITIVE_TOLERANCE, Real, SENTINEL};

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
        self.zeros = self.zeros + old * zero;
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
struct Ratio<V>(Sums<V, 2>);

impl<V: Vector> Pass<V, 1, 1> for Ratio<V> {
    #[inline(always)]
    fn step(&mut self, [exponent]: [V; 1]) -> [V; 1] {
        let (ratio, k3) = exponent.exp_k3();
        self.0.add([ratio, k3]);
        [ratio]
    }

    #[inline(always)]
    fn rest(&mut self) {
        self.0.widen();
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
) -> Mismatch {
    let zero = V::splat(V::Element::ZERO);
    let mut difference =
        Difference { zeros: zero, rollout: Extremes::new(), log_ratio: Extremes::new(), sums: Sums::new() };
    let padding = [V::Element::ZERO, V::Element::NAN];
    each::<V, _, 2, 2>(&mut difference, [old, rollout], padding, [log_ratio, &mut *exponent]);
    let mut sum = Ratio(Sums::new());
    each::<V, _, 1, 1>(&mut sum, [exponent], [V::Element::ZERO], [ratio]);
    let mut ratios = sum.0.total();
    ratios[0] -= (old.len().next_multiple_of(LANES) - old.len()) as f64;
    let infinity = V::splat(V::Element::of(f64::INFINITY));
    let is_finite = largest(V::select(difference.zeros.is_known(), zero, infinity)) == 0.0;
    let (least, most) = difference.rollout.found();
    let is_sound = is_finite && most <= POSITIVE_TOLERANCE && least > SENTINEL;
    Mismatch { is_sound, logs: difference.sums.total(), ratios, extremes: difference.log_ratio.found() }
}

/// Sum and sum of squares of the weights that count.
struct Weights<V> {
    unknown: V,
    sums: Sums<V, 2>,
}

impl<V: Vector> Weights<V> {
    #[inline(always)]
    fn step(
        &mut self,
        weight: &[V::Element; LANES],
        (known, counted): (&[bool; LANES], &[bool; LANES]),
        out: &mut [V::Element; LANES],
    ) {
        let weight = V::load(weight);
        V::select(V::mask(*known), weight, self.unknown).store(out);
        let weight = V::select(V::mask(*counted), weight, V::splat(V::Element::ZERO));
        self.sums.add([weight, weight * weight]);
    }
}

/// out = weight where known, else `unknown`; gives the sum and the sum of squares of the weights that count.
#[inline(always)]
pub(super) fn weights<V: Vector>(
    weight: &[V::Element],
    known: &[bool],
    counted: &[bool],
    unknown: V::Element,
    out: &mut [V::Element],
) -> [f64; 2] {
    let mut weights = Weights { unknown: V::splat(unknown), sums: Sums::<V, 2>::new() };
    let (weight, weight_tail) = weight.as_chunks::<LANES>();
    let (known, known_tail) = known.as_chunks::<LANES>();
    let (counted, counted_tail) = counted.as_chunks::<LANES>();
    let (out, out_tail) = out.as_chunks_mut::<LANES>();
    let parts = (weight.chunks(SHORT / LANES), known.chunks(SHORT / LANES), counted.chunks(SHORT / LANES));
    for (((weight, known), counted), out) in parts.0.zip(parts.1).zip(parts.2).zip(out.chunks_mut(SHORT / LANES)) {
        for (((weight, known), counted), out) in weight.iter().zip(known).zip(counted).zip(out) {
            weights.step(weight, (known, counted), out);
        }
        weights.sums.widen();
    }
    let mut last = [V::Element::ZERO; LANES];
    let flags = (padded(known_tail, false), padded(counted_tail, false));
    weights.step(&padded(weight_tail, V::Element::ZERO), (&flags.0, &flags.1), &mut last);
    out_tail.copy_from_slice(&last[..out_tail.len()]);
    weights.sums.widen();
    weights.sums.total()
}
