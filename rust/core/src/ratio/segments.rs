//! Terms that belong together by id, as runs of neighbours, and aggregates over them or over the terms before each, in float64.

use super::float::Real;
use super::loops::{maximum, ones, wide_sum};
use super::plan::{Agg, Over};
use super::terms::{Ids, Integers, Terms};
use crate::cancel;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::ops::Range;

/// Neighbours with one id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub start: usize,
    pub end: usize,
    pub segment: usize,
}

/// Which terms share an id. Segments are numbered by first appearance; their terms need not stand together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segments {
    pub runs: Vec<Run>,
    pub len: usize,
}

impl Segments {
    /// One segment for each id.
    pub fn of(ids: Ids<'_>) -> Self {
        Self::build(&ends(ids), |term| (ids.at(term), 0))
    }

    /// One segment for each pair of ids.
    pub fn of_pairs(first: Ids<'_>, second: Ids<'_>) -> Self {
        let (mut both, other) = (ends(first), ends(second));
        both.extend(other);
        both.sort_unstable();
        both.dedup();
        Self::build(&both, |term| (first.at(term), second.at(term)))
    }

    /// One segment of everything.
    pub fn whole(terms: usize) -> Self {
        Self { runs: vec![Run { start: 0, end: terms, segment: 0 }], len: 1 }
    }

    fn build(ends: &[usize], key: impl Fn(usize) -> (i64, i64)) -> Self {
        let (mut start, mut numbers) = (0, Numbers::default());
        let run = |(round, &end): (usize, &usize)| {
            cancel::now_and_then(round);
            let run = Run { start, end, segment: numbers.of(key(start)) };
            start = end;
            run
        };
        let runs = ends.iter().enumerate().map(run).collect();
        Self { runs, len: numbers.keys.len() }
    }

    /// The segment of a position.
    pub fn at(&self, position: usize) -> usize {
        self.runs[self.runs.partition_point(|run| run.end <= position)].segment
    }

    /// Whether the terms of each segment stand together.
    pub fn is_contiguous(&self) -> bool {
        self.runs.len() <= self.len
    }

    /// The runs of a range that cuts no segment; of everything where segments are scattered.
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

/// The segments of one block: positions and numbers count from its own first.
#[derive(Debug, Clone, Copy)]
pub(super) struct Local<'a> {
    runs: &'a [Run],
    start: usize,
    base: usize,
    pub len: usize,
}

impl Local<'_> {
    /// Each run with its segment, in order.
    pub fn runs(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        self.runs.iter().map(|run| (run.start - self.start..run.end - self.start, run.segment - self.base))
    }
}

/// Numbers keys by first appearance; rising keys, as in most arrays, need no table.
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

/// Where runs of equal ids end.
fn ends(ids: Ids<'_>) -> Vec<usize> {
    fn scan<T: Copy + PartialEq>(ids: &[T], each: usize) -> Vec<usize> {
        let (mut rest, mut done, mut found) = (ids, 0, Vec::new());
        while !rest.is_empty() {
            let run = run_length(rest);
            rest = &rest[run..];
            done += run;
            found.push(done * each);
        }
        found
    }
    if ids.each == 0 {
        return Vec::new();
    }
    match ids.values {
        Integers::Narrow(values) => scan(values, ids.each),
        Integers::Wide(values) => scan(values, ids.each),
    }
}

/// How many of the first ids are equal.
fn run_length<T: Copy + PartialEq>(ids: &[T]) -> usize {
    let first = ids[0];
    let alike = |chunk: &&[T; 32]| chunk.iter().fold(true, |alike, &id| alike & (id == first));
    let whole = ids.as_chunks::<32>().0.iter().take_while(alike).count() * 32;
    whole + ids[whole..].iter().take_while(|&&id| id == first).count()
}

/// The segments of each level, found when first asked for.
pub(super) struct Index<'a, F> {
    terms: &'a Terms<'a, F>,
    found: [OnceCell<Segments>; 5],
}

impl<'a, F: Real> Index<'a, F> {
    pub fn new(terms: &'a Terms<'a, F>) -> Self {
        Self { terms, found: Default::default() }
    }

    /// The segments of a level; none for the token, and where the ids were not given.
    pub fn of(&self, over: Over) -> Option<&Segments> {
        let (terms, found) = (self.terms, &self.found[over as usize]);
        match over {
            Over::Token => None,
            Over::Turn => terms.turn.map(|turn| found.get_or_init(|| Segments::of_pairs(terms.trace, turn))),
            Over::Trace => Some(found.get_or_init(|| Segments::of(terms.trace))),
            Over::Group => terms.group.map(|group| found.get_or_init(|| Segments::of(group))),
            Over::Batch => Some(found.get_or_init(|| Segments::whole(terms.len()))),
        }
    }
}

/// Ends of the smallest blocks of at least `least` terms that cut no segment; one block where segments are scattered.
pub(super) fn blocks(terms: usize, uncut: &[&Segments], least: usize) -> Vec<usize> {
    if uncut.iter().any(|segments| !segments.is_contiguous()) {
        return vec![terms];
    }
    let Some((first, others)) = uncut.split_first() else {
        return (least..terms).step_by(least).chain([terms]).collect();
    };
    let ends_here = |segments: &&Segments, end: usize| segments.runs.binary_search_by_key(&end, |run| run.end).is_ok();
    let (mut start, mut found) = (0, Vec::new());
    for run in &first.runs {
        let large = run.end - start >= least || run.end == terms;
        if large && others.iter().all(|other| ends_here(other, run.end)) {
            found.push(run.end);
            start = run.end;
        }
    }
    if found.is_empty() { vec![terms] } else { found }
}

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
