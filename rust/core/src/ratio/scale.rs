//! Integer denominators: 1 divided by the number of terms, traces or groups.

use super::all_reduce::{Exchange, Op, Stats};
use super::float::Real;
use super::loops::ones;
use super::plan::{Over, Per, Reduction};
use super::segments::{Index, Segments};
use super::terms::{Ids, Terms, argument};
use crate::cancel;
use crate::error::Result;

/// The scale of every term, as one number if it is the same for all positions.
#[derive(Debug, Clone, PartialEq)]
pub enum Scale<F> {
    /// The same for all positions.
    All(F),
    /// By position; 0 outside the mask and if a denominator counts nothing.
    Each(Vec<F>),
}

/// The inputs for counting a scale.
pub(super) struct Counting<'a, F> {
    pub terms: &'a Terms<'a, F>,
    pub index: &'a Index<'a, F>,
    pub keep: &'a [bool],
    /// Statistics over all ranks.
    pub stats: Stats,
    pub exchange: &'a dyn Exchange,
}

impl<F: Real> Counting<'_, F> {
    pub fn scale(&self, reduction: &Reduction) -> Result<Scale<F>> {
        let counted = if reduction.kept { Some(self.keep) } else { self.terms.mask };
        let totals = self.terms.totals.filter(|_| !reduction.kept);
        match reduction.per {
            Per::Constant => Ok(self.constant(reduction.norm)),
            Per::Token => {
                let local = if reduction.kept { self.stats.kept } else { self.stats.terms };
                Ok(self.constant(totals.map_or(local, |totals| totals.terms as f64)))
            }
            Per::Trace => {
                let traces = self.segments(Over::Trace)?;
                let terms = counts(traces, counted);
                let units = self.units(totals.map(|totals| totals.traces), &terms)?;
                Ok(self.spread(traces, |segment, _| units * inner(reduction, terms[segment])))
            }
            Per::Prompt => {
                let groups = self.segments(Over::Group)?;
                let terms = counts(groups, counted);
                let units = self.units(totals.map(|totals| totals.groups), &terms)?;
                let global = self.terms.group_terms.filter(|_| !reduction.kept);
                self.check_ranks(!reduction.mean || global.is_some(), reduction, "group_terms")?;
                Ok(self.spread(groups, |segment, start| units * inner(reduction, count(global, start, terms[segment]))))
            }
            Per::Group => {
                let (groups, traces) = (self.segments(Over::Group)?, self.segments(Over::Trace)?);
                let terms = counts(traces, counted);
                let units = self.units(totals.map(|totals| totals.groups), &counts(groups, counted))?;
                let global = self.terms.group_traces.filter(|_| !reduction.kept);
                self.check_ranks(global.is_some(), reduction, "group_traces")?;
                let members = members(groups, traces, counted);
                Ok(self.spread(traces, |segment, start| {
                    units * count(global, start, members[groups.at(start)]) * inner(reduction, terms[segment])
                }))
            }
        }
    }

    fn segments(&self, over: Over) -> Result<&Segments> {
        self.index.of(over).ok_or_else(|| {
            argument("a reduction that counts groups, without group".into())
                .fix("Pass group=, one id per trained token")
        })
    }

    /// Returns an error if groups may span several ranks, because a rank cannot count such groups.
    fn check_ranks(&self, has_counts: bool, reduction: &Reduction, what: &str) -> Result<()> {
        if self.exchange.is_single_rank() || (has_counts && self.terms.totals.is_some() && !reduction.kept) {
            return Ok(());
        }
        Err(argument("a reduction over ranks counts groups".into())
            .why("A group may stand on several of them, and each sees its own part")
            .fix(format!("Pass totals= and {what}= of the step, with denominator='all'")))
    }

    /// Returns the number of units with a counted term, over all ranks.
    fn units(&self, total: Option<i64>, terms: &[f64]) -> Result<f64> {
        if let Some(units) = total {
            return Ok(units as f64);
        }
        let mut units = [terms.iter().filter(|&&terms| terms > 0.0).count() as f64];
        self.exchange.all_reduce(&mut units, Op::Sum)?;
        Ok(units[0])
    }

    fn constant(&self, bottom: f64) -> Scale<F> {
        let value = reciprocal(bottom);
        match self.terms.mask {
            None => Scale::All(value),
            Some(mask) => Scale::Each(mask.iter().map(|&is_term| if is_term { value } else { F::ZERO }).collect()),
        }
    }

    /// Sets the scale of each run to 1 / `bottom`, a function of its segment and its first position.
    fn spread(&self, segments: &Segments, bottom: impl Fn(usize, usize) -> f64) -> Scale<F> {
        let mut scale = vec![F::ZERO; self.terms.len()];
        for (round, run) in segments.runs.iter().enumerate() {
            cancel::check_every_16384(round);
            scale[run.start..run.end].fill(reciprocal(bottom(run.segment, run.start)));
        }
        for (scale, &is_term) in scale.iter_mut().zip(self.terms.mask.unwrap_or(&[])) {
            *scale = if is_term { *scale } else { F::ZERO };
        }
        Scale::Each(scale)
    }
}

/// Returns 1 / bottom, or 0 if nothing is counted.
fn reciprocal<F: Real>(bottom: f64) -> F {
    F::of(if bottom > 0.0 { 1.0 / bottom } else { 0.0 })
}

/// Returns the divisor of an inner sum, or 0 if the sum is empty.
fn inner(reduction: &Reduction, terms: f64) -> f64 {
    if reduction.mean || terms == 0.0 { terms } else { reduction.norm }
}

/// Returns the count over all ranks if available, else the count of this rank.
fn count(global: Option<Ids<'_>>, position: usize, local: f64) -> f64 {
    global.map_or(local, |global| global.at(position) as f64)
}

/// Returns the number of counted terms of each segment.
fn counts(segments: &Segments, counted: Option<&[bool]>) -> Vec<f64> {
    let mut counts = vec![0.0; segments.len];
    for (round, run) in segments.runs.iter().enumerate() {
        cancel::check_every_16384(round);
        counts[run.segment] += counted.map_or((run.end - run.start) as f64, |flags| ones(&flags[run.start..run.end]));
    }
    counts
}

/// Returns, for each group, the number of traces with a counted term.
fn members(groups: &Segments, traces: &Segments, counted: Option<&[bool]>) -> Vec<f64> {
    let (mut members, mut seen) = (vec![0.0; groups.len], vec![false; traces.len]);
    for (round, run) in traces.runs.iter().enumerate() {
        cancel::check_every_16384(round);
        let has_counted = counted.is_none_or(|flags| flags[run.start..run.end].contains(&true));
        if has_counted && !seen[run.segment] {
            seen[run.segment] = true;
            members[groups.at(run.start)] += 1.0;
        }
    }
    members
}
