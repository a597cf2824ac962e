//! Terms with the same id as runs of neighbors, and aggregates over them or over the terms before each, in float64.

use super::float::Real;
use super::loops::{maximum, ones, wide_sum};
use super::plan::{Over, Reduce};
use super::terms::{Ids, Integers, Terms};
use crate::cancel;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::ops::Range;

/// Neighboring terms with the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub start: usize,
    pub end: usize,
    pub segment: usize,
}

/// Groups of terms that share an id. Segments are numbered by first appearance. Their terms need not be contiguous.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segments {
    pub runs: Vec<Run>,
    pub len: usize,
}

impl Segments {
    /// Creates one segment for each id.
    pub fn of(ids: Ids<'_>) -> Self {
        Self::build(&ends(ids), |term| (ids.at(term), 0))
    }

    /// Creates one segment for each pair of ids.
    pub fn of_pairs(first: Ids<'_>, second: Ids<'_>) -> Self {
        let (mut both, other) = (ends(first), ends(second));
        both.extend(other);
        both.sort_unstable();
        both.dedup();
        Self::build(&both, |term| (first.at(term), second.at(term)))
    }

    /// Creates one segment of all terms.
    pub fn whole(terms: usize) -> Self {
        Self { runs: vec![Run { start: 0, end: terms, segment: 0 }], len: 1 }
    }

    fn build(ends: &[usize], key: impl Fn(usize) -> (i64, i64)) -> Self {
        let (mut start, mut numbers) = (0, Numbers::default());
        let run = |(round, &end): (usize, &usize)| {
            cancel::check_every_16384(round);
            let run = Run { start, end, segment: numbers.of(key(start)) };
            start = end;
            run
        };
        let runs = ends.iter().enumerate().map(run).collect();
        Self { runs, len: numbers.keys.len() }
    }

    /// Returns the segment of a position.
    pub fn at(&self, position: usize) -> usize {
        self.runs[self.runs.partition_point(|run| run.end <= position)].segment
    }

    /// Returns true if the terms of each segment are contiguous.
    pub fn is_contiguous(&self) -> bool {
        self.runs.len() <= self.len
    }

    /// Returns the runs of a range that splits no segment, or all runs if segments are scattered.
    pub fn within(&self, range: &Range<usize>) -> Local<'_> {
        if self.len == 1 || !self.is_contiguous() {
            return Local { runs: &self.runs, start: 0, base: 0, len: self.len };
        }
        let first = self.runs.partition_point(|run| run.end <= range.start);
        let last = self.runs.partition_point(|run| run.start < range.end);
        let runs = &self.runs[first.min(last)..last];
        Local { runs, start: range.start, base: runs.first().map_or(0, |run| run.segment), len: runs.len() }
    }
}

/// The segments of one block. Positions and numbers are relative to the block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Local<'a> {
    runs: &'a [Run],
    start: usize,
    base: usize,
    pub len: usize,
}

impl Local<'_> {
    /// Returns each run with its segment, in order.
    pub fn runs(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        self.runs.iter().map(|run| (run.start - self.start..run.end - self.start, run.segment - self.base))
    }
}

/// Numbers keys by first appearance. Ascending keys, which most arrays have, need no table.
#[derive(Default)]
struct Numbers {
    keys: Vec<(i64, i64)>,
    table: Option<HashMap<(i64, i64), usize>>,
}

impl Numbers {
    fn of(&mut self, key: (i64, i64)) -> usize {
        let next = self.keys.len();
        if self.table.is_none() && self.keys.last().is_none_or(|&last| key > last) {
            self.keys.push(key);
            return next;
        }
        let keys = &self.keys;
        let table = self.table.get_or_insert_with(|| keys.iter().copied().zip(0..).collect());
        let number = *table.entry(key).or_insert(next);
        if number == next {
            self.keys.push(key);
        }
        number
    }
}

/// Returns the ends of runs of equal ids.
fn ends(ids: Ids<'_>) -> Vec<usize> {
    fn scan<T: Copy + PartialEq>(ids: &[T], each: usize) -> Vec<usize> {
        let (mut remaining, mut position, mut ends) = (ids, 0, Vec::new());
        while !remaining.is_empty() {
            let run = run_length(remaining);
            remaining = &remaining[run..];
            position += run;
            ends.push(position * each);
        }
        ends
    }
    if ids.terms_per_id == 0 {
        return Vec::new();
    }
    match ids.values {
        Integers::Narrow(values) => scan(values, ids.terms_per_id),
        Integers::Wide(values) => scan(values, ids.terms_per_id),
    }
}

/// Counts how many of the first ids are equal.
fn run_length<T: Copy + PartialEq>(ids: &[T]) -> usize {
    let first = ids[0];
    let alike = |chunk: &&[T; 32]| chunk.iter().fold(true, |alike, &id| alike & (id == first));
    let full_chunks = ids.as_chunks::<32>().0.iter().take_while(alike).count() * 32;
    full_chunks + ids[full_chunks..].iter().take_while(|&&id| id == first).count()
}

/// The segments of each level, computed on first use.
pub(super) struct Index<'a, F> {
    terms: &'a Terms<'a, F>,
    found: [OnceCell<Segments>; 5],
}

impl<'a, F: Real> Index<'a, F> {
    pub fn new(terms: &'a Terms<'a, F>) -> Self {
        Self { terms, found: Default::default() }
    }

    /// Returns the segments of a level, or `None` for the token level or if the ids are missing.
    pub fn of(&self, over: Over) -> Option<&Segments> {
        let (terms, segments) = (self.terms, &self.found[over as usize]);
        match over {
            Over::Token => None,
            Over::Turn => terms.turn.map(|turn| segments.get_or_init(|| Segments::of_pairs(terms.trace, turn))),
            Over::Trace => Some(segments.get_or_init(|| Segments::of(terms.trace))),
            Over::Group => terms.group.map(|group| segments.get_or_init(|| Segments::of(group))),
            Over::Batch => Some(segments.get_or_init(|| Segments::whole(terms.len()))),
        }
    }
}

/// Returns the ends of the smallest blocks of at least `least` terms that split no segment. Returns one block if
/// segments are scattered.
pub(super) fn blocks(terms: usize, uncut: &[&Segments], least: usize) -> Vec<usize> {
    if uncut.iter().any(|segments| !segments.is_contiguous()) {
        return vec![terms];
    }
    let Some((first, others)) = uncut.split_first() else {
        return (least..terms).step_by(least).chain([terms]).collect();
    };
    let ends_here = |segments: &&Segments, end: usize| segments.runs.binary_search_by_key(&end, |run| run.end).is_ok();
    let (mut start, mut block_ends) = (0, Vec::new());
    for run in &first.runs {
        let is_large_enough = run.end - start >= least || run.end == terms;
        if is_large_enough && others.iter().all(|other| ends_here(other, run.end)) {
            block_ends.push(run.end);
            start = run.end;
        }
    }
    if block_ends.is_empty() { vec![terms] } else { block_ends }
}

/// The sums over the segments of a block.
#[derive(Debug, Clone)]
pub(super) struct Totals {
    /// Sums or maxima, by segment.
    pub value: Vec<f64>,
    /// Number of counted terms, by segment.
    pub count: Vec<f64>,
}

impl Totals {
    /// Adds up the segments of a block. Values that are not counted are NaN.
    #[inline(always)]
    pub fn of<F: Real>(local: Local<'_>, values: &[F], counted: &[bool], agg: Reduce) -> Self {
        let max = agg == Reduce::Max;
        let mut totals =
            Self { value: vec![if max { f64::NEG_INFINITY } else { 0.0 }; local.len], count: vec![0.0; local.len] };
        for (run, segment) in local.runs() {
            let (value, run_values) = (&mut totals.value[segment], &values[run.clone()]);
            *value = if max { value.max(maximum(run_values)) } else { *value + wide_sum(run_values) };
            totals.count[segment] += ones(&counted[run]);
        }
        totals
    }

    /// Returns the level of each segment; NaN if nothing is counted.
    pub fn finish(mut self, agg: Reduce) -> Vec<f64> {
        for (value, &count) in self.value.iter_mut().zip(&self.count) {
            if count == 0.0 {
                *value = f64::NAN;
            } else if agg == Reduce::Mean {
                *value /= count;
            }
        }
        self.value
    }
}

/// Returns for each term the running sum or minimum of its segment; NaN before the first counted term.
pub(super) fn prefix<F: Real>(local: Local<'_>, values: &[F], agg: Reduce) -> Vec<f64> {
    let mut state = vec![f64::NAN; local.len];
    let mut running = vec![f64::NAN; values.len()];
    for (run, segment) in local.runs() {
        let state = &mut state[segment];
        for (out, value) in running[run.clone()].iter_mut().zip(&values[run]) {
            if value.is_known() {
                *state = match (state.is_nan(), agg) {
                    (true, _) => value.wide(),
                    (false, Reduce::PrefixMin) => state.min(value.wide()),
                    (false, _) => *state + value.wide(),
                };
            }
            *out = *state;
        }
    }
    running
}
