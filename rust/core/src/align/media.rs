//! Pictures, sound and video before a turn. Ids do not tell one from another, so nothing that was sampled behind them is
//! trained until they have a road of their own.
//!
//! They are seen by the parts of messages, by what the record holds beside them, by placeholder tokens in a prompt, and
//! by placeholders that a server repeated.

use super::source;
use super::weave::{Loom, Part};
use crate::drift::Reason;
use crate::media::part_of;
use crate::trace::{Generation, Trace};

impl Loom<'_, '_> {
    /// What stands before the end of generation `turn`, whose prompt is in branch `at`, and is not in its ids.
    pub fn media_before(&mut self, turn: usize, generation: &Generation, at: usize) -> Option<String> {
        let branch = &mut self.woven.branches[at];
        let placeholder = self.tokenizer.model().first_placeholder(&branch.ids[branch.looked..]).and_then(|first| {
            // A placeholder that the policy drew is text to the server.
            let given = |index: &usize| branch.source[*index] != source::SAMPLED;
            let mut found = (branch.looked + first..branch.ids.len()).filter(given);
            found.find(|&index| self.tokenizer.model().first_placeholder(&branch.ids[index..=index]).is_some())
        });
        branch.looked = branch.ids.len();
        let placeholder = placeholder.map(|index| format!("the placeholder id {}", branch.ids[index]));
        let earlier = branch.behind_media.then(|| "media before an earlier turn".to_owned());
        let expanded = self.woven.findings.iter().rev().take_while(|finding| finding.turn == turn as i32);
        let expanded = expanded.into_iter().any(|finding| finding.reason == Reason::MultimodalExpansion);
        let expanded = expanded.then(|| "a placeholder that was repeated".to_owned());
        self.media_in_messages(generation).or(placeholder).or(expanded).or(earlier)
    }

    /// What stands in the messages of a generation or in its recorded prompt, and is not in its ids.
    pub fn media_in_prompt(&self, generation: &Generation) -> Option<String> {
        let placeholder = || {
            let ids = generation.prompt.ids()?;
            let first = self.tokenizer.model().first_placeholder(ids)?;
            Some(format!("the placeholder id {}", ids[first]))
        };
        self.media_in_messages(generation).or_else(placeholder)
    }

    /// The first part of the messages of a generation that is no text, its answer among them.
    fn media_in_messages(&self, generation: &Generation) -> Option<String> {
        if let Some(kind) = &self.trace.media_left_out {
            return Some(format!("{:?} in the record, which none of the messages has,", short(kind)));
        }
        let parts = self.media.get_or_init(|| parts(self.trace));
        let concerns = |index: u32| index == generation.message || generation.context.contains(&index);
        let (index, kind) = parts.iter().find(|(index, _)| concerns(*index))?;
        Some(format!("a part of message {index} of kind {:?}", short(kind)))
    }

    /// Says that what a turn sampled is held and not trained.
    pub fn hold(&mut self, turn: usize, count: usize, what: &str) {
        let detail = format!("{what} is no text, and the ids do not say what it shows; the turn is held, not trained");
        self.find(Reason::MediaInPrompt, turn, -1, count, detail);
    }
}

/// The messages of a trace that hold more than text, each with the first part that is none.
fn parts(trace: &Trace) -> Vec<Part<'_>> {
    let messages = trace.messages.iter().enumerate();
    messages.filter_map(|(index, message)| Some((index as u32, part_of(&message.value)?))).collect()
}

/// As much of a stranger's name as a line has room for.
fn short(kind: &str) -> String {
    kind.chars().take(40).collect()
}
