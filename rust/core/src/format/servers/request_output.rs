//! `RequestOutput` of vLLM and of TensorRT-LLM as JSON: `{"prompt_token_ids", "outputs": [{"token_ids", "logprobs"}]}`.
//!
//! Sources: vllm 0.32 `outputs.py`, `logprobs.py`; TensorRT-LLM `executor/result.py`. `logprobs` has one of three
//! formats: a list of `{id: {"logprob", "rank", "decoded_token"}}`, a list of numbers (TensorRT-LLM), or vLLM's
//! `FlatLogprobs`. JSON turns the ids of the first into strings, and sorting the keys loses their order, so the entry
//! is selected by id. Values are not clamped: -inf and NaN occur. Whether they are raw or processed depends on an
//! option of the engine that the object does not contain.

use super::interface::{
    API_DEFAULTS, CallContext, Columns, Decoded, Entry, Form, Id, Outline, Reading, Reason, Request, Server, Shape,
    TokenText, finish_under, prompt_of, reject, sampling_under, spoken, stop_under,
};
use crate::findings;
use crate::format::build::calls::chat_request;
use crate::format::build::extras::{routed_experts, sampling_mask, version_spans};
use crate::format::token_list::ListedLogprob;
use crate::trace::{Generation, LogprobKind, Note, Prompt, Tokens};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::ops::Range;

pub(super) const VLLM: Server = Server {
    form: Form { name: "vllm_offline", reason: "its `outputs` have `token_ids`" },
    signs: &["outputs"],
    recognizes: |response| first_output(response).is_some(),
    answer,
    request,
    defaults: API_DEFAULTS,
};

pub(super) const TENSORRT_LLM: Server = Server {
    form: Form {
        name: "tensorrt_llm",
        reason: "its `outputs` have `token_ids` and `generation_logits` or `disaggregated_params`",
    },
    signs: &["outputs"],
    recognizes: |response| {
        first_output(response)
            .is_some_and(|output| output.has_key("generation_logits") || output.has_key("disaggregated_params"))
    },
    answer,
    request,
    defaults: API_DEFAULTS,
};

fn first_output<'a>(response: &Outline<'a>) -> Option<Outline<'a>> {
    response.first_of("outputs").filter(|first| first.is("token_ids", Shape::List))
}

fn answer(response: &Outline<'_>, context: &CallContext<'_>) -> Decoded<Entry> {
    let (output, unused) = context.pick(response.objects("outputs")?, "outputs")?;
    let mut generation = context.generation(LogprobKind::Unknown);
    let ids = output.ids("token_ids")?.ok_or_else(|| {
        reject(Reason::Incomplete, "TG-FORMAT-051", "an output has no `token_ids`")
            .why("It is ambiguous which entry of its logprobs was sampled")
            .fix("Write the output's token_ids")
    })?;
    let (tokens, note) = sampled(&output, ids)?;
    generation.tokens = tokens;
    generation.notes.extend(note);
    generation.prompt = prompt_of(response.ids("prompt_token_ids")?, response.text("prompt")?);
    generation.cumulative_logprob = output.number("cumulative_logprob").ok().flatten();
    described(&output, generation, unused)
}

/// Creates the entry of one vLLM output, with the fields of the generation other than its tokens.
pub(super) fn described(output: &Outline<'_>, mut generation: Generation, unused: u32) -> Decoded<Entry> {
    generation.finish_reason = finish_under(output, "finish_reason")?;
    generation.stop = stop_under(output, "stop_reason")?;
    generation.versions = version_spans(output)?;
    let mask = sampling_mask(output, "sampling_mask")?;
    generation.extras = routed_experts(output)?.into_iter().chain(mask).collect();
    generation.text = output.text("text")?;
    let message = spoken(generation.text.as_deref().unwrap_or_default());
    Ok(Entry::sampled(message, generation, unused))
}

/// One entry of a step.
#[derive(Deserialize)]
#[serde(untagged)]
enum Listed {
    Named {
        logprob: Reading,
        #[serde(default)]
        decoded_token: TokenText,
    },
    Bare(Reading),
}

/// Reads the sampled tokens with their logprobs. Returns a note if there are more steps than tokens.
fn sampled(output: &Outline<'_>, ids: Vec<u32>) -> Decoded<(Tokens, Option<Note>)> {
    if output.is("logprobs", Shape::Object) {
        let flat: Flat = output.typed("logprobs")?.unwrap_or_default();
        return Ok((flat.of(&ids), None));
    }
    let Some(steps) = output.list("logprobs")? else {
        return Ok((Tokens { ids: Some(ids), ..Tokens::default() }, None));
    };
    let extra = steps.len().saturating_sub(ids.len());
    let mut tokens = if extra > 0 || steps.iter().any(|step| Shape::of(step) == Shape::Object) {
        of_steps(&steps, &ids)?
    } else {
        output.logprobs("logprobs")?.unwrap_or_default()
    };
    tokens.ids = Some(ids);
    let detail = format!("{extra} more logprobs than tokens: a stop word was trimmed from the tokens alone");
    let note = Note { reason: findings::Reason::StopStringTruncated, count: extra as u32, detail };
    Ok((tokens, Some(note).filter(|_| extra > 0)))
}

/// Reads the sampled tokens from a list of `{id: entry}`.
fn of_steps(steps: &[&RawValue], ids: &[u32]) -> Decoded<Tokens> {
    let mut listing = Columns::default();
    for (at, (step, &id)) in steps.iter().zip(ids).enumerate() {
        let (reading, text) = step_of(step, id, at)?;
        for (id, logprob) in listed(step).unwrap_or_default() {
            listing.list(id, logprob);
        }
        listing.push(Some(id), reading, text.as_deref(), None);
    }
    Ok(listing.into_tokens())
}

/// Returns the most probable ids of a step `{id: entry}` with their logprobs; `None` for fewer than two, or if an id or
/// logprob is unknown.
fn listed(step: &RawValue) -> Option<Vec<(u32, f32)>> {
    let entries: BTreeMap<u32, Number> = serde_json::from_str(step.get()).ok()?;
    // The sampled id is listed at any rank, the others from rank 1 on.
    let among_first =
        |entry: &Number| !matches!(entry, Number::Named { rank: Some(rank), .. } if *rank > entries.len());
    let number = |entry: &Number| match entry {
        Number::Named { logprob, .. } | Number::Bare(logprob) => logprob.listed,
    };
    let first = entries.iter().filter(|(_, entry)| among_first(entry));
    let listed: Vec<(u32, f32)> = first.map(|(id, entry)| Some((*id, number(entry)?))).collect::<Option<_>>()?;
    Some(listed).filter(|listed| listed.len() > 1)
}

/// The logprob of an entry of a step.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Named {
        logprob: ListedLogprob,
        #[serde(default)]
        rank: Option<usize>,
    },
    Bare(ListedLogprob),
}

/// Returns the logprob and the text of the sampled token at a step.
fn step_of(step: &RawValue, id: u32, at: usize) -> Decoded<(Reading, Option<Vec<u8>>)> {
    let place = format!("logprobs[{at}]");
    if Shape::of(step) == Shape::Object {
        let entry: Option<Listed> = Outline::of(step, &place)?.typed(&id.to_string()).map_err(|r| r.inside(&place))?;
        return Ok(match entry {
            Some(Listed::Named { logprob, decoded_token }) => (logprob, decoded_token.0),
            Some(Listed::Bare(reading)) => (reading, None),
            None => (Reading::Missing, None),
        });
    }
    let wrapped = format!("{{\"logprob\":{}}}", step.get());
    let reading: Option<Reading> = Outline::parse(&wrapped)?.typed("logprob").map_err(|r| r.inside(&place))?;
    Ok((reading.unwrap_or(Reading::Missing), None))
}

/// `FlatLogprobs`: step i has the entries `start_indices[i]..end_indices[i]`.
#[derive(Deserialize, Default)]
struct Flat {
    start_indices: Vec<usize>,
    end_indices: Vec<usize>,
    token_ids: Vec<Id>,
    logprobs: Vec<ListedLogprob>,
    #[serde(default)]
    ranks: Vec<Option<usize>>,
    #[serde(default)]
    decoded_tokens: Vec<TokenText>,
}

impl Flat {
    /// Returns the first entry of the sampled token at each step. The token may be listed twice.
    fn of(&self, ids: &[u32]) -> Tokens {
        let mut listing = Columns::default();
        for (&id, (&start, &end)) in ids.iter().zip(self.start_indices.iter().zip(&self.end_indices)) {
            let step = self.token_ids.get(start..end).unwrap_or_default();
            let index = step.iter().position(|listed| listed.0 == id).map(|offset| start + offset);
            let reading = index.and_then(|at| self.logprobs.get(at)).map_or(Reading::Missing, |entry| entry.sampled);
            for (id, logprob) in self.listed(start..end).unwrap_or_default() {
                listing.list(id, logprob);
            }
            let text = index.and_then(|at| self.decoded_tokens.get(at)).and_then(|text| text.0.as_deref());
            listing.push(Some(id), reading, text, None);
        }
        Tokens { ids: Some(ids.to_vec()), ..listing.into_tokens() }
    }

    /// Returns the most probable ids of a step with their logprobs, as the function `listed`.
    fn listed(&self, step: Range<usize>) -> Option<Vec<(u32, f32)>> {
        let mut ids: Vec<u32> = self.token_ids.get(step.clone())?.iter().map(|id| id.0).collect();
        ids.sort_unstable();
        ids.dedup();
        let among_first = |at: &usize| !matches!(self.ranks.get(*at), Some(Some(rank)) if *rank > ids.len());
        let entry = |at: usize| Some((self.token_ids.get(at)?.0, self.logprobs.get(at)?.listed?));
        let listed: Vec<(u32, f32)> = step.filter(among_first).map(entry).collect::<Option<_>>()?;
        Some(listed).filter(|_| ids.len() > 1)
    }
}

/// Reads `{"prompt" | "prompt_token_ids", "sampling_params"}`, the arguments of `LLM.generate`, or `{"messages"}`,
/// those of `LLM.chat`.
fn request(request: &Outline<'_>) -> Decoded<Request> {
    if request.has("messages") {
        return chat_request(request);
    }
    let sampling = sampling_under(request, "sampling_params")?;
    let prompt = match (request.ids("prompt_token_ids")?, request.get("prompt").map(Shape::of)) {
        (Some(ids), _) => Prompt::Ids(ids),
        (None, Some(Shape::Text)) => request.text("prompt")?.map_or(Prompt::Unknown, Prompt::Text),
        (None, Some(Shape::List)) => request.ids("prompt")?.map_or(Prompt::Unknown, Prompt::Ids),
        _ => Prompt::Unknown,
    };
    Ok(Request { prompt, sampling, ..Request::default() })
}
