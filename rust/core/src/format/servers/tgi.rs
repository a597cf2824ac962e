//! Text Generation Inference: `{"generated_text", "details": {"tokens": [{"id", "text", "logprob", "special"}],
//! "prefill"}}`.
//!
//! Source: text-generation 0.7.0 `types.py` and the server's `utils/tokens.py`. `text` is each token decoded
//! separately, so the reader uses the ids. Logprobs are log-softmax of the scores after temperature, penalties, top-k
//! and top-p: `processed`. `prefill` contains the prompt's ids if they were requested.

use super::interface::{
    API_DEFAULTS, CallContext, Columns, Decoded, Entry, Form, Id, Outline, Reading, Reason, Request, Server, Shape,
    TokenText, finish_under, reject, sampling_of, spoken,
};
use crate::trace::{LogprobKind, Prompt};
use serde::Deserialize;
use serde_json::Value;

pub(super) const SERVER: Server = Server {
    form: Form { name: "tgi", reason: "it has `generated_text` and `details`" },
    signs: &["generated_text", "details"],
    recognizes: |response| response.is("details", Shape::Object) && response.has_key("generated_text"),
    answer,
    request,
    defaults: API_DEFAULTS,
};

#[derive(Deserialize)]
struct Token {
    id: Id,
    #[serde(default)]
    text: TokenText,
    logprob: Option<Reading>,
}

fn answer(response: &Outline<'_>, context: &CallContext<'_>) -> Decoded<Entry> {
    let details = response.object("details")?.unwrap_or_default();
    let others = details.objects("best_of_sequences")?;
    let unused = if context.choice.is_some() { 0 } else { others.len() as u32 };
    let (details, mut text) = match context.choice.unwrap_or(0) {
        0 => (details, response.text("generated_text")?),
        wanted => {
            let other = others.into_iter().nth(wanted as usize - 1).ok_or_else(|| {
                let what = format!("sequence {wanted} is requested but `best_of_sequences` does not have it");
                reject(Reason::Incomplete, "TG-FORMAT-058", what)
                    .why("No generation can be read")
                    .fix("Name an existing one: 0 is the best, the others follow")
            })?;
            let text = other.text("generated_text")?;
            (other, text)
        }
    };
    let mut generation = context.generation(LogprobKind::Processed);
    let mut listing = Columns::default();
    for token in details.typed::<Vec<Token>>("tokens")?.unwrap_or_default() {
        listing.push(Some(token.id.0), token.logprob.unwrap_or(Reading::Missing), token.text.0.as_deref(), None);
    }
    generation.tokens = listing.into_tokens();
    let prefill = details.typed::<Vec<Token>>("prefill")?.unwrap_or_default();
    if !prefill.is_empty() {
        generation.prompt = Prompt::Ids(prefill.into_iter().map(|token| token.id.0).collect());
    }
    generation.finish_reason = finish_under(&details, "finish_reason")?;
    if let (Some(whole), Some(prompt)) = (&text, full_text_prompt(context)?) {
        text = Some(whole.strip_prefix(prompt.as_str()).unwrap_or(whole).to_owned());
    }
    generation.text.clone_from(&text);
    Ok(Entry::sampled(spoken(&text.unwrap_or_default()), generation, unused))
}

/// Returns the prompt, if the request asked for it before the text (`return_full_text`).
fn full_text_prompt(context: &CallContext<'_>) -> Decoded<Option<String>> {
    let Some(request) = context.request else { return Ok(None) };
    let parameters = request.object("parameters")?.unwrap_or_default();
    let full = parameters.value("return_full_text")? == Some(Value::Bool(true));
    if full { request.text("inputs") } else { Ok(None) }
}

/// Reads a request. Without `do_sample`, temperature, top-k, top-p or typical-p the server decodes greedily:
/// temperature 0.
fn request(request: &Outline<'_>) -> Decoded<Request> {
    let parameters = request.object("parameters")?.unwrap_or_default();
    let mut sampling = sampling_of(&parameters, "top_p")?;
    let drawn = ["temperature", "top_k", "top_p", "typical_p"].iter().any(|key| parameters.has(key))
        || parameters.value("do_sample")? == Some(Value::Bool(true));
    if !drawn {
        sampling.temperature = Some(0.0);
    }
    let prompt = request.text("inputs")?.map_or(Prompt::Unknown, Prompt::Text);
    Ok(Request { prompt, sampling, ..Request::default() })
}
