//! Checks whether sampled ids contain the tool calls that the record shows. Ids of a stream that lost chunks, or of
//! another turn, do not.
//!
//! Parsers of servers write a call again in another order, spacing or notation. All notations share the names and the
//! words in the values. The check searches for these after the reasoning.

use super::resolve::{decode_all, decode_text, excerpt};
use crate::tokenizer::Tokenizer;
use crate::trace::value_in;
use memchr::memmem;
use serde_json::Value;

const THOUGHT_END: &[u8] = b"</think>";

/// Describes the part of a message's tool calls that its ids lack, or returns `None` if they contain all of it.
pub fn missing_part(message: &Value, ids: &[u32], tokenizer: &Tokenizer) -> Option<String> {
    let calls = value_in(message, "tool_calls").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let calls = calls.iter().map(|call| call.get("function").unwrap_or(call)).chain(value_in(message, "function_call"));
    let mut calls = calls.filter(|call| call.is_object()).peekable();
    calls.peek()?;
    let spelled = decode_all(ids, tokenizer);
    let start = memmem::find(&spelled, THOUGHT_END).map_or(0, |at| at + THOUGHT_END.len());
    let text = &spelled[start..];
    for call in calls {
        let name = call.get("name").and_then(Value::as_str).unwrap_or_default();
        let arguments = match call.get("arguments") {
            Some(Value::String(text)) => text.as_str().into(),
            Some(value @ (Value::Object(_) | Value::Array(_))) => value.to_string().into(),
            _ => std::borrow::Cow::Borrowed(""),
        };
        if memmem::find(text, name.as_bytes()).is_none() && !is_all_arguments(&arguments, ids, tokenizer) {
            return Some(format!("no name {} of a tool call", excerpt(name.as_bytes())));
        }
        if memmem::find(text, arguments.as_bytes()).is_some() {
            continue;
        }
        if let Some(word) = words(&arguments).find(|word| !contains_word(text, word)) {
            return Some(format!("no {} of the call of {}", excerpt(word.bytes), excerpt(name.as_bytes())));
        }
    }
    None
}

/// Returns true if the ids are exactly the arguments. The name was then specified by the request (`tool_choice`) and
/// not sampled.
fn is_all_arguments(arguments: &str, ids: &[u32], tokenizer: &Tokenizer) -> bool {
    let sampled = serde_json::from_slice::<Value>(&decode_text(ids, tokenizer)).ok();
    sampled.is_some_and(|sampled| serde_json::from_str(arguments).ok() == Some(sampled))
}

/// A part of a JSON text that every notation writes in the same way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Word<'t> {
    bytes: &'t [u8],
}

/// Returns the words of a JSON text: runs of letters and digits in its strings, and its integers. Escaped characters,
/// numbers with a fraction, true, false and null are skipped, because notations write them differently.
fn words(json: &str) -> impl Iterator<Item = Word<'_>> {
    let bytes = json.as_bytes();
    let (mut at, mut quoted) = (0, false);
    std::iter::from_fn(move || {
        while at < bytes.len() {
            match bytes[at] {
                b'"' => (quoted, at) = (!quoted, at + 1),
                b'\\' if quoted => at += if bytes.get(at + 1) == Some(&b'u') { 6 } else { 2 },
                byte if quoted && is_word(byte) => {
                    let plain = byte.is_ascii();
                    let end = end_of(bytes, at, |byte| is_word(byte) && byte.is_ascii() == plain);
                    let word = Word { bytes: &bytes[at..end] };
                    at = end;
                    return Some(word);
                }
                byte if !quoted && byte.is_ascii_digit() => {
                    let end = end_of(bytes, at, |byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
                    let word = Word { bytes: &bytes[at..end] };
                    at = end;
                    if word.bytes.iter().all(u8::is_ascii_digit) {
                        return Some(word);
                    }
                }
                _ => at += 1,
            }
        }
        None
    })
}

fn end_of(bytes: &[u8], start: usize, belongs: impl Fn(u8) -> bool) -> usize {
    bytes[start..].iter().position(|&byte| !belongs(byte)).map_or(bytes.len(), |length| start + length)
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || !byte.is_ascii()
}

/// Returns true if a text contains a word, either directly or with `\u` escapes for characters outside ASCII.
fn contains_word(text: &[u8], word: &Word<'_>) -> bool {
    if memmem::find(text, word.bytes).is_some() {
        return true;
    }
    let shown = std::str::from_utf8(word.bytes).unwrap_or_default();
    if shown.is_ascii() || shown.contains('\u{FFFD}') {
        return !shown.is_ascii();
    }
    let escaped = shown.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect::<Vec<_>>().concat();
    memmem::find(&text.to_ascii_lowercase(), escaped.as_bytes()).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(json: &str) -> Vec<String> {
        words(json).map(|word| String::from_utf8_lossy(word.bytes).into_owned()).collect()
    }

    #[test]
    fn words_are_what_every_notation_spells() {
        assert_eq!(listed(r#"{"city": "New York", "n": 12}"#), ["city", "New", "York", "n", "12"]);
        assert_eq!(listed(r#"{"a": "x\ny \u00e9t", "b": true, "c": null}"#), ["a", "x", "y", "t", "b", "c"]);
        assert_eq!(listed(r#"{"a": 1.50, "b": -3, "c": 1e5}"#), ["a", "b", "3", "c"]);
        assert_eq!(listed(r#"{"a": "café 7"}"#), ["a", "caf", "é", "7"]);
        assert_eq!(listed("not json 7"), ["7"]);
    }

    #[test]
    fn a_word_is_held_raw_or_escaped() {
        let word = Word { bytes: "é".as_bytes() };
        assert!(
            contains_word("café".as_bytes(), &word)
                && contains_word(br#""caf\u00E9""#, &word)
                && !contains_word(b"cafe", &word)
        );
        assert!(!contains_word(b"Paris", &Word { bytes: b"Rome" }));
    }
}
