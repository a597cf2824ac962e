//! OpenAI's Responses API: `{"object": "response", "output": [{"type": "message", "content": [{"type": "output_text",
//! "logprobs"}]}]}`.
//!
//! Source: openai 2.54.0 `types/responses/`. Each text part has logprobs; reasoning and function calls have none. The
//! tokens of a turn with such items are partly unknown, which is reported. Items become messages of the chat
//! completions API; consecutive items of the model become one assistant message. The kind of the logprobs is not
//! documented.

use super::interface::{
    API_DEFAULTS, CallContext, Columns, Decoded, Entry, Form, Outline, Reading, Reason, Request, Server, Shape,
    TokenText, reject, sampling_of,
};
use super::messages;
use crate::findings;
use crate::format::build::message;
use crate::images::holds;
use crate::trace::{Generation, LogprobKind, Message, Note, Prompt};
use serde::Deserialize;
use serde_json::{Value, json};

pub(super) const SERVER: Server = Server {
    form: Form { name: "responses", reason: "its `output` is a list of typed items" },
    signs: &["output"],
    recognizes: |response| response.first_of("output").is_some_and(|item| item.is("type", Shape::Text)),
    answer,
    request,
    defaults: API_DEFAULTS,
};

/// A token of a text part.
#[derive(Deserialize)]
struct Listed {
    #[serde(default)]
    token: TokenText,
    bytes: Option<Vec<u8>>,
    logprob: Reading,
}

fn answer(response: &Outline<'_>, context: &CallContext<'_>) -> Decoded<Entry> {
    let mut generation = context.generation(LogprobKind::Unknown);
    let (mut listing, mut silent) = (Columns::default(), 0);
    let mut turn = Turn::default();
    for item in response.objects("output")? {
        let value = Value::Object(item.fields_without(&["content"])?);
        let parts = item.objects("content")?;
        let has_tokens = listing_of(&parts, &mut listing)?;
        silent += u32::from(!has_tokens);
        let contents = parts.iter().map(|part| part.fields_without(&["logprobs"]).map(Value::Object));
        turn.take(&value, &contents.collect::<Decoded<Vec<_>>>()?);
    }
    generation.tokens = listing.into_tokens();
    generation.finish_reason = finished(response, &turn)?;
    note_silence(response, &mut generation, silent)?;
    let response_sampling = sampling_of(response, "top_p")?;
    // The response repeats the sampling parameters.
    let sampling = response_sampling.or(context.sampling);
    (generation.temperature, generation.top_p) = (sampling.temperature, sampling.top_p);
    (generation.options, generation.omitted) = (sampling.options, sampling.left_out);
    Ok(Entry::sampled(Message::new(turn.message(), None), generation, 0))
}

/// Adds the tokens of an item's text parts. Returns false if there are none.
fn listing_of(parts: &[Outline<'_>], listing: &mut Columns) -> Decoded<bool> {
    let mut has_tokens = false;
    for part in parts {
        for token in part.typed::<Vec<Listed>>("logprobs")?.unwrap_or_default() {
            listing.push(None, token.logprob, token.token.0.as_deref(), token.bytes.as_deref());
            has_tokens = true;
        }
    }
    Ok(has_tokens)
}

/// Reports items without tokens, if other items have some: the sampled tokens are partly unknown.
fn note_silence(response: &Outline<'_>, generation: &mut Generation, silent: u32) -> Decoded<()> {
    let listed = generation.tokens.len();
    if silent == 0 || listed == 0 {
        return Ok(());
    }
    let usage = response.object("usage")?.unwrap_or_default();
    let sampled = usage.count("output_tokens")?.unwrap_or(0) as usize;
    let count = sampled.saturating_sub(listed) as u32;
    let detail = format!("{silent} items of the output (reasoning, function calls) list no tokens");
    generation.notes.push(Note { reason: findings::Reason::ReasoningFieldSplit, count, detail });
    Ok(())
}

fn finished(response: &Outline<'_>, turn: &Turn) -> Decoded<Option<String>> {
    let details = response.object("incomplete_details")?.unwrap_or_default();
    if let Some(reason) = details.text("reason")? {
        return Ok(Some(message::common(&reason).to_owned()));
    }
    let status = response.text("status")?;
    Ok(match status.as_deref() {
        Some("completed") if !turn.calls.is_empty() => Some("tool_calls".to_owned()),
        status => status.map(|status| message::common(status).to_owned()),
    })
}

/// Consecutive items of the model.
#[derive(Default)]
struct Turn {
    text: String,
    refusal: String,
    reasoning: String,
    calls: Vec<Value>,
    any: bool,
}

impl Turn {
    /// Adds an item of the model. Returns false for an item of another role.
    fn take(&mut self, item: &Value, content: &[Value]) -> bool {
        let string = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        match string(item, "type").as_str() {
            "reasoning" => {
                let summary = if content.is_empty() { item.get("summary").and_then(Value::as_array) } else { None };
                for part in content.iter().chain(summary.into_iter().flatten()) {
                    self.reasoning.push_str(&string(part, "text"));
                }
            }
            "function_call" | "custom_tool_call" => {
                let id = item.get("call_id").or_else(|| item.get("id"));
                let arguments = item.get("arguments").or_else(|| item.get("input"));
                self.calls.push(messages::tool_call(id, item.get("name"), arguments));
            }
            "message" | "" if string(item, "role") == "assistant" => {
                for part in content {
                    self.text.push_str(&string(part, "text"));
                    self.refusal.push_str(&string(part, "refusal"));
                }
                self.text.push_str(&string(item, "content"));
            }
            _ => return false,
        }
        self.any = true;
        true
    }

    fn message(self) -> Value {
        let mut message = messages::message("assistant", self.text.as_str(), &self.reasoning, self.calls);
        if !self.refusal.is_empty() {
            message["refusal"] = Value::String(self.refusal);
        }
        message
    }

    fn end(&mut self, messages: &mut Vec<Value>) {
        let turn = std::mem::take(self);
        messages.extend(turn.any.then(|| turn.message()));
    }
}

/// Reads `instructions` and `input`, which is a string or a list of items.
fn request(request: &Outline<'_>) -> Decoded<Request> {
    let mut values = Vec::new();
    if let Some(instructions) = request.text("instructions")? {
        values.push(json!({"role": "system", "content": instructions}));
    }
    match request.value("input")? {
        None => {}
        Some(Value::String(text)) => values.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => history(&items, &mut values),
        Some(_) => {
            return Err(reject(Reason::WrongType, "TG-FORMAT-052", "`input` is neither a string nor a list of items")
                .why("The prompt of the policy is unknown")
                .fix("Record the request as it was sent"));
        }
    }
    // The request does not contain the earlier response that the server stored.
    let prompt = if request.has("previous_response_id") { Prompt::Unknown } else { Prompt::Rendered };
    let tools = request.value("tools")?;
    let functions = tools.iter().filter_map(Value::as_array).flatten().filter(|tool| tool["type"] == "function");
    let tools = messages::tool_schemas(functions, |tool| tool.get("parameters"));
    let messages = values.into_iter().map(|value| Message::new(value, None)).collect();
    let sampling = sampling_of(request, "top_p")?;
    Ok(Request { messages, tools, model: request.text("model")?, prompt, sampling, ..Request::default() })
}

fn history(items: &[Value], messages: &mut Vec<Value>) {
    let mut turn = Turn::default();
    for item in items {
        let content = item.get("content").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        if turn.take(item, content) {
            continue;
        }
        turn.end(messages);
        let text = |value: Option<&Value>| match value {
            Some(Value::String(text)) => Value::String(text.clone()),
            Some(Value::Array(parts)) => plain_parts(parts),
            Some(other) => Value::String(other.to_string()),
            None => Value::String(String::new()),
        };
        if let Some("function_call_output" | "custom_tool_call_output") = item.get("type").and_then(Value::as_str) {
            let output = text(item.get("output"));
            let shows = output.as_array().is_some_and(|parts| parts.iter().any(holds));
            let output = if shows || output.is_string() { output } else { output.to_string().into() };
            messages.push(messages::tool_result(item.get("call_id"), None, output));
        } else {
            let role = item.get("role").and_then(Value::as_str).unwrap_or("user");
            messages.push(json!({"role": role, "content": text(item.get("content"))}));
        }
    }
    turn.end(messages);
}

/// Joins text parts into one text. If another part is among them, the parts are returned unchanged.
fn plain_parts(parts: &[Value]) -> Value {
    let texts: Option<String> = parts.iter().map(|part| part.get("text").and_then(Value::as_str)).collect();
    texts.map_or_else(|| Value::Array(parts.to_vec()), Value::String)
}
