//! Statistics of single terms (ratio, k1, k2, k3, ...) and the shapes of a ratio. NaN marks a term with a missing
//! logprob.

use super::float::Real;
use super::loops::{map, map2};
use super::plan::{LOG_RATIO_LIMIT, Shape, Stat};

/// Keeps the logarithm in binary KL finite; verl's value.
const BINARY_EPSILON: f64 = 1e-8;

/// Clamps a log-ratio to [`LOG_RATIO_LIMIT`].
#[inline(always)]
pub(super) fn clamped<F: Real>(log_ratio: F) -> F {
    log_ratio.at_least(F::of(-LOG_RATIO_LIMIT)).at_most(F::of(LOG_RATIO_LIMIT))
}

/// Returns the probability of a logprob. A value slightly above 0 counts as 0.
#[inline(always)]
fn probability<F: Real>(logprob: F) -> F {
    logprob.at_least(F::EXPONENTS.0).at_most(F::ZERO).exp()
}

/// Returns the KL of (q, 1 - q) from (p, 1 - p), with the sign of p - q, from log p and log q.
#[inline(always)]
fn binary_kl<F: Real>(num: F, den: F) -> F {
    let (p, q) = (probability(num), probability(den));
    let complement = |p: F| F::ONE - p + F::of(BINARY_EPSILON);
    let kl = q * (den - num) + (F::ONE - q) * (complement(q) / complement(p)).ln();
    if p < q { F::ZERO - kl } else { kl }
}

impl Stat {
    /// Computes the statistic of each term. `Ratio` gives the log-ratio itself.
    #[inline(always)]
    pub(super) fn of<F: Real>(self, log_ratio: &[F], num: &[F], den: &[F], out: &mut [F]) {
        let half = F::of(0.5);
        match self {
            Self::Ratio | Self::K1 => out.copy_from_slice(log_ratio),
            Self::K2 => map(out, log_ratio, |l| l * l * half),
            Self::K3 => map(out, log_ratio, |l| if l.is_known() { clamped(l).exp_k3().1 } else { l }),
            Self::Abs => map(out, log_ratio, F::abs),
            Self::Square => map(out, log_ratio, |l| l * l),
            Self::Dprob => map2(out, num, den, |num, den| probability(num) - probability(den)),
            Self::BinaryKl => map2(out, num, den, binary_kl),
        }
        if matches!(self, Self::Dprob | Self::BinaryKl) {
            for (out, l) in out.iter_mut().zip(log_ratio) {
                *out = if l.is_known() { *out } else { F::NAN };
            }
        }
    }
}

impl Shape {
    /// Computes the weight of each ratio, with 1 if its logarithm is NaN, and applies `last` to log-ratio and weight.
    /// If the shape has bounds, flags the terms whose result is not the ratio.
    #[inline(always)]
    pub(super) fn apply<F: Real>(
        self,
        [log_ratio, ratio]: [&[F]; 2],
        last: impl Fn(F, F) -> F,
        out: &mut [F],
        bounded: &mut [bool],
    ) {
        let or_one = |l: F, weight: F| last(l, if l.is_known() { weight } else { F::ONE });
        match self {
            Self::Identity => map2(out, log_ratio, ratio, last),
            Self::Truncate(low, high) => {
                let (low, high) = (F::of(low), F::of(high));
                map2(out, log_ratio, ratio, |l, w| last(l, w.at_least(low).at_most(high)));
            }
            Self::MaskOutside(low, high) => {
                let (low, high) = (F::of(low), F::of(high));
                map2(out, log_ratio, ratio, |l, w| last(l, if w >= low && w <= high { w } else { F::ZERO }));
            }
            Self::MaskOutsideStrict(low, high) => {
                let (low, high) = (F::of(low), F::of(high));
                map2(out, log_ratio, ratio, |l, w| or_one(l, if w > low && w < high { w } else { F::ZERO }));
            }
            Self::Gamma { power, rate } => {
                let (power, rate) = (F::of(power), F::of(rate));
                map2(out, log_ratio, ratio, |l, w| or_one(l, exp_or_zero(rate + power * clamped(l) - rate * w)));
            }
            Self::Gaussian(sigma) => {
                let narrow = F::of(-0.5 / (sigma * sigma));
                map(out, log_ratio, |l| or_one(l, exp_or_zero(clamped(l) * clamped(l) * narrow)));
            }
        }
        if self.is_bounded() {
            for ((bounded, ratio), weight) in bounded.iter_mut().zip(ratio).zip(out) {
                *bounded = ratio != weight;
            }
        }
    }

    /// Returns true if the shape can change a ratio by a bound.
    pub(super) fn is_bounded(self) -> bool {
        matches!(self, Self::Truncate(..) | Self::MaskOutside(..) | Self::MaskOutsideStrict(..))
    }
}

/// Returns e^x, or 0 far below the range.
#[inline(always)]
fn exp_or_zero<F: Real>(x: F) -> F {
    let (low, high) = F::EXPONENTS;
    if x < low { F::ZERO } else { x.at_least(low).at_most(high).exp() }
}
