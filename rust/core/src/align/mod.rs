//! Recorded traces to the ids the trainer will use: one source for every token, branches, drift.
//!
//! `align` weaves each trace (in parallel) and lays the results end to end as flat arrays. It never guesses an id:
//! what cannot be known ends the trainable part of its branch, counted.

mod body;
mod branch;
mod bridge;
mod columns;
mod compare;
mod conversation;
mod dates;
mod diff;
mod duplicates;
mod ending;
mod extras;
mod lookup;
mod media;
mod pieces;
mod place;
mod prompt;
mod prompts;
mod recorder;
mod recover;
mod rerender;
mod resolve;
mod sampled;
mod segment;
mod splice;
mod stop;
#[cfg(test)]
mod tests;
mod weave;

pub use crate::drift::{Finding, NAMES, Reason};
pub use conversation::Conversation;
pub use extras::{Column, NO_VALUE};
pub use recover::{Recovered, recover};

use crate::caught;
use crate::error::{Error, Kind, Location, Result};
use crate::threads;
use crate::tokenizer::Tokenizer;
use crate::trace::{LogprobKind, Trace};
use branch::Branch;
use ending::Ending;
use std::collections::HashMap;
use std::sync::Arc;
use weave::{Memory, Woven};

/// Which ids the sequences have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// Those that were sampled, between what the template supplies.
    #[default]
    Splice,
    /// Those of the rendered conversation, with the logprobs of the sampled tokens they are.
    Align,
}

/// What a rendered token gets that is several sampled ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Merge {
    /// Nothing: its own probability is not known.
    #[default]
    Mask,
    /// The sum of their logprobs: the probability of one way to write it.
    Sum,
}

/// What the caller decides.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools, reason = "independent choices of the caller")]
pub struct Options {
    /// Go on after an id that cannot be known, with the canonical tokens of its text, untrained.
    pub lenient: bool,
    /// Train on text without logprobs (T6): weighted fine-tuning.
    pub text_only: bool,
    /// Which ids the sequences have.
    pub mode: Mode,
    /// In align mode: what a rendered token gets that is several sampled ones.
    pub merge: Merge,
    /// In align mode: mask what follows the first token of a turn that is not the sampled one.
    pub strict: bool,
    /// Train on canonical tokens where only their number is recorded, with their text or without, and it fits (T4, T5).
    pub assume_canonical: bool,
    /// What the logprobs are of, where the record does not say or says it wrongly.
    pub logprob_kind: Option<LogprobKind>,
    /// A trace that cannot be aligned: leave it out, counted, instead of raising.
    pub skip_errors: bool,
}

/// `Sequences` as flat arrays; shapes as in DESIGN.md.
#[derive(Debug, Default)]
#[allow(missing_docs, reason = "documented once, at Sequences in Python")]
pub struct Aligned {
    pub ids: Vec<i32>,
    pub source: Vec<u8>,
    pub trainable: Vec<bool>,
    pub rollout_logprobs: Vec<f32>,
    pub turn: Vec<i32>,
    pub version: Vec<i32>,
    pub tier: Vec<u8>,
    pub inv_temperature: Vec<f32>,
    pub cu_seqlens: Vec<i64>,
    pub trace: Vec<i32>,
    pub group: Vec<i32>,
    pub group_names: Vec<String>,
    pub trace_ids: Vec<String>,
    pub rewards: Vec<f32>,
    pub reward_names: Vec<String>,
    pub turn_rewards: Vec<f32>,
    pub cu_turns: Vec<i64>,
    pub logprob_kind: Vec<u8>,
    pub temperature: Vec<f32>,
    pub ending: Vec<u8>,
    pub extras: Vec<Column>,
    pub drift_trace: Vec<i32>,
    pub drift: Vec<Finding>,
    pub recorded: u64,
    pub exact: u64,
    pub errors: Vec<Error>,
    /// Of each error, the index of its trace among those given.
    pub left_out: Vec<i64>,
}

/// Aligns traces with the tokenizer of the model that will be trained.
///
/// # Errors
/// The first trace that cannot be aligned, unless `options.skip_errors`.
pub fn align(traces: &[Arc<Trace>], tokenizer: &Tokenizer, options: Options) -> Result<Aligned> {
    let scaffold = prompt::Scaffold::new(tokenizer)?;
    let woven = threads::map(traces, Memory::default, |memory, trace| {
        let weave = || weave::weave(trace, tokenizer, &scaffold, options, memory);
        caught(Kind::Fault, "aligning", weave).map_err(|error| {
            // A fault may have left half of something there.
            *memory = Memory::default();
            error.at(&trace.location)
        })
    });
    let mut aligned = Aligned { cu_seqlens: vec![0], cu_turns: vec![0], ..Aligned::default() };
    aligned.reward_names = reward_names(traces);
    aligned.extras = extras::columns(traces);
    let (mut groups, mut branches) = (HashMap::new(), Vec::with_capacity(traces.len()));
    for (row, (trace, woven)) in traces.iter().zip(woven).enumerate() {
        match woven {
            Ok(woven) => aligned.push(trace, woven, options, &mut groups, &mut branches),
            Err(error) if options.skip_errors => {
                aligned.errors.push(error);
                aligned.left_out.push(row as i64);
            }
            Err(error) => return Err(error),
        }
    }
    columns::write(&mut aligned, &branches);
    Ok(aligned)
}

/// The name of the group that a trace without one is: its place, beside its id, as ids may be repeated.
fn name_alone(trace: &Trace) -> String {
    let place = Location { trace: None, ..trace.location.clone() }.to_string();
    if trace.id == place { place } else { format!("{} ({place})", trace.id) }
}

fn reward_names(traces: &[Arc<Trace>]) -> Vec<String> {
    let mut names = vec!["reward".to_owned()];
    for (name, _) in traces.iter().flat_map(|trace| &trace.rewards) {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    names
}

impl Aligned {
    /// Adds a trace's rows; what belongs to each token is written from its branches.
    fn push<'a>(
        &mut self,
        trace: &Trace,
        woven: Woven<'a>,
        options: Options,
        groups: &mut HashMap<String, i32>,
        branches: &mut Vec<Branch<'a>>,
    ) {
        let row = self.group.len() as i32;
        for branch in &woven.branches {
            let before = self.cu_seqlens.last().copied().unwrap_or(0);
            self.cu_seqlens.push(before + branch.len() as i64);
            self.trace.push(row);
            for column in &mut self.extras {
                column.push(branch, &trace.generations);
            }
        }
        self.ending.push(Ending::of(trace, &woven.branches) as u8);
        branches.extend(woven.branches);
        self.recorded += woven.recorded;
        self.exact += woven.exact;
        self.drift_trace.extend(std::iter::repeat_n(row, woven.findings.len()));
        self.drift.extend(woven.findings);
        self.push_row(trace, options, groups);
    }

    fn push_row(&mut self, trace: &Trace, options: Options, groups: &mut HashMap<String, i32>) {
        let next = self.group_names.len() as i32;
        let group = match &trace.group {
            Some(name) => *groups.entry(name.clone()).or_insert(next),
            None => next,
        };
        if group == next {
            self.group_names.push(trace.group.clone().unwrap_or_else(|| name_alone(trace)));
        }
        self.group.push(group);
        self.trace_ids.push(trace.id.clone());
        let named: HashMap<&str, f32> = trace.rewards.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        for name in &self.reward_names {
            let value = if name == "reward" { trace.reward } else { named.get(name.as_str()).copied() };
            self.rewards.push(value.unwrap_or(f32::NAN));
        }
        for generation in &trace.generations {
            let message = trace.messages.get(generation.message as usize);
            self.turn_rewards.push(message.and_then(|message| message.reward).unwrap_or(f32::NAN));
        }
        self.cu_turns.push(self.turn_rewards.len() as i64);
        let first = trace.generations.first();
        let kind = options.logprob_kind.or(first.map(|generation| generation.logprob_kind)).unwrap_or_default();
        self.logprob_kind.push(kind as u8);
        self.temperature.push(first.and_then(|generation| generation.temperature).unwrap_or(f32::NAN));
    }
}
