//! What is known of the terms of a step: flat slices, borrowed.

use super::float::Real;
use super::plan::Policy;
use crate::error::{Error, Result};
use std::ops::Range;

/// Any integers, narrow or wide.
#[derive(Debug, Clone, Copy)]
pub enum Integers<'a> {
    /// int32.
    Narrow(&'a [i32]),
    /// int64.
    Wide(&'a [i64]),
}

impl Integers<'_> {
    /// Number of entries.
    pub fn len(&self) -> usize {
        match self {
            Self::Narrow(values) => values.len(),
            Self::Wide(values) => values.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One of them.
    pub fn at(&self, index: usize) -> i64 {
        match self {
            Self::Narrow(values) => i64::from(values[index]),
            Self::Wide(values) => values[index],
        }
    }
}

/// Ids of terms, each of which may stand for several neighbours (a row of a padded array).
#[derive(Debug, Clone, Copy)]
pub struct Ids<'a> {
    /// The ids.
    pub values: Integers<'a>,
    /// Terms to an id.
    pub each: usize,
}

impl<'a> Ids<'a> {
    /// One id for each term.
    pub fn of(values: &'a [i64]) -> Self {
        Self { values: Integers::Wide(values), each: 1 }
    }

    /// Number of terms.
    pub fn terms(&self) -> usize {
        self.values.len() * self.each
    }

    /// The id of a term.
    pub fn at(&self, term: usize) -> i64 {
        self.values.at(term / self.each)
    }
}

/// Counts over all ranks before any gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    /// Terms.
    pub terms: i64,
    /// Traces with one.
    pub traces: i64,
    /// Groups with one.
    pub groups: i64,
}

/// The terms of a step, flat; positions off the mask are none and are never read.
#[derive(Debug, Clone, Copy)]
pub struct Terms<'a, F> {
    /// Logprobs of the proximal policy, nats.
    pub old: Option<&'a [F]>,
    /// Recorded logprobs, nats, NaN where not known.
    pub rollout: Option<&'a [F]>,
    /// Logprobs of the reference model, nats.
    pub reference: Option<&'a [F]>,
    /// True at the terms; all positions are terms without it.
    pub mask: Option<&'a [bool]>,
    /// Trace of each term.
    pub trace: Ids<'a>,
    /// Generation of its trace, read where a turn is named.
    pub turn: Option<Ids<'a>>,
    /// Group of its trace, read where a group is named.
    pub group: Option<Ids<'a>>,
    /// Advantages, read where `when` is not always.
    pub advantages: Option<&'a [F]>,
    /// Counts of the step, where it is more than these terms.
    pub totals: Option<Totals>,
    /// Terms of each term's group over all ranks.
    pub group_terms: Option<Ids<'a>>,
    /// Traces with a term of each term's group over all ranks.
    pub group_traces: Option<Ids<'a>>,
}

impl<'a, F: Real> Terms<'a, F> {
    /// Terms of one rank that are all there is, without optional parts.
    pub fn of(old: Option<&'a [F]>, rollout: Option<&'a [F]>, trace: &'a [i64]) -> Self {
        let (reference, mask, turn, group, advantages) = (None, None, None, None, None);
        let (totals, group_terms, group_traces) = (None, None, None);
        let trace = Ids::of(trace);
        Self { old, rollout, reference, mask, trace, turn, group, advantages, totals, group_terms, group_traces }
    }

    /// Number of positions.
    pub fn len(&self) -> usize {
        self.trace.terms()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Logprobs of a policy.
    pub(super) fn logprobs(&self, policy: Policy) -> Option<&'a [F]> {
        match policy {
            Policy::Old => self.old,
            Policy::Rollout => self.rollout,
            Policy::Reference => self.reference,
        }
    }

    /// The first value in `range` that is no logprob.
    pub(super) fn check(&self, range: Range<usize>, refuse_missing: bool) -> Result<()> {
        for position in range.filter(|&position| self.mask.is_none_or(|mask| mask[position])) {
            let place = || {
                let term = self.mask.map_or(position, |mask| mask[..position].iter().filter(|&&here| here).count());
                format!("term {term} (trace {})", self.trace.at(position))
            };
            if let Some(logprob) = self.rollout.map(|rollout| rollout[position].wide()) {
                if logprob > super::plan::POSITIVE_TOLERANCE || logprob <= super::plan::SENTINEL {
                    return Err(argument(format!("{}: the rollout logprob is {logprob}", place()))
                        .why("No sampled token has it, so the ratio would be an invention")
                        .cure("Pass NaN where a logprob is not known"));
                }
                if refuse_missing && logprob.is_nan() {
                    return Err(argument(format!("{}: the rollout logprob is missing", place()))
                        .why("Its ratio is not known")
                        .cure("Record it, or pass missing='mask' or missing='neutral'"));
                }
            }
            for (name, logprobs) in [("old", self.old), ("ref", self.reference)] {
                if let Some(logprob) = logprobs.map(|logprobs| logprobs[position].wide()).filter(|l| !l.is_finite()) {
                    return Err(argument(format!("{}: the {name} logprob is {logprob}", place()))
                        .why("It comes from a forward of a model, so it is an overflow and not a gap in the records")
                        .cure("Look at that forward, or leave the term out"));
                }
            }
        }
        Ok(())
    }
}

pub(super) fn argument(what: String) -> Error {
    Error::new(crate::error::Kind::Argument, what)
}
