//! One branch: the token sequence that a forward pass sees, built generation by generation.
//!
//! A branch records the messages it covers and the rendered prompt of its last generation. The next generation uses
//! both to decide whether it extends the branch. Values that consecutive tokens share are stored once per span;
//! `output` turns them into columns. `trace` and its neighbouring files make the decisions.

use super::prompt::Text;
use super::types;
use std::borrow::Cow;
use std::sync::Arc;

/// The tokens of one branch and the state of its last generation.
#[derive(Debug, Clone, Default)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts about its end")]
pub struct Branch<'a> {
    pub ids: Vec<u32>,
    /// One entry per token: PROMPT, TEMPLATE or SAMPLED.
    pub source: Vec<u8>,
    /// Spans of sampled tokens, in order and disjoint.
    pub sampled_spans: Vec<SampledSpan<'a>>,
    /// Rows of per-token extras (such as routed experts) that belong to tokens of this branch.
    pub extras: Vec<Rows>,
    /// Messages that the branch covers: indices into the trace's pool.
    pub path: Vec<u32>,
    /// Rendered prompt of the last generation; empty if it was not rendered.
    pub prompt: Arc<str>,
    /// Index of the first token of the last generation.
    pub body: usize,
    /// True if the last generation ended in a special token that it sampled.
    pub stopped: bool,
    /// True if the last generation was truncated by a length limit, a filter or an abort.
    pub truncated: bool,
    /// True if the last generation is text after which the template writes no stop token. The marker of the next role
    /// may then act as one.
    pub unmarked: bool,
    /// True if tokens of the last generation continue past the stop string, so that the text after the turn does not
    /// contain them.
    pub exceeds_stop: bool,
    /// True if the id of a token is unknown. Nothing can follow such a token.
    pub ended: bool,
    /// True if the tokens before the branch are not recorded. No token of such a branch is trained.
    pub prefix_unknown: bool,
    /// True if the branch contains an image, audio or video. No token after it is trained.
    pub follows_media: bool,
    /// Number of leading tokens that were already searched for media placeholders.
    pub searched_for_media: usize,
}

/// Values that all tokens of a generation share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    pub turn: i32,
    /// Policy version; -1 if unknown.
    pub version: i32,
    /// 1 for raw logprobs, 1/temperature for processed logprobs.
    pub inv_temperature: f32,
}

/// Values that consecutive sampled tokens share, and their logprobs.
#[derive(Debug, Clone)]
pub struct SampledAttributes<'a> {
    pub sampling: Sampling,
    pub level: u8,
    /// True if these tokens are trained.
    pub trained: bool,
    /// One logprob per token; `None` if all are unknown.
    pub logprobs: Option<Cow<'a, [f32]>>,
}

/// Sampled attributes with their position: tokens `start..end` of the branch.
#[derive(Debug, Clone)]
pub struct SampledSpan<'a> {
    pub start: usize,
    pub end: usize,
    pub attributes: SampledAttributes<'a>,
}

/// Maps rows `row..row + count` of extra `extra` of generation `turn` to the tokens from `start` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Name of the extra.
    pub name: &'static str,
    pub turn: u32,
    pub extra: u32,
    pub start: usize,
    pub row: usize,
    pub count: usize,
}

impl Rows {
    /// Returns the part of these rows that belongs to tokens before `end`, or `None` if that part is empty.
    pub fn until(self, end: usize) -> Option<Self> {
        let count = self.count.min(end.checked_sub(self.start)?);
        (count > 0).then_some(Self { count, ..self })
    }
}

impl<'a> Branch<'a> {
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Appends the stop token of the last sampled text as one more token of its generation. No logprob was filled for
    /// it, so after filled tokens it is trained only if text is (`text_trains`).
    pub fn stop(&mut self, id: u32, text_trains: bool) {
        let Some(last) = self.sampled_spans.last().filter(|last| last.end == self.ids.len()) else { return };
        let mut attributes = SampledAttributes { logprobs: None, ..last.attributes };
        if attributes.level == types::FILLED {
            (attributes.level, attributes.trained) = (types::TEXT_ONLY, text_trains);
        }
        self.push_sampled(&[id], attributes);
        (self.stopped, self.unmarked) = (true, false);
    }

    /// Appends text that was not sampled.
    pub fn push_unsampled(&mut self, text: Text) {
        if self.ids.is_empty() {
            (self.ids, self.source) = (text.ids, text.sources);
        } else {
            self.ids.extend_from_slice(&text.ids);
            self.source.extend_from_slice(&text.sources);
        }
    }

    /// Appends sampled tokens.
    pub fn push_sampled(&mut self, ids: &[u32], attributes: SampledAttributes<'a>) {
        let start = self.len();
        self.ids.extend_from_slice(ids);
        self.source.resize(self.ids.len(), types::SAMPLED);
        self.mark(start, self.ids.len(), attributes);
    }

    /// Marks tokens `start..end` as sampled and stores their shared values. The range must follow every range that was
    /// marked before.
    pub fn mark(&mut self, start: usize, end: usize, attributes: SampledAttributes<'a>) {
        if start < end {
            self.source[start..end].fill(types::SAMPLED);
            let trained = attributes.trained && self.may_train();
            self.sampled_spans.push(SampledSpan {
                start,
                end,
                attributes: SampledAttributes { trained, ..attributes },
            });
        }
    }

    /// Returns true if the recorded ids are the full context of the next sampled token: nothing is missing before them
    /// and they contain no media.
    pub fn may_train(&self) -> bool {
        !self.prefix_unknown && !self.follows_media
    }

    /// Returns the generation that sampled token `at`, or `None` if it was not sampled.
    pub fn turn_at(&self, at: usize) -> Option<i32> {
        let span = self.sampled_spans.get(self.sampled_spans.partition_point(|span| span.end <= at))?;
        (span.start <= at).then_some(span.attributes.sampling.turn)
    }

    /// Returns the generation of the last sampled token.
    pub fn last_turn(&self) -> Option<i32> {
        self.sampled_spans.last().map(|span| span.attributes.sampling.turn)
    }

    /// Creates a branch over `prompt`. Tokens that it shares with `other` and that were sampled there stay marked as
    /// sampled. They are trained in `other` only.
    pub fn fork(prompt: Text, other: Option<&Branch<'a>>) -> Self {
        let mut branch = Self::default();
        branch.push_unsampled(prompt);
        let Some(other) = other else { return branch };
        let shared = common_prefix(&branch.ids, &other.ids);
        branch.share(other, shared);
        branch
    }

    /// Creates a branch over the first `length` tokens of `other`. Its sampled tokens are trained in `other` only.
    pub fn fork_at(other: &Branch<'a>, length: usize) -> Self {
        let ids = other.ids[..length].to_vec();
        let source = vec![types::PROMPT; length];
        let mut branch = Self { ids, source, prefix_unknown: other.prefix_unknown, ..Self::default() };
        branch.share(other, length);
        branch
    }

    fn share(&mut self, other: &Branch<'a>, shared: usize) {
        self.source[..shared].copy_from_slice(&other.source[..shared]);
        for span in other.sampled_spans.iter().take_while(|span| span.start < shared) {
            let untrained = SampledAttributes { trained: false, logprobs: None, ..span.attributes };
            self.sampled_spans.push(SampledSpan {
                start: span.start,
                end: span.end.min(shared),
                attributes: untrained,
            });
        }
        self.extras = other.extras.iter().filter_map(|rows| rows.until(shared)).collect();
    }
}

/// Returns the length of the common prefix of two id lists or two texts.
pub fn common_prefix<T: PartialEq>(left: &[T], right: &[T]) -> usize {
    const BLOCK: usize = 32;
    let equal_blocks = left.chunks_exact(BLOCK).zip(right.chunks_exact(BLOCK)).take_while(|(a, b)| a == b).count();
    let start = equal_blocks * BLOCK;
    start + left[start..].iter().zip(&right[start..]).take_while(|(a, b)| a == b).count()
}

/// Returns the length of the common suffix of two id lists.
pub fn common_suffix(left: &[u32], right: &[u32]) -> usize {
    left.iter().rev().zip(right.iter().rev()).take_while(|(a, b)| a == b).count()
}
