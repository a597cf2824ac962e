//! Statistics of single terms, and what a shape makes of a ratio. NaN stands for a term that is not known.

use super::lanes::each;
use super::{LOG_RATIO_LIMIT, Real, Shape, Stat};

/// Where binary KL keeps its logarithm finite: verl's.
const BINARY_EPSILON: f64 = 1e-8;

/// A log-ratio held within [`LOG_RATIO_LIMIT`].
#[inline(always)]
pub(super) fn clamped<F: Real>(log_ratio: F) -> F {
    log_ratio.at_least(F::of(-LOG_RATIO_LIMIT)).at_most(F::of(LOG_RATIO_LIMIT))
}

/// exp of clamped log-ratios; something finite where they are NaN.
#[inline(always)]
pub(super) fn exponentiate<F: Real>(log_ratio: &[F], ratio: &mut [F]) {
    each([log_ratio], [ratio], |_, [l]| [clamped(l).exp()]);
}

/// The probability of a logprob; a little above 0 counts as 0.
#[inline(always)]
fn probability<F: Real>(logprob: F) -> F {
    logprob.at_least(F::EXPONENTS.0).at_most(F::ZERO).exp()
}

impl Stat {
    /// The statistic of each term, `Ratio` as the log-ratio itself.
    #[inline(always)]
    pub(super) fn of<F: Real>(self, log_ratio: &[F], num: &[F], den: &[F], out: &mut [F]) {
        let half = F::of(0.5);
        match self {
            Self::Ratio | Self::K1 => out.copy_from_slice(log_ratio),
            Self::K2 => each([log_ratio], [out], |_, [l]| [l * l * half]),
            Self::K3 => each([log_ratio], [out], |_, [l]| [if l.is_known() { clamped(l).exp_k3().1 } else { l }]),
            Self::Abs => each([log_ratio], [out], |_, [l]| [l.abs()]),
            Self::Square => each([log_ratio], [out], |_, [l]| [l * l]),
            Self::Dprob => each([log_ratio, num, den], [out], |_, [l, num, den]| {
                [if l.is_known() { probability(num) - probability(den) } else { l }]
            }),
            Self::BinaryKl => each([log_ratio, num, den], [out], |_, [l, num, den]| {
                let (p, q) = (probability(num), probability(den));
                let rest = |p: F| F::ONE - p + F::of(BINARY_EPSILON);
                let kl = q * (den - num) + (F::ONE - q) * (rest(q) / rest(p)).ln();
                let signed = if p < q { F::ZERO - kl } else { kl };
                [if l.is_known() { signed } else { l }]
            }),
        }
    }
}

impl Shape {
    /// The weight of each ratio, 1 where its logarithm is NaN; flags where a bound changed it.
    #[inline(always)]
    pub(super) fn apply<F: Real>(self, log_ratio: &[F], ratio: &[F], out: &mut [F], bounded: &mut [bool]) {
        match self {
            Self::Identity => each([log_ratio, ratio], [out], |_, [l, w]| [if l.is_known() { w } else { F::ONE }]),
            Self::Clamp(low, high) => {
                let (low, high) = (F::of(low), F::of(high));
                each([log_ratio, ratio], [&mut *out], |_, [l, w]| {
                    [if l.is_known() { w.at_least(low).at_most(high) } else { F::ONE }]
                });
                mark(log_ratio, ratio, out, bounded);
            }
            Self::Window(low, high) => {
                let (low, high) = (F::of(low), F::of(high));
                each([log_ratio, ratio], [&mut *out], |_, [l, w]| {
                    let inside = if w >= low && w <= high { w } else { F::ZERO };
                    [if l.is_known() { inside } else { F::ONE }]
                });
                mark(log_ratio, ratio, out, bounded);
            }
            Self::StrictWindow(low, high) => {
                let (low, high) = (F::of(low), F::of(high));
                each([log_ratio, ratio], [&mut *out], |_, [l, w]| {
                    let inside = if w > low && w < high { w } else { F::ZERO };
                    [if l.is_known() { inside } else { F::ONE }]
                });
                mark(log_ratio, ratio, out, bounded);
            }
            Self::Gamma { power, rate } => {
                let (power, rate) = (F::of(power), F::of(rate));
                each([log_ratio, ratio], [out], |_, [l, w]| {
                    let weight = exp_or_zero(rate + power * clamped(l) - rate * w);
                    [if l.is_known() { weight } else { F::ONE }]
                });
            }
            Self::Gaussian(sigma) => {
                let narrow = F::of(-0.5 / (sigma * sigma));
                each([log_ratio], [out], |_, [l]| {
                    let weight = exp_or_zero(clamped(l) * clamped(l) * narrow);
                    [if l.is_known() { weight } else { F::ONE }]
                });
            }
        }
    }
}

/// Where a known ratio and its weight differ.
#[inline(always)]
fn mark<F: Real>(log_ratio: &[F], ratio: &[F], weight: &[F], bounded: &mut [bool]) {
    for (((bounded, &l), &ratio), &weight) in bounded.iter_mut().zip(log_ratio).zip(ratio).zip(weight) {
        *bounded = l.is_known() & (ratio != weight);
    }
}

/// e^x, 0 far below.
#[inline(always)]
fn exp_or_zero<F: Real>(x: F) -> F {
    let (low, high) = F::EXPONENTS;
    if x < low { F::ZERO } else { x.at_least(low).at_most(high).exp() }
}
