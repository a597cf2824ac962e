//! Aggregates per segment (token, turn, trace), or over the terms before each term in its segment, in float64.

use super::lanes::{maximum, ones, wide_sum};
use super::plan::Agg;
use super::real::Real;
use super::segments::Local;

/// What the segments of a block add up to.
#[derive(Debug, Clone)]
pub(super) struct Totals {
    /// Sums or maxima, by segment.
    pub value: Vec<f64>,
    /// Terms counted, by segment.
    pub count: Vec<f64>,
}

impl Totals {
    /// Adds up the segments of a block. Values that are not counted are NaN.
    #[inline(always)]
    pub fn of<F: Real>(local: Local<'_>, values: &[F], counted: &[bool], agg: Agg) -> Self {
        let max = agg == Agg::Max;
        let mut totals =
            Self { value: vec![if max { f64::NEG_INFINITY } else { 0.0 }; local.len], count: vec![0.0; local.len] };
        for (run, segment) in local.runs() {
            let (value, here) = (&mut totals.value[segment], &values[run.clone()]);
            *value = if max { value.max(maximum(here)) } else { *value + wide_sum(here) };
            totals.count[segment] += ones(&counted[run]);
        }
        totals
    }

    /// The level of each segment, NaN where nothing is counted.
    pub fn finish(mut self, agg: Agg) -> Vec<f64> {
        for (value, &count) in self.value.iter_mut().zip(&self.count) {
            if count == 0.0 {
                *value = f64::NAN;
            } else if agg == Agg::Mean {
                *value /= count;
            }
        }
        self.value
    }
}

/// For each term the running sum or minimum of its segment, NaN before the first counted one.
pub(super) fn prefix<F: Real>(local: Local<'_>, values: &[F], agg: Agg) -> Vec<f64> {
    let mut state = vec![f64::NAN; local.len];
    let mut found = vec![f64::NAN; values.len()];
    for (run, segment) in local.runs() {
        let state = &mut state[segment];
        for (out, value) in found[run.clone()].iter_mut().zip(&values[run]) {
            if value.is_known() {
                *state = match (state.is_nan(), agg) {
                    (true, _) => value.wide(),
                    (false, Agg::PrefixMin) => state.min(value.wide()),
                    (false, _) => *state + value.wide(),
                };
            }
            *out = *state;
        }
    }
    found
}
