//! JSON numbers that keep their digits, as Python's `json` reads them: integers of any size, and floats beyond the
//! largest.
//!
//! `serde_json` represents 64-bit integers and finite floats. Every other number becomes an object with one reserved
//! key, whose value is the number as Python writes it.

use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::borrow::Cow;

/// The reserved key. Keys in real JSON do not start with NUL.
const KEY: &str = "\u{0}number";
/// Python rejects longer integers.
const DIGITS: usize = 4300;
/// Integers with fewer digits always fit 64 bits.
const LONG: usize = 19;
const INFINITY: &str = "Infinity";
const NEGATIVE_INFINITY: &str = "-Infinity";

/// Returns the value that Python reads for the text of a number, or `None` if `json` rejects it.
pub fn number(token: &str) -> Option<Value> {
    match python_notation(token) {
        Some(Cow::Borrowed(other)) => Some(held(other)),
        Some(Cow::Owned(zero)) => serde_json::from_str(&zero).ok(),
        None => serde_json::from_str(token).ok(),
    }
}

/// Returns the digits of an integer beyond 64 bits, or `Infinity` or `-Infinity`, if the value is such a number.
pub fn digits_of(value: &Value) -> Option<&str> {
    let Value::Object(map) = value else { return None };
    text_in(map)
}

/// As [`digits_of`], for the fields of an object.
pub fn text_in(map: &Map<String, Value>) -> Option<&str> {
    if map.len() != 1 {
        return None;
    }
    let text = map.get(KEY)?.as_str()?;
    let digits = text.strip_prefix('-').unwrap_or(text);
    let is_long = (LONG..=DIGITS).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
    (is_long && !digits.starts_with('0') || digits == INFINITY).then_some(text)
}

/// Replaces kept numbers by the nearest float. Other values are unchanged.
pub fn rounded(value: &Value) -> Value {
    match value {
        Value::Array(items) => items.iter().map(rounded).collect(),
        Value::Object(map) => match text_in(map) {
            Some(text) => Value::from(text.parse::<f64>().unwrap_or(f64::NAN)),
            None => Value::Object(map.iter().map(|(key, value)| (key.clone(), rounded(value))).collect()),
        },
        other => other.clone(),
    }
}

/// Parses JSON text. Every number has the value that Python reads.
///
/// # Errors
/// As for `serde_json::from_str`.
pub fn parse(text: &str) -> serde_json::Result<Value> {
    let parsed = serde_json::from_str(text);
    if parsed.as_ref().is_ok_and(|value| !is_doubtful(value)) {
        return parsed;
    }
    match replace_big_numbers(text) {
        Cow::Borrowed(_) => parsed,
        Cow::Owned(replaced) => serde_json::from_str(&replaced).or(parsed),
    }
}

/// Replaces every number that `serde_json` cannot represent by the object that stores its digits.
pub fn replace_big_numbers(text: &str) -> Cow<'_, str> {
    let bytes = text.as_bytes();
    let (mut out, mut copied_end, mut at) = (String::new(), 0, 0);
    while at < bytes.len() {
        match bytes[at] {
            b'"' => at = string_end(bytes, at),
            b'-' | b'0'..=b'9' => {
                let is_part = |byte: &u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
                let end = at + bytes[at..].iter().take_while(|byte| is_part(byte)).count();
                if let Some(other) = python_notation(&text[at..end]) {
                    out.push_str(&text[copied_end..at]);
                    match other {
                        Cow::Borrowed(other) => out.push_str(&held(other).to_string()),
                        Cow::Owned(zero) => out.push_str(&zero),
                    }
                    copied_end = end;
                }
                at = end;
            }
            _ => at += 1,
        }
    }
    if copied_end == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(&text[copied_end..]);
    Cow::Owned(out)
}

/// Returns the index after the string that starts at `at`, or the end of the text.
fn string_end(bytes: &[u8], mut at: usize) -> usize {
    at += 1;
    while let Some(step) = memchr::memchr2(b'"', b'\\', bytes.get(at..).unwrap_or_default()) {
        at += step;
        if bytes[at] == b'"' {
            return at + 1;
        }
        at += 2;
    }
    bytes.len()
}

/// Returns Python's notation of a number that `serde_json` reads differently. An owned result is one that `serde_json`
/// can represent.
fn python_notation(token: &str) -> Option<Cow<'_, str>> {
    if token == "-0" {
        return Some(Cow::Owned("0".to_owned()));
    }
    let digits = token.strip_prefix('-').unwrap_or(token);
    if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        let is_long = (LONG..=DIGITS).contains(&digits.len()) && !digits.starts_with('0');
        let fits = || token.parse::<i64>().is_ok() || token.parse::<u64>().is_ok();
        return (is_long && !fits()).then_some(Cow::Borrowed(token));
    }
    let infinite = token.parse::<f64>().is_ok_and(f64::is_infinite);
    let is_number = infinite && serde_json::from_str::<&RawValue>(token).is_ok();
    is_number.then_some(Cow::Borrowed(if token.starts_with('-') { NEGATIVE_INFINITY } else { INFINITY }))
}

fn held(text: &str) -> Value {
    Value::Object(Map::from_iter([(KEY.to_owned(), Value::from(text))]))
}

/// Returns whether a value contains a float that may be the text of an integer.
fn is_doubtful(value: &Value) -> bool {
    match value {
        Value::Number(number) => {
            number.is_f64() && number.as_f64().is_some_and(|float| float.abs() >= 9e18 || float == 0.0)
        }
        Value::Array(items) => items.iter().any(is_doubtful),
        Value::Object(map) => map.values().any(is_doubtful),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_are_what_pythons_json_reads() {
        // python3 -c "import json; print([json.loads(x) for x in (...)])"
        for same in ["0", "-1", "18446744073709551615", "-9223372036854775808", "1.5", "1e5", "-0.0", "1e-400"] {
            assert_eq!(number(same).unwrap(), serde_json::from_str::<Value>(same).unwrap(), "{same}");
            assert_eq!(replace_big_numbers(same), same);
        }
        assert_eq!(number("-0").unwrap(), json!(0));
        for long in ["18446744073709551616", "-9223372036854775809", "90071992547409931234567"] {
            assert_eq!(digits_of(&number(long).unwrap()), Some(long));
            assert_eq!(digits_of(&parse(&format!("[{long}]")).unwrap()[0]), Some(long));
        }
        assert_eq!(digits_of(&number("1e400").unwrap()), Some("Infinity"));
        assert_eq!(digits_of(&parse("{\"a\": -1e400}").unwrap()["a"]), Some("-Infinity"));
        let longest = "9".repeat(DIGITS);
        assert_eq!(digits_of(&number(&longest).unwrap()), Some(&*longest));
        assert_eq!(number(&"9".repeat(DIGITS + 1)), None);
    }

    #[test]
    fn only_numbers_outside_strings_are_kept_and_what_is_no_json_stays_none() {
        let long = "18446744073709551616";
        let inside = format!(r#"{{"a\"{long}": "{long}\\", "b": [{long}, -0, "-0"]}}"#);
        let value = parse(&inside).unwrap();
        assert_eq!(value[format!("a\"{long}")], json!(format!("{long}\\")));
        assert_eq!((digits_of(&value["b"][0]), &value["b"][1], &value["b"][2]), (Some(long), &json!(0), &json!("-0")));
        for broken in ["1.e400", "01844674407370955161600", "--18446744073709551616", "[1e400", "+1e400", "\"a"] {
            assert!(parse(broken).is_err(), "{broken}");
        }
    }

    #[test]
    fn an_object_that_only_looks_like_a_number_is_an_object() {
        for other in
            [json!({KEY: "12"}), json!({KEY: "x"}), json!({KEY: 1}), json!({KEY: "18446744073709551616", "b": 1})]
        {
            assert_eq!(digits_of(&other), None);
        }
        assert_eq!(rounded(&json!([number("18446744073709551616").unwrap()])), json!([18_446_744_073_709_551_616.0]));
    }
}
