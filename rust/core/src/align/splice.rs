//! Decides whether a rendered prompt continues a branch. The sampled ids stay in place of the body that the template
//! shows.
//!
//! The template may show the body in another form (spacing, tool-call JSON), which is reported as a finding. If the
//! template drops part of the body, the prompt starts another history.

use super::branch::{Branch, common_prefix};
use super::prompt::{JOINED, Scaffold};
use super::prompt_diff::difference;
use super::resolve::{decode_all, decode_text, excerpt, spells};
use super::trace::{Placement, TraceAligner};
use crate::error::Result;
use crate::findings::{Finding, Reason};
use crate::template::Rendered;
use crate::tokenizer::Tokenizer;
use crate::trace::Generation;
use serde_json::Value;

/// The last generation of a branch.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts about its end")]
pub struct Ending<'b> {
    /// Its rendered prompt; empty if it was not rendered.
    pub prompt: &'b str,
    /// The sampled ids, including the stop token.
    pub sampled: &'b [u32],
    /// True if the last sampled id is a special token.
    pub stopped: bool,
    /// True if the generation was truncated by a length limit, a filter or an abort.
    pub cut: bool,
    /// True if it is text whose stop token may be the marker of the next role.
    pub unmarked: bool,
    /// True if its tokens continue past a stop string that the message does not contain.
    pub overrun: bool,
    /// Index of its message among the rendered ones.
    pub message: u32,
    /// Its message.
    pub produced: &'b Value,
}

/// Returns the byte of `rendered` after the ending, if the template keeps the sampled text, and the findings. The
/// findings do not name a turn.
pub fn splice(
    ending: &Ending<'_>,
    rendered: &Rendered,
    scaffold: &Scaffold<'_>,
) -> Result<(SplicePoint, Vec<Finding>)> {
    let start = ending.prompt.len();
    let closer = &scaffold.closer;
    let after_body = rendered.spans.iter().filter(|span| span.message == ending.message && span.start >= start);
    let body_end = after_body.map(|span| span.end).max().unwrap_or(start);
    let after_spans = rendered.text.get(body_end..).unwrap_or_default();
    let (closing, marker) = if closer.is_empty() {
        next_marker(after_spans, scaffold.tokenizer).map_or((None, None), |(at, id)| (Some(at), Some(id)))
    } else {
        (after_spans.find(closer.as_str()), None)
    };
    let extends_prompt = !ending.prompt.is_empty() && rendered.text.starts_with(ending.prompt);
    let Some(closing) = closing.filter(|_| extends_prompt).map(|offset| body_end + offset) else {
        return Ok((SplicePoint::default(), Vec::new()));
    };
    let stop = ending.sampled.last().copied().filter(|_| ending.stopped);
    let body = &ending.sampled[..ending.sampled.len() - usize::from(stop.is_some())];
    let mut findings = Vec::new();
    if !survives(ending, body, (&rendered.text[..start], &rendered.text[start..closing]), scaffold, &mut findings)? {
        return Ok((SplicePoint::default(), findings));
    }
    if let (Some(id), true) = (marker, stop == marker || ending.unmarked) {
        let marker = scaffold.tokenizer.token_bytes(id).map_or(0, <[u8]>::len);
        let stop = Some(id).filter(|_| ending.unmarked);
        return Ok((SplicePoint { from: Some(closing + marker), stop }, findings));
    }
    let from = after_stop(stop, ending.cut, closing, scaffold, &mut findings);
    Ok((SplicePoint { from: Some(from), stop: None }, findings))
}

/// The position after an ending from which a rendered prompt continues.
#[derive(Debug, Default)]
pub struct SplicePoint {
    /// The byte offset; `None` if the template does not keep the sampled text.
    pub from: Option<usize>,
    /// The marker of the next role, if it acts as the stop token of text without one.
    pub stop: Option<u32>,
}

/// Returns the first stop token of the model in a text, and its position. It is the marker of the next role if a
/// template writes nothing after a turn.
fn next_marker(text: &str, tokenizer: &Tokenizer) -> Option<(usize, u32)> {
    let place = |&id: &u32| {
        let marker = tokenizer.token_bytes(id).filter(|bytes| tokenizer.is_special(id) && !bytes.is_empty())?;
        Some((memchr::memmem::find(text.as_bytes(), marker)?, id))
    };
    tokenizer.eos_ids().iter().filter_map(place).min()
}

/// Returns true if the template shows the sampled body again. A changed form is a finding; a dropped part makes a
/// fork.
fn survives(
    ending: &Ending<'_>,
    sampled: &[u32],
    (before, body): (&str, &str),
    scaffold: &Scaffold<'_>,
    findings: &mut Vec<Finding>,
) -> Result<bool> {
    let tokenizer = scaffold.tokenizer;
    let count = sampled.len();
    if spells(sampled, body.as_bytes(), tokenizer) {
        let canonical = tokenizer.ids_after(before, body)?;
        let first = common_prefix(&canonical, sampled);
        if first < count.max(canonical.len()) {
            let detail = format!("the same text tokenizes differently from token {first} on");
            findings.push(finding(Reason::NoncanonicalBpe, first as i32, count - first.min(count), detail));
        }
        return Ok(true);
    }
    let spelled = decode_all(sampled, tokenizer);
    if ending.overrun && spelled.starts_with(body.as_bytes()) {
        return Ok(true);
    }
    let detail = format!("sampled {}, rendered {}", excerpt(&spelled), excerpt(body.as_bytes()));
    let difference = difference(&spelled, &decode_text(sampled, tokenizer), body, ending.produced);
    findings.extend(difference.reasons.iter().map(|&reason| finding(reason, -1, count, detail.clone())));
    Ok(difference.same_history)
}

/// Returns the byte from which the template continues after the sampled stop token, or after the body if none was
/// sampled.
fn after_stop(
    stop: Option<u32>,
    cut: bool,
    closing: usize,
    scaffold: &Scaffold<'_>,
    findings: &mut Vec<Finding>,
) -> usize {
    let Some(stop) = stop else {
        if cut {
            let detail = "the turn was cut; the template's closer was added".to_owned();
            findings.push(finding(Reason::LengthTruncated, -1, 1, detail));
        }
        return closing;
    };
    let Some(closing_id) = scaffold.closing.token else { return closing };
    if closing_id != stop {
        let detail = format!("sampled stop token {stop}, the template closes with {closing_id}");
        findings.push(finding(Reason::StopTokenDiffers, -1, 1, detail));
    }
    closing + scaffold.closing_bytes
}

fn finding(reason: Reason, token: i32, count: usize, detail: String) -> Finding {
    Finding { reason, turn: -1, token, count: count as i32, detail }
}

impl TraceAligner<'_, '_> {
    /// Places a prompt without ids: splices it onto the branch that its context continues, or forks over the rendered
    /// text.
    pub fn place_text(&mut self, turn: usize, generation: &Generation, rendered: &Rendered) -> Result<Placement> {
        let longest = self.continued(generation);
        if let Some(at) = longest
            && let Some(from) = self.splice(at, rendered)?
        {
            let text = self.scaffold.encode(rendered, from)?;
            if text.joined {
                let previous_turn = self.aligned.branches[at].last_turn().unwrap_or(turn as i32).max(0) as usize;
                self.report(Reason::NormalizerChanged, previous_turn, -1, 1, JOINED.to_owned());
            }
            return Ok(Placement::Extend(at, text));
        }
        let is_continued = self.aligned.branches.iter().any(|branch| generation.context.starts_with(&branch.path));
        // An earlier call on the same messages was a parallel sample, not a rewritten history.
        let same_context = |earlier: &Generation| earlier.context == generation.context;
        let is_new = !is_continued && !self.trace.generations[..turn].iter().any(same_context);
        if longest.is_none() && !self.aligned.branches.is_empty() && is_new {
            let detail = "the messages before this turn are not those of any earlier turn".to_owned();
            self.report(Reason::HistoryRewritten, turn, -1, 0, detail);
        }
        Ok(Placement::Fork(self.encode(rendered)?))
    }

    /// Returns the longest branch whose messages the context of a generation continues.
    pub fn continued(&self, generation: &Generation) -> Option<usize> {
        let continues = |branch: &Branch<'_>| {
            !branch.ended && !branch.prefix_unknown && generation.context.starts_with(&branch.path)
        };
        (0..self.aligned.branches.len())
            .filter(|&at| continues(&self.aligned.branches[at]))
            .max_by_key(|&at| self.aligned.branches[at].path.len())
    }

    /// Returns the byte of `rendered` after branch `at`, if the template keeps the sampled text.
    pub fn splice(&mut self, at: usize, rendered: &Rendered) -> Result<Option<usize>> {
        let branch = &self.aligned.branches[at];
        let turn = branch.len().checked_sub(1).and_then(|last| branch.turn_at(last)).unwrap_or(0);
        let ending = Ending {
            prompt: &branch.prompt,
            sampled: &branch.ids[branch.body..],
            stopped: branch.stopped,
            cut: branch.truncated,
            unmarked: branch.unmarked,
            overrun: branch.exceeds_stop,
            message: (branch.path.len() - 1) as u32,
            produced: &self.trace.messages[branch.path[branch.path.len() - 1] as usize].value,
        };
        let (spliced, findings) = splice(&ending, rendered, self.scaffold)?;
        self.aligned.findings.extend(findings.into_iter().map(|finding| Finding { turn, ..finding }));
        if let Some(stop) = spliced.stop {
            self.aligned.recorded += 1;
            self.aligned.branches[at].stop(stop, self.options.text_only);
        }
        Ok(spliced.from)
    }
}
