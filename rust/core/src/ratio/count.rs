//! Integer denominators: how many terms each trace or group has, and how many of them there are.

use super::Segments;

/// Counts of the terms that stand under each id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counts {
    /// For each term, how many counted terms share its id.
    pub terms: Vec<i64>,
    /// Ids with at least one counted term.
    pub units: i64,
}

/// Counts terms by id: all of them, or those where `keep` is true.
///
/// ```
/// let counts = tracegrad_core::ratio::count(&[7, 7, 9, 7], Some(&[true, true, false, true]));
/// assert_eq!(counts.terms, [3, 3, 0, 3]);
/// assert_eq!(counts.units, 1);
/// ```
pub fn count(ids: &[i64], keep: Option<&[bool]>) -> Counts {
    let segments = Segments::of(ids);
    let mut totals = vec![0_i64; segments.len];
    for (term, &segment) in segments.of.iter().enumerate() {
        totals[segment as usize] += i64::from(keep.is_none_or(|keep| keep[term]));
    }
    let terms = segments.of.iter().map(|&segment| totals[segment as usize]).collect();
    Counts { terms, units: totals.iter().filter(|&&total| total > 0).count() as i64 }
}
