//! Where the prompt of a generation goes: into the branch that it continues, or into a new one.
//!
//! What the record says about the prompt decides: ids, ids behind an earlier turn, plain text, messages, or nothing.

use super::branch::common_prefix;
use super::bridge::bridge;
use super::compare::compare;
use super::dates;
use super::pictures::Keyed;
use super::prompt::{Text, View};
use super::spelling::{is_special, spell_all};
use super::weave::{Loom, Place};
use crate::drift::Reason;
use crate::error::Result;
use crate::template::{Rendered, Session};
use crate::trace::{Generation, Prompt};
use std::mem;
use std::sync::Arc;

/// Tokens on both sides of a difference in which a date is looked for.
const DATE_WINDOW: usize = 24;

impl Loom<'_, '_> {
    /// The place of a generation's prompt, and the rendered prompt where the template was asked.
    pub fn place(&mut self, turn: usize, generation: &Generation) -> Result<(Place, Option<Arc<str>>)> {
        match &generation.prompt {
            Prompt::Ids(ids) => {
                let rendered = self.render(turn, &generation.context, true).ok();
                // The parts beside a prompt of ids are its pictures alone, and no template wrote it.
                let written = !generation.context.is_empty() && generation.placeholders.is_none();
                let Some(rendered) = rendered.filter(|_| written) else {
                    if written {
                        self.check_shown(turn, generation, None, Some(ids));
                    }
                    return Ok((self.place_ids(turn, Text::given(ids).view()), None));
                };
                let encoded = self.memory.prompts.encode(self.scaffold, &rendered)?;
                if encoded.ids == ids {
                    self.check_shown(turn, generation, Some(&rendered), None);
                    // Of a prompt that is as the template has it, only what is behind the branch is copied.
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

    fn headless(&mut self, turn: usize, generation: &Generation, why: &str) -> Place {
        let count = generation.tokens.len();
        self.find(Reason::PromptMismatch, turn, 0, count, format!("{why}; what was sampled is held, not trained"));
        Place::Headless
    }

    /// Ids behind the last sampled token of generation `earlier`.
    fn place_after(&mut self, turn: usize, earlier: u32, ids: &[u32]) -> Place {
        let end = self.ends.get(earlier as usize).copied().flatten();
        let Some((at, length)) = end.filter(|_| (earlier as usize) < turn) else {
            let generation = &self.trace.generations[turn];
            return self.headless(turn, generation, &format!("the prompt follows turn {earlier}, which is not held"));
        };
        if self.woven.branches[at].headless {
            let count = self.trace.generations[turn].tokens.len();
            let detail = format!("the prompt of turn {earlier} is not known; what was sampled is held, not trained");
            self.find(Reason::PromptMismatch, turn, 0, count, detail);
        }
        let branch = &self.woven.branches[at];
        if branch.len() == length && !branch.ended {
            Place::Extend(at, Text::given(ids))
        } else {
            Place::Stem(at, length, Text::given(ids))
        }
    }

    /// All prompt ids: the longest branch they extend, by named edits at the ends of turns if need be, or a fork.
    fn place_ids(&mut self, turn: usize, text: View<'_>) -> Place {
        self.mark_stops(text.ids);
        let branches = &self.woven.branches;
        let open = |at: &usize| !branches[*at].ended && !branches[*at].headless;
        let extended = (0..branches.len()).filter(open).filter(|&at| text.ids.starts_with(&branches[at].ids));
        if let Some(at) = extended.max_by_key(|&at| branches[at].len()) {
            return Place::Extend(at, text.tail(branches[at].len()));
        }
        let is_stop = |id| is_special(id, self.tokenizer);
        let bridged = (0..branches.len())
            .filter(open)
            .filter_map(|at| bridge(&branches[at], text.ids, &self.scaffold.closing, is_stop).map(|found| (at, found)));
        let Some((at, found)) = bridged.max_by_key(|(at, _)| branches[*at].len()) else {
            return Place::Fork(text.tail(0));
        };
        let (body, behind) = (branches[at].body, branches[at].last_turn());
        for (reason, position, detail) in found.edits {
            // An edit at the end of an earlier turn was reported when that turn was passed.
            if position >= body {
                self.find(reason, behind.unwrap_or(turn as i32).max(0) as usize, -1, 1, detail);
            }
        }
        Place::Extend(at, text.tail(found.from))
    }

    /// Ends branches of text that these prompt ids go on with the stop token that stands behind them: the marker of the
    /// next role, where the template writes none of its own.
    fn mark_stops(&mut self, ids: &[u32]) {
        for branch in self.woven.branches.iter_mut().filter(|branch| branch.unmarked) {
            let next = ids.strip_prefix(branch.ids.as_slice()).and_then(|rest| rest.first().copied());
            if let Some(stop) = next.filter(|id| self.tokenizer.eos_ids().contains(id)) {
                branch.stop(stop);
                self.woven.recorded += 1;
            }
        }
    }

    /// Sources of recorded prompt ids beside those that the template gives, and the render that fits them best.
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
        let seen = short.as_ref().map_or(ids, |short| &short.ids);
        let whole = |text: Text| short.as_ref().map_or_else(|| text.clone(), |short| short.restore(ids, &text.sources));
        let compared = compare(seen, encoded, has_system, self.tokenizer);
        let Some((reason, count, detail)) = compared.difference else { return Ok((whole(compared.text), rendered)) };
        if reason == Reason::PromptMismatch
            && let Some(text) = self.spliced(turn, generation, ids, &rendered)?
        {
            return Ok((text, rendered));
        }
        if reason == Reason::PromptMismatch
            && let Some((day, dated)) = self.as_on_that_day(turn, seen, &rendered)?
        {
            let first = compare(seen, self.encode(&dated)?, has_system, self.tokenizer);
            self.find(Reason::DateInjected, turn, -1, count, format!("the template's date is {day} in the record"));
            if let Some((reason, count, detail)) = first.difference {
                self.find(reason, turn, -1, count, detail);
            }
            return Ok((whole(first.text), dated));
        }
        self.find(reason, turn, -1, count, detail);
        Ok((whole(compared.text), rendered))
    }

    /// The pictures of a generation whose prompt has keys.
    fn keyed(&self, turn: usize) -> Option<&Keyed<'_>> {
        self.pictures.filter(|keyed| keyed.has_keys(turn))
    }

    /// The recorded ids where they are a branch and the template's text behind it: a prompt that holds what was sampled as
    /// it was drawn, and so has other ids than its text.
    fn spliced(
        &mut self,
        turn: usize,
        generation: &Generation,
        ids: &[u32],
        rendered: &Rendered,
    ) -> Result<Option<Text>> {
        let Some(at) = self.continued(generation) else { return Ok(None) };
        let Some(rest) = ids.strip_prefix(self.woven.branches[at].ids.as_slice()) else { return Ok(None) };
        let before = self.woven.findings.len();
        if let Some(from) = self.splice(at, rendered)? {
            let behind = self.scaffold.encode(rendered, from)?;
            let short = self.keyed(turn).map(|keyed| keyed.collapse(rest));
            if behind.ids == short.as_ref().map_or(rest, |short| &short.ids) {
                let behind = short.map_or(behind.clone(), |short| short.restore(rest, &behind.sources));
                let mut text = Text::new(ids.to_vec(), self.woven.branches[at].source.clone());
                text.sources.extend(behind.sources);
                return Ok(Some(text));
            }
        }
        self.woven.findings.truncate(before);
        Ok(None)
    }

    /// The render with the date that the recorded prompt shows, where the template prints one.
    fn as_on_that_day(&self, turn: usize, ids: &[u32], rendered: &Rendered) -> Result<Option<(String, Rendered)>> {
        if !self.scaffold.prints_date || self.trace.template_kwargs.contains_key("strftime_now") {
            return Ok(None);
        }
        let ours = self.tokenizer.encode(&rendered.text)?;
        let first = common_prefix(&ours, ids);
        let window = &ids[first.saturating_sub(DATE_WINDOW)..ids.len().min(first + DATE_WINDOW)];
        let shown = spell_all(window, self.tokenizer);
        let Some(day) = dates::find(&String::from_utf8_lossy(&shown)) else { return Ok(None) };
        let asked = (turn, &*self.trace.generations[turn].context);
        let dated = self.scaffold.render(&mut Session::default(), self.trace, asked, true, Some(&day))?;
        let closer = common_prefix(&self.tokenizer.encode(&dated.text)?, ids) > first;
        Ok(closer.then_some((day, dated)))
    }

    /// Says once that a rendered prompt holds the date of today.
    fn note_date(&mut self, turn: usize) {
        let kwargs = &self.trace.template_kwargs;
        let pinned = kwargs.contains_key("strftime_now") || kwargs.contains_key("date_string");
        if self.scaffold.prints_date && !pinned && !self.dated {
            self.dated = true;
            let detail = "the template prints the date, and the record does not say which it was".to_owned();
            self.find(Reason::DateInjected, turn, -1, 0, detail);
        }
    }
}
