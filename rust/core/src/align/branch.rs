//! One branch: what a forward pass will see, grown stretch by stretch.
//!
//! A branch knows which messages it covers and the rendered prompt of its last generation, so that the next one can
//! tell whether it extends it. What the tokens of a stretch share is held once, and becomes columns in `output`. The
//! decisions are in `trace` and the files beside it.

use super::prompt::Text;
use super::types;
use std::borrow::Cow;
use std::sync::Arc;

/// The tokens of one branch, and where it stands.
#[derive(Debug, Clone, Default)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts about its end")]
pub struct Branch<'a> {
    pub ids: Vec<u32>,
    /// GIVEN, TEMPLATE or SAMPLED.
    pub source: Vec<u8>,
    /// The sampled ones, in order and disjoint.
    pub drawn: Vec<Drawn<'a>>,
    /// Rows of further numbers that belong to its tokens.
    pub extras: Vec<Rows>,
    /// Messages covered: indices into the trace's pool.
    pub path: Vec<u32>,
    /// Rendered prompt of the last generation; empty where it was not rendered.
    pub prompt: Arc<str>,
    /// First token of the last generation.
    pub body: usize,
    /// The last generation ended in a special token that it sampled.
    pub stopped: bool,
    /// The last generation was cut: by length, a filter, an abort.
    pub cut: bool,
    /// The last generation is text behind which the template writes no stop token of its own: the marker of the next role
    /// may be one.
    pub unmarked: bool,
    /// Tokens of the last generation from here on go past the stop string: the text after it does not hold them.
    pub overrun: bool,
    /// An id could not be known: nothing can follow.
    pub ended: bool,
    /// What stood before it is not recorded: nothing in it is trained.
    pub headless: bool,
    /// A picture, sound or video stands in it: nothing behind is trained.
    pub behind_media: bool,
    /// How many of its tokens were looked through for placeholders of media.
    pub looked: usize,
}

/// What belongs to every token of a generation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    pub turn: i32,
    /// Policy version, -1 unknown.
    pub version: i32,
    /// 1 for raw logprobs, 1/temperature for processed ones.
    pub inv_temperature: f32,
}

/// What sampled tokens side by side have in common, and their logprobs.
#[derive(Debug, Clone)]
pub struct Stretch<'a> {
    pub sampling: Sampling,
    pub tier: u8,
    /// Whether they are terms.
    pub trained: bool,
    /// One for each token; `None` where none is known.
    pub logprobs: Option<Cow<'a, [f32]>>,
}

/// A stretch where it stands: tokens `start..end`.
#[derive(Debug, Clone)]
pub struct Drawn<'a> {
    pub start: usize,
    pub end: usize,
    pub stretch: Stretch<'a>,
}

/// Rows `row..row + count` of extra `extra` of generation `turn` belong to the tokens from `start` on.
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
    /// What of it belongs to the tokens before `end`.
    pub fn until(self, end: usize) -> Option<Self> {
        let count = self.count.min(end.checked_sub(self.start)?);
        (count > 0).then_some(Self { count, ..self })
    }
}

impl<'a> Branch<'a> {
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Appends the stop token of text that was sampled last, as one more token of its generation.
    pub fn stop(&mut self, id: u32) {
        let Some(last) = self.drawn.last().filter(|last| last.end == self.ids.len()) else { return };
        let stretch = Stretch { logprobs: None, ..last.stretch };
        self.sample(&[id], stretch);
        (self.stopped, self.unmarked) = (true, false);
    }

    /// Appends unsampled text.
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

    /// Says what tokens `start..end` have, which stand behind all that were said before.
    pub fn mark(&mut self, start: usize, end: usize, stretch: Stretch<'a>) {
        if start < end {
            self.source[start..end].fill(types::SAMPLED);
            let trained = stretch.trained && self.may_train();
            self.drawn.push(Drawn { start, end, stretch: Stretch { trained, ..stretch } });
        }
    }

    /// Whether what is sampled at its end was sampled after what its ids say.
    pub fn may_train(&self) -> bool {
        !self.headless && !self.behind_media
    }

    /// The generation that sampled token `at`, if one did.
    pub fn turn_at(&self, at: usize) -> Option<i32> {
        let drawn = self.drawn.get(self.drawn.partition_point(|drawn| drawn.end <= at))?;
        (drawn.start <= at).then_some(drawn.stretch.sampling.turn)
    }

    /// The generation of the last sampled token.
    pub fn last_turn(&self) -> Option<i32> {
        self.drawn.last().map(|drawn| drawn.stretch.sampling.turn)
    }

    /// A new branch over `prompt`. Where it follows `other`, sampled tokens stay sampled, and are trained only there.
    pub fn fork(prompt: Text, other: Option<&Branch<'a>>) -> Self {
        let mut branch = Self::default();
        branch.give(prompt);
        let Some(other) = other else { return branch };
        let shared = common_prefix(&branch.ids, &other.ids);
        branch.share(other, shared);
        branch
    }

    /// A new branch over the first `length` tokens of `other`, whose sampled tokens are trained only there.
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

/// Length of the common prefix of two lists of ids, or of two texts.
pub fn common_prefix<T: PartialEq>(left: &[T], right: &[T]) -> usize {
    const BLOCK: usize = 32;
    let equal = left.chunks_exact(BLOCK).zip(right.chunks_exact(BLOCK)).take_while(|(a, b)| a == b).count();
    let from = equal * BLOCK;
    from + left[from..].iter().zip(&right[from..]).take_while(|(a, b)| a == b).count()
}

/// Length of the common suffix of two id lists.
pub fn common_suffix(left: &[u32], right: &[u32]) -> usize {
    left.iter().rev().zip(right.iter().rev()).take_while(|(a, b)| a == b).count()
}
