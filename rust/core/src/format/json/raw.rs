//! Values of a record that are still JSON text, and where below one a reader found something else than it expected.

use super::numbers::{ID_COMPLAINT, Id, Scalar};
use crate::exact;
use crate::format::rejection::Reason;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// What a JSON value is, told by its first character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Object,
    List,
    Text,
    Number,
    Bool,
    Null,
}

impl Shape {
    pub fn of(raw: &RawValue) -> Self {
        match raw.get().as_bytes().first() {
            Some(b'{') => Self::Object,
            Some(b'[') => Self::List,
            Some(b'"') => Self::Text,
            Some(b't' | b'f') => Self::Bool,
            Some(b'n') | None => Self::Null,
            Some(_) => Self::Number,
        }
    }

    /// Its name with the article.
    pub fn article(self) -> &'static str {
        match self {
            Self::Object => "an object",
            Self::List => "a list",
            Self::Text => "a string",
            Self::Number => "a number",
            Self::Bool => "a boolean",
            Self::Null => "null",
        }
    }
}

/// A value that is not what it should be.
#[derive(Debug)]
pub struct Fault<'a> {
    /// The way to it from the value that was asked for, as in `.content[3].logprob`.
    path: String,
    /// Its text, in which serde counts lines and columns.
    pub text: &'a str,
    pub error: serde_json::Error,
}

/// A value, or what stands in its place.
pub type Read<'a, T> = Result<T, Fault<'a>>;

impl<'a> Fault<'a> {
    /// An error of our own words.
    pub fn saying(raw: &'a RawValue, what: impl fmt::Display) -> Self {
        Self { path: String::new(), text: raw.get(), error: de::Error::custom(what) }
    }

    /// A value of another type than `wanted`.
    pub fn expected(raw: &'a RawValue, wanted: &str) -> Self {
        let error = serde_json::from_str::<Scalar>(raw.get()).map_or_else(|error| error, |found| found.refused(wanted));
        Self { path: String::new(), text: raw.get(), error }
    }

    /// The same, seen from the object that has the value under `key`.
    pub fn under(self, key: &str) -> Self {
        Self { path: format!(".{key}{}", self.path), ..self }
    }

    /// The way to the value, empty where it is the one that was asked for.
    pub fn path(&self) -> &str {
        self.path.strip_prefix('.').unwrap_or(&self.path)
    }

    /// serde's complaint, without line and column.
    pub fn complaint(&self) -> String {
        let complaint = self.error.to_string();
        complaint.split(" at line ").next().unwrap_or_default().to_owned()
    }

    /// Under which reason the record is counted.
    pub fn reason(&self) -> Reason {
        if self.complaint().starts_with(ID_COMPLAINT) { Reason::IdOutOfRange } else { Reason::WrongType }
    }
}

/// The value that is written as `text`.
pub fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Read<'a, T> {
    serde_json::from_str(text).map_err(|error| Fault { path: String::new(), text, error })
}

/// A value that is kept as it is.
pub fn value(raw: &RawValue) -> Read<'_, Value> {
    let text = raw.get();
    exact::parse(text).map_err(|error| Fault { path: String::new(), text, error })
}

/// Reads the items of a list one by one; `wanted` is the name of such a list.
pub fn each<'a>(raw: &'a RawValue, wanted: &str, mut read: impl FnMut(&'a RawValue) -> Read<'a, ()>) -> Read<'a, ()> {
    if Shape::of(raw) != Shape::List {
        return Err(Fault::expected(raw, wanted));
    }
    for (index, item) in parse::<Vec<&RawValue>>(raw.get())?.into_iter().enumerate() {
        read(item).map_err(|fault| Fault { path: format!("[{index}]{}", fault.path), ..fault })?;
    }
    Ok(())
}

pub fn ids(raw: &RawValue) -> Read<'_, Vec<u32>> {
    let mut ids = Vec::new();
    each(raw, "a list of token ids", |item| parse::<Id>(item.get()).map(|Id(id)| ids.push(id)))?;
    Ok(ids)
}

/// The bytes of a token, or null.
pub fn bytes(raw: &RawValue) -> Read<'_, Option<Vec<u8>>> {
    match Shape::of(raw) {
        Shape::List | Shape::Null => parse(raw.get()),
        _ => Err(Fault::expected(raw, "a list of bytes (integers from 0 to 255) or null")),
    }
}

/// The keys of an object with the text of their values.
pub type Members<'a> = Vec<(Cow<'a, str>, &'a RawValue)>;

pub fn members(text: &str) -> Read<'_, Members<'_>> {
    let mut members = Members::new();
    let read = members_into(text, &mut members);
    read.map(|()| members).map_err(|error| Fault { path: String::new(), text, error })
}

/// Appends the members of the object `text`, where it is none those before the error.
pub fn members_into<'a>(text: &'a str, members: &mut Members<'a>) -> serde_json::Result<()> {
    let mut json = serde_json::Deserializer::from_str(text);
    json.deserialize_map(MembersVisitor(members))?;
    json.end()
}

/// A key, borrowed where it has no escape.
#[derive(serde::Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

/// Visits an object without reading its values.
struct MembersVisitor<'v, 'a>(&'v mut Members<'a>);

impl<'a> Visitor<'a> for MembersVisitor<'_, 'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<Key<'a>>()? {
            self.0.push((key.0, map.next_value()?));
        }
        Ok(())
    }
}
