//! Finds the branch that the prompt of a generation continues, or starts a new one.
//!
//! The method depends on the recorded form of the prompt: as ids, ids after an earlier turn, plain text, messages, or
//! not at all.
//!
//! Servers and templates disagree about the end of a turn. `<|return|>` becomes `<|end|>` in the history. A stop token
//! that is also the next header is written once or not at all. The line break after it may be missing. A turn with
//! such a difference continues its branch, and each difference is reported. Any other difference starts another
//! history.

use super::branch::{Branch, common_prefix};
use super::images::Keyed;
use super::prompt::{Closing, Text, View};
use super::prompt_diff::{self, compare};
use super::resolve::{decode_all, is_special};
use super::trace::{Placement, TraceAligner};
use super::types;
use crate::error::Result;
use crate::findings::Reason;
use crate::template::{Rendered, Session};
use crate::trace::{Generation, Prompt};
use std::mem;
use std::sync::Arc;

/// Number of tokens on both sides of a difference in which a date is searched for.
const DATE_WINDOW: usize = 24;

impl TraceAligner<'_, '_> {
    /// Returns the place of a generation's prompt, and the rendered prompt if the template was used.
    pub fn place(&mut self, turn: usize, generation: &Generation) -> Result<(Placement, Option<Arc<str>>)> {
        match &generation.prompt {
            Prompt::Ids(ids) => {
                let rendered = self.render(turn, &generation.context, true).ok();
                // A prompt of ids with separate media parts contains images only, and no template wrote it.
                let by_template = !generation.context.is_empty() && generation.placeholders.is_none();
                let Some(rendered) = rendered.filter(|_| by_template) else {
                    if by_template {
                        self.check_shown(turn, generation, None, Some(ids));
                    }
                    return Ok((self.place_ids(turn, Text::given(ids).view()), None));
                };
                let encoded = self.memory.prompts.encode(self.scaffold, &rendered)?;
                if encoded.ids == ids {
                    self.check_shown(turn, generation, Some(&rendered), None);
                    // If the prompt equals the render, only the part after the branch is copied.
                    let prompts = mem::take(&mut self.memory.prompts);
                    let place = self.place_ids(turn, prompts.view());
                    self.memory.prompts = prompts;
                    return Ok((place, Some(rendered.text)));
                }
                let encoded = encoded.tail(0);
                self.check_shown(turn, generation, Some(&rendered), Some(ids));
                let (text, rendered) = self.classify(turn, generation, ids, (encoded, rendered))?;
                Ok((self.place_ids(turn, text.view()), Some(rendered.text)))
            }
            Prompt::Follows { turn: earlier, ids } => Ok((self.place_after(turn, *earlier, ids), None)),
            Prompt::Text(text) => {
                let mut ids = self.tokenizer.prefix_ids(text).to_vec();
                ids.extend(self.tokenizer.encode(text)?);
                Ok((self.place_ids(turn, Text::given(&ids).view()), None))
            }
            Prompt::Rendered => {
                let rendered = self.render(turn, &generation.context, true)?;
                self.note_date(turn);
                self.check_shown(turn, generation, Some(&rendered), None);
                let place = self.place_text(turn, generation, &rendered)?;
                Ok((place, Some(rendered.text)))
            }
            Prompt::Unknown => Ok((self.headless(turn, generation, "the prompt is not recorded"), None)),
        }
    }

    fn headless(&mut self, turn: usize, generation: &Generation, why: &str) -> Placement {
        let count = generation.tokens.len();
        self.report(Reason::PromptMismatch, turn, 0, count, format!("{why}; what was sampled is held, not trained"));
        Placement::UnknownPrefix
    }

    /// Places a prompt that consists of ids after the last sampled token of generation `earlier`.
    fn place_after(&mut self, turn: usize, earlier: u32, ids: &[u32]) -> Placement {
        let end = self.ends.get(earlier as usize).copied().flatten();
        let Some((at, length)) = end.filter(|_| (earlier as usize) < turn) else {
            let generation = &self.trace.generations[turn];
            return self.headless(turn, generation, &format!("the prompt follows turn {earlier}, which is not held"));
        };
        if self.aligned.branches[at].prefix_unknown {
            let count = self.trace.generations[turn].tokens.len();
            let detail = format!("the prompt of turn {earlier} is not known; what was sampled is held, not trained");
            self.report(Reason::PromptMismatch, turn, 0, count, detail);
        }
        let branch = &self.aligned.branches[at];
        if branch.len() == length && !branch.ended {
            Placement::Extend(at, Text::given(ids))
        } else {
            Placement::ForkAt(at, length, Text::given(ids))
        }
    }

    /// Places a prompt given as all its ids. It extends the longest branch that is its prefix, allowing for named
    /// edits at the ends of turns. Otherwise it is a fork.
    fn place_ids(&mut self, turn: usize, text: View<'_>) -> Placement {
        self.mark_stops(text.ids);
        let branches = &self.aligned.branches;
        let open = |at: &usize| !branches[*at].ended && !branches[*at].prefix_unknown;
        let extended = (0..branches.len()).filter(open).filter(|&at| text.ids.starts_with(&branches[at].ids));
        if let Some(at) = extended.max_by_key(|&at| branches[at].len()) {
            return Placement::Extend(at, text.tail(branches[at].len()));
        }
        let is_stop = |id| is_special(id, self.tokenizer);
        let bridged = (0..branches.len())
            .filter(open)
            .filter_map(|at| bridge(&branches[at], text.ids, &self.scaffold.closing, is_stop).map(|found| (at, found)));
        let Some((at, bridge)) = bridged.max_by_key(|(at, _)| branches[*at].len()) else {
            return Placement::Fork(text.tail(0));
        };
        let (body, previous_turn) = (branches[at].body, branches[at].last_turn());
        for (reason, position, detail) in bridge.edits {
            // An edit at the end of an earlier turn was reported when that turn was processed.
            if position >= body {
                self.report(reason, previous_turn.unwrap_or(turn as i32).max(0) as usize, -1, 1, detail);
            }
        }
        Placement::Extend(at, text.tail(bridge.from))
    }

    /// Appends the stop token to branches that end in text and that these prompt ids continue. The stop token is then
    /// the marker of the next role, because the template writes none of its own.
    fn mark_stops(&mut self, ids: &[u32]) {
        for branch in self.aligned.branches.iter_mut().filter(|branch| branch.unmarked) {
            let next = ids.strip_prefix(branch.ids.as_slice()).and_then(|rest| rest.first().copied());
            if let Some(stop) = next.filter(|id| self.tokenizer.eos_ids().contains(id)) {
                branch.stop(stop, self.options.text_only);
                self.aligned.recorded += 1;
            }
        }
    }

    /// Returns the sources of recorded prompt ids by comparing them with the rendered ones, and the render that fits
    /// them best.
    fn classify(
        &mut self,
        turn: usize,
        generation: &Generation,
        ids: &[u32],
        (encoded, rendered): (Text, Rendered),
    ) -> Result<(Text, Rendered)> {
        let role = generation.context.first().map(|&first| self.trace.messages[first as usize].role());
        let has_system = matches!(role, Some("system" | "developer"));
        let short = self.keyed(turn).map(|keyed| keyed.collapse(ids));
        let comparable_ids = short.as_ref().map_or(ids, |short| &short.ids);
        let restore =
            |text: Text| short.as_ref().map_or_else(|| text.clone(), |short| short.restore(ids, &text.sources));
        let compared = compare(comparable_ids, encoded, has_system, self.tokenizer);
        let Some((reason, count, detail)) = compared.difference else { return Ok((restore(compared.text), rendered)) };
        if reason == Reason::PromptMismatch
            && let Some(text) = self.spliced(turn, generation, ids, &rendered)?
        {
            return Ok((text, rendered));
        }
        if reason == Reason::PromptMismatch
            && let Some((day, dated)) = self.as_on_that_day(turn, comparable_ids, &rendered)?
        {
            let first = compare(comparable_ids, self.encode(&dated)?, has_system, self.tokenizer);
            self.report(Reason::DateInjected, turn, -1, count, format!("the template's date is {day} in the record"));
            if let Some((reason, count, detail)) = first.difference {
                self.report(reason, turn, -1, count, detail);
            }
            return Ok((restore(first.text), dated));
        }
        self.report(reason, turn, -1, count, detail);
        Ok((restore(compared.text), rendered))
    }

    /// Returns the images of the trace if the prompt of a generation has keys.
    fn keyed(&self, turn: usize) -> Option<&Keyed<'_>> {
        self.images.filter(|keyed| keyed.has_keys(turn))
    }

    /// Returns the recorded ids if they are a branch followed by the template's text. Such a prompt keeps ids as
    /// sampled, so its ids differ from the ids of its text.
    fn spliced(
        &mut self,
        turn: usize,
        generation: &Generation,
        ids: &[u32],
        rendered: &Rendered,
    ) -> Result<Option<Text>> {
        let Some(at) = self.continued(generation) else { return Ok(None) };
        let Some(new_ids) = ids.strip_prefix(self.aligned.branches[at].ids.as_slice()) else { return Ok(None) };
        let finding_count = self.aligned.findings.len();
        if let Some(from) = self.splice(at, rendered)? {
            let template_text = self.scaffold.encode(rendered, from)?;
            let short = self.keyed(turn).map(|keyed| keyed.collapse(new_ids));
            if template_text.ids == short.as_ref().map_or(new_ids, |short| &short.ids) {
                let template_text =
                    short.map_or(template_text.clone(), |short| short.restore(new_ids, &template_text.sources));
                let mut text = Text::new(ids.to_vec(), self.aligned.branches[at].source.clone());
                text.sources.extend(template_text.sources);
                return Ok(Some(text));
            }
        }
        self.aligned.findings.truncate(finding_count);
        Ok(None)
    }

    /// Returns the render with the date that the recorded prompt shows, if the template prints a date.
    fn as_on_that_day(&self, turn: usize, ids: &[u32], rendered: &Rendered) -> Result<Option<(String, Rendered)>> {
        if !self.scaffold.prints_date || self.trace.template_kwargs.contains_key("strftime_now") {
            return Ok(None);
        }
        let ours = self.tokenizer.encode(&rendered.text)?;
        let first = common_prefix(&ours, ids);
        let window = &ids[first.saturating_sub(DATE_WINDOW)..ids.len().min(first + DATE_WINDOW)];
        let window_text = decode_all(window, self.tokenizer);
        let Some(day) = prompt_diff::find(&String::from_utf8_lossy(&window_text)) else { return Ok(None) };
        let selection = (turn, &*self.trace.generations[turn].context);
        let dated = self.scaffold.render(&mut Session::default(), self.trace, selection, true, Some(&day))?;
        let closer = common_prefix(&self.tokenizer.encode(&dated.text)?, ids) > first;
        Ok(closer.then_some((day, dated)))
    }

    /// Reports once per trace that a rendered prompt contains today's date.
    fn note_date(&mut self, turn: usize) {
        let kwargs = &self.trace.template_kwargs;
        let pinned = kwargs.contains_key("strftime_now") || kwargs.contains_key("date_string");
        if self.scaffold.prints_date && !pinned && !self.dated {
            self.dated = true;
            let detail = "the template prints the date, and the record does not say which it was".to_owned();
            self.report(Reason::DateInjected, turn, -1, 0, detail);
        }
    }
}

/// The position at which the recorded ids continue a branch, and the differences that were skipped.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Bridge {
    /// Index into the recorded ids.
    pub from: usize,
    /// Reason, position in the branch, and a description.
    pub edits: Vec<(Reason, usize, String)>,
}

/// Compares `branch` and `ids` from the start. Returns `None` if they differ anywhere except at the end of a turn.
///
/// A turn ends with a token for which `is_stop` is true. A truncated turn ends with a part of its text, which
/// no prompt may omit.
pub fn bridge(branch: &Branch<'_>, ids: &[u32], closing: &Closing, is_stop: impl Fn(u32) -> bool) -> Option<Bridge> {
    let mut bridge = Bridge::default();
    let (mut branch_at, mut ids_at) = (0, 0);
    while branch_at < branch.len() {
        let shared = common_prefix(&branch.ids[branch_at..], &ids[ids_at..]);
        branch_at += shared;
        ids_at += shared;
        if branch_at == branch.len() {
            break;
        }
        (branch_at, ids_at) = step_over(branch, ids, closing, &is_stop, (branch_at, ids_at), &mut bridge.edits)?;
    }
    bridge.from = ids_at;
    Some(bridge)
}

/// Returns both positions after one named difference.
fn step_over(
    branch: &Branch<'_>,
    ids: &[u32],
    closing: &Closing,
    is_stop: impl Fn(u32) -> bool,
    (branch_at, ids_at): (usize, usize),
    edits: &mut Vec<(Reason, usize, String)>,
) -> Option<(usize, usize)> {
    let continues =
        |branch_at: usize, ids_at: usize| branch_at == branch.len() || branch.ids.get(branch_at) == ids.get(ids_at);
    let is_sampled = |at: usize| branch.source[at] == types::SAMPLED;
    let ends_turn =
        is_sampled(branch_at) && branch.source.get(branch_at + 1).is_none_or(|&next| next != types::SAMPLED);
    if ends_turn && is_stop(branch.ids[branch_at]) {
        let stop = branch.ids[branch_at];
        // Harmony closes the last message with `<|return|>` and every other message with `<|end|>`.
        let closes =
            |id: u32| Some(id) == closing.token || (is_stop(id) && ids.get(ids_at + 1) != closing.token.as_ref());
        if let Some(&other) = ids.get(ids_at).filter(|&&id| closing.token.is_some() && closes(id))
            && continues(branch_at + 1, ids_at + 1)
        {
            edits.push((Reason::StopTokenDiffers, branch_at, format!("sampled {stop}, the next prompt has {other}")));
            return Some((branch_at + 1, ids_at + 1));
        }
        // If the template closes a turn with a token, everything before that token belongs to the turn's text.
        if closing.token.is_none() && continues(branch_at + 1, ids_at) && ids_at < ids.len() {
            edits.push((Reason::StopTokenDiffers, branch_at, format!("sampled {stop}, the next prompt leaves it out")));
            return Some((branch_at + 1, ids_at));
        }
    }
    let after_turn = branch_at > 0 && is_sampled(branch_at - 1) && !is_sampled(branch_at);
    let separator = closing.separator.as_slice();
    if after_turn && !separator.is_empty() {
        if branch.ids[branch_at..].starts_with(separator)
            && continues(branch_at + separator.len(), ids_at)
            && ids_at < ids.len()
        {
            edits.push((
                Reason::TurnSeparatorMissing,
                branch_at,
                "the next prompt lacks the template's separator".into(),
            ));
            return Some((branch_at + separator.len(), ids_at));
        }
        if ids[ids_at..].starts_with(separator) && continues(branch_at, ids_at + separator.len()) {
            edits.push((
                Reason::TurnSeparatorMissing,
                branch_at,
                "an earlier prompt lacked the template's separator".into(),
            ));
            return Some((branch_at, ids_at + separator.len()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::align::branch::{SampledAttributes, Sampling};
    use crate::align::prompt::Text;

    const RETURN: u32 = 90;
    const END: u32 = 91;
    const LINE: u32 = 92;

    /// Builds a branch: `[1, 2]` from the template, `[5, 6, stop]` sampled, then `after` from the template.
    fn branch(stop: u32, after: &[u32]) -> Branch<'static> {
        let mut branch = Branch::default();
        let give = |ids: &[u32]| Text::new(ids.to_vec(), vec![types::TEMPLATE; ids.len()]);
        branch.push_unsampled(give(&[1, 2]));
        let sampling = Sampling { turn: 0, version: -1, inv_temperature: 1.0 };
        branch.push_sampled(&[5, 6, stop], SampledAttributes { sampling, level: 0, trained: true, logprobs: None });
        branch.push_unsampled(give(after));
        branch
    }

    fn is_stop(id: u32) -> bool {
        id == RETURN || id == END
    }

    #[test]
    fn a_prompt_goes_on_where_it_differs_at_the_ends_of_turns_alone() {
        let closing = Closing { token: Some(END), separator: vec![LINE] };
        let check = |case: &str, stop: u32, after: &[u32], ids: &[u32], closing: &Closing, expected| {
            let result = bridge(&branch(stop, after), ids, closing, is_stop);
            let edits = |result: Bridge| (result.from, result.edits.into_iter().map(|edit| edit.0).collect::<Vec<_>>());
            assert_eq!(result.map(edits), expected, "{case}");
        };
        let with_edit = |from: usize, reason: Reason| Some((from, vec![reason]));
        check("it holds the branch", END, &[], &[1, 2, 5, 6, END, LINE, 3], &closing, Some((5, vec![])));
        let stop = Reason::StopTokenDiffers;
        check("a return became an end", RETURN, &[], &[1, 2, 5, 6, END, LINE, 3], &closing, with_edit(5, stop));
        let harmony = Closing { token: Some(RETURN), separator: vec![] };
        check("an end for the last message's return", RETURN, &[], &[1, 2, 5, 6, END, 3], &harmony, with_edit(5, stop));
        let unclosed = Closing::default();
        check("the template writes no stop token", RETURN, &[], &[1, 2, 5, 6, 7, 8], &unclosed, with_edit(4, stop));
        let line = Reason::TurnSeparatorMissing;
        check("it lacks a separator", END, &[LINE, 3, 4], &[1, 2, 5, 6, END, 3, 4, 9], &closing, with_edit(7, line));
        check("the branch lacks one", END, &[3, 4], &[1, 2, 5, 6, END, LINE, 3, 4, 9], &closing, with_edit(8, line));
        check("another text", END, &[], &[1, 2, 5, 7, END, LINE], &closing, None);
        check("less text", END, &[], &[1, 2, 5], &closing, None);
        // A template that separates content and tool calls by a line break that the policy did not sample.
        check("a line break within the turn", END, &[], &[1, 2, 5, LINE, 6, END, LINE, 3], &closing, None);
        // The text loses part of a character, so the next prompt closes one token earlier.
        check("a turn cut inside a character", 7, &[], &[1, 2, 5, 6, END, LINE, 3], &closing, None);
        check("a cut turn, and other text", 7, &[], &[1, 2, 5, 6, 8, 9], &closing, None);
        // A call was sampled without its closing tag. A parser accepts it, and the template writes it with the tag.
        for stop in [END, RETURN] {
            let tagged = [1, 2, 5, 6, 7, END, LINE, 3];
            check("text before the closing token", stop, &[], &tagged, &closing, None);
            assert_eq!(bridge(&branch(stop, &[]), &tagged, &closing, |id| is_stop(id) || id == 7), None, "{stop}");
        }
    }
}
