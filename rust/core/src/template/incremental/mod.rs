//! Incremental renders: a run of the template resumes the last run of its conversation if the result is provably the
//! same.
//!
//! A run skips its output for earlier messages if `messages` can show that it would be the same. This module joins the
//! text of both runs. Otherwise the template runs completely.

pub(super) mod analyze;
pub(super) mod messages;
pub(super) mod session;

use super::environment::{self, RecordedRun};
use super::marks::Alphabet;
use super::{Call, Template, watch};
use crate::error::Result;
use messages::Outcome;
use minijinja::value::Value;
use session::{LastRun, Slot};
use std::sync::Arc;

impl Template {
    /// Runs the template, resuming the last run of the slot if possible, and stores the run in the slot. A run with
    /// marks is watched.
    pub(super) fn run_on<'s>(
        &self,
        call: &Call<'_, '_>,
        slot: &'s mut Slot,
        values: Arc<[Value]>,
        tools: Option<Value>,
        alphabet: Option<&Alphabet>,
    ) -> Result<&'s mut LastRun> {
        let marks = alphabet.map_or(0, Alphabet::bits);
        let common = std::mem::replace(&mut slot.common, values.len());
        let earlier = slot.earlier.take();
        let Some(plan) = self.resumable.as_ref().filter(|_| call.noted) else {
            let context = call.variables(Value::from(values.to_vec()), tools, alphabet);
            watch::begin(marks);
            let text = environment::render(&self.env, context, call.size);
            let noticed = watch::end();
            return Ok(slot.earlier.insert(LastRun { text: text?, noticed, ..LastRun::default() }));
        };
        let count = values.len();
        let context = call.variables(messages::Messages::value(values), tools, alphabet);
        let run = |context: Value, earlier: Option<&LastRun>| {
            messages::begin(plan, earlier.map(|earlier| earlier.ran.as_slice()), common, count);
            // Comparisons that were noticed in skipped items would be noticed again, so there is nothing left to watch
            // for.
            let noticed_before = earlier.is_some_and(|earlier| earlier.noticed);
            watch::begin(if noticed_before { 0 } else { marks });
            let written = environment::render_noted(&self.env, context, call.size);
            let noticed = watch::end() || noticed_before;
            (written, messages::end(), noticed)
        };
        if let Some(earlier) = earlier.filter(|_| common > 0) {
            // On an error the template runs again from the start, so that the error is the one of a complete run.
            if let (Ok(written), outcome, noticed) = run(context.clone(), Some(&earlier))
                && let Some(earlier) = joined(&written, earlier, outcome)
            {
                return Ok(slot.earlier.insert(LastRun { noticed, ..earlier }));
            }
        }
        let (written, outcome, noticed) = run(context, None);
        let text = written?.text.written().map(str::to_owned).unwrap_or_default();
        Ok(slot.earlier.insert(LastRun { ran: outcome.ran, text, noticed, ..LastRun::default() }))
    }
}

/// Joins a resumed run with the earlier one. Returns `None` if a complete run could produce another text.
fn joined(written: &RecordedRun, mut earlier: LastRun, outcome: Outcome) -> Option<LastRun> {
    let text = written.text.written()?;
    let Some((number, skipped)) = outcome.skipped else {
        return Some(LastRun { ran: outcome.ran, text: text.to_owned(), ..LastRun::default() });
    };
    let ran = earlier.ran.iter().find(|ran| ran.number == number)?;
    let (before, kept_bytes) = (ran.before, ran.places.get(skipped)?.text);
    let in_budget = outcome.fuel <= written.fuel_left && outcome.spent <= written.bytes_left;
    // The text before the loop must be as long and equal: with more repeated text, only a prefix could match.
    let same_length = outcome.ran.iter().find(|ran| ran.number == number)?.before == before;
    let same_prefix = same_length && text.as_bytes().get(..before) == earlier.text.as_bytes().get(..before);
    if !in_budget || !same_prefix {
        return None;
    }
    earlier.text.truncate(kept_bytes);
    earlier.text.push_str(text.get(before..)?);
    Some(LastRun { ran: outcome.ran, kept: kept_bytes, ..earlier })
}
