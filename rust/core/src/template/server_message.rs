//! One message as a server hands it to its template: its content joined or in parts, its keys in the server's order.
//!
//! From the sources of the servers: vLLM's `renderers/chat_utils.py` and its request's types, SGLang's
//! `parser/jinja_template_utils.py`, llama.cpp's `common/chat.cpp`, TGI's `router/src/lib.rs`.

use crate::json_number;
use crate::server::Server;
use crate::trace::value_of;
use serde_json::{Map, Value as Json, json};

/// What a server makes of the messages of one request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts about the request and its template")]
pub(super) struct Rules {
    /// `None`: messages as transformers takes them.
    pub server: Option<Server>,
    /// The template gets the parts of a content, not one text.
    pub parts: bool,
    /// The template knows no developer: such a message becomes the system's.
    pub developer_is_system: bool,
    /// The first message was joined from several, and its content is text whatever the template wants.
    pub joined: bool,
    /// The template gets reasoning under `thinking` too: for models whose prompts the server does not write with it.
    pub thinking: bool,
}

/// What the servers call a part of text.
const TEXTS: [&str; 5] = ["text", "input_text", "output_text", "refusal", "thinking"];
/// Keys of a part that vLLM takes for its own; it hands the others on.
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
/// What the types of media are called before a template.
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
/// A line of Claude Code's system prompt that differs from request to request: vLLM takes it out.
const BILLING: &str = "x-anthropic-billing-header";

/// The keys of a message that some server hands on; null is none.
#[derive(Default)]
struct Said<'m> {
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

impl<'m> Said<'m> {
    fn of(map: &'m Map<String, Json>) -> Self {
        let mut said = Self::default();
        for (key, value) in map.iter().filter(|(_, value)| !value.is_null()) {
            let place = match key.as_str() {
                "role" => &mut said.role,
                "content" => &mut said.content,
                "tool_calls" => &mut said.tool_calls,
                "reasoning" => &mut said.reasoning,
                "reasoning_content" => &mut said.reasoning_content,
                "thinking" => &mut said.thinking,
                "tool_call_id" => &mut said.tool_call_id,
                "name" => &mut said.name,
                "task" => &mut said.task,
                "tools" => &mut said.tools,
                _ => continue,
            };
            *place = Some(value);
        }
        said
    }
}

/// A part of a content.
enum Part {
    Text(String, Map<String, Json>),
    /// What is no text: in parts as it stands here, in a joined text not at all.
    Other(Json),
    /// A tool that is named: in a joined text its name.
    Tool(String),
}

impl Rules {
    /// Bytes that no other rules have.
    pub fn key(self) -> [u8; 5] {
        let flags = [self.parts, self.developer_is_system, self.joined, self.thinking].map(u8::from);
        let [parts, developer, joined, thinking] = flags;
        [self.server.map_or(0, |server| server as u8 + 1), parts, developer, joined, thinking]
    }

    /// The content of message `index` in this server's form; `None` where it stays as it is.
    pub fn content(self, map: &Map<String, Json>, index: usize) -> Option<Json> {
        let server = self.server?;
        let role = value_of(map, "role").and_then(Json::as_str).unwrap_or_default();
        let given = value_of(map, "content").unwrap_or(&Json::Null);
        let is_system = role == "system";
        let billed = |text: &str| server == Server::Vllm && is_system && text.starts_with(BILLING);
        let whole = self.joined && index == 0;
        match given {
            Json::String(text) if billed(text) => {}
            // SGLang and TGI leave a text as it is.
            Json::String(_) if whole || !self.parts || role == "tool" || self.keeps_texts() => return None,
            Json::Null if !self.parts || role == "tool" || self.keeps_texts() => return Some(Json::from("")),
            Json::String(_) | Json::Null | Json::Array(_) => {}
            _ => return None,
        }
        let parts = match given {
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

    /// Whether a text is not wrapped for a template that wants parts.
    fn keeps_texts(self) -> bool {
        matches!(self.server, Some(Server::Sglang | Server::Tgi))
    }

    /// What stands between joined texts.
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
            let known = |key: &str| KNOWN.contains(&key) || self.server == Some(Server::Sglang);
            let more = map.iter().filter(|(key, _)| !known(key)).map(|(key, value)| (key.clone(), value.clone()));
            return text.as_str().map(|text| Part::Text(text.to_owned(), more.collect()));
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
            // TGI writes a picture as Markdown.
            let url = value_of(map, "image_url").map(|image| image.get("url").unwrap_or(image));
            return url.and_then(Json::as_str).map(|url| Part::Text(format!("![]({url})"), Map::new()));
        }
        let known = |key: &str| KNOWN.contains(&key) || self.server == Some(Server::Sglang);
        let mut shown = Map::from_iter([("type".to_owned(), Json::from(*medium))]);
        shown.extend(map.iter().filter(|(key, _)| !known(key)).map(|(key, value)| (key.clone(), value.clone())));
        Some(Part::Other(Json::Object(shown)))
    }

    /// The role that a template gets.
    pub fn role(self, role: &str) -> &str {
        if self.developer_is_system && role == "developer" { "system" } else { role }
    }

    /// The keys of a message in the order in which the template gets them, with what stands under each; `None` where they
    /// stay as they are.
    pub fn keys<'m>(self, map: &'m Map<String, Json>) -> Option<Vec<(&'static str, &'m Json)>> {
        let server = self.server.filter(|server| *server != Server::OpenAi)?;
        let said = Said::of(map);
        let role = said.role.and_then(Json::as_str).unwrap_or_default();
        let mut keys: Vec<(&str, &Json)> = Vec::with_capacity(6);
        keys.push(("role", said.role.unwrap_or(&Json::Null)));
        keys.push(("content", said.content.unwrap_or(&Json::Null)));
        let mut add = |key: &'static str, value: Option<&'m Json>| keys.extend(value.map(|value| (key, value)));
        let calls = said.tool_calls.filter(|calls| calls.as_array().is_none_or(|calls| !calls.is_empty()));
        match server {
            Server::Vllm | Server::OpenAi => {
                match role {
                    "assistant" => {
                        let thinking = said.thinking.filter(|_| self.thinking);
                        let reasoning = said.reasoning.or(said.reasoning_content).or(thinking);
                        add("tool_calls", calls.filter(|calls| calls.is_array()));
                        add("thinking", reasoning.filter(|_| self.thinking));
                        add("reasoning", reasoning);
                        add("reasoning_content", reasoning);
                    }
                    "tool" => add("tool_call_id", value_of(map, "tool_call_id")),
                    _ => {}
                }
                add("name", said.name.filter(|name| name.is_string()));
                add("task", said.task.filter(|task| task.is_string()));
                if role == "developer" && !self.developer_is_system {
                    add("tools", Some(said.tools.unwrap_or(&Json::Null)));
                }
            }
            Server::Sglang if role == "user" => {}
            Server::Sglang => {
                add("tool_call_id", said.tool_call_id);
                add("name", said.name);
                add("reasoning_content", said.reasoning_content);
                add("tool_calls", said.tool_calls);
                add("tools", said.tools);
            }
            Server::LlamaCpp => {
                add("tool_calls", calls);
                add("reasoning_content", said.reasoning_content);
                add("name", said.name);
                add("tool_call_id", said.tool_call_id);
            }
            Server::Tgi => {}
        }
        Some(keys)
    }

    /// The keys of a tool call, or of its function, in the order in which the template gets them.
    pub fn call_keys(self, map: &Map<String, Json>) -> Vec<(&str, &Json)> {
        let mut keys: Vec<(&str, &Json)> = map.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let is_call = map.contains_key("function");
        let order: &[&str] = match (self.server, is_call) {
            // Types of the openai package: known keys first.
            (Some(Server::Vllm), true) => &["id", "function", "type"],
            (Some(Server::Vllm), false) => &["arguments", "name"],
            (Some(Server::Sglang), true) => &["id", "index", "type", "function"],
            (Some(Server::Sglang), false) => &["name", "arguments"],
            _ => return keys,
        };
        let place = |key: &str| order.iter().position(|known| *known == key).unwrap_or(order.len());
        keys.sort_by_key(|(key, _)| place(key));
        if self.server == Some(Server::Sglang) {
            keys.retain(|(key, _)| order.contains(key));
            for (at, key) in order.iter().enumerate().filter(|(_, key)| !map.contains_key(**key)) {
                keys.insert(at.min(keys.len()), (key, &Json::Null));
            }
        }
        keys
    }

    /// The arguments of a call as this server reads them; `None` where they stay as they are.
    pub fn arguments(self, given: Option<&Json>) -> Option<Json> {
        let parsed = match given {
            Some(Json::String(text)) => json_number::parse(text).ok().filter(Json::is_object),
            Some(Json::Object(_)) => return None,
            _ => None,
        };
        // Templates go over the items of an object.
        let empties = self.server.is_some_and(Server::empties_arguments);
        if empties { Some(parsed.unwrap_or_else(|| json!({}))) } else { parsed }
    }
}

fn without_billing(part: Part) -> Option<Part> {
    let Part::Text(text, more) = part else { return Some(part) };
    if !text.starts_with(BILLING) {
        return Some(Part::Text(text, more));
    }
    let rest = text.split_once('\n').map_or("", |(_, rest)| rest);
    (!rest.is_empty()).then(|| Part::Text(rest.to_owned(), more))
}

impl Part {
    fn value(self) -> Json {
        match self {
            Self::Text(text, more) => {
                let mut part =
                    Map::from_iter([("type".to_owned(), Json::from("text")), ("text".to_owned(), text.into())]);
                part.extend(more);
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
