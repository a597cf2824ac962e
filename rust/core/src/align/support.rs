//! Finds the ids from which the sampler drew each token, its support, if the record proves them.
//!
//! With top-p, top-k or min-p a token is drawn from a part of the vocabulary. The record may list this part (a sampling
//! mask), or the most probable ids with logprobs that contain all of it:
//!
//! - a sampling mask counts if the logprobs are processed. A token with a mask of one id must have the logprob 0; if not,
//!   the server computed logprobs before it applied the mask.
//! - processed logprobs: an id that could not be drawn has the logprob -inf. The list is sorted, so it is complete if it
//!   contains such an id, or if no further id can have the mass that the options require.
//! - logprobs over the whole vocabulary (raw, or SGLang's): the options are applied to the list in vLLM's order, min-p,
//!   top-k, top-p. The logprob of the token becomes that over its support.
//!
//! Penalties and logit_bias do not exclude ids: they change logits by what stands before a token, which is known if the
//! ids of the prompt are recorded. With processed logprobs of vLLM they are passed on, for the trainer to apply.
//!
//! What rounding could decide either way is not proven. A token whose support is not proven has no logprob, if that of
//! other tokens of its generation is; else the generation is left as it is, and its options count as not replayed.

use super::types::{Mode, Options};
use crate::findings::Reason;
use crate::sampling::{OPTIONS, TOP_P, number};
use crate::server::Server;
use crate::trace::{Extra, ExtraStart, Filled, Generation, LogprobKind, Note, Penalties, Prompt, TopLogprobs, Trace};
use serde_json::Value;
use std::sync::Arc;

const MASK: &str = "sampling_mask";
/// Options that only exclude ids, so that a mask replays them completely.
const EXCLUDING: [&str; 12] = [
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "tfs_z",
    "top_a",
    "top_n_sigma",
    "epsilon_cutoff",
    "eta_cutoff",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
];
/// Options that change logits without excluding ids.
const PENALIZING: [&str; 4] = ["repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"];
/// Options whose effect is computed from logprobs over the whole vocabulary.
const COMPUTED: [&str; 3] = ["top_p", "top_k", "min_p"];
/// Two scores or shares that differ by less may compare either way in a server, which computes in float32.
const ROUNDING: f64 = 1e-5;
/// Absolute error of the sum of a distribution that was computed in float32.
const SUM_ROUNDING: f64 = 2e-6;
/// The lowest logprob of a token that was the only one to be drawn from: 0, with rounding.
const SURE: f32 = -1e-3;
/// vLLM raises lower temperatures to this one, and treats 0 as greedy.
const MIN_TEMPERATURE: f32 = 0.01;

/// Returns the trace with the support of its tokens as sampling masks, as far as it is known.
pub fn with_support(trace: &Arc<Trace>, options: Options) -> Arc<Trace> {
    let is_listed = |generation: &Generation| {
        generation.tokens.top.is_some() || generation.extras.iter().any(|extra| extra.name == MASK)
    };
    let is_penalized = |generation: &Generation| generation.options.active_bits() & bits_of(&PENALIZING) != 0;
    let is_concerned =
        |generation: &Generation| is_listed(generation) || is_penalized(generation) || generation.filled.is_some();
    if !trace.generations.iter().any(is_concerned) {
        return trace.clone();
    }
    let mut result = Trace::clone(trace);
    let is_splice = options.mode == Mode::Splice;
    for generation in &mut result.generations {
        let found = if is_splice && is_listed(generation) { find(generation, options) } else { None };
        generation.extras.retain(|extra| extra.name != MASK);
        generation.tokens.top = None;
        let replays_penalties = is_splice && trace.images.is_empty();
        let kind = options.kind(generation);
        let penalties = if replays_penalties { penalties_of(generation, options, kind) } else { None };
        if let Some(found) = found {
            found.apply(generation);
        }
        if let Some(penalties) = penalties {
            let bits = options.changed_sampling_options(generation) & bits_of(&PENALIZING);
            generation.replayed = Some(generation.replayed.unwrap_or(0) | bits);
            generation.penalties = Some(Box::new(penalties));
        }
        if let Some(mut filled) = generation.filled.take() {
            let active = options.changed_sampling_options(generation);
            filled.kept =
                filled.kept.take().filter(|_| is_splice).and_then(|kept| kept_of(&mut filled, &kept, generation));
            if filled.kept.is_some() {
                filled.replayed = active & bits_of(&EXCLUDING);
            }
            if let Some(penalties) = penalties_of(generation, options, filled.kind).filter(|_| replays_penalties) {
                filled.replayed |= active & bits_of(&PENALIZING);
                filled.penalties = Some(Box::new(penalties));
            }
            generation.filled = Some(filled);
        }
    }
    Arc::new(result)
}

/// Returns the penalties of a generation whose logprobs include them; `None` if there are none, or if they or the ids
/// before the tokens are not known.
fn penalties_of(generation: &Generation, options: Options, kind: LogprobKind) -> Option<Penalties> {
    let active = options.changed_sampling_options(generation) & bits_of(&PENALIZING);
    let has_prompt = matches!(generation.prompt, Prompt::Ids(_) | Prompt::Follows { .. });
    let is_vllm = generation.server.is_none_or(|server| server == Server::Vllm);
    if active == 0 || !has_prompt || !is_vllm || kind != LogprobKind::Processed {
        return None;
    }
    let value = |name: &str| {
        if active & bits_of(&[name]) == 0 {
            return Some(None);
        }
        generation.options.get(name).map(Some)
    };
    let of = |name: &str, neutral: f32| match value(name)? {
        None => Some(neutral),
        Some(value) => finite(value).map(|number| number as f32),
    };
    let bias = match value("logit_bias")? {
        None => Vec::new(),
        Some(Value::Object(map)) => {
            let pair = |(id, bias): (&String, &Value)| Some((id.parse().ok()?, finite(bias)? as f32));
            let mut pairs = map.iter().map(pair).collect::<Option<Vec<(u32, f32)>>>()?;
            pairs.sort_by_key(|(id, _)| *id);
            pairs
        }
        Some(_) => return None,
    };
    let penalties = Penalties {
        repetition: of("repetition_penalty", 1.0)?,
        presence: of("presence_penalty", 0.0)?,
        frequency: of("frequency_penalty", 0.0)?,
        bias,
    };
    Some(penalties).filter(|penalties| penalties.repetition > 0.0)
}

/// Returns the masks of a generation whose missing logprobs are filled: those of the filled tokens, and the recorded ones
/// of the others. `None` if the filled logprobs are not over these ids.
///
/// A filled logprob of an id that its mask does not contain is dropped.
fn kept_of(filled: &mut Filled, kept: &Extra, generation: &Generation) -> Option<Extra> {
    let row = |extra: &Extra, at: usize| -> Vec<i32> {
        let start = if at == 0 { 0 } else { extra.ends.get(at - 1).copied().unwrap_or(u32::MAX) as usize };
        let row = extra.ends.get(at).and_then(|&end| extra.values.get(start..end as usize));
        row.unwrap_or_default().to_vec()
    };
    let recorded = generation.tokens.logprobs.as_deref().filter(|all| all.len() == filled.ids.len());
    let takes = |at: usize| recorded.is_none_or(|all| all[at].is_nan());
    let is_only = |at: usize| takes(at) && row(kept, at).len() == 1;
    let is_over_more = filled.logprobs.iter().enumerate().any(|(at, logprob)| is_only(at) && *logprob < SURE);
    if is_over_more || filled.kind != LogprobKind::Processed {
        return None;
    }
    let mask = generation.extras.iter().find(|extra| extra.name == MASK);
    let mut merged = Extra { ends: Vec::new(), values: Vec::new(), ..kept.clone() };
    for (at, logprob) in filled.logprobs.iter_mut().enumerate() {
        let own = row(kept, at);
        if takes(at) && !own.is_empty() && !own.contains(&(filled.ids[at] as i32)) {
            *logprob = f32::NAN;
        }
        if takes(at) && !logprob.is_nan() {
            merged.values.extend(own);
        } else {
            merged.values.extend(mask.map(|mask| row(mask, at)).unwrap_or_default());
        }
        merged.ends.push(merged.values.len() as u32);
    }
    Some(merged)
}

/// The support of the tokens of a generation.
struct Found {
    /// Bits of the options that it replays.
    replayed: u32,
    ends: Vec<u32>,
    ids: Vec<i32>,
    /// The logprob of each token over its support; NaN if the support is not known.
    logprobs: Vec<f32>,
    unknown: usize,
}

impl Found {
    fn apply(self, generation: &mut Generation) {
        let extra =
            Extra { name: MASK, first: ExtraStart::Sampled, shape: Vec::new(), ends: self.ends, values: self.ids };
        generation.extras.push(extra);
        generation.replayed = Some(self.replayed);
        generation.tokens.logprobs = Some(self.logprobs);
        if self.unknown > 0 {
            let detail = "the record does not list all ids from which the sampler drew the token".to_owned();
            generation.notes.push(Note { reason: Reason::MissingLogprob, count: self.unknown as u32, detail });
        }
    }
}

fn bits_of(names: &[&str]) -> u32 {
    let bit = |name: &&str| OPTIONS.iter().position(|(option, _)| option == name).map_or(0, |place| 1 << place);
    names.iter().map(bit).fold(0, |bits, bit| bits | bit)
}

/// Returns the support of a generation's tokens; `None` if that of no token is known.
fn find(generation: &Generation, options: Options) -> Option<Found> {
    let (ids, logprobs) = (generation.tokens.ids.as_ref()?, generation.tokens.logprobs.as_ref()?);
    let active = options.changed_sampling_options(generation);
    let kind = options.kind(generation);
    // SGLang's logprobs are scaled by the temperature, but over the whole vocabulary.
    let is_whole = kind == LogprobKind::Raw || generation.server == Some(Server::Sglang);
    if kind == LogprobKind::Unknown || ids.len() != logprobs.len() {
        return None;
    }
    let mask = generation.extras.iter().find(|extra| extra.name == MASK && !is_whole);
    let top = generation.tokens.top.as_deref();
    let rules = Rules::of(generation, options, kind);
    let replayable = bits_of(if is_whole { &COMPUTED } else { &EXCLUDING });
    if mask.is_none() && active & replayable == 0 || is_whole && (active & !replayable != 0 || rules.is_none()) {
        return None;
    }
    let mut found =
        Found { replayed: active & replayable, ends: Vec::new(), ids: Vec::new(), logprobs: Vec::new(), unknown: 0 };
    let mut known = 0;
    for (at, (&id, &logprob)) in ids.iter().zip(logprobs).enumerate() {
        let support = match (mask, top) {
            (Some(mask), _) => of_mask(mask, at, id, active != 0).map(|ids| (ids, logprob)),
            (None, Some(top)) if logprob.is_finite() => match &rules {
                Some(rules) if is_whole => rules.of_vocabulary(top, at, id, logprob),
                _ => of_processed(top, at, id, logprob, rules.as_ref()).map(|ids| (ids, logprob)),
            },
            _ => None,
        };
        if mask.is_some() && support.as_ref().is_some_and(|(kept, over)| kept.len() == 1 && *over < SURE) {
            return None; // the logprobs are over more ids than the mask
        }
        if let Some((kept, over_support)) = support {
            known += usize::from(!kept.is_empty());
            found.ids.extend(kept.iter().map(|&id| i32::try_from(id).unwrap_or(i32::MAX)));
            found.logprobs.push(over_support);
        } else {
            found.unknown += usize::from(logprob.is_finite());
            found.logprobs.push(f32::NAN);
        }
        found.ends.push(found.ids.len() as u32);
    }
    (known > 0).then_some(found)
}

/// Returns the row of a sampling mask if it contains the sampled id. An empty row without an active option stands for
/// the whole vocabulary.
fn of_mask(mask: &Extra, at: usize, id: u32, is_restricted: bool) -> Option<Vec<u32>> {
    let end = *mask.ends.get(at)? as usize;
    let start = if at == 0 { 0 } else { mask.ends[at - 1] as usize };
    let row: Vec<u32> = mask.values.get(start..end)?.iter().map(|&id| id as u32).collect();
    if row.is_empty() { (!is_restricted).then_some(row) } else { Some(row).filter(|row| row.contains(&id)) }
}

/// Returns the ids that could be drawn, from processed logprobs.
fn of_processed(top: &TopLogprobs, at: usize, id: u32, logprob: f32, rules: Option<&Rules>) -> Option<Vec<u32>> {
    let listed = listed(top, at, id, logprob)?;
    let mut kept: Vec<(u32, f64)> = listed.iter().copied().filter(|(_, value)| value.is_finite()).collect();
    let is_outside = !kept.iter().any(|(listed, _)| *listed == id);
    if is_outside {
        kept.push((id, f64::from(logprob)));
    }
    let is_complete =
        kept.len() < listed.len() + usize::from(is_outside) || rules.is_some_and(|rules| rules.leave_no_room(&kept));
    is_complete.then(|| kept.into_iter().map(|(id, _)| id).collect())
}

/// Returns the most probable ids of a token with their logprobs, each id once, most probable first; `None` without any.
///
/// Servers list the sampled id in addition to the most probable ones. If it is the least probable, it may not be next
/// after them, and is left out.
fn listed(top: &TopLogprobs, at: usize, id: u32, logprob: f32) -> Option<Vec<(u32, f64)>> {
    let (ids, logprobs) = top.at(at);
    let mut listed: Vec<(u32, f64)> = ids.iter().copied().zip(logprobs.iter().map(|&value| f64::from(value))).collect();
    listed.sort_by_key(|&(id, _)| id);
    listed.dedup_by_key(|&mut (id, _)| id);
    listed.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    if listed.last().is_some_and(|&(last, value)| last == id && value == f64::from(logprob)) {
        listed.pop();
    }
    Some(listed).filter(|listed| !listed.is_empty())
}

/// The values of the options that exclude ids.
struct Rules {
    top_p: Option<f64>,
    top_k: Option<usize>,
    min_p: Option<f64>,
    /// The factor of the listed logprobs that gives scores of the sampled distribution.
    scale: f64,
}

impl Rules {
    /// Returns the rules, or `None` if a value or the temperature is not known.
    fn of(generation: &Generation, options: Options, kind: LogprobKind) -> Option<Self> {
        let active = options.changed_sampling_options(generation);
        let value = |name: &str| {
            let is_active = active & bits_of(&[name]) != 0;
            let recorded = generation.options.get(name).and_then(finite);
            if is_active { recorded.map(Some) } else { Some(None) }
        };
        let top_p =
            if active & TOP_P == 0 { None } else { Some(f64::from(generation.top_p.filter(|top_p| *top_p < 1.0)?)) };
        let scale = if kind == LogprobKind::Raw {
            1.0 / f64::from(options.temperature(generation).filter(|&temperature| temperature >= MIN_TEMPERATURE)?)
        } else {
            1.0
        };
        Some(Self { top_p, top_k: value("top_k")?.map(|k| k as usize), min_p: value("min_p")?, scale })
    }

    /// Returns whether no id beyond `kept` can have the least probability that these rules require.
    fn leave_no_room(&self, kept: &[(u32, f64)]) -> bool {
        let total: f64 = kept.iter().map(|(_, value)| value.exp()).sum();
        let most = kept.iter().map(|(_, value)| *value).fold(f64::NEG_INFINITY, f64::max).exp();
        let least = kept.iter().map(|(_, value)| *value).fold(f64::INFINITY, f64::min).exp();
        // A further id that top-k keeps is as probable as the last of the k; one that min-p keeps has its least share.
        let tie = self.top_k.filter(|&k| k <= kept.len()).map(|_| least);
        let share = self.min_p.map(|min_p| min_p * most);
        let required = tie.into_iter().chain(share).fold(0.0, f64::max);
        let missing = 1.0 - total + SUM_ROUNDING;
        missing < 0.5 * required
    }

    /// Returns the ids that could be drawn and the logprob of the token over them, from logprobs over the vocabulary.
    fn of_vocabulary(&self, top: &TopLogprobs, at: usize, id: u32, logprob: f32) -> Option<(Vec<u32>, f32)> {
        let listed = listed(top, at, id, logprob)?;
        let mut scores: Vec<(u32, f64)> = listed.iter().map(|&(id, value)| (id, value * self.scale)).collect();
        let mut is_complete = scores.iter().any(|(_, score)| *score == f64::NEG_INFINITY);
        scores.retain(|(_, score)| score.is_finite());
        let best = scores.first()?.1;
        if let Some(min_p) = self.min_p {
            let limit = best + min_p.ln();
            if scores.iter().any(|(_, score)| (score - limit).abs() < ROUNDING) {
                return None;
            }
            let count = scores.iter().take_while(|(_, score)| *score >= limit).count();
            is_complete |= count < scores.len();
            scores.truncate(count);
        }
        if let Some(k) = self.top_k.filter(|&k| k > 0)
            && let Some(&(_, last)) = scores.get(k - 1)
        {
            // vLLM keeps every id as probable as the last of the k.
            let count = scores.iter().take_while(|(_, score)| *score >= last).count();
            if let Some((_, next)) = scores.get(count) {
                if last - next < ROUNDING {
                    return None;
                }
                is_complete = true;
            }
            scores.truncate(count);
        }
        let mass = |scores: &[(u32, f64)]| scores.iter().map(|(_, score)| (score - best).exp()).sum::<f64>();
        if let Some(top_p) = self.top_p {
            let least = mass(&scores);
            let most = if is_complete { least } else { least + self.rest(&listed, best)? };
            let mut before = 0.0;
            let mut count = 0_usize;
            for &(_, score) in &scores {
                let (low, high) = (before / most, before / least);
                if low - ROUNDING < top_p && top_p < high + ROUNDING {
                    return None;
                }
                if low >= top_p {
                    break;
                }
                before += (score - best).exp();
                count += 1;
            }
            // Which of two equally probable ids top-p keeps depends on the order in which a server sorts them.
            if let (Some((_, last)), Some((_, next))) = (scores.get(count.checked_sub(1)?), scores.get(count)) {
                if last - next < ROUNDING {
                    return None;
                }
                is_complete = true;
            }
            scores.truncate(count);
        }
        if !is_complete {
            return None;
        }
        let &(_, own) = scores.iter().find(|(kept, _)| *kept == id)?;
        let over_support = own - best - mass(&scores).ln();
        Some((scores.iter().map(|(id, _)| *id).collect(), over_support.min(0.0) as f32))
    }

    /// Returns the most mass that the ids beyond the list can have, in units of the mass of the best id; `None` if it has
    /// no bound.
    fn rest(&self, listed: &[(u32, f64)], best: f64) -> Option<f64> {
        let total: f64 = listed.iter().map(|(_, value)| value.exp()).sum();
        let missing = (1.0 - total).max(0.0) + ROUNDING;
        let least = listed.last()?.1;
        // No further id is more probable than the last of the list. At a temperature below 1, mass * (probability of the
        // last) ^ (scale - 1) bounds the sum of probability ^ scale.
        (self.scale >= 1.0).then(|| missing * ((self.scale - 1.0) * least - best).exp())
    }
}

fn finite(value: &Value) -> Option<f64> {
    number(value).filter(|number| number.is_finite())
}
