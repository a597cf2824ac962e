//! A request as its server renders it: the rules for its messages, system messages joined, a begun answer gone on with.
//!
//! From vLLM's `renderers/hf.py` and transformers' `render_jinja_template`, SGLang's `serving_chat.py`, llama.cpp's
//! `oaicompat_chat_params_parse`.

use super::incremental::session::Session;
use super::rendered::{NO_MESSAGE, Rendered};
use super::server_message::Rules;
use super::{Ask, Template};
use crate::error::{Error, Kind, Result};
use crate::server::Server;
use crate::trace::value_of;
use serde_json::{Map, Value as Json, json};
use std::sync::Arc;

/// What transformers puts behind an answer that is gone on with, to find its end in the text.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
/// Where a part of text has its text.
const TEXT_KEYS: [&str; 3] = ["text", "refusal", "thinking"];
/// What stands between system messages that are joined.
const BETWEEN: &str = "\n\n";

impl Template {
    /// Renders a request as its server does. For a conversation that is rendered turn by turn: what `session` knows of its
    /// messages is not rendered again.
    ///
    /// # Errors
    /// As for [`Template::render`]; and for an answer that is to be gone on with and does not appear in the text.
    pub fn render_served<'a>(
        &self,
        session: &mut Session<'a>,
        messages: &[&'a Json],
        tools: Option<&Arc<Json>>,
        ask: Ask,
        kwargs: &Map<String, Json>,
    ) -> Result<Rendered> {
        let rules = self.rules(ask, messages);
        let joins = rules.developer_is_system
            && ask.server == Server::Vllm
            && messages.iter().skip(1).any(|message| is_system(message));
        let prefix = self.prefix(messages, ask);
        let user = ask.server == Server::Sglang && ask.prompt && !ask.continues && ends_with_answer(messages);
        // TGI takes each answer that stands last for the beginning of the next, and asks with the head behind it.
        let found = ask.server == Server::Tgi && (ask.prompt || ask.continues) && ends_with_answer(messages);
        if !joins && !user && !found && prefix.is_none() && !ask.continues {
            return self.render_next_by(session, messages, tools, (ask.prompt, rules), kwargs);
        }
        // What is made of the messages here lives for this render alone.
        let (mut made, mut order) = if joins {
            joined(messages)
        } else {
            (messages.iter().map(|&message| message.clone()).collect(), (0..messages.len() as u32).collect())
        };
        let rules = Rules { joined: joins, ..rules };
        let mut prompt = ask.prompt;
        if let Some(last) = made.last_mut().filter(|_| user) {
            *last = json!({"role": "user", "content": last["content"].clone()});
        } else if prefix.is_some() {
            made.pop();
            order.pop();
            prompt = true;
        } else if found {
            prompt = true;
        } else if ask.continues {
            tagged(made.last_mut())?;
            prompt = false;
        }
        let made: Vec<&Json> = made.iter().collect();
        let mut rendered = self.render_by(&made, tools, (prompt, rules), kwargs)?;
        if let Some(prefix) = prefix {
            rendered.text = [&*rendered.text, &prefix].concat().into();
        } else if found {
            let text = self.text_of(messages, ask).unwrap_or_default();
            if let Some(at) = rendered.text.rfind(&*text) {
                let end = rendered.text[..at + text.len()].trim_end().len();
                end_at(&mut rendered, end);
            }
        } else if ask.continues {
            cut(&mut rendered)?;
        }
        for span in rendered.spans.iter_mut().filter(|span| span.message != NO_MESSAGE) {
            span.message = order.get(span.message as usize).copied().unwrap_or(NO_MESSAGE);
        }
        Ok(rendered)
    }

    /// What a server makes of these messages.
    fn rules(&self, ask: Ask, messages: &[&Json]) -> Rules {
        let server = ask.server;
        let maps = match server {
            Server::Vllm | Server::OpenAi => !self.names_developer,
            Server::LlamaCpp => true,
            Server::Sglang | Server::Tgi => false,
        };
        let parts = match server {
            Server::Sglang => self.wants_parts.sglang,
            Server::Tgi => false,
            _ => self.wants_parts.vllm,
        };
        Rules {
            server: Some(server),
            parts,
            developer_is_system: maps && messages.iter().any(|message| role(message) == "developer"),
            joined: false,
            thinking: ask.thinking,
        }
    }

    /// The begun answer that a server puts behind the prompt of the messages before it.
    fn prefix(&self, messages: &[&Json], ask: Ask) -> Option<String> {
        let wanted = match ask.server {
            Server::Sglang => ask.continues,
            // Its servers go on with each answer that stands last.
            Server::LlamaCpp => ask.prompt || ask.continues,
            _ => false,
        };
        if wanted && ends_with_answer(messages) { self.text_of(messages, ask) } else { None }
    }

    /// The text of the last message, where its content is one.
    fn text_of(&self, messages: &[&Json], ask: Ask) -> Option<String> {
        let last = messages.last()?;
        let content = last.as_object().and_then(|map| self.rules(ask, &[]).content(map, 1));
        content.as_ref().or_else(|| last.get("content"))?.as_str().map(str::to_owned)
    }
}

fn role(message: &Json) -> &str {
    message.as_object().and_then(|map| value_of(map, "role")).and_then(Json::as_str).unwrap_or_default()
}

fn is_system(message: &Json) -> bool {
    matches!(role(message), "system" | "developer")
}

fn ends_with_answer(messages: &[&Json]) -> bool {
    messages.last().is_some_and(|message| role(message) == "assistant")
}

/// The messages with those of the system as one, first; and the place that each had.
fn joined(messages: &[&Json]) -> (Vec<Json>, Vec<u32>) {
    let rules = Rules { server: Some(Server::Vllm), ..Rules::default() };
    let text = |message: &Json| {
        let map = message.as_object()?;
        let content = rules.content(map, 1);
        content.as_ref().or_else(|| map.get("content"))?.as_str().map(str::to_owned)
    };
    let system = messages.iter().filter(|message| is_system(message));
    let texts: Vec<String> = system.filter_map(|message| text(message)).filter(|text| !text.is_empty()).collect();
    let first = messages.iter().position(|message| is_system(message)).unwrap_or_default();
    let mut made = vec![json!({"role": "system", "content": texts.join(BETWEEN)})];
    let mut order = vec![first as u32];
    for (index, message) in messages.iter().enumerate().filter(|(_, message)| !is_system(message)) {
        made.push((*message).clone());
        order.push(index as u32);
    }
    (made, order)
}

/// Puts the tag behind the last text of a message.
fn tagged(message: Option<&mut Json>) -> Result<()> {
    let nothing = || {
        Error::new(Kind::Template, "continue_final_message is set, and the last message has no text to go on with")
            .why("The policy was asked to go on with it")
            .cure("Record the request as it was sent")
    };
    let message = message.and_then(Json::as_object_mut).ok_or_else(nothing)?;
    let content = message.entry("content").or_insert(Json::Null);
    match content {
        Json::Null => *content = Json::from(TAG),
        Json::String(text) => text.push_str(TAG),
        Json::Array(parts) => {
            let last = parts.iter_mut().rev().find_map(|part| match part {
                Json::String(text) => Some(text),
                Json::Object(map) => {
                    let key = TEXT_KEYS.into_iter().find(|key| map.get(*key).is_some_and(Json::is_string))?;
                    if let Some(Json::String(text)) = map.get_mut(key) { Some(text) } else { None }
                }
                _ => None,
            });
            last.ok_or_else(nothing)?.push_str(TAG);
        }
        _ => return Err(nothing()),
    }
    Ok(())
}

/// Ends the text where the tag stands; without the whitespace before it where the template trims.
fn cut(rendered: &mut Rendered) -> Result<()> {
    let Some(at) = rendered.text.rfind(TAG.trim_end()) else {
        return Err(Error::new(Kind::Template, "the template leaves out a part of the last message")
            .why("The policy was asked to go on with it (continue_final_message)")
            .cure("Record return_token_ids, so that the prompt need not be rendered"));
    };
    let kept = &rendered.text[..at];
    let end = if rendered.text[at..].starts_with(TAG) { at } else { kept.trim_end().len() };
    end_at(rendered, end);
    Ok(())
}

/// Takes away what stands behind byte `end`.
fn end_at(rendered: &mut Rendered, end: usize) {
    rendered.text = rendered.text[..end].into();
    rendered.spans.retain_mut(|span| {
        span.end = span.end.min(end);
        span.start < span.end
    });
    rendered.generation.retain_mut(|(start, stop)| {
        *stop = (*stop).min(end);
        start < stop
    });
}
