//! The fields that all forms share: id, group, rewards, model, tools, and the sampling parameters.
//!
//! The getters are typed. Their errors contain the type that was found.

use super::json::object::describe;
use super::token_list::{MAX_ID, number_from_word};
use crate::format::rejection::{Decoded, Reason, Rejection, reject};
use crate::json_number;
use crate::sampling::{Options, omitted};
use crate::server::Server;
pub(super) use crate::trace::value_of as get;
use crate::trace::{Generation, LogprobKind, Schemas, Stop};
use serde_json::{Map, Value};

pub type Fields = Map<String, Value>;

fn wrong(key: &str, value: &Value, wanted: &str) -> Rejection {
    let number = value.as_str().is_some_and(|text| text.trim().parse::<f64>().is_ok_and(f64::is_finite));
    reject(Reason::WrongType, "TG-FORMAT-021", format!("`{key}` is {}, not {wanted}", describe(value)))
        .why("Its value would be guessed")
        .fix(if key == "reward" && number {
            "Read it with --map.reward reward, which takes numbers as text"
        } else {
            "See docs/reference/trace-format.md for the accepted forms"
        })
}

/// Returns the value of a key unless it is null.
pub fn present<'a>(fields: &'a Fields, key: &str) -> Option<&'a Value> {
    get(fields, key).filter(|value| !value.is_null())
}

pub fn text(fields: &Fields, key: &str) -> Decoded<Option<String>> {
    match present(fields, key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(wrong(key, other, "a string")),
    }
}

/// Returns a string. A number is returned as its digits.
fn name(fields: &Fields, key: &str) -> Decoded<Option<String>> {
    present(fields, key).map_or(Ok(None), |value| name_of(key, value))
}

pub fn name_of(key: &str, value: &Value) -> Decoded<Option<String>> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        Value::Number(number) => Ok(Some(number.to_string())),
        other => match json_number::digits_of(other) {
            Some(digits) => Ok(Some(digits.to_owned())),
            None => Err(wrong(key, other, "a string or a number")),
        },
    }
}

/// Returns a finite number. Null and NaN count as missing.
pub fn number(fields: &Fields, key: &str) -> Decoded<Option<f64>> {
    present(fields, key).map_or(Ok(None), |value| number_of(key, value))
}

/// Returns `value` as a finite number. Null and NaN count as missing.
pub fn number_of(key: &str, value: &Value) -> Decoded<Option<f64>> {
    let number = match value {
        Value::Null => return Ok(None),
        Value::Bool(flag) => f64::from(u8::from(*flag)),
        Value::Number(number) => number.as_f64().unwrap_or(f64::NAN),
        Value::String(word) => number_from_word(word).ok_or_else(|| wrong(key, value, "a number"))?,
        other => match json_number::digits_of(other) {
            Some(digits) => digits.parse().unwrap_or(f64::NAN),
            None => return Err(wrong(key, other, "a number")),
        },
    };
    if number.is_infinite() || (number as f32).is_infinite() {
        return Err(not_finite(key, number));
    }
    Ok(Some(number).filter(|number| !number.is_nan()))
}

/// Returns the error for a number that is infinite in float32, or for an infinite sum of the record's numbers.
pub fn not_finite(key: &str, number: f64) -> Rejection {
    reject(Reason::WrongType, "TG-FORMAT-022", format!("`{key}` is {number}, not a finite float32"))
        .why("It would spread over every trace it is averaged with")
        .fix("Write null where there is none")
}

/// Returns a number of at least 0.
fn magnitude(fields: &Fields, key: &str) -> Decoded<Option<f32>> {
    present(fields, key).map_or(Ok(None), |value| magnitude_of(key, value))
}

/// Returns `value` as a number of at least 0.
pub fn magnitude_of(key: &str, value: &Value) -> Decoded<Option<f32>> {
    match number_of(key, value)? {
        Some(value) if value < 0.0 => {
            Err(reject(Reason::WrongType, "TG-FORMAT-023", format!("`{key}` is {value}, below 0"))
                .why("No distribution is sampled so")
                .fix("Write null where it is not known"))
        }
        value => Ok(value.map(|value| value as f32)),
    }
}

/// Returns an integer of at least 0 that fits an i32. It may be written as a string of digits.
pub fn count(fields: &Fields, key: &str) -> Decoded<Option<i32>> {
    present(fields, key).map_or(Ok(None), |value| count_of(key, value))
}

/// Returns `value` as an integer of at least 0 that fits an i32.
pub fn count_of(key: &str, value: &Value) -> Decoded<Option<i32>> {
    let number = match value {
        Value::Null => return Ok(None),
        Value::Number(number) => number.as_u64(),
        Value::String(digits) => digits.parse().ok(),
        _ => None,
    };
    match number.and_then(|number| i32::try_from(number).ok()) {
        Some(number) => Ok(Some(number)),
        None => Err(reject(
            Reason::WrongType,
            "TG-FORMAT-024",
            format!("`{key}` is {value}, not an integer from 0 to 2147483647"),
        )
        .why("It counts or names by number")
        .fix("Write a whole number, or null where it is not known")),
    }
}

/// Returns a JSON object; an empty map if the key is missing.
pub fn mapping(fields: &Fields, key: &str) -> Decoded<Fields> {
    match present(fields, key) {
        None => Ok(Map::new()),
        Some(Value::Object(map)) => Ok(map.clone()),
        Some(other) => Err(wrong(key, other, "an object")),
    }
}

/// Returns tool schemas: a list that is not empty.
pub fn tools(schemas: Option<Schemas>) -> Decoded<Option<Schemas>> {
    let Some(schemas) = schemas.filter(|schemas| !schemas.is_null()) else { return Ok(None) };
    match schemas.as_array() {
        Some(list) => Ok((!list.is_empty()).then_some(schemas)),
        None => Err(wrong("tools", &schemas, "a list")),
    }
}

/// Returns a list of tool schemas, or `None` if it is empty.
pub fn schemas(list: Vec<Value>) -> Option<Schemas> {
    (!list.is_empty()).then(|| Schemas::new(Value::Array(list)))
}

/// Sampling parameters of tokens, as far as they are known.
#[derive(Debug, Clone, Default)]
pub struct Sampling {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub options: Options,
    /// Which parameters are API defaults that a request omits: bits of `sampling::omitted`.
    pub left_out: u8,
    pub policy_version: Option<i32>,
    pub logprob_kind: Option<LogprobKind>,
}

impl Sampling {
    pub const UNKNOWN: Self = Self {
        temperature: None,
        top_p: None,
        options: Options::NONE,
        left_out: 0,
        policy_version: None,
        logprob_kind: None,
    };

    pub fn read(fields: &Fields) -> Decoded<Self> {
        Ok(Self {
            temperature: magnitude(fields, "temperature")?,
            top_p: magnitude(fields, "top_p")?,
            options: Options::read(fields),
            left_out: 0,
            policy_version: policy_version(fields)?,
            logprob_kind: logprob_kind(fields)?,
        })
    }

    /// Fills missing parameters from `outer`.
    pub fn or(self, outer: &Self) -> Self {
        let fill = |is_known: bool, bit: u8| if is_known { 0 } else { outer.left_out & bit };
        let temperature = fill(self.temperature.is_some(), omitted::TEMPERATURE);
        let top_p = fill(self.top_p.is_some(), omitted::TOP_P);
        Self {
            left_out: self.left_out | outer.left_out & omitted::REQUEST | temperature | top_p,
            temperature: self.temperature.or(outer.temperature),
            top_p: self.top_p.or(outer.top_p),
            options: self.options.or(&outer.options),
            policy_version: self.policy_version.or(outer.policy_version),
            logprob_kind: self.logprob_kind.or(outer.logprob_kind),
        }
    }

    /// Returns a generation with these parameters and nothing else.
    pub fn generation(&self) -> Generation {
        Generation {
            logprob_kind: self.logprob_kind.unwrap_or(LogprobKind::Unknown),
            temperature: self.temperature,
            top_p: self.top_p,
            options: self.options.clone(),
            omitted: self.left_out,
            policy_version: self.policy_version.unwrap_or(-1),
            ..Generation::default()
        }
    }
}

/// Returns a version from 0 on. -1 means "unknown", as null does.
fn policy_version(fields: &Fields) -> Decoded<Option<i32>> {
    match get(fields, "policy_version").and_then(Value::as_i64) {
        Some(-1) => Ok(None),
        _ => count(fields, "policy_version"),
    }
}

fn logprob_kind(fields: &Fields) -> Decoded<Option<LogprobKind>> {
    let Some(name) = text(fields, "logprob_kind")? else { return Ok(None) };
    match LogprobKind::parse(&name) {
        Some(kind) => Ok(Some(kind)),
        None => Err(reject(Reason::WrongType, "TG-FORMAT-025", format!("`logprob_kind` is \"{name}\""))
            .why("It decides by which temperature the trainer's logits are divided")
            .fix("Write raw, processed or unknown")),
    }
}

/// Returns whether `sampling_defaults` marks requests as incomplete. A parameter that such a request omits is unknown.
pub fn is_partial(fields: &Fields) -> Decoded<bool> {
    match text(fields, "sampling_defaults")?.as_deref() {
        None | Some("api") => Ok(false),
        Some("unknown") => Ok(true),
        Some(other) => Err(reject(Reason::WrongType, "TG-FORMAT-026", format!("`sampling_defaults` is \"{other}\""))
            .why("It selects the values of options that a request leaves out")
            .fix("Write api for a request as it was sent, unknown for one of which parts are missing")),
    }
}

/// Returns the stop token or stop string that the server reports under this key.
pub fn stop_under(fields: &Fields, key: &str) -> Decoded<Stop> {
    match present(fields, key) {
        None => Ok(Stop::Unknown),
        Some(Value::String(text)) => Ok(Stop::Text(text.clone())),
        Some(Value::Number(number)) => match number.as_u64().filter(|id| *id <= MAX_ID) {
            Some(id) => Ok(Stop::Id(id as u32)),
            None => Err(reject(Reason::IdOutOfRange, "TG-FORMAT-027", format!("`{key}` is {number}, not a token id"))
                .why("Token ids are integers from 0 to 2147483647")
                .fix("Write the id or the string that the server reported, or null")),
        },
        Some(other) => Err(wrong(key, other, "a token id or a stop string")),
    }
}

/// Fields of a record that are the same in all forms.
#[derive(Debug, Default)]
pub struct Header {
    pub id: Option<String>,
    pub group: Option<String>,
    pub reward: Option<f32>,
    pub rewards: Vec<(String, f32)>,
    pub model: Option<String>,
    pub tools: Option<Schemas>,
    pub template_kwargs: Fields,
    /// The server that the record names. Unknown names are ignored.
    pub server: Option<Server>,
    pub sampling: Sampling,
    /// Whether the requests are incomplete, so that omitted parameters are unknown and not API defaults.
    pub partial_requests: bool,
}

/// Keys of a header that no server uses for something else in its responses.
pub const HEADER_KEYS: [&str; 10] = [
    "id",
    "group",
    "reward",
    "rewards",
    "policy_version",
    "logprob_kind",
    "sampling_defaults",
    "template_kwargs",
    "chat_template_kwargs",
    "server",
];

impl Header {
    /// Reads the header of a record from its fields and its tool schemas.
    pub fn read(fields: &Fields, schemas: Option<Schemas>) -> Decoded<Self> {
        let mut template_kwargs = mapping(fields, "chat_template_kwargs")?;
        template_kwargs.extend(mapping(fields, "template_kwargs")?);
        Ok(Self {
            id: name(fields, "id")?,
            group: name(fields, "group")?,
            reward: number(fields, "reward")?.map(|reward| reward as f32),
            rewards: rewards(fields)?,
            model: text(fields, "model")?,
            tools: tools(schemas)?,
            template_kwargs,
            server: get(fields, "server").and_then(Value::as_str).and_then(Server::parse),
            sampling: Sampling::read(fields)?,
            partial_requests: is_partial(fields)?,
        })
    }
}

fn rewards(fields: &Fields) -> Decoded<Vec<(String, f32)>> {
    mapping(fields, "rewards")?
        .iter()
        .map(|(name, value)| {
            let reward = number_of(name, value).map_err(|rejection| rejection.inside("rewards"))?;
            Ok((name.clone(), reward.map_or(f32::NAN, |reward| reward as f32)))
        })
        .collect()
}
