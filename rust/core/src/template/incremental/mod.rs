//! Incremental renders: a run of the template goes on from the last one of its conversation, as far as that is proven.
//!
//! A run skips what it wrote for earlier messages where `messages` can tell that it would write the same; its text is put
//! together here. What cannot be told is run whole.

pub(super) mod analyze;
pub(super) mod messages;
pub(super) mod session;

use super::environment::{self, Written};
use super::marks::Alphabet;
use super::{Call, Template, watch};
use crate::error::Result;
use messages::Outcome;
use minijinja::value::Value;
use session::{Earlier, Slot};
use std::sync::Arc;

impl Template {
    /// A run that goes on from the last one of its slot, as far as it can; it stays in the slot. One with marks is watched.
    pub(super) fn run_on<'s>(
        &self,
        call: &Call<'_, '_>,
        slot: &'s mut Slot,
        values: Arc<[Value]>,
        tools: Option<Value>,
        alphabet: Option<&Alphabet>,
    ) -> Result<&'s mut Earlier> {
        let marks = alphabet.map_or(0, Alphabet::bits);
        let common = std::mem::replace(&mut slot.common, values.len());
        let earlier = slot.earlier.take();
        let Some(plan) = self.resumable.as_ref().filter(|_| call.noted) else {
            let context = call.variables(Value::from(values.to_vec()), tools, alphabet);
            watch::begin(marks);
            let text = environment::render(&self.env, context, call.size);
            let noticed = watch::end();
            return Ok(slot.earlier.insert(Earlier { text: text?, noticed, ..Earlier::default() }));
        };
        let count = values.len();
        let context = call.variables(messages::Messages::value(values), tools, alphabet);
        let run = |context: Value, earlier: Option<&Earlier>| {
            messages::begin(plan, earlier.map(|earlier| earlier.ran.as_slice()), common, count);
            // What a run noticed in the items that are skipped, it would notice again: nothing is left to watch for.
            let before = earlier.is_some_and(|earlier| earlier.noticed);
            watch::begin(if before { 0 } else { marks });
            let written = environment::render_noted(&self.env, context, call.size);
            let noticed = watch::end() || before;
            (written, messages::end(), noticed)
        };
        if let Some(earlier) = earlier.filter(|_| common > 0) {
            // What fails on the way is told as a run of its own tells it.
            if let (Ok(written), outcome, noticed) = run(context.clone(), Some(&earlier))
                && let Some(earlier) = joined(&written, earlier, outcome)
            {
                return Ok(slot.earlier.insert(Earlier { noticed, ..earlier }));
            }
        }
        let (written, outcome, noticed) = run(context, None);
        let text = written?.text.written().map(str::to_owned).unwrap_or_default();
        Ok(slot.earlier.insert(Earlier { ran: outcome.ran, text, noticed, ..Earlier::default() }))
    }
}

/// The run that went on from an earlier one, with its whole text; `None` where a run of its own could say otherwise.
fn joined(written: &Written, mut earlier: Earlier, outcome: Outcome) -> Option<Earlier> {
    let text = written.text.written()?;
    let Some((number, skipped)) = outcome.skipped else {
        return Some(Earlier { ran: outcome.ran, text: text.to_owned(), ..Earlier::default() });
    };
    let ran = earlier.ran.iter().find(|ran| ran.number == number)?;
    let (before, until) = (ran.before, ran.places.get(skipped)?.text);
    let within = outcome.fuel <= written.fuel_left && outcome.spent <= written.bytes_left;
    // More of what repeats before the loop would begin alike.
    let begins = outcome.ran.iter().find(|ran| ran.number == number)?.before == before;
    let same = begins && text.as_bytes().get(..before) == earlier.text.as_bytes().get(..before);
    if !within || !same {
        return None;
    }
    earlier.text.truncate(until);
    earlier.text.push_str(text.get(before..)?);
    Some(Earlier { ran: outcome.ran, kept: until, ..earlier })
}
