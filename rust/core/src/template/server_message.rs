//! One message as a server passes it to its template: its content joined or in parts, its keys in the server's order.
//!
//! Based on the sources of the servers: vLLM's `renderers/chat_utils.py` and the types of its requests, SGLang's
//! `parser/jinja_template_utils.py`, llama.cpp's `common/chat.cpp`, TGI's `router/src/lib.rs`.

use crate::json_number;
use crate::server::Server;
use crate::trace::value_of;
use serde_json::{Map, Value as Json, json};

/// The way in which a server converts the messages of one request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts about the request and its template")]
pub(super) struct Rules {
    /// The server; `None` for messages as transformers uses them.
    pub server: Option<Server>,
    /// True if the template receives the parts of a content instead of one text.
    pub parts: bool,
    /// True if the template does not support the developer role. Such a message becomes a system message.
    pub developer_is_system: bool,
    /// True if the first message was joined from several. Its content is then text, whatever the template expects.
    pub joined: bool,
    /// True if the template receives reasoning under `thinking` too: for models whose prompts the server writes
    /// without the template.
    pub thinking: bool,
}

/// The types that servers use for a text part.
const TEXTS: [&str; 5] = ["text", "input_text", "output_text", "refusal", "thinking"];
/// Keys of a part that vLLM interprets itself. It passes on all others.
const KNOWN: [&str; 18] = [
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];
/// The names under which media types are passed to a template.
const MEDIA: [(&str, &str); 9] = [
    ("image_url", "image"),
    ("input_image", "image"),
    ("image_pil", "image"),
    ("image_embeds", "image"),
    ("audio_url", "audio"),
    ("input_audio", "audio"),
    ("audio_embeds", "audio"),
    ("video_url", "video"),
    ("video_embeds", "video"),
];
/// A line of Claude Code's system prompt that differs between requests. vLLM removes it.
const BILLING: &str = "x-anthropic-billing-header";

/// The keys of a message that some server passes on. A null value counts as missing.
#[derive(Default)]
struct MessageFields<'m> {
    role: Option<&'m Json>,
    content: Option<&'m Json>,
    tool_calls: Option<&'m Json>,
    reasoning: Option<&'m Json>,
    reasoning_content: Option<&'m Json>,
    thinking: Option<&'m Json>,
    tool_call_id: Option<&'m Json>,
    name: Option<&'m Json>,
    task: Option<&'m Json>,
    tools: Option<&'m Json>,
}

impl<'m> MessageFields<'m> {
    fn of(map: &'m Map<String, Json>) -> Self {
        let mut fields = Self::default();
        for (key, value) in map.iter().filter(|(_, value)| !value.is_null()) {
            let place = match key.as_str() {
                "role" => &mut fields.role,
                "content" => &mut fields.content,
                "tool_calls" => &mut fields.tool_calls,
                "reasoning" => &mut fields.reasoning,
                "reasoning_content" => &mut fields.reasoning_content,
                "thinking" => &mut fields.thinking,
                "tool_call_id" => &mut fields.tool_call_id,
                "name" => &mut fields.name,
                "task" => &mut fields.task,
                "tools" => &mut fields.tools,
                _ => continue,
            };
            *place = Some(value);
        }
        fields
    }
}

/// A part of a content.
enum Part {
    Text(String, Map<String, Json>),
    /// A part that is not text. It is kept in parts and dropped from a joined text.
    Other(Json),
    /// A tool reference. In a joined text it is the tool's name.
    Tool(String),
}

impl Rules {
    /// Returns bytes that differ for different rules.
    pub fn key(self) -> [u8; 5] {
        let flags = [self.parts, self.developer_is_system, self.joined, self.thinking].map(u8::from);
        let [parts, developer, joined, thinking] = flags;
        [self.server.map_or(0, |server| server as u8 + 1), parts, developer, joined, thinking]
    }

    /// Returns the content of message `index` in this server's form, or `None` if it stays unchanged.
    pub fn content(self, map: &Map<String, Json>, index: usize) -> Option<Json> {
        let server = self.server?;
        let role = value_of(map, "role").and_then(Json::as_str).unwrap_or_default();
        let content = value_of(map, "content").unwrap_or(&Json::Null);
        let is_system = role == "system";
        let is_billing = |text: &str| server == Server::Vllm && is_system && text.starts_with(BILLING);
        let was_joined = self.joined && index == 0;
        match content {
            Json::String(text) if is_billing(text) => {}
            // SGLang and TGI leave a text unchanged.
            Json::String(_) if was_joined || !self.parts || role == "tool" || self.keeps_texts() => return None,
            Json::Null if !self.parts || role == "tool" || self.keeps_texts() => return Some(Json::from("")),
            Json::String(_) | Json::Null | Json::Array(_) => {}
            _ => return None,
        }
        let parts = match content {
            Json::Array(parts) => parts.as_slice(),
            Json::Null => &[],
            text => std::slice::from_ref(text),
        };
        let mut parts: Vec<Part> = parts.iter().filter_map(|part| self.part(part)).collect();
        if server == Server::Vllm && is_system {
            parts = parts.into_iter().filter_map(without_billing).collect();
        }
        let all_texts = parts.iter().all(|part| matches!(part, Part::Text(..)));
        if self.parts && !(role == "tool" && all_texts) {
            return Some(parts.into_iter().map(Part::value).collect());
        }
        let texts: Vec<String> = parts.into_iter().filter_map(Part::text).collect();
        Some(Json::from(texts.join(self.separator())))
    }

    /// Returns true if a text is not wrapped for a template that expects parts.
    fn keeps_texts(self) -> bool {
        matches!(self.server, Some(Server::Sglang | Server::Tgi))
    }

    /// Returns the separator between joined texts.
    fn separator(self) -> &'static str {
        match self.server {
            Some(Server::Sglang) => " ",
            Some(Server::Tgi) => "",
            _ => "\n",
        }
    }

    fn part(self, part: &Json) -> Option<Part> {
        let Json::Object(map) = part else {
            let text = part.as_str().filter(|_| self.server != Some(Server::Sglang))?;
            return Some(Part::Text(text.to_owned(), Map::new()));
        };
        let kind = value_of(map, "type").and_then(Json::as_str);
        let text_key = match kind {
            Some("thinking") => "thinking",
            Some("refusal") => "refusal",
            _ => "text",
        };
        if kind.is_none_or(|kind| TEXTS.contains(&kind))
            && let Some(text) = value_of(map, text_key)
        {
            let is_known = |key: &str| KNOWN.contains(&key) || self.server == Some(Server::Sglang);
            let extra = map.iter().filter(|(key, _)| !is_known(key)).map(|(key, value)| (key.clone(), value.clone()));
            return text.as_str().map(|text| Part::Text(text.to_owned(), extra.collect()));
        }
        if kind.is_some_and(|kind| TEXTS.contains(&kind)) {
            return None;
        }
        if kind == Some("tool_reference") {
            return value_of(map, "name").and_then(Json::as_str).map(|name| Part::Tool(name.to_owned()));
        }
        let medium = MEDIA.iter().find(|(name, _)| kind == Some(name) || kind.is_none() && map.contains_key(*name));
        let Some((_, medium)) = medium else { return Some(Part::Other(part.clone())) };
        if self.server == Some(Server::Tgi) {
            // TGI writes an image as Markdown.
            let url = value_of(map, "image_url").map(|image| image.get("url").unwrap_or(image));
            return url.and_then(Json::as_str).map(|url| Part::Text(format!("![]({url})"), Map::new()));
        }
        let is_known = |key: &str| KNOWN.contains(&key) || self.server == Some(Server::Sglang);
        let mut medium_part = Map::from_iter([("type".to_owned(), Json::from(*medium))]);
        medium_part
            .extend(map.iter().filter(|(key, _)| !is_known(key)).map(|(key, value)| (key.clone(), value.clone())));
        Some(Part::Other(Json::Object(medium_part)))
    }

    /// Returns the role that the template receives.
    pub fn role(self, role: &str) -> &str {
        if self.developer_is_system && role == "developer" { "system" } else { role }
    }

    /// Returns the keys of a message in the order in which the template receives them, with their values. Returns
    /// `None` if they stay unchanged.
    pub fn keys<'m>(self, map: &'m Map<String, Json>) -> Option<Vec<(&'static str, &'m Json)>> {
        let server = self.server.filter(|server| *server != Server::OpenAi)?;
        let fields = MessageFields::of(map);
        let role = fields.role.and_then(Json::as_str).unwrap_or_default();
        let mut keys: Vec<(&str, &Json)> = Vec::with_capacity(6);
        keys.push(("role", fields.role.unwrap_or(&Json::Null)));
        keys.push(("content", fields.content.unwrap_or(&Json::Null)));
        let mut add = |key: &'static str, value: Option<&'m Json>| keys.extend(value.map(|value| (key, value)));
        let calls = fields.tool_calls.filter(|calls| calls.as_array().is_none_or(|calls| !calls.is_empty()));
        match server {
            Server::Vllm | Server::OpenAi => {
                match role {
                    "assistant" => {
                        let thinking = fields.thinking.filter(|_| self.thinking);
                        let reasoning = fields.reasoning.or(fields.reasoning_content).or(thinking);
                        add("tool_calls", calls.filter(|calls| calls.is_array()));
                        add("thinking", reasoning.filter(|_| self.thinking));
                        add("reasoning", reasoning);
                        add("reasoning_content", reasoning);
                    }
                    "tool" => add("tool_call_id", value_of(map, "tool_call_id")),
                    _ => {}
                }
                add("name", fields.name.filter(|name| name.is_string()));
                add("task", fields.task.filter(|task| task.is_string()));
                if role == "developer" && !self.developer_is_system {
                    add("tools", Some(fields.tools.unwrap_or(&Json::Null)));
                }
            }
            Server::Sglang if role == "user" => {}
            Server::Sglang => {
                add("tool_call_id", fields.tool_call_id);
                add("name", fields.name);
                add("reasoning_content", fields.reasoning_content);
                add("tool_calls", fields.tool_calls);
                add("tools", fields.tools);
            }
            Server::LlamaCpp => {
                add("tool_calls", calls);
                add("reasoning_content", fields.reasoning_content);
                add("name", fields.name);
                add("tool_call_id", fields.tool_call_id);
            }
            Server::Tgi => {}
        }
        Some(keys)
    }

    /// Returns the keys of a tool call, or of its function, in the order in which the template receives them.
    pub fn call_keys(self, map: &Map<String, Json>) -> Vec<(&str, &Json)> {
        let mut keys: Vec<(&str, &Json)> = map.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let is_call = map.contains_key("function");
        let order: &[&str] = match (self.server, is_call) {
            // Types of the openai package: known keys come first.
            (Some(Server::Vllm), true) => &["id", "function", "type"],
            (Some(Server::Vllm), false) => &["arguments", "name"],
            (Some(Server::Sglang), true) => &["id", "index", "type", "function"],
            (Some(Server::Sglang), false) => &["name", "arguments"],
            _ => return keys,
        };
        let place = |key: &str| order.iter().position(|name| *name == key).unwrap_or(order.len());
        keys.sort_by_key(|(key, _)| place(key));
        if self.server == Some(Server::Sglang) {
            keys.retain(|(key, _)| order.contains(key));
            for (at, key) in order.iter().enumerate().filter(|(_, key)| !map.contains_key(**key)) {
                keys.insert(at.min(keys.len()), (key, &Json::Null));
            }
        }
        keys
    }

    /// Returns the arguments of a call as this server parses them, or `None` if they stay unchanged.
    pub fn arguments(self, arguments: Option<&Json>) -> Option<Json> {
        let parsed = match arguments {
            Some(Json::String(text)) => json_number::parse(text).ok().filter(Json::is_object),
            Some(Json::Object(_)) => return None,
            _ => None,
        };
        // Templates iterate over the items of an object.
        let empties = self.server.is_some_and(Server::empties_arguments);
        if empties { Some(parsed.unwrap_or_else(|| json!({}))) } else { parsed }
    }
}

fn without_billing(part: Part) -> Option<Part> {
    let Part::Text(text, extra) = part else { return Some(part) };
    if !text.starts_with(BILLING) {
        return Some(Part::Text(text, extra));
    }
    let remainder = text.split_once('\n').map_or("", |(_, remainder)| remainder);
    (!remainder.is_empty()).then(|| Part::Text(remainder.to_owned(), extra))
}

impl Part {
    fn value(self) -> Json {
        match self {
            Self::Text(text, extra) => {
                let mut part =
                    Map::from_iter([("type".to_owned(), Json::from("text")), ("text".to_owned(), text.into())]);
                part.extend(extra);
                Json::Object(part)
            }
            Self::Other(part) => part,
            Self::Tool(name) => json!({"type": "tool_reference", "name": name}),
        }
    }

    fn text(self) -> Option<String> {
        match self {
            Self::Text(text, _) | Self::Tool(text) => Some(text),
            Self::Other(_) => None,
        }
    }
}
