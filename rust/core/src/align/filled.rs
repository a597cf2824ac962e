//! Logprobs that were measured after the recording (`Filled`): the tokens that they apply to, and their distribution.
//!
//! A filled logprob is used only for a token without a recorded one, if the filled ids are exactly the sampled ids, and
//! if it is of the same distribution as the recorded logprobs of its generation. Its token has the level `FILLED`.

use super::resolve::Resolution;
use super::types::Options;
use crate::findings::Reason;
use crate::tokenizer::Tokenizer;
use crate::trace::{Filled, Generation, LogprobKind};

/// Fills the missing logprobs of a generation with tokens, or reports why the filled ones are not used.
pub fn fill(resolution: &mut Resolution<'_>, generation: &Generation, options: Options, tokenizer: &Tokenizer) {
    let Some(filled) = generation.filled.as_deref() else { return };
    if resolution.ids.is_empty() || resolution.foreign {
        return; // the generation becomes text
    }
    let recorded = resolution.logprobs.as_deref().unwrap_or_default();
    let takes = |at: usize| recorded.get(at).is_none_or(|logprob| logprob.is_nan());
    let count = filled.logprobs.iter().enumerate().filter(|&(at, logprob)| !logprob.is_nan() && takes(at)).count();
    if count == 0 {
        return;
    }
    let is_partial = recorded.iter().any(|logprob| !logprob.is_nan());
    let problem = if resolution.all_known() {
        other_ids(filled, &resolution.ids, tokenizer)
    } else {
        Some("not all sampled ids are known".to_owned())
    };
    let problem = problem.or_else(|| if is_partial { other_distribution(generation, options) } else { None });
    match problem {
        Some(detail) => resolution.report(Reason::FilledIdsDiffer, 0, count, detail),
        None => resolution.fill(&filled.logprobs),
    }
}

/// Describes how the filled logprobs belong to other tokens than these, or returns `None` if they belong to them.
pub fn other_ids(filled: &Filled, ids: &[u32], tokenizer: &Tokenizer) -> Option<String> {
    if filled.ids.len() != ids.len() {
        return Some(format!("filled for {} ids, the generation has {}", filled.ids.len(), ids.len()));
    }
    if let Some(at) = (0..ids.len()).find(|&at| filled.ids[at] != ids[at]) {
        return Some(format!("filled for id {} at token {at}, where {} was sampled", filled.ids[at], ids[at]));
    }
    let kept = filled.kept.as_ref()?.values.iter().map(|&id| id as u32).collect::<Vec<u32>>();
    let at = tokenizer.first_outside(&kept)?;
    Some(format!("the kept id {} is not in the model's vocabulary of {}", kept[at], tokenizer.model_vocab_size()))
}

/// Describes how the filled logprobs differ in distribution from the recorded ones of their generation.
fn other_distribution(generation: &Generation, options: Options) -> Option<String> {
    let describe = |(kind, temperature): (LogprobKind, Option<f32>)| {
        let temperature = temperature.map_or("an unknown temperature".to_owned(), |t| format!("temperature {t}"));
        format!("{} at {temperature}", format!("{kind:?}").to_lowercase())
    };
    let (recorded, of_filled) = (distribution(generation, false, options), distribution(generation, true, options));
    (recorded != of_filled)
        .then(|| format!("the filled logprobs are {}, the recorded ones {}", describe(of_filled), describe(recorded)))
}

/// Returns kind and temperature of the logprobs of a generation, recorded or filled.
pub fn distribution(generation: &Generation, is_filled: bool, options: Options) -> (LogprobKind, Option<f32>) {
    let temperature = options.temperature(generation);
    match &generation.filled {
        Some(filled) if is_filled => (filled.kind, filled.temperature.or(temperature)),
        _ => (options.kind(generation), temperature),
    }
}

/// Returns whether the record has the logprob of at least one token of a generation.
pub fn has_recorded(generation: &Generation) -> bool {
    generation.tokens.logprobs.iter().flatten().any(|logprob| !logprob.is_nan())
}
