//! Recorded tokens to ids alone, without templates and branches: what a record determines, and what not.

use super::lookup::Lookup;
use super::recorder::Recorder;
use super::resolve;
use crate::threads;
use crate::tokenizer::Tokenizer;
use crate::trace::Trace;
use serde_json::Value;
use std::sync::Arc;

/// The sampled tokens of G generations, end to end; shapes as in Python's `Recovered`.
#[derive(Debug, Default)]
#[allow(missing_docs, reason = "documented once, at Recovered in Python")]
pub struct Recovered {
    pub ids: Vec<i32>,
    pub tier: Vec<u8>,
    pub logprobs: Vec<f32>,
    pub cu_tokens: Vec<i64>,
    pub trace: Vec<i32>,
    pub turn: Vec<i32>,
    pub reason: Vec<u8>,
}

/// The ids that each generation's record determines; -1 for every other.
pub fn recover(traces: &[Arc<Trace>], tokenizer: &Tokenizer) -> Recovered {
    let parts = threads::map(traces, Lookup::default, |lookup, trace| recover_one(trace, tokenizer, lookup));
    let mut all = Recovered { cu_tokens: vec![0], ..Recovered::default() };
    for (row, part) in parts.into_iter().enumerate() {
        let base = all.ids.len() as i64;
        all.cu_tokens.extend(part.cu_tokens.iter().map(|end| base + end));
        all.trace.extend(std::iter::repeat_n(row as i32, part.turn.len()));
        all.ids.extend(part.ids);
        all.tier.extend(part.tier);
        all.logprobs.extend(part.logprobs);
        all.turn.extend(part.turn);
        all.reason.extend(part.reason);
    }
    all
}

fn recover_one(trace: &Trace, tokenizer: &Tokenizer, lookup: &mut Lookup) -> Recovered {
    let mut found = Recovered::default();
    let recorder = Recorder::new(trace, tokenizer);
    for (turn, generation) in trace.generations.iter().enumerate() {
        let message = trace.messages.get(generation.message as usize).map(|message| &message.value);
        let content = message.and_then(|message| message.get("content")).and_then(Value::as_str);
        let resolved = resolve::resolve(generation, content, &recorder, lookup);
        if !resolved.foreign {
            let known = |index: usize| resolved.is_known(index);
            let ids = resolved.ids.iter().enumerate();
            found.ids.extend(ids.map(|(index, &id)| if known(index) { id as i32 } else { -1 }));
            let count = resolved.ids.len();
            let reason = |index: usize| if known(index) { 0 } else { resolved.why_unknown(index) as u8 };
            found.reason.extend((0..count).map(reason));
            found.tier.extend((0..count).map(|index| resolved.tier(index)));
            found.logprobs.extend((0..count).map(|index| resolved.logprob(index)));
        }
        found.cu_tokens.push(found.ids.len() as i64);
        found.turn.push(turn as i32);
    }
    found
}
