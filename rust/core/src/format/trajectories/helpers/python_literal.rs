//! Parses Python literals as JSON values: the `repr` of lists, dicts, strings and numbers in a span's attribute.
//!
//! Nothing is evaluated. Names, calls and operators are rejected.

use crate::json_number;
use serde_json::{Map, Number, Value};

/// Largest nesting depth that is parsed.
const DEEPEST: usize = 64;

/// Parses a JSON value or a Python literal.
pub fn parse(text: &str) -> Option<Value> {
    json_number::parse(text).ok().or_else(|| python(text))
}

fn python(text: &str) -> Option<Value> {
    let mut reader = Reader { text, at: 0 };
    let value = reader.value(0)?;
    reader.blanks();
    (reader.at == text.len()).then_some(value)
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn blanks(&mut self) {
        while self.peek().is_some_and(|byte| byte.is_ascii_whitespace()) {
            self.at += 1;
        }
    }

    /// Steps over blanks and, if it is next, over the byte `wanted`. Returns whether it was.
    fn take(&mut self, wanted: u8) -> bool {
        self.blanks();
        let is_next = self.peek() == Some(wanted);
        self.at += usize::from(is_next);
        is_next
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEEPEST {
            return None;
        }
        self.blanks();
        match self.peek()? {
            b'[' => self.list(b']', depth),
            b'(' => self.list(b')', depth),
            b'{' => self.dict(depth),
            b'\'' | b'"' => self.string().map(Value::String),
            _ => self.word(),
        }
    }

    fn list(&mut self, end: u8, depth: usize) -> Option<Value> {
        self.at += 1;
        let mut items = Vec::new();
        while !self.take(end) {
            if !items.is_empty() {
                self.take(b',').then_some(())?;
                if self.take(end) {
                    break;
                }
            }
            items.push(self.value(depth + 1)?);
        }
        Some(Value::Array(items))
    }

    fn dict(&mut self, depth: usize) -> Option<Value> {
        self.at += 1;
        let mut fields = Map::new();
        while !self.take(b'}') {
            if !fields.is_empty() {
                self.take(b',').then_some(())?;
                if self.take(b'}') {
                    break;
                }
            }
            let key = match self.value(depth + 1)? {
                Value::String(key) => key,
                Value::Number(key) => key.to_string(),
                _ => return None,
            };
            self.take(b':').then_some(())?;
            fields.insert(key, self.value(depth + 1)?);
        }
        Some(Value::Object(fields))
    }

    fn string(&mut self) -> Option<String> {
        let quote = self.peek()?;
        self.at += 1;
        let mut found = String::new();
        loop {
            let rest = &self.text.as_bytes()[self.at..];
            let step = memchr::memchr2(quote, b'\\', rest)?;
            found.push_str(self.text.get(self.at..self.at + step)?);
            self.at += step + 1;
            if rest[step] == quote {
                return Some(found);
            }
            self.escape(&mut found)?;
        }
    }

    fn escape(&mut self, found: &mut String) -> Option<()> {
        let kind = self.peek()?;
        self.at += 1;
        found.push(match kind {
            b'n' => '\n',
            b't' => '\t',
            b'r' => '\r',
            b'\\' | b'\'' | b'"' => char::from(kind),
            b'x' => self.code(2)?,
            b'u' => self.code(4)?,
            b'U' => self.code(8)?,
            _ => return None,
        });
        Some(())
    }

    /// Returns the character with this code, which has `digits` hexadecimal digits.
    fn code(&mut self, digits: usize) -> Option<char> {
        let code = self.text.get(self.at..self.at + digits)?;
        self.at += digits;
        char::from_u32(u32::from_str_radix(code, 16).ok()?)
    }

    fn word(&mut self) -> Option<Value> {
        let rest = &self.text[self.at..];
        let end = rest.find(|letter: char| !(letter.is_ascii_alphanumeric() || "+-._".contains(letter)));
        let word = &rest[..end.unwrap_or(rest.len())];
        self.at += word.len();
        match word {
            "None" => return Some(Value::Null),
            "True" => return Some(true.into()),
            "False" => return Some(false.into()),
            "nan" | "inf" | "-inf" => return Some(word.into()),
            _ => {}
        }
        if !word.starts_with(|letter: char| letter.is_ascii_digit() || letter == '-') {
            return None;
        }
        if let Some(number) = json_number::number(word) {
            return Some(number);
        }
        word.parse().ok().and_then(Number::from_f64).map(Value::Number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn reprs_of_plain_values_are_read() {
        let text =
            r#"[{'token_ids': [1, -2, 3], "stop": None, 'ok': True, 'x': (1.5, 2e-3,), 'it\'s': "a\n\xe9\u20ac"}]"#;
        let wanted = json!([{"token_ids": [1, -2, 3], "stop": null, "ok": true, "x": [1.5, 0.002], "it's": "a\né€"}]);
        assert_eq!(parse(text), Some(wanted));
        assert_eq!(parse("[1, 2]"), Some(json!([1, 2])));
        assert_eq!(parse("[]"), Some(json!([])));
    }

    #[test]
    fn what_is_no_literal_is_nothing() {
        for text in [
            "",
            "[1",
            "[1 2]",
            "Choice(token_ids=[1])",
            "__import__('os')",
            "{'a'}",
            "'a",
            "'\\x4'",
            "[1]]",
            "{[1]: 2}",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        assert_eq!(parse(&"[".repeat(100_000)), None);
    }
}
