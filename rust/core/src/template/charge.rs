//! Charges a render's budget for what an operation reads before it runs: one wrapper around every filter, test and function.
//!
//! How much there is, and when the clock is looked at, is left to `limits`. The same wrapper has `watch` look at the
//! arguments. Called by `environment`, `filters`,
//! `operators` and `methods`.

use super::generator::Generator;
use super::integers::big;
use super::limits::{NESTING, NODES, Range, largest, work};
use super::watch;
use minijinja::functions::Function;
use minijinja::value::{ArgType, DynObject, FunctionArgs, FunctionResult, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use std::fmt::Write;

/// Bytes that an operation reads in the time of one unit of work, at its slowest.
const BYTES_PER_UNIT: usize = 4;
/// Bytes that are compared in that time.
const COMPARED_PER_UNIT: usize = 64;
/// Units that an item of a container costs.
const UNITS_PER_ITEM: usize = 4;

/// How far an operation looks into its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reads {
    /// At the strings among them.
    Strings,
    /// At all of them as texts, which the engine makes of what is none.
    Texts,
    /// At the items of the first, with the others for each of them, and at those once as texts.
    Items,
    /// At what lies inside of them, and at no string there.
    Shape,
    /// At all that lies inside of them.
    All,
    /// At all that lies inside of the first, as often as sorting it does.
    Sorted,
}

/// All arguments of a call as the engine has them, keywords too.
pub(super) struct Arguments<'a>(pub &'a [Value]);

impl<'a> ArgType<'a> for Arguments<'_> {
    type Output = Arguments<'a>;

    fn from_value(value: Option<&'a Value>) -> Result<Arguments<'a>, Error> {
        Ok(Arguments(value.map_or(&[], std::slice::from_ref)))
    }

    fn from_state_and_values(
        _: Option<&'a State>,
        values: &'a [Value],
        from: usize,
    ) -> Result<(Arguments<'a>, usize), Error> {
        Self::from_state_and_values_mut(None, values, from)
    }

    fn from_state_and_values_mut(
        _: Option<&State>,
        values: &'a [Value],
        from: usize,
    ) -> Result<(Arguments<'a>, usize), Error> {
        let values = values.get(from..).unwrap_or_default();
        Ok((Arguments(values), values.len()))
    }
}

/// What a template can call: every filter, test and function of an environment is added here, and pays.
pub(super) struct Paid<'a>(pub &'a mut Environment<'static>);

impl Paid<'_> {
    pub fn filter<F, Rv, Args>(&mut self, name: &'static str, reads: Reads, filter: F)
    where
        F: Function<Rv, Args>,
        Rv: FunctionResult,
        Args: for<'a> FunctionArgs<'a>,
    {
        self.0.add_filter(name, paid(name, reads, Value::from_function(filter)));
    }

    /// A filter that takes its arguments as they are.
    pub fn direct<F>(&mut self, name: &'static str, reads: Reads, filter: F)
    where
        F: Fn(&mut State, &[Value]) -> Result<Value, Error> + Send + Sync + 'static,
    {
        let tells = watch::tells(name);
        self.0.add_filter(name, move |state: &mut State, arguments: Arguments<'_>| {
            charge(arguments.0, reads)?;
            watch::look(arguments.0, tells);
            filter(state, arguments.0)
        });
    }

    pub fn test<F, Rv, Args>(&mut self, name: &'static str, reads: Reads, test: F)
    where
        F: Function<Rv, Args>,
        Rv: FunctionResult,
        Args: for<'a> FunctionArgs<'a>,
    {
        self.0.add_test(name, paid(name, reads, Value::from_function(test)));
    }

    /// A test that looks at what its value is, and at nothing in it.
    pub fn kind<F>(&mut self, name: &'static str, test: F)
    where
        F: Fn(&Value) -> bool + Send + Sync + 'static,
    {
        self.0.add_test(name, test);
    }

    pub fn function<F, Rv, Args>(&mut self, name: &'static str, reads: Reads, function: F)
    where
        F: Function<Rv, Args>,
        Rv: FunctionResult,
        Args: for<'a> FunctionArgs<'a>,
    {
        self.0.add_function(name, paid(name, reads, Value::from_function(function)));
    }
}

fn paid(
    name: &str,
    reads: Reads,
    inner: Value,
) -> impl Fn(&mut State, Arguments<'_>) -> Result<Value, Error> + Send + Sync + use<> {
    let tells = watch::tells(name);
    move |state: &mut State, arguments: Arguments<'_>| {
        charge(arguments.0, reads)?;
        watch::look(arguments.0, tells);
        inner.call(state, arguments.0)
    }
}

/// Takes what an operation that `reads` so far reads of its arguments off the budget.
pub(super) fn charge(arguments: &[Value], reads: Reads) -> Result<(), Error> {
    let Some((first, others)) = arguments.split_first() else { return work(1) };
    let strings: usize = others.iter().map(strings).sum();
    let units = match reads {
        Reads::Strings => 1,
        Reads::Texts => 1 + texts(arguments)? / BYTES_PER_UNIT,
        Reads::Items => {
            let each = UNITS_PER_ITEM + strings / BYTES_PER_UNIT;
            items(first).saturating_mul(each).saturating_add(texts(others)? / BYTES_PER_UNIT)
        }
        Reads::Shape => arguments.iter().map(|argument| seen(argument, usize::MAX)).sum::<Result<usize, Error>>()?,
        Reads::All => {
            let seen = arguments.iter().map(|argument| seen(argument, BYTES_PER_UNIT));
            return work(seen.sum::<Result<usize, Error>>()?);
        }
        Reads::Sorted => {
            let times = usize::BITS - items(first).leading_zeros();
            let each = UNITS_PER_ITEM + strings / BYTES_PER_UNIT;
            seen(first, COMPARED_PER_UNIT)?
                .saturating_mul(times as usize)
                .saturating_add(items(first).saturating_mul(each))
                .saturating_add(texts(others)? / BYTES_PER_UNIT)
        }
    };
    work(units.saturating_add((first.as_str().map_or(0, str::len) + strings) / BYTES_PER_UNIT))
}

/// As [`charge`], for the strings of a method's value and arguments.
pub(super) fn charge_method(value: &Value, arguments: &[Value]) -> Result<(), Error> {
    let read: usize = strings(value) + arguments.iter().map(strings).sum::<usize>();
    work(2 + read / BYTES_PER_UNIT)
}

/// Bytes of the texts that the engine may make of what is no string, if they are not too many: a name of an attribute
/// or a test may be anything.
fn texts(arguments: &[Value]) -> Result<usize, Error> {
    let texts = arguments.iter().filter(|argument| argument.as_object().is_some()).map(text_bytes);
    let bytes = texts.sum::<Result<usize, Error>>()?;
    if bytes > largest() { Err(ErrorKind::WriteFailure.into()) } else { Ok(bytes) }
}

/// Bytes of a string, or of the strings among keyword arguments.
fn strings(value: &Value) -> usize {
    if let Some(text) = value.as_str() {
        return text.len();
    }
    if !value.is_kwargs() {
        return 0;
    }
    let pairs = value.as_object().and_then(DynObject::try_iter_pairs).into_iter().flatten();
    pairs.map(|(key, value)| key.as_str().map_or(0, str::len) + value.as_str().map_or(0, str::len)).sum()
}

/// Items that an operation may take from `value`.
pub(super) fn items(value: &Value) -> usize {
    match value.downcast_object_ref::<Generator>() {
        Some(generator) => generator.items().len(),
        None if value.kind() == ValueKind::String => value.as_str().map_or(0, str::len),
        None => value.len().unwrap_or(0),
    }
}

/// Takes a walk over everything below `value` off the budget, and refuses what is too large or too deep for one.
pub(super) fn walk(value: &Value) -> Result<(), Error> {
    work(seen(value, usize::MAX)?)
}

/// As [`walk`], for a key, which is hashed with all that lies in it.
pub(super) fn hashed(key: &Value) -> Result<(), Error> {
    work(3 + seen(key, BYTES_PER_UNIT)?)
}

/// As [`walk`], for what is compared on the way.
pub(super) fn compared(value: &Value) -> Result<(), Error> {
    work(seen(value, COMPARED_PER_UNIT)?)
}

/// Units that a walk over everything below `value` takes, if so many bytes of its strings take one.
fn seen(value: &Value, bytes_per_unit: usize) -> Result<usize, Error> {
    if let Some(text) = value.as_str() {
        return Ok(1 + text.len() / bytes_per_unit);
    }
    let (nodes, bytes) = walked(value, false)?;
    Ok(nodes + bytes / bytes_per_unit)
}

/// Bytes of the strings below `value`, if a walk over it is allowed.
pub(super) fn text_bytes(value: &Value) -> Result<usize, Error> {
    let (nodes, bytes) = walked(value, false)?;
    work(nodes)?;
    Ok(bytes.saturating_add(nodes.saturating_mul(8)))
}

/// Allows a value to be kept in a namespace: one that holds a namespace or a loop could come to hold itself, which is
/// never given back, or grow deeper without being walked.
pub(super) fn held(value: &Value) -> Result<(), Error> {
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(());
    }
    let (nodes, _) = walked(value, true)?;
    work(nodes)
}

/// Values below `value`, itself among them, and the bytes of their strings, if a walk over it is allowed.
fn walked(value: &Value, holds: bool) -> Result<(usize, usize), Error> {
    let mut walk = Walk { left: NODES, bytes: 0, holds };
    walk.visit(value, 0)?;
    Ok((NODES - walk.left, walk.bytes))
}

struct Walk {
    /// Values that may still be seen.
    left: usize,
    bytes: usize,
    /// Whether namespaces and loops are refused.
    holds: bool,
}

impl Walk {
    fn visit(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let too_large = || Error::from(ErrorKind::WriteFailure);
        self.left = self.left.checked_sub(1).ok_or_else(too_large)?;
        if let Some(text) = value.as_str() {
            self.bytes = self.bytes.saturating_add(text.len());
            return Ok(());
        }
        let Some(object) = value.as_object() else { return Ok(()) };
        if self.holds && is_engines(object) {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "a namespace cannot keep a namespace or a loop, or what holds one",
            ));
        }
        if let Some(generator) = value.downcast_object_ref::<Generator>() {
            return deeper(depth)
                .and_then(|depth| generator.items().iter().try_for_each(|item| self.visit(item, depth)));
        }
        if let Some(integer) = big(value) {
            self.bytes = self.bytes.saturating_add(integer.len());
            return Ok(());
        }
        if value.kind() == ValueKind::Plain || value.downcast_object_ref::<Range>().is_some() {
            return Ok(());
        }
        let depth = deeper(depth)?;
        let keyed = value.kind() == ValueKind::Map;
        for (key, item) in object.try_iter_pairs().into_iter().flatten() {
            match key.as_str() {
                Some(text) => self.bytes = self.bytes.saturating_add(text.len()),
                None if keyed => self.visit(&key, depth)?,
                None => {}
            }
            self.visit(&item, depth)?;
        }
        Ok(())
    }
}

fn deeper(depth: usize) -> Result<usize, Error> {
    if depth == NESTING { Err(ErrorKind::WriteFailure.into()) } else { Ok(depth + 1) }
}

/// What the engine's namespaces and loops begin with when they are written.
const ENGINES: [&str; 2] = ["Namespace", "Loop"];

/// Whether an object is a namespace or a loop of the engine, which has no other way to tell.
fn is_engines(object: &DynObject) -> bool {
    let mut start = Start(String::new());
    let _ = write!(start, "{object:?}");
    ENGINES.iter().any(|name| start.0.starts_with(name))
}

/// The first bytes of what is written, as long as they may be one of [`ENGINES`]: what is a container of long strings is not
/// written any further.
struct Start(String);

impl Write for Start {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.extend(text.chars().take(16));
        if ENGINES.iter().any(|name| name.starts_with(&self.0)) { Ok(()) } else { Err(std::fmt::Error) }
    }
}
