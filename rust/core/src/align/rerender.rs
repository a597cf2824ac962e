//! Align mode: the ids are the ids of the rendered conversation, and each recorded token passes its logprob to the
//! rendered token with the same bytes.
//!
//! This mode is for trainers that require re-rendered ids. A rendered token has no logprob and is masked if it covers
//! several recorded tokens, part of one, or parts of two. Tokens after the first such token of a turn were sampled
//! after other ids; they are masked too if `strict` is set.

use super::branch::{Branch, SampledAttributes, Sampling};
use super::prompt::Text;
use super::resolve::{Resolution, decode_all, excerpt};
use super::trace::{AlignedTrace, TraceAligner};
use super::types::{self, Merge};
use super::{diff, prompt_diff};
use crate::error::Result;
use crate::findings::Reason;
use crate::template::Rendered;
use crate::tokenizer::Tokenizer;
use crate::trace::Generation;
use serde_json::Value;
use std::ops::Range;
use std::sync::Arc;

/// The values that one token of the branch receives from a recorded token.
#[derive(Clone, Copy)]
struct TokenValues {
    logprob: f32,
    level: u8,
}

/// A rendered token with received values, and whether its turn is trained in this branch.
#[derive(Clone, Copy)]
struct Cell {
    token_values: TokenValues,
    own: bool,
    trained: bool,
    sampling: Sampling,
}

impl Cell {
    /// Returns the values that neighbouring tokens must share to be in one stretch.
    fn kind(&self) -> (Sampling, u8, bool) {
        (self.sampling, self.token_values.level, self.trained)
    }
}

impl<'a> TraceAligner<'a, '_> {
    /// Builds one branch for each conversation that no later call continues.
    pub fn rerender(mut self) -> Result<AlignedTrace<'a>> {
        let generations = &self.trace.generations;
        let path = |generation: &Generation| {
            let mut path = generation.context.clone();
            path.push(generation.message);
            path
        };
        let mut assigned = vec![false; generations.len()];
        for turn in 0..generations.len() {
            let messages = path(&generations[turn]);
            let goes_on = generations[turn + 1..].iter().any(|later| later.context.starts_with(&messages));
            if goes_on {
                continue;
            }
            let rendered = self.render(turn, &messages, false);
            let rendered = rendered.map_err(|error| error.in_turn(turn).at(&self.trace.location))?;
            let conversation = Generation { context: messages.clone(), ..Generation::default() };
            self.check_shown(turn, &conversation, Some(&rendered), None);
            let text = self.scaffold.encode(&rendered, 0)?;
            let outside = self.tokenizer.first_outside(&text.ids).map(|at| text.ids[at]);
            let (_, ends) = self.tokenizer.encode_with_ends_shared(Arc::clone(&rendered.text), 0)?;
            let mut cells = vec![None; text.ids.len()];
            for earlier in 0..=turn {
                if messages.starts_with(&path(&generations[earlier])) {
                    let own = !std::mem::replace(&mut assigned[earlier], true);
                    if let Some(id) = outside {
                        let problem =
                            "of the rendered conversation is not in the model's vocabulary; the turn is left out";
                        if own {
                            let detail = format!("id {id} {problem}");
                            self.leave_out(earlier, &generations[earlier], Reason::VocabOutOfRange, detail);
                        }
                        continue;
                    }
                    self.lend_turn(earlier, own, (&rendered, &text, &ends), &mut cells)?;
                }
            }
            if outside.is_some() {
                continue;
            }
            let mut branch = Branch::default();
            branch.push_unsampled(text);
            mark(&mut branch, &cells);
            self.aligned.branches.push(branch);
        }
        Ok(self.aligned)
    }

    /// Sets the values of generation `turn` on the tokens that show it. `own` is true if the turn is trained in this
    /// branch.
    fn lend_turn(
        &mut self,
        turn: usize,
        own: bool,
        (rendered, text, ends): (&Rendered, &Text, &[u32]),
        cells: &mut [Option<Cell>],
    ) -> Result<()> {
        let generation = &self.trace.generations[turn];
        let message = self.trace.messages.get(generation.message as usize).map(|message| &message.value);
        let content = message.and_then(|message| message.get("content")).and_then(Value::as_str);
        let mut resolution = self.resolve(turn, generation, content);
        if own {
            self.aligned.recorded += generation.tokens.len() as u64;
            resolution.findings.iter_mut().for_each(|finding| finding.turn = turn as i32);
            self.aligned.findings.append(&mut resolution.findings);
        }
        if resolution.foreign || resolution.ids.is_empty() {
            let count = generation.tokens.len();
            if own && !resolution.foreign && count > 0 {
                let detail =
                    format!("{count} logprobs without tokens: no rendered token can be told to be one of them");
                self.report(Reason::CountMismatch, turn, 0, count, detail);
            }
            return Ok(());
        }
        if own && !resolution.all_known() {
            let (first, count) = (resolution.known_first(), resolution.ids.len());
            let detail = format!("the id of token {first} cannot be known; {} tokens are left out", count - first);
            self.report(resolution.why_unknown(first), turn, first as i32, count - first, detail);
        }
        let Some(span) = self.span_of(turn, rendered)? else {
            if own {
                let detail = "the rendered conversation does not show this turn behind its prompt".to_owned();
                self.report(Reason::PrefixNotExtended, turn, 0, resolution.ids.len(), detail);
            }
            return Ok(());
        };
        let media = self.media_in_prompt(generation);
        let token_values = self.match_tokens(turn, own, &resolution, &span, (rendered, text, ends), message);
        let sampling = self.sampling(turn, generation);
        let trained = own && media.is_none();
        if let Some(media) = media.filter(|_| own) {
            self.hold(turn, token_values.len(), media);
        }
        for (at, token_values) in token_values {
            let is_exact = trained && !token_values.logprob.is_nan() && token_values.level != types::FILLED;
            self.aligned.exact += u64::from(is_exact);
            cells[at] = Some(Cell { token_values, own, trained, sampling });
        }
        Ok(())
    }

    /// Returns the byte range in which the rendered text shows the body of a generation.
    fn span_of(&mut self, turn: usize, rendered: &Rendered) -> Result<Option<Range<usize>>> {
        let generation = &self.trace.generations[turn];
        let prompt = self.render(turn, &generation.context, true)?.text;
        if !rendered.text.starts_with(&*prompt) {
            return Ok(None);
        }
        let index = generation.context.len() as u32;
        let spans = rendered.spans.iter().filter(|span| span.message == index && span.start >= prompt.len());
        let last = spans.map(|span| span.end).max().unwrap_or(prompt.len());
        let closer = self.scaffold.closer.as_str();
        let end = if closer.is_empty() { None } else { rendered.text[last..].find(closer).map(|at| last + at) };
        Ok(Some(prompt.len()..end.unwrap_or(rendered.text.len())))
    }

    /// Returns, for each rendered token of the turn that receives values, its index in the branch and the values.
    fn match_tokens(
        &mut self,
        turn: usize,
        own: bool,
        resolution: &Resolution<'_>,
        span: &Range<usize>,
        (rendered, text, ends): (&Rendered, &Text, &[u32]),
        message: Option<&Value>,
    ) -> Vec<(usize, TokenValues)> {
        let stop = resolution
            .ids
            .len()
            .checked_sub(1)
            .filter(|&last| resolution.is_known(last) && self.tokenizer.is_special(resolution.ids[last]));
        let known = resolution.known_first().min(stop.unwrap_or(usize::MAX));
        let spelled = decode_all(&resolution.ids[..known], self.tokenizer);
        let body = &rendered.text[span.clone()];
        let starts = starts_in(&spelled, body.as_bytes(), &resolution.ids[..known], self.tokenizer);
        let first = ends.partition_point(|&end| end as usize <= span.start);
        let mut token_values = Vec::new();
        let (mut exact, mut clean, mut masked) = (0, true, 0);
        let mut at = first;
        while at < ends.len() && (ends[at] as usize) <= span.end {
            let from = if at == 0 { 0 } else { ends[at - 1] as usize };
            let source = self.one(resolution, &starts, (from, ends[at] as usize, span.start), text.ids[at]);
            let is_same = source.is_some_and(|source| source.1);
            clean &= is_same;
            exact += usize::from(clean);
            match source {
                Some((values, _)) if clean || !self.options.strict => token_values.push((at, values)),
                _ => masked += 1,
            }
            at += 1;
        }
        if let Some(stop) = stop.filter(|_| known == stop.unwrap_or(0) && (clean || !self.options.strict)) {
            if text.ids.get(at) == Some(&resolution.ids[stop]) {
                token_values
                    .push((at, TokenValues { logprob: resolution.logprob(stop), level: resolution.level(stop) }));
            } else if own {
                let detail = format!("sampled stop token {}, the template closes otherwise", resolution.ids[stop]);
                self.report(Reason::StopTokenDiffers, turn, stop as i32, 1, detail);
            }
        }
        if own && masked > 0 {
            self.note_masked(turn, (exact, masked), &spelled, body, message);
        }
        token_values
    }

    fn note_masked(
        &mut self,
        turn: usize,
        (exact, masked): (usize, usize),
        spelled: &[u8],
        body: &str,
        message: Option<&Value>,
    ) {
        let shown = format!("sampled {}, rendered {}", excerpt(spelled), excerpt(body.as_bytes()));
        let detail = format!("{masked} rendered tokens masked, exact_prefix_len {exact}; {shown}");
        if spelled == body.as_bytes() {
            return self.report(Reason::NoncanonicalBpe, turn, exact as i32, masked, detail);
        }
        let difference = prompt_diff::difference(spelled, spelled, body, message.unwrap_or(&Value::Null));
        for &reason in difference.reasons {
            self.report(reason, turn, exact as i32, masked, detail.clone());
        }
    }

    /// Returns the values for the rendered token over bytes `from..end`, and whether it is the sampled token itself.
    fn one(
        &self,
        resolution: &Resolution<'_>,
        starts: &[(usize, usize, usize)],
        (from, end, body): (usize, usize, usize),
        id: u32,
    ) -> Option<(TokenValues, bool)> {
        let (from, end) = (from.checked_sub(body)?, end - body);
        let first = starts.binary_search_by_key(&from, |(start, _, _)| *start).ok()?;
        let count = starts[first..].iter().take_while(|(_, last, _)| *last <= end).count();
        let run = &starts[first..first + count];
        let joined = run.windows(2).all(|pair| pair[0].1 == pair[1].0 && pair[0].2 + 1 == pair[1].2);
        if run.last()?.1 != end || !joined {
            return None;
        }
        let token = run[0].2;
        if run.len() == 1 {
            let same = resolution.ids[token] == id;
            let token_values = TokenValues { logprob: resolution.logprob(token), level: resolution.level(token) };
            return same.then_some((token_values, true));
        }
        let sum = || run.iter().map(|(_, _, token)| resolution.logprob(*token)).sum();
        let is_filled = run.iter().any(|(_, _, token)| resolution.level(*token) == types::FILLED);
        let level = if is_filled { types::FILLED } else { types::ASSUMED_TEXT };
        (self.options.merge == Merge::Sum).then(|| (TokenValues { logprob: sum(), level }, false))
    }
}

/// Returns start, end (bytes of `body`) and index of the recorded tokens whose bytes occur in `body`.
fn starts_in(spelled: &[u8], body: &[u8], ids: &[u32], tokenizer: &Tokenizer) -> Vec<(usize, usize, usize)> {
    let equal_runs = diff::equal_runs(spelled, body);
    let mut runs = equal_runs.iter().peekable();
    let mut tokens = Vec::new();
    let mut at = 0;
    for (index, &id) in ids.iter().enumerate() {
        let end = at + tokenizer.token_bytes(id).map_or(0, <[u8]>::len);
        while runs.peek().is_some_and(|run| run.left + run.length < end) {
            runs.next();
        }
        if let Some(run) = runs.peek().filter(|run| run.left <= at && end > at) {
            tokens.push((run.right + at - run.left, run.right + end - run.left, index));
        }
        at = end;
    }
    tokens
}

/// Writes the received values into the branch.
fn mark(branch: &mut Branch<'_>, cells: &[Option<Cell>]) {
    let mut at = 0;
    for run in cells.chunk_by(|a, b| a.map(|a| a.kind()) == b.map(|b| b.kind())) {
        let (start, end) = (at, at + run.len());
        at = end;
        let Some(first) = run[0] else { continue };
        let logprob = |cell: &Cell| if cell.own { cell.token_values.logprob } else { f32::NAN };
        let logprobs = Some(run.iter().flatten().map(logprob).collect());
        let (sampling, level, trained) = first.kind();
        branch.mark(start, end, SampledAttributes { sampling, level, trained, logprobs });
    }
}
