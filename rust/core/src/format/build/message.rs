//! Converts one entry of a message list to a `Message` and, if the policy sampled it, a generation without its context.
//!
//! An entry is a plain message, a choice (`{"message", "logprobs", "token_ids"}`) or a complete response
//! (`{"choices"}`).
//!
//! Finish reasons of all servers are mapped to OpenAI's names: `stop`, `length`, `tool_calls`, `content_filter` and
//! `abort`, because alignment depends on them. Other names stay unchanged. Images that a record lists outside its
//! messages are moved to their places in them.

use super::{tokens, unread};
use crate::format::fields::{Fields, Sampling, get, number, present, stop_under, text};
use crate::format::json::object::{Node, Object, TokenLists, describe};
use crate::format::rejection::{Decoded, Reason, Rejection, not_a_trace, reject};
use crate::images::holds;
use crate::trace::{Generation, Message, Prompt, Stop};
use serde_json::{Value, json};

/// Contents of one entry.
pub struct Entry {
    pub message: Message,
    /// The generation. The caller sets its fields `message` and `context`.
    pub generation: Option<Generation>,
    /// The fields of the entry's `generation` object.
    pub generation_fields: Fields,
    /// Number of ignored choices of a response.
    pub unused_choices: u32,
}

impl Entry {
    /// Creates an entry for a message that the policy sampled, for a reader of a producer's own format.
    pub fn sampled(message: Message, generation: Generation, unused_choices: u32) -> Self {
        Self { message, generation: Some(generation), generation_fields: Fields::new(), unused_choices }
    }

    /// Reads an entry. `outer` contains the record's sampling parameters.
    pub fn read(mut item: Object, outer: &Sampling) -> Decoded<Self> {
        let is_message = get(&item.fields, "role").is_some();
        if item.has_list("choices") && !is_message {
            return Self::of_response(item, None, outer);
        }
        if item.has("message") && !is_message {
            return Self::of_choice(item, outer);
        }
        if is_message && item.has("message") && present(&item.fields, "content").is_none() {
            return Err(unread::no_content("message"));
        }
        let generation = item.take_object("generation")?;
        let is_sampled_kind =
            generation.is_some() || item.numbers.any_sampled() || role(&item.fields) == Some("assistant");
        let sampled = is_sampled_kind && !declined(&item.fields);
        let (placing, mut numbers) = match generation {
            Some(inner) => (inner.fields, inner.numbers.or(item.numbers)),
            None => (Fields::new(), item.numbers),
        };
        if sampled {
            tokens::gather(&mut numbers, &item.fields)?;
        }
        let generation =
            sampled.then(|| generation_of(&[&placing, &item.fields], numbers, outer, &placing)).transpose()?;
        Ok(Self { message: message_of(item.fields)?, generation, generation_fields: placing, unused_choices: 0 })
    }

    /// Reads one choice of a response: number `choice`, or the first if that is `None`.
    pub fn of_response(mut response: Object, choice: Option<i32>, outer: &Sampling) -> Decoded<Self> {
        let choices = response.take_list("choices")?.unwrap_or_default();
        let total = choices.len();
        let mut picked = pick(choices, choice)?;
        let prompt = response.numbers.prompt_token_ids.take();
        picked.numbers = picked.numbers.or(TokenLists { prompt_token_ids: prompt, ..TokenLists::default() });
        let index = get(&picked.fields, "index").and_then(Value::as_u64).unwrap_or(0) as usize;
        tokens::gather(&mut picked.numbers, &response.fields)?;
        tokens::gather_sglext(&mut picked.numbers, &response.fields, index)?;
        let mut entry = Self::of_choice(picked, outer)?;
        entry.generation.iter_mut().try_for_each(|generation| tokens::versions(generation, &response.fields))?;
        if let Some(generation) = &mut entry.generation {
            generation.server = tokens::producer(&response.fields);
        }
        entry.unused_choices = if choice.is_some() { 0 } else { (total - 1) as u32 };
        Ok(entry)
    }

    fn of_choice(mut choice: Object, outer: &Sampling) -> Decoded<Self> {
        if present(&choice.fields, "delta").is_some() {
            return Err(streamed());
        }
        let Some(mut inner) = choice.take_object("message")? else {
            return Err(reject(Reason::Incomplete, "TG-FORMAT-008", "a choice has no `message`")
                .why("The answer of the policy is unknown")
                .fix("Record the choice as the chat endpoint returned it"));
        };
        let mut numbers = choice.numbers.or(std::mem::take(&mut inner.numbers));
        tokens::gather(&mut numbers, &choice.fields)?;
        tokens::gather(&mut numbers, &inner.fields)?;
        let generation = generation_of(&[&choice.fields, &inner.fields], numbers, outer, &Fields::new())?;
        inner.fields.entry("role").or_insert_with(|| "assistant".into());
        let mut message = message_of(inner.fields)?;
        message.reward = message.reward.or(number(&choice.fields, "reward")?.map(|reward| reward as f32));
        let sampled = !declined(&choice.fields);
        Ok(Self {
            message,
            generation: sampled.then_some(generation),
            generation_fields: Fields::new(),
            unused_choices: 0,
        })
    }
}

/// Creates the rejection of a chunk of a streamed response.
pub fn streamed() -> Rejection {
    reject(Reason::UnknownForm, "TG-FORMAT-009", "a chunk of a streamed response")
        .why("A generation is read from the complete response")
        .fix("Record the assembled response, or turn streaming off while recording")
}

fn pick(choices: Vec<Node>, choice_number: Option<i32>) -> Decoded<Object> {
    let total = choices.len();
    let choice_number = choice_number.unwrap_or(0) as usize;
    let mut by_position = None;
    for (position, node) in choices.into_iter().enumerate() {
        let choice = node.object("choices")?;
        let index = get(&choice.fields, "index").and_then(Value::as_u64).unwrap_or(position as u64);
        if index == choice_number as u64 {
            return Ok(choice);
        }
        if position == choice_number {
            by_position = Some(choice);
        }
    }
    by_position.ok_or_else(|| no_choice(choice_number as i32, total, "choices"))
}

/// Creates the rejection of a choice number that is not among the `total` choices of a response.
pub fn no_choice(wanted: i32, total: usize, what: &str) -> Rejection {
    let reason = if total == 0 { Reason::FailedCall } else { Reason::Incomplete };
    reject(reason, "TG-FORMAT-010", format!("choice {wanted} is requested but the response has {total} {what}"))
        .why("No generation can be read")
        .fix("Leave out failed calls when recording, and name an existing choice")
}

fn role(fields: &Fields) -> Option<&str> {
    get(fields, "role").and_then(Value::as_str)
}

/// Returns whether the entry excludes itself from training.
fn declined(fields: &Fields) -> bool {
    let is_false = |key| get(fields, key).and_then(Value::as_bool) == Some(false);
    is_false("sampled") || is_false("trainable") || get(fields, "weight").and_then(Value::as_f64) == Some(0.0)
}

/// Creates the generation from fields and token lists. The first of `fields` with a value is used.
fn generation_of(fields: &[&Fields], numbers: TokenLists, outer: &Sampling, sampling: &Fields) -> Decoded<Generation> {
    let mut numbers = numbers;
    let prompt = numbers.prompt_token_ids.take().map_or(Prompt::Rendered, Prompt::Ids);
    let first = |key| fields.iter().copied().find(|fields| present(fields, key).is_some());
    let sampling = Sampling::read(sampling)?.or(outer);
    let finish = first("finish_reason").map_or(Ok(None), |fields| text(fields, "finish_reason"))?;
    // SGLang calls it `matched_stop`.
    let stop = ["stop_reason", "matched_stop"].into_iter().find_map(|key| Some((key, first(key)?)));
    Ok(Generation {
        prompt,
        tokens: numbers.into_tokens()?,
        finish_reason: finish.map(|raw| common(&raw).to_owned()),
        stop: stop.map_or(Ok(Stop::Unknown), |(key, fields)| stop_under(fields, key))?,
        cumulative_logprob: first("cumulative_logprob")
            .map_or(Ok(None), |fields| number(fields, "cumulative_logprob"))?,
        ..sampling.generation()
    })
}

/// Creates a message with only a role and content.
pub fn plain(role: &str, content: impl Into<Value>) -> Message {
    Message::new(plain_value(role, content), None)
}

/// Creates the JSON value of such a message.
pub fn plain_value(role: &str, content: impl Into<Value>) -> Value {
    let mut value = json!({"role": role, "content": null});
    value["content"] = content.into();
    value
}

/// Creates the message that a template receives.
///
/// Token lists were removed before. Keys of an assistant message that are null are removed, and so is an empty
/// `tool_calls`. Complete dumps of API objects contain such keys, and templates test whether a key exists. A message of
/// the role `function` that names its call is a tool message.
pub fn message_of(mut fields: Fields) -> Decoded<Message> {
    match get(&fields, "role") {
        Some(Value::String(_)) => {}
        None => return Err(not_a_trace("TG-FORMAT-011", "a message has no `role`")),
        Some(other) => {
            return Err(not_a_trace("TG-FORMAT-012", format!("`role` is {}, not a string", describe(other))));
        }
    }
    check_content(&fields)?;
    unread::check(&fields)?;
    if role(&fields) == Some("function") && present(&fields, "tool_call_id").is_some() {
        fields.insert("role".to_owned(), "tool".into());
    }
    let reward = number(&fields, "reward")?.map(|reward| reward as f32);
    if role(&fields) == Some("assistant") {
        say_refusal(&mut fields);
        fields.retain(|key, value| key == "content" || !(value.is_null() || (key == "tool_calls" && is_empty(value))));
    }
    Ok(Message::new(Value::Object(fields), reward))
}

/// Moves a refusal to `content` if there is no other content. The policy sampled it, and templates read only `content`.
fn say_refusal(fields: &mut Fields) {
    let has_calls = present(fields, "tool_calls").is_some_and(|calls| !is_empty(calls));
    let refusal_text = get(fields, "refusal").filter(|refusal| refusal.as_str().is_some_and(|text| !text.is_empty()));
    if let (None, false, Some(refusal)) = (present(fields, "content"), has_calls, refusal_text.cloned()) {
        fields.insert("content".to_owned(), refusal);
    }
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty)
}

fn check_content(fields: &Fields) -> Decoded<()> {
    match get(fields, "content") {
        None | Some(Value::Null | Value::String(_) | Value::Array(_)) => {}
        Some(other) => {
            let what = format!("`content` is {}, not a string", describe(other));
            return Err(reject(Reason::WrongType, "TG-FORMAT-013", what)
                .why("The text of the message is unknown")
                .fix("Write content as a string, or as a list of parts"));
        }
    }
    match get(fields, "tool_calls") {
        None | Some(Value::Null | Value::Array(_)) => Ok(()),
        Some(other) => Err(not_a_trace("TG-FORMAT-014", format!("`tool_calls` is {}, not a list", describe(other)))),
    }
}

/// Returns the common name of a server's finish reason.
pub fn common(raw: &str) -> &str {
    match raw {
        "eos" | "eos_token" | "end_turn" | "stop_sequence" | "STOP" | "end_of_sequence" | "end_id" | "stop_words"
        | "END_ID" | "STOP_WORDS" | "completed" | "word" | "end_of_turn" => "stop",
        "max_tokens" | "MAX_TOKENS" | "max_output_tokens" | "LENGTH" | "limit" | "model_context_window_exceeded" => {
            "length"
        }
        "tool_use" | "tool_call" => "tool_calls",
        "SAFETY" | "RECITATION" | "BLOCKLIST" | "PROHIBITED_CONTENT" | "SPII" | "refusal" => "content_filter",
        "aborted" | "cancelled" | "CANCELLED" | "error" | "failed" | "timeout" | "TIMEOUT" => "abort",
        other => other,
    }
}

/// Puts a record's list of images into its messages, in order, at the parts `{"type": "image"}`. Returns whether all
/// were placed.
///
/// If no message has such a part, the images go before the text of the first user message, as in TRL.
pub fn fill(messages: &mut [Message], images: &Value) -> bool {
    let Some(images) = images.as_array().filter(|images| !images.is_empty()) else { return false };
    let image_parts: Vec<Value> = images.iter().map(shown_as).collect();
    if !image_parts.iter().all(holds) {
        return false;
    }
    let is_placeholder = |part: &Value| *part == json!({"type": "image"});
    let parts = |message: &Message| message.value.get("content").and_then(Value::as_array).cloned().unwrap_or_default();
    let place_count: usize =
        messages.iter().map(|message| parts(message).iter().filter(|part| is_placeholder(part)).count()).sum();
    let mut next = image_parts.into_iter();
    if place_count == 0 {
        let Some(first) = messages.iter_mut().find(|message| message.role() == "user") else { return false };
        let text = match &first.value["content"] {
            Value::String(text) => vec![json!({"type": "text", "text": text})],
            Value::Array(parts) => parts.clone(),
            _ => Vec::new(),
        };
        first.value["content"] = next.chain(text).collect();
        renew(first);
        return true;
    }
    if place_count != next.len() {
        return false;
    }
    for message in messages.iter_mut().filter(|message| parts(message).iter().any(is_placeholder)) {
        let content = parts(message)
            .into_iter()
            .map(|part| if is_placeholder(&part) { next.next().unwrap_or(part) } else { part });
        message.value["content"] = content.collect();
        renew(message);
    }
    true
}

/// Extracts the images that were put into a message, and keeps those that it had.
fn renew(message: &mut Message) {
    let images = std::mem::take(&mut message.images);
    *message = Message::new(message.value.take(), message.reward);
    message.images.extend(images);
}

/// Converts an entry of a list of images to a part. It may be a data URL, base64, or `{"bytes": base64}` as in Arrow's
/// image type.
fn shown_as(image: &Value) -> Value {
    let data = image.get("bytes").unwrap_or(image);
    match data.as_str() {
        Some(text) if text.starts_with("data:") => json!({"type": "image", "image": text}),
        Some(text) => json!({"type": "image", "source": {"type": "base64", "data": text}}),
        None => image.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::common;

    #[test]
    fn a_servers_name_becomes_the_common_one_and_an_unknown_one_stays() {
        let named = ["end_turn", "STOP", "eos_token", "MAX_TOKENS", "tool_use", "SAFETY", "cancelled", "stop", "other"];
        let common: Vec<_> = named.into_iter().map(common).collect();
        assert_eq!(
            common,
            ["stop", "stop", "stop", "length", "tool_calls", "content_filter", "abort", "stop", "other"]
        );
    }
}

#[cfg(test)]
mod images_tests {
    use super::*;
    use crate::format::build::message::plain;
    use crate::images::handles;
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;

    fn images(sizes: &[u8]) -> (Value, Vec<[u8; 32]>) {
        let files: Vec<Vec<u8>> = sizes.iter().map(|&size| [b"GIF89a", &[size, 0, 7, 0][..]].concat()).collect();
        let digests = files.iter().map(|file| *blake3::hash(file).as_bytes()).collect();
        (files.iter().map(|file| json!({"bytes": STANDARD.encode(file), "path": null})).collect(), digests)
    }

    #[test]
    fn pictures_go_to_their_places_or_before_the_first_question() {
        let (two, digests) = images(&[5, 6]);
        let place = json!({"type": "image"});
        let mut placed =
            vec![plain("user", json!([place, {"type": "text", "text": "x"}])), plain("user", json!([place]))];
        assert!(fill(&mut placed, &two));
        let found: Vec<_> = placed.iter().map(|message| handles(&message.value)).collect();
        assert_eq!(found, [vec![digests[0]], vec![digests[1]]]);
        assert_eq!(placed[1].images[0].width, 6);

        let mut text = vec![plain("system", "s"), plain("user", "x"), plain("user", "y")];
        assert!(fill(&mut text, &two));
        assert_eq!(handles(&text[1].value), digests);
        assert_eq!(text[1].value["content"][2], json!({"type": "text", "text": "x"}));
    }

    #[test]
    fn a_list_that_does_not_fit_is_left() {
        let (two, _) = images(&[5, 6]);
        let mut one = vec![plain("user", json!([{"type": "image"}]))];
        assert!(!fill(&mut one, &two));
        assert!(!fill(&mut [plain("user", "x")], &json!(["/tmp/a.png"])));
        assert!(!fill(&mut [plain("assistant", "x")], &two));
        assert!(!fill(&mut [plain("user", "x")], &json!([])));
    }
}
