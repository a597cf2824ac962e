//! One trace to its branches: each generation extends a branch, or forks a new one.
//!
//! Sampled ids are the data; the template only supplies what was not sampled. Recorded prompt ids win over rendering.
//! Called by `align` for every trace; pure but for the tokenizer's caches.

use super::Options;
use super::branch::{Branch, Sampling, common_prefix};
use super::prompt::{Scaffold, Text, source};
use super::reason::{Finding, Reason};
use super::resolve::{self, Resolved, excerpt, tier};
use crate::error::Result;
use crate::template::Rendered;
use crate::tokenizer::Tokenizer;
use crate::trace::{Generation, LogprobKind, Stop, Trace};
use serde_json::Value;

/// Branches and findings of one trace.
#[derive(Debug, Default)]
pub struct Woven {
    /// Branches in the order in which they were opened.
    pub branches: Vec<Branch>,
    /// What did not fit.
    pub findings: Vec<Finding>,
    /// Tokens that the record says were sampled.
    pub recorded: u64,
    /// Of those: tokens of tier T0 to T3 that stand in a branch with a logprob.
    pub exact: u64,
}

/// Where unsampled text goes.
enum Place {
    /// Extends branch `.0`.
    Extend(usize, Text),
    /// Opens a branch.
    Fork(Text),
}

/// Aligns one trace.
pub fn weave(trace: &Trace, tokenizer: &Tokenizer, scaffold: &Scaffold<'_>, options: Options) -> Result<Woven> {
    let mut loom = Loom { trace, tokenizer, scaffold, options, woven: Woven::default() };
    for (turn, generation) in trace.generations.iter().enumerate() {
        loom.add(turn, generation).map_err(|error| error.in_turn(turn).at(&trace.location))?;
    }
    Ok(loom.woven)
}

struct Loom<'a> {
    trace: &'a Trace,
    tokenizer: &'a Tokenizer,
    scaffold: &'a Scaffold<'a>,
    options: Options,
    woven: Woven,
}

impl Loom<'_> {
    fn add(&mut self, turn: usize, generation: &Generation) -> Result<()> {
        let rendered = match self.scaffold.render(self.trace, &generation.context, true) {
            Ok(rendered) => Some(rendered),
            Err(_) if generation.prompt_ids.is_some() => None,
            Err(error) => return Err(error),
        };
        let place = match &generation.prompt_ids {
            Some(ids) => self.place_ids(turn, ids, rendered.as_ref())?,
            None => self.place_text(turn, generation, rendered.as_ref().expect("rendered above"))?,
        };
        let at = match place {
            Place::Extend(at, text) => {
                self.woven.branches[at].give(&text);
                at
            }
            Place::Fork(text) => self.fork(turn, &text),
        };
        let mut path = generation.context.clone();
        path.push(generation.message);
        let branch = &mut self.woven.branches[at];
        branch.path = path;
        branch.prompt = rendered.map(|rendered| rendered.text).unwrap_or_default();
        branch.body = branch.len();
        self.add_sampled(turn, generation, at)
    }

    /// Recorded prompt ids: the longest branch they extend, or a fork.
    fn place_ids(&mut self, turn: usize, ids: &[u32], rendered: Option<&Rendered>) -> Result<Place> {
        let text = self.classify(turn, ids, rendered)?;
        let extends = |branch: &Branch| !branch.ended && ids.starts_with(&branch.ids);
        let longest = (0..self.woven.branches.len())
            .filter(|&at| extends(&self.woven.branches[at]))
            .max_by_key(|&at| self.woven.branches[at].len());
        Ok(match longest {
            Some(at) => {
                let start = self.woven.branches[at].len();
                let tail = Text { ids: text.ids[start..].to_vec(), sources: text.sources[start..].to_vec() };
                Place::Extend(at, tail)
            }
            None => Place::Fork(text),
        })
    }

    /// Sources of recorded prompt ids: by the render where it gives the same ids.
    fn classify(&mut self, turn: usize, ids: &[u32], rendered: Option<&Rendered>) -> Result<Text> {
        if let Some(rendered) = rendered {
            let text = self.scaffold.encode(rendered, 0)?;
            if text.ids == ids {
                return Ok(text);
            }
            let first = common_prefix(&text.ids, ids);
            let detail = format!(
                "the record has {} prompt ids, the template gives {}; they part at {first}",
                ids.len(),
                text.ids.len()
            );
            self.find(Reason::PromptMismatch, turn, -1, ids.len() - first, detail);
            let mut sources = text.sources[..first].to_vec();
            sources.resize(ids.len(), source::GIVEN);
            return Ok(Text { ids: ids.to_vec(), sources });
        }
        Ok(Text { ids: ids.to_vec(), sources: vec![source::GIVEN; ids.len()] })
    }

    /// No prompt ids: the branch whose messages the context continues, spliced; or a fork over the rendered text.
    fn place_text(&mut self, turn: usize, generation: &Generation, rendered: &Rendered) -> Result<Place> {
        let continues = |branch: &Branch| !branch.ended && generation.context.starts_with(&branch.path);
        let longest = (0..self.woven.branches.len())
            .filter(|&at| continues(&self.woven.branches[at]))
            .max_by_key(|&at| self.woven.branches[at].path.len());
        if let Some(at) = longest
            && let Some(from) = self.splice(at, rendered)?
        {
            return Ok(Place::Extend(at, self.scaffold.encode(rendered, from)?));
        }
        let after_end = |branch: &Branch| branch.ended && generation.context.starts_with(&branch.path);
        let known = self.woven.branches.iter().any(after_end);
        if longest.is_none() && !known && !self.woven.branches.is_empty() {
            let detail = "the messages before this turn are not those of any earlier turn".to_owned();
            self.find(Reason::HistoryRewritten, turn, -1, 0, detail);
        }
        Ok(Place::Fork(self.scaffold.encode(rendered, 0)?))
    }

    /// Where in `rendered` the text after branch `at` begins, if the template keeps what was sampled.
    fn splice(&mut self, at: usize, rendered: &Rendered) -> Result<Option<usize>> {
        let branch = &self.woven.branches[at];
        let turn = branch.turn.last().copied().unwrap_or(0).max(0) as usize;
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
        let cut = branch.cut;
        let body = &rendered.text[start..closing];
        if !self.body_survives(turn, produced, &sampled, body)? {
            return Ok(None);
        }
        self.after_stop(turn, stop, cut, closing).map(Some)
    }

    /// Whether the template shows the sampled body again; a changed form is a finding, a dropped part a fork.
    fn body_survives(&mut self, turn: usize, produced: &Value, sampled: &[u32], body: &str) -> Result<bool> {
        let spelled = resolve::spell_all(sampled, self.tokenizer);
        let count = sampled.len();
        if spelled == body.as_bytes() {
            let canonical = self.tokenizer.encode(body)?;
            let first = common_prefix(&canonical, sampled);
            if first < count.max(canonical.len()) {
                let detail = format!("the same text tokenizes differently from token {first} on");
                self.find(Reason::NoncanonicalBpe, turn, first as i32, count - first.min(count), detail);
            }
            return Ok(true);
        }
        let text = String::from_utf8_lossy(&spelled);
        let plain = resolve::spell(sampled, self.tokenizer);
        let calls = produced.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
        let detail = format!("sampled {}, rendered {}", excerpt(&spelled), excerpt(body.as_bytes()));
        let thought = |text: &str| text.contains("</think>");
        let reason = match () {
            () if thought(&text) && !thought(body) => {
                self.find(Reason::ThinkStripped, turn, -1, count, detail);
                return Ok(false);
            }
            () if text.trim() == body.trim() => Reason::WhitespaceTrimmed,
            () if thought(body) && !thought(&text) => Reason::ThinkInserted,
            () if plain == body.as_bytes() => Reason::SpecialStripped,
            () if calls => Reason::ToolCallReformatted,
            () => {
                self.find(Reason::HistoryRewritten, turn, -1, count, detail);
                return Ok(false);
            }
        };
        self.find(reason, turn, -1, count, detail);
        Ok(true)
    }

    /// Where the template goes on after the stop token that was sampled, or after none.
    fn after_stop(&mut self, turn: usize, stop: Option<u32>, cut: bool, closing: usize) -> Result<usize> {
        let Some(stop) = stop else {
            if cut {
                let detail = "cut by length; the template's closer was added".to_owned();
                self.find(Reason::LengthTruncated, turn, -1, 1, detail);
            }
            return Ok(closing);
        };
        let Some((closing_id, text)) = self.scaffold.closing_token()? else { return Ok(closing) };
        if closing_id != stop {
            let detail = format!("sampled stop token {stop}, the template closes with {closing_id}");
            self.find(Reason::StopTokenDiffers, turn, -1, 1, detail);
        }
        Ok(closing + text.len())
    }

    /// Opens a branch over `text`, sharing what an earlier branch sampled on the same ids.
    fn fork(&mut self, turn: usize, text: &Text) -> usize {
        let shared = |branch: &&Branch| common_prefix(&branch.ids, &text.ids);
        let nearest = self.woven.branches.iter().max_by_key(shared);
        let branch = Branch::fork(text, nearest);
        if !self.woven.branches.is_empty() {
            let detail = format!("the prompt extends no earlier turn: branch {}", self.woven.branches.len());
            self.find(Reason::PrefixNotExtended, turn, -1, 0, detail);
        }
        self.woven.branches.push(branch);
        self.woven.branches.len() - 1
    }

    fn add_sampled(&mut self, turn: usize, generation: &Generation, at: usize) -> Result<()> {
        let message = &self.trace.messages[generation.message as usize].value;
        let content = message.get("content").and_then(Value::as_str);
        let mut resolved = resolve::resolve(generation, content, self.tokenizer);
        for finding in &mut resolved.findings {
            finding.turn = turn as i32;
        }
        self.woven.findings.append(&mut resolved.findings);
        self.woven.recorded += generation.tokens.len() as u64;
        let sampling = self.sampling(turn, generation);
        let branch = &mut self.woven.branches[at];
        branch.cut = generation.finish_reason.as_deref() == Some("length");
        if resolved.ids.is_empty() || resolved.foreign {
            return self.add_text(turn, generation, at, resolved.foreign, sampling);
        }
        self.add_tokens(turn, &resolved, at, sampling)?;
        let said_stop = matches!(generation.finish_reason.as_deref(), Some("stop" | "tool_calls"));
        let branch = &self.woven.branches[at];
        if said_stop && !branch.stopped && !branch.ended && !matches!(generation.stop, Stop::Text(_)) {
            let detail = "the record says the turn stopped but lists no stop token".to_owned();
            self.find(Reason::EosMissingInRecord, turn, -1, 1, detail);
        }
        Ok(())
    }

    fn add_tokens(&mut self, turn: usize, resolved: &Resolved, at: usize, sampling: Sampling) -> Result<()> {
        let count = resolved.ids.len();
        let branch = &mut self.woven.branches[at];
        let mut index = 0;
        while index < count {
            if resolved.known[index] {
                let (id, logprob) = (resolved.ids[index], resolved.logprobs[index]);
                branch.sample(id, logprob, resolved.tiers[index], true, sampling);
                self.woven.exact += u64::from(!logprob.is_nan());
                index += 1;
                continue;
            }
            let run = resolved.runs.iter().find(|run| run.0 == index).filter(|_| self.options.lenient);
            let Some((_, end, bytes)) = run else { break };
            for id in self.tokenizer.encode(&String::from_utf8_lossy(bytes))? {
                branch.sample(id, f32::NAN, tier::TEXT, false, sampling);
            }
            index = *end;
        }
        let last = branch.ids.last().copied();
        branch.stopped = index == count && last.is_some_and(|id| self.tokenizer.is_special(id));
        if index < count {
            branch.ended = true;
            let detail = format!("the id of token {index} cannot be known; {} tokens are left out", count - index);
            self.find(Reason::PartialUtf8, turn, index as i32, count - index, detail);
        }
        Ok(())
    }

    /// Logprobs without text (T5) where the count fits the canonical tokenization, or text alone (T6).
    fn add_text(
        &mut self,
        turn: usize,
        generation: &Generation,
        at: usize,
        foreign: bool,
        sampling: Sampling,
    ) -> Result<()> {
        let prompt = self.woven.branches[at].prompt.clone();
        let body = self.scaffold.body(self.trace, &generation.context, generation.message, &prompt)?;
        let Some(body) = body else {
            self.woven.branches[at].ended = true;
            let detail = "the template does not show the body of this turn after its prompt".to_owned();
            self.find(Reason::PrefixNotExtended, turn, -1, 0, detail);
            return Ok(());
        };
        let mut ids = self.tokenizer.encode(&body)?;
        let closing = self.scaffold.closing_token()?.map(|(id, _)| id).filter(|_| !self.woven.branches[at].cut);
        let logprobs = generation.tokens.logprobs.as_deref().filter(|_| !foreign).unwrap_or_default();
        let counted = logprobs.len() == ids.len() || logprobs.len() == ids.len() + usize::from(closing.is_some());
        let level = if counted && !logprobs.is_empty() { tier::COUNT } else { tier::TEXT_ONLY };
        if level == tier::TEXT_ONLY || logprobs.len() > ids.len() {
            ids.extend(closing);
        }
        if level == tier::TEXT_ONLY && !logprobs.is_empty() {
            let detail = format!("{} logprobs without text, the text has {} tokens", logprobs.len(), ids.len());
            self.find(Reason::CountMismatch, turn, -1, logprobs.len(), detail);
        }
        if generation.tokens.is_empty() || foreign {
            self.woven.recorded += if foreign { 0 } else { ids.len() as u64 };
        }
        let branch = &mut self.woven.branches[at];
        branch.stopped = ids.last().copied() == closing && closing.is_some();
        let trained = level == tier::COUNT || self.options.text_only;
        for (index, id) in ids.into_iter().enumerate() {
            let logprob = if level == tier::COUNT { logprobs[index] } else { f32::NAN };
            branch.sample(id, logprob, level, trained, sampling);
        }
        Ok(())
    }

    fn sampling(&self, turn: usize, generation: &Generation) -> Sampling {
        let kind = self.options.logprob_kind.unwrap_or(generation.logprob_kind);
        let inv_temperature = match (kind, generation.temperature) {
            (LogprobKind::Processed, Some(temperature)) if temperature > 0.0 => 1.0 / temperature,
            _ => 1.0,
        };
        Sampling { turn: turn as i32, version: generation.policy_version, inv_temperature }
    }

    fn find(&mut self, reason: Reason, turn: usize, token: i32, count: usize, detail: String) {
        let finding = Finding { reason, turn: turn as i32, token, count: count as i32, detail };
        self.woven.findings.push(finding);
    }
}
