//! Python's methods of str, list and dict that chat templates call.
//!
//! Those the engine's own set lacks or takes less exactly than CPython are here, the others are passed on. Called by
//! the template environment.

use super::limits;
use super::marks::is_space;
use minijinja::value::{Value, ValueKind, from_args};
use minijinja::{Error, State};

/// `value.method(args)`.
pub(super) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if value.kind() == ValueKind::String
        && let Some(result) = of_string(value.as_str().unwrap_or_default(), method, args)
    {
        return result;
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// The filter `trim`.
pub(super) fn trim(value: &Value, chars: Option<&str>) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    strip(&text, chars, true, true).to_owned()
}

/// The filter `replace`.
pub(super) fn replace(value: &Value, old: &str, new: &str, count: Option<usize>) -> Result<String, Error> {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    replaced(&text, old, new, count)
}

/// `str.replace`, if the result has bounds.
fn replaced(text: &str, old: &str, new: &str, count: Option<usize>) -> Result<String, Error> {
    let found = text.matches(old).take(count.unwrap_or(usize::MAX)).count();
    limits::allow(text.len().saturating_add(found.saturating_mul(new.len())))?;
    Ok(count.map_or_else(|| text.replace(old, new), |count| text.replacen(old, new, count)))
}

fn of_string(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let one = |args| from_args::<(Option<&str>,)>(args).map(|(argument,)| argument);
    let result = match method {
        "strip" => one(args).map(|chars| Value::from(strip(text, chars, true, true))),
        "lstrip" => one(args).map(|chars| Value::from(strip(text, chars, true, false))),
        "rstrip" => one(args).map(|chars| Value::from(strip(text, chars, false, true))),
        "removeprefix" => one(args).map(|fix| Value::from(fix.and_then(|f| text.strip_prefix(f)).unwrap_or(text))),
        "removesuffix" => one(args).map(|fix| Value::from(fix.and_then(|f| text.strip_suffix(f)).unwrap_or(text))),
        "replace" => from_args::<(&str, &str, Option<i64>)>(args).and_then(|(old, new, count)| {
            replaced(text, old, new, count.and_then(|count| usize::try_from(count).ok())).map(Value::from)
        }),
        "rsplit" => from_args::<(Option<&str>, Option<i64>)>(args).map(|(by, most)| right_split(text, by, most)),
        "partition" => one(args).map(|by| parts(text, by.and_then(|by| text.split_once(by)), by, true)),
        "rpartition" => one(args).map(|by| parts(text, by.and_then(|by| text.rsplit_once(by)), by, false)),
        _ => return None,
    };
    Some(result)
}

/// `str.strip` and its one-sided forms.
fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let drops = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(drops) } else { text };
    if right { text.trim_end_matches(drops) } else { text }
}

fn right_split(text: &str, by: Option<&str>, most: Option<i64>) -> Value {
    let most = most.and_then(|most| usize::try_from(most).ok()).map_or(usize::MAX, |most| most.saturating_add(1));
    let mut parts: Vec<&str> = match by {
        Some(by) => text.rsplitn(most, by).collect(),
        None => text.split(is_space).filter(|part| !part.is_empty()).rev().collect(),
    };
    parts.reverse();
    Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>())
}

fn parts(text: &str, found: Option<(&str, &str)>, by: Option<&str>, first: bool) -> Value {
    let (before, middle, after) = match (found, first) {
        (Some((before, after)), _) => (before, by.unwrap_or_default(), after),
        (None, true) => (text, "", ""),
        (None, false) => ("", "", text),
    };
    Value::from([before, middle, after].map(Value::from).to_vec())
}
