//! A conversation that is rendered turn by turn: each render goes on from the one before, as far as that is proven.
//!
//! Messages are compared, and those that are the same keep their values. A run of the template skips what it wrote for
//! them where `turns` can tell that it would write the same; its text is put together here. What cannot be told is
//! rendered whole. Called by `Template`, and kept by `align` for each of its threads.

use super::conversation::{Conversation, Selection};
use super::environment::{self, Written};
use super::marks::{Alphabet, Marker, Seams, Tag};
use super::rendered::Rendered;
use super::turns::{self, Outcome, Ran};
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
    /// The text of a run that goes on from the last one of its slot, as far as it can; it stays in the slot.
    pub(super) fn run_on<'s>(
        &self,
        call: &Call<'_, '_>,
        slot: &'s mut Slot,
        values: Arc<[Value]>,
        tools: Option<Value>,
        alphabet: Option<&Alphabet>,
    ) -> Result<&'s str> {
        let common = std::mem::replace(&mut slot.common, values.len());
        let earlier = slot.earlier.take();
        let Some(plan) = self.resumable.as_ref().filter(|_| call.noted) else {
            let context = self.whole_context(call, Value::from(values.to_vec()), tools, alphabet);
            let text = environment::render(&self.env, context, call.size)?;
            return Ok(&slot.earlier.insert(Earlier { ran: Vec::new(), text }).text);
        };
        let count = values.len();
        let context = self.whole_context(call, turns::Messages::value(values), tools, alphabet);
        let run = |context: Value, earlier: Option<&Earlier>| {
            turns::begin(plan, earlier.map(|earlier| earlier.ran.as_slice()), common, count);
            let written = environment::render_noted(&self.env, context, call.size);
            (written, turns::end())
        };
        if let Some(earlier) = earlier.filter(|_| common > 0) {
            // What fails on the way is told as a run of its own tells it.
            if let (Ok(written), outcome) = run(context.clone(), Some(&earlier))
                && let Some(earlier) = joined(&written, earlier, outcome)
            {
                return Ok(&slot.earlier.insert(earlier).text);
            }
        }
        let (written, outcome) = run(context, None);
        let text = written?.text.written().map(str::to_owned).unwrap_or_default();
        Ok(&slot.earlier.insert(Earlier { ran: outcome.ran, text }).text)
    }
}

/// The run that went on from an earlier one, with its whole text; `None` where a run of its own could say otherwise.
fn joined(written: &Written, mut earlier: Earlier, outcome: Outcome) -> Option<Earlier> {
    let text = written.text.written()?;
    let Some((number, skipped)) = outcome.skipped else {
        return Some(Earlier { ran: outcome.ran, text: text.to_owned() });
    };
    let ran = earlier.ran.iter().find(|ran| ran.number == number)?;
    let (before, until) = (ran.before, ran.places.get(skipped)?.text);
    let within = outcome.fuel <= written.fuel_left && outcome.spent <= written.bytes_left;
    let same = text.as_bytes().get(..before) == earlier.text.as_bytes().get(..before);
    if !within || !same {
        return None;
    }
    earlier.text.truncate(until);
    earlier.text.push_str(text.get(before..)?);
    Some(Earlier { ran: outcome.ran, text: earlier.text })
}

#[cfg(test)]
mod tests;
