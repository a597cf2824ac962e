//! Jinja's filters and tests (such as `is string`) for which the engine differs or has no bounds, and Python's slices.
//!
//! The engine's implementation is used wherever both agree.

use super::incremental::messages::Messages;
use super::json::python_str;
use super::limits::{self, ChargedEnvironment, Reads, items as count_items, made, make_items, text_bytes, work};
use super::python_ops::{
    self, add as plus, allow_format, as_integer, joined, like, not_iterable, refused, replaced, strip,
};
use super::value::{Generator, big};
use super::watch;
use minijinja::formatting::FormatStyle;
use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, filters, tests};
use std::borrow::Cow;

pub(super) fn add(paid: &mut ChargedEnvironment<'_>) {
    add_lazy(paid);
    add_counted(paid);
    for (name, inner) in [("int", Value::from_function(filters::int)), ("float", Value::from_function(filters::float))]
    {
        paid.direct(name, Reads::Strings, move |state, args| number(state, name, &inner, args));
    }
    for name in ["length", "count"] {
        paid.direct(name, Reads::Strings, |_, values| from_args(values).and_then(length).map(Value::from));
    }
    for name in ["default", "d"] {
        paid.filter(name, Reads::Strings, filters::default);
    }
    for name in ["escape", "e"] {
        paid.filter(name, Reads::Strings, python_ops::escape);
    }
    let escape = |value: &Value| python_ops::escape(&Value::from(python_str(value)?.into_owned()));
    paid.filter("forceescape", Reads::Strings, escape);
    let safe = |value: &Value| python_str(value).map(|text| Value::from_safe_string(text.into_owned())).and_then(made);
    paid.filter("safe", Reads::Strings, safe);
    paid.filter("string", Reads::Strings, string);
    paid.direct("trim", Reads::Strings, |_, values| from_args(values).and_then(trim));
    paid.filter("replace", Reads::Texts, replace);
    paid.filter("abs", Reads::Texts, filters::abs);
    paid.filter("round", Reads::Texts, filters::round);
    paid.filter("attr", Reads::Strings, python_ops::item);
    paid.filter("first", Reads::Strings, filters::first);
    paid.filter("last", Reads::Items, filters::last);
    paid.filter("list", Reads::Items, list);
    paid.filter("join", Reads::Items, join);
    paid.filter("sum", Reads::Items, sum);
    paid.filter("min", Reads::Sorted, filters::min);
    paid.filter("max", Reads::Sorted, filters::max);
    paid.filter("pprint", Reads::All, pprint);
    let inner = Value::from_function(filters::reverse);
    paid.direct("reverse", Reads::Items, move |state, args| reverse(state, &inner, args));
    let inner = Value::from_function(filters::indent);
    paid.direct("indent", Reads::Texts, move |state, args| indent(state, &inner, args));
    let inner = Value::from_function(filters::format);
    paid.direct("format", Reads::Texts, move |state, args| format(state, &inner, args));
}

/// Adds filters that return a generator in Python.
fn add_lazy(paid: &mut ChargedEnvironment<'_>) {
    for (name, reads, inner) in [
        ("map", Reads::Items, Value::from_function(filters::map)),
        ("select", Reads::Items, Value::from_function(filters::select)),
        ("reject", Reads::Items, Value::from_function(filters::reject)),
        ("selectattr", Reads::Items, Value::from_function(filters::selectattr)),
        ("rejectattr", Reads::Items, Value::from_function(filters::rejectattr)),
        ("unique", Reads::Sorted, Value::from_function(filters::unique)),
        // Values that are deeper afterwards are walked, so that nothing becomes deeper than allowed.
        ("batch", Reads::Shape, Value::from_function(filters::batch)),
        ("slice", Reads::Shape, Value::from_function(filters::slice)),
        ("items", Reads::Shape, Value::from_function(filters::items)),
    ] {
        paid.direct(name, reads, move |state, args| lazy(state, name, &inner, args));
    }
}

/// Adds filters whose result is counted and otherwise unchanged.
fn add_counted(paid: &mut ChargedEnvironment<'_>) {
    for (name, reads, inner) in [
        ("upper", Reads::Texts, Value::from_function(filters::upper)),
        ("lower", Reads::Texts, Value::from_function(filters::lower)),
        ("title", Reads::Texts, Value::from_function(filters::title)),
        ("capitalize", Reads::Texts, Value::from_function(filters::capitalize)),
        ("sort", Reads::Sorted, Value::from_function(filters::sort)),
        ("dictsort", Reads::Sorted, Value::from_function(filters::dictsort)),
        ("groupby", Reads::Sorted, Value::from_function(filters::groupby)),
    ] {
        paid.direct(name, reads, move |state, args| {
            if reads == Reads::Sorted && args.first().is_none_or(Value::is_none) {
                return Err(not_iterable());
            }
            inner.call(state, args).and_then(made)
        });
    }
}

/// Implements `int` and `float`: a value that is not a number becomes the default.
fn number(state: &mut State, name: &str, inner: &Value, args: &[Value]) -> Result<Value, Error> {
    let (positional, kwargs): (&[Value], Kwargs) = from_args(args)?;
    if positional.first().is_none_or(Value::is_undefined) {
        return Err(Error::new(ErrorKind::UndefinedError, format!("{name} of what is undefined")));
    }
    let zero = if name == "int" { Value::from(0) } else { Value::from(0.0) };
    let default = positional.get(1).cloned().or(kwargs.get("default")?).unwrap_or(zero);
    // For other kinds Python raises and Jinja returns the default. The engine's error would contain the text of the
    // whole value.
    let is_read =
        matches!(positional[0].kind(), ValueKind::Number | ValueKind::Bool | ValueKind::String | ValueKind::Bytes);
    Ok(if is_read { inner.call(state, args).unwrap_or(default) } else { default })
}

fn lazy(state: &mut State, name: &str, inner: &Value, args: &[Value]) -> Result<Value, Error> {
    let Some(value) = args.first() else { return inner.call(state, args) };
    if value.is_none() {
        // For none, Jinja's `map` and selections return nothing; the other filters raise an error.
        return match name {
            "map" | "select" | "reject" | "selectattr" | "rejectattr" => Ok(Generator::value(Vec::new())),
            _ => Err(not_iterable()),
        };
    }
    // A string has as many items as characters. Batches are filled up to a number that the template specifies.
    let width = args.get(1).filter(|_| matches!(name, "batch" | "slice")).and_then(Value::as_usize);
    let count = value.as_str().map_or_else(|| value.len().unwrap_or(0), |text| text.chars().count());
    make_items(count.saturating_add(width.unwrap_or(0)))?;
    let items: Vec<Value> = inner.call(state, args)?.try_iter()?.collect();
    Ok(Generator::value(items))
}

fn trim((value, chars): (&Value, Option<&str>)) -> Result<Value, Error> {
    let text = python_str(value)?;
    let strip_text = |text: &str| Value::from(strip(text, chars, true, true));
    let result = made(strip_text(&text))?;
    watch::repeat(&[value], &result, |plain| Ok(strip_text(&python_str(&plain[0])?)))?;
    Ok(result)
}

fn replace(value: &Value, old: &str, new: &str, count: Option<usize>) -> Result<Value, Error> {
    let replace = |operands: &[&Value]| {
        let [text, old, new] = [python_str(operands[0])?, python_str(operands[1])?, python_str(operands[2])?];
        replaced(&text, &old, &new, count).map(Value::from)
    };
    let (old, new) = (Value::from(old), Value::from(new));
    let operands = [value, &old, &new];
    let result = replace(&operands)?;
    watch::repeat(&operands, &result, |plain| replace(&plain.iter().collect::<Vec<_>>()))?;
    Ok(result)
}

/// Implements `len`. An undefined value has length 0, as in Jinja.
fn length((value,): (&Value,)) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    let has_length = value.downcast_object_ref::<Generator>().is_none();
    value.len().filter(|_| has_length).ok_or_else(|| {
        Error::new(ErrorKind::InvalidOperation, format!("a value of type {} has no length", value.kind()))
    })
}

fn reverse(state: &mut State, inner: &Value, args: &[Value]) -> Result<Value, Error> {
    if args.first().is_none_or(Value::is_none) {
        return Err(not_iterable());
    }
    let reversed = inner.call(state, args).and_then(made)?;
    if reversed.kind() == ValueKind::String {
        return Ok(reversed);
    }
    Ok(Generator::value(reversed.try_iter()?.collect()))
}

fn list(value: &Value) -> Result<Value, Error> {
    if value.is_none() {
        return Err(not_iterable());
    }
    make_items(value.as_str().map_or_else(|| value.len().unwrap_or(0), |text| text.chars().count()))?;
    if value.is_undefined() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    Ok(Value::from(value.try_iter()?.collect::<Vec<Value>>()))
}

/// Returns the items of `value`, or an attribute of each item.
fn items(state: &mut State, value: &Value, attribute: Option<Value>) -> Result<Vec<Value>, Error> {
    let attribute = attribute.filter(|attribute| !attribute.is_none());
    let items = list(value)?;
    let items = match attribute {
        Some(attribute) => {
            let named = Value::from(Kwargs::from_iter([("attribute", attribute)]));
            state.apply_filter("map", &[items, named])?
        }
        None => items,
    };
    Ok(items.try_iter()?.collect())
}

#[expect(clippy::needless_pass_by_value, reason = "the engine hands arguments over by value")]
fn join(
    state: &mut State,
    value: &Value,
    between: Option<Value>,
    attribute: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let between = between.or(kwargs.get("d")?);
    let attribute = attribute.or(kwargs.get("attribute")?);
    kwargs.assert_all_used()?;
    let items = items(state, value, attribute)?;
    let texts = python_ops::texts_of(&items)?;
    let texts: Vec<&str> = texts.iter().map(AsRef::as_ref).collect();
    let between = between.as_ref().map_or(Ok(Cow::Borrowed("")), python_str)?;
    joined(&texts, &between)
}

#[expect(clippy::needless_pass_by_value, reason = "the engine hands arguments over by value")]
fn sum(
    state: &mut State,
    value: &Value,
    attribute: Option<Value>,
    start: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let attribute = attribute.or(kwargs.get("attribute")?);
    let start = start.or(kwargs.get("start")?).unwrap_or_else(|| Value::from(0));
    kwargs.assert_all_used()?;
    if start.kind() == ValueKind::String {
        return Err(Error::new(ErrorKind::InvalidOperation, "sum does not take strings"));
    }
    let items = items(state, value, attribute)?;
    items.into_iter().try_fold(start, |sum, item| plus(&[sum, item]))
}

fn string(value: &Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::String {
        return Ok(value.clone());
    }
    made(Value::from(python_str(value)?.into_owned()))
}

fn indent(state: &mut State, inner: &Value, args: &[Value]) -> Result<Value, Error> {
    let (positional, kwargs): (&[Value], Kwargs) = from_args(args)?;
    let width = positional.get(1).cloned().or(kwargs.get("width")?);
    let width = width.map_or(4, |width| width.as_usize().or(width.as_str().map(str::len)).unwrap_or(0));
    let text = positional.first().and_then(Value::as_str);
    let text = text.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "indent takes a string"))?;
    let lines = text.matches('\n').count() + 1;
    limits::make(text.len().saturating_add(lines.saturating_mul(width)))?;
    inner.call(state, args)
}

fn format(state: &mut State, inner: &Value, args: &[Value]) -> Result<Value, Error> {
    let pattern = args.first().and_then(Value::as_str).unwrap_or_default().to_owned();
    allow_format(FormatStyle::Printf, &pattern, args.get(1..).unwrap_or_default())?;
    inner.call(state, args)
}

/// Implements `pprint` as the engine does, if the text is not too long. Each value may be on its own line.
fn pprint(value: &Value) -> Result<String, Error> {
    limits::make(text_bytes(value)?.saturating_mul(8))?;
    Ok(filters::pprint(value))
}

pub(super) fn add_tests(paid: &mut ChargedEnvironment<'_>) {
    add_kinds(paid);
    add_comparisons(paid);
    paid.test("odd", Reads::Strings, |value: &Value| python_ops::has_remainder(value, &Value::from(2), 1));
    paid.test("even", Reads::Strings, |value: &Value| python_ops::has_remainder(value, &Value::from(2), 0));
    paid.test("divisibleby", Reads::Strings, |value: &Value, by: &Value| python_ops::has_remainder(value, by, 0));
    paid.test("iterable", Reads::Strings, iterable);
    paid.test("lower", Reads::Texts, tests::is_lower);
    paid.test("upper", Reads::Texts, tests::is_upper);
    paid.test("filter", Reads::Strings, tests::is_filter);
    paid.test("test", Reads::Strings, tests::is_test);
}

fn add_kinds(paid: &mut ChargedEnvironment<'_>) {
    paid.kind("undefined", tests::is_undefined);
    paid.kind("defined", tests::is_defined);
    paid.kind("none", tests::is_none);
    paid.kind("escaped", tests::is_safe);
    paid.kind("boolean", tests::is_boolean);
    paid.kind("number", |value: &Value| tests::is_number(value) || big(value).is_some());
    paid.kind("integer", |value: &Value| tests::is_integer(value) || big(value).is_some());
    paid.kind("float", tests::is_float);
    paid.kind("string", tests::is_string);
    paid.kind("mapping", tests::is_mapping);
    paid.kind("true", tests::is_true);
    paid.kind("false", tests::is_false);
    // Values with a length and items, including strings and dicts.
    paid.kind("sequence", |value: &Value| match value.kind() {
        ValueKind::String | ValueKind::Seq | ValueKind::Map => true,
        ValueKind::Iterable => value.downcast_object_ref::<Generator>().is_none() && value.len().is_some(),
        _ => false,
    });
}

/// Returns true if a loop can iterate over the value. The engine collects the items to check this.
fn iterable(value: &Value) -> Result<bool, Error> {
    if value.kind() == ValueKind::String {
        return Ok(true);
    }
    work(count_items(value))?;
    Ok(!value.is_none() && value.try_iter().is_ok())
}

fn add_comparisons(paid: &mut ChargedEnvironment<'_>) {
    paid.test("in", Reads::Strings, |value: &Value, container: &Value| python_ops::contains(value, container));
    paid.test("sameas", Reads::All, tests::is_sameas);
    for name in ["==", "eq", "equalto"] {
        paid.test(name, Reads::Strings, |value: &Value, other: &Value| python_ops::equal(value, other));
    }
    for name in ["!=", "ne"] {
        paid.test(name, Reads::Strings, |value: &Value, other: &Value| {
            python_ops::equal(value, other).map(|same| !same)
        });
    }
    let names = [("<", "lt", "lessthan"), (">", "gt", "greaterthan"), ("<=", "le", "<="), (">=", "ge", ">=")];
    for (operator, short, long) in names {
        for name in [operator, short, long] {
            paid.test(name, Reads::Strings, move |value: &Value, other: &Value| {
                python_ops::compare(&[value.clone(), Value::from(operator), other.clone()])
            });
        }
    }
}

/// Implements `value[start:stop:step]`.
pub(super) fn slice((value, start, stop, step): (&Value, &Value, &Value, &Value)) -> Result<Value, Error> {
    let bound = |value: &Value| -> Result<Option<i128>, Error> {
        if value.is_none() {
            return Ok(None);
        }
        as_integer(value).map(Some).ok_or_else(|| refused("a slice", value, value))
    };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "slice step cannot be zero"));
    }
    if let (Some(start), None, 1) = (start.unwrap_or(0).try_into().ok(), stop, step)
        && let Some(messages) = Messages::from(value, start)
    {
        return Ok(messages);
    }
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            limits::make(text.len())?;
            let part = cut_text(text, start, stop, step);
            Ok(if value.is_safe() { Value::from_safe_string(part) } else { Value::from(part) })
        }
        ValueKind::Seq => {
            let length = value.len().unwrap_or(0);
            make_items(length)?;
            let picked = Positions::new(length, start, stop, step);
            let items = picked.filter_map(|at| value.get_item_by_index(at).ok()).collect();
            Ok(like(value, items))
        }
        ValueKind::Iterable if value.len().is_some() => {
            let items: Vec<Value> = value.try_iter()?.collect();
            make_items(items.len())?;
            Ok(Value::from(
                Positions::new(items.len(), start, stop, step).map(|at| items[at].clone()).collect::<Vec<_>>(),
            ))
        }
        ValueKind::Undefined => Err(Error::new(ErrorKind::UndefinedError, "of what is undefined there are no slices")),
        // Jinja looks for an attribute of that name and finds none.
        _ => Ok(Value::UNDEFINED),
    }
}

fn cut_text(text: &str, start: Option<i128>, stop: Option<i128>, step: i128) -> String {
    let ascii = text.is_ascii();
    let count = if ascii { text.len() } else { text.chars().count() };
    let mut positions = Positions::new(count, start, stop, step);
    if step == 1 {
        let (Some(first), Ok(last)) = (positions.next(), usize::try_from(positions.stop)) else { return String::new() };
        let byte = |at: usize| {
            if ascii { at } else { text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte) }
        };
        return text[byte(first)..byte(last)].to_owned();
    }
    let chars: Vec<char> = text.chars().collect();
    positions.map(|at| chars[at]).collect()
}

/// The positions of a Python slice.
struct Positions {
    at: i128,
    stop: i128,
    step: i128,
}

impl Positions {
    fn new(count: usize, start: Option<i128>, stop: Option<i128>, step: i128) -> Self {
        let count = count as i128;
        let (low, high) = if step > 0 { (0, count) } else { (-1, count - 1) };
        let clamped = |bound: i128| (if bound < 0 { bound.saturating_add(count) } else { bound }).clamp(low, high);
        let (first, last) = if step > 0 { (low, high) } else { (high, low) };
        Self { at: start.map_or(first, clamped), stop: stop.map_or(last, clamped), step }
    }
}

impl Iterator for Positions {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let inside = if self.step > 0 { self.at < self.stop } else { self.at > self.stop };
        let at = inside.then(|| usize::try_from(self.at).ok()).flatten()?;
        self.at = self.at.saturating_add(self.step);
        Some(at)
    }
}
