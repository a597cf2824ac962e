//! One branch: the token sequence that a forward pass sees, built generation by generation.
//!
//! A branch records the messages it covers and the rendered prompt of its last generation. The next generation uses
//! both to decide whether it extends the branch. Values that consecutive tokens share are stored once per stretch;
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
    /// One entry per token: GIVEN, TEMPLATE or SAMPLED.
    pub source: Vec<u8>,
    /// Stretches of sampled tokens, in order and disjoint.
    pub drawn: Vec<Drawn<'a>>,
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
    /// True if the last generation was cut off by a length limit, a filter or an abort.
    pub cut: bool,
    /// True if the last generation is text after which the template writes no stop token. The marker of the next role
    /// may then act as one.
    pub unmarked: bool,
    /// True if tokens of the last generation continue past the stop string, so that the text after the turn does not
    /// contain them.
    pub overrun: bool,
    /// True if the id of a token is unknown. Nothing can follow such a token.
    pub ended: bool,
    /// True if the tokens before the branch are not recorded. No token of such a branch is trained.
    pub headless: bool,
    /// True if the branch contains an image, audio or video. No token after it is trained.
    pub behind_media: bool,
    /// Number of leading tokens that were already searched for media placeholders.
    pub looked: usize,
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
pub struct Stretch<'a> {
    pub sampling: Sampling,
    pub tier: u8,
    /// True if these tokens are trained.
    pub trained: bool,
    /// One logprob per token; `None` if no logprob is known.
    pub logprobs: Option<Cow<'a, [f32]>>,
}

/// A stretch with its position: tokens `start..end` of the branch.
#[derive(Debug, Clone)]
pub struct Drawn<'a> {
    pub start: usize,
    pub end: usize,
    pub stretch: Stretch<'a>,
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

    /// Appends the stop token of the last sampled text as one more token of its generation.
    pub fn stop(&mut self, id: u32) {
        let Some(last) = self.drawn.last().filter(|last| last.end == self.ids.len()) else { return };
        let stretch = Stretch { logprobs: None, ..last.stretch };
        self.sample(&[id], stretch);
        (self.stopped, self.unmarked) = (true, false);
    }

    /// Appends text that was not sampled.
    pub fn give(&mut self, text: Text) {
        if self.ids.is_empty() {
            (self.ids, self.source) = (text.ids, text.sources);
        } else {
            self.ids.extend_from_slice(&text.ids);
            self.source.extend_from_slice(&text.sources);
        }
    }

    /// Appends sampled tokens.
    pub fn sample(&mut self, ids: &[u32], stretch: Stretch<'a>) {
        let start = self.len();
        self.ids.extend_from_slice(ids);
        self.source.resize(self.ids.len(), types::SAMPLED);
        self.mark(start, self.ids.len(), stretch);
    }

    /// Marks tokens `start..end` as sampled and stores their shared values. The range must follow every range that was
    /// marked before.
    pub fn mark(&mut self, start: usize, end: usize, stretch: Stretch<'a>) {
        if start < end {
            self.source[start..end].fill(types::SAMPLED);
            let trained = stretch.trained && self.may_train();
            self.drawn.push(Drawn { start, end, stretch: Stretch { trained, ..stretch } });
        }
    }

    /// Returns true if the recorded ids are the full context of what is sampled next: nothing is missing before them
    /// and they contain no media.
    pub fn may_train(&self) -> bool {
        !self.headless && !self.behind_media
    }

    /// Returns the generation that sampled token `at`, or `None` if it was not sampled.
    pub fn turn_at(&self, at: usize) -> Option<i32> {
        let drawn = self.drawn.get(self.drawn.partition_point(|drawn| drawn.end <= at))?;
        (drawn.start <= at).then_some(drawn.stretch.sampling.turn)
    }

    /// Returns the generation of the last sampled token.
    pub fn last_turn(&self) -> Option<i32> {
        self.drawn.last().map(|drawn| drawn.stretch.sampling.turn)
    }

    /// Creates a branch over `prompt`. Tokens that it shares with `other` and that were sampled there stay marked as
    /// sampled. They are trained in `other` only.
    pub fn fork(prompt: Text, other: Option<&Branch<'a>>) -> Self {
        let mut branch = Self::default();
        branch.give(prompt);
        let Some(other) = other else { return branch };
        let shared = common_prefix(&branch.ids, &other.ids);
        branch.share(other, shared);
        branch
    }

    /// Creates a branch over the first `length` tokens of `other`. Its sampled tokens are trained in `other` only.
    pub fn stem(other: &Branch<'a>, length: usize) -> Self {
        let ids = other.ids[..length].to_vec();
        let source = vec![types::GIVEN; length];
        let mut branch = Self { ids, source, headless: other.headless, ..Self::default() };
        branch.share(other, length);
        branch
    }

    fn share(&mut self, other: &Branch<'a>, shared: usize) {
        self.source[..shared].copy_from_slice(&other.source[..shared]);
        for drawn in other.drawn.iter().take_while(|drawn| drawn.start < shared) {
            let untrained = Stretch { trained: false, logprobs: None, ..drawn.stretch };
            self.drawn.push(Drawn { start: drawn.start, end: drawn.end.min(shared), stretch: untrained });
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
