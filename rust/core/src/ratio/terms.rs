//! The inputs for the trained tokens (terms) of a step: flat, borrowed slices.

use super::float::Real;
use super::plan::Policy;
use crate::error::{Error, Result};
use std::ops::Range;

/// Integers of 32 or 64 bits.
#[derive(Debug, Clone, Copy)]
pub enum Integers<'a> {
    /// int32.
    Narrow(&'a [i32]),
    /// int64.
    Wide(&'a [i64]),
}

impl Integers<'_> {
    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        match self {
            Self::Narrow(values) => values.len(),
            Self::Wide(values) => values.len(),
        }
    }

    /// Returns true if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns one entry.
    pub fn at(&self, index: usize) -> i64 {
        match self {
            Self::Narrow(values) => i64::from(values[index]),
            Self::Wide(values) => values[index],
        }
    }
}

/// Ids of terms. One id may apply to several neighboring terms (a row of a padded array).
#[derive(Debug, Clone, Copy)]
pub struct Ids<'a> {
    /// The ids.
    pub values: Integers<'a>,
    /// Number of terms per id.
    pub terms_per_id: usize,
}

impl<'a> Ids<'a> {
    /// Creates ids with one id for each term.
    pub fn of(values: &'a [i64]) -> Self {
        Self { values: Integers::Wide(values), terms_per_id: 1 }
    }

    /// Returns the number of terms.
    pub fn terms(&self) -> usize {
        self.values.len() * self.terms_per_id
    }

    /// Returns the id of a term.
    pub fn at(&self, term: usize) -> i64 {
        self.values.at(term / self.terms_per_id)
    }
}

/// Counts over all ranks before any rejection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    /// Number of terms.
    pub terms: i64,
    /// Number of traces with a term.
    pub traces: i64,
    /// Number of groups with a term.
    pub groups: i64,
}

/// The terms of a step as flat slices. Positions outside the mask are not terms and are never read.
#[derive(Debug, Clone, Copy)]
pub struct Terms<'a, F> {
    /// Logprobs of the proximal policy, in nats.
    pub old: Option<&'a [F]>,
    /// Recorded logprobs, in nats; NaN if unknown.
    pub rollout: Option<&'a [F]>,
    /// Logprobs of the reference model, in nats.
    pub reference: Option<&'a [F]>,
    /// True at the terms. Without a mask all positions are terms.
    pub mask: Option<&'a [bool]>,
    /// Trace of each term.
    pub trace: Ids<'a>,
    /// Generation (turn) of each term; used if the plan has a turn level.
    pub turn: Option<Ids<'a>>,
    /// Group of each term; used if the plan has a group level.
    pub group: Option<Ids<'a>>,
    /// Advantages; used if some `when` is not `Always`.
    pub advantages: Option<&'a [F]>,
    /// Counts of the step, if it has more terms than these.
    pub totals: Option<Totals>,
    /// For each term, the number of terms of its group over all ranks.
    pub group_terms: Option<Ids<'a>>,
    /// For each term, the number of traces with a term in its group, over all ranks.
    pub group_traces: Option<Ids<'a>>,
}

impl<'a, F: Real> Terms<'a, F> {
    /// Creates the terms of a single rank, without optional inputs.
    pub fn of(old: Option<&'a [F]>, rollout: Option<&'a [F]>, trace: &'a [i64]) -> Self {
        let (reference, mask, turn, group, advantages) = (None, None, None, None, None);
        let (totals, group_terms, group_traces) = (None, None, None);
        let trace = Ids::of(trace);
        Self { old, rollout, reference, mask, trace, turn, group, advantages, totals, group_terms, group_traces }
    }

    /// Returns the number of positions.
    pub fn len(&self) -> usize {
        self.trace.terms()
    }

    /// Returns true if there are no positions.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the logprobs of a policy.
    pub(super) fn logprobs(&self, policy: Policy) -> Option<&'a [F]> {
        match policy {
            Policy::Old => self.old,
            Policy::Rollout => self.rollout,
            Policy::Reference => self.reference,
        }
    }

    /// Returns an error for the first value in `range` that is not a logprob.
    pub(super) fn check(&self, range: Range<usize>, refuse_missing: bool) -> Result<()> {
        for position in range.filter(|&position| self.mask.is_none_or(|mask| mask[position])) {
            let place = || {
                let term =
                    self.mask.map_or(position, |mask| mask[..position].iter().filter(|&&is_term| is_term).count());
                format!("trained token {term} (trace {})", self.trace.at(position))
            };
            if let Some(logprob) = self.rollout.map(|rollout| rollout[position].wide()) {
                if logprob > super::plan::POSITIVE_TOLERANCE || logprob <= super::plan::SENTINEL {
                    return Err(argument(format!("{}: the rollout logprob is {logprob}", place()))
                        .why("No sampled token has it, so the ratio would be an invention")
                        .fix("Pass NaN where a logprob is not known"));
                }
                if refuse_missing && logprob.is_nan() {
                    return Err(argument(format!("{}: the rollout logprob is missing", place()))
                        .why("Its ratio is not known")
                        .fix("Record it, or pass missing_logprobs='mask' or missing_logprobs='ratio_one'"));
                }
            }
            for (name, logprobs) in [("old", self.old), ("ref", self.reference)] {
                if let Some(logprob) = logprobs.map(|logprobs| logprobs[position].wide()).filter(|l| !l.is_finite()) {
                    return Err(argument(format!("{}: the {name} logprob is {logprob}", place()))
                        .why("It comes from a forward of a model, so it is an overflow and not a gap in the records")
                        .fix("Look at that forward, or leave the token out"));
                }
            }
        }
        Ok(())
    }
}

pub(super) fn argument(what: String) -> Error {
    Error::new(crate::error::Kind::Argument, "TG-RATIO-001", what)
}
