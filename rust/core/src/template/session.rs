//! A conversation that is rendered turn by turn: each render goes on from the one before, as far as that is proven.
//!
//! Messages are compared, and those that are the same keep their values. A run of the template skips what it wrote for
//! them where `turns` can tell that it would write the same; its text is put together here. What cannot be told is
//! rendered whole. Called by `Template`, and kept by `align` for each of its threads.

use super::conversation::{Conversation, Selection};
use super::environment::{self, Written};
use super::marks::{Alphabet, Marker, Seams, Tag};
use super::rendered::Rendered;
use super::turns::{self, Ran};
use super::{Call, Template};
use crate::error::Result;
use minijinja::value::Value;
use std::sync::Arc;

/// The renders of one conversation, with and without marks.
#[derive(Debug, Default)]
pub struct Session<'a> {
    /// Number of the template, and what else a render depends on beside the messages.
    pub(super) template: u64,
    pub(super) key: Vec<u8>,
    pub(super) conversation: Conversation<'a>,
    pub(super) slots: Slots,
    pub(super) last: Option<Rendered>,
}

impl<'a> Session<'a> {
    /// Takes in the messages of a call, and returns how many of them were there; `key` is what else the render depends on.
    pub(super) fn follow(&mut self, template: u64, key: Vec<u8>, messages: &[&'a serde_json::Value]) -> Result<usize> {
        if (self.template, &self.key) != (template, &key) {
            *self = Self { template, key, ..Self::default() };
        }
        let before = self.conversation.len();
        let common = self.conversation.follow(messages)?;
        if (common, common) != (before, messages.len()) {
            self.last = None;
        }
        self.slots.each().for_each(|slot| slot.common = slot.common.min(common));
        Ok(common)
    }
}

/// One for each way to render a conversation.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// Without marks: null keys left out, or kept.
    plain: [Slot; 2],
    /// With marks, in three ways.
    marked: [Slot; 3],
}

impl Slots {
    fn each(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.plain.iter_mut().chain(&mut self.marked)
    }

    pub fn plain(&mut self, keep_null: bool) -> &mut Slot {
        &mut self.plain[usize::from(keep_null)]
    }

    /// The slot of a selection of all messages.
    pub fn marked(&mut self, selection: Selection) -> Option<&mut Slot> {
        let at = [Selection::Outside, Selection::AssistantInside, Selection::Inside].iter().position(|s| *s == selection)?;
        Some(&mut self.marked[at])
    }
}

/// One way to render: values of the messages so far, and the last run.
#[derive(Debug, Default)]
pub(super) struct Slot {
    keep_null: bool,
    alphabet: Option<Alphabet>,
    values: Vec<Value>,
    /// Tags of the schemas and of all messages so far.
    pub tags: Vec<Tag>,
    ends: Vec<End>,
    /// How many messages of the last run are those of this one.
    common: usize,
    earlier: Option<Earlier>,
}

/// What the marks of a message end with.
#[derive(Debug, Clone, Copy)]
struct End {
    tags: usize,
    leaves: usize,
    edges: bool,
}

#[derive(Debug)]
struct Earlier {
    ran: Vec<Ran>,
    text: String,
}

impl Slot {
    /// Values of all messages without marks.
    pub fn plain(&mut self, conversation: &Conversation<'_>, keep_null: bool) -> Arc<[Value]> {
        self.values.truncate(self.common);
        self.values.extend((self.values.len()..conversation.len()).map(|at| conversation.value(at, keep_null, None)));
        self.values.as_slice().into()
    }

    /// Values of all messages with marks; whether a string has whitespace at its edges; bytes and seams that were gone over.
    pub fn marked(
        &mut self,
        call: &Call<'_, '_>,
        (alphabet, schemas): (&Alphabet, Vec<Tag>),
        seams: Option<&Seams>,
        selection: Selection,
    ) -> (Arc<[Value]>, bool, usize) {
        if (self.keep_null, self.alphabet.as_ref()) != (call.keep_null, Some(alphabet)) {
            *self = Self { keep_null: call.keep_null, alphabet: Some(alphabet.clone()), tags: schemas, ..Self::default() };
            self.ends.push(End { tags: self.tags.len(), leaves: 0, edges: false });
        }
        self.values.truncate(self.common);
        self.ends.truncate(self.values.len() + 1);
        let end = self.ends[self.values.len()];
        self.tags.truncate(end.tags);
        let mut marker = Marker::new(alphabet.clone(), seams, std::mem::take(&mut self.tags));
        (marker.leaves, marker.edges) = (end.leaves, end.edges);
        for at in self.values.len()..call.conversation.len() {
            self.values.push(call.conversation.value(at, call.keep_null, Some((&mut marker, &selection))));
            self.ends.push(End { tags: marker.tags.len(), leaves: marker.leaves, edges: marker.edges });
        }
        self.tags = marker.tags;
        (self.values.as_slice().into(), marker.edges, marker.passed)
    }
}

impl Template {
    /// A run that goes on from the last one of its slot, as far as it can.
    pub(super) fn run_on(
        &self,
        call: &Call<'_, '_>,
        slot: &mut Slot,
        values: Arc<[Value]>,
        tools: Option<Value>,
        alphabet: Option<&Alphabet>,
    ) -> Result<String> {
        let Some(plan) = self.resumable.as_ref().filter(|_| call.noted) else {
            let context = self.whole_context(call, Value::from(values.to_vec()), tools, alphabet);
            return environment::render(&self.env, context, call.size);
        };
        let common = slot.common;
        let context = self.whole_context(call, turns::Messages::value(Arc::clone(&values)), tools, alphabet);
        if let Some(earlier) = slot.earlier.take().filter(|_| common > 0) {
            turns::begin(plan, Some(&earlier.ran), common, values.len());
            let written = environment::render_noted(&self.env, context.clone(), call.size);
            let outcome = turns::end();
            // What fails on the way is told as a render of its own tells it.
            if let Some(text) = written.ok().and_then(|written| joined(written, &earlier, &outcome)) {
                slot.common = values.len();
                slot.earlier = Some(Earlier { ran: outcome.ran, text: text.clone() });
                return Ok(text);
            }
        }
        turns::begin(plan, None, 0, values.len());
        let written = environment::render_noted(&self.env, context, call.size);
        let outcome = turns::end();
        let text = written?.text;
        slot.common = values.len();
        slot.earlier = Some(Earlier { ran: outcome.ran, text: text.clone() });
        Ok(text)
    }
}

/// The whole text of a run that went on from an earlier one; `None` where a run of its own could say otherwise.
fn joined(written: Written, earlier: &Earlier, outcome: &turns::Outcome) -> Option<String> {
    let Some((number, skipped)) = outcome.skipped else { return Some(written.text) };
    let ran = earlier.ran.iter().find(|ran| ran.number == number)?;
    let (before, until) = (ran.before, ran.places.get(skipped)?.text);
    let within = outcome.fuel <= written.fuel_left && outcome.spent <= written.bytes_left;
    let same = written.text.as_bytes().get(..before) == earlier.text.as_bytes().get(..before);
    if !within || !same {
        return None;
    }
    let mut text = String::with_capacity(until + written.text.len() - before);
    text.push_str(earlier.text.get(..until)?);
    text.push_str(written.text.get(before..)?);
    Some(text)
}

#[cfg(test)]
mod tests;
