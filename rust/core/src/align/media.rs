//! Media before a turn that have no key. Ids do not distinguish one image, audio or video from another, so nothing
//! sampled after them is trained.
//!
//! Media are detected by the parts of messages, by other fields of the record, by placeholder tokens in a prompt, and
//! by placeholders that a server repeated. `images` assigns keys to the images that the record contains.

use super::trace::{Part, TraceAligner};
use super::types;
use crate::findings::Reason;
use crate::images::{handles, reason_unavailable};
use crate::media::media_part_type;
use crate::trace::{Generation, Trace};
use serde_json::Value;

impl TraceAligner<'_, '_> {
    /// Returns the reason not to train generation `turn` if media without keys precede its end. Its prompt is in
    /// branch `at`.
    pub fn media_before(&mut self, turn: usize, generation: &Generation, at: usize) -> Option<HoldReason> {
        let keyed = self.images.filter(|keyed| keyed.has_keys(turn));
        let branch = &mut self.aligned.branches[at];
        let placeholder =
            self.tokenizer.model().first_placeholder(&branch.ids[branch.searched_for_media..]).and_then(|first| {
                // A placeholder that the policy sampled is text to the server, and so is one that belongs to no image.
                let explained = |id: u32| keyed.is_some_and(|keyed| keyed.explains(id));
                let unexplained =
                    |index: &usize| branch.source[*index] != types::SAMPLED && !explained(branch.ids[*index]);
                let mut candidates = (branch.searched_for_media + first..branch.ids.len()).filter(unexplained);
                candidates.find(|&index| self.tokenizer.model().first_placeholder(&branch.ids[index..=index]).is_some())
            });
        branch.searched_for_media = branch.ids.len();
        let placeholder = placeholder.map(|index| format!("the placeholder id {}", branch.ids[index]));
        let earlier = branch.follows_media.then(|| "media before an earlier turn".to_owned());
        let expanded = self.aligned.findings.iter().rev().take_while(|finding| finding.turn == turn as i32);
        let expanded = expanded.into_iter().any(|finding| finding.reason == Reason::MultimodalExpansion);
        let expanded = expanded.then(|| "a placeholder that was repeated".to_owned());
        let unplaced = self.images.and_then(|keyed| keyed.reason(turn)).map(|why| {
            let detail = format!("a picture before it has no place: {why}; the turn is held, not trained");
            HoldReason { reason: Reason::PictureUnplaced, detail }
        });
        let media = || self.media_in_messages(generation, keyed.is_some()).or(placeholder).or(expanded).or(earlier);
        unplaced.or_else(|| media().map(|what| HoldReason::media(&what)))
    }

    /// Returns the reason not to train a generation if its messages or its recorded prompt contain media.
    pub fn media_in_prompt(&self, generation: &Generation) -> Option<HoldReason> {
        let placeholder = || {
            let ids = generation.prompt.ids()?;
            let first = self.tokenizer.model().first_placeholder(ids)?;
            Some(format!("the placeholder id {}", ids[first]))
        };
        self.media_in_messages(generation, false).or_else(placeholder).map(|what| HoldReason::media(&what))
    }

    /// Describes the first part of a generation's messages, including its answer, that is not text. If the prompt has
    /// keys, images that the record contains do not count.
    fn media_in_messages(&self, generation: &Generation, keyed: bool) -> Option<String> {
        if let Some(kind) = &self.trace.missing_media {
            return Some(format!("{:?} in the record, which none of the messages has,", short(kind)));
        }
        let parts = self.media.get_or_init(|| parts(self.trace));
        let concerns = |index: u32| index == generation.message || generation.context.contains(&index);
        let counts = |(index, kind): &&Part<'_>| concerns(*index) && !(keyed && *kind == PICTURE);
        let (index, kind) = parts.iter().find(counts)?;
        let content = self.trace.messages.get(*index as usize)?.get("content").and_then(Value::as_array);
        let why = content
            .into_iter()
            .flatten()
            .find_map(reason_unavailable)
            .map(|why| format!(" {why},"))
            .unwrap_or_default();
        Some(format!("a part of message {index} of kind {:?}{why}", short(kind)))
    }

    /// Reports that the tokens sampled in a turn are kept but not trained.
    pub fn hold(&mut self, turn: usize, count: usize, hold_reason: HoldReason) {
        self.report(hold_reason.reason, turn, -1, count, hold_reason.detail);
    }
}

/// The name of the kind of an image that the record contains.
const PICTURE: &str = "picture";

/// The reason why the tokens sampled in a turn are kept but not trained.
#[derive(Debug)]
pub struct HoldReason {
    reason: Reason,
    detail: String,
}

impl HoldReason {
    fn media(what: &str) -> Self {
        let detail = format!("{what} is no text, and the ids do not say what it shows; the turn is held, not trained");
        Self { reason: Reason::MediaInPrompt, detail }
    }
}

/// Returns the messages of a trace that contain more than text, each with the first such part.
fn parts<'a>(trace: &'a Trace) -> Vec<Part<'a>> {
    let messages = trace.messages.iter().enumerate();
    let kind =
        |message: &'a Value| media_part_type(message).or_else(|| (!handles(message).is_empty()).then_some(PICTURE));
    messages.filter_map(|(index, message)| Some((index as u32, kind(&message.value)?))).collect()
}

/// Shortens a name from third-party data so that it fits in a line.
fn short(kind: &str) -> String {
    kind.chars().take(40).collect()
}
