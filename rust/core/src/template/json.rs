//! `tojson` as in transformers: Python's `json.dumps` for template values.
//!
//! Separators, indentation, escapes and floats are written as CPython writes them.

use super::limits::{self, text_bytes};
use super::value::{Tagged, big, fields};
use minijinja::value::{DynObject, Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::borrow::Cow;
use std::fmt::Write;

/// The options of `json.dumps` that transformers exposes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Style {
    pub ensure_ascii: bool,
    pub indent: Option<String>,
    pub item_separator: Cow<'static, str>,
    pub key_separator: Cow<'static, str>,
    pub sort_keys: bool,
}

impl Default for Style {
    fn default() -> Self {
        Self {
            ensure_ascii: false,
            indent: None,
            item_separator: ", ".into(),
            key_separator: ": ".into(),
            sort_keys: false,
        }
    }
}

impl Style {
    /// Reads `(ensure_ascii, indent, separators, sort_keys)`, positional or by name.
    pub fn from_arguments(positional: &[Value], kwargs: &Kwargs) -> Result<Self, Error> {
        let argument = |index: usize, name: &str| -> Result<Option<Value>, Error> {
            let named: Option<Value> = kwargs.get(name)?;
            Ok(positional.get(index).cloned().or(named).filter(|value| !value.is_none() && !value.is_undefined()))
        };
        let mut style = Self::default();
        if let Some(value) = argument(0, "ensure_ascii")? {
            style.ensure_ascii = value.is_true();
        }
        if let Some(value) = argument(1, "indent")? {
            style.indent = Some(match value.as_str() {
                Some(text) => text.to_owned(),
                None => " ".repeat(usize::try_from(value.as_i64().unwrap_or(0).clamp(0, 64)).unwrap_or(0)),
            });
            style.item_separator = ",".into();
        }
        if let Some(value) = argument(2, "separators")? {
            let parts: Vec<Value> = value.try_iter()?.collect();
            let [item, key] = parts.as_slice() else {
                return Err(Error::new(ErrorKind::InvalidOperation, "separators must be a pair (item, key)"));
            };
            style.item_separator = python_str(item)?.into_owned().into();
            style.key_separator = python_str(key)?.into_owned().into();
        }
        if let Some(value) = argument(3, "sort_keys")? {
            style.sort_keys = value.is_true();
        }
        kwargs.assert_all_used()?;
        Ok(style)
    }
}

/// Returns `json.dumps(value)` in `style`.
pub(super) fn dumps(value: &Value, style: &Style) -> Result<String, Error> {
    let mut out = String::with_capacity(128);
    write_value(&mut out, value, style, 0)?;
    limits::make(out.len())?;
    Ok(out)
}

/// Python's own limit is about a thousand calls.
const DEPTH: usize = 256;

/// Returns an error if the text is too long or the value is nested too deeply.
fn allow(out: &str, depth: usize) -> Result<(), Error> {
    if out.len() > limits::largest() || depth > DEPTH { Err(ErrorKind::WriteFailure.into()) } else { Ok(()) }
}

fn write_value(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    allow(out, depth)?;
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value),
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq => {
            let items: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
            write_container(out, style, depth, '[', &items, |out, item| write_value(out, item, style, depth + 1))?;
        }
        ValueKind::Map => {
            let mut pairs = pairs(value);
            if style.sort_keys {
                pairs.to_mut().sort_by(|a, b| a.0.cmp(&b.0));
            }
            write_container(out, style, depth, '{', &pairs, |out, (key, item)| {
                write_key(out, key, style)?;
                out.push_str(&style.key_separator);
                write_value(out, item, style, depth + 1)
            })?;
        }
        _ if big(value).is_some() => out.push_str(&value.to_string()),
        other => return Err(not_serializable(other)),
    }
    Ok(())
}

/// Returns keys and values of a map, in its order.
fn pairs(map: &Value) -> Cow<'_, [(Value, Value)]> {
    fields(map).map_or_else(
        || Cow::Owned(map.as_object().and_then(DynObject::try_iter_pairs).into_iter().flatten().collect()),
        Cow::Borrowed,
    )
}

fn write_container<T>(
    out: &mut String,
    style: &Style,
    depth: usize,
    open: char,
    items: &[T],
    mut write_item: impl FnMut(&mut String, &T) -> Result<(), Error>,
) -> Result<(), Error> {
    out.push(open);
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push_str(&style.item_separator);
        }
        new_line(out, style, depth + 1)?;
        write_item(out, item)?;
    }
    if !items.is_empty() {
        new_line(out, style, depth)?;
    }
    out.push(if open == '[' { ']' } else { '}' });
    Ok(())
}

#[inline]
fn new_line(out: &mut String, style: &Style, depth: usize) -> Result<(), Error> {
    if let Some(indent) = &style.indent {
        if depth * indent.len() > limits::largest() {
            return Err(ErrorKind::WriteFailure.into());
        }
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
    Ok(())
}

fn write_key(out: &mut String, key: &Value, style: &Style) -> Result<(), Error> {
    match key.kind() {
        ValueKind::String => write_string(out, key.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            out.push('"');
            write_value(out, key, style, 0)?;
            out.push('"');
        }
        other => return Err(not_serializable(other)),
    }
    Ok(())
}

fn not_serializable(kind: ValueKind) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: a value of type {kind} has no JSON form"))
}

fn write_number(out: &mut String, value: &Value) {
    match float_of(value) {
        Some(float) if float.is_nan() => out.push_str("NaN"),
        Some(float) if float.is_infinite() => out.push_str(if float > 0.0 { "Infinity" } else { "-Infinity" }),
        Some(float) => out.push_str(&float_repr(float)),
        None => out.push_str(&value.to_string()),
    }
}

/// Returns the float value, or `None` for integers and everything else.
pub(super) fn float_of(value: &Value) -> Option<f64> {
    (value.kind() == ValueKind::Number && !value.is_integer()).then(|| f64::try_from(value.clone()).ok()).flatten()
}

/// Writes a float like `float.__repr__`: shortest digits that round-trip, exponents outside 1e-4 to 1e16.
pub(super) fn float_repr(float: f64) -> String {
    if float.is_nan() {
        return "nan".to_owned();
    }
    let text = format!("{float:?}");
    let Some((mantissa, exponent)) = text.split_once('e') else { return text };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let mantissa = mantissa.strip_suffix(".0").unwrap_or(mantissa);
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

/// Returns the result of Python's `str`.
pub(super) fn python_str(value: &Value) -> Result<Cow<'_, str>, Error> {
    if let Some(text) = value.as_str() {
        return Ok(Cow::Borrowed(text));
    }
    let mut out = String::new();
    if !value.is_undefined() {
        write_repr(&mut out, value, 0)?;
    }
    Ok(Cow::Owned(out))
}

/// Returns the result of Python's `repr`.
pub(super) fn python_repr(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_repr(&mut out, value, 0)?;
    Ok(out)
}

fn write_repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    allow(out, depth)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::Number => match float_of(value) {
            Some(float) => out.push_str(&float_repr(float)),
            None => out.push_str(&value.to_string()),
        },
        ValueKind::Map => {
            out.push('{');
            for (index, (key, item)) in pairs(value).iter().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                write_repr(out, key, depth + 1)?;
                out.push_str(": ");
                write_repr(out, item, depth + 1)?;
            }
            out.push('}');
        }
        ValueKind::Seq => {
            let (open, close) = match (value.is_tuple(), value.len()) {
                (true, Some(1)) => ('(', ",)"),
                (true, _) => ('(', ")"),
                (false, _) => ('[', "]"),
            };
            out.push(open);
            for (index, item) in value.try_iter()?.enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                write_repr(out, &item, depth + 1)?;
            }
            out.push_str(close);
        }
        ValueKind::String => {
            let text = Value::from(vec![value.clone()]).to_string();
            out.push_str(text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(&text));
        }
        _ => {
            // The engine prints containers without checking their size.
            if text_bytes(value)? > limits::largest() {
                return Err(ErrorKind::WriteFailure.into());
            }
            out.push_str(&value.to_string());
        }
    }
    Ok(())
}

fn write_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.reserve(text.len() + 2);
    out.push('"');
    let mut start = 0;
    for (at, c) in text.char_indices() {
        let plain = match c {
            '"' | '\\' => false,
            _ => c >= ' ' && (!ensure_ascii || c <= '~'),
        };
        if plain {
            continue;
        }
        out.push_str(&text[start..at]);
        start = at + c.len_utf8();
        write_escape(out, c);
    }
    out.push_str(&text[start..]);
    out.push('"');
}

fn write_escape(out: &mut String, c: char) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\u{8}' => out.push_str("\\b"),
        '\u{c}' => out.push_str("\\f"),
        _ => {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
}

impl Tagged {
    /// Returns the default `tojson` of the container, enclosed in marks.
    pub fn json(&self) -> Result<Value, Error> {
        if let Some(json) = self.json.get() {
            return Ok(json.clone());
        }
        let json = Value::from(self.enclose(&dumps(&self.inner, &Style::default())?));
        Ok(self.json.get_or_init(|| json).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() {
        limits::open();
        limits::start(limits::Size { messages: 1, bytes: 0 });
    }

    #[test]
    fn floats_are_written_as_cpython_writes_them() {
        // python3 -c "print([1.0, 1e16, 1e15, 1e-4, 1e-5, 1.5e300, -0.0, 0.1, 123456789012345680.0])"
        let expected =
            "1.0 1e+16 1000000000000000.0 0.0001 1e-05 1.5e+300 -0.0 0.1 1.2345678901234568e+17 inf -inf nan";
        let floats = [1.0, 1e16, 1e15, 1e-4, 1e-5, 1.5e300, -0.0, 0.1, 123_456_789_012_345_680.0];
        let others = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
        let written: Vec<String> = floats.into_iter().chain(others).map(float_repr).collect();
        assert_eq!(written.join(" "), expected);
    }

    #[test]
    fn a_printed_list_has_pythons_floats() {
        start();
        // python3 -c "print({'a': [1, 2.5, None, True, 1e-07, 1e20], 'b': \"x\\n'\"})"
        let list = vec![1.into(), 2.5.into(), Value::from(()), true.into(), 1e-7.into(), 1e20.into()];
        let value = Value::from_pairs([("a", Value::from(list)), ("b", Value::from("x\n'"))]);
        assert_eq!(python_str(&value).unwrap(), r#"{'a': [1, 2.5, None, True, 1e-07, 1e+20], 'b': "x\n'"}"#);
    }

    #[test]
    fn escapes_and_indentation_follow_json_dumps() {
        start();
        let text = Value::from("é\u{1}\"\\\n\u{7f}😊");
        assert_eq!(dumps(&text, &Style::default()).unwrap(), "\"é\\u0001\\\"\\\\\\n\u{7f}😊\"");
        let ascii = Style { ensure_ascii: true, ..Style::default() };
        assert_eq!(dumps(&text, &ascii).unwrap(), r#""\u00e9\u0001\"\\\n\u007f\ud83d\ude0a""#);
        let map = Value::from_pairs([("a", Value::from(vec![1, 2])), ("b", Value::from(Vec::<i32>::new()))]);
        let style = Style { indent: Some("  ".into()), item_separator: ",".into(), ..Style::default() };
        assert_eq!(dumps(&map, &style).unwrap(), "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": []\n}");
    }
}
