//! A request as its server renders it: rules for its messages, joined system messages, and continued answers.
//!
//! Based on vLLM's `renderers/hf.py` and transformers' `render_jinja_template`, SGLang's `serving_chat.py`,
//! llama.cpp's `oaicompat_chat_params_parse`.

use super::incremental::session::Session;
use super::rendered::{NO_MESSAGE, Rendered};
use super::server_message::Rules;
use super::{RenderRequest, Template};
use crate::error::{Error, Kind, Result};
use crate::server::Server;
use crate::trace::value_of;
use serde_json::{Map, Value as Json, json};
use std::sync::Arc;

/// The tag that transformers appends to an answer to continue, in order to find its end in the text.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
/// The keys under which a text part has its text.
const TEXT_KEYS: [&str; 3] = ["text", "refusal", "thinking"];
/// The separator between joined system messages.
const BETWEEN: &str = "\n\n";

impl Template {
    /// Renders a request as its server does. Messages that `session` has cached are not rendered again.
    ///
    /// # Errors
    /// Same as [`Template::render`]. Also fails if an answer to continue does not appear in the text.
    pub fn render_served<'a>(
        &self,
        session: &mut Session<'a>,
        messages: &[&'a Json],
        tools: Option<&Arc<Json>>,
        ask: RenderRequest,
        kwargs: &Map<String, Json>,
    ) -> Result<Rendered> {
        let rules = self.rules(ask, messages);
        let joins = rules.developer_is_system
            && ask.server == Server::Vllm
            && messages.iter().skip(1).any(|message| is_system(message));
        let prefix = self.prefix(messages, ask);
        let answer_as_user = ask.server == Server::Sglang
            && ask.add_generation_prompt
            && !ask.continue_final_message
            && ends_with_answer(messages);
        // TGI treats every final answer as the beginning of the next one, and renders with the header after it.
        let tgi_prefill = ask.server == Server::Tgi
            && (ask.add_generation_prompt || ask.continue_final_message)
            && ends_with_answer(messages);
        if !joins && !answer_as_user && !tgi_prefill && prefix.is_none() && !ask.continue_final_message {
            return self.render_next_by(session, messages, tools, (ask.add_generation_prompt, rules), kwargs);
        }
        // The messages created here exist for this render only.
        let (mut converted, mut order) = if joins {
            joined(messages)
        } else {
            (messages.iter().map(|&message| message.clone()).collect(), (0..messages.len() as u32).collect())
        };
        let rules = Rules { joined: joins, ..rules };
        let mut prompt = ask.add_generation_prompt;
        if let Some(last) = converted.last_mut().filter(|_| answer_as_user) {
            *last = json!({"role": "user", "content": last["content"].clone()});
        } else if prefix.is_some() {
            converted.pop();
            order.pop();
            prompt = true;
        } else if tgi_prefill {
            prompt = true;
        } else if ask.continue_final_message {
            tagged(converted.last_mut())?;
            prompt = false;
        }
        let converted: Vec<&Json> = converted.iter().collect();
        let mut rendered = self.render_by(&converted, tools, (prompt, rules), kwargs)?;
        if let Some(prefix) = prefix {
            rendered.text = [&*rendered.text, &prefix].concat().into();
        } else if tgi_prefill {
            let text = self.text_of(messages, ask).unwrap_or_default();
            if let Some(at) = rendered.text.rfind(&*text) {
                let end = rendered.text[..at + text.len()].trim_end().len();
                end_at(&mut rendered, end);
            }
        } else if ask.continue_final_message {
            cut(&mut rendered)?;
        }
        for span in rendered.spans.iter_mut().filter(|span| span.message != NO_MESSAGE) {
            span.message = order.get(span.message as usize).copied().unwrap_or(NO_MESSAGE);
        }
        Ok(rendered)
    }

    /// Returns the rules by which a server converts these messages.
    fn rules(&self, ask: RenderRequest, messages: &[&Json]) -> Rules {
        let server = ask.server;
        let developer_is_system = match server {
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
            developer_is_system: developer_is_system && messages.iter().any(|message| role(message) == "developer"),
            joined: false,
            thinking: ask.thinking,
        }
    }

    /// Returns the prefill that a server appends to the prompt of the messages before it.
    fn prefix(&self, messages: &[&Json], ask: RenderRequest) -> Option<String> {
        let supported = match ask.server {
            Server::Sglang => ask.continue_final_message,
            // llama.cpp continues every answer that is the last message.
            Server::LlamaCpp => ask.add_generation_prompt || ask.continue_final_message,
            _ => false,
        };
        if supported && ends_with_answer(messages) { self.text_of(messages, ask) } else { None }
    }

    /// Returns the text of the last message, if its content is a text.
    fn text_of(&self, messages: &[&Json], ask: RenderRequest) -> Option<String> {
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

/// Joins all system messages to one and moves it to the front. Returns the new messages and their original positions.
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
    let mut converted = vec![json!({"role": "system", "content": texts.join(BETWEEN)})];
    let mut order = vec![first as u32];
    for (index, message) in messages.iter().enumerate().filter(|(_, message)| !is_system(message)) {
        converted.push((*message).clone());
        order.push(index as u32);
    }
    (converted, order)
}

/// Appends the tag to the last text of a message.
fn tagged(message: Option<&mut Json>) -> Result<()> {
    let no_text = || {
        Error::new(
            Kind::Template,
            "TG-TEMPLATE-013",
            "continue_final_message is set, and the last message has no text to continue",
        )
        .why("The policy had to continue it")
        .fix("Record the request as it was sent")
    };
    let message = message.and_then(Json::as_object_mut).ok_or_else(no_text)?;
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
            last.ok_or_else(no_text)?.push_str(TAG);
        }
        _ => return Err(no_text()),
    }
    Ok(())
}

/// Ends the text at the tag. If the template trims, the whitespace before the tag is removed too.
fn cut(rendered: &mut Rendered) -> Result<()> {
    let Some(at) = rendered.text.rfind(TAG.trim_end()) else {
        return Err(Error::new(
            Kind::Template,
            "TG-TEMPLATE-014",
            "the template leaves out a part of the last message",
        )
        .why("The policy had to continue it (continue_final_message)")
        .fix("Record return_token_ids, so that the prompt need not be rendered"));
    };
    let before_tag = &rendered.text[..at];
    let end = if rendered.text[at..].starts_with(TAG) { at } else { before_tag.trim_end().len() };
    end_at(rendered, end);
    Ok(())
}

/// Removes everything after byte `end`.
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
