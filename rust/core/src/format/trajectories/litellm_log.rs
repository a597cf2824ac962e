//! LiteLLM's `StandardLoggingPayload`: `{"id", "call_type", "messages", "model_parameters", "response", "status",
//! ...}`.
//!
//! Source: litellm 1.106.2 `types/utils.py`. LiteLLM stores a choice's fields that OpenAI does not have in
//! `provider_specific_fields`. This includes the `token_ids` of vLLM's return_token_ids.

use super::helpers::columns::Columns;
use super::helpers::{parts, splice};
use super::interface::{Body, Decoded, Form, Header, Outline, Reason, Shape, TrajectoryFormat, reject};
use crate::format::build::calls::no_response;
use crate::format::call::one_call;
use serde_json::value::RawValue;

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form { name: "litellm_log", reason: "it has `model_parameters` and `call_type`" },
    signs: &["model_parameters", "call_type"],
    recognizes: |record| record.has_key("model_parameters") && (record.has("call_type") || record.has("status")),
    decode,
};

/// The value of messages if message logging is turned off.
const REDACTED: &str = "\"redacted-by-litellm\"";

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let header = Columns(record).header(&[])?;
    let Some(response) =
        record.object("response")?.filter(|_| record.text("status").ok().flatten().as_deref() != Some("failure"))
    else {
        let message = record.text("error_str")?.unwrap_or_else(|| "no response".to_owned());
        return Err(no_response(format!("the call failed: {}", message.chars().take(200).collect::<String>()))
            .fix("Leave failed calls out with on_error=\"skip\""));
    };
    let messages = record.get("messages");
    if messages.is_some_and(|raw| raw.get() == REDACTED)
        || response.get("text").is_some_and(|raw| raw.get() == REDACTED)
    {
        return Err(reject(Reason::Incomplete, "TG-FORMAT-071", "messages and response are redacted")
            .why("There is nothing to train on")
            .fix("Log with litellm.turn_off_message_logging = False"));
    }
    let parameters = record.object("model_parameters")?.unwrap_or_default();
    let mut members = parts(&parameters);
    members.retain(|(key, _)| !matches!(*key, "messages" | "prompt" | "model"));
    let texts = messages.is_some_and(|raw| Shape::of(raw) == Shape::Text);
    members.extend(messages.map(|raw| (if texts { "prompt" } else { "messages" }, raw)));
    members.extend(record.get("model").map(|raw| ("model", raw)));
    let request = splice(&members);
    let answer = lifted(&response)?;
    let text = format!("{{\"request\":{request},\"response\":{answer}}}");
    one_call(header, record, &text)
}

/// Moves the server's own fields of a response back to the keys under which the server returned them.
fn lifted(response: &Outline<'_>) -> Decoded<String> {
    let choices = response.objects("choices")?;
    let lifted_choices: Vec<String> = choices.iter().map(lift).collect::<Decoded<_>>()?;
    let mut all = parts(response);
    all.retain(|(key, _)| *key != "choices");
    let mut prompt = None;
    for holder in std::iter::once(response).chain(&choices) {
        let inner = holder.object("message")?.unwrap_or_default().object("provider_specific_fields")?;
        let extra_fields = holder.object("provider_specific_fields")?;
        let prompt_ids = [extra_fields, inner].into_iter().flatten().find_map(|fields| fields.get("prompt_token_ids"));
        prompt = prompt.or(prompt_ids);
    }
    if let Some(prompt) = prompt.filter(|_| !response.has("prompt_token_ids")) {
        all.push(("prompt_token_ids", prompt));
    }
    let mut text = splice(&all);
    if response.has("choices") {
        text.pop();
        let gap = if all.is_empty() { "" } else { "," };
        text.extend([gap, "\"choices\":[", &lifted_choices.join(","), "]}"]);
    }
    Ok(text)
}

fn lift(choice: &Outline<'_>) -> Decoded<String> {
    let extra_fields = choice.object("provider_specific_fields")?.unwrap_or_default();
    let message = choice.object("message")?.unwrap_or_default();
    let inner = message.object("provider_specific_fields")?.unwrap_or_default();
    let mut all: Vec<(&str, &RawValue)> = parts(choice);
    for key in ["token_ids", "logprobs", "stop_reason", "routed_experts", "sampling_mask", "weight_versions"] {
        let value = extra_fields.get(key).or_else(|| inner.get(key)).filter(|_| !choice.has(key));
        all.extend(value.map(|raw| (key, raw)));
    }
    all.retain(|(key, _)| *key != "provider_specific_fields");
    Ok(splice(&all))
}
