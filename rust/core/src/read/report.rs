//! Counts of what was read, and of what was wrong with it.

use crate::error::Error;
use crate::format::{Form, Reason, Record};
use std::collections::BTreeMap;

/// What a reader has seen so far.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Records, good and bad.
    pub records: u64,
    /// Good ones.
    pub traces: u64,
    /// Good ones by form.
    pub forms: BTreeMap<Form, u64>,
    /// Bad ones.
    pub bad: u64,
    /// Bad ones by reason.
    pub reasons: BTreeMap<Reason, u64>,
    /// The first few errors, in order.
    pub first_errors: Vec<Error>,
    /// Sampling calls in the good ones.
    pub generations: u64,
    /// Sampled tokens that they list.
    pub tokens: u64,
    /// Logprobs that were null, NaN or -inf.
    pub missing_logprobs: u64,
    /// Logprobs that were positive or -9999.0.
    pub invalid_logprobs: u64,
    /// Choices that were not used because the record names none and the first was taken.
    pub unused_choices: u64,
    /// Bytes of records, after decompression.
    pub bytes: u64,
}

const FIRST_ERRORS: usize = 5;

impl Report {
    pub(super) fn count(&mut self, record: &Record) {
        self.records += 1;
        self.traces += 1;
        *self.forms.entry(record.form).or_default() += 1;
        self.unused_choices += u64::from(record.unused_choices);
        for generation in &record.trace.generations {
            self.generations += 1;
            self.tokens += generation.tokens.len() as u64;
            self.missing_logprobs += u64::from(generation.tokens.missing);
            self.invalid_logprobs += u64::from(generation.tokens.invalid);
        }
    }

    pub(super) fn count_bad(&mut self, reason: Reason, error: &Error) {
        self.records += 1;
        self.bad += 1;
        *self.reasons.entry(reason).or_default() += 1;
        if self.first_errors.len() < FIRST_ERRORS {
            self.first_errors.push(error.clone());
        }
    }
}
