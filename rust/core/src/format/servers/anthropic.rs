//! Anthropic's Messages API: `{"type": "message", "content": [{"type": "text", "text"}], "stop_reason"}`.
//!
//! Source: anthropic 2.12.0 `types/message.py`. It returns neither logprobs nor ids: the text can be trained on only
//! without a ratio, and a note reports that. Content blocks become messages of the chat completions API: `thinking`
//! becomes reasoning, `tool_use` a tool call, `tool_result` a tool message.

use super::interface::{
    API_DEFAULTS, CallContext, Decoded, Entry, Form, Outline, Reason, Request, Server, Shape, finish_under, reject,
    sampling_of, stop_under,
};
use super::messages;
use crate::findings;
use crate::images::holds;
use crate::trace::{LogprobKind, Message, Note};
use serde_json::{Value, json};

pub(super) const SERVER: Server = Server {
    form: Form { name: "anthropic", reason: "it is a `message` with content blocks and `stop_reason`" },
    signs: &["stop_sequence", "stop_reason", "content"],
    recognizes: |response| {
        response.is("content", Shape::List) && response.has_key("stop_reason") && response.is("role", Shape::Text)
    },
    answer,
    request,
    defaults: API_DEFAULTS,
};

fn answer(response: &Outline<'_>, context: &CallContext<'_>) -> Decoded<Entry> {
    let mut generation = context.generation(LogprobKind::Unknown);
    generation.finish_reason = finish_under(response, "stop_reason")?;
    generation.stop = stop_under(response, "stop_sequence")?;
    let usage = response.object("usage")?.unwrap_or_default();
    let count = usage.count("output_tokens")?.unwrap_or(0).unsigned_abs();
    let detail = "the Messages API gives no logprobs: no ratio can be formed".to_owned();
    generation.notes.push(Note { reason: findings::Reason::MissingLogprob, count, detail });
    let content = response.value("content")?.unwrap_or_default();
    let message =
        messages_of("assistant", &content)?.pop().unwrap_or_else(|| messages::message("assistant", "", "", vec![]));
    Ok(Entry::sampled(Message::new(message, None), generation, 0))
}

/// Returns the messages for the content of one Anthropic message.
fn messages_of(role: &str, content: &Value) -> Decoded<Vec<Value>> {
    let blocks = match content {
        Value::Array(blocks) => blocks,
        Value::String(text) => return Ok(vec![messages::message(role, text.as_str(), "", vec![])]),
        Value::Null => return Ok(vec![messages::message(role, "", "", vec![])]),
        _ => {
            return Err(reject(
                Reason::WrongType,
                "TG-FORMAT-049",
                "`content` is neither a string nor a list of blocks",
            )
            .why("The text of the message is unknown")
            .fix("Store the message as the API has it"));
        }
    };
    let (mut said, mut thinking) = (messages::Content::default(), String::new());
    let (mut calls, mut messages) = (Vec::new(), Vec::new());
    for block in blocks {
        let string = |key: &str| block.get(key).and_then(Value::as_str).unwrap_or_default();
        match string("type") {
            "text" => said.text(string("text")),
            "thinking" => thinking.push_str(string("thinking")),
            "redacted_thinking" => {}
            "tool_use" => calls.push(messages::tool_call(block.get("id"), block.get("name"), block.get("input"))),
            "tool_result" => {
                messages.push(messages::tool_result(block.get("tool_use_id"), None, result_of(block.get("content"))));
            }
            _ => said.part(block.clone()),
        }
    }
    let speaks = !(said.is_empty() && thinking.is_empty() && calls.is_empty());
    if speaks || messages.is_empty() {
        messages.push(messages::message(role, said, &thinking, calls));
    }
    Ok(messages)
}

/// Returns a tool's result: a string, the joined text blocks, or a list of blocks if images are among them.
fn result_of(content: Option<&Value>) -> Value {
    match content {
        None | Some(Value::Null) => "".into(),
        Some(Value::Array(blocks)) if blocks.iter().all(|block| block.get("text").is_some_and(Value::is_string)) => {
            blocks.iter().filter_map(|block| block["text"].as_str()).collect::<String>().into()
        }
        Some(Value::Array(blocks)) if blocks.iter().any(holds) => Value::Array(blocks.clone()),
        Some(Value::String(text)) => text.as_str().into(),
        Some(other) => other.to_string().into(),
    }
}

fn request(request: &Outline<'_>) -> Decoded<Request> {
    let mut values = Vec::new();
    match request.value("system")? {
        None => {}
        Some(Value::String(text)) => values.push(json!({"role": "system", "content": text})),
        Some(blocks) => values.extend(messages_of("system", &blocks)?),
    }
    for message in request.objects("messages")? {
        let role = message.text("role")?.unwrap_or_else(|| "user".to_owned());
        values.extend(messages_of(&role, &message.value("content")?.unwrap_or_default())?);
    }
    let tools = request.value("tools")?;
    let tools =
        messages::tool_schemas(tools.iter().filter_map(Value::as_array).flatten(), |tool| tool.get("input_schema"));
    let messages = values.into_iter().map(|value| Message::new(value, None)).collect();
    let sampling = sampling_of(request, "top_p")?;
    let model = request.text("model")?;
    Ok(Request { messages, tools, model, sampling, ..Request::default() })
}
