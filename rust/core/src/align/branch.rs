//! One branch: what a forward pass will see, grown token by token.
//!
//! A branch knows which messages it covers and the rendered prompt of its last generation, so that the next one can
//! tell whether it extends it. Arrays only; the decisions are in `weave` and the files beside it.

use super::extras::Rows;
use super::prompt::{Text, source};
use super::resolve::tier;

/// Per-token arrays of one branch, and where it stands.
#[derive(Debug, Clone, Default)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts about its end")]
pub struct Branch {
    /// Ids.
    pub ids: Vec<u32>,
    /// GIVEN, TEMPLATE or SAMPLED.
    pub source: Vec<u8>,
    /// Whether the token is a term.
    pub trainable: Vec<bool>,
    /// Recorded logprobs, NaN where not known.
    pub logprobs: Vec<f32>,
    /// Generation that sampled the token, -1 unsampled.
    pub turn: Vec<i32>,
    /// Policy version, -1 unknown.
    pub version: Vec<i32>,
    /// Tier, 255 unsampled.
    pub tier: Vec<u8>,
    /// Inverse sampling temperature that belongs to the logprob.
    pub inv_temperature: Vec<f32>,
    /// Rows of further numbers that belong to its tokens.
    pub extras: Vec<Rows>,
    /// Messages covered: indices into the trace's pool.
    pub path: Vec<u32>,
    /// Rendered prompt of the last generation; empty where it was not rendered.
    pub prompt: String,
    /// First token of the last generation.
    pub body: usize,
    /// The last generation ended in a special token that it sampled.
    pub stopped: bool,
    /// The last generation was cut by length.
    pub cut: bool,
    /// Tokens of the last generation from here on go past the stop string: the text after it does not hold them.
    pub overrun: bool,
    /// An id could not be known: nothing can follow.
    pub ended: bool,
    /// What stood before it is not recorded: nothing in it is trained.
    pub headless: bool,
}

/// What belongs to every token of a generation.
#[derive(Debug, Clone, Copy)]
pub struct Sampling {
    /// Generation of the trace.
    pub turn: i32,
    /// Policy version, -1 unknown.
    pub version: i32,
    /// 1 for raw logprobs, 1/temperature for processed ones.
    pub inv_temperature: f32,
}

impl Branch {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Appends unsampled text.
    pub fn give(&mut self, text: &Text) {
        self.ids.extend_from_slice(&text.ids);
        self.source.extend_from_slice(&text.sources);
        self.unsampled(text.ids.len());
    }

    fn unsampled(&mut self, count: usize) {
        let length = self.trainable.len() + count;
        self.trainable.resize(length, false);
        self.logprobs.resize(length, f32::NAN);
        self.turn.resize(length, -1);
        self.version.resize(length, -1);
        self.tier.resize(length, tier::NONE);
        self.inv_temperature.resize(length, 1.0);
    }

    /// Appends one sampled token; `term` is whether it is trained.
    pub fn sample(&mut self, id: u32, logprob: f32, level: u8, term: bool, sampling: Sampling) {
        self.ids.push(id);
        self.source.push(source::SAMPLED);
        self.trainable.push(term && !self.headless);
        self.logprobs.push(logprob);
        self.turn.push(sampling.turn);
        self.version.push(sampling.version);
        self.tier.push(level);
        self.inv_temperature.push(sampling.inv_temperature);
    }

    /// A new branch over `prompt`. Where it follows `other`, sampled tokens stay sampled, and are trained only there.
    pub fn fork(prompt: &Text, other: Option<&Branch>) -> Self {
        let mut branch = Self::default();
        branch.give(prompt);
        let Some(other) = other else { return branch };
        let shared = common_prefix(&branch.ids, &other.ids);
        branch.share(other, shared);
        branch
    }

    /// A new branch over the first `length` tokens of `other`, whose sampled tokens are trained only there.
    pub fn stem(other: &Branch, length: usize) -> Self {
        let mut branch = Self { ids: other.ids[..length].to_vec(), headless: other.headless, ..Self::default() };
        branch.source.resize(length, source::GIVEN);
        branch.unsampled(length);
        branch.share(other, length);
        branch
    }

    fn share(&mut self, other: &Branch, shared: usize) {
        self.source[..shared].copy_from_slice(&other.source[..shared]);
        self.turn[..shared].copy_from_slice(&other.turn[..shared]);
        self.version[..shared].copy_from_slice(&other.version[..shared]);
        self.tier[..shared].copy_from_slice(&other.tier[..shared]);
        self.inv_temperature[..shared].copy_from_slice(&other.inv_temperature[..shared]);
        self.extras = other.extras.iter().filter_map(|rows| rows.until(shared)).collect();
    }
}

/// Length of the common prefix of two id lists.
pub fn common_prefix(left: &[u32], right: &[u32]) -> usize {
    left.iter().zip(right).take_while(|(a, b)| a == b).count()
}

/// Length of the common suffix of two id lists.
pub fn common_suffix(left: &[u32], right: &[u32]) -> usize {
    left.iter().rev().zip(right.iter().rev()).take_while(|(a, b)| a == b).count()
}
