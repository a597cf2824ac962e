//! Flat output arrays: traces are concatenated, and each column is written once from the sampled spans of the branches.

use super::branch::{Branch, SampledAttributes};
use super::extras::Column;
use super::filled;
use super::generation::Ending;
use super::images::Images;
use super::trace::AlignedTrace;
use super::types::{self, Options};
use crate::error::{Error, Location};
use crate::findings::Finding;
use crate::pool;
use crate::trace::{Penalties, Prompt, Trace};
use std::collections::{BTreeMap, HashMap};

/// The arrays of `Sequences`. DESIGN.md lists the shapes.
#[derive(Debug, Default)]
#[allow(missing_docs, reason = "documented once, at Sequences in Python")]
pub struct Aligned {
    pub ids: Vec<i32>,
    pub source: Vec<u8>,
    pub trainable: Vec<bool>,
    pub rollout_logprobs: Vec<f32>,
    pub turn: Vec<i32>,
    pub version: Vec<i32>,
    pub level: Vec<u8>,
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
    pub sampling_flags: Vec<u32>,
    pub replayed_flags: Vec<u32>,
    pub penalties: PenaltyColumns,
    pub ending: Vec<u8>,
    pub extras: Vec<Column>,
    pub images: Images,
    pub mismatch_trace: Vec<i32>,
    pub mismatches: Vec<Finding>,
    pub recorded: u64,
    pub exact: u64,
    pub errors: Vec<Error>,
    /// For each error, the index of its trace in the input.
    pub skipped: Vec<i64>,
    /// Number of traces with a rendered prompt, by the server whose rendering was used. "(assumed)" is added if
    /// neither the record nor the options name the server.
    pub servers: BTreeMap<String, u64>,
}

impl Aligned {
    /// Adds the rows of a trace. Per-token columns are written later, from its branches.
    pub(super) fn push<'a>(
        &mut self,
        trace: &Trace,
        mut aligned_trace: AlignedTrace<'a>,
        options: Options,
        groups: &mut HashMap<String, i32>,
        branches: &mut Vec<Branch<'a>>,
    ) {
        let row = self.group.len() as i32;
        for branch in &aligned_trace.branches {
            let before = self.cu_seqlens.last().copied().unwrap_or(0);
            self.cu_seqlens.push(before + branch.len() as i64);
            self.trace.push(row);
            for column in &mut self.extras {
                column.push(branch, &trace.generations);
            }
        }
        self.ending.push(Ending::of(trace, &aligned_trace.branches) as u8);
        branches.append(&mut aligned_trace.branches);
        self.recorded += aligned_trace.recorded;
        self.exact += aligned_trace.exact;
        self.mismatch_trace.extend(std::iter::repeat_n(row, aligned_trace.findings.len()));
        self.mismatches.append(&mut aligned_trace.findings);
        self.push_row(trace, &aligned_trace.filled, options, groups);
    }

    fn push_row(&mut self, trace: &Trace, filled: &[bool], options: Options, groups: &mut HashMap<String, i32>) {
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
        let is_filled = |turn: usize| filled.get(turn) == Some(&true);
        for (turn, generation) in trace.generations.iter().enumerate() {
            let filled = generation.filled.as_ref().filter(|_| is_filled(turn));
            if let Some(penalties) = filled.map_or(&generation.penalties, |filled| &filled.penalties) {
                self.penalties.push(self.turn_rewards.len(), penalties);
            }
            let message = trace.messages.get(generation.message as usize);
            self.turn_rewards.push(message.and_then(|message| message.reward).unwrap_or(f32::NAN));
        }
        self.cu_turns.push(self.turn_rewards.len() as i64);
        if let Some(rendered) = trace.generations.iter().find(|generation| generation.prompt == Prompt::Rendered) {
            let server = options.server.or(rendered.server);
            let assumed = if server.is_none() { " (assumed)" } else { "" };
            *self.servers.entry(format!("{}{assumed}", server.unwrap_or_default().name())).or_default() += 1;
        }
        let first = trace.generations.first();
        let kind = first.map(|generation| filled::distribution(generation, is_filled(0), options).0);
        self.logprob_kind.push(kind.or(options.logprob_kind).unwrap_or_default() as u8);
        let distributions = trace.generations.iter().enumerate();
        let temperatures = distributions.map(|(turn, g)| filled::distribution(g, is_filled(turn), options).1);
        self.temperature.push(one_temperature(temperatures));
        let (mut changed, mut replayed) = (0, 0);
        for (turn, generation) in trace.generations.iter().enumerate() {
            let options = options.changed_sampling_options(generation);
            if generation.tokens.logprobs.is_some() && (!is_filled(turn) || filled::has_recorded(generation)) {
                let of_masks = generation.replayed.unwrap_or(0);
                changed |= options & !of_masks;
                replayed |= of_masks;
            }
            if let Some(filled) = generation.filled.as_ref().filter(|_| is_filled(turn)) {
                changed |= options & !filled.replayed;
                replayed |= filled.replayed;
            }
        }
        self.sampling_flags.push(changed);
        self.replayed_flags.push(replayed);
    }
}

/// The generations with penalties, ascending, and their `trace::Penalties`.
#[derive(Debug, Default)]
#[allow(missing_docs, reason = "documented once, at Penalties in Python")]
pub struct PenaltyColumns {
    pub generation: Vec<i64>,
    pub repetition: Vec<f32>,
    pub presence: Vec<f32>,
    pub frequency: Vec<f32>,
    pub bias_ends: Vec<i64>,
    pub bias_ids: Vec<i32>,
    pub bias: Vec<f32>,
}

impl PenaltyColumns {
    fn push(&mut self, generation: usize, penalties: &Penalties) {
        self.generation.push(generation as i64);
        self.repetition.push(penalties.repetition);
        self.presence.push(penalties.presence);
        self.frequency.push(penalties.frequency);
        for &(id, bias) in &penalties.bias {
            self.bias_ids.push(i32::try_from(id).unwrap_or(i32::MAX));
            self.bias.push(bias);
        }
        self.bias_ends.push(self.bias.len() as i64);
    }
}

/// Returns the temperature of the turns. If they differ, returns NaN if one is unknown, else one that is not 1.
fn one_temperature(temperatures: impl Iterator<Item = Option<f32>>) -> f32 {
    let mut temperature = None;
    for of_turn in temperatures {
        match of_turn {
            None => return f32::NAN,
            Some(value) if temperature.is_none_or(|previous| previous == 1.0) => temperature = Some(value),
            Some(_) => {}
        }
    }
    temperature.unwrap_or(f32::NAN)
}

/// Returns a unique group name for a trace without a group: its id and its location, because ids may repeat.
fn name_alone(trace: &Trace) -> String {
    let place = Location { trace: None, ..trace.location.clone() }.to_string();
    if trace.id == place { place } else { format!("{} ({place})", trace.id) }
}

/// Writes the per-token columns of `branches`, concatenated.
pub fn write(aligned: &mut Aligned, branches: &[Branch<'_>]) {
    let lay = ColumnWriter { branches, total: branches.iter().map(Branch::len).sum() };
    let Aligned { ids, source, trainable, rollout_logprobs, turn, version, level, inv_temperature, .. } = aligned;
    pool::run_tasks(vec![
        Box::new(|| *ids = lay.whole(|branch, column| column.extend(branch.ids.iter().map(|&id| id as i32)))),
        Box::new(|| *rollout_logprobs = lay.by_stretch(f32::NAN, put_logprobs)),
        Box::new(|| *turn = lay.alike(-1, |attributes| attributes.sampling.turn)),
        Box::new(|| *version = lay.alike(-1, |attributes| attributes.sampling.version)),
        Box::new(|| *inv_temperature = lay.alike(1.0, |attributes| attributes.sampling.inv_temperature)),
        Box::new(|| *source = lay.whole(|branch, column| column.extend_from_slice(&branch.source))),
        Box::new(|| *trainable = lay.alike(false, |attributes| attributes.trained)),
        Box::new(|| *level = lay.alike(types::NONE, |attributes| attributes.level)),
    ]);
}

struct ColumnWriter<'b, 'a> {
    branches: &'b [Branch<'a>],
    total: usize,
}

impl<'a> ColumnWriter<'_, 'a> {
    /// Builds a column to which `put` appends the values of each branch.
    fn whole<T>(&self, put: impl Fn(&Branch<'a>, &mut Vec<T>)) -> Vec<T> {
        let mut column = Vec::with_capacity(self.total);
        self.branches.iter().for_each(|branch| put(branch, &mut column));
        column
    }

    /// Builds a column with `unsampled` outside the stretches. `put` appends the values of the given number of tokens
    /// of a stretch.
    fn by_stretch<T: Copy>(&self, unsampled: T, put: impl Fn(&SampledAttributes<'a>, usize, &mut Vec<T>)) -> Vec<T> {
        self.whole(|branch, column| {
            let start = column.len();
            for span in &branch.sampled_spans {
                column.resize(start + span.start, unsampled);
                put(&span.attributes, span.end - span.start, column);
            }
            column.resize(start + branch.len(), unsampled);
        })
    }

    /// Builds a column whose value is constant within a stretch.
    fn alike<T: Copy>(&self, unsampled: T, of: impl Fn(&SampledAttributes<'a>) -> T) -> Vec<T> {
        self.by_stretch(unsampled, |attributes, count, column| column.resize(column.len() + count, of(attributes)))
    }
}

fn put_logprobs(attributes: &SampledAttributes<'_>, count: usize, column: &mut Vec<f32>) {
    match &attributes.logprobs {
        Some(logprobs) => column.extend_from_slice(logprobs),
        None => column.resize(column.len() + count, f32::NAN),
    }
}
