//! One entry of a message list becomes a `Message` and, where the policy said it, a generation without its context.
//!
//! An entry is a plain message, a choice (`{"message", "logprobs", "token_ids"}`) or a whole response (`{"choices"}`).

use super::{finish, strays};
use crate::format::json::fields::{Fields, Sampling, get, number, present, stop_under, text};
use crate::format::json::object::{Node, Numbers, Object, describe};
use crate::format::rejection::{Decoded, Reason, Rejection, not_a_trace, reject};
use crate::trace::{Generation, Message, Prompt, Stop};
use serde_json::{Value, json};

/// What one entry says.
pub struct Entry {
    pub message: Message,
    /// The generation, with `message` and `context` still to be filled in.
    pub generation: Option<Generation>,
    /// The fields of its `generation` object.
    pub placing: Fields,
    /// Choices of a response that were not used.
    pub unused_choices: u32,
}

impl Entry {
    /// A message that the policy sampled, as a producer's own reader found it.
    pub fn sampled(message: Message, generation: Generation, unused_choices: u32) -> Self {
        Self { message, generation: Some(generation), placing: Fields::new(), unused_choices }
    }

    /// Reads an entry; `outer` is how the record says its tokens were sampled.
    pub fn read(mut item: Object, outer: &Sampling) -> Decoded<Self> {
        let is_message = get(&item.fields, "role").is_some();
        if item.has_list("choices") && !is_message {
            return Self::of_response(item, None, outer);
        }
        if item.has("message") && !is_message {
            return Self::of_choice(item, outer);
        }
        let generation = item.take_object("generation")?;
        let said = generation.is_some() || item.numbers.any_sampled() || role(&item.fields) == Some("assistant");
        let sampled = said && !declined(&item.fields);
        let (placing, mut numbers) = match generation {
            Some(inner) => (inner.fields, inner.numbers.or(item.numbers)),
            None => (Fields::new(), item.numbers),
        };
        if sampled {
            strays::gather(&mut numbers, &item.fields)?;
        }
        let generation =
            sampled.then(|| generation_of(&[&placing, &item.fields], numbers, outer, &placing)).transpose()?;
        Ok(Self { message: message_of(item.fields)?, generation, placing, unused_choices: 0 })
    }

    /// Reads a response: one of its choices, the first where none is named.
    pub fn of_response(mut response: Object, choice: Option<i32>, outer: &Sampling) -> Decoded<Self> {
        let choices = response.take_list("choices")?.unwrap_or_default();
        let total = choices.len();
        let mut picked = pick(choices, choice)?;
        let prompt = response.numbers.prompt_token_ids.take();
        picked.numbers = picked.numbers.or(Numbers { prompt_token_ids: prompt, ..Numbers::default() });
        let index = get(&picked.fields, "index").and_then(Value::as_u64).unwrap_or(0) as usize;
        strays::gather(&mut picked.numbers, &response.fields)?;
        strays::gather_sglext(&mut picked.numbers, &response.fields, index)?;
        let mut entry = Self::of_choice(picked, outer)?;
        entry.generation.iter_mut().try_for_each(|generation| strays::versions(generation, &response.fields))?;
        if let Some(generation) = &mut entry.generation {
            generation.server = strays::producer(&response.fields);
        }
        entry.unused_choices = if choice.is_some() { 0 } else { (total - 1) as u32 };
        Ok(entry)
    }

    fn of_choice(mut choice: Object, outer: &Sampling) -> Decoded<Self> {
        if present(&choice.fields, "delta").is_some() {
            return Err(streamed());
        }
        let Some(mut inner) = choice.take_object("message")? else {
            return Err(reject(Reason::Incomplete, "a choice has no `message`")
                .why("What the policy said is not known")
                .cure("Record the choice as the chat endpoint returned it"));
        };
        let mut numbers = choice.numbers.or(std::mem::take(&mut inner.numbers));
        strays::gather(&mut numbers, &choice.fields)?;
        strays::gather(&mut numbers, &inner.fields)?;
        let generation = generation_of(&[&choice.fields, &inner.fields], numbers, outer, &Fields::new())?;
        inner.fields.entry("role").or_insert_with(|| "assistant".into());
        let mut message = message_of(inner.fields)?;
        message.reward = message.reward.or(number(&choice.fields, "reward")?.map(|reward| reward as f32));
        let sampled = !declined(&choice.fields);
        Ok(Self { message, generation: sampled.then_some(generation), placing: Fields::new(), unused_choices: 0 })
    }
}

/// A complaint about the pieces of a streamed response.
pub fn streamed() -> Rejection {
    reject(Reason::UnknownForm, "a chunk of a streamed response")
        .why("A generation is read from the whole response")
        .cure("Record the assembled response, or turn streaming off while recording")
}

fn pick(choices: Vec<Node>, wanted: Option<i32>) -> Decoded<Object> {
    let total = choices.len();
    let wanted = wanted.unwrap_or(0) as usize;
    let mut by_position = None;
    for (position, node) in choices.into_iter().enumerate() {
        let choice = node.object("choices")?;
        let index = get(&choice.fields, "index").and_then(Value::as_u64).unwrap_or(position as u64);
        if index == wanted as u64 {
            return Ok(choice);
        }
        if position == wanted {
            by_position = Some(choice);
        }
    }
    by_position.ok_or_else(|| no_choice(wanted as i32, total, "choices"))
}

/// A complaint about a choice that is not among the `total` of a response.
pub fn no_choice(wanted: i32, total: usize, what: &str) -> Rejection {
    let reason = if total == 0 { Reason::FailedCall } else { Reason::Incomplete };
    reject(reason, format!("choice {wanted} is asked for but the response has {total} {what}"))
        .why("There is no generation to read")
        .cure("Leave out failed calls when recording, and name an existing choice")
}

fn role(fields: &Fields) -> Option<&str> {
    get(fields, "role").and_then(Value::as_str)
}

/// Whether the entry says that the policy is not to be trained on it.
fn declined(fields: &Fields) -> bool {
    let no = |key| get(fields, key).and_then(Value::as_bool) == Some(false);
    no("sampled") || no("trainable") || get(fields, "weight").and_then(Value::as_f64) == Some(0.0)
}

/// The generation that fields and token lists describe; the first of `fields` that says something counts.
fn generation_of(fields: &[&Fields], numbers: Numbers, outer: &Sampling, sampling: &Fields) -> Decoded<Generation> {
    let mut numbers = numbers;
    let prompt = numbers.prompt_token_ids.take().map_or(Prompt::Rendered, Prompt::Ids);
    let first = |key| fields.iter().copied().find(|fields| present(fields, key).is_some());
    let sampling = Sampling::read(sampling)?.or(outer);
    let finish = first("finish_reason").map_or(Ok(None), |fields| text(fields, "finish_reason"))?;
    // SGLang's name for it is `matched_stop`.
    let stop = ["stop_reason", "matched_stop"].into_iter().find_map(|key| Some((key, first(key)?)));
    Ok(Generation {
        prompt,
        tokens: numbers.into_tokens()?,
        finish_reason: finish.map(|raw| finish::common(&raw).to_owned()),
        stop: stop.map_or(Ok(Stop::Unsaid), |(key, fields)| stop_under(fields, key))?,
        cumulative_logprob: first("cumulative_logprob")
            .map_or(Ok(None), |fields| number(fields, "cumulative_logprob"))?,
        ..sampling.generation()
    })
}

/// A message that says this and nothing else.
pub fn plain(role: &str, content: impl Into<Value>) -> Message {
    Message::new(plain_value(role, content), None)
}

/// The same as a template gets it, of which a message is still to be made.
pub fn plain_value(role: &str, content: impl Into<Value>) -> Value {
    let mut value = json!({"role": role, "content": null});
    value["content"] = content.into();
    value
}

/// The message as a template gets it.
///
/// Token lists are gone already. An assistant message loses keys that are null or an empty `tool_calls`, as API objects
/// have them when they are written whole: templates ask whether such a key is there.
pub fn message_of(mut fields: Fields) -> Decoded<Message> {
    match get(&fields, "role") {
        Some(Value::String(_)) => {}
        None => return Err(not_a_trace("a message has no `role`")),
        Some(other) => return Err(not_a_trace(format!("`role` is {}, not a string", describe(other)))),
    }
    check_content(&fields)?;
    let reward = number(&fields, "reward")?.map(|reward| reward as f32);
    if role(&fields) == Some("assistant") {
        say_refusal(&mut fields);
        fields.retain(|key, value| key == "content" || !(value.is_null() || (key == "tool_calls" && is_empty(value))));
    }
    Ok(Message::new(Value::Object(fields), reward))
}

/// A refusal is what the policy said, and templates know of `content` alone: it becomes that where there is no other.
fn say_refusal(fields: &mut Fields) {
    let called = present(fields, "tool_calls").is_some_and(|calls| !is_empty(calls));
    let refused = get(fields, "refusal").filter(|refusal| refusal.as_str().is_some_and(|text| !text.is_empty()));
    if let (None, false, Some(refusal)) = (present(fields, "content"), called, refused.cloned()) {
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
            return Err(reject(Reason::WrongType, what)
                .why("The text of the message is not known")
                .cure("Write content as a string, or as a list of parts"));
        }
    }
    match get(fields, "tool_calls") {
        None | Some(Value::Null | Value::Array(_)) => Ok(()),
        Some(other) => Err(not_a_trace(format!("`tool_calls` is {}, not a list", describe(other)))),
    }
}
