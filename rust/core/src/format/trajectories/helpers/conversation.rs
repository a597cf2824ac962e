//! A conversation with sampled messages, or a prompt and its completion as two texts.
//!
//! For recorders that store messages and few or no token data.

use super::super::interface::{Body, Decoded, Outline, Sampling, Shape};
use crate::format::build::message::{message_of, plain};
use crate::format::rejection::not_a_trace;
use crate::json_number;
use crate::trace::{Generation, Message, Prompt};
use serde_json::Value;
use serde_json::value::RawValue;

/// A conversation while it is read.
#[derive(Default)]
pub struct ConversationBuilder {
    body: Body,
    /// Messages of the current branch.
    path: Vec<u32>,
}

impl ConversationBuilder {
    /// Adds a message that the policy did not sample.
    pub fn add_prompt(&mut self, message: Message) -> u32 {
        let index = self.body.messages.len() as u32;
        self.body.messages.push(message);
        self.path.push(index);
        index
    }

    /// Adds a message that the policy sampled after all previous ones.
    pub fn add_sampled(&mut self, message: Message, generation: Generation) -> Decoded<()> {
        self.body.budget.spend(self.path.len())?;
        let context = self.path.clone();
        let message = self.add_prompt(message);
        self.body.generations.push(Generation { message, context, ..generation });
        Ok(())
    }

    /// Adds a message. It was sampled if its role is assistant.
    pub fn add_by_role(&mut self, message: Message, sampling: &Sampling) -> Decoded<()> {
        if message.role() == "assistant" {
            return self.add_sampled(message, sampling.generation());
        }
        self.add_prompt(message);
        Ok(())
    }

    /// Ends this branch. The first branch is the conversation; the next message starts another branch.
    pub fn end_branch(&mut self) {
        let path = std::mem::take(&mut self.path);
        if self.body.conversation.is_empty() {
            self.body.conversation = path;
        }
    }

    pub fn finish(mut self) -> Body {
        self.end_branch();
        self.body
    }
}

/// Returns a body with a prompt and the text that was sampled after it.
pub fn texts(prompt: Prompt, completion: String, sampling: &Sampling) -> Body {
    let message = plain("assistant", completion.as_str());
    let generation = Generation { prompt, text: Some(completion), ..sampling.generation() };
    Body { messages: vec![message], generations: vec![generation], conversation: vec![0], ..Body::default() }
}

/// Reads `prompt` and `completion` as texts or as messages. The assistant messages of the completion were sampled.
pub fn columns(record: &Outline<'_>, sampling: &Sampling) -> Decoded<Body> {
    let (prompt, completion) = (messages(record, "prompt")?, messages(record, "completion")?);
    if prompt.is_none() && completion.is_none() {
        let prompt = record.text("prompt")?.map_or(Prompt::Unknown, Prompt::Text);
        return Ok(texts(prompt, record.text("completion")?.unwrap_or_default(), sampling));
    }
    let mut talk = ConversationBuilder::default();
    for message in prompt.unwrap_or_default() {
        talk.add_prompt(message);
    }
    if let Some(completion) = completion {
        for message in completion {
            talk.add_by_role(message, sampling)?;
        }
    } else {
        let text = record.text("completion")?.unwrap_or_default();
        talk.add_by_role(plain("assistant", text), sampling)?;
    }
    Ok(talk.finish())
}

/// Reads a list of chat messages, or returns `None` if the value is something else.
pub fn messages(record: &Outline<'_>, key: &str) -> Decoded<Option<Vec<Message>>> {
    let Some(raw) = record.get(key).filter(|raw| is_chat(raw)) else { return Ok(None) };
    let values: Vec<Value> = serde_json::from_str(&json_number::replace_big_numbers(raw.get())).map_err(|error| {
        let complaint = error.to_string();
        not_a_trace("TG-FORMAT-065", format!("`{key}`: {}", complaint.split(" at line ").next().unwrap_or_default()))
    })?;
    let read = |(position, value)| message(value).map_err(|rejection| rejection.inside(format!("{key}[{position}]")));
    values.into_iter().enumerate().map(read).collect::<Decoded<_>>().map(Some)
}

pub fn message(value: Value) -> Decoded<Message> {
    match value {
        Value::Object(fields) => message_of(fields),
        _ => Err(not_a_trace("TG-FORMAT-066", "a message is not an object")),
    }
}

fn is_chat(raw: &RawValue) -> bool {
    Shape::of(raw) == Shape::List && raw.get()[1..].trim_start().starts_with(['{', ']'])
}
