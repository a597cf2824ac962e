//! Python's methods of str, list and dict that chat templates call.
//!
//! Those the engine's own set lacks or takes less exactly than CPython are here, the others are passed on. Called by
//! the template environment.

use super::charge::{Reads, charge, charge_method, compared, hashed, held, text_bytes};
use super::limits;
use super::marks::is_space;
use super::operators::{bounded_format, joined};
use super::watch::{self, Tells};
use minijinja::formatting::FormatStyle;
use minijinja::value::{Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};

/// `value.method(args)`.
pub(super) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    pay(value, method, args)?;
    let result = call_uncounted(state, value, method, args).and_then(limits::made)?;
    if watch::is_on() {
        look(state, value, method, args, &result)?;
    }
    Ok(result)
}

/// Has what a method made of strings with marks compared with what it makes of those without.
fn look(state: &mut State, value: &Value, method: &str, args: &[Value], result: &Value) -> Result<(), Error> {
    if value.kind() != ValueKind::String {
        let keeps = matches!(method, "get" | "items" | "keys" | "values");
        watch::look(args, if keeps { Tells::Strings } else { Tells::All });
        if !keeps {
            watch::look(std::slice::from_ref(value), Tells::All);
        }
        return Ok(());
    }
    // Texts are put together, whatever they are.
    if method == "join" && args.iter().all(|items| items.kind() != ValueKind::String) {
        return Ok(());
    }
    let all: Vec<&Value> = std::iter::once(value).chain(args).collect();
    watch::repeat(&all, result, |all| match all.split_first() {
        Some((value, args)) => call_uncounted(state, value, method, args),
        None => Err(Error::from(ErrorKind::MissingArgument)),
    })
}

/// Takes what a method reads off the budget.
fn pay(value: &Value, method: &str, args: &[Value]) -> Result<(), Error> {
    charge_method(value, args)?;
    match (method, args) {
        // Each character is looked for among the others.
        ("strip" | "lstrip" | "rstrip", [chars, ..]) => {
            limits::work(value.as_str().map_or(0, str::len).saturating_mul(chars.as_str().map_or(0, str::len)) / 64)
        }
        // One string is compared once.
        ("startswith" | "endswith", [affix, ..]) if affix.as_str().is_some() => Ok(()),
        ("startswith" | "endswith" | "join", _) => charge(args, Reads::Items),
        ("count", [what, ..]) if value.kind() != ValueKind::String => {
            limits::work(text_bytes(value)?.saturating_add(text_bytes(what)?))
        }
        ("format", _) => charge(args, Reads::All),
        ("get", [key, ..]) => hashed(key),
        _ => Ok(()),
    }
}

/// `value.cycle(args)` and `value.changed(args)`, which the engine answers for its loops without asking [`call`].
pub(super) fn of_loop(state: &mut State, args: &[Value]) -> Result<Value, Error> {
    let [value, method, args @ ..] = args else { return Err(Error::from(ErrorKind::MissingArgument)) };
    let method = method.as_str().unwrap_or_default();
    if method == "cycle" && args.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "loop.cycle has no items to choose from"));
    }
    args.iter().try_for_each(|argument| held(argument).and_then(|()| compared(argument)))?;
    if method == "changed" {
        watch::look(args, Tells::All);
    }
    value.call_method(state, method, args)
}

fn call_uncounted(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if value.kind() == ValueKind::String
        && let Some(result) = of_string(value.as_str().unwrap_or_default(), method, args)
    {
        return result;
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// `str.replace`, if the result has bounds.
pub(super) fn replaced(text: &str, old: &str, new: &str, count: Option<usize>) -> Result<String, Error> {
    let found = text.matches(old).take(count.unwrap_or(usize::MAX)).count();
    limits::make(text.len().saturating_add(found.saturating_mul(new.len())))?;
    Ok(count.map_or_else(|| text.replace(old, new), |count| text.replacen(old, new, count)))
}

fn of_string(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    if method.contains("split")
        && let Err(error) = limits::make_items(text.len() / 8)
    {
        return Some(Err(error));
    }
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
        "join" => from_args::<(&Value,)>(args).and_then(|(items,)| join(items, text)),
        "format" => bounded_format(FormatStyle::StrFormat, text, args).map(Value::from),
        "zfill" | "ljust" | "rjust" => return Some(filled(text, method, args)),
        "splitlines" => from_args::<(Option<bool>,)>(args).map(|(keep,)| lines(text, keep.unwrap_or(false))),
        "rsplit" => from_args::<(Option<&str>, Option<i64>)>(args).map(|(by, most)| right_split(text, by, most)),
        "partition" => one(args).map(|by| parts(text, by.and_then(|by| text.split_once(by)), by, true)),
        "rpartition" => one(args).map(|by| parts(text, by.and_then(|by| text.rsplit_once(by)), by, false)),
        _ => return None,
    };
    Some(result)
}

/// `str.zfill`, `str.ljust` and `str.rjust`.
fn filled(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (i64, Option<&str>) = from_args(args)?;
    let fill = if method == "zfill" { "0" } else { fill.unwrap_or(" ") };
    let missing = usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count());
    limits::make(text.len().saturating_add(missing.saturating_mul(fill.len())))?;
    let more = fill.repeat(missing);
    let sign = text.len() - text.strip_prefix(['-', '+']).unwrap_or(text).len();
    Ok(Value::from(match method {
        "ljust" => format!("{text}{more}"),
        "rjust" => format!("{more}{text}"),
        _ => format!("{}{more}{}", &text[..sign], &text[sign..]),
    }))
}

/// `str.splitlines`, at all of Python's line ends.
fn lines(text: &str, keep: bool) -> Value {
    let ends = |c: char| matches!(c, '\n'..='\r' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut all = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        let end =
            at + if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(1, char::len_utf8) };
        all.push(Value::from(&rest[..if keep { end } else { at }]));
        rest = &rest[end..];
    }
    if !rest.is_empty() {
        all.push(Value::from(rest));
    }
    Value::from(all)
}

/// `text.join(items)`: of strings alone.
fn join(items: &Value, text: &str) -> Result<Value, Error> {
    let items: Vec<Value> = items.try_iter()?.collect();
    let texts: Option<Vec<&str>> = items.iter().map(Value::as_str).collect();
    let texts = texts.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "str.join takes strings"))?;
    joined(&texts, text)
}

/// `str.strip` and its one-sided forms.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
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
    Value::from(Tuple::from([before, middle, after].map(Value::from)))
}
