//! From bytes to an `Object`, and from serde's complaint to a located rejection that a reader of the file understands.
//!
//! The second, slower pass with a path runs only for records that failed.

use super::numbers::ID_COMPLAINT;
use super::object::{Kind, Node, Object, describe};
use super::scan;
use crate::format::rejection::{Decoded, Reason, Rejection, not_a_trace, reject};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use serde_json::error::Category;
use std::borrow::Cow;
use std::fmt;

/// Levels of nesting that `serde_json` goes into.
const DEPTH: usize = 127;

/// Parses the bytes of a record; `is_sign` says which keys may be a producer's.
pub fn parse(record: &[u8], is_sign: fn(&str) -> bool) -> Decoded<Object> {
    let text = utf8(record)?;
    if let Some(object) = scan::record(text, is_sign) {
        return Ok(object);
    }
    check_depth(text)?;
    let node = match generic(text, Kind::Record(is_sign)) {
        Ok(node) => node,
        Err(error) => parse_again(text, is_sign, &error)?,
    };
    match node {
        Node::Object(object) => Ok(*object),
        Node::List(_) => Err(not_an_object("a list")),
        Node::Other(value) => Err(not_an_object(describe(&value))),
    }
}

/// What the generic parser makes of a text.
pub(super) fn generic(text: &str, kind: Kind) -> serde_json::Result<Node> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let node = kind.deserialize(&mut deserializer)?;
    deserializer.end().map(|()| node)
}

/// Parses an object of some kind that stands in a record.
pub fn object(text: &str, kind: Kind) -> Decoded<Object> {
    match kind.deserialize(&mut serde_json::Deserializer::from_str(text)) {
        Ok(Node::Object(object)) => Ok(*object),
        Ok(_) => Err(not_a_trace("not an object")),
        Err(error) => Err(explain(text, &error)),
    }
}

fn not_an_object(found: &str) -> Rejection {
    reject(Reason::UnknownForm, format!("the record is {found}, not an object"))
        .why("A trace is one JSON object")
        .cure("See docs/trace-format.md for the accepted forms")
}

/// The text of a record, with NaN and Infinity in quotes where they stand bare.
pub fn text(record: &[u8]) -> Decoded<Cow<'_, str>> {
    let text = utf8(record)?;
    if scan::is_json(text) {
        return Ok(Cow::Borrowed(text));
    }
    check_depth(text)?;
    let is_json = serde_json::from_str::<IgnoredAny>(text).is_ok();
    Ok(if is_json { Cow::Borrowed(text) } else { quote_literals(text) })
}

/// Python's `json` writes NaN and Infinity bare: they are read as the same words in quotes.
fn parse_again(text: &str, is_sign: fn(&str) -> bool, error: &serde_json::Error) -> Decoded<Node> {
    match quote_literals(text) {
        Cow::Borrowed(_) => Err(explain(text, error)),
        Cow::Owned(quoted) => generic(&quoted, Kind::Record(is_sign)).map_err(|error| explain(&quoted, &error)),
    }
}

/// Refuses what is nested deeper than the parser goes, also in values that nothing here reads.
fn check_depth(text: &str) -> Decoded<()> {
    let bytes = text.as_bytes();
    let (mut depth, mut at) = (0, 0);
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                at = string_end(bytes, at);
                continue;
            }
            b'{' | b'[' if depth == DEPTH => {
                return Err(of_trace(too_deep(at + 1), &text[..at]));
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    Ok(())
}

fn too_deep(byte: usize) -> Rejection {
    reject(Reason::TooDeep, format!("JSON nested deeper than 128 levels at byte {byte}"))
        .why("A record so deep is not a trace and would exhaust the stack")
        .cure("Flatten it, or store the nested part as a string")
}

/// Puts quotes around NaN, Infinity and -Infinity outside strings.
fn quote_literals(text: &str) -> Cow<'_, str> {
    let bytes = text.as_bytes();
    let (mut quoted, mut copied, mut at) = (String::new(), 0, 0);
    while at < bytes.len() {
        if bytes[at] == b'"' {
            at = string_end(bytes, at);
            continue;
        }
        let word = ["NaN", "Infinity", "-Infinity"].iter().find(|word| bytes[at..].starts_with(word.as_bytes()));
        let Some(word) = word else {
            at += 1;
            continue;
        };
        quoted.push_str(&text[copied..at]);
        quoted.push('"');
        quoted.push_str(word);
        quoted.push('"');
        at += word.len();
        copied = at;
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    quoted.push_str(&text[copied..]);
    Cow::Owned(quoted)
}

/// The index after the closing quote of the string that begins at `start`.
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
    let rejection = reject(Reason::NotUtf8, format!("invalid UTF-8 at byte {offset} of the record"));
    let wide = offset < 2 && (record.starts_with(&[0xff, 0xfe]) || record.starts_with(&[0xfe, 0xff]));
    let cure = if wide {
        "The file looks like UTF-16: convert it, for example with iconv -f UTF-16 -t UTF-8"
    } else {
        "Write the record as UTF-8"
    };
    rejection.why("JSON is UTF-8, and a guess would change the text the tokens stand for").cure(cure)
}

/// Turns serde's complaint into ours: what, at which path, why, cure.
fn explain(text: &str, error: &serde_json::Error) -> Rejection {
    let complaint = error.to_string();
    let complaint = complaint.split(" at line ").next().unwrap_or_default().to_owned();
    let byte = byte_offset(text, error);
    let rejection = match error.classify() {
        Category::Data => wrong_type(text, &complaint),
        _ if complaint.contains("recursion limit") => too_deep(byte),
        _ if complaint.contains("surrogate") || complaint.contains("end of hex escape") => {
            reject(Reason::LoneSurrogate, format!("a lone surrogate escape before byte {byte}"))
                .why("It is half of a character: no UTF-8 text has it, so no tokenizer saw it")
                .cure("Record whole characters, or write U+FFFD where the text was cut")
        }
        Category::Eof => reject(Reason::NotJson, format!("not JSON: the record ends too early, at byte {byte}"))
            .why("The line was cut, or a string holds a raw line break")
            .cure("Write the record again, one whole JSON object a line"),
        _ => reject(Reason::NotJson, format!("not JSON: {complaint} at byte {byte}"))
            .why("The record cannot be read")
            .cure("Write one whole JSON object a line"),
    };
    of_trace(rejection, text)
}

/// Says which trace it is, where its id stands in `text`.
fn of_trace(rejection: Rejection, text: &str) -> Rejection {
    rejection.at(&crate::Location { trace: id_before_failure(text), ..Default::default() })
}

fn wrong_type(text: &str, complaint: &str) -> Rejection {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let mut track = serde_path_to_error::Track::new();
    let located = serde_path_to_error::Deserializer::new(&mut deserializer, &mut track);
    let path = match Kind::Record(|_| false).deserialize(located) {
        Ok(_) => String::new(),
        Err(_) => format!("{}: ", track.path()),
    };
    let reason = if complaint.starts_with(ID_COMPLAINT) { Reason::IdOutOfRange } else { Reason::WrongType };
    reject(reason, format!("{path}{complaint}"))
        .why("The token lists of a record must be what they are named for")
        .cure("See docs/trace-format.md for the accepted forms")
}

/// Byte offset of an error; serde counts lines and columns.
fn byte_offset(text: &str, error: &serde_json::Error) -> usize {
    let before: usize = text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum();
    before + error.column()
}

/// The record's id, if it stands before the place where parsing fails.
fn id_before_failure(text: &str) -> Option<String> {
    let mut found = None;
    let _ = serde_json::Deserializer::from_str(text).deserialize_map(IdSeeker(&mut found));
    found
}

/// Looks for `id` on the first level and keeps it, whatever happens after.
struct IdSeeker<'a>(&'a mut Option<String>);

impl<'de> Visitor<'de> for IdSeeker<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<Cow<'_, str>>()? {
            if key == "id" {
                *self.0 = match map.next_value::<Value>()? {
                    Value::String(id) => Some(id),
                    Value::Number(id) => Some(id.to_string()),
                    _ => None,
                };
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

/// The keys of a record, for an error that says what was found instead.
pub fn keys(record: &[u8]) -> Vec<String> {
    serde_json::from_slice::<Keys>(record).map(|keys| keys.0).unwrap_or_default()
}

/// The keys of an object.
struct Keys(Vec<String>);

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(KeysVisitor)
    }
}

/// Visits an object for its keys.
struct KeysVisitor;

impl<'de> Visitor<'de> for KeysVisitor {
    type Value = Keys;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
        let mut keys = Vec::new();
        while let Some((key, IgnoredAny)) = map.next_entry::<String, IgnoredAny>()? {
            keys.push(key);
        }
        Ok(Keys(keys))
    }
}
