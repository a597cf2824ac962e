//! Every accepted form of a `logprobs` value becomes `Tokens`.
//!
//! `{"content": [{token, logprob, bytes}]}`, the same under `refusal`, a bare list of such entries or of numbers,
//! `{"tokens", "logprobs"}`, `{"values"}`, the legacy `{"tokens", "token_logprobs"}`, and `token_id:N` in place of text.
//! Here is what the scanner gives up: numbers in words, text that UTF-8 cannot say, and whatever is wrong.

use super::listed::{Columns, Lists};
use super::numbers::{Id, Reading, TokenText};
use super::raw::{Fault, Read, Shape, bytes, each, ids, members, parse};
use crate::trace::{Pieces, Tokens};
use serde::de;
use serde_json::value::RawValue;

/// The tokens of a `logprobs` value, one value at a time; `None` where it says that there are none.
pub fn read(raw: &RawValue) -> Read<'_, Option<Tokens>> {
    let mut lists = Lists::default();
    match Shape::of(raw) {
        Shape::Null => {}
        Shape::List => entries(raw, &mut lists.content)?,
        Shape::Object => of_object(raw, &mut lists)?,
        _ => return Err(Fault::expected(raw, FORMS)),
    }
    lists.finish().map_err(|what| Fault::saying(raw, what))
}

const FORMS: &str = "logprobs (null, a list, or an object with content, refusal, tokens, values or token_logprobs)";

/// Keys of a `logprobs` object that are read.
const KEYS: &[&str] = &["content", "refusal", "tokens", "token_ids", "logprobs", "token_logprobs", "values"];

fn of_object<'a>(raw: &'a RawValue, lists: &mut Lists) -> Read<'a, ()> {
    let members = members(raw.get())?;
    for (key, value) in &members {
        member(key, value, lists).map_err(|fault| fault.under(key))?;
    }
    match members.first() {
        Some((key, _)) if !members.iter().any(|(key, _)| KEYS.contains(&key.as_ref())) => {
            Err(Fault::saying(raw, <serde_json::Error as de::Error>::unknown_field(key, KEYS)))
        }
        _ => Ok(()),
    }
}

fn member<'a>(key: &str, raw: &'a RawValue, lists: &mut Lists) -> Read<'a, ()> {
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

/// A list of entries, or null.
fn entries<'a>(raw: &'a RawValue, columns: &mut Columns) -> Read<'a, ()> {
    *columns = Columns::default();
    if Shape::of(raw) == Shape::Null {
        return Ok(());
    }
    each(raw, "a list of logprobs or null", |item| entry(item, columns))
}

/// One entry: `{"token", "logprob", "bytes"}` or a bare number.
fn entry<'a>(raw: &'a RawValue, columns: &mut Columns) -> Read<'a, ()> {
    let (mut reading, mut text, mut spelled, mut id) = (Reading::Missing, TokenText(None), None, None);
    if Shape::of(raw) == Shape::Object {
        for (key, value) in members(raw.get())? {
            match key.as_ref() {
                "token" => parse(value.get()).map(|found| text = found),
                "bytes" => bytes(value).map(|found| spelled = found),
                "logprob" => parse(value.get()).map(|found| reading = found),
                "token_id" => parse::<Option<Id>>(value.get()).map(|found| id = found),
                _ => Ok(()),
            }
            .map_err(|fault| fault.under(&key))?;
        }
    } else {
        reading = parse(raw.get())?;
    }
    columns.push(id.map(|Id(id)| id), reading, text.0.as_deref(), spelled.as_deref());
    Ok(())
}

/// A `tokens` list: texts, or ids where it holds integers.
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
