//! Tinker: `{"sequences": [{"tokens", "logprobs", "stop_reason"}]}`, or one such sequence.
//!
//! Source: tinker 0.38.0 `types/sample_response.py`, `sampled_sequence.py`. There are only ids, and no text. The stop
//! token is among them if it is a token. A dump of the dataclass has its lists under `tokens_np` and `logprobs_np`.
//! Whether the logprobs are raw is not documented.

use super::interface::{
    API_DEFAULTS, CallContext, Decoded, Entry, Form, Outline, Request, Server, Shape, finish_under, sampling_under,
    spoken,
};
use crate::format::json::object::TokenLists;
use crate::trace::{LogprobKind, Prompt};

pub(super) const SERVER: Server = Server {
    form: Form { name: "tinker", reason: "it has `sequences` with `tokens`" },
    signs: &["sequences", "sequence_id", "tokens_np"],
    recognizes: |response| match response.first_of("sequences") {
        Some(first) => is_sequence(&first),
        None => response.has("sequence_id") && is_sequence(response),
    },
    answer,
    request,
    defaults: API_DEFAULTS,
};

fn is_sequence(sequence: &Outline<'_>) -> bool {
    (sequence.is("tokens", Shape::List) || sequence.is("tokens_np", Shape::List)) && sequence.has_key("stop_reason")
}

fn answer(response: &Outline<'_>, context: &CallContext<'_>) -> Decoded<Entry> {
    let (sequence, unused) = match response.objects("sequences")? {
        none if none.is_empty() => (response.clone(), 0),
        sequences => context.pick(sequences, "sequences")?,
    };
    let existing_key = |list: &'static str, array: &'static str| if sequence.has(list) { list } else { array };
    let mut generation = context.generation(LogprobKind::Unknown);
    let logprobs = sequence.logprobs(existing_key("logprobs", "logprobs_np"))?;
    let token_ids = sequence.ids(existing_key("tokens", "tokens_np"))?;
    generation.tokens = TokenLists::listed(logprobs, token_ids).into_tokens()?;
    generation.finish_reason = finish_under(&sequence, "stop_reason")?;
    Ok(Entry::sampled(spoken(""), generation, unused))
}

/// Reads `prompt.chunks[].tokens`. A prompt with an image has parts without ids.
fn request(request: &Outline<'_>) -> Decoded<Request> {
    let sampling = sampling_under(request, "sampling_params")?;
    let prompt = request.object("prompt")?.unwrap_or_default();
    let mut ids = Some(Vec::new());
    for chunk in prompt.objects("chunks")? {
        match (chunk.ids("tokens")?, &mut ids) {
            (Some(tokens), Some(ids)) => ids.extend(tokens),
            _ => ids = None,
        }
    }
    let prompt = ids.filter(|ids| !ids.is_empty()).map_or(Prompt::Unknown, Prompt::Ids);
    Ok(Request { model: request.text("base_model")?, prompt, sampling, ..Request::default() })
}
