//! The interface between the files of the servers and the reader, and the names that these files use.

pub(in crate::format) use crate::format::build::calls::{API_DEFAULTS, Request};
pub(in crate::format) use crate::format::build::message::Entry;
use crate::format::build::message::{self, no_choice, plain};
pub(in crate::format) use crate::format::build::note;
use crate::format::fields::{Sampling, magnitude_of};
pub(in crate::format) use crate::format::form::Form;
pub(in crate::format) use crate::format::json::outline::{Outline, Shape};
pub(in crate::format) use crate::format::rejection::{Decoded, Reason, Rejection, either, reject};
pub(in crate::format) use crate::format::token_list::{Columns, Id, Reading, TokenText};
use crate::sampling::{Options, place_of};
use crate::trace::{Generation, LogprobKind, Message, Prompt, Stop};
use serde_json::Value;

/// The response format of one server.
pub struct Server {
    pub form: Form,
    /// Keys of a response. `recognizes` is called only if one of them exists.
    pub signs: &'static [&'static str],
    pub recognizes: fn(&Outline<'_>) -> bool,
    /// Reads the response as a message and its generation.
    pub answer: fn(&Outline<'_>, &CallContext<'_>) -> Decoded<Entry>,
    /// Reads the request of the call.
    pub request: fn(&Outline<'_>) -> Decoded<Request>,
    /// Temperature and top-p of a request that omits them.
    pub defaults: Sampling,
}

/// The data of a call that is available before its response is read.
pub struct CallContext<'a> {
    /// Number of the choice that was used, if the record contains it.
    pub choice: Option<i32>,
    pub sampling: &'a Sampling,
    pub request: Option<&'a Outline<'a>>,
}

impl CallContext<'_> {
    /// Returns a generation with these sampling parameters. `kind` is the server's kind of logprobs, if the record
    /// contains none.
    pub fn generation(&self, kind: LogprobKind) -> Generation {
        Generation { logprob_kind: self.sampling.logprob_kind.unwrap_or(kind), ..self.sampling.generation() }
    }

    /// Returns the item with the recorded `index`, or the first if none is recorded, and the number of ignored items.
    pub fn pick<'o>(&self, items: Vec<Outline<'o>>, what: &str) -> Decoded<(Outline<'o>, u32)> {
        let total = items.len();
        let wanted = self.choice.unwrap_or(0);
        let mut by_position = None;
        for (position, item) in items.into_iter().enumerate() {
            match item.count("index")? {
                Some(index) if index == wanted => return Ok((item, self.unused(total))),
                None if position as i32 == wanted => return Ok((item, self.unused(total))),
                _ if position as i32 == wanted => by_position = Some(item),
                _ => {}
            }
        }
        by_position.map(|item| (item, self.unused(total))).ok_or_else(|| no_choice(wanted, total, what))
    }

    fn unused(&self, total: usize) -> u32 {
        if self.choice.is_some() { 0 } else { (total - 1) as u32 }
    }
}

/// Creates an assistant message with this text.
pub fn spoken(text: &str) -> Message {
    plain("assistant", text)
}

/// Returns a prompt from ids, or else from text. Without both it is rendered from the messages.
pub fn prompt_of(ids: Option<Vec<u32>>, text: Option<String>) -> Prompt {
    ids.map(Prompt::Ids).or(text.map(Prompt::Text)).unwrap_or_default()
}

/// Returns the stop token or stop string under a key, if the value is one.
pub fn stop_under(outline: &Outline<'_>, key: &str) -> Decoded<Stop> {
    Ok(match outline.value(key)? {
        Some(Value::String(text)) => Stop::Text(text),
        value => value.as_ref().map_or(Stop::Unknown, stop_id),
    })
}

/// Returns the stop token with the id in `value`.
pub fn stop_id(value: &Value) -> Stop {
    value.as_u64().and_then(|id| u32::try_from(id).ok()).map_or(Stop::Unknown, Stop::Id)
}

/// Returns the finish reason under a key, by its common name.
pub fn finish_under(outline: &Outline<'_>, key: &str) -> Decoded<Option<String>> {
    Ok(outline.text(key)?.map(|raw| message::common(&raw).to_owned()))
}

/// Reads temperature, top-p under its key, and the other options.
pub fn sampling_of(parameters: &Outline<'_>, top_p: &str) -> Decoded<Sampling> {
    let parameter = |key: &str| parameters.value(key)?.map_or(Ok(None), |value| magnitude_of(key, &value));
    let options = Options::read(&parameters.fields_of(|key| place_of(key).is_some())?);
    Ok(Sampling { temperature: parameter("temperature")?, top_p: parameter(top_p)?, options, ..Sampling::default() })
}

/// Reads the sampling options of the object under a key.
pub fn sampling_under(outline: &Outline<'_>, key: &str) -> Decoded<Sampling> {
    sampling_of(&outline.object(key)?.unwrap_or_default(), "top_p")
}
