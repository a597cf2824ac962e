//! Columns of a row in the format of trainers, and header fields under a recorder's names.
//!
//! A column is a list, or a batch of one row (`[[...]]`, from a tensor of shape [1, S]). A batch of several rows is
//! rejected, because a trace is one record.

use super::super::interface::{Decoded, Header, Outline, Reason, Rejection, Shape, reject};
use crate::format::fields::{Fields, HEADER_KEYS, number_of};
use crate::format::token_list::{Id, Reading, Scalar};
use crate::sampling::OPTIONS;
use crate::trace::{Schemas, Tokens};
use serde::de::{self, Deserialize, Deserializer};
use serde_json::Value;

/// Names of header fields, each with the names that a recorder uses for it.
pub type Names<'n> = &'n [(&'n str, &'n [&'n str])];

pub struct Columns<'o, 'a>(pub &'o Outline<'a>);

impl<'a> Columns<'_, 'a> {
    pub fn ids(&self, key: &str) -> Decoded<Option<Vec<u32>>> {
        Ok(self.of(key)?.map(Id::plain))
    }

    /// Returns a column of 0 and 1. It may also be written as booleans or as 0.0 and 1.0.
    pub fn mask(&self, key: &str) -> Decoded<Option<Vec<bool>>> {
        Ok(self.of::<Bit>(key)?.map(|bits| bits.into_iter().map(|Bit(bit)| bit).collect()))
    }

    pub fn logprobs(&self, key: &str) -> Decoded<Option<Vec<Reading>>> {
        self.of(key)
    }

    /// Returns a column of policy versions. Negative or null means unknown and becomes -1.
    pub fn versions(&self, key: &str) -> Decoded<Option<Vec<i32>>> {
        let to_version =
            |version: Option<i64>| version.and_then(|number| i32::try_from(number).ok()).unwrap_or(-1).max(-1);
        Ok(self.of::<Option<i64>>(key)?.map(|column| column.into_iter().map(to_version).collect()))
    }

    fn of<T: Deserialize<'a>>(&self, key: &str) -> Decoded<Option<Vec<T>>> {
        let list = self.0.get(key).filter(|raw| Shape::of(raw) == Shape::List);
        if !list.is_some_and(|raw| raw.get()[1..].trim_start().starts_with('[')) {
            return self.0.typed(key);
        }
        let mut rows = self.0.typed::<Vec<Vec<T>>>(key)?.unwrap_or_default();
        match rows.len() {
            1 => Ok(rows.pop()),
            count => Err(several(key, count)),
        }
    }

    /// Returns the scalar under a key, also from a batch of one.
    pub fn scalar(&self, key: &str) -> Decoded<Option<Value>> {
        let mut value = self.0.value(key)?;
        while let Some(Value::Array(items)) =
            value.as_mut().filter(|value| value.as_array().is_some_and(|v| v.len() == 1))
        {
            value = items.pop();
        }
        Ok(value)
    }

    /// Reads the header. `names` are pairs of a field's name and the recorder's names for it, of which the first that
    /// exists is used.
    ///
    /// A field's own name is used unless it occurs in `names`.
    pub fn header(&self, names: Names<'_>) -> Decoded<Header> {
        self.header_without(&[], names)
    }

    /// As [`Self::header`], except for the names `taken`, which the recorder uses for something else.
    pub fn header_without(&self, taken: &[&str], names: Names<'_>) -> Decoded<Header> {
        let mut fields = Fields::new();
        let names = names.iter().flat_map(|(ours, theirs)| theirs.iter().map(|theirs| (*ours, *theirs)));
        let is_named =
            |own: &str| taken.contains(&own) || names.clone().any(|(ours, theirs)| ours == own || theirs == own);
        let sampled = OPTIONS.iter().map(|(name, _)| *name);
        let default_names = HEADER_KEYS.into_iter().chain(["temperature", "model", "tools"]).chain(sampled);
        let default_names = default_names.filter(|name| !is_named(name)).map(|name| (name, name));
        for (ours, theirs) in names.clone().chain(default_names) {
            if fields.contains_key(ours) {
                continue;
            }
            if let Some(value) = self.scalar(theirs)? {
                put(&mut fields, ours, theirs, value)?;
            }
        }
        let schemas = fields.remove("tools").map(Schemas::new);
        Header::read(&fields, schemas)
    }
}

/// Sets a header field. A reward may be a number, a list of numbers per token (their sum is used), or named numbers.
fn put(fields: &mut Fields, ours: &str, theirs: &str, value: Value) -> Decoded<()> {
    let value = match (ours, value) {
        ("reward", Value::Object(named)) => {
            fields.insert("rewards".to_owned(), Value::Object(numbers_of(&named)));
            return Ok(());
        }
        ("reward", Value::Array(list)) if list.iter().all(Value::is_array) && list.len() > 1 => {
            return Err(several(theirs, list.len()));
        }
        ("reward", Value::Array(list)) => total(theirs, &list)?.into(),
        ("rewards", Value::Object(named)) => Value::Object(numbers_of(&named)),
        (_, value) => value,
    };
    fields.insert(ours.to_owned(), value);
    Ok(())
}

/// Returns the named values that are numbers.
pub fn numbers_of(values: &Fields) -> Fields {
    let is_number = |value: &Value| value.is_number() || value.is_boolean() || value.is_null();
    values.iter().filter(|(_, value)| is_number(value)).map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Returns the named values that are numbers, as rewards. A missing number becomes NaN.
pub fn rewards_of(values: &Fields) -> Vec<(String, f32)> {
    let reward = |value: Value| value.as_f64().map_or(f32::NAN, |reward| reward as f32);
    numbers_of(values).into_iter().map(|(name, value)| (name, reward(value))).collect()
}

/// Returns the sum of per-token rewards, or `None` if all are null.
pub fn total(key: &str, list: &[Value]) -> Decoded<Option<f64>> {
    let mut sum = None;
    for value in list {
        if let Some(number) = number_of(key, value)? {
            sum = Some(sum.unwrap_or(0.0) + number);
        }
    }
    Ok(sum)
}

fn several(key: &str, count: usize) -> Rejection {
    reject(Reason::UnknownForm, "TG-FORMAT-064", format!("`{key}` has {count} rows"))
        .why("A record is one trace, and quarantine, ids and rewards are kept for each")
        .fix("Write a line for each row: json.dumps({key: column[i] for key, column in batch.items()})")
}

/// One entry of a mask.
struct Bit(bool);

impl<'de> Deserialize<'de> for Bit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Scalar::deserialize(deserializer)?;
        match (&value, value.number()) {
            (Scalar::Bool(bit), _) => Ok(Self(*bit)),
            (_, Some(number)) if number == 0.0 || number == 1.0 => Ok(Self(number == 1.0)),
            (_, Some(number)) => {
                Err(de::Error::custom(format_args!("an entry of a mask is {number}, neither 0 nor 1")))
            }
            _ => Err(value.refused("an entry of a mask (0, 1 or a boolean)")),
        }
    }
}

/// Returns tokens with ids and logprobs.
pub fn tokens_of(ids: Option<Vec<u32>>, logprobs: Option<Vec<Reading>>) -> Tokens {
    let mut tokens = Tokens { ids, ..Tokens::default() };
    tokens.logprobs = logprobs.map(|readings| readings.into_iter().map(|reading| tokens.take(reading)).collect());
    tokens
}
