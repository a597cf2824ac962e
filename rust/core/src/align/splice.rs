//! Whether a rendered prompt goes on where a branch ends: the sampled ids stay where the template shows the body.
//!
//! The body may be shown in another form (spacing, tool-call JSON), which is a finding; a body from which something was
//! dropped is another history.

use super::branch::common_prefix;
use super::resolve::{self, excerpt};
use super::weave::{Loom, Place};
use crate::drift::Reason;
use crate::error::Result;
use crate::template::Rendered;
use crate::trace::Generation;
use serde_json::Value;

impl Loom<'_, '_> {
    /// No prompt ids: the branch whose messages the context continues, spliced; or a fork over the rendered text.
    pub fn place_text(&mut self, turn: usize, generation: &Generation, rendered: &Rendered) -> Result<Place> {
        let continues = |branch: &super::branch::Branch<'_>| {
            !branch.ended && !branch.headless && generation.context.starts_with(&branch.path)
        };
        let longest = (0..self.woven.branches.len())
            .filter(|&at| continues(&self.woven.branches[at]))
            .max_by_key(|&at| self.woven.branches[at].path.len());
        if let Some(at) = longest
            && let Some(from) = self.splice(at, rendered)?
        {
            return Ok(Place::Extend(at, self.scaffold.encode(rendered, from)?));
        }
        let known = self.woven.branches.iter().any(|branch| generation.context.starts_with(&branch.path));
        if longest.is_none() && !known && !self.woven.branches.is_empty() && !self.starts_alike(turn, generation) {
            let detail = "the messages before this turn are not those of any earlier turn".to_owned();
            self.find(Reason::HistoryRewritten, turn, -1, 0, detail);
        }
        Ok(Place::Fork(self.encode(rendered)?))
    }

    /// Whether an earlier call was made on the same messages: a parallel sample, no rewritten history.
    fn starts_alike(&self, turn: usize, generation: &Generation) -> bool {
        self.trace.generations[..turn].iter().any(|earlier| earlier.context == generation.context)
    }

    /// Where in `rendered` the text after branch `at` begins, if the template keeps what was sampled.
    fn splice(&mut self, at: usize, rendered: &Rendered) -> Result<Option<usize>> {
        let branch = &self.woven.branches[at];
        let turn = branch.len().checked_sub(1).and_then(|last| branch.turn_at(last)).unwrap_or(0) as usize;
        let start = branch.prompt.len();
        let closer = &self.scaffold.closer;
        let message = (branch.path.len() - 1) as u32;
        let produced = &self.trace.messages[branch.path[branch.path.len() - 1] as usize].value;
        let after_body = rendered.spans.iter().filter(|span| span.message == message && span.start >= start);
        let body_end = after_body.map(|span| span.end).max().unwrap_or(start);
        let closing = rendered.text.get(body_end..).and_then(|rest| rest.find(closer.as_str()));
        let fits = !branch.prompt.is_empty() && rendered.text.starts_with(&branch.prompt) && !closer.is_empty();
        let Some(closing) = closing.filter(|_| fits).map(|offset| body_end + offset) else { return Ok(None) };
        let stop = branch.stopped.then(|| branch.ids[branch.len() - 1]);
        let sampled = branch.ids[branch.body..branch.len() - usize::from(stop.is_some())].to_vec();
        let (cut, overrun) = (branch.cut, branch.overrun);
        let body = &rendered.text[start..closing];
        if !self.body_survives(turn, produced, &sampled, body, overrun)? {
            return Ok(None);
        }
        Ok(Some(self.after_stop(turn, stop, cut, closing)))
    }

    /// Whether the template shows the sampled body again; a changed form is a finding, a dropped part a fork.
    fn body_survives(
        &mut self,
        turn: usize,
        produced: &Value,
        sampled: &[u32],
        body: &str,
        overrun: bool,
    ) -> Result<bool> {
        let count = sampled.len();
        if resolve::spells(sampled, body.as_bytes(), self.tokenizer) {
            let canonical = self.tokenizer.encode(body)?;
            let first = common_prefix(&canonical, sampled);
            if first < count.max(canonical.len()) {
                let detail = format!("the same text tokenizes differently from token {first} on");
                self.find(Reason::NoncanonicalBpe, turn, first as i32, count - first.min(count), detail);
            }
            return Ok(true);
        }
        let spelled = resolve::spell_all(sampled, self.tokenizer);
        if overrun && spelled.starts_with(body.as_bytes()) {
            return Ok(true);
        }
        let detail = format!("sampled {}, rendered {}", excerpt(&spelled), excerpt(body.as_bytes()));
        let difference = super::body::difference(&spelled, &resolve::spell(sampled, self.tokenizer), body, produced);
        for &reason in difference.reasons {
            self.find(reason, turn, -1, count, detail.clone());
        }
        Ok(difference.same_history)
    }

    /// Where the template goes on after the stop token that was sampled, or after none.
    fn after_stop(&mut self, turn: usize, stop: Option<u32>, cut: bool, closing: usize) -> usize {
        let Some(stop) = stop else {
            if cut {
                let detail = "cut by length; the template's closer was added".to_owned();
                self.find(Reason::LengthTruncated, turn, -1, 1, detail);
            }
            return closing;
        };
        let Some(closing_id) = self.scaffold.closing.token else { return closing };
        if closing_id != stop {
            let detail = format!("sampled stop token {stop}, the template closes with {closing_id}");
            self.find(Reason::StopTokenDiffers, turn, -1, 1, detail);
        }
        closing + self.scaffold.closing_bytes
    }
}
