//! The sampled tokens of one generation: ids, which of them are known, and logprobs.

use crate::drift::{Finding, Reason};
use crate::tokenizer::Tokenizer;
use std::borrow::Cow;

/// The sampled tokens of one generation, as far as they can be known.
#[derive(Debug, Default)]
pub struct Resolved<'a> {
    /// Ids; 0 where one is not known.
    pub ids: Cow<'a, [u32]>,
    /// Whether each id is known; empty where all are.
    known: Vec<bool>,
    /// Tier of each token; empty where all have `level`.
    tiers: Vec<u8>,
    level: u8,
    /// Logprobs, NaN where not known; `None` where none is.
    pub logprobs: Option<&'a [f32]>,
    /// What was found on the way.
    pub findings: Vec<Finding>,
    /// How many of the ids spell the text, where they begin and end with it, and that was looked at.
    pub said: Option<usize>,
    /// The record is of another vocabulary: nothing of it can be used.
    pub foreign: bool,
    /// Runs of unknown ids whose text is known, in order.
    pub runs: Vec<Run>,
    /// Why ids are unknown: first token of each run of them, and the reason; in order.
    pub unknown: Vec<(usize, Reason)>,
}

/// Tokens `first..end`, whose ids are not known and whose bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    pub first: usize,
    pub end: usize,
    /// What they spell together.
    pub bytes: Vec<u8>,
    /// The ordinary one of the entries that have these bytes, for a single token.
    pub entry: Option<u32>,
}

impl<'a> Resolved<'a> {
    /// Takes ids that are all known, all of one tier.
    pub(super) fn take(&mut self, ids: Cow<'a, [u32]>, level: u8) {
        (self.ids, self.level) = (ids, level);
    }

    /// Takes one id of its own tier; not to be mixed with [`Resolved::take`].
    pub(super) fn push(&mut self, id: Option<u32>, tier: u8) {
        self.ids.to_mut().push(id.unwrap_or(0));
        self.known.push(id.is_some());
        self.tiers.push(tier);
    }

    /// Takes back that the ids of these tokens are known: other entries may have been shown so too.
    pub(super) fn doubt(&mut self, tokens: &[usize], reason: Reason, tokenizer: &Tokenizer) {
        self.known.resize(self.ids.len(), true);
        for &first in tokens {
            let id = std::mem::take(&mut self.ids.to_mut()[first]);
            self.known[first] = false;
            self.unknown.push((first, reason));
            let bytes = tokenizer.token_bytes(id).unwrap_or_default().to_vec();
            let entry = tokenizer.id_of_bytes(&bytes).or(Some(id));
            self.runs.push(Run { first, end: first + 1, bytes, entry });
        }
        self.unknown.sort_by_key(|(first, _)| *first);
        self.runs.sort_by_key(|run| run.first);
    }

    /// The run that begins at token `first`.
    pub fn run_at(&self, first: usize) -> Option<&Run> {
        self.runs.binary_search_by_key(&first, |run| run.first).ok().map(|at| &self.runs[at])
    }

    pub fn is_known(&self, index: usize) -> bool {
        self.known.get(index).copied().unwrap_or(index < self.ids.len())
    }

    pub fn all_known(&self) -> bool {
        !self.known.contains(&false)
    }

    /// How many tokens stand before the first whose id is not known.
    pub fn known_first(&self) -> usize {
        self.known.iter().position(|known| !known).unwrap_or(self.ids.len())
    }

    pub fn tier(&self, index: usize) -> u8 {
        self.tiers.get(index).copied().unwrap_or(self.level)
    }

    /// Logprob of token `index`, NaN where it is not known.
    pub fn logprob(&self, index: usize) -> f32 {
        self.logprobs.map_or(f32::NAN, |logprobs| logprobs[index])
    }

    /// One past the last of the known tokens from `start` on, before `end`, that have the tier of the first.
    pub fn alike(&self, start: usize, end: usize) -> usize {
        let level = self.tier(start);
        let known = self.known.get(start..end).map_or(end - start, |known| known.iter().take_while(|k| **k).count());
        let tiers = self.tiers.get(start..end);
        let same = tiers.map_or(end - start, |tiers| tiers.iter().take_while(|tier| **tier == level).count());
        start + known.min(same)
    }

    /// Why the id of token `index` is not known.
    pub fn why_unknown(&self, index: usize) -> Reason {
        let behind = self.unknown.partition_point(|(first, _)| *first <= index);
        self.unknown[..behind].last().map_or(Reason::PartialUtf8, |(_, reason)| *reason)
    }

    pub(super) fn find(&mut self, reason: Reason, token: usize, count: usize, detail: String) {
        let finding = Finding { reason, turn: 0, token: token as i32, count: count as i32, detail };
        self.findings.push(finding);
    }
}
