//! What a trace IS: messages, what the policy generated among them, and the numbers that came with it.
//!
//! Every recorded format is read into this one normal form by `format`; `align` consumes it. Nothing here parses or
//! tokenizes.

use crate::error::{Location, Result};
use crate::findings::Reason;
use crate::images::{self, Picture};
use crate::record_bytes::Raw;
use crate::sampling::Options;
use crate::server::Server;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::sync::Arc;

/// Tool schemas, a list: the traces of a file that were given the same ones share them.
pub type Schemas = Arc<Value>;

/// One recorded trajectory, with the record it came from, byte for byte.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// The record's own id, or `file:line`.
    pub id: String,
    /// File and line it was read from.
    pub location: Location,
    /// Group (prompt) id; traces of one group share their baseline.
    pub group: Option<String>,
    /// The scalar reward; `None` where the record has none.
    pub reward: Option<f32>,
    /// Named rewards in the record's order.
    pub rewards: Vec<(String, f32)>,
    /// Every distinct message of the trace. A rewritten history adds messages instead of replacing them.
    pub messages: Vec<Message>,
    /// What the policy sampled, in the order of the calls.
    pub generations: Vec<Generation>,
    /// Messages of the conversation as it ended: indices into `messages`.
    pub conversation: Vec<u32>,
    /// Tool schemas as given to the server.
    pub tools: Option<Schemas>,
    /// Extra variables for the chat template (`enable_thinking`, a pinned date, ...).
    pub template_kwargs: Map<String, Value>,
    /// Model name as recorded.
    pub model: Option<String>,
    /// The distinct pictures of its messages, in the order in which they appear.
    pub pictures: Vec<Picture>,
    /// What the record holds of pictures, sound or video that no message has, by what it calls itself.
    pub media_left_out: Option<String>,
    /// The record as it was read, for a round trip that loses nothing; `record` gives its bytes.
    pub raw: Raw,
}

impl Trace {
    /// The bytes of the record as it was read.
    ///
    /// # Errors
    /// `Kind::Io` where they were left in a file that is no longer the same.
    pub fn record(&self) -> Result<Cow<'_, [u8]>> {
        self.raw.bytes().map_err(|error| error.at(&self.location))
    }

    /// The file of a picture of the record, `None` where it is not there.
    ///
    /// # Errors
    /// As of [`Trace::record`].
    pub fn file(&self, picture: &Picture) -> Result<Option<Vec<u8>>> {
        images::find(&self.raw, picture).map_err(|error| error.at(&self.location))
    }

    /// All ids before the first sampled token of generation `turn`, where the record says them.
    pub fn prompt_ids(&self, turn: usize) -> Option<Vec<u32>> {
        let (mut parts, mut at) = (Vec::new(), turn);
        loop {
            match &self.generations.get(at)?.prompt {
                Prompt::Ids(ids) => parts.push(ids.as_slice()),
                Prompt::Follows { turn, ids } if (*turn as usize) < at => {
                    parts.push(ids);
                    at = *turn as usize;
                    parts.push(self.generations[at].tokens.ids.as_deref()?);
                    continue;
                }
                _ => return None,
            }
            return Some(parts.iter().rev().flat_map(|part| part.iter().copied()).collect());
        }
    }
}

/// Where a server says that a picture stands in a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placeholder {
    /// First id.
    pub offset: u32,
    /// How many ids.
    pub length: u32,
}

/// Keys of an object that are looked through one by one.
const FEW: usize = 16;

/// The value under a key: in an object of few keys found faster by comparing than by hashing.
#[inline]
pub(crate) fn value_of<'a>(fields: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    if fields.len() > FEW {
        return fields.get(key);
    }
    fields.iter().find_map(|(name, value)| (name == key).then_some(value))
}

/// As [`value_of`], of what may be no object.
#[inline]
pub(crate) fn value_in<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    value.as_object().and_then(|fields| value_of(fields, key))
}

/// One chat message as the template gets it (no logprobs, no generation record).
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// JSON object with `role`, `content`, `tool_calls`, `reasoning_content`, `tool_call_id`, `name`, ...
    pub value: Value,
    /// Reward of this message, where the record gives process rewards.
    pub reward: Option<f32>,
    /// The pictures of its content that the record holds, in order.
    pub pictures: Vec<Picture>,
}

impl Message {
    /// A message whose pictures, where the record holds them, become their digests.
    pub fn new(mut value: Value, reward: Option<f32>) -> Self {
        let pictures = images::take(&mut value);
        Self { value, reward, pictures }
    }

    /// The value under a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        value_in(&self.value, key)
    }

    /// The role, or "" where there is none.
    pub fn role(&self) -> &str {
        self.get("role").and_then(Value::as_str).unwrap_or("")
    }
}

/// One sampling call: what it was conditioned on, what came out, with which numbers.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Index into `Trace::messages` of the message it produced.
    pub message: u32,
    /// Indices into `Trace::messages` of the messages it was conditioned on, in order.
    pub context: Vec<u32>,
    /// What the policy saw before the first sampled token.
    pub prompt: Prompt,
    /// Where the server says that the pictures of the prompt stand.
    pub placeholders: Option<Vec<Placeholder>>,
    /// The sampled tokens.
    pub tokens: Tokens,
    /// What the sampled tokens spell, where the record has that text apart from the message.
    pub text: Option<String>,
    /// `stop`, `length`, `tool_calls`, ... as recorded.
    pub finish_reason: Option<String>,
    /// What stopped it, where the server says.
    pub stop: Stop,
    /// What the logprobs are of.
    pub logprob_kind: LogprobKind,
    /// Sampling temperature; `None` where the record does not say.
    pub temperature: Option<f32>,
    /// Nucleus mass; `None` where the record does not say.
    pub top_p: Option<f32>,
    /// The other sampling options that the record says.
    pub options: Options,
    /// Bits of `sampling::left_out`.
    pub left_out: u8,
    /// Version of the policy that sampled it; -1 unknown.
    pub policy_version: i32,
    /// Versions of parts of it, where the policy changed while it was being sampled.
    pub versions: Vec<VersionSpan>,
    /// Sum of the logprobs as the server reported it: a checksum.
    pub cumulative_logprob: Option<f64>,
    /// Further numbers beside the tokens: routed experts, sampling masks.
    pub extras: Vec<Extra>,
    /// What the reader noticed about how it was recorded.
    pub notes: Vec<Note>,
    /// The server that answered, where the record names it.
    pub server: Option<Server>,
    /// What its request said beside its messages that bears on the prompt: `reasoning_effort`, `continue_final_message`, ...
    pub request: Option<Box<Map<String, Value>>>,
}

impl Default for Generation {
    fn default() -> Self {
        Self {
            message: 0,
            context: Vec::new(),
            prompt: Prompt::default(),
            placeholders: None,
            tokens: Tokens::default(),
            text: None,
            finish_reason: None,
            stop: Stop::Unsaid,
            logprob_kind: LogprobKind::Unknown,
            temperature: None,
            top_p: None,
            options: Options::NONE,
            left_out: 0,
            policy_version: -1,
            versions: Vec::new(),
            cumulative_logprob: None,
            extras: Vec::new(),
            notes: Vec::new(),
            server: None,
            request: None,
        }
    }
}

/// What the policy saw before the first sampled token, as far as the record says.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub enum Prompt {
    /// The messages of the context, as the chat template renders them.
    #[default]
    Rendered,
    /// All ids, as the server reported them.
    Ids(Vec<u32>),
    /// The ids after the last sampled token of generation `turn` of the same trace.
    Follows {
        /// An earlier generation.
        turn: u32,
        /// The ids between them.
        ids: Vec<u32>,
    },
    /// Text that was sent without a chat template.
    Text(String),
    /// Not recorded, and no message to render it from.
    Unknown,
}

impl Prompt {
    /// All ids, where the record has them.
    pub fn ids(&self) -> Option<&[u32]> {
        if let Self::Ids(ids) = self { Some(ids) } else { None }
    }
}

/// Sampled tokens `start..end` came from policy `version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionSpan {
    /// First token.
    pub start: u32,
    /// One past the last token.
    pub end: u32,
    /// Version, -1 unknown.
    pub version: i32,
}

/// Integers beside the tokens of a generation, one row for each of some consecutive tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extra {
    /// `routed_experts` or `sampling_mask`.
    pub name: &'static str,
    /// The token of row 0: an index into prompt ids and sampled ids end to end, or into the sampled ids alone.
    pub first: ExtraStart,
    /// Trailing shape of every row (layers, experts per token); empty where rows differ in length.
    pub shape: Vec<u32>,
    /// End of each row in `values`.
    pub ends: Vec<u32>,
    /// The rows, end to end.
    pub values: Vec<i32>,
}

/// Which token the first row of an `Extra` belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtraStart {
    /// The first token of the prompt.
    Prompt,
    /// The first sampled token.
    Sampled,
}

/// Something that the reader of a format noticed about one generation; `align` passes it on as a finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Why it matters.
    pub reason: Reason,
    /// Tokens it concerns.
    pub count: u32,
    /// What was found.
    pub detail: String,
}

/// What ended a generation beside its finish reason.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Stop {
    /// The record does not say (for vLLM: the model's own end-of-sequence token).
    #[default]
    Unsaid,
    /// A stop token id.
    Id(u32),
    /// A stop string, trimmed from the text but not from the tokens.
    Text(String),
}

/// What recorded logprobs are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[repr(u8)]
pub enum LogprobKind {
    /// The record does not say.
    #[default]
    Unknown = 0,
    /// Of the model's distribution before temperature, penalties and top-p (vLLM's default).
    Raw = 1,
    /// Of the distribution that was sampled from.
    Processed = 2,
}

impl LogprobKind {
    /// Reads `raw`, `processed` or `unknown`.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "raw" | "raw_logprobs" => Some(Self::Raw),
            "processed" | "processed_logprobs" => Some(Self::Processed),
            "unknown" => Some(Self::Unknown),
            _ => None,
        }
    }
}

/// Sampled tokens as recorded, in flat arrays. Lengths may contradict one another; `align` finds that and says so.
#[derive(Debug, Clone, Default)]
pub struct Tokens {
    /// Ids where the record has them (`token_ids`, `token_id:N`); `None` where it has none.
    pub ids: Option<Vec<u32>>,
    /// Bytes per token where the record has them.
    pub bytes: Option<Pieces>,
    /// Text per token where the record has it.
    pub texts: Option<Pieces>,
    /// Logprobs in nats, NaN where missing or invalid; `None` where the record has none at all.
    pub logprobs: Option<Vec<f32>>,
    /// Of `logprobs`: how many were null, NaN or -inf.
    pub missing: u32,
    /// Of `logprobs`: how many were impossible (positive, or the -9999.0 sentinel).
    pub invalid: u32,
}

impl Tokens {
    /// How many tokens the record lists, by the first array it has.
    pub fn len(&self) -> usize {
        if let Some(ids) = &self.ids {
            return ids.len();
        }
        if let Some(pieces) = self.bytes.as_ref().or(self.texts.as_ref()) {
            return pieces.len();
        }
        self.logprobs.as_ref().map_or(0, Vec::len)
    }

    /// Whether the record lists no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Byte strings of a list of tokens, end to end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pieces {
    /// All bytes.
    pub data: Vec<u8>,
    /// End of each piece in `data`.
    pub ends: Vec<u32>,
    /// Whether the record had this piece at all (`null` is not the empty string).
    pub known: Vec<bool>,
}

impl Pieces {
    /// Appends one piece; `None` where the record had none.
    pub fn push(&mut self, piece: Option<&[u8]>) {
        if let Some(bytes) = piece {
            self.data.extend_from_slice(bytes);
        }
        self.close(piece.is_some());
    }

    /// Appends what was added to `data` as one piece; `known` is false where the record had none, and nothing was added.
    pub fn close(&mut self, known: bool) {
        self.ends.push(self.data.len() as u32);
        self.known.push(known);
    }

    /// How many pieces.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no piece.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Piece `index`, or `None` past the end or where the record had none.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        if !*self.known.get(index)? {
            return None;
        }
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        self.data.get(start..self.ends[index] as usize)
    }
}
