//! vLLM's `/inference/v1/generate`, with ids as input and output: `{"request_id", "choices": [{"token_ids", "logprobs":
//! {"content": [{"token_id", "logprob"}]}}]}`.
//!
//! Source: vllm 0.32 `entrypoints/scale_out/token_in_token_out/protocol.py`. Older versions write `"token":
//! "token_id:5"` in place of `token_id`. In text mode the text omits a stop string, and `token_ids` contain it. Whether
//! its logprobs are raw depends on an option of the server (`--logprobs-mode`) that no response contains.

use super::interface::{API_DEFAULTS, CallContext, Decoded, Entry, Form, Outline, Request, Server, Shape, sampling_of};
use super::request_output::described;
use crate::format::build::message::plain;
use crate::format::json::object::TokenLists;
use crate::trace::{ImagePosition, LogprobKind, Prompt};

pub(super) const SERVER: Server = Server {
    form: Form { name: "vllm_generate", reason: "its `choices` have `token_ids` and it has `request_id`" },
    signs: &["choices", "request_id", "output_mode"],
    recognizes: |response| {
        let is_generate = response.has("output_mode") || response.has("request_id") && !response.has("object");
        let first = response.first_of("choices").filter(|_| is_generate);
        first.is_some_and(|choice| choice.is("token_ids", Shape::List) && !choice.has("message"))
    },
    answer,
    request,
    defaults: API_DEFAULTS,
};

fn answer(response: &Outline<'_>, context: &CallContext<'_>) -> Decoded<Entry> {
    let (choice, unused) = context.pick(response.objects("choices")?, "choices")?;
    let mut generation = context.generation(LogprobKind::Unknown);
    generation.tokens = TokenLists::listed(choice.logprobs("logprobs")?, choice.ids("token_ids")?).into_tokens()?;
    generation.prompt = response.ids("prompt_token_ids")?.map_or(Prompt::Rendered, Prompt::Ids);
    generation.placeholders = placeholders(response)?;
    let mut entry = described(&choice, generation, unused)?;
    if let Some(generation) = entry.generation.as_mut().filter(|generation| generation.policy_version < 0) {
        generation.policy_version = generation.versions.last().map_or(-1, |last| last.version);
    }
    Ok(entry)
}

fn request(request: &Outline<'_>) -> Decoded<Request> {
    let parameters = request.object("sampling_params")?.unwrap_or_default();
    let prompt = request.ids("token_ids")?.map_or(Prompt::Unknown, Prompt::Ids);
    let sampling = sampling_of(&parameters, "top_p")?;
    let parts = request.value("content_parts")?.filter(|parts| parts.as_array().is_some_and(|parts| !parts.is_empty()));
    let messages = parts.map(|parts| plain("user", parts)).into_iter().collect();
    Ok(Request { messages, model: request.text("model")?, prompt, sampling, ..Request::default() })
}

/// Reads the positions of the images in the prompt: `{"image": [{"offset", "length"}]}`.
fn placeholders(response: &Outline<'_>) -> Decoded<Option<Vec<ImagePosition>>> {
    let Some(places) = response.object("mm_placeholders")? else { return Ok(None) };
    let of = |place: &Outline<'_>| {
        let count = |key: &str| Ok(place.count(key)?.and_then(|count| u32::try_from(count).ok()));
        Ok(count("offset")?.zip(count("length")?).map(|(offset, length)| ImagePosition { offset, length }))
    };
    if !places.has("image") {
        return Ok(None);
    }
    let places: Vec<Option<ImagePosition>> = places.objects("image")?.iter().map(of).collect::<Decoded<_>>()?;
    Ok(places.into_iter().collect())
}
