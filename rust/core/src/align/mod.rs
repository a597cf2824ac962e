//! Aligns recorded traces: gives the ids that the trainer will use, one source for every token, branches and findings.
//!
//! Each trace is aligned in parallel, and the results are laid end to end as flat arrays. No id is ever guessed: what
//! cannot be known ends the trainable part of its branch, counted.

mod branch;
mod conversation;
mod diff;
mod extras;
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
#[cfg(test)]
mod tests;
mod tool_calls;
mod trace;
mod types;

pub use crate::findings::{Finding, NAMES, Reason, USAGE_SLACK};
pub use conversation::Conversation;
pub use extras::{Column, NO_VALUE};
pub use images::{Images, PictureRule};
pub use output::Aligned;
pub use resolve::{Recovered, recover};
pub use types::{Merge, Mode, Options};

use crate::error::{Kind, Result};
use crate::tokenizer::Tokenizer;
use crate::trace::Trace;
use crate::{caught, pool};
use branch::Branch;
use images::Keyed;
use std::collections::HashMap;
use std::sync::Arc;
use trace::Memory;

/// Aligns traces with the tokenizer of the model that will be trained; `rule` says how it writes pictures.
///
/// # Errors
/// The first trace that cannot be aligned, unless `options.skip_errors`.
pub fn align(
    traces: &[Arc<Trace>],
    tokenizer: &Tokenizer,
    rule: Option<&PictureRule>,
    options: Options,
) -> Result<Aligned> {
    let scaffold = prompt::Scaffold::new(tokenizer, options.server)?;
    let keyed = keyed(traces, rule)?;
    let given: Vec<_> = traces.iter().zip(keyed.iter().map(Option::as_ref).chain(std::iter::repeat(None))).collect();
    let woven = pool::map(given.as_slice(), Memory::default, |memory, &(trace, keyed)| {
        let weave = || trace::weave(keyed.map_or(trace, |keyed| &keyed.trace), keyed, &scaffold, options, memory);
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
    for (row, ((trace, keyed), woven)) in given.iter().zip(woven).enumerate() {
        match woven {
            Ok(mut woven) => {
                if woven.branches.is_empty() {
                    woven.branches.push(Branch::default()); // of which nothing is left: traces stay in their order
                }
                aligned.images.push(*keyed, &mut woven.branches);
                aligned.push(trace, woven, options, &mut groups, &mut branches);
            }
            Err(error) if options.skip_errors => {
                aligned.errors.push(error);
                aligned.left_out.push(row as i64);
            }
            Err(error) => return Err(error),
        }
    }
    output::write(&mut aligned, &branches);
    Ok(aligned)
}

/// The traces with keys for their pictures; empty where none has any.
fn keyed<'r>(traces: &[Arc<Trace>], rule: Option<&'r PictureRule>) -> Result<Vec<Option<Keyed<'r>>>> {
    match rule.filter(|_| traces.iter().any(|trace| !trace.pictures.is_empty())) {
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
