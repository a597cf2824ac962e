//! vLLM's `/inference/v1/generate`, ids in and ids out: `{"request_id", "choices": [{"token_ids", "logprobs": {"content": [{"token_id",
//! "logprob"}]}}]}`.
//!
//! Source: vllm 0.32 `entrypoints/scale_out/token_in_token_out/protocol.py`. Older versions write `"token": "token_id:5"` in
//! place of `token_id`. In text mode the text leaves out a stop string that `token_ids` keep. Whether its logprobs are raw is
//! an option of the server (`--logprobs-mode`) that no response tells.

use super::contract::{Asked, PLAIN, Server, finish_under, sampling_of, spoken, stop_under};
use crate::format::form::Form;
use crate::format::json::object::Numbers;
use crate::format::json::outline::{Outline, Shape};
use crate::format::normal::calls::Request;
use crate::format::normal::extras::{routed_experts, sampling_mask, version_spans};
use crate::format::normal::message::Entry;
use crate::format::rejection::Decoded;
use crate::trace::{LogprobKind, Prompt};

pub(super) const SERVER: Server = Server {
    form: Form { name: "vllm_generate", sign: "its `choices` have `token_ids` and it has `request_id`" },
    signs: &["choices", "request_id", "output_mode"],
    knows,
    answer,
    request,
    defaults: PLAIN,
};

fn knows(response: &Outline<'_>) -> bool {
    let choices = response.objects("choices").unwrap_or_default();
    let own = response.has("output_mode") || response.has("request_id") && !response.has("object");
    own && choices.first().is_some_and(|choice| choice.is("token_ids", Shape::List) && !choice.has("message"))
}

fn answer(response: &Outline<'_>, asked: &Asked<'_>) -> Decoded<Entry> {
    let (choice, unused) = asked.pick(response.objects("choices")?, "choices")?;
    let mut generation = asked.generation(LogprobKind::Unknown);
    let numbers = Numbers::listed(choice.logprobs("logprobs")?, choice.ids("token_ids")?);
    generation.tokens = numbers.into_tokens()?;
    generation.prompt = response.ids("prompt_token_ids")?.map_or(Prompt::Rendered, Prompt::Ids);
    generation.finish_reason = finish_under(&choice, "finish_reason")?;
    generation.stop = stop_under(&choice, "stop_reason")?;
    generation.versions = version_spans(&choice)?;
    if let (true, Some(last)) = (generation.policy_version < 0, generation.versions.last()) {
        generation.policy_version = last.version;
    }
    let mask = sampling_mask(&choice, "sampling_mask")?;
    generation.extras = routed_experts(&choice)?.into_iter().chain(mask).collect();
    generation.text = choice.text("text")?;
    let message = spoken(generation.text.as_deref().unwrap_or_default());
    Ok(Entry::sampled(message, generation, unused))
}

fn request(request: &Outline<'_>) -> Decoded<Request> {
    let params = request.object("sampling_params")?.unwrap_or_default();
    let prompt = request.ids("token_ids")?.map_or(Prompt::Unknown, Prompt::Ids);
    let sampling = sampling_of(&params, "temperature", "top_p")?;
    Ok(Request { model: request.text("model")?, prompt, sampling, ..Request::default() })
}
