//! SGLang's `/generate`: `{"text", "output_ids", "meta_info": {"output_token_logprobs": [[logprob, id, text], ...]}}`.
//!
//! Source: sglang 0.5.23 `managers/tokenizer_manager.py`, `layers/sampler.py`. The logprob is first in each triple; the
//! text may be null or absent. Logprobs are log-softmax of the logits divided by the temperature, before top-p and
//! top-k (unless the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB): `processed`.

use super::interface::{
    API_DEFAULTS, CallContext, Columns, Decoded, Entry, Form, Id, Outline, Reading, Reason, Request, Server, Shape,
    TokenText, note, prompt_of, reject, sampling_of, spoken, stop_id,
};
use crate::findings;
use crate::format::build::extras::{raw_experts, sampling_mask, version, version_spans};
use crate::format::build::message;
use crate::trace::{LogprobKind, Prompt, Stop, Tokens};
use serde::Deserialize;
use serde_json::Value;

pub(super) const SERVER: Server = Server {
    form: Form { name: "sglang", reason: "it has `meta_info`" },
    signs: &["meta_info"],
    recognizes: |response| response.is("meta_info", Shape::Object),
    answer,
    request,
    defaults: API_DEFAULTS,
};

/// `[logprob, id, text]`, `[logprob, id]`, or an object with the same values.
#[derive(Deserialize)]
#[serde(untagged)]
enum Listed {
    Triple(Reading, Id, TokenText),
    Pair(Reading, Id),
    Named {
        #[serde(alias = "id")]
        token_id: Id,
        logprob: Reading,
        #[serde(default)]
        text: TokenText,
    },
}

impl Listed {
    fn parts(self) -> (Reading, u32, TokenText) {
        match self {
            Self::Triple(reading, Id(id), text) => (reading, id, text),
            Self::Pair(reading, Id(id)) => (reading, id, TokenText(None)),
            Self::Named { token_id: Id(id), logprob, text } => (logprob, id, text),
        }
    }
}

fn answer(response: &Outline<'_>, context: &CallContext<'_>) -> Decoded<Entry> {
    let meta = response.object("meta_info")?.unwrap_or_default();
    let text = response.text("text")?;
    let mut generation = context.generation(LogprobKind::Processed);
    generation.tokens = tokens(response, &meta)?;
    generation.prompt = prompt(&meta)?;
    let finish = meta.value("finish_reason")?;
    generation.finish_reason = finish.as_ref().and_then(kind).map(|kind| message::common(kind).to_owned());
    generation.stop = finish.as_ref().map(stop).unwrap_or_default();
    if generation.policy_version < 0 {
        generation.policy_version = meta.value("weight_version")?.as_ref().map_or(-1, version);
    }
    generation.versions = version_spans(&meta)?;
    let sampled = generation.tokens.len();
    let rows = (meta.count("prompt_tokens")?.unwrap_or(0) as usize + sampled).saturating_sub(1);
    let experts = raw_experts(&meta, rows)?;
    generation.extras.extend(experts.into_iter().chain(sampling_mask(&meta, "output_token_sampling_mask")?));
    if generation.finish_reason.as_deref() == Some("abort") {
        let why = finish.as_ref().and_then(|finish| finish.get("message")?.as_str()).unwrap_or("no message");
        let detail = format!("the server aborted the generation: {why}");
        generation.notes.push(note(findings::Reason::LengthTruncated, sampled, detail));
    }
    generation.text.clone_from(&text);
    Ok(Entry::sampled(spoken(&text.unwrap_or_default()), generation, 0))
}

fn tokens(response: &Outline<'_>, meta: &Outline<'_>) -> Decoded<Tokens> {
    let mut listing = Columns::default();
    for listed in meta.typed::<Vec<Listed>>("output_token_logprobs")?.unwrap_or_default() {
        let (reading, id, text) = listed.parts();
        listing.push(Some(id), reading, text.0.as_deref(), None);
    }
    let mut tokens = listing.into_tokens();
    let Some(ids) = response.ids("output_ids")? else { return Ok(tokens) };
    if let Some(listed_ids) =
        tokens.ids.as_ref().filter(|listed_ids| listed_ids.len() == ids.len() && **listed_ids != ids)
    {
        let at = (0..ids.len()).find(|&at| listed_ids[at] != ids[at]).unwrap_or_default();
        let what = format!("output_ids[{at}] is {} but its logprob is of token {}", ids[at], listed_ids[at]);
        return Err(reject(Reason::Contradiction, "TG-FORMAT-053", what)
            .why("It is ambiguous which of the two was sampled")
            .fix("Store the response as the server sent it"));
    }
    tokens.ids = Some(ids);
    Ok(tokens)
}

/// Returns the prompt's ids, if its logprobs were requested from the first token on.
fn prompt(meta: &Outline<'_>) -> Decoded<Prompt> {
    let listed = meta.typed::<Vec<Listed>>("input_token_logprobs")?.unwrap_or_default();
    let is_complete = meta.count("prompt_tokens")?.is_some_and(|count| count > 0 && count as usize == listed.len());
    let ids = listed.into_iter().map(|listed| listed.parts().1).collect();
    Ok(if is_complete { Prompt::Ids(ids) } else { Prompt::Rendered })
}

fn kind(finish: &Value) -> Option<&str> {
    finish.as_str().or_else(|| finish.get("type")?.as_str())
}

fn stop(finish: &Value) -> Stop {
    match finish.get("matched") {
        Some(Value::String(text)) => Stop::Text(text.clone()),
        Some(Value::Array(ids)) => ids.last().map_or(Stop::Unknown, stop_id),
        value => value.map_or(Stop::Unknown, stop_id),
    }
}

fn request(request: &Outline<'_>) -> Decoded<Request> {
    let parameters = request.object("sampling_params")?.unwrap_or_default();
    let prompt = prompt_of(request.ids("input_ids")?, request.text("text")?);
    let sampling = sampling_of(&parameters, "top_p")?;
    Ok(Request { prompt, sampling, ..Request::default() })
}
