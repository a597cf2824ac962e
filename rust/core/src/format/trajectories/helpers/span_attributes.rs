//! Attributes of spans (flat names, lists, or texts of lists), and the model call that they describe.
//!
//! Source: OpenTelemetry's semantic conventions for generative AI (`gen_ai.input.messages`, `gen_ai.output.messages`),
//! the older `gen_ai.prompt.0.role` of OpenLLMetry and AgentOps, and the names that Agent Lightning 0.3.0 adds or reads
//! (`adapter/triplet.py`, `instrumentation/agentops.py`).

use super::super::interface::{Decoded, Header, Outline, Reason, Rejection, Sampling, Shape, reject};
use super::conversation::message;
use super::{function_call, python_literal, tools};
use crate::format::build::calls::{Call, Request};
use crate::format::build::message::Entry;
use crate::format::fields::{Fields, number_of};
use crate::format::json::outline::logprobs_in;
use crate::format::token_list::MAX_ID;
use crate::sampling::place_of;
use crate::trace::{Message, Tokens};
use serde_json::{Value, json};

/// Names with more parts are not unfolded.
const DEEPEST_NAME: usize = 16;

const PROMPT_IDS: &[&str] =
    &["prompt_token_ids", "agentlightning.operation.output.prompt_token_ids", "llm.hosted_vllm.prompt_token_ids"];
const SAMPLED_IDS: &[&str] = &[
    "response_token_ids",
    "agentlightning.operation.output.response_token_ids.0",
    "agentlightning.operation.output.response_token_ids",
    "agentlightning.operation.output.choices.0.token_ids",
    "agentlightning.operation.output.choices.0.provider_specific_fields.token_ids",
    "llm.hosted_vllm.response_token_ids",
];

pub struct Attributes(pub Fields);

impl Attributes {
    /// Reads the attributes of a span: an object, or OTLP's list of keys and typed values.
    pub fn of(span: &Outline<'_>) -> Decoded<Self> {
        if !span.is("attributes", Shape::List) {
            return Ok(Self(match span.value("attributes")? {
                Some(Value::Object(fields)) => fields,
                _ => Fields::new(),
            }));
        }
        let mut fields = Fields::new();
        for pair in span.objects("attributes")? {
            if let (Some(key), Some(value)) = (pair.text("key")?, pair.value("value")?) {
                fields.insert(key, plain(value, 0));
            }
        }
        Ok(Self(fields))
    }

    /// Returns the first of these names that exists, with its value. A text that is a literal is parsed.
    fn first(&self, names: &[&str]) -> Option<(String, Value)> {
        let entry = names.iter().find_map(|name| Some((*name, self.0.get(*name).filter(|value| !value.is_null())?)))?;
        let value = match entry.1 {
            Value::String(text) => python_literal::parse(text).unwrap_or_else(|| entry.1.clone()),
            other => other.clone(),
        };
        Some((entry.0.to_owned(), value))
    }

    fn text(&self, name: &str) -> Option<String> {
        self.0.get(name).and_then(Value::as_str).map(str::to_owned)
    }

    /// Returns the ids under the first of these names that exists. Of a list of lists the first is used.
    fn ids(&self, names: &[&str]) -> Decoded<Option<Vec<u32>>> {
        let Some((name, value)) = self.first(names) else { return Ok(None) };
        let id_list = match value {
            Value::Array(mut lists) if lists.first().is_some_and(Value::is_array) => lists.swap_remove(0),
            value => value,
        };
        ids_of(&name, id_list).map(|ids| Some(ids).filter(|ids| !ids.is_empty()))
    }

    /// Returns the value of all names with a prefix together (`prefix.0.role` and so on), or the value of the prefix
    /// itself.
    pub fn unfolded(&self, prefix: &str) -> Option<Value> {
        if let Some((_, value)) = self.first(&[prefix]) {
            return Some(value);
        }
        let mut tree = Value::Null;
        for (name, value) in &self.0 {
            let Some(path) = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('.')) else { continue };
            if path.split('.').count() <= DEEPEST_NAME {
                put(&mut tree, path, value);
            }
        }
        (!tree.is_null()).then(|| lists_from_numbers(tree))
    }

    pub fn is_call(&self) -> bool {
        self.0.keys().any(|name| {
            SAMPLED_IDS.contains(&name.as_str())
                || ["gen_ai.output.messages", "llm.hosted_vllm.choices"].contains(&name.as_str())
                || name.starts_with("gen_ai.completion.")
                || name.starts_with("agentlightning.operation.output.choices.")
        })
    }

    /// Returns the server's id of the response, which identifies the same call in two spans.
    pub fn response_id(&self) -> Option<String> {
        ["gen_ai.response.id", "agentlightning.operation.output.id", "llm.hosted_vllm.id"]
            .iter()
            .find_map(|name| self.text(name))
    }

    /// Returns the reward of a span that contains one instead of a call.
    pub fn reward(&self) -> Decoded<Option<f64>> {
        let nested = ["agentops.task.output", "agentops.entity.output"].iter().find_map(|name| {
            let (_, value) = self.first(&[name])?;
            (value.get("type")? == "reward").then(|| value.get("value").cloned())?
        });
        let direct = ["agentlightning.reward.0.value", "reward"].iter().find_map(|name| self.0.get(*name).cloned());
        direct.or(nested).map_or(Ok(None), |value| number_of("reward", &value))
    }

    pub fn call(&self, header: &Header) -> Decoded<Call> {
        let mut fields = Fields::new();
        for prefix in ["gen_ai.request.", "agentlightning.operation.input."] {
            for (key, value) in &self.0 {
                let sampled = |name: &&str| matches!(*name, "temperature" | "top_p") || place_of(name).is_some();
                if let Some(name) = key.strip_prefix(prefix).filter(sampled) {
                    fields.entry(name.to_owned()).or_insert_with(|| value.clone());
                }
            }
        }
        let mut generation = header.sampling.clone().or(&Sampling::read(&fields)?).generation();
        generation.tokens = self.tokens()?;
        let response_message = self.said();
        generation.finish_reason = response_message
            .as_ref()
            .and_then(|response_message| response_message.get("finish_reason")?.as_str())
            .map(str::to_owned);
        let sampled_messages = self.heard()?;
        let ids = self.ids(PROMPT_IDS)?;
        let definitions = self.first(&["gen_ai.tool.definitions"]).map(|(_, tools)| tools);
        let model = self.text("gen_ai.request.model").or_else(|| self.text("gen_ai.response.model"));
        let request = Request { tools: tools(definitions), model, ..Request::of(sampled_messages, ids) };
        let answer =
            message(response_message.map_or_else(|| json!({"role": "assistant", "content": null}), chat_message))?;
        let entry = Entry::sampled(answer, generation, 0);
        Ok(Call { request: Some(request), entry, model: None, reward: None })
    }

    fn tokens(&self) -> Decoded<Tokens> {
        let entries = ["logprobs.content", "logprobs.refusal"].iter().find_map(|name| self.0.get(*name));
        let mut tokens = match entries {
            Some(Value::String(text)) => logprobs_of(text)?,
            Some(value) => logprobs_of(&value.to_string())?,
            None => Tokens::default(),
        };
        let mut ids = self.ids(SAMPLED_IDS)?;
        if let (None, Some((name, choices))) = (&ids, self.first(&["llm.hosted_vllm.choices"])) {
            let first = choices.get(0).and_then(|choice| choice.get("token_ids")).filter(|ids| ids.is_array());
            ids = first.map(|ids| ids_of(&name, ids.clone())).transpose()?;
        }
        tokens.ids = ids.or(tokens.ids);
        Ok(tokens)
    }

    /// Returns the messages of the request.
    fn heard(&self) -> Decoded<Vec<Message>> {
        let prompts = ["gen_ai.input.messages", "gen_ai.prompt", "agentlightning.operation.input.messages"];
        let mut sampled_messages = Vec::new();
        if let Some((_, Value::Array(parts))) = self.first(&["gen_ai.system_instructions"]) {
            sampled_messages.push(message(chat_message(json!({"role": "system", "parts": parts})))?);
        }
        let value = prompts.iter().find_map(|prefix| self.unfolded(prefix));
        if let Some(Value::Array(items)) = value {
            for value in items.into_iter().flat_map(spread) {
                sampled_messages.push(message(chat_message(value))?);
            }
        }
        Ok(sampled_messages)
    }

    /// Returns the response message.
    fn said(&self) -> Option<Value> {
        let answers = ["gen_ai.output.messages", "gen_ai.completion", "agentlightning.operation.output.choices"];
        let choices = answers.iter().find_map(|prefix| self.unfolded(prefix))?;
        let first = choices.get(0).cloned()?;
        match (first.get("message").cloned(), first.get("finish_reason").cloned()) {
            (Some(Value::Object(mut message)), finish) => {
                message.insert("finish_reason".to_owned(), finish.unwrap_or(Value::Null));
                Some(Value::Object(message))
            }
            _ => Some(first),
        }
    }
}

fn ids_of(name: &str, value: Value) -> Decoded<Vec<u32>> {
    let Value::Array(items) = value else { return Err(no_ids(name)) };
    items
        .iter()
        .map(|item| item.as_u64().filter(|id| *id <= MAX_ID).map(|id| id as u32).ok_or_else(|| no_ids(name)))
        .collect()
}

fn no_ids(name: &str) -> Rejection {
    reject(Reason::IdOutOfRange, "TG-FORMAT-068", format!("`{name}` is not a list of token ids"))
        .why("The sampled tokens are unknown")
        .fix("Record ids as integers from 0 to 2147483647, as a list or as the text of one")
}

fn logprobs_of(text: &str) -> Decoded<Tokens> {
    logprobs_in(text).map(Option::unwrap_or_default).map_err(|fault| {
        reject(Reason::WrongType, "TG-FORMAT-069", format!("`logprobs.content`: {}", fault.complaint()))
            .why("It is ambiguous which logprob belongs to which token")
            .fix("Record the entries as the server sent them")
    })
}

/// Converts OTLP's typed values to plain ones.
fn plain(value: Value, depth: usize) -> Value {
    let Value::Object(mut typed) = value else { return value };
    if depth > DEEPEST_NAME {
        return Value::Null;
    }
    for name in ["stringValue", "boolValue", "doubleValue"] {
        if let Some(value) = typed.remove(name) {
            return value;
        }
    }
    match (typed.remove("intValue"), typed.remove("arrayValue")) {
        (Some(Value::String(digits)), _) => digits.parse::<i64>().map_or(Value::String(digits), Value::from),
        (Some(number), _) => number,
        (None, Some(Value::Object(mut list))) => match list.remove("values") {
            Some(Value::Array(items)) => items.into_iter().map(|item| plain(item, depth + 1)).collect(),
            _ => Value::Array(Vec::new()),
        },
        _ => Value::Null,
    }
}

/// Sets the value at a dotted path. Lists are objects with numbers as keys until all values are set.
fn put(target: &mut Value, path: &str, value: &Value) {
    let mut at = target;
    for part in path.split('.') {
        if !at.is_object() {
            *at = Value::Object(Fields::new());
        }
        let Some(fields) = at.as_object_mut() else { return };
        at = fields.entry(part).or_insert(Value::Null);
    }
    *at = value.clone();
}

/// Converts objects whose keys are all numbers to lists, ordered by these numbers.
fn lists_from_numbers(value: Value) -> Value {
    let Value::Object(fields) = value else { return value };
    let mut items: Vec<(String, Value)> =
        fields.into_iter().map(|(key, value)| (key, lists_from_numbers(value))).collect();
    if items.iter().all(|(key, _)| key.parse::<u32>().is_ok()) {
        items.sort_by_key(|(key, _)| key.parse::<u32>().unwrap_or_default());
        return items.into_iter().map(|(_, value)| value).collect();
    }
    Value::Object(items.into_iter().collect())
}

/// Splits a message with the results of several calls into one message per result.
fn spread(value: Value) -> Vec<Value> {
    let answers = |part: &Value| part.get("type").is_some_and(|kind| kind == "tool_call_response");
    let parts = value.get("parts").and_then(Value::as_array);
    match parts.filter(|parts| parts.len() > 1 && parts.iter().all(answers)) {
        Some(parts) => parts.iter().map(|part| json!({"role": "tool", "parts": [part]})).collect(),
        None => vec![value],
    }
}

/// Converts a message with parts to the format of the chat completions API. Other messages are unchanged.
fn chat_message(mut value: Value) -> Value {
    if let Some(fields) = value.as_object_mut() {
        fields.remove("finish_reason");
        if fields.get("role").is_none_or(|role| !role.is_string()) {
            fields.insert("role".to_owned(), "assistant".into());
        }
        let calls = fields.remove("tool_calls").map(openai_calls);
        fields.extend(calls.map(|calls| ("tool_calls".to_owned(), calls)));
    }
    let Some(Value::Array(parts)) = value.get("parts").cloned() else { return value };
    let kind = |part: &Value| part.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let words = |wanted: &str| -> Option<String> {
        let texts = parts.iter().filter(|part| kind(part) == wanted).filter_map(|part| part.get("content")?.as_str());
        let texts: Vec<&str> = texts.collect();
        (!texts.is_empty()).then(|| texts.concat())
    };
    let mut fields = Fields::new();
    fields.insert("role".to_owned(), value.get("role").cloned().unwrap_or_else(|| "assistant".into()));
    fields.insert("content".to_owned(), words("text").into());
    if let Some(thought) = words("reasoning").or_else(|| words("thinking")) {
        fields.insert("reasoning_content".to_owned(), thought.into());
    }
    let calls: Vec<Value> = parts.iter().filter(|part| kind(part) == "tool_call").cloned().collect();
    if !calls.is_empty() {
        fields.insert("tool_calls".to_owned(), openai_calls(calls.into()));
    }
    if let Some(answer) = parts.iter().find(|part| kind(part) == "tool_call_response") {
        let result = answer.get("response").or_else(|| answer.get("result")).cloned().unwrap_or(Value::Null);
        let text = if result.is_string() || result.is_null() { result } else { result.to_string().into() };
        fields.insert("content".to_owned(), text);
        fields.insert("tool_call_id".to_owned(), answer.get("id").cloned().unwrap_or(Value::Null));
    }
    Value::Object(fields)
}

/// Converts tool calls, flat or under `function`, to the format of the chat completions API.
fn openai_calls(value: Value) -> Value {
    let Value::Array(calls) = value else { return value };
    let call = |call: Value| {
        if call.get("function").is_some() {
            return call;
        }
        function_call(&call, ["id", "name", "arguments"])
    };
    calls.into_iter().map(call).collect()
}
