//! Fireworks with `raw_output`: `choice.raw_output = {"prompt_token_ids", "completion", "completion_token_ids",
//! "completion_logprobs"}`.
//!
//! Source: fireworks-ai 1.2.28 `types/shared/`. An entry's `sampling_logprob` belongs to the distribution that was
//! sampled from, after temperature and top-p; `logprob` belongs to the model's own. A ratio needs the first. So it is
//! used, as `processed`, if every entry has it; otherwise `logprob` is used, as `raw`. The legacy list of the choice
//! contains less.

use super::completions;
use super::interface::{
    API_DEFAULTS, CallContext, Columns, Decoded, Entry, Form, Id, Outline, Reading, Request, Server, Shape, TokenText,
    either, finish_under, spoken,
};
use crate::format::build::calls::chat_request;
use crate::format::build::message::message_of;
use crate::format::json::object::TokenLists;
use crate::trace::{LogprobKind, Prompt, Tokens};
use serde::Deserialize;

pub(super) const SERVER: Server = Server {
    form: Form { name: "fireworks", reason: "its `choices` have `raw_output`" },
    signs: &["choices"],
    recognizes: |response| {
        response.objects("choices").unwrap_or_default().iter().any(|choice| choice.is("raw_output", Shape::Object))
    },
    answer,
    request,
    defaults: API_DEFAULTS,
};

/// One entry of `completion_logprobs.content`.
#[derive(Deserialize)]
struct Listed {
    token_id: Option<Id>,
    #[serde(default)]
    token: TokenText,
    bytes: Option<Vec<u8>>,
    logprob: Option<Reading>,
    sampling_logprob: Option<Reading>,
}

fn answer(response: &Outline<'_>, context: &CallContext<'_>) -> Decoded<Entry> {
    let (choice, unused) = context.pick(response.objects("choices")?, "choices")?;
    let raw = choice.object("raw_output")?.unwrap_or_default();
    let (tokens, kind) = tokens(&raw, &choice)?;
    let mut generation = context.generation(kind);
    let token_ids = either(raw.ids("completion_token_ids")?, || choice.ids("token_ids"))?;
    generation.tokens = TokenLists::listed(tokens, token_ids).into_tokens()?;
    let prompt = either(raw.ids("prompt_token_ids")?, || response.ids("prompt_token_ids"))?;
    generation.prompt = prompt.map_or(Prompt::Rendered, Prompt::Ids);
    generation.finish_reason = finish_under(&choice, "finish_reason")?;
    generation.text = raw.text("completion")?;
    let message = match choice.object("message")? {
        Some(message) => {
            let mut fields = message.fields_without(&["logprobs", "token_ids"])?;
            fields.entry("role").or_insert_with(|| "assistant".into());
            message_of(fields)?
        }
        None => spoken(&choice.text("text")?.unwrap_or_default()),
    };
    Ok(Entry::sampled(message, generation, unused))
}

/// Returns the tokens with their logprobs, and the kind of these.
fn tokens(raw: &Outline<'_>, choice: &Outline<'_>) -> Decoded<(Option<Tokens>, LogprobKind)> {
    let logprobs = raw.object("completion_logprobs")?.unwrap_or_default();
    let Some(listed) = logprobs.typed::<Vec<Listed>>("content")? else {
        return Ok((choice.logprobs("logprobs")?, LogprobKind::Raw));
    };
    let processed = !listed.is_empty() && listed.iter().all(|entry| entry.sampling_logprob.is_some());
    let mut listing = Columns::default();
    for entry in listed {
        let reading = if processed { entry.sampling_logprob } else { entry.logprob };
        let (id, text, bytes) = (entry.token_id.map(|id| id.0), entry.token.0, entry.bytes);
        listing.push(id, reading.unwrap_or(Reading::Missing), text.as_deref(), bytes.as_deref());
    }
    Ok((Some(listing.into_tokens()), if processed { LogprobKind::Processed } else { LogprobKind::Raw }))
}

fn request(request: &Outline<'_>) -> Decoded<Request> {
    if request.has("messages") { chat_request(request) } else { completions::request(request) }
}
