//! Gemini's `generateContent`: `{"candidates": [{"content": {"parts"}, "logprobsResult": {"chosenCandidates":
//! [...]}}]}`.
//!
//! Source: google-genai 3.4.0 `types.py`. Its dumps have snake_case keys, the HTTP API camelCase. `tokenId` belongs to
//! a closed tokenizer. The kind of the logprobs is not documented.

use super::interface::{
    API_DEFAULTS, CallContext, Columns, Decoded, Entry, Form, Id, Outline, Reading, Request, Server, Shape, TokenText,
    either, finish_under, sampling_of,
};
use super::messages;
use crate::format::fields::Fields;
use crate::trace::{LogprobKind, Message, Schemas, Tokens};
use serde::Deserialize;
use serde_json::{Value, json};

pub(super) const SERVER: Server = Server {
    form: Form { name: "gemini", reason: "its `candidates` have `content`" },
    signs: &["candidates"],
    recognizes: |response| {
        response.first_of("candidates").is_some_and(|candidate| {
            candidate.is("content", Shape::Object) || candidate.has_key(&key(&candidate, "finishReason"))
        })
    },
    answer,
    request,
    defaults: API_DEFAULTS,
};

/// Converts `topP` to `top_p`.
fn snake(camel: &str) -> String {
    let mut snake = String::new();
    for letter in camel.chars() {
        snake.extend(letter.is_ascii_uppercase().then_some('_'));
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}

/// Returns the spelling of a key that the object uses.
fn key(outline: &Outline<'_>, camel: &str) -> String {
    Some(snake(camel)).filter(|snake| outline.has(snake)).unwrap_or_else(|| camel.to_owned())
}

fn get<'v>(value: &'v Value, camel: &str) -> Option<&'v Value> {
    value.get(camel).or_else(|| value.get(snake(camel))).filter(|value| !value.is_null())
}

/// A chosen token.
#[derive(Deserialize)]
struct Chosen {
    #[serde(default)]
    token: TokenText,
    #[serde(alias = "token_id", rename = "tokenId")]
    id: Option<Id>,
    #[serde(alias = "log_probability", rename = "logProbability")]
    logprob: Option<Reading>,
}

fn answer(response: &Outline<'_>, context: &CallContext<'_>) -> Decoded<Entry> {
    let (candidate, unused) = context.pick(response.objects("candidates")?, "candidates")?;
    let mut generation = context.generation(LogprobKind::Unknown);
    generation.tokens = tokens(&candidate)?;
    generation.finish_reason = finish_under(&candidate, &key(&candidate, "finishReason"))?;
    let content = candidate.value("content")?.unwrap_or_default();
    let messages = messages_of(&content, "model");
    let message = messages.into_iter().find(|message| message["role"] == "assistant");
    let message = message.unwrap_or_else(|| json!({"role": "assistant", "content": ""}));
    Ok(Entry::sampled(Message::new(message, None), generation, unused))
}

fn tokens(candidate: &Outline<'_>) -> Decoded<Tokens> {
    let result = candidate.object(&key(candidate, "logprobsResult"))?.unwrap_or_default();
    let chosen: Vec<Chosen> = result.typed(&key(&result, "chosenCandidates"))?.unwrap_or_default();
    let mut listing = Columns::default();
    for token in chosen {
        let reading = token.logprob.unwrap_or(Reading::Missing);
        listing.push(token.id.map(|id| id.0), reading, token.token.0.as_deref(), None);
    }
    Ok(listing.into_tokens())
}

/// Returns the messages of a content: one for its text and calls, and a tool message for each function response.
fn messages_of(content: &Value, default_role: &str) -> Vec<Value> {
    let parts = match content {
        Value::String(text) => return vec![json!({"role": "user", "content": text})],
        _ => content.get("parts").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default(),
    };
    let role = content.get("role").and_then(Value::as_str).unwrap_or(default_role);
    let (mut said, mut thought) = (messages::Content::default(), String::new());
    let (mut calls, mut messages) = (Vec::new(), Vec::new());
    for part in parts {
        if let Some(found) = part.get("text").and_then(Value::as_str) {
            if part.get("thought") == Some(&Value::Bool(true)) {
                thought.push_str(found);
            } else {
                said.text(found);
            }
        } else if let Some(call) = get(part, "functionCall") {
            calls.push(messages::tool_call(call.get("id"), call.get("name"), call.get("args")));
        } else if let Some(answer) = get(part, "functionResponse") {
            let content = answer.get("response").map(Value::to_string).unwrap_or_default();
            messages.push(messages::tool_result(answer.get("id").or(answer.get("name")), answer.get("name"), content));
        } else if get(part, "inlineData").or(get(part, "fileData")).is_some() {
            said.part(part.clone());
        }
    }
    let speaks = !said.is_empty() || !calls.is_empty() || !thought.is_empty();
    if speaks || messages.is_empty() {
        let role = if role == "model" { "assistant" } else { role };
        messages.push(messages::message(role, said, &thought, calls));
    }
    messages
}

/// Reads `contents` with `generationConfig`, or the SDK's `config`.
fn request(request: &Outline<'_>) -> Decoded<Request> {
    let name = if request.has("config") { "config" } else { &key(request, "generationConfig") };
    let config = request.object(name)?.unwrap_or_default();
    let sampling = sampling_of(&config, &key(&config, "topP"))?;
    let system = request.value(&key(request, "systemInstruction"))?;
    let system = either(system, || config.value(&key(&config, "systemInstruction")))?;
    let mut values = Vec::new();
    for content in system.iter().flat_map(|system| messages_of(system, "system")) {
        values.push(json!({"role": "system", "content": content["content"]}));
    }
    match request.value("contents")?.unwrap_or_default() {
        Value::Array(contents) => values.extend(contents.iter().flat_map(|content| messages_of(content, "user"))),
        Value::Null => {}
        content => values.extend(messages_of(&content, "user")),
    }
    let tools = either(request.value("tools")?, || config.value("tools"))?;
    let messages = values.into_iter().map(|value| Message::new(value, None)).collect();
    let template_kwargs = Fields::new();
    let model = request.text("model")?;
    Ok(Request { messages, tools: declared(tools), template_kwargs, model, sampling, ..Request::default() })
}

/// Returns function declarations as tool schemas.
fn declared(tools: Option<Value>) -> Option<Schemas> {
    let tools = tools?;
    let lists = tools.as_array()?.iter().filter_map(|tool| get(tool, "functionDeclarations")?.as_array());
    messages::tool_schemas(lists.flatten(), |tool| get(tool, "parametersJsonSchema").or_else(|| tool.get("parameters")))
}
