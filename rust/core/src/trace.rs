//! The data model of a trace: its messages, the generations of the policy, and their tokens and logprobs.
//!
//! `format` converts every recorded format to this common form, and `align` consumes it. This module neither parses nor
//! tokenizes.

use crate::error::{Location, Result};
use crate::findings::Reason;
use crate::images::{self, Image};
use crate::record_bytes::Raw;
use crate::sampling::Options;
use crate::server::Server;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::sync::Arc;

/// Tool schemas, a list. Traces of a file with the same schemas share them.
pub type Schemas = Arc<Value>;

/// One recorded trajectory, with a reference to the exact bytes of its record.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// The record's id, or `file:line` if it has none.
    pub id: String,
    /// File and line of the record.
    pub location: Location,
    /// Id of the group (prompt). Traces of one group share their baseline.
    pub group: Option<String>,
    /// The scalar reward, or `None` if the record contains none.
    pub reward: Option<f32>,
    /// Named rewards, in the record's order.
    pub rewards: Vec<(String, f32)>,
    /// Every distinct message of the trace. A rewritten history adds messages instead of replacing them.
    pub messages: Vec<Message>,
    /// The generations of the policy, in the order of the calls.
    pub generations: Vec<Generation>,
    /// Messages of the final conversation, as indices into `messages`.
    pub conversation: Vec<u32>,
    /// Tool schemas as sent to the server.
    pub tools: Option<Schemas>,
    /// Extra variables for the chat template (`enable_thinking`, a pinned date, ...).
    pub template_kwargs: Map<String, Value>,
    /// Model name as recorded.
    pub model: Option<String>,
    /// The distinct images of the messages, in order of their first appearance.
    pub images: Vec<Image>,
    /// Name of an image, sound or video in the record that no message contains.
    pub missing_media: Option<String>,
    /// The record as it was read, for a lossless round trip. `record` returns its bytes.
    pub raw: Raw,
}

impl Trace {
    /// Returns the bytes of the record as it was read.
    ///
    /// # Errors
    /// `Kind::Io` if the file with the bytes has changed.
    pub fn record(&self) -> Result<Cow<'_, [u8]>> {
        self.raw.bytes().map_err(|error| error.at(&self.location))
    }

    /// Returns the file of an image in the record, or `None` if the record does not contain it.
    ///
    /// # Errors
    /// As for [`Trace::record`].
    pub fn file(&self, image: &Image) -> Result<Option<Vec<u8>>> {
        images::find(&self.raw, image).map_err(|error| error.at(&self.location))
    }

    /// Returns all ids before the first sampled token of generation `turn`, if the record contains them.
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

/// Position of an image in a prompt, as reported by the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImagePosition {
    /// Index of its first token.
    pub offset: u32,
    /// Number of its tokens.
    pub length: u32,
}

/// Objects with at most this many keys are searched linearly.
const FEW: usize = 16;

/// Returns the value under a key. In an object with few keys comparing is faster than hashing.
#[inline]
pub(crate) fn value_of<'a>(fields: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    if fields.len() > FEW {
        return fields.get(key);
    }
    fields.iter().find_map(|(name, value)| (name == key).then_some(value))
}

/// As [`value_of`], for a value that may not be an object.
#[inline]
pub(crate) fn value_in<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    value.as_object().and_then(|fields| value_of(fields, key))
}

/// One chat message as the template receives it (without logprobs or a generation record).
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// JSON object with `role`, `content`, `tool_calls`, `reasoning_content`, `tool_call_id`, `name`, ...
    pub value: Value,
    /// Reward of this message, if the record contains process rewards.
    pub reward: Option<f32>,
    /// Images of the content that the record contains, in order.
    pub images: Vec<Image>,
}

impl Message {
    /// Creates a message. Images that the record contains are replaced by their digests.
    pub fn new(mut value: Value, reward: Option<f32>) -> Self {
        let pictures = images::extract(&mut value);
        Self { value, reward, images: pictures }
    }

    /// Returns the value under a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        value_in(&self.value, key)
    }

    /// Returns the role, or "" if there is none.
    pub fn role(&self) -> &str {
        self.get("role").and_then(Value::as_str).unwrap_or("")
    }
}

/// One sampling call: its context, its sampled tokens, and their logprobs.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Index into `Trace::messages` of the message it produced.
    pub message: u32,
    /// Indices into `Trace::messages` of the messages it was conditioned on, in order.
    pub context: Vec<u32>,
    /// Tokens or text before the first sampled token.
    pub prompt: Prompt,
    /// Positions of the images in the prompt, if the server reports them.
    pub placeholders: Option<Vec<ImagePosition>>,
    /// The sampled tokens.
    pub tokens: Tokens,
    /// Text of the sampled tokens, if the record contains it separately from the message.
    pub text: Option<String>,
    /// `stop`, `length`, `tool_calls`, ... as recorded.
    pub finish_reason: Option<String>,
    /// Stop token or stop string, if the server reports it.
    pub stop: Stop,
    /// The distribution that the logprobs belong to.
    pub logprob_kind: LogprobKind,
    /// Sampling temperature, or `None` if the record does not contain it.
    pub temperature: Option<f32>,
    /// Top-p (nucleus mass), or `None` if the record does not contain it.
    pub top_p: Option<f32>,
    /// Other sampling options in the record.
    pub options: Options,
    /// Bits of `sampling::omitted`.
    pub omitted: u8,
    /// Version of the sampling policy; -1 means unknown.
    pub policy_version: i32,
    /// Versions of parts of the generation, if the policy changed during sampling.
    pub versions: Vec<VersionSpan>,
    /// Sum of the logprobs as reported by the server, used as a checksum.
    pub cumulative_logprob: Option<f64>,
    /// Further integers per token: routed experts, sampling masks.
    pub extras: Vec<Extra>,
    /// Bits of the sampling options (`sampling::OPTIONS`) that sampling masks and penalties replay. The logprobs are then
    /// those of the sampled distribution. `align` sets it.
    pub replayed: Option<u32>,
    /// The penalties and biases that the logprobs include. `align` sets them.
    pub penalties: Option<Box<Penalties>>,
    /// Logprobs that were measured after the recording, for tokens without a recorded one.
    pub filled: Option<Box<Filled>>,
    /// Observations of the reader about how the generation was recorded.
    pub notes: Vec<Note>,
    /// The server that produced it, if the record names it.
    pub server: Option<Server>,
    /// Fields of the request, other than the messages, that affect the prompt: `reasoning_effort`,
    /// `continue_final_message`, ...
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
            stop: Stop::Unknown,
            logprob_kind: LogprobKind::Unknown,
            temperature: None,
            top_p: None,
            options: Options::NONE,
            omitted: 0,
            policy_version: -1,
            versions: Vec::new(),
            cumulative_logprob: None,
            extras: Vec::new(),
            replayed: None,
            penalties: None,
            filled: None,
            notes: Vec::new(),
            server: None,
            request: None,
        }
    }
}

/// Changes of logits by the tokens before, and by the request, as vLLM makes them.
#[derive(Debug, Clone, PartialEq)]
pub struct Penalties {
    /// Divides positive and multiplies negative logits of ids in the prompt or the answer so far; 1 is off.
    pub repetition: f32,
    /// Subtracted from logits of ids in the answer so far.
    pub presence: f32,
    /// Subtracted from logits of ids in the answer so far, for each time that they occur.
    pub frequency: f32,
    /// (id, what is added to its logit before the penalties), ascending by id.
    pub bias: Vec<(u32, f32)>,
}

/// Logprobs of sampled tokens that were measured with the sampler's checkpoint after the recording.
#[derive(Debug, Clone, PartialEq)]
pub struct Filled {
    /// The ids that the logprobs belong to.
    pub ids: Vec<u32>,
    /// Logprobs in nats, NaN if not measured. As many as ids.
    pub logprobs: Vec<f32>,
    /// The distribution that the logprobs belong to.
    pub kind: LogprobKind,
    /// Temperature of the distribution; `None` means that of the generation.
    pub temperature: Option<f32>,
    /// The ids from which the sampler would have drawn each token, a `sampling_mask`. An empty row stands for the
    /// complete vocabulary. `align` adds the rows of tokens with a recorded mask.
    pub kept: Option<Extra>,
    /// As `Generation::replayed`, for the filled tokens. `align` sets it.
    pub replayed: u32,
    /// As `Generation::penalties`, if the filled logprobs are used. `align` sets them.
    pub penalties: Option<Box<Penalties>>,
}

/// The prompt of a generation, as far as it was recorded.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub enum Prompt {
    /// The messages of the context, as the chat template renders them.
    #[default]
    Rendered,
    /// All ids, as reported by the server.
    Ids(Vec<u32>),
    /// The ids after the last sampled token of generation `turn` of the same trace.
    Follows {
        /// Index of an earlier generation.
        turn: u32,
        /// The ids between the two generations.
        ids: Vec<u32>,
    },
    /// Text that was sent without a chat template.
    Text(String),
    /// Not recorded, and there is no message to render it from.
    Unknown,
}

impl Prompt {
    /// Returns all ids, if the record contains them.
    pub fn ids(&self) -> Option<&[u32]> {
        if let Self::Ids(ids) = self { Some(ids) } else { None }
    }
}

/// The sampled tokens `start..end` came from policy `version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionSpan {
    /// Index of the first token.
    pub start: u32,
    /// Index after the last token.
    pub end: u32,
    /// Version; -1 means unknown.
    pub version: i32,
}

/// Integers per token of a generation: one row for each of some consecutive tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extra {
    /// `routed_experts` or `sampling_mask`.
    pub name: &'static str,
    /// The token of row 0, counted from the first prompt token or from the first sampled token.
    pub first: ExtraStart,
    /// Trailing shape of every row (layers, experts per token); empty if rows differ in length.
    pub shape: Vec<u32>,
    /// End of each row in `values`.
    pub ends: Vec<u32>,
    /// All rows, concatenated.
    pub values: Vec<i32>,
}

/// The token that the first row of an `Extra` belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtraStart {
    /// The first token of the prompt.
    Prompt,
    /// The first sampled token.
    Sampled,
}

/// An observation of a format's reader about one generation. `align` reports it as a finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Reason from the closed list.
    pub reason: Reason,
    /// Number of affected tokens.
    pub count: u32,
    /// Details of the observation.
    pub detail: String,
}

/// Stop token or stop string of a generation, in addition to its finish reason.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Stop {
    /// Not recorded (for vLLM this means the model's own end-of-sequence token).
    #[default]
    Unknown,
    /// A stop token id.
    Id(u32),
    /// A stop string, trimmed from the text but not from the tokens.
    Text(String),
}

/// The distribution that recorded logprobs belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[repr(u8)]
pub enum LogprobKind {
    /// Not recorded.
    #[default]
    Unknown = 0,
    /// The model's distribution before temperature, penalties and top-p (vLLM's default).
    Raw = 1,
    /// The distribution that was sampled from.
    Processed = 2,
}

impl LogprobKind {
    /// Parses `raw`, `processed` or `unknown`.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "raw" | "raw_logprobs" => Some(Self::Raw),
            "processed" | "processed_logprobs" => Some(Self::Processed),
            "unknown" => Some(Self::Unknown),
            _ => None,
        }
    }
}

/// Sampled tokens as recorded, in flat arrays. Their lengths may contradict one another; `align` detects and reports
/// that.
#[derive(Debug, Clone, Default)]
pub struct Tokens {
    /// Ids, if recorded (`token_ids`, `token_id:N`).
    pub ids: Option<Vec<u32>>,
    /// Bytes per token, if recorded.
    pub bytes: Option<Pieces>,
    /// Text per token, if recorded.
    pub texts: Option<Pieces>,
    /// Logprobs in nats, NaN if missing or invalid; `None` if none were recorded.
    pub logprobs: Option<Vec<f32>>,
    /// Number of `logprobs` that were null, NaN or -inf.
    pub missing: u32,
    /// Number of `logprobs` that were impossible (positive, or the sentinel -9999.0).
    pub invalid: u32,
    /// The most probable ids at each token, if the record lists two or more with their ids.
    pub top: Option<Box<TopLogprobs>>,
}

/// The most probable ids at each token and their logprobs, as listed by the server, concatenated.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TopLogprobs {
    /// End of each token's list. A list is empty if the record has none, or one that is not understood.
    pub ends: Vec<u32>,
    /// All ids.
    pub ids: Vec<u32>,
    /// Their logprobs in nats; -inf for an id that could not be sampled.
    pub logprobs: Vec<f32>,
}

impl TopLogprobs {
    /// Returns ids and logprobs of token `index`; empty lists past the end.
    pub fn at(&self, index: usize) -> (&[u32], &[f32]) {
        let Some(&end) = self.ends.get(index) else { return (&[], &[]) };
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        (&self.ids[start..end as usize], &self.logprobs[start..end as usize])
    }
}

impl Tokens {
    /// Returns the number of tokens, which is the length of the first recorded array.
    pub fn len(&self) -> usize {
        if let Some(ids) = &self.ids {
            return ids.len();
        }
        if let Some(pieces) = self.bytes.as_ref().or(self.texts.as_ref()) {
            return pieces.len();
        }
        self.logprobs.as_ref().map_or(0, Vec::len)
    }

    /// Returns whether the record lists no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Byte strings of a list of tokens, concatenated.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pieces {
    /// All bytes.
    pub data: Vec<u8>,
    /// End of each piece in `data`.
    pub ends: Vec<u32>,
    /// Whether the record contained the piece (`null` differs from the empty string).
    pub known: Vec<bool>,
}

impl Pieces {
    /// Appends one piece; `None` if it was not recorded.
    pub fn push(&mut self, piece: Option<&[u8]>) {
        if let Some(bytes) = piece {
            self.data.extend_from_slice(bytes);
        }
        self.close(piece.is_some());
    }

    /// Ends a piece whose bytes were appended to `data`. `known` is false if it was not recorded; then nothing was
    /// appended.
    pub fn close(&mut self, known: bool) {
        self.ends.push(self.data.len() as u32);
        self.known.push(known);
    }

    /// Returns the number of pieces.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns whether there are no pieces.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns piece `index`, or `None` past the end or if it was not recorded.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        if !*self.known.get(index)? {
            return None;
        }
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        self.data.get(start..self.ends[index] as usize)
    }
}
