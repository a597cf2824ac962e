//! What was drawn, at the end of its branch: tokens with their logprobs, or text where the record has no tokens.
//!
//! Tokens behind a stop string are left out, an id that cannot be known ends the branch, and both are counted.

use super::body;
use super::branch::{Branch, Sampling, Stretch};
use super::called;
use super::ending;
use super::resolved::{Resolved, Run};
use super::spelling::{is_special, spell_all};
use super::stop::{self, Overrun};
use super::tier;
use super::weave::Loom;
use crate::drift::Reason;
use crate::error::Result;
use crate::tokenizer::Tokenizer;
use crate::trace::{Generation, Prompt, Stop, VersionSpan, value_in};
use serde_json::Value;
use std::borrow::Cow;

impl<'a> Loom<'a, '_> {
    pub fn add_sampled(&mut self, turn: usize, generation: &'a Generation, at: usize) -> Result<()> {
        let message = self.trace.messages.get(generation.message as usize).map(|message| &message.value);
        let content = message.and_then(|message| value_in(message, "content")).and_then(Value::as_str);
        let mut resolved = self.resolve(generation, content);
        for finding in &mut resolved.findings {
            finding.turn = turn as i32;
        }
        self.woven.findings.append(&mut resolved.findings);
        self.woven.recorded += generation.tokens.len() as u64;
        let sampling = self.sampling(turn, generation);
        let branch = &mut self.woven.branches[at];
        branch.cut = ending::is_cut(generation);
        (branch.overrun, branch.unmarked) = (false, false);
        if resolved.ids.is_empty() || resolved.foreign {
            return self.add_text(turn, generation, at, resolved.foreign, sampling);
        }
        self.check_sum(turn, generation, &resolved);
        self.check_calls(turn, generation, message, &resolved);
        let overrun = stop::overrun(generation, message, &resolved, self.tokenizer);
        let end = self.note_overrun(turn, &resolved, overrun);
        self.woven.branches[at].overrun = overrun.is_some();
        self.add_tokens(turn, generation, (&resolved, end), at, sampling)?;
        let said_stop = matches!(generation.finish_reason.as_deref(), Some("stop" | "tool_calls"));
        let branch = &self.woven.branches[at];
        let by_text = matches!(generation.stop, Stop::Text(_)) || branch.overrun;
        if said_stop && !branch.stopped && !branch.ended && !by_text {
            let detail = "the record says the turn stopped but lists no stop token".to_owned();
            self.find(Reason::EosMissingInRecord, turn, -1, 1, detail);
        }
        Ok(())
    }

    /// Compares recorded ids with the tool calls of the message.
    fn check_calls(&mut self, turn: usize, generation: &Generation, message: Option<&Value>, resolved: &Resolved<'_>) {
        let Some((ids, message)) = generation.tokens.ids.as_deref().zip(message) else { return };
        if let Some(unsaid) = called::unsaid(message, ids, self.tokenizer) {
            let detail = format!("the listed tokens spell {unsaid}");
            self.find(Reason::StreamIncomplete, turn, -1, resolved.ids.len(), detail);
        }
    }

    /// Compares the sum of the logprobs with the server's own. Recorders round to six digits or to f16 on the way.
    fn check_sum(&mut self, turn: usize, generation: &Generation, resolved: &Resolved<'_>) {
        let Some((said, logprobs)) = generation.cumulative_logprob.zip(resolved.logprobs) else { return };
        let sum: f64 = logprobs.iter().map(|&logprob| f64::from(logprob)).sum();
        if (sum - said).abs() > 1e-3 + 1e-4 * said.abs() {
            let count = logprobs.len();
            let detail = format!("the logprobs sum to {sum:.6}, the record's cumulative logprob is {said:.6}");
            self.find(Reason::InvalidLogprob, turn, 0, count, detail);
        }
    }

    /// Names what goes past the end of the text; one past the last token that belongs to the turn.
    fn note_overrun(&mut self, turn: usize, resolved: &Resolved<'_>, overrun: Option<Overrun>) -> usize {
        let count = resolved.ids.len();
        let Some(Overrun { end, partial }) = overrun else { return count };
        if partial {
            let detail = "the recorded text ends inside this token; it is kept whole".to_owned();
            self.find(Reason::StopStringTruncated, turn, end as i32 - 1, 1, detail);
        }
        if end < count {
            let detail = format!("{} tokens stand behind the end of the recorded text; they are left out", count - end);
            self.find(Reason::StopStringTruncated, turn, end as i32, count - end, detail);
        }
        end
    }

    /// Appends the first `end` tokens.
    fn add_tokens(
        &mut self,
        turn: usize,
        generation: &Generation,
        (resolved, end): (&Resolved<'a>, usize),
        at: usize,
        sampling: Sampling,
    ) -> Result<()> {
        let branch = &mut self.woven.branches[at];
        let mut index = 0;
        while index < end {
            if resolved.is_known(index) {
                let behind = alike_version(generation, index, resolved.alike(index, end));
                let logprobs = resolved.logprobs.map(|logprobs| &logprobs[index..behind]);
                self.woven.exact += logprobs.filter(|_| branch.may_train()).map_or(0, known);
                let sampling = Sampling { version: version_at(generation, index), ..sampling };
                let tier = resolved.tier(index);
                let logprobs = logprobs.map(Cow::Borrowed);
                branch.sample(&resolved.ids[index..behind], Stretch { sampling, tier, trained: true, logprobs });
                index = behind;
                continue;
            }
            let run = resolved.run_at(index).filter(|_| self.options.lenient || self.options.assume_canonical);
            let Some(Run { end: behind, bytes, entry, .. }) = run else { break };
            let canonical = if let Some(entry) = entry {
                vec![*entry]
            } else {
                let before = before(branch, self.tokenizer);
                self.tokenizer.ids_behind(&before, &String::from_utf8_lossy(bytes))?
            };
            if self.tokenizer.first_outside(&canonical).is_some() {
                break;
            }
            let counted = self.options.assume_canonical && canonical.len() == behind - index;
            if !counted && !self.options.lenient {
                break;
            }
            let logprobs = resolved.logprobs.filter(|_| counted).map(|all| Cow::Borrowed(&all[index..*behind]));
            let tier = if counted { tier::ASSUMED } else { tier::TEXT };
            branch.sample(&canonical, Stretch { sampling, tier, trained: counted, logprobs });
            index = *behind;
        }
        let last = branch.ids.last().copied();
        branch.stopped = index == end && last.is_some_and(|id| self.tokenizer.is_special(id));
        if index < end {
            branch.ended = true;
            let detail = format!("the id of token {index} cannot be known; {} tokens are left out", end - index);
            self.find(resolved.why_unknown(index), turn, index as i32, end - index, detail);
        }
        Ok(())
    }

    /// Logprobs without tokens (T4, T5) where the count fits the canonical tokenization, or text alone (T6).
    fn add_text(
        &mut self,
        turn: usize,
        generation: &'a Generation,
        at: usize,
        foreign: bool,
        sampling: Sampling,
    ) -> Result<()> {
        let Some(body) = self.body(turn, generation, at)? else {
            self.woven.branches[at].ended = true;
            if !generation.tokens.is_empty() || generation.text.is_some() {
                let detail = "the template does not show the body of this turn after its prompt".to_owned();
                self.find(Reason::PrefixNotExtended, turn, -1, generation.tokens.len(), detail);
            }
            return Ok(());
        };
        let before = before(&self.woven.branches[at], self.tokenizer);
        let mut ids = self.tokenizer.ids_behind(&before, &body)?;
        if spell_all(&ids, self.tokenizer) != body.as_bytes() {
            let detail = "the tokenizer changes the text before it cuts it".to_owned();
            self.find(Reason::NormalizerChanged, turn, -1, ids.len(), detail);
        }
        if let Some(first) = self.tokenizer.first_outside(&ids) {
            self.woven.branches[at].ended = true;
            let detail =
                format!("id {} of the text is not in the model's vocabulary; the turn is left out", ids[first]);
            self.find(Reason::VocabOutOfRange, turn, -1, generation.tokens.len(), detail);
            return Ok(());
        }
        let closing = self.scaffold.closing.token.filter(|_| !self.woven.branches[at].cut);
        let logprobs = generation.tokens.logprobs.as_deref().filter(|_| !foreign).unwrap_or_default();
        let counted = logprobs.len() == ids.len() || logprobs.len() == ids.len() + usize::from(closing.is_some());
        let level = match counted && !logprobs.is_empty() {
            true if generation.text.is_some() => tier::ASSUMED,
            true => tier::COUNT,
            false => tier::TEXT_ONLY,
        };
        let given = if level == tier::TEXT_ONLY { self.inserted(generation, (&before, &body), &ids)? } else { 0 };
        if level == tier::TEXT_ONLY || logprobs.len() > ids.len() {
            ids.extend(closing);
        }
        if generation.tokens.is_empty() || foreign {
            self.woven.recorded += if foreign { 0 } else { (ids.len() - given) as u64 };
        }
        let options = self.options;
        let trained = if level == tier::TEXT_ONLY { options.text_only } else { options.assume_canonical };
        if !logprobs.is_empty() && (level == tier::TEXT_ONLY || !trained) {
            let detail = format!("{} logprobs without tokens, the text has {} tokens", logprobs.len(), ids.len());
            self.find(Reason::CountMismatch, turn, -1, logprobs.len(), detail);
        }
        let last = turn + 1 == self.trace.generations.len();
        let branch = &mut self.woven.branches[at];
        branch.stopped = ids.last().copied() == closing && closing.is_some();
        branch.unmarked = level == tier::TEXT_ONLY && closing.is_none() && !branch.cut;
        if branch.unmarked && last && trained {
            let detail = "the template writes no stop token behind the last turn; none is trained".to_owned();
            self.find(Reason::EosMissingInRecord, turn, -1, 1, detail);
        }
        let branch = &mut self.woven.branches[at];
        let (mut index, logprobs) = (0, Some(logprobs).filter(|_| level != tier::TEXT_ONLY));
        while index < ids.len() {
            let behind = alike_version(generation, index, if index < given { given } else { ids.len() });
            let sampling = Sampling { version: version_at(generation, index), ..sampling };
            let logprobs = logprobs.map(|all| Cow::Borrowed(&all[index..behind]));
            let trained = trained && index >= given;
            branch.sample(&ids[index..behind], Stretch { sampling, tier: level, trained, logprobs });
            index = behind;
        }
        Ok(())
    }

    /// How many of the first ids of a text are an empty thought that the template inserts: they are not trained, as
    /// nothing says that they were sampled.
    fn inserted(&self, generation: &Generation, (before, body): (&str, &str), ids: &[u32]) -> Result<usize> {
        let message = self.trace.messages.get(generation.message as usize);
        let Some(message) = message.filter(|_| generation.text.is_none()) else { return Ok(0) };
        let thought = &body[..body::inserted_thought(body, &message.value)];
        let thought = self.tokenizer.ids_behind(before, thought)?;
        Ok(thought.iter().zip(ids).take_while(|(left, right)| left == right).count())
    }

    /// The text that was sampled: as recorded, else as the template writes it, else the message's content.
    fn body(&mut self, turn: usize, generation: &Generation, at: usize) -> Result<Option<String>> {
        if generation.text.is_some() || self.trace.messages.is_empty() {
            return Ok(generation.text.clone());
        }
        let prompt = &self.woven.branches[at].prompt;
        if !prompt.is_empty() {
            let [_, session] = &mut self.memory.sessions;
            return self.scaffold.body(session, self.trace, turn, prompt);
        }
        if matches!(generation.prompt, Prompt::Rendered) {
            return Ok(None);
        }
        let message = self.trace.messages.get(generation.message as usize).map(|message| &message.value);
        Ok(message.and_then(|message| message.get("content")?.as_str()).map(str::to_owned))
    }
}

/// The text at the end of a branch, if what follows has other ids behind it.
fn before(branch: &Branch<'_>, tokenizer: &Tokenizer) -> String {
    if tokenizer.is_apart("any") {
        return String::new();
    }
    let from = branch.ids.iter().rposition(|&id| is_special(id, tokenizer)).unwrap_or(0);
    String::from_utf8_lossy(&spell_all(&branch.ids[from..], tokenizer)).into_owned()
}

/// The policy version of sampled token `index`.
fn version_at(generation: &Generation, index: usize) -> i32 {
    if generation.versions.is_empty() {
        return generation.policy_version;
    }
    let holds = |span: &&VersionSpan| (span.start as usize..span.end as usize).contains(&index);
    generation.versions.iter().find(holds).map_or(generation.policy_version, |span| span.version)
}

/// One past the last of the tokens from `start` on, before `end`, that the same policy version sampled.
fn alike_version(generation: &Generation, start: usize, end: usize) -> usize {
    if generation.versions.is_empty() {
        return end;
    }
    let first = version_at(generation, start);
    (start + 1..end).find(|&index| version_at(generation, index) != first).unwrap_or(end)
}

/// How many logprobs are known.
fn known(logprobs: &[f32]) -> u64 {
    logprobs.iter().map(|logprob| u64::from(!logprob.is_nan())).sum()
}
