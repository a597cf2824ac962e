//! Reads an `Object` value by value, for records that the fast scanner does not support. A fault is located exactly.
//!
//! Every accepted form of a `logprobs` value becomes `Tokens`: `{"content": [{token, logprob, bytes}]}`, the same under
//! `refusal`, a bare list of such entries or of numbers, `{"tokens", "logprobs"}`, `{"values"}`, the legacy `{"tokens",
//! "token_logprobs"}`, and `token_id:N` in place of text. Only this reader accepts numbers written as words and text
//! that UTF-8 cannot represent. Values stay JSON text until they are read. An error contains the path of the value that
//! is not as expected.

use super::object::{Kind, Node, Object, Slot};
use crate::format::rejection::Reason;
use crate::format::token_list::{
    Columns, ID_COMPLAINT, Id, Lists, MAX_ID, Reading, Scalar, TokenText, listed_logprob, number_from_word, placeholder,
};
use crate::json_number;
use crate::trace::{Pieces, Schemas, Tokens};
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// Reads `text` at a place where an object of this kind is expected.
pub fn read(text: &str, kind: Kind) -> Read<'_, Node> {
    node(parse(text)?, kind)
}

/// Reads `raw` at a place where an object of this kind is expected.
pub fn node(raw: &RawValue, kind: Kind) -> Read<'_, Node> {
    match Shape::of(raw) {
        Shape::Object => object(raw, kind).map(|object| Node::Object(Box::new(object))),
        Shape::List => {
            let mut nodes = Vec::new();
            each(raw, "a list", |item| node(item, kind).map(|node| nodes.push(node)))?;
            Ok(Node::List(nodes))
        }
        _ => value(raw).map(Node::Other),
    }
}

fn object(raw: &RawValue, kind: Kind) -> Read<'_, Object> {
    let mut object = Object::default();
    for (key, value) in members(raw.get())? {
        member(&mut object, kind, &key, value).map_err(|fault| fault.under(&key))?;
    }
    Ok(object)
}

fn member<'a>(object: &mut Object, kind: Kind, key: &str, raw: &'a RawValue) -> Read<'a, ()> {
    let numbers = &mut object.numbers;
    match kind.slot(key) {
        Slot::Logprobs => numbers.logprobs = read_logprobs(raw)?.map(Box::new),
        Slot::TokenIds => numbers.token_ids = unless_null(raw, ids)?,
        Slot::PromptIds => numbers.prompt_token_ids = unless_null(raw, ids)?,
        Slot::Texts => numbers.texts = unless_null(raw, texts)?.map(Box::new),
        Slot::Bytes => numbers.bytes = unless_null(raw, byte_lists)?.map(Box::new),
        Slot::Nested(name, kind) => object.put(name, node(raw, kind)?),
        Slot::Tools => object.tools = Some(Schemas::new(value(raw)?)),
        Slot::Keep => {
            object.fields.insert(key.to_owned(), value(raw)?);
        }
        Slot::Sign => object.has_sign = true,
        Slot::Skip => {}
    }
    Ok(())
}

fn unless_null<'a, T>(raw: &'a RawValue, read: fn(&'a RawValue) -> Read<'a, T>) -> Read<'a, Option<T>> {
    if Shape::of(raw) == Shape::Null { Ok(None) } else { read(raw).map(Some) }
}

/// Reads texts of tokens, `["Hi", null]`. Null means unknown.
fn texts(raw: &RawValue) -> Read<'_, Pieces> {
    let mut pieces = Pieces::default();
    each(raw, "a list of token texts or null", |item| {
        parse::<TokenText>(item.get()).map(|text| pieces.push(text.0.as_deref()))
    })?;
    Ok(pieces)
}

/// Reads bytes of tokens, `[[72, 105], null]`. Null means unknown.
fn byte_lists(raw: &RawValue) -> Read<'_, Pieces> {
    let mut pieces = Pieces::default();
    each(raw, "a list of byte lists or null", |item| bytes(item).map(|bytes| pieces.push(bytes.as_deref())))?;
    Ok(pieces)
}

/// Reads the tokens of a `logprobs` value, one value at a time. Returns `None` if it lists no tokens.
pub fn read_logprobs(raw: &RawValue) -> Read<'_, Option<Tokens>> {
    let mut lists = Lists::default();
    match Shape::of(raw) {
        Shape::Null => {}
        Shape::List => entries(raw, &mut lists.content)?,
        Shape::Object => of_object(raw, &mut lists)?,
        _ => return Err(Fault::expected(raw, FORMS)),
    }
    lists.finish().map_err(|message| Fault::saying(raw, message))
}

const FORMS: &str = "logprobs (null, a list, or an object with content, refusal, tokens, values or token_logprobs)";

/// Keys of a `logprobs` object that are read.
const KEYS: &[&str] = &["content", "refusal", "tokens", "token_ids", "logprobs", "token_logprobs", "values"];

fn of_object<'a>(raw: &'a RawValue, lists: &mut Lists) -> Read<'a, ()> {
    let members = members(raw.get())?;
    for (key, value) in &members {
        logprobs_member(key, value, lists).map_err(|fault| fault.under(key))?;
    }
    match members.first() {
        Some((key, _)) if !members.iter().any(|(key, _)| KEYS.contains(&key.as_ref())) => {
            Err(Fault::saying(raw, <serde_json::Error as de::Error>::unknown_field(key, KEYS)))
        }
        _ => Ok(()),
    }
}

fn logprobs_member<'a>(key: &str, raw: &'a RawValue, lists: &mut Lists) -> Read<'a, ()> {
    match key {
        "content" => entries(raw, &mut lists.content),
        "refusal" => entries(raw, &mut lists.refusal),
        "logprobs" | "token_logprobs" | "values" => {
            let mut values = Columns::default();
            entries(raw, &mut values)?;
            lists.flat.take_values(values);
            Ok(())
        }
        "tokens" => tokens(raw, &mut lists.flat),
        "token_ids" => {
            lists.flat.ids = if Shape::of(raw) == Shape::Null { Vec::new() } else { ids(raw)? };
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Reads a list of entries, or null.
fn entries<'a>(raw: &'a RawValue, columns: &mut Columns) -> Read<'a, ()> {
    *columns = Columns::default();
    if Shape::of(raw) == Shape::Null {
        return Ok(());
    }
    each(raw, "a list of logprobs or null", |item| entry(item, columns))
}

/// Reads one entry: `{"token", "logprob", "bytes"}` or a bare number.
fn entry<'a>(raw: &'a RawValue, columns: &mut Columns) -> Read<'a, ()> {
    let (mut reading, mut text, mut token_bytes, mut id) = (Reading::Missing, TokenText(None), None, None);
    let mut top = Vec::new();
    if Shape::of(raw) == Shape::Object {
        for (key, value) in members(raw.get())? {
            match key.as_ref() {
                "token" => parse(value.get()).map(|value| text = value),
                "bytes" => bytes(value).map(|value| token_bytes = value),
                "logprob" => parse(value.get()).map(|value| reading = value),
                "token_id" => parse::<Option<Id>>(value.get()).map(|value| id = value),
                "top_logprobs" if id.is_some() || text.0.as_deref().and_then(placeholder).is_some() => {
                    top = top_logprobs(value).unwrap_or_default();
                    Ok(())
                }
                _ => Ok(()),
            }
            .map_err(|fault| fault.under(&key))?;
        }
    } else {
        reading = parse(raw.get())?;
    }
    for (id, logprob) in top {
        columns.list(id, logprob);
    }
    columns.push(id.map(|Id(id)| id), reading, text.0.as_deref(), token_bytes.as_deref());
    Ok(())
}

/// Returns the most probable ids with their logprobs; `None` for fewer than two, or if an id or logprob is unknown.
fn top_logprobs(raw: &RawValue) -> Option<Vec<(u32, f32)>> {
    let items: Vec<&RawValue> = serde_json::from_str(raw.get()).ok()?;
    let listed: Vec<(u32, f32)> = items.into_iter().map(top_logprob).collect::<Option<_>>()?;
    Some(listed).filter(|listed| listed.len() > 1)
}

fn top_logprob(raw: &RawValue) -> Option<(u32, f32)> {
    let (mut id, mut logprob) = (None, None);
    for (key, value) in members(raw.get()).ok()? {
        match key.as_ref() {
            "token" => {
                let text = serde_json::from_str::<TokenText>(value.get()).ok()?.0;
                let named = text.as_deref().and_then(placeholder).filter(|id| *id <= MAX_ID);
                id = named.map(|id| id as u32).or(id);
            }
            "token_id" => id = serde_json::from_str::<Option<Id>>(value.get()).ok()?.map(|Id(id)| id).or(id),
            "logprob" => {
                let number = match serde_json::from_str(value.get()).ok()? {
                    Scalar::Text(word) => number_from_word(&word),
                    number => number.number(),
                };
                logprob = number.and_then(listed_logprob);
            }
            _ => {}
        }
    }
    id.zip(logprob)
}

/// Reads a `tokens` list: texts, or ids if the items are integers.
fn tokens<'a>(raw: &'a RawValue, flat: &mut Columns) -> Read<'a, ()> {
    let (mut texts, mut ids) = (Pieces::default(), Vec::new());
    if Shape::of(raw) != Shape::Null {
        each(raw, "a list of token texts or a list of token ids", |item| {
            match Shape::of(item) {
                Shape::Number => ids.push(parse::<Id>(item.get())?.0),
                Shape::Text | Shape::Null => {
                    texts.push(parse::<Option<String>>(item.get())?.as_deref().map(str::as_bytes));
                }
                _ => return Err(Fault::expected(item, "a token: its text or its id")),
            }
            Ok(())
        })?;
    }
    if !ids.is_empty() && !texts.is_empty() {
        return Err(Fault::saying(raw, "tokens mixes texts and ids"));
    }
    flat.texts = texts;
    if !ids.is_empty() {
        flat.ids = ids;
    }
    Ok(())
}

/// Type of a JSON value, determined from its first character.
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

    /// Returns the name of the type with its article.
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

/// An error about a value of an unexpected type or content.
#[derive(Debug)]
pub struct Fault<'a> {
    /// Path of the value, relative to the value that was read, such as `.content[3].logprob`.
    path: String,
    /// Text of the value. serde counts lines and columns in it.
    pub text: &'a str,
    pub error: serde_json::Error,
}

/// Result of reading a value.
pub type Read<'a, T> = Result<T, Fault<'a>>;

impl<'a> Fault<'a> {
    /// Creates a fault with a message of this module.
    pub fn saying(raw: &'a RawValue, message: impl fmt::Display) -> Self {
        Self { path: String::new(), text: raw.get(), error: de::Error::custom(message) }
    }

    /// Creates a fault for a value of another type than `expected`.
    pub fn expected(raw: &'a RawValue, expected: &str) -> Self {
        let error =
            serde_json::from_str::<Scalar>(raw.get()).map_or_else(|error| error, |scalar| scalar.refused(expected));
        Self { path: String::new(), text: raw.get(), error }
    }

    /// Extends the path: the faulty value is inside the value of `key`.
    pub fn under(self, key: &str) -> Self {
        Self { path: format!(".{key}{}", self.path), ..self }
    }

    /// Returns the path of the value; empty if it is the value that was read.
    pub fn path(&self) -> &str {
        self.path.strip_prefix('.').unwrap_or(&self.path)
    }

    /// Returns serde's message without line and column.
    pub fn complaint(&self) -> String {
        let complaint = self.error.to_string();
        complaint.split(" at line ").next().unwrap_or_default().to_owned()
    }

    /// Returns the reason under which the record is counted.
    pub fn reason(&self) -> Reason {
        if self.complaint().starts_with(ID_COMPLAINT) { Reason::IdOutOfRange } else { Reason::WrongType }
    }
}

/// Parses the JSON text of a value.
pub fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Read<'a, T> {
    serde_json::from_str(text).map_err(|error| Fault { path: String::new(), text, error })
}

/// Reads a value unchanged.
pub fn value(raw: &RawValue) -> Read<'_, Value> {
    let text = raw.get();
    json_number::parse(text).map_err(|error| Fault { path: String::new(), text, error })
}

/// Reads the items of a list one by one. `expected` is the name of such a list in errors.
pub fn each<'a>(raw: &'a RawValue, expected: &str, mut read: impl FnMut(&'a RawValue) -> Read<'a, ()>) -> Read<'a, ()> {
    if Shape::of(raw) != Shape::List {
        return Err(Fault::expected(raw, expected));
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

/// Reads the bytes of a token, or null.
pub fn bytes(raw: &RawValue) -> Read<'_, Option<Vec<u8>>> {
    match Shape::of(raw) {
        Shape::List | Shape::Null => parse(raw.get()),
        _ => Err(Fault::expected(raw, "a list of bytes (integers from 0 to 255) or null")),
    }
}

/// The keys of an object with the JSON text of their values.
pub type Members<'a> = Vec<(Cow<'a, str>, &'a RawValue)>;

pub fn members(text: &str) -> Read<'_, Members<'_>> {
    let mut members = Members::new();
    let result = members_into(text, &mut members);
    result.map(|()| members).map_err(|error| Fault { path: String::new(), text, error })
}

/// Appends the members of the object `text`. If the text is not a valid object, the members before the error are
/// appended.
pub fn members_into<'a>(text: &'a str, members: &mut Members<'a>) -> serde_json::Result<()> {
    let mut json = serde_json::Deserializer::from_str(text);
    json.deserialize_map(MembersVisitor(members))?;
    json.end()
}

/// A key, borrowed if it contains no escape.
#[derive(serde::Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

/// Visitor that collects the members of an object without parsing their values.
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
