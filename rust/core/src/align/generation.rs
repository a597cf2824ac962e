//! Appends a generation to its branch: tokens with their logprobs, or text if the record has no tokens, and the way
//! the generation ended.
//!
//! Servers remove the stop string from the text but keep its tokens in the lists. The text is then shorter than the
//! decoded tokens and may end inside a token. Tokens after a stop string or a stop token, such as the tokens of a second
//! message, are left out. A token with an unknown id ends the branch. Both are counted.

use super::branch::{Branch, SampledAttributes, Sampling};
use super::resolve::{Resolution, Run, decode_all, decode_text, is_special};
use super::trace::TraceAligner;
use super::{filled, prompt_diff, tool_calls, types};
use crate::error::Result;
use crate::findings::Reason;
use crate::tokenizer::Tokenizer;
use crate::trace::{Filled, Generation, Pieces, Prompt, Stop, Trace, VersionSpan, value_in};
use memchr::memmem;
use serde_json::Value;
use std::borrow::Cow;

impl<'a> TraceAligner<'a, '_> {
    pub fn add_sampled(&mut self, turn: usize, generation: &'a Generation, at: usize) -> Result<()> {
        let message = self.trace.messages.get(generation.message as usize).map(|message| &message.value);
        let content = message.and_then(|message| value_in(message, "content")).and_then(Value::as_str);
        let mut resolution = self.resolve(turn, generation, content);
        for finding in &mut resolution.findings {
            finding.turn = turn as i32;
        }
        self.aligned.findings.append(&mut resolution.findings);
        self.aligned.recorded += generation.tokens.len() as u64;
        let sampling = self.sampling(turn, generation);
        let branch = &mut self.aligned.branches[at];
        branch.truncated = is_cut(generation);
        (branch.exceeds_stop, branch.unmarked) = (false, false);
        if resolution.ids.is_empty() || resolution.foreign {
            return self.add_text(turn, generation, at, resolution.foreign, sampling);
        }
        self.check_sum(turn, generation, &resolution);
        self.check_calls(turn, generation, message, &resolution);
        let overrun = overrun(generation, message, &resolution, self.tokenizer);
        let end = self.note_overrun(turn, &resolution, overrun);
        self.aligned.branches[at].exceeds_stop = overrun.is_some();
        self.add_tokens(turn, generation, (&resolution, end), at, sampling)?;
        let reports_stop = matches!(generation.finish_reason.as_deref(), Some("stop" | "tool_calls"));
        let branch = &self.aligned.branches[at];
        let by_text = matches!(generation.stop, Stop::Text(_)) || branch.exceeds_stop;
        if reports_stop && !branch.stopped && !branch.ended && !by_text {
            let detail = "the record says the turn stopped but lists no stop token".to_owned();
            self.report(Reason::EosMissingInRecord, turn, -1, 1, detail);
        }
        Ok(())
    }

    /// Compares recorded ids with the tool calls of the message.
    fn check_calls(
        &mut self,
        turn: usize,
        generation: &Generation,
        message: Option<&Value>,
        resolution: &Resolution<'_>,
    ) {
        let Some((ids, message)) = generation.tokens.ids.as_deref().zip(message) else { return };
        if let Some(missing) = tool_calls::missing_part(message, ids, self.tokenizer) {
            let detail = format!("the listed tokens spell {missing}");
            self.report(Reason::StreamIncomplete, turn, -1, resolution.ids.len(), detail);
        }
    }

    /// Compares the sum of the logprobs with the server's cumulative logprob. Recorders may round to six digits or to
    /// f16.
    fn check_sum(&mut self, turn: usize, generation: &Generation, resolution: &Resolution<'_>) {
        let logprobs = resolution.logprobs.as_deref().filter(|_| !resolution.is_filled());
        let Some((recorded, logprobs)) = generation.cumulative_logprob.zip(logprobs) else { return };
        let sum: f64 = logprobs.iter().map(|&logprob| f64::from(logprob)).sum();
        if (sum - recorded).abs() > 1e-3 + 1e-4 * recorded.abs() {
            let count = logprobs.len();
            let detail = format!("the logprobs sum to {sum:.6}, the record's cumulative logprob is {recorded:.6}");
            self.report(Reason::InvalidLogprob, turn, 0, count, detail);
        }
    }

    /// Reports tokens past the end of the text. Returns one past the last token that belongs to the turn.
    fn note_overrun(&mut self, turn: usize, resolution: &Resolution<'_>, overrun: Option<Overrun>) -> usize {
        let count = resolution.ids.len();
        let Some(Overrun { end, partial }) = overrun else { return count };
        if partial {
            let detail = "the recorded text ends inside this token; it is kept whole".to_owned();
            self.report(Reason::StopStringTruncated, turn, end as i32 - 1, 1, detail);
        }
        if end < count {
            let detail = format!("{} tokens stand behind the end of the recorded text; they are left out", count - end);
            self.report(Reason::StopStringTruncated, turn, end as i32, count - end, detail);
        }
        end
    }

    /// Appends the first `end` tokens.
    fn add_tokens(
        &mut self,
        turn: usize,
        generation: &Generation,
        (resolution, end): (&Resolution<'a>, usize),
        at: usize,
        sampling: Sampling,
    ) -> Result<()> {
        let branch = &mut self.aligned.branches[at];
        let mut index = 0;
        while index < end {
            if resolution.is_known(index) {
                let run_end = alike_version(generation, index, resolution.alike(index, end));
                let logprobs = resolution.logprobs_of(index..run_end);
                let level = resolution.level(index);
                let exact = logprobs.as_deref().filter(|_| branch.may_train() && level != types::FILLED);
                self.aligned.exact += exact.map_or(0, count_known);
                let sampling = Sampling { version: version_at(generation, index), ..sampling };
                branch.push_sampled(
                    &resolution.ids[index..run_end],
                    SampledAttributes { sampling, level, trained: true, logprobs },
                );
                index = run_end;
                continue;
            }
            let run =
                resolution.run_at(index).filter(|_| self.options.allow_unknown_ids || self.options.assume_canonical);
            let Some(Run { end: run_end, bytes, entry, .. }) = run else { break };
            let canonical = if let Some(entry) = entry {
                vec![*entry]
            } else {
                let context = text_before(branch, self.tokenizer);
                self.tokenizer.ids_after(&context, &String::from_utf8_lossy(bytes))?
            };
            if self.tokenizer.first_outside(&canonical).is_some() {
                break;
            }
            let count_matches = self.options.assume_canonical && canonical.len() == run_end - index;
            if !count_matches && !self.options.allow_unknown_ids {
                break;
            }
            let logprobs = resolution.logprobs_of(index..*run_end).filter(|_| count_matches);
            let level = if count_matches { types::ASSUMED_TEXT } else { types::TEXT };
            branch.push_sampled(&canonical, SampledAttributes { sampling, level, trained: count_matches, logprobs });
            index = *run_end;
        }
        let last = branch.ids.last().copied();
        branch.stopped = index == end && last.is_some_and(|id| self.tokenizer.is_special(id));
        if index < end {
            branch.ended = true;
            let detail = format!("the id of token {index} cannot be known; {} tokens are left out", end - index);
            self.report(resolution.why_unknown(index), turn, index as i32, end - index, detail);
        }
        Ok(())
    }

    /// Appends a generation without usable ids. Its logprobs are used (T4, T5) if their count matches the canonical
    /// tokenization; otherwise it is text only (T6), with filled logprobs (T7) if they belong to exactly its ids.
    fn add_text(
        &mut self,
        turn: usize,
        generation: &'a Generation,
        at: usize,
        foreign: bool,
        sampling: Sampling,
    ) -> Result<()> {
        let Some(body) = self.body(turn, generation, at)? else {
            self.aligned.branches[at].ended = true;
            if !generation.tokens.is_empty() || generation.text.is_some() {
                let detail = "the template does not show the body of this turn after its prompt".to_owned();
                self.report(Reason::PrefixNotExtended, turn, -1, generation.tokens.len(), detail);
            }
            return Ok(());
        };
        let context = text_before(&self.aligned.branches[at], self.tokenizer);
        let mut ids = self.tokenizer.ids_after(&context, &body)?;
        if decode_all(&ids, self.tokenizer) != body.as_bytes() {
            let detail = "the tokenizer changes the text before it cuts it".to_owned();
            self.report(Reason::NormalizerChanged, turn, -1, ids.len(), detail);
        }
        if let Some(first) = self.tokenizer.first_outside(&ids) {
            self.aligned.branches[at].ended = true;
            let detail =
                format!("id {} of the text is not in the model's vocabulary; the turn is left out", ids[first]);
            self.report(Reason::VocabOutOfRange, turn, -1, generation.tokens.len(), detail);
            return Ok(());
        }
        let closing = self.scaffold.closing.token.filter(|_| !self.aligned.branches[at].truncated);
        let logprobs = generation.tokens.logprobs.as_deref().filter(|_| !foreign).unwrap_or_default();
        let count_matches = logprobs.len() == ids.len() || logprobs.len() == ids.len() + usize::from(closing.is_some());
        let level = match count_matches && !logprobs.is_empty() {
            true if generation.text.is_some() => types::ASSUMED_TEXT,
            true => types::ASSUMED_LENGTH,
            false => types::TEXT_ONLY,
        };
        let inserted_count =
            if level == types::TEXT_ONLY { self.inserted(generation, (&context, &body), &ids)? } else { 0 };
        if level == types::TEXT_ONLY || logprobs.len() > ids.len() {
            ids.extend(closing);
        }
        if generation.tokens.is_empty() || foreign {
            self.aligned.recorded += if foreign { 0 } else { (ids.len() - inserted_count) as u64 };
        }
        let options = self.options;
        let trained = if level == types::TEXT_ONLY { options.text_only } else { options.assume_canonical };
        let filled = if level == types::TEXT_ONLY { self.filled_text(turn, generation, &ids, foreign) } else { None };
        let sampling = if filled.is_some() { self.sampling(turn, generation) } else { sampling };
        let is_filled = |index: usize| filled.is_some_and(|filled| !filled.logprobs[index].is_nan());
        let all_filled = (0..ids.len()).all(is_filled);
        if !logprobs.is_empty() && (level == types::TEXT_ONLY || !trained) && !all_filled {
            let detail = format!("{} logprobs without tokens, the text has {} tokens", logprobs.len(), ids.len());
            self.report(Reason::CountMismatch, turn, -1, logprobs.len(), detail);
        }
        let last = turn + 1 == self.trace.generations.len();
        let branch = &mut self.aligned.branches[at];
        branch.stopped = ids.last().copied() == closing && closing.is_some();
        branch.unmarked = level == types::TEXT_ONLY && closing.is_none() && !branch.truncated;
        if branch.unmarked && last && (trained || filled.is_some()) {
            let detail = "the template writes no stop token behind the last turn; none is trained".to_owned();
            self.report(Reason::EosMissingInRecord, turn, -1, 1, detail);
        }
        let branch = &mut self.aligned.branches[at];
        let (mut index, logprobs) = (0, Some(logprobs).filter(|_| level != types::TEXT_ONLY));
        while index < ids.len() {
            let run_end =
                alike_version(generation, index, if index < inserted_count { inserted_count } else { ids.len() });
            let run_end = (index + 1..run_end).find(|&at| is_filled(at) != is_filled(index)).unwrap_or(run_end);
            let sampling = Sampling { version: version_at(generation, index), ..sampling };
            let measured = filled.filter(|_| is_filled(index)).map(|filled| filled.logprobs.as_slice());
            let level = if measured.is_some() { types::FILLED } else { level };
            let logprobs = logprobs.or(measured).map(|all| Cow::Borrowed(&all[index..run_end]));
            let trained = (measured.is_some() || trained) && index >= inserted_count;
            branch.push_sampled(&ids[index..run_end], SampledAttributes { sampling, level, trained, logprobs });
            index = run_end;
        }
        Ok(())
    }

    /// Returns the filled logprobs of a text if they belong to exactly these ids. If not, reports why.
    fn filled_text(
        &mut self,
        turn: usize,
        generation: &'a Generation,
        ids: &[u32],
        foreign: bool,
    ) -> Option<&'a Filled> {
        let filled = generation.filled.as_deref()?;
        let count = filled.logprobs.iter().filter(|logprob| !logprob.is_nan()).count();
        let other_vocabulary = || "the record is of another vocabulary".to_owned();
        match foreign.then(other_vocabulary).or_else(|| filled::other_ids(filled, ids, self.tokenizer)) {
            Some(detail) if count > 0 => self.report(Reason::FilledIdsDiffer, turn, 0, count, detail),
            None if count > 0 => self.aligned.filled[turn] = true,
            _ => {}
        }
        self.aligned.filled[turn].then_some(filled)
    }

    /// Returns how many of the first ids of a text are an empty thought that the template inserts. They are not
    /// trained, because nothing shows that they were sampled.
    fn inserted(&self, generation: &Generation, (before, body): (&str, &str), ids: &[u32]) -> Result<usize> {
        let message = self.trace.messages.get(generation.message as usize);
        let Some(message) = message.filter(|_| generation.text.is_none()) else { return Ok(0) };
        let thought = &body[..prompt_diff::inserted_thought(body, &message.value)];
        let thought = self.tokenizer.ids_after(before, thought)?;
        Ok(thought.iter().zip(ids).take_while(|(left, right)| left == right).count())
    }

    /// Returns the text that was sampled: as recorded, else as the template writes it, else the message's content.
    fn body(&mut self, turn: usize, generation: &Generation, at: usize) -> Result<Option<String>> {
        if generation.text.is_some() || self.trace.messages.is_empty() {
            return Ok(generation.text.clone());
        }
        let prompt = &self.aligned.branches[at].prompt;
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

/// Returns the text at the end of a branch if it can change how the next text is tokenized, else an empty string.
fn text_before(branch: &Branch<'_>, tokenizer: &Tokenizer) -> String {
    if tokenizer.is_context_free("any") {
        return String::new();
    }
    let from = branch.ids.iter().rposition(|&id| is_special(id, tokenizer)).unwrap_or(0);
    String::from_utf8_lossy(&decode_all(&branch.ids[from..], tokenizer)).into_owned()
}

/// Returns the policy version of sampled token `index`.
fn version_at(generation: &Generation, index: usize) -> i32 {
    if generation.versions.is_empty() {
        return generation.policy_version;
    }
    let contains_index = |span: &&VersionSpan| (span.start as usize..span.end as usize).contains(&index);
    generation.versions.iter().find(contains_index).map_or(generation.policy_version, |span| span.version)
}

/// Returns the end of the run of tokens from `start` (at most `end`) that the same policy version sampled.
fn alike_version(generation: &Generation, start: usize, end: usize) -> usize {
    if generation.versions.is_empty() {
        return end;
    }
    let first = version_at(generation, start);
    (start + 1..end).find(|&index| version_at(generation, index) != first).unwrap_or(end)
}

/// Counts the logprobs that are not NaN.
fn count_known(logprobs: &[f32]) -> u64 {
    logprobs.iter().map(|logprob| u64::from(!logprob.is_nan())).sum()
}

/// The end of a turn whose tokens continue after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overrun {
    /// One past the last token that belongs to the turn.
    pub end: usize,
    /// True if the last token with a byte of the text also contains bytes after it.
    pub partial: bool,
}

const THOUGHT_END: &str = "</think>";

/// Finds tokens past the text of the generation, or past the text of `message` if the generation has none.
pub fn overrun(
    generation: &Generation,
    message: Option<&Value>,
    resolution: &Resolution<'_>,
    tokenizer: &Tokenizer,
) -> Option<Overrun> {
    if let Some(message) = message.filter(|message| calls(message)) {
        return behind_calls(message, &resolution.ids, tokenizer);
    }
    let content = message.and_then(|message| value_in(message, "content")?.as_str());
    let text = generation.text.as_deref().or(content).filter(|text| !text.is_empty())?;
    let ids = &resolution.ids;
    let stopped = ids.last().is_some_and(|&id| is_special(id, tokenizer));
    let whole = resolution.text_ids.is_some_and(|said| said + usize::from(stopped) >= ids.len());
    let listed = generation.tokens.bytes.as_ref().or(generation.tokens.texts.as_ref());
    let whole = whole || listed.is_some_and(|pieces| are_text(pieces, text.as_bytes(), stopped));
    if whole || !resolution.all_known() || ends_with(ids, text.as_bytes(), tokenizer) {
        return None;
    }
    let spelled = decode_text(&resolution.ids, tokenizer);
    let thinks = message.is_some_and(thinks);
    let length = match &generation.text {
        Some(text) => spelled_length(&spelled, text)?,
        None => end_of_content(&spelled, text, thinks)?,
    };
    let rest = String::from_utf8_lossy(&spelled[length..]);
    let by_string = matches!(&generation.stop, Stop::Text(string) if rest.contains(string));
    // A server may trim white space, and it withholds bytes that may become a character.
    let trimmed = |part: char| part == '\u{FFFD}' || (part.is_whitespace() && generation.text.is_none());
    if rest.is_empty() || !by_string && rest.chars().all(trimmed) {
        return None;
    }
    let (mut at, mut end) = (0, 0);
    for (index, &id) in resolution.ids.iter().enumerate() {
        if at >= length {
            break;
        }
        at += if is_special(id, tokenizer) { 0 } else { tokenizer.token_bytes(id).map_or(0, <[u8]>::len) };
        end = index + 1;
    }
    let partial = at > length;
    let stops = !partial && resolution.ids.get(end).is_some_and(|&id| is_special(id, tokenizer));
    Some(Overrun { end: end + usize::from(stops), partial })
}

/// Finds tokens after the first stop token of a turn that calls tools, if all of its calls come before that token.
fn behind_calls(message: &Value, ids: &[u32], tokenizer: &Tokenizer) -> Option<Overrun> {
    let stops = |&id: &u32| is_special(id, tokenizer) && tokenizer.eos_ids().contains(&id);
    let end = ids.iter().position(stops).map(|stop| stop + 1).filter(|&end| end < ids.len())?;
    tool_calls::missing_part(message, &ids[..end], tokenizer).is_none().then_some(Overrun { end, partial: false })
}

/// Returns true if a message calls a tool. Its text is then only a part of the sampled text.
fn calls(message: &Value) -> bool {
    let has_tool_calls =
        value_in(message, "tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
    has_tool_calls || value_in(message, "function_call").is_some_and(Value::is_object)
}

/// Returns true if a message has its reasoning in a separate field.
fn thinks(message: &Value) -> bool {
    let thought = |key: &&str| value_in(message, key).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    ["reasoning_content", "reasoning", "thinking"].iter().any(thought)
}

/// Returns true if the listed pieces are the text, or the text and the piece of the stop token.
fn are_text(pieces: &Pieces, text: &[u8], stopped: bool) -> bool {
    let last = pieces.ends.len().checked_sub(2).map_or(0, |before| pieces.ends[before] as usize);
    pieces.data.starts_with(text) && (pieces.data.len() == text.len() || stopped && last == text.len())
}

/// Returns true if the ids end in these bytes, optionally followed by one special token. No special token may precede
/// the place where the bytes end for the first time. Only the bytes of the text are walked back.
fn ends_with(ids: &[u32], text: &[u8], tokenizer: &Tokenizer) -> bool {
    let ids = match ids.split_last() {
        Some((last, before)) if is_special(*last, tokenizer) => before,
        _ => ids,
    };
    let mut rest = text;
    for (index, id) in ids.iter().enumerate().rev() {
        let bytes = tokenizer.token_bytes(*id).unwrap_or_default();
        match rest.strip_suffix(bytes) {
            Some(before) => rest = before,
            None => return bytes.ends_with(rest),
        }
        if rest.is_empty() {
            return index == 0
                || !ids[..index].iter().any(|&id| is_special(id, tokenizer))
                || !begins(ids, text, tokenizer);
        }
    }
    rest.is_empty()
}

/// Returns true if the ids start with these bytes, followed by a special token.
fn begins(ids: &[u32], text: &[u8], tokenizer: &Tokenizer) -> bool {
    let mut rest = text;
    for (index, id) in ids.iter().enumerate() {
        match rest.strip_prefix(tokenizer.token_bytes(*id).unwrap_or_default()) {
            Some(suffix) => rest = suffix,
            None => return false,
        }
        if rest.is_empty() {
            return ids.get(index + 1).is_some_and(|&id| is_special(id, tokenizer));
        }
    }
    false
}

/// Returns the number of bytes of `spelled` up to the end of the message's text. The text is searched for after the
/// reasoning, else at the beginning if there is no reasoning, else at its last occurrence.
fn end_of_content(spelled: &[u8], content: &str, thinks: bool) -> Option<usize> {
    let thought = Some(THOUGHT_END).filter(|end| !content.contains(end));
    let start = thought.and_then(|end| Some(memmem::find(spelled, end.as_bytes())? + end.len()));
    if let Some(start) = start {
        let space = spelled[start..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let content = content.trim_start();
        return spelled_length(&spelled[start + space..], content).map(|length| start + space + length);
    }
    let first = if thinks { None } else { spelled_length(spelled, content) };
    first.or_else(|| memmem::rfind(spelled, content.as_bytes()).map(|at| at + content.len()))
}

/// Returns how many bytes of `spelled` decode to `text`, or `None` if `spelled` does not start with it.
fn spelled_length(spelled: &[u8], text: &str) -> Option<usize> {
    if spelled.starts_with(text.as_bytes()) {
        return Some(text.len());
    }
    let mut rest = text;
    let mut length = 0;
    for chunk in spelled.utf8_chunks() {
        if let Some(inside) = chunk.valid().get(..rest.len()).filter(|inside| *inside == rest) {
            return Some(length + inside.len());
        }
        rest = rest.strip_prefix(chunk.valid())?;
        length += chunk.valid().len();
        if !chunk.invalid().is_empty() {
            if rest.is_empty() {
                return Some(length);
            }
            rest = rest.strip_prefix('\u{FFFD}')?;
            length += chunk.invalid().len();
        }
    }
    rest.is_empty().then_some(length)
}

/// The way in which the last generation of a trace ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Ending {
    /// The record does not specify it, and no stop token shows it.
    Unknown = 0,
    /// The policy stopped: by its stop token, by a stop string, or to call a tool.
    Whole = 1,
    /// Ended by a length limit, an abort or a filter.
    Cut = 2,
}

impl Ending {
    /// Returns the ending of the last generation of a trace.
    pub fn of(trace: &Trace, branches: &[Branch<'_>]) -> Self {
        let Some(last) = trace.generations.last() else { return Self::Unknown };
        let turn = Some(trace.generations.len() as i32 - 1);
        let shown = branches.iter().any(|branch| branch.stopped && branch.last_turn() == turn);
        Self::of_generation(last, shown)
    }

    /// Returns the ending by the finish reason. Without one, uses the recorded stop, or the stop token at the end of
    /// the tokens.
    fn of_generation(generation: &Generation, shows_stop: bool) -> Self {
        match generation.finish_reason.as_deref() {
            Some("length" | "abort" | "content_filter" | "incomplete") => Self::Cut,
            Some(_) if !is_cut(generation) => Self::Whole,
            _ if shows_stop || generation.stop != Stop::Unknown => Self::Whole,
            _ => Self::Unknown,
        }
    }
}

/// Returns true if the record reports that anything other than a stop or a tool call ended the generation, even an
/// unknown reason. No stop token was sampled then.
pub fn is_cut(generation: &Generation) -> bool {
    generation.finish_reason.as_deref().is_some_and(|reason| !["stop", "tool_calls", "function_call"].contains(&reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_a_text_with_and_without_that_of_a_stop_token() {
        let pieces = |texts: &[&str]| {
            let mut pieces = Pieces::default();
            for text in texts {
                pieces.push(Some(text.as_bytes()));
            }
            pieces
        };
        assert!(are_text(&pieces(&["a", "b"]), b"ab", false));
        assert!(are_text(&pieces(&["a", "b", "<end>"]), b"ab", true));
        assert!(!are_text(&pieces(&["a", "b", "c"]), b"ab", false));
        assert!(!are_text(&pieces(&["a", "b", "<end>", "c"]), b"ab", true));
        assert!(!are_text(&pieces(&["a", "bc"]), b"ab", true));
        assert!(!are_text(&pieces(&["a"]), b"ab", true));
    }

    #[test]
    fn the_length_of_a_text_counts_replaced_characters() {
        assert_eq!(spelled_length(b"ab}", "ab"), Some(2));
        assert_eq!(spelled_length(b"a\xE3\x81b}", "a\u{FFFD}b"), Some(4));
        assert_eq!(spelled_length(b"a\xE3\x81b}", "a"), Some(1));
        assert_eq!(spelled_length(b"abc", "abd"), None);
        assert_eq!(spelled_length(b"ab", "abc"), None);
        assert_eq!(spelled_length("é!".as_bytes(), "é"), Some(2));
    }
}

#[cfg(test)]
mod ending_tests {
    use super::Ending;
    use crate::trace::{Generation, Stop};

    fn ending(reason: Option<&str>, stop: Stop) -> Ending {
        let generation = Generation { finish_reason: reason.map(str::to_owned), stop, ..Generation::default() };
        Ending::of_generation(&generation, false)
    }

    #[test]
    fn the_finish_reason_says_it_and_else_what_stopped_it() {
        assert_eq!(ending(Some("length"), Stop::Id(2)), Ending::Cut);
        assert_eq!(ending(Some("abort"), Stop::Unknown), Ending::Cut);
        assert_eq!(ending(Some("tool_calls"), Stop::Unknown), Ending::Whole);
        assert_eq!(ending(Some("other"), Stop::Unknown), Ending::Unknown);
        assert_eq!(ending(None, Stop::Text("}".to_owned())), Ending::Whole);
        assert_eq!(ending(None, Stop::Unknown), Ending::Unknown);
    }
}
