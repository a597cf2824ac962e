//! Terms that belong together by id, and one number of each such segment.

use std::collections::HashMap;

use super::{Agg, Real};

/// The segment of each term: dense, in order of first appearance. Terms of a segment need not stand together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segments {
    /// Segment of each term.
    pub of: Vec<u32>,
    /// Number of segments.
    pub len: usize,
}

impl Segments {
    /// One segment for each id.
    pub fn of(ids: &[i64]) -> Self {
        Self::build(ids.iter().map(|&id| (id, 0)))
    }

    /// One segment for each pair of ids.
    pub fn of_pairs(first: &[i64], second: &[i64]) -> Self {
        Self::build(first.iter().copied().zip(second.iter().copied()))
    }

    fn build(keys: impl ExactSizeIterator<Item = (i64, i64)>) -> Self {
        let mut seen: HashMap<(i64, i64), u32> = HashMap::new();
        let mut of = Vec::with_capacity(keys.len());
        let mut last: Option<((i64, i64), u32)> = None;
        for key in keys {
            let segment = match last {
                Some((same, segment)) if same == key => segment,
                _ => {
                    let next = seen.len() as u32;
                    *seen.entry(key).or_insert(next)
                }
            };
            last = Some((key, segment));
            of.push(segment);
        }
        Self { of, len: seen.len() }
    }

    /// One number for each segment over the counted terms, in f64 and in order of the terms; NaN where none is counted.
    pub fn aggregate<F: Real>(&self, values: &[F], counted: impl Fn(usize) -> bool, agg: Agg) -> Vec<f64> {
        let start = if agg == Agg::Max { f64::NEG_INFINITY } else { 0.0 };
        let mut totals = vec![start; self.len];
        let mut counts = vec![0_u32; self.len];
        for (term, (&segment, &value)) in self.of.iter().zip(values).enumerate() {
            if counted(term) {
                let total = &mut totals[segment as usize];
                *total = if agg == Agg::Max { total.max(value.wide()) } else { *total + value.wide() };
                counts[segment as usize] += 1;
            }
        }
        for (total, &count) in totals.iter_mut().zip(&counts) {
            match (count, agg) {
                (0, _) => *total = f64::NAN,
                (_, Agg::Mean) => *total /= f64::from(count),
                _ => {}
            }
        }
        totals
    }
}
