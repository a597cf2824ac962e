//! Pictures, sound and video before a turn that have no key: ids do not tell one from another, so nothing that was sampled
//! behind them is trained.
//!
//! They are seen by the parts of messages, by what the record holds beside them, by placeholder tokens in a prompt, and
//! by placeholders that a server repeated. `images` gives keys to those that the record holds.

use super::trace::{Loom, Part};
use super::types;
use crate::findings::Reason;
use crate::images::{handles, why_not};
use crate::media::part_of;
use crate::trace::{Generation, Trace};
use serde_json::Value;

impl Loom<'_, '_> {
    /// What stands before the end of generation `turn`, whose prompt is in branch `at`, and is not in its ids.
    pub fn media_before(&mut self, turn: usize, generation: &Generation, at: usize) -> Option<Held> {
        let keyed = self.pictures.filter(|keyed| keyed.has_keys(turn));
        let branch = &mut self.woven.branches[at];
        let placeholder = self.tokenizer.model().first_placeholder(&branch.ids[branch.looked..]).and_then(|first| {
            // A placeholder that the policy drew is text to the server, as is one that no picture took.
            let explained = |id: u32| keyed.is_some_and(|keyed| keyed.explains(id));
            let given = |index: &usize| branch.source[*index] != types::SAMPLED && !explained(branch.ids[*index]);
            let mut found = (branch.looked + first..branch.ids.len()).filter(given);
            found.find(|&index| self.tokenizer.model().first_placeholder(&branch.ids[index..=index]).is_some())
        });
        branch.looked = branch.ids.len();
        let placeholder = placeholder.map(|index| format!("the placeholder id {}", branch.ids[index]));
        let earlier = branch.behind_media.then(|| "media before an earlier turn".to_owned());
        let expanded = self.woven.findings.iter().rev().take_while(|finding| finding.turn == turn as i32);
        let expanded = expanded.into_iter().any(|finding| finding.reason == Reason::MultimodalExpansion);
        let expanded = expanded.then(|| "a placeholder that was repeated".to_owned());
        let unplaced = self.pictures.and_then(|keyed| keyed.why_not(turn)).map(|why| {
            let detail = format!("a picture before it has no place: {why}; the turn is held, not trained");
            Held { reason: Reason::PictureUnplaced, detail }
        });
        let media = || self.media_in_messages(generation, keyed.is_some()).or(placeholder).or(expanded).or(earlier);
        unplaced.or_else(|| media().map(|what| Held::media(&what)))
    }

    /// What stands in the messages of a generation or in its recorded prompt, and is not in its ids.
    pub fn media_in_prompt(&self, generation: &Generation) -> Option<Held> {
        let placeholder = || {
            let ids = generation.prompt.ids()?;
            let first = self.tokenizer.model().first_placeholder(ids)?;
            Some(format!("the placeholder id {}", ids[first]))
        };
        self.media_in_messages(generation, false).or_else(placeholder).map(|what| Held::media(&what))
    }

    /// The first part of the messages of a generation that is no text, its answer among them; a picture that the record
    /// holds is none where it has keys.
    fn media_in_messages(&self, generation: &Generation, keyed: bool) -> Option<String> {
        if let Some(kind) = &self.trace.media_left_out {
            return Some(format!("{:?} in the record, which none of the messages has,", short(kind)));
        }
        let parts = self.media.get_or_init(|| parts(self.trace));
        let concerns = |index: u32| index == generation.message || generation.context.contains(&index);
        let stands = |(index, kind): &&Part<'_>| concerns(*index) && !(keyed && *kind == PICTURE);
        let (index, kind) = parts.iter().find(stands)?;
        let content = self.trace.messages.get(*index as usize)?.get("content").and_then(Value::as_array);
        let why = content.into_iter().flatten().find_map(why_not).map(|why| format!(" {why},")).unwrap_or_default();
        Some(format!("a part of message {index} of kind {:?}{why}", short(kind)))
    }

    /// Says that what a turn sampled is held and not trained.
    pub fn hold(&mut self, turn: usize, count: usize, held: Held) {
        self.find(held.reason, turn, -1, count, held.detail);
    }
}

/// What a picture that the record holds is called.
const PICTURE: &str = "picture";

/// Why what a turn sampled is held.
#[derive(Debug)]
pub struct Held {
    reason: Reason,
    detail: String,
}

impl Held {
    fn media(what: &str) -> Self {
        let detail = format!("{what} is no text, and the ids do not say what it shows; the turn is held, not trained");
        Self { reason: Reason::MediaInPrompt, detail }
    }
}

/// The messages of a trace that hold more than text, each with the first part that is none.
fn parts<'a>(trace: &'a Trace) -> Vec<Part<'a>> {
    let messages = trace.messages.iter().enumerate();
    let kind = |message: &'a Value| part_of(message).or_else(|| (!handles(message).is_empty()).then_some(PICTURE));
    messages.filter_map(|(index, message)| Some((index as u32, kind(&message.value)?))).collect()
}

/// As much of a stranger's name as a line has room for.
fn short(kind: &str) -> String {
    kind.chars().take(40).collect()
}
