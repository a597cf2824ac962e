//! The Jinja environment of transformers: its filters, globals, Python methods and limits.
//!
//! One environment holds one compiled template. Errors of the engine become ours here. Called by `Template`.

use super::clock::Clock;
use super::json::{Style, dumps, float_of, float_repr};
use super::marks::is_space;
use super::scan::GENERATION_FILTER;
use super::value::Tagged;
use crate::error::{Error, Kind, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Object, Rest, Value, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error as JinjaError, ErrorKind, Output, State, UndefinedBehavior};
use std::cell::Cell;
use std::fmt;
use std::io::{self, Write};

/// Instructions a render may execute: some hundred thousand messages, and less than a second of looping.
const FUEL: u64 = 20_000_000;
/// Bytes a render may write beside sixteen times its input.
const OUTPUT_BYTES: usize = 64 << 20;
/// Depth of nested macro calls times four: far above real templates, far below a small thread's stack.
const RECURSION: usize = 160;
const NAME: &str = "chat_template";
/// Context variables of our own.
pub(super) const CLOCK: &str = "__clock";
pub(super) const GENERATION_MARKS: &str = "__generation_marks";

thread_local! {
    /// Bytes that expressions may still write in this thread's render.
    static BUDGET: Cell<usize> = const { Cell::new(0) };
}

/// The message a template gave to `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// The time of a render as a template value.
#[derive(Debug)]
pub(super) struct ClockValue(pub Clock);

impl Object for ClockValue {}

/// An environment with `source` compiled in it.
pub(super) fn compile(source: String) -> Result<Environment<'static>> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(|e| failure(&e))?;
    env.set_syntax(syntax);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(RECURSION);
    env.set_formatter(write_value);
    env.set_unknown_method_callback(call_method);
    env.add_filter("tojson", tojson);
    env.add_filter("trim", trim);
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter(GENERATION_FILTER, mark_generation);
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    env.add_template_owned(NAME, source).map_err(|error| failure(&error))?;
    Ok(env)
}

/// Renders the template with `context`; `input_bytes` widens the output limit.
pub(super) fn render(env: &Environment<'static>, context: Value, input_bytes: usize) -> Result<String> {
    let limit = OUTPUT_BYTES.saturating_add(input_bytes.saturating_mul(16));
    BUDGET.set(limit);
    let template = env.get_template(NAME).map_err(|error| failure(&error))?;
    let mut out = Limited { bytes: Vec::with_capacity(4096 + input_bytes + input_bytes / 4), limit };
    template.render_captured_to(context, &mut out).map_err(|error| failure(&error))?;
    String::from_utf8(out.bytes)
        .map_err(|_| Error::new(Kind::Template, "the chat template wrote bytes that are not UTF-8"))
}

struct Limited {
    bytes: Vec<u8>,
    limit: usize,
}

impl Write for Limited {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + data.len() > self.limit {
            return Err(io::Error::other("output limit"));
        }
        self.bytes.extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Our error of the engine's.
fn failure(error: &JinjaError) -> Error {
    let place = error.line().map_or(String::new(), |line| format!(" (line {line})"));
    if let Some(message) = raised(error) {
        return Error::new(Kind::Template, format!("the chat template raised \"{message}\"{place}"))
            .why("The template refuses this conversation, so there is no text to align with")
            .cure("Change the messages as the template asks, or pass a template that takes them");
    }
    match error.kind() {
        ErrorKind::OutOfFuel => {
            Error::new(Kind::Template, format!("the chat template did not end within {FUEL} steps{place}"))
                .why("It loops for ever, or for longer than any conversation needs")
                .cure("Correct the loop in the template")
        }
        ErrorKind::WriteFailure => {
            Error::new(Kind::Template, "the chat template wrote more than sixteen times its input and 64 MiB")
                .why("It repeats itself without end")
                .cure("Correct the loop in the template")
        }
        ErrorKind::SyntaxError | ErrorKind::UnknownFilter | ErrorKind::UnknownTest => {
            Error::new(Kind::Template, format!("the chat template does not compile: {}{place}", detail(error)))
                .why("Only a template that transformers accepts is rendered")
                .cure("Take the chat_template that came with the model")
        }
        _ => Error::new(Kind::Template, format!("the chat template failed: {}{place}", detail(error)))
            .why("It does not expect messages like these")
            .cure("Compare roles, content types and tool calls with what the template reads"),
    }
}

fn detail(error: &JinjaError) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

fn raised(error: &JinjaError) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref::<Raised>() {
            return Some(message.clone());
        }
        source = cause.source();
    }
    None
}

fn raise_exception(message: &Value) -> Result<Value, JinjaError> {
    let message = message.to_string();
    Err(JinjaError::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn strftime_now(state: &State, format: &str) -> Result<String, JinjaError> {
    let clock = state.lookup(CLOCK);
    let clock = clock.as_ref().and_then(|value| value.downcast_object_ref::<ClockValue>());
    let clock = clock.map_or_else(Clock::now, |value| value.0.clone());
    clock.format(format).map_err(|error| JinjaError::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}

fn mark_generation(state: &State, body: &str) -> String {
    match state.lookup(GENERATION_MARKS).as_ref().and_then(Value::as_str) {
        Some(marks) => {
            let (open, close) = marks.split_at(marks.len() / 2);
            format!("{open}{body}{close}")
        }
        None => body.to_owned(),
    }
}

fn tojson(value: &Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<String, JinjaError> {
    let style = Style::from_arguments(&positional, &kwargs)?;
    match value.downcast_object_ref::<Tagged>() {
        Some(tagged) if style == Style::default() => tagged.json(),
        Some(tagged) => Ok(tagged.enclose(&dumps(value, &style)?)),
        None => dumps(value, &style),
    }
}

/// `len`, and 0 for what is undefined, as Jinja has it.
fn length(value: &Value) -> Result<usize, JinjaError> {
    if value.is_undefined() {
        return Ok(0);
    }
    value.len().ok_or_else(|| {
        JinjaError::new(ErrorKind::InvalidOperation, format!("a value of type {} has no length", value.kind()))
    })
}

fn trim(value: &Value, chars: Option<&str>) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    strip(&text, chars, true, true).to_owned()
}

/// `str.strip` and its one-sided forms.
fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let drops = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(drops) } else { text };
    if right { text.trim_end_matches(drops) } else { text }
}

/// What `{{ value }}` writes: Python's `str`.
fn write_value(out: &mut Output, _: &mut State, value: &Value) -> Result<(), JinjaError> {
    if let Some(text) = value.as_str() {
        return write_limited(out, text);
    }
    if let Some(float) = float_of(value) {
        return write_limited(out, &float_repr(float));
    }
    match value.downcast_object_ref::<Tagged>() {
        Some(tagged) => write_limited(out, &tagged.enclose(&value.to_string())),
        None => write_limited(out, &value.to_string()),
    }
}

fn write_limited(out: &mut Output, text: &str) -> Result<(), JinjaError> {
    let left = BUDGET.get().checked_sub(text.len()).ok_or_else(|| JinjaError::from(ErrorKind::WriteFailure))?;
    BUDGET.set(left);
    out.write_str(text).map_err(JinjaError::from)
}

/// Python's methods of str, list and dict that chat templates call.
fn call_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, JinjaError> {
    if value.kind() == ValueKind::String {
        if let Some(result) = string_method(value.as_str().unwrap_or_default(), method, args) {
            return result;
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// Those of str that the engine's own set lacks or takes less exactly.
fn string_method(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, JinjaError>> {
    let one = |args| from_args::<(Option<&str>,)>(args).map(|(argument,)| argument);
    let result = match method {
        "strip" => one(args).map(|chars| Value::from(strip(text, chars, true, true))),
        "lstrip" => one(args).map(|chars| Value::from(strip(text, chars, true, false))),
        "rstrip" => one(args).map(|chars| Value::from(strip(text, chars, false, true))),
        "removeprefix" => one(args).map(|fix| Value::from(fix.and_then(|f| text.strip_prefix(f)).unwrap_or(text))),
        "removesuffix" => one(args).map(|fix| Value::from(fix.and_then(|f| text.strip_suffix(f)).unwrap_or(text))),
        "rsplit" => from_args::<(Option<&str>, Option<i64>)>(args).map(|(by, most)| right_split(text, by, most)),
        "partition" => one(args).map(|by| parts(text, by.and_then(|by| text.split_once(by)), by, true)),
        "rpartition" => one(args).map(|by| parts(text, by.and_then(|by| text.rsplit_once(by)), by, false)),
        _ => return None,
    };
    Some(result)
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
