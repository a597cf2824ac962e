//! Aligns recorded traces: returns the ids to train on, one source for every token, branches and findings.
//!
//! Traces are aligned in parallel, and the results are concatenated as flat arrays. No id is ever guessed. An unknown
//! id ends the trainable part of its branch and is counted.

mod branch;
mod conversation;
mod diff;
mod extras;
mod filled;
mod generation;
mod hidden_tokens;
mod images;
mod media;
mod output;
mod prompt;
mod prompt_cache;
mod prompt_check;
mod prompt_diff;
mod prompt_match;
mod rerender;
mod resolve;
mod splice;
mod support;
#[cfg(test)]
mod tests;
mod tool_calls;
mod trace;
mod types;

pub use crate::findings::{Finding, NAMES, Reason, USAGE_SLACK};
pub use conversation::Conversation;
pub use extras::{Column, NO_VALUE};
pub use images::{ImageRule, Images};
pub use output::{Aligned, PenaltyColumns};
pub use resolve::{RecoveredTokens, recover};
pub use types::{Merge, Mode, Options};

use crate::error::{Kind, Result};
use crate::tokenizer::Tokenizer;
use crate::trace::Trace;
use crate::{catch_panic, pool};
use branch::Branch;
use images::Keyed;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use trace::WorkerCache;

/// Number of traces that this process has aligned so far, for progress lines.
static ALIGNED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of traces that this process has aligned so far.
pub fn aligned_count() -> u64 {
    ALIGNED.load(Ordering::Relaxed)
}

/// Aligns traces with the tokenizer of the model that will be trained. `rule` specifies how that model writes images.
///
/// # Errors
/// Returns the error of the first trace that cannot be aligned, unless `options.skip_errors` is set.
pub fn align(
    traces: &[Arc<Trace>],
    tokenizer: &Tokenizer,
    rule: Option<&ImageRule>,
    options: Options,
) -> Result<Aligned> {
    let scaffold = prompt::Scaffold::new(tokenizer, options.server)?;
    let with_support = pool::map(traces, || (), |(), trace| support::with_support(trace, options));
    let traces = with_support.as_slice();
    let keyed_traces = keyed_traces(traces, rule)?;
    let inputs: Vec<_> =
        traces.iter().zip(keyed_traces.iter().map(Option::as_ref).chain(std::iter::repeat(None))).collect();
    let results = pool::map(inputs.as_slice(), WorkerCache::default, |memory, &(trace, keyed)| {
        let align_one =
            || trace::align_trace(keyed.map_or(trace, |keyed| &keyed.trace), keyed, &scaffold, options, memory);
        let result = catch_panic(Kind::Fault, "aligning", align_one).map_err(|error| {
            // A panic may have left partial state in the memory.
            *memory = WorkerCache::default();
            error.at(&trace.location)
        });
        ALIGNED.fetch_add(1, Ordering::Relaxed);
        result
    });
    let mut aligned = Aligned { cu_seqlens: vec![0], cu_turns: vec![0], ..Aligned::default() };
    aligned.reward_names = reward_names(traces);
    let is_filled =
        |row: usize, turn: usize| results[row].as_ref().is_ok_and(|result| result.filled.get(turn) == Some(&true));
    aligned.extras = extras::columns(traces, is_filled);
    let (mut groups, mut branches) = (HashMap::new(), Vec::with_capacity(traces.len()));
    for (row, ((trace, keyed), result)) in inputs.iter().zip(results).enumerate() {
        match result {
            Ok(mut aligned_trace) => {
                if aligned_trace.branches.is_empty() {
                    aligned_trace.branches.push(Branch::default()); // an empty branch, so that every trace keeps its row
                }
                aligned.images.push(*keyed, &mut aligned_trace.branches);
                aligned.push(trace, aligned_trace, options, &mut groups, &mut branches);
            }
            Err(error) if options.skip_errors => {
                aligned.errors.push(error);
                aligned.skipped.push(row as i64);
            }
            Err(error) => return Err(error),
        }
    }
    output::write(&mut aligned, &branches);
    Ok(aligned)
}

/// Returns the traces with keys for their images, or an empty list if no trace has images.
fn keyed_traces<'r>(traces: &[Arc<Trace>], rule: Option<&'r ImageRule>) -> Result<Vec<Option<Keyed<'r>>>> {
    match rule.filter(|_| traces.iter().any(|trace| !trace.images.is_empty())) {
        Some(rule) => pool::map(traces, || (), |(), trace| Keyed::of(trace, rule)).into_iter().collect(),
        None => Ok(Vec::new()),
    }
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
