//! A record as JSON objects whose token lists are typed and whose other values are kept as they are.
//!
//! The kind of an object (record, message, choice, request, response) says which keys carry numbers, which hold further
//! objects, and which are of no use here. `fast_scan` and `fallback` read it; meaning is given to it by the format files.

use crate::format::rejection::{Decoded, Reason, Rejection, not_a_trace, reject};
use crate::format::token_list::take_placeholders;
use crate::sampling::place_of;
use crate::trace::{Pieces, Schemas, Tokens};
use crate::{json_number, media};
use serde_json::{Map, Value};

/// What an object is, by where it stands.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// A whole line, with what tells whether a key may be a producer's sign.
    Record(fn(&str) -> bool),
    /// An entry of a message list: a message, a choice or a whole response.
    Item,
    /// The `generation` of a message.
    Generation,
    /// One of `calls`.
    Call,
    Request,
    Response,
}

/// What to do with the value of a key.
pub enum Slot {
    Logprobs,
    TokenIds,
    PromptIds,
    Texts,
    Bytes,
    Nested(&'static str, Kind),
    Tools,
    Keep,
    /// Some producer's sign: the tables of servers and recorders are asked about the record.
    Sign,
    Skip,
}

impl Kind {
    /// What to do with the value of a key of such an object.
    pub fn slot(self, key: &str) -> Slot {
        use Kind::{Call, Generation, Item, Record, Request, Response};
        match (self, key) {
            (Item | Generation, "logprobs") => Slot::Logprobs,
            (Item | Generation, "token_ids") => Slot::TokenIds,
            (Record(_) | Item | Generation | Response, "prompt_token_ids") => Slot::PromptIds,
            (Generation, "tokens") => Slot::Texts,
            (Generation, "bytes") => Slot::Bytes,
            (Record(_) | Request, "messages") => Slot::Nested("messages", Item),
            (Record(_), "extra_messages") => Slot::Nested("extra_messages", Item),
            (Record(_), "calls") => Slot::Nested("calls", Call),
            (Record(_) | Item | Response, "choices") => Slot::Nested("choices", Item),
            (Record(_) | Call, "request") => Slot::Nested("request", Request),
            (Record(_) | Call, "response") => Slot::Nested("response", Response),
            (Record(_) | Request, "tools") => Slot::Tools,
            (Item, "message") => Slot::Nested("message", Item),
            (Item, "generation") => Slot::Nested("generation", Generation),
            (Record(_), _) if RECORD_KEYS.contains(&key) || media::is_key(key) || place_of(key).is_some() => Slot::Keep,
            (Record(is_sign), _) if is_sign(key) => Slot::Sign,
            (Request, _) if REQUEST_KEYS.contains(&key) || place_of(key).is_some() => Slot::Keep,
            (Response, "model" | "object" | "error" | "metadata" | "system_fingerprint") => Slot::Keep,
            (Record(_) | Response, _) if STRAY_KEYS.contains(&key) => Slot::Keep,
            (Record(_) | Request | Response, _) | (_, "prompt_logprobs") => Slot::Skip,
            (Item | Generation | Call, _) => Slot::Keep,
        }
    }
}

/// Keys of a record whose value is read; the others stay in the record's bytes.
const RECORD_KEYS: &[&str] = &[
    "format",
    "id",
    "group",
    "reward",
    "rewards",
    "model",
    "policy_version",
    "logprob_kind",
    "temperature",
    "top_p",
    "template_kwargs",
    "chat_template_kwargs",
    "object",
    "choice",
    "error",
    "sampling_defaults",
    "server",
    "system_fingerprint",
];

const REQUEST_KEYS: &[&str] = &[
    "model",
    "temperature",
    "top_p",
    "chat_template_kwargs",
    "extra_body",
    "sampling_params",
    "reasoning_effort",
    "enable_thinking",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
];

/// Keys of a record or a response that hold token lists which a client library moved.
const STRAY_KEYS: [&str; 3] = ["sglext", "provider_specific_fields", "model_extra"];

/// The token lists of an object; those that most objects do not have in boxes, as objects are moved.
#[derive(Debug, Default)]
pub struct Numbers {
    pub logprobs: Option<Box<Tokens>>,
    pub token_ids: Option<Vec<u32>>,
    pub prompt_token_ids: Option<Vec<u32>>,
    pub texts: Option<Box<Pieces>>,
    pub bytes: Option<Box<Pieces>>,
}

impl Numbers {
    /// Sampled tokens as a server lists them, and their ids where it gives those apart.
    pub fn listed(logprobs: Option<Tokens>, token_ids: Option<Vec<u32>>) -> Self {
        Self { logprobs: logprobs.map(Box::new), token_ids, ..Self::default() }
    }

    /// Fills what is not there from `other`.
    pub fn or(mut self, other: Self) -> Self {
        self.logprobs = self.logprobs.or(other.logprobs);
        self.token_ids = self.token_ids.or(other.token_ids);
        self.prompt_token_ids = self.prompt_token_ids.or(other.prompt_token_ids);
        self.texts = self.texts.or(other.texts);
        self.bytes = self.bytes.or(other.bytes);
        self
    }

    pub fn any_sampled(&self) -> bool {
        self.logprobs.is_some() || self.token_ids.is_some() || self.texts.is_some() || self.bytes.is_some()
    }

    /// The sampled tokens: columns side by side as recorded, whatever their lengths.
    pub fn into_tokens(self) -> Decoded<Tokens> {
        let mut tokens = self.logprobs.map_or_else(Tokens::default, |tokens| *tokens);
        tokens.texts = self.texts.map(|texts| *texts).or(tokens.texts);
        tokens.bytes = self.bytes.map(|bytes| *bytes).or(tokens.bytes);
        take_placeholders(&mut tokens).map_err(no_id)?;
        let Some(ids) = self.token_ids else { return Ok(tokens) };
        if let Some(listed) = tokens.ids.as_ref().filter(|listed| listed.len() == ids.len() && **listed != ids) {
            return Err(contradicting_ids(&ids, listed));
        }
        tokens.ids = Some(ids);
        Ok(tokens)
    }
}

/// A complaint about a token id.
pub fn no_id(what: String) -> Rejection {
    reject(Reason::IdOutOfRange, what).why("No vocabulary has it").cure("Store the response as the server sent it")
}

fn contradicting_ids(ids: &[u32], listed: &[u32]) -> Rejection {
    let index = (0..ids.len()).find(|&index| ids[index] != listed[index]).unwrap_or_default();
    let what = format!("token_ids[{index}] is {} but logprobs say token {}", ids[index], listed[index]);
    reject(Reason::Contradiction, what)
        .why("Which of the two was sampled cannot be known")
        .cure("Store the response as the server sent it")
}

/// A JSON object whose token lists are typed.
#[derive(Debug, Default)]
pub struct Object {
    /// Everything that is neither a token list nor nested.
    pub fields: Map<String, Value>,
    pub numbers: Numbers,
    /// Tool schemas, or what stands in their place.
    pub tools: Option<Schemas>,
    nested: Vec<(&'static str, Node)>,
    /// A key stands here that may be the sign of a producer's own form.
    pub signed: bool,
}

impl Object {
    /// Takes the nested value of a key; `null` is nothing.
    pub fn take(&mut self, key: &str) -> Option<Node> {
        let index = self.nested.iter().position(|(name, _)| *name == key)?;
        Some(self.nested.swap_remove(index).1).filter(|node| !matches!(node, Node::Other(Value::Null)))
    }

    /// Whether a nested value stands under a key, and is not `null`.
    pub fn has(&self, key: &str) -> bool {
        self.nested.iter().any(|(name, node)| *name == key && !matches!(node, Node::Other(Value::Null)))
    }

    pub fn has_list(&self, key: &str) -> bool {
        self.nested.iter().any(|(name, node)| *name == key && matches!(node, Node::List(_)))
    }

    pub fn has_object(&self, key: &str) -> bool {
        self.nested.iter().any(|(name, node)| *name == key && matches!(node, Node::Object(_)))
    }

    /// Whether every response in it, its own or its calls', is a chat completion.
    pub fn speaks_chat(&self) -> bool {
        self.nested.iter().all(|(name, node)| match (*name, node) {
            ("calls", Node::List(calls)) => calls.iter().all(|call| match call {
                Node::Object(call) => call.speaks_chat(),
                _ => true,
            }),
            ("response", Node::Object(response)) => response.has_list("choices") && response.speaks_chat(),
            ("response", Node::List(_)) => false,
            ("response", Node::Other(value)) => !value.is_string(),
            ("choices", Node::List(choices)) => choices.iter().all(|choice| match choice {
                Node::Object(choice) if choice.fields.get("raw_output").is_some_and(Value::is_object) => false,
                Node::Object(choice) => {
                    choice.has("message") || !choice.fields.contains_key("text") && !choice.numbers.any_sampled()
                }
                _ => true,
            }),
            _ => true,
        })
    }

    pub fn take_object(&mut self, key: &str) -> Decoded<Option<Object>> {
        self.take(key).map(|node| node.object(key)).transpose()
    }

    pub fn take_list(&mut self, key: &str) -> Decoded<Option<Vec<Node>>> {
        match self.take(key) {
            None => Ok(None),
            Some(Node::List(nodes)) => Ok(Some(nodes)),
            Some(node) => Err(not_a_trace(format!("`{key}` is {}, not a list", node.describe()))),
        }
    }

    /// Puts a nested value; of duplicate keys the last one counts.
    pub fn put(&mut self, key: &'static str, node: Node) {
        self.nested.retain(|(name, _)| *name != key);
        self.nested.push((key, node));
    }
}

/// What stands where an object is expected.
#[derive(Debug)]
pub enum Node {
    Object(Box<Object>),
    List(Vec<Node>),
    Other(Value),
}

impl Node {
    /// The object, or an error that says what stands there instead.
    pub fn object(self, name: &str) -> Decoded<Object> {
        match self {
            Self::Object(object) => Ok(*object),
            other => Err(not_a_trace(format!("`{name}` is {}, not an object", other.describe()))),
        }
    }

    fn describe(&self) -> &'static str {
        match self {
            Self::Object(_) => "an object",
            Self::List(_) => "a list",
            Self::Other(value) => describe(value),
        }
    }
}

/// The JSON type of a value, with its article.
pub fn describe(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        other if json_number::text(other).is_some() => "a number",
        Value::Object(_) => "an object",
    }
}
