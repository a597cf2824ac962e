//! A record as JSON objects with typed token lists and other values unchanged.
//!
//! The kind of an object (record, message, choice, request, response) decides which keys are token lists, which are
//! nested objects, and which are skipped. `fast_scan` and `fallback` create the objects; the readers of the formats
//! interpret them.

use crate::format::rejection::{Decoded, Reason, Rejection, not_a_trace, reject};
use crate::format::token_list::take_placeholders;
use crate::sampling::place_of;
use crate::trace::{Pieces, Schemas, Tokens};
use crate::{json_number, media};
use serde_json::{Map, Value};

/// Kind of an object, determined by its place in the record.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// A complete record. The function returns whether a key may be that of a producer's own format.
    Record(fn(&str) -> bool),
    /// An entry of a message list: a message, a choice or a complete response.
    Item,
    /// The `generation` object of a message.
    Generation,
    /// An item of `calls`.
    Call,
    Request,
    Response,
}

/// Treatment of the value of a key.
pub enum Slot {
    Logprobs,
    TokenIds,
    PromptIds,
    Texts,
    Bytes,
    Nested(&'static str, Kind),
    Tools,
    Keep,
    /// A key of some producer's own format: the tables of servers and recorders must decide about the record.
    Sign,
    Skip,
}

impl Kind {
    /// Returns the treatment of the value of a key of such an object.
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

/// Keys of a record whose values are kept. Other keys exist only in the record's bytes.
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

/// Keys of a record or response under which client libraries store token lists.
const STRAY_KEYS: [&str; 3] = ["sglext", "provider_specific_fields", "model_extra"];

/// Token lists of an object. Those that most objects lack are boxed, because objects are moved.
#[derive(Debug, Default)]
pub struct TokenLists {
    pub logprobs: Option<Box<Tokens>>,
    pub token_ids: Option<Vec<u32>>,
    pub prompt_token_ids: Option<Vec<u32>>,
    pub texts: Option<Box<Pieces>>,
    pub bytes: Option<Box<Pieces>>,
}

impl TokenLists {
    /// Creates the lists of sampled tokens of a server. `token_ids` are given if the server lists ids separately.
    pub fn listed(logprobs: Option<Tokens>, token_ids: Option<Vec<u32>>) -> Self {
        Self { logprobs: logprobs.map(Box::new), token_ids, ..Self::default() }
    }

    /// Fills missing lists from `other`.
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

    /// Converts the lists to sampled tokens. The columns are as recorded, even if their lengths differ.
    pub fn into_tokens(self) -> Decoded<Tokens> {
        let mut tokens = self.logprobs.map_or_else(Tokens::default, |tokens| *tokens);
        tokens.texts = self.texts.map(|texts| *texts).or(tokens.texts);
        tokens.bytes = self.bytes.map(|bytes| *bytes).or(tokens.bytes);
        take_placeholders(&mut tokens).map_err(no_id)?;
        let Some(ids) = self.token_ids else { return Ok(tokens) };
        if let Some(listed_ids) = tokens.ids.as_ref().filter(|listed| listed.len() == ids.len() && **listed != ids) {
            return Err(contradicting_ids(&ids, listed_ids));
        }
        tokens.ids = Some(ids);
        Ok(tokens)
    }
}

/// Returns the rejection of an invalid token id.
pub fn no_id(what: String) -> Rejection {
    reject(Reason::IdOutOfRange, "TG-FORMAT-035", what)
        .why("No vocabulary has it")
        .fix("Store the response as the server sent it")
}

fn contradicting_ids(ids: &[u32], listed_ids: &[u32]) -> Rejection {
    let index = (0..ids.len()).find(|&index| ids[index] != listed_ids[index]).unwrap_or_default();
    let what = format!("token_ids[{index}] is {} but logprobs say token {}", ids[index], listed_ids[index]);
    reject(Reason::Contradiction, "TG-FORMAT-036", what)
        .why("It is ambiguous which of the two was sampled")
        .fix("Store the response as the server sent it")
}

/// A JSON object with typed token lists.
#[derive(Debug, Default)]
pub struct Object {
    /// All values that are neither token lists nor nested objects.
    pub fields: Map<String, Value>,
    pub numbers: TokenLists,
    /// Tool schemas, or the value recorded in their place.
    pub tools: Option<Schemas>,
    nested: Vec<(&'static str, Node)>,
    /// Whether the object has a key that may be that of a producer's own format.
    pub has_sign: bool,
}

impl Object {
    /// Removes and returns the nested value of a key. `null` counts as missing.
    pub fn take(&mut self, key: &str) -> Option<Node> {
        let index = self.nested.iter().position(|(name, _)| *name == key)?;
        Some(self.nested.swap_remove(index).1).filter(|node| !matches!(node, Node::Other(Value::Null)))
    }

    /// Returns whether a key has a nested value other than `null`.
    pub fn has(&self, key: &str) -> bool {
        self.nested.iter().any(|(name, node)| *name == key && !matches!(node, Node::Other(Value::Null)))
    }

    pub fn has_list(&self, key: &str) -> bool {
        self.nested.iter().any(|(name, node)| *name == key && matches!(node, Node::List(_)))
    }

    pub fn has_object(&self, key: &str) -> bool {
        self.nested.iter().any(|(name, node)| *name == key && matches!(node, Node::Object(_)))
    }

    /// Returns whether every response of the object, including those of its calls, is a chat completion.
    pub fn is_chat_completion(&self) -> bool {
        self.nested.iter().all(|(name, node)| match (*name, node) {
            ("calls", Node::List(calls)) => calls.iter().all(|call| match call {
                Node::Object(call) => call.is_chat_completion(),
                _ => true,
            }),
            ("response", Node::Object(response)) => response.has_list("choices") && response.is_chat_completion(),
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
            Some(node) => Err(not_a_trace("TG-FORMAT-037", format!("`{key}` is {}, not a list", node.describe()))),
        }
    }

    /// Stores a nested value. If a key occurs twice, the last value counts.
    pub fn put(&mut self, key: &'static str, node: Node) {
        self.nested.retain(|(name, _)| *name != key);
        self.nested.push((key, node));
    }
}

/// A value at a place where an object is expected.
#[derive(Debug)]
pub enum Node {
    Object(Box<Object>),
    List(Vec<Node>),
    Other(Value),
}

impl Node {
    /// Returns the object, or an error with the type of the value.
    pub fn object(self, name: &str) -> Decoded<Object> {
        match self {
            Self::Object(object) => Ok(*object),
            other => Err(not_a_trace("TG-FORMAT-038", format!("`{name}` is {}, not an object", other.describe()))),
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

/// Returns the JSON type of a value, with its article.
pub fn describe(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        other if json_number::digits_of(other).is_some() => "a number",
        Value::Object(_) => "an object",
    }
}
