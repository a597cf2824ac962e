//! Recorded traces to the ids the trainer will use: one source for every token, branches, drift.
//!
//! `align` weaves each trace (in parallel) and lays the results end to end as flat arrays. It never guesses an id:
//! what cannot be known ends the trainable part of its branch, counted.
//!
//! In come traces, a tokenizer and options; out go flat arrays and findings. Its files, each using those before it
//! alone: `source`, `tier`, `options`; `spelling`, `lookup`, `recorder`, `segment`, `resolved`, `pieces`, `resolve`,
//! `recover` (recorded tokens to ids); `prompt`, `branch`, `bridge`, `prompts`, `compare`, `body`, `dates`, `diff`,
//! `duplicates`, `called`, `stop`, `extras`, `ending`, `pictures`, `images`; `weave`, and on its loom `media`, `shown`, `place`, `sampled`, `splice`,
//! `rerender`; `conversation`; `aligned`, `columns`.

mod aligned;
mod body;
mod branch;
mod bridge;
mod called;
mod columns;
mod compare;
mod conversation;
mod dates;
mod diff;
mod duplicates;
mod ending;
mod extras;
mod images;
mod lookup;
mod media;
mod options;
mod pictures;
mod pieces;
mod place;
mod prompt;
mod prompts;
mod recorder;
mod recover;
mod rerender;
mod resolve;
mod resolved;
mod sampled;
mod segment;
mod shown;
mod source;
mod spelling;
mod splice;
mod stop;
#[cfg(test)]
mod tests;
mod tier;
mod weave;

pub use crate::drift::{Finding, NAMES, Reason, USAGE_SLACK};
pub use aligned::Aligned;
pub use conversation::Conversation;
pub use extras::{Column, NO_VALUE};
pub use images::Images;
pub use options::{Merge, Mode, Options};
pub use pictures::PictureRule;
pub use recover::{Recovered, recover};

use crate::caught;
use crate::error::{Kind, Result};
use crate::threads;
use crate::tokenizer::Tokenizer;
use crate::trace::Trace;
use branch::Branch;
use pictures::Keyed;
use std::collections::HashMap;
use std::sync::Arc;
use weave::Memory;

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
    let woven = threads::map(given.as_slice(), Memory::default, |memory, &(trace, keyed)| {
        let weave = || weave::weave(keyed.map_or(trace, |keyed| &keyed.trace), keyed, &scaffold, options, memory);
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
    columns::write(&mut aligned, &branches);
    Ok(aligned)
}

/// The traces with keys for their pictures; empty where none has any.
fn keyed<'r>(traces: &[Arc<Trace>], rule: Option<&'r PictureRule>) -> Result<Vec<Option<Keyed<'r>>>> {
    match rule.filter(|_| traces.iter().any(|trace| !trace.pictures.is_empty())) {
        Some(rule) => threads::map(traces, || (), |(), trace| Keyed::of(trace, rule)).into_iter().collect(),
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
