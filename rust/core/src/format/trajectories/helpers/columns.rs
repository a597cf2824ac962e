//! Columns of a row as trainers write them, and the header fields under their own names.
//!
//! A column is a list, or a batch of one row around it (`[[...]]`, as a tensor of shape [1, S] is written). A batch of
//! several rows is refused: a trace is one record.

use super::super::interface::{Decoded, Header, Outline, Reason, Rejection, Shape, reject};
use crate::format::fields::{Fields, HEADER_KEYS, number_of};
use crate::format::token_list::{Id, Reading, Scalar};
use crate::sampling::OPTIONS;
use crate::trace::{Schemas, Tokens};
use serde::de::{self, Deserialize, Deserializer};
use serde_json::Value;

/// Our names of header fields, each with those that a recorder has for it.
pub type Names<'n> = &'n [(&'n str, &'n [&'n str])];

pub struct Columns<'o, 'a>(pub &'o Outline<'a>);

impl<'a> Columns<'_, 'a> {
    pub fn ids(&self, key: &str) -> Decoded<Option<Vec<u32>>> {
        Ok(self.of(key)?.map(Id::plain))
    }

    /// A column of 0 and 1, also written as booleans or as 0.0 and 1.0.
    pub fn mask(&self, key: &str) -> Decoded<Option<Vec<bool>>> {
        Ok(self.of::<Bit>(key)?.map(|bits| bits.into_iter().map(|Bit(bit)| bit).collect()))
    }

    pub fn logprobs(&self, key: &str) -> Decoded<Option<Vec<Reading>>> {
        self.of(key)
    }

    /// A column of policy versions; what is negative or null is unknown, -1.
    pub fn versions(&self, key: &str) -> Decoded<Option<Vec<i32>>> {
        let known = |version: Option<i64>| version.and_then(|found| i32::try_from(found).ok()).unwrap_or(-1).max(-1);
        Ok(self.of::<Option<i64>>(key)?.map(|column| column.into_iter().map(known).collect()))
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

    /// The scalar under a key, also in a batch of one.
    pub fn scalar(&self, key: &str) -> Decoded<Option<Value>> {
        let mut value = self.0.value(key)?;
        while let Some(Value::Array(items)) =
            value.as_mut().filter(|value| value.as_array().is_some_and(|v| v.len() == 1))
        {
            value = items.pop();
        }
        Ok(value)
    }

    /// The header, under the recorder's names: `(ours, theirs)`, of theirs that are there the first. Our own names are
    /// taken where they are not named.
    pub fn header(&self, names: Names<'_>) -> Decoded<Header> {
        self.header_without(&[], names)
    }

    /// The same, where the recorder uses some of our own names for something else.
    pub fn header_without(&self, taken: &[&str], names: Names<'_>) -> Decoded<Header> {
        let mut fields = Fields::new();
        let names = names.iter().flat_map(|(ours, theirs)| theirs.iter().map(|theirs| (*ours, *theirs)));
        let named =
            |own: &str| taken.contains(&own) || names.clone().any(|(ours, theirs)| ours == own || theirs == own);
        let sampled = OPTIONS.iter().map(|(name, _)| *name);
        let own = HEADER_KEYS.into_iter().chain(["temperature", "model", "tools"]).chain(sampled);
        let own = own.filter(|own| !named(own)).map(|own| (own, own));
        for (ours, theirs) in names.clone().chain(own) {
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

/// A reward may be a number, numbers for the tokens (their sum counts), or named numbers.
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

/// Of named values those that are numbers.
pub fn numbers_of(named: &Fields) -> Fields {
    let is_number = |value: &Value| value.is_number() || value.is_boolean() || value.is_null();
    named.iter().filter(|(_, value)| is_number(value)).map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Of named values those that are numbers as rewards, NaN for what is none.
pub fn rewards_of(named: &Fields) -> Vec<(String, f32)> {
    let reward = |value: Value| value.as_f64().map_or(f32::NAN, |reward| reward as f32);
    numbers_of(named).into_iter().map(|(name, value)| (name, reward(value))).collect()
}

/// The sum of per-token rewards; none where all are null.
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
    reject(Reason::UnknownForm, format!("`{key}` holds {count} rows"))
        .why("A record is one trace, and quarantine, ids and rewards are kept for each")
        .cure("Write a line for each row: json.dumps({key: column[i] for key, column in batch.items()})")
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

/// Ids side by side with their logprobs.
pub fn tokens_of(ids: Option<Vec<u32>>, logprobs: Option<Vec<Reading>>) -> Tokens {
    let mut tokens = Tokens { ids, ..Tokens::default() };
    tokens.logprobs = logprobs.map(|readings| readings.into_iter().map(|reading| tokens.take(reading)).collect());
    tokens
}
