//! The cached state of a conversation that is rendered turn by turn: its messages as values, and the runs of the
//! template.
//!
//! Messages are compared with the earlier ones, and equal ones keep their values. `incremental` resumes from the runs.

#[cfg(test)]
mod tests;

use super::messages::LoopRecord;
use crate::error::Result;
use crate::template::conversation::{Conversation, Selection};
use crate::template::marks::{Alphabet, MarkStats, Marker, Seams, Stripped, Tag};
use crate::template::rendered::Rendered;
use crate::template::server_message::Rules;
use minijinja::value::Value;
use std::sync::Arc;

/// The renders of one conversation, with and without marks.
#[derive(Debug, Default)]
pub struct Session<'a> {
    /// Number of the template, and everything else that a render depends on except the messages.
    pub(in crate::template) template: u64,
    pub(in crate::template) key: Vec<u8>,
    pub(in crate::template) conversation: Conversation<'a>,
    pub(in crate::template) slots: Slots,
    /// The first and the last render of the conversation so far, each with its number of messages. The next
    /// conversation often has the same first prompt.
    renders: Vec<(usize, Rendered)>,
}

impl<'a> Session<'a> {
    /// Updates the session to the messages of a call and returns how many leading messages are unchanged. `key` is
    /// everything else that the render depends on.
    pub(in crate::template) fn follow(
        &mut self,
        (template, rules): (u64, Rules),
        key: Vec<u8>,
        messages: &[&'a serde_json::Value],
    ) -> Result<usize> {
        if (self.template, &self.key) != (template, &key) {
            let conversation = Conversation::new(&[], rules)?;
            *self = Self { template, key, conversation, ..Self::default() };
        }
        let common = self.conversation.follow(messages)?;
        self.renders.retain(|(count, _)| *count <= common);
        self.slots.each().for_each(|slot| slot.common = slot.common.min(common));
        Ok(common)
    }

    /// Returns the render of exactly the messages of the session, if it was kept.
    pub(in crate::template) fn kept(&self) -> Option<&Rendered> {
        self.renders.iter().find(|(count, _)| *count == self.conversation.len()).map(|(_, rendered)| rendered)
    }

    /// Keeps the render of the session's messages.
    pub(in crate::template) fn keep(&mut self, rendered: Rendered) {
        self.renders.truncate(1);
        self.renders.push((self.conversation.len(), rendered));
    }
}

/// One slot for each way to render a conversation.
#[derive(Debug, Default)]
pub(in crate::template) struct Slots {
    /// Without marks: null keys dropped, or kept.
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

    /// Returns the slot of a selection that includes all messages.
    pub fn marked(&mut self, selection: Selection) -> Option<&mut Slot> {
        let at =
            [Selection::Outside, Selection::AssistantInside, Selection::Inside].iter().position(|s| *s == selection)?;
        Some(&mut self.marked[at])
    }
}

/// One way to render: values of the messages so far, and the last run.
#[derive(Debug, Default)]
pub(in crate::template) struct Slot {
    keep_null: bool,
    alphabet: Option<Alphabet>,
    values: Vec<Value>,
    /// Tags of the schemas and of all messages so far.
    pub tags: Vec<Tag>,
    ends: Vec<End>,
    /// Number of leading messages that the last run shares with the current one.
    pub common: usize,
    pub earlier: Option<LastRun>,
}

/// Messages with marks.
#[derive(Debug)]
pub(in crate::template) struct Marked {
    pub values: Arc<[Value]>,
    pub noted: MarkStats,
    /// Number of bytes and seams that were processed.
    pub passed: usize,
}

/// State of the marker after the marks of a message.
#[derive(Debug, Clone, Copy)]
struct End {
    tags: usize,
    noted: MarkStats,
}

/// A run with its complete text.
#[derive(Debug, Default)]
pub(in crate::template) struct LastRun {
    pub ran: Vec<LoopRecord>,
    pub text: String,
    /// True if the run may have distinguished a marked string from a plain one.
    pub noticed: bool,
    /// Number of leading bytes of its text that come from the previous run.
    pub kept: usize,
    /// The text without marks, of this run or the previous one.
    pub stripped: Stripped,
}

impl Slot {
    /// Returns the values of all messages without marks.
    pub fn plain(&mut self, conversation: &Conversation<'_>, keep_null: bool) -> Arc<[Value]> {
        self.values.truncate(self.common);
        self.values.extend((self.values.len()..conversation.len()).map(|at| conversation.value(at, keep_null, None)));
        self.values.as_slice().into()
    }

    /// Returns the values of all messages with marks.
    pub fn marked(
        &mut self,
        (conversation, keep_null): (&Conversation<'_>, bool),
        (alphabet, schemas): (&Alphabet, Vec<Tag>),
        seams: Option<&Seams>,
        selection: Selection,
    ) -> Marked {
        if (self.keep_null, self.alphabet.as_ref()) != (keep_null, Some(alphabet)) {
            *self = Self { keep_null, alphabet: Some(alphabet.clone()), tags: schemas, ..Self::default() };
            self.ends.push(End { tags: self.tags.len(), noted: MarkStats::default() });
        }
        self.values.truncate(self.common);
        self.ends.truncate(self.values.len() + 1);
        let end = self.ends[self.values.len()];
        self.tags.truncate(end.tags);
        let mut marker = Marker::new(alphabet.clone(), seams, std::mem::take(&mut self.tags));
        marker.noted = end.noted;
        for at in self.values.len()..conversation.len() {
            self.values.push(conversation.value(at, keep_null, Some((&mut marker, &selection))));
            self.ends.push(End { tags: marker.tags.len(), noted: marker.noted });
        }
        self.tags = marker.tags;
        Marked { values: self.values.as_slice().into(), noted: marker.noted, passed: marker.passed }
    }
}
