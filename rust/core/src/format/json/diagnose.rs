//! Parses the bytes of a record into an `Object`, and turns a fault into a located rejection that a user understands.

use super::fallback::{self, Fault, Members, Read, members, members_into};
use super::fast_scan;
use super::object::{Kind, Node, Object, describe};
use crate::format::rejection::{Decoded, Reason, Rejection, not_a_trace, reject};
use crate::format::token_list::BARE;
use crate::json_number;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::error::Category;
use std::borrow::Cow;

/// Largest nesting depth that `serde_json` parses.
const DEPTH: usize = 127;

/// Parses the bytes of a record. `is_sign` decides which keys may be those of a producer's own format.
pub fn parse(record: &[u8], is_sign: fn(&str) -> bool) -> Decoded<Object> {
    let text = utf8(record)?;
    let kind = Kind::Record(is_sign);
    if let Some(object) = fast_scan::object(text, kind) {
        return Ok(object);
    }
    check_depth(text)?;
    match parse_generic(text, kind)? {
        Node::Object(object) => Ok(*object),
        Node::List(_) => Err(not_an_object("a list")),
        Node::Other(value) => Err(not_an_object(describe(&value))),
    }
}

/// Parses a record without the fast scanner.
pub(super) fn parse_generic(text: &str, kind: Kind) -> Decoded<Node> {
    fallback::read(text, kind).or_else(|fault| match quote_literals(text) {
        Cow::Borrowed(_) => Err(explain(text, &fault)),
        // Python's `json` module writes NaN and Infinity without quotes. They are read as the same words in quotes.
        Cow::Owned(quoted) => fallback::read(&quoted, kind).map_err(|fault| explain(&quoted, &fault)),
    })
}

/// Parses a value of a record at a place where an object of some kind is expected.
pub fn node(text: &str, kind: Kind) -> Read<'_, Node> {
    match fast_scan::object(text, kind) {
        Some(object) => Ok(Node::Object(Box::new(object))),
        None => fallback::read(text, kind),
    }
}

/// Parses an object inside a record.
pub fn object(text: &str, kind: Kind) -> Decoded<Object> {
    match node(text, kind) {
        Ok(Node::Object(object)) => Ok(*object),
        Ok(_) => Err(not_a_trace("TG-FORMAT-028", "not an object")),
        Err(fault) => Err(explain(text, &fault)),
    }
}

fn not_an_object(description: &str) -> Rejection {
    reject(Reason::UnknownForm, "TG-FORMAT-029", format!("the record is {description}, not an object"))
        .why("A trace is one JSON object")
        .fix("See docs/reference/trace-format.md for the accepted forms")
}

/// Returns the text of a record, with quotes added around bare NaN and Infinity.
pub fn text(record: &[u8]) -> Decoded<Cow<'_, str>> {
    let text = utf8(record)?;
    if fast_scan::is_json(text) {
        return Ok(Cow::Borrowed(text));
    }
    check_depth(text)?;
    let is_json = serde_json::from_str::<IgnoredAny>(text).is_ok();
    Ok(if is_json { Cow::Borrowed(text) } else { quote_literals(text) })
}

/// Rejects text nested deeper than the parser supports, including values that no reader uses.
fn check_depth(text: &str) -> Decoded<()> {
    let bytes = text.as_bytes();
    let (mut depth, mut at) = (0, 0);
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                at = string_end(bytes, at);
                continue;
            }
            b'{' | b'[' if depth == DEPTH => return Err(of_trace(too_deep(at + 1), &text[..at])),
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    Ok(())
}

fn too_deep(byte: usize) -> Rejection {
    reject(Reason::TooDeep, "TG-FORMAT-030", format!("JSON nested deeper than 128 levels at byte {byte}"))
        .why("A record so deep is not a trace and would exhaust the stack")
        .fix("Flatten it, or store the nested part as a string")
}

/// Adds quotes around NaN, Infinity and -Infinity outside strings.
fn quote_literals(text: &str) -> Cow<'_, str> {
    let bytes = text.as_bytes();
    let (mut quoted, mut copied_end, mut at) = (String::new(), 0, 0);
    while at < bytes.len() {
        if bytes[at] == b'"' {
            at = string_end(bytes, at);
            continue;
        }
        let word = BARE.iter().find(|word| bytes[at..].starts_with(word.as_bytes()));
        let Some(word) = word else {
            at += 1;
            continue;
        };
        quoted.push_str(&text[copied_end..at]);
        quoted.push('"');
        quoted.push_str(word);
        quoted.push('"');
        at += word.len();
        copied_end = at;
    }
    if copied_end == 0 {
        return Cow::Borrowed(text);
    }
    quoted.push_str(&text[copied_end..]);
    Cow::Owned(quoted)
}

/// Returns the index after the closing quote of the string that starts at `start`.
fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while let Some(step) = memchr::memchr2(b'"', b'\\', &bytes[at.min(bytes.len())..]) {
        at += step;
        if bytes[at] == b'"' {
            return at + 1;
        }
        at += 2;
    }
    bytes.len()
}

fn utf8(record: &[u8]) -> Decoded<&str> {
    simdutf8::compat::from_utf8(record).map_err(|error| not_utf8(record, error.valid_up_to()))
}

fn not_utf8(record: &[u8], offset: usize) -> Rejection {
    let rejection = reject(Reason::NotUtf8, "TG-FORMAT-031", format!("invalid UTF-8 at byte {offset} of the record"));
    let is_utf16 = offset < 2 && (record.starts_with(&[0xff, 0xfe]) || record.starts_with(&[0xfe, 0xff]));
    let cure = if is_utf16 {
        "The file looks like UTF-16: convert it, for example with iconv -f UTF-16 -t UTF-8"
    } else {
        "Write the record as UTF-8"
    };
    rejection.why("JSON is UTF-8, and a guess would change the text the tokens stand for").fix(cure)
}

/// Turns a fault into a rejection: the problem, its path, why it matters, and the fix.
fn explain(text: &str, fault: &Fault<'_>) -> Rejection {
    let complaint = fault.complaint();
    let byte = byte_offset(text, fault);
    let rejection = match fault.error.classify() {
        Category::Data => {
            let place = if fault.path().is_empty() { String::new() } else { format!("{}: ", fault.path()) };
            reject(fault.reason(), "TG-FORMAT-083", format!("{place}{complaint}"))
                .why("The token lists of a record must have the content that their names state")
                .fix("See docs/reference/trace-format.md for the accepted forms")
        }
        _ if complaint.contains("recursion limit") => too_deep(byte),
        _ if complaint.contains("surrogate") || complaint.contains("end of hex escape") => {
            reject(Reason::LoneSurrogate, "TG-FORMAT-032", format!("a lone surrogate escape before byte {byte}"))
                .why("It is half of a character: no UTF-8 text has it, so no tokenizer saw it")
                .fix("Record whole characters, or write U+FFFD where the text was cut")
        }
        Category::Eof => {
            reject(Reason::NotJson, "TG-FORMAT-033", format!("not JSON: the record ends too early, at byte {byte}"))
                .why("The line is incomplete, or a string contains a raw line break")
                .fix("Write the record again, one whole JSON object a line")
        }
        _ => reject(Reason::NotJson, "TG-FORMAT-034", format!("not JSON: {complaint} at byte {byte}"))
            .why("The record cannot be read")
            .fix("Write one whole JSON object a line"),
    };
    of_trace(rejection, text)
}

/// Adds the id of the trace to a rejection, if `text` contains it.
fn of_trace(rejection: Rejection, text: &str) -> Rejection {
    rejection.at(&crate::Location { trace: id_before_failure(text), ..Default::default() })
}

/// Returns the byte offset of a fault in `text`. serde counts lines and columns within the faulty value.
fn byte_offset(text: &str, fault: &Fault<'_>) -> usize {
    let start = fault.text.as_ptr().addr().saturating_sub(text.as_ptr().addr());
    let lines = fault.text.split_inclusive('\n').take(fault.error.line().saturating_sub(1));
    start + lines.map(str::len).sum::<usize>() + fault.error.column()
}

/// Returns the record's id if it occurs before the place at which parsing fails.
fn id_before_failure(text: &str) -> Option<String> {
    let mut before = Members::new();
    let _ = members_into(text, &mut before);
    let (_, id) = before.iter().rev().find(|(key, _)| key == "id")?;
    match json_number::parse(id.get()).ok()? {
        Value::String(id) => Some(id),
        Value::Number(id) => Some(id.to_string()),
        other => json_number::digits_of(&other).map(str::to_owned),
    }
}

/// Returns the keys of a record, for an error message.
pub fn keys(record: &[u8]) -> Vec<String> {
    let text = std::str::from_utf8(record).unwrap_or_default();
    members(text).map(|members| members.into_iter().map(|(key, _)| key.into_owned()).collect()).unwrap_or_default()
}
