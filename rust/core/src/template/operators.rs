//! Python's operators over template values, with a bound on what they make.
//!
//! What raises in Python is an error here. `rewrite` puts these in the place of the engine's own; called through
//! `environment` as filters.

use super::charge::{self, hashed, walk};
use super::json::{float_of, python_repr, python_str};
use super::limits::{self, work};
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::borrow::Cow;

/// An error for what Python's operators do not take.
pub(super) fn refused(operator: &str, left: &Value, right: &Value) -> Error {
    let kinds = format!("{operator} does not take {} and {}", left.kind(), right.kind());
    Error::new(ErrorKind::InvalidOperation, kinds)
}

/// `a + b + c`.
pub(super) fn add(values: &[Value]) -> Result<Value, Error> {
    // Strings that are no markup.
    let texts = values.iter().map(|value| value.as_str().filter(|_| !value.is_safe()));
    if let Some(texts) = texts.collect::<Option<Vec<&str>>>() {
        return joined(&texts, "");
    }
    let (first, more) = operands(values)?;
    more.iter().try_fold(first.clone(), |left, right| plus(&left, right))
}

/// The first value and those that an operator applies to it.
pub(super) fn operands(values: &[Value]) -> Result<(&Value, &[Value]), Error> {
    values.split_first().ok_or_else(|| Error::from(ErrorKind::MissingArgument))
}

/// The texts with `between` between them, if the result has bounds.
pub(super) fn joined(texts: &[&str], between: &str) -> Result<Value, Error> {
    let bytes = texts.iter().fold(0_usize, |sum, text| sum.saturating_add(text.len()));
    limits::make(bytes.saturating_add(between.len().saturating_mul(texts.len())))?;
    Ok(Value::from(texts.join(between)))
}

pub(super) fn not_iterable() -> Error {
    Error::new(ErrorKind::InvalidOperation, "none is not iterable")
}

fn plus(left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        if left.is_safe() || right.is_safe() {
            let text = escaped(left, a) + &escaped(right, b);
            limits::make(text.len())?;
            return Ok(Value::from_safe_string(text));
        }
        return joined(&[a, b], "");
    }
    if left.kind() == ValueKind::Seq && right.kind() == ValueKind::Seq && left.is_tuple() == right.is_tuple() {
        limits::make_items(left.len().unwrap_or(0) + right.len().unwrap_or(0))?;
        let items: Vec<Value> = left.try_iter()?.chain(right.try_iter()?).collect();
        return Ok(like(left, items));
    }
    match (whole(left), whole(right)) {
        (Some(a), Some(b)) => a.checked_add(b).map(Value::from).ok_or_else(|| refused("+", left, right)),
        _ => floats("+", left, right).map(|(a, b)| Value::from(a + b)),
    }
}

/// The text as markup has it beside other markup.
fn escaped(value: &Value, text: &str) -> String {
    if value.is_safe() { text.to_owned() } else { markup(text) }
}

/// The filter `escape`.
pub(super) fn escape(value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    let text = markup(&python_str(value)?);
    limits::make(text.len())?;
    Ok(Value::from_safe_string(text))
}

/// `markupsafe.escape`.
fn markup(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(c),
        }
    }
    out
}

/// A list or a tuple of `items`, as `model` is.
pub(super) fn like(model: &Value, items: Vec<Value>) -> Value {
    if model.is_tuple() { Value::from(Tuple::from(items)) } else { Value::from(items) }
}

/// An integer or a truth value.
pub(super) fn whole(value: &Value) -> Option<i128> {
    let integer = matches!(value.kind(), ValueKind::Number | ValueKind::Bool) && float_of(value).is_none();
    integer.then(|| i128::try_from(value.clone()).ok()).flatten()
}

pub(super) fn floats(operator: &str, left: &Value, right: &Value) -> Result<(f64, f64), Error> {
    let float = |value: &Value| float_of(value).or_else(|| whole(value).map(|integer| integer as f64));
    float(left).zip(float(right)).ok_or_else(|| refused(operator, left, right))
}

/// `a ~ b ~ c`.
pub(super) fn concat(values: &[Value]) -> Result<Value, Error> {
    if let Some(texts) = values.iter().map(Value::as_str).collect::<Option<Vec<&str>>>() {
        return joined(&texts, "");
    }
    let texts = texts_of(values)?;
    joined(&texts.iter().map(AsRef::as_ref).collect::<Vec<_>>(), "")
}

/// What `str` gives of each value; those that are made for it are taken off the budget one by one.
pub(super) fn texts_of(values: &[Value]) -> Result<Vec<Cow<'_, str>>, Error> {
    let text = |value| -> Result<_, Error> {
        let text = python_str(value)?;
        if let Cow::Owned(made) = &text {
            limits::spend(made.len())?;
        }
        Ok(text)
    };
    values.iter().map(text).collect()
}

/// `a * b`.
pub(super) fn multiply(left: &Value, right: &Value) -> Result<Value, Error> {
    let repeatable = |value: &Value| matches!(value.kind(), ValueKind::String | ValueKind::Seq);
    let repeated = if repeatable(left) { whole(right).map(|n| (left, n)) } else { whole(left).map(|n| (right, n)) };
    if let Some((value, count)) = repeated.filter(|(value, _)| repeatable(value)) {
        return repeat(value, usize::try_from(count.max(0)).unwrap_or(usize::MAX));
    }
    match (whole(left), whole(right)) {
        (Some(a), Some(b)) => a.checked_mul(b).map(Value::from).ok_or_else(|| refused("*", left, right)),
        _ => floats("*", left, right).map(|(a, b)| Value::from(a * b)),
    }
}

fn repeat(value: &Value, count: usize) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        limits::make(text.len().saturating_mul(count))?;
        let text = text.repeat(count);
        return Ok(if value.is_safe() { Value::from_safe_string(text) } else { Value::from(text) });
    }
    let items: Vec<Value> = value.try_iter()?.collect();
    limits::make_items(items.len().saturating_mul(count))?;
    let all = items.iter().cycle().take(items.len() * count).cloned().collect();
    Ok(like(value, all))
}

/// `a % b`: of strings, their formatting.
pub(super) fn modulo(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(pattern) = left.as_str() {
        return formatted(left, pattern, right);
    }
    let fails = || refused("%", left, right);
    match (whole(left), whole(right)) {
        (Some(_), Some(0)) => Err(fails()),
        (Some(a), Some(b)) => {
            let remainder = a.checked_rem(b).ok_or_else(fails)?;
            let moved = remainder != 0 && (remainder < 0) != (b < 0);
            Ok(Value::from(if moved { remainder + b } else { remainder }))
        }
        _ => {
            let (a, b) = floats("%", left, right)?;
            if b == 0.0 {
                return Err(fails());
            }
            let remainder = a % b;
            let moved = remainder != 0.0 && (remainder < 0.0) != (b < 0.0);
            Ok(Value::from(if moved { remainder + b } else { remainder }))
        }
    }
}

fn formatted(left: &Value, pattern: &str, right: &Value) -> Result<Value, Error> {
    let mut arguments: Vec<Value> = if right.is_tuple() { right.try_iter()?.collect() } else { vec![right.clone()] };
    let (pattern, used) = converted(pattern, &mut arguments)?;
    if used < arguments.len() && (right.is_tuple() || !matches!(right.kind(), ValueKind::Map | ValueKind::Seq)) {
        return Err(Error::new(ErrorKind::InvalidOperation, "not all arguments are converted by the format"));
    }
    if !left.is_safe() {
        return bounded_format(FormatStyle::Printf, &pattern, &arguments).map(Value::from);
    }
    let escape = |value: Value| match value.as_str() {
        Some(text) => Value::from(escaped(&value, text)),
        None => value,
    };
    let arguments: Vec<Value> = arguments.into_iter().map(escape).collect();
    bounded_format(FormatStyle::Printf, &pattern, &arguments).map(Value::from_safe_string)
}

/// The pattern and its arguments as the engine takes them, and how many arguments are used: `%r` as text, floats under
/// `%d` cut.
fn converted(pattern: &str, arguments: &mut [Value]) -> Result<(String, usize), Error> {
    let mut out = String::with_capacity(pattern.len());
    let mut used = 0;
    let mut rest = pattern;
    while let Some(at) = rest.find('%') {
        let (text, field) = rest.split_at(at);
        out.push_str(text);
        let name = if field[1..].starts_with('(') { field.find(')').map_or(field.len(), |end| end + 1) } else { 1 };
        let spec = name + field[name..].find(|c: char| !"#0- +*.123456789".contains(c)).unwrap_or(field.len() - name);
        let conversion = field[spec..].chars().next();
        out.push_str(&field[..spec]);
        rest = &field[spec + conversion.map_or(0, char::len_utf8)..];
        let Some(conversion) = conversion else { break };
        used += field[..spec].matches('*').count();
        let argument = if name == 1 { arguments.get_mut(used) } else { None };
        used += usize::from(conversion != '%' && name == 1);
        let float = argument.as_ref().and_then(|value| float_of(value)).filter(|float| float.is_finite());
        match (conversion, argument) {
            ('r', Some(argument)) => {
                *argument = limits::made(Value::from(python_repr(argument)?))?;
                out.push('s');
            }
            ('s', Some(argument)) => {
                *argument = limits::made(Value::from(python_str(argument)?.into_owned()))?;
                out.push('s');
            }
            ('d' | 'i' | 'u', Some(argument)) => {
                if let Some(float) = float {
                    *argument = Value::from(float.trunc() as i128);
                }
                out.push('d');
            }
            _ => out.push(conversion),
        }
    }
    out.push_str(rest);
    Ok((out, used))
}

/// `pattern % arguments` or `pattern.format(arguments)`, if widths and precisions have bounds.
pub(super) fn bounded_format(style: FormatStyle, pattern: &str, arguments: &[Value]) -> Result<String, Error> {
    allow_format(style, pattern, arguments)?;
    format(style, pattern, arguments)
}

/// Takes the longest text that a format can give off the budget.
pub(super) fn allow_format(style: FormatStyle, pattern: &str, arguments: &[Value]) -> Result<(), Error> {
    let printf = matches!(style, FormatStyle::Printf);
    let (mark, end): (char, fn(char) -> bool) = if printf { ('%', char::is_alphabetic) } else { ('{', |c| c == '}') };
    let (mut bytes, mut fields, mut starred) = (pattern.len(), 0_usize, false);
    for field in pattern.split(mark).skip(1) {
        let named = field.strip_prefix('(').filter(|_| printf).and_then(|field| field.split_once(')'));
        let spec = named.map_or(field, |(_, spec)| spec);
        let spec = &spec[..spec.find(end).unwrap_or(spec.len())];
        let numbers = spec.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
        bytes = numbers.fold(bytes, |sum, n| sum.saturating_add(n.parse().unwrap_or(usize::MAX)));
        starred |= spec.contains('*') || !printf && spec.ends_with(':');
        fields += 1;
    }
    for (argument, text) in arguments.iter().zip(texts_of(arguments)?) {
        let width = whole(argument).filter(|_| starred).map_or(0, i128::unsigned_abs);
        let text = text.len().saturating_add(usize::try_from(width).unwrap_or(usize::MAX));
        bytes = bytes.saturating_add(text.saturating_mul(fields));
    }
    limits::make(bytes)
}

/// Whether `value % by` is `remainder`, for the tests odd, even and divisibleby.
pub(super) fn leaves(value: &Value, by: &Value, remainder: i128) -> Result<bool, Error> {
    Ok(whole(&modulo(value, by)?) == Some(remainder))
}

/// What a loop may run over; Python does not iterate over none.
pub(super) fn each(value: Value) -> Result<Value, Error> {
    if value.is_none() {
        return Err(not_iterable());
    }
    work(4 + value.len().unwrap_or(0))?;
    if value.kind() == ValueKind::String {
        let text = value.as_str().unwrap_or_default();
        limits::make_items(text.chars().count())?;
        return Ok(Value::from(text.chars().map(Value::from).collect::<Vec<Value>>()));
    }
    if value.kind() == ValueKind::Iterable && value.len().is_none() {
        // A loop knows its last item only of what has a length.
        return Ok(Value::from(value.try_iter()?.collect::<Vec<Value>>()));
    }
    Ok(value)
}

/// `value[key]`.
pub(super) fn item(value: &Value, key: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => work(1 + value.as_str().map_or(0, str::len) / 4)?,
        ValueKind::Iterable => work(4 * value.len().unwrap_or(0))?,
        ValueKind::Map => hashed(key)?,
        _ => {}
    }
    value.get_item(key)
}

/// The container, if what it holds can be walked: containers that hold others twice grow without any text growing.
pub(super) fn sized(value: Value) -> Result<Value, Error> {
    limits::make_items(value.len().unwrap_or(0))?;
    walk(&value)?;
    Ok(value)
}

/// Positional arguments that are taken out of a list, each of which is one of the call's.
pub(super) fn splat(value: Value) -> Result<Value, Error> {
    limits::make_items(value.as_str().map_or_else(|| charge::items(&value), str::len))?;
    Ok(value)
}
