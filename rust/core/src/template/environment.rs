//! The Jinja environment of transformers: its filters, globals, Python methods, `strftime_now` and limits.
//!
//! Each environment contains one compiled template. Errors of the engine are converted to this crate's errors here. A
//! render reads the time once, so that its passes agree.

use super::incremental::messages;
use super::json::{Style, dumps, python_str};
use super::limits::{self, ChargedEnvironment, Reads, Size, held};
use super::preprocess::GENERATION_FILTER;
use super::value::Tagged;
use super::watch::{self, DetectableMarks};
use super::{filters, python_ops};
use crate::error::{Error, Kind, Result};
use jiff::Zoned;
use jiff::civil::DateTime;
use jiff::fmt::strtime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Object, Value, from_args};
use minijinja::{AutoEscape, Environment, Error as JinjaError, ErrorKind, Output, State, UndefinedBehavior, functions};
use std::fmt;

const NAME: &str = "chat_template";
/// Maximum number of output bytes per byte of a time format: a field of three bytes may be padded to 255.
const STRFTIME_BYTES: usize = 128;
/// Context variables that this crate adds.
pub(super) const CLOCK: &str = "__clock";
pub(super) const GENERATION_MARKS: &str = "__generation_marks";

/// The message that a template passed to `raise_exception`.
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

/// Compiles `source` in a new environment. `longest_text` is the length of its longest literal text.
pub(super) fn compile(source: String, longest_text: usize) -> Result<Environment<'static>> {
    let mut env = Environment::empty();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(|e| failure(&e))?;
    env.set_syntax(syntax);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_fuel(Some(limits::fuel(longest_text)));
    env.set_recursion_limit(limits::RECURSION);
    env.set_formatter(write_value);
    env.set_unknown_method_callback(python_ops::call);
    let mut paid = ChargedEnvironment(&mut env);
    filters::add(&mut paid);
    filters::add_tests(&mut paid);
    add_operators(&mut paid);
    paid.direct("tojson", Reads::Strings, |_, values| tojson(values));
    paid.filter(GENERATION_FILTER, Reads::Strings, mark_generation);
    paid.function("range", Reads::Strings, limits::range);
    paid.function("dict", Reads::All, functions::dict);
    paid.function("namespace", Reads::All, functions::namespace);
    paid.function("raise_exception", Reads::Strings, raise_exception);
    paid.function("strftime_now", Reads::Strings, strftime_now);
    paid.function("__load", Reads::Strings, no_loader);
    paid.direct("__turns", Reads::Strings, |state, values| {
        from_args(values).and_then(|(items, number)| messages::turns(state, items, number))
    });
    paid.function("__begins", Reads::Strings, |state: &State| messages::begins(state));
    paid.function("__restores", Reads::Strings, messages::restores);
    paid.function("__has", Reads::Strings, messages::has);
    paid.function("__kept", Reads::Strings, messages::kept);
    paid.function("__ended", Reads::Strings, |state: &State| messages::ended(state));
    env.add_template_owned(NAME, source).map_err(|error| failure(&error))?;
    Ok(env)
}

/// Adds the filters that `rewrite` inserts. They count their own output.
fn add_operators(paid: &mut ChargedEnvironment<'_>) {
    paid.direct("__add", Reads::Strings, |_, values| python_ops::add(values));
    paid.direct("__concat", Reads::Strings, |_, values| python_ops::concat(values));
    paid.filter("__multiply", Reads::Strings, python_ops::multiply);
    paid.filter("__modulo", Reads::Strings, python_ops::modulo);
    paid.direct("__in", Reads::Strings, |_, values| {
        from_args(values).and_then(|(item, container)| python_ops::contains(item, container)).map(Value::from)
    });
    paid.direct("__compare", Reads::Strings, |_, values| python_ops::compare(values).map(Value::from));
    paid.filter("__each", Reads::Strings, python_ops::each);
    paid.direct("__slice", Reads::Strings, |_, values| from_args(values).and_then(filters::slice));
    paid.filter("__sized", Reads::Strings, python_ops::sized);
    paid.direct("__item", Reads::Strings, |_, values| {
        from_args(values).and_then(|(value, key)| python_ops::item(value, key))
    });
    paid.filter("__key", Reads::All, |key: Value| key);
    paid.filter("__mapping", Reads::All, |value: Value| value);
    paid.filter("__splat", Reads::Strings, python_ops::splat);
    paid.direct("__held", Reads::Strings, |_, values| {
        from_args::<(&Value,)>(values).and_then(|(value,)| held(value).map(|()| value.clone()))
    });
    paid.direct("__loop", Reads::Strings, python_ops::of_loop);
}

pub(super) fn render(env: &Environment<'static>, context: Value, size: Size) -> Result<String> {
    let wider = limits::widened(env, size);
    let template = wider.as_ref().unwrap_or(env).get_template(NAME).map_err(|error| failure(&error))?;
    messages::forget();
    limits::start(size);
    template.render(context).map_err(|error| failure(&error))
}

/// The text of a run, and the fuel and bytes it had left.
#[derive(Debug)]
pub(super) struct RecordedRun {
    pub text: messages::Text,
    pub fuel_left: u64,
    pub bytes_left: usize,
}

/// Renders like [`render`], for a run that `messages` records.
pub(super) fn render_noted(env: &Environment<'static>, context: Value, size: Size) -> Result<RecordedRun> {
    let wider = limits::widened(env, size);
    let template = wider.as_ref().unwrap_or(env).get_template(NAME).map_err(|error| failure(&error))?;
    limits::start(size);
    let mut text = messages::Text::default();
    let captured = template.render_captured_to(context, &mut text).map_err(|error| failure(&error))?;
    let fuel_left = captured.state().fuel_levels().map_or(u64::MAX, |(_, left)| left);
    drop(captured);
    Ok(RecordedRun { text, fuel_left, bytes_left: limits::left_bytes() })
}

/// Converts an error of the engine to this crate's error.
pub(super) fn failure(error: &JinjaError) -> Error {
    let place = error.line().map_or(String::new(), |line| format!(" (line {line})"));
    if let Some(message) = raised(error) {
        return Error::new(Kind::Template, "TG-TEMPLATE-003", format!("the chat template raised \"{message}\"{place}"))
            .why("The template refuses this conversation, so no text can be aligned")
            .fix("Change the messages as the template asks, or pass a template that takes them");
    }
    match error.kind() {
        ErrorKind::OutOfFuel => endless(&format!("the chat template does not end{place}")),
        ErrorKind::InvalidOperation if error.detail() == Some("recursion limit exceeded") => {
            endless(&format!("the chat template calls its macros too deeply{place}"))
        }
        ErrorKind::WriteFailure => {
            endless("the chat template made more text than its bounds allow: 4 MiB in one value, 48 MiB in all")
        }
        ErrorKind::SyntaxError => Error::new(
            Kind::Template,
            "TG-TEMPLATE-004",
            format!("the chat template does not compile: {}{place}", detail(error)),
        )
        .why("Only a template that transformers accepts is rendered")
        .fix("Take the chat_template that came with the model"),
        _ => {
            Error::new(Kind::Template, "TG-TEMPLATE-005", format!("the chat template failed: {}{place}", detail(error)))
                .why("It does not expect messages like these")
                .fix("Compare roles, content types and tool calls with what the template reads")
        }
    }
}

fn endless(what: &str) -> Error {
    Error::new(Kind::Template, "TG-TEMPLATE-006", what)
        .why("It took more steps, time or text than any conversation needs")
        .fix("Correct the loop in the template")
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
    let message = python_str(message)?.into_owned();
    Err(JinjaError::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn no_loader() -> Result<Value, JinjaError> {
    Err(JinjaError::new(ErrorKind::TemplateNotFound, "a chat template stands alone, and no other can be loaded"))
}

fn strftime_now(state: &State, format: &str) -> Result<String, JinjaError> {
    limits::make(format.len().saturating_mul(STRFTIME_BYTES))?;
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

fn tojson(values: &[Value]) -> Result<Value, JinjaError> {
    let (value, more) = values.split_first().ok_or_else(|| JinjaError::from(ErrorKind::MissingArgument))?;
    let tagged = value.downcast_object_ref::<Tagged>();
    let style = if more.is_empty() {
        Style::default()
    } else {
        let (positional, kwargs): (&[Value], Kwargs) = from_args(more)?;
        Style::from_arguments(positional, &kwargs)?
    };
    if style.ensure_ascii {
        watch::look(std::slice::from_ref(value), DetectableMarks::All);
    }
    match tagged {
        Some(tagged) if style == Style::default() => tagged.json(),
        Some(tagged) => Ok(Value::from(tagged.enclose(&dumps(value, &style)?))),
        None => dumps(value, &style).map(Value::from),
    }
}

/// Writes `{{ value }}`, which is Python's `str` of the value.
fn write_value(out: &mut Output, _: &mut State, value: &Value) -> Result<(), JinjaError> {
    if let Some(text) = value.as_str() {
        return write_limited(out, text);
    }
    let text = python_str(value)?;
    match value.downcast_object_ref::<Tagged>() {
        Some(tagged) => write_limited(out, &tagged.enclose(&text)),
        None => write_limited(out, &text),
    }
}

fn write_limited(out: &mut Output, text: &str) -> Result<(), JinjaError> {
    limits::spend(text.len())?;
    out.write_str(text).map_err(JinjaError::from)
}

/// The time at which a render happens.
#[derive(Debug, Clone)]
pub(super) enum Clock {
    Local(Box<Zoned>),
    Pinned(DateTime),
}

impl Clock {
    /// Returns the local time.
    pub fn now() -> Self {
        Self::Local(Box::new(Zoned::now()))
    }

    /// Parses a date, or a date and time, in ISO form.
    pub fn pinned(text: &str) -> Option<Self> {
        text.parse().ok().map(Self::Pinned)
    }

    /// Formats the time as `datetime.strftime` does.
    pub fn format(&self, format: &str) -> Result<String, String> {
        match self {
            Self::Local(zoned) => strtime::format(format, &**zoned),
            Self::Pinned(moment) => strtime::format(format, *moment),
        }
        .map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use limits::paid_by;

    /// Tests that check the kind of a value and read nothing inside it.
    const KINDS: &str =
        "boolean defined escaped false float integer mapping none number sequence string true undefined";
    /// Methods of Python's str, list, dict and tuple.
    const METHODS: &str = "append capitalize casefold center clear copy count decode encode endswith expandtabs extend find \
        format format_map fromkeys get index insert isalnum isalpha isascii isdecimal isdigit isidentifier islower \
        isnumeric isprintable isspace istitle isupper items join keys ljust lower lstrip maketrans partition pop popitem \
        remove removeprefix removesuffix replace reverse rfind rindex rjust rpartition rsplit rstrip setdefault sort split \
        splitlines startswith strip swapcase title translate update upper values zfill";
    const BYTES: usize = 1 << 13;

    /// Returns the names under a heading of the engine's debug output of an environment.
    fn registered(env: &Environment<'_>, heading: &str) -> Vec<String> {
        let listing = format!("{env:?}");
        let (_, names) = listing.split_once(&format!("{heading}: [")).expect("the engine lists its names");
        let names = names.split_once(']').expect("the list ends").0;
        names.split(", ").map(|name| name.trim_matches('"').to_owned()).collect()
    }

    #[test]
    fn all_that_a_template_can_call_pays_for_the_bytes_that_it_is_given() {
        let env = compile(String::new(), 0).unwrap();
        let filters = registered(&env, "filters");
        let tests = registered(&env, "tests");
        let functions: Vec<(&str, Value)> = env.globals().collect();
        assert!(filters.len() > 50 && tests.len() > 30 && functions.len() > 5, "{filters:?} {tests:?} {functions:?}");
        let mut state = env.empty_state();
        let long = Value::from("9".repeat(BYTES));
        for arguments in [vec![long.clone()], vec![long.clone(), long.clone()], vec![Value::from(1), long.clone()]] {
            let expected = arguments.iter().filter_map(Value::as_str).map(str::len).sum::<usize>() / 64;
            let mut pays = |name: &str, call: &mut dyn FnMut(&mut State)| {
                limits::open();
                limits::start(Size { messages: 1, bytes: BYTES });
                let paid = paid_by(|| call(&mut state));
                assert!(paid >= expected, "{name} pays {paid} for {expected}");
            };
            for name in &filters {
                pays(name, &mut |state| drop(state.apply_filter(name, &arguments)));
            }
            for name in tests.iter().filter(|name| KINDS.split(' ').all(|kind| kind != *name)) {
                pays(name, &mut |state| drop(state.perform_test(name, &arguments)));
            }
            for (name, function) in &functions {
                pays(name, &mut |state| drop(function.call(state, &arguments)));
            }
            for name in METHODS.split_whitespace() {
                pays(name, &mut |state| drop(arguments[0].call_method(state, name, &arguments[1..])));
            }
        }
    }
}

#[cfg(test)]
mod clock_tests {
    use super::*;

    #[test]
    fn a_pinned_clock_prints_what_strftime_prints() {
        // python3 -c "import datetime as d; print(d.datetime(2025, 3, 7, 14, 5).strftime('%d %b %Y|%Y-%m-%d|%A, %B %d|%H:%M:%S|%-d %j'))"
        let clock = Clock::pinned("2025-03-07T14:05:00").unwrap();
        let got = clock.format("%d %b %Y|%Y-%m-%d|%A, %B %d|%H:%M:%S|%-d %j").unwrap();
        assert_eq!(got, "07 Mar 2025|2025-03-07|Friday, March 07|14:05:00|7 066");
        assert!(Clock::pinned("2025-03-07").is_some());
        assert!(Clock::pinned("yesterday").is_none());
    }
}
