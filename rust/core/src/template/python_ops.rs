//! Python's operators, comparisons and methods of str, list and dict for template values, with bounds on their
//! results.
//!
//! Operations that raise in Python return an error here, and walks over values are charged. `rewrite` replaces the
//! engine's own operators with these. This module implements the methods that the engine lacks or that are less exact
//! than CPython's; it passes the others on.

use super::json::{float_of, python_repr, python_str};
use super::limits::{self, Reads, charge, charge_method, compared, hashed, held, text_bytes, walk, work};
use super::marks::is_space;
use super::value::{Big, big};
use super::watch::{self, DetectableMarks};
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{DynObject, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use std::borrow::Cow;
use std::cmp::Ordering;

/// Returns the error for operands that Python's operator rejects.
pub(super) fn refused(operator: &str, left: &Value, right: &Value) -> Error {
    let kinds = format!("{operator} does not take {} and {}", left.kind(), right.kind());
    Error::new(ErrorKind::InvalidOperation, kinds)
}

/// Implements `a + b + c`.
pub(super) fn add(values: &[Value]) -> Result<Value, Error> {
    // Strings that are not markup.
    let texts = values.iter().map(|value| value.as_str().filter(|_| !value.is_safe()));
    if let Some(texts) = texts.collect::<Option<Vec<&str>>>() {
        return joined(&texts, "");
    }
    let (first, others) = operands(values)?;
    others.iter().try_fold(first.clone(), |left, right| plus(&left, right))
}

/// Returns the first value, and the values that an operator applies to it.
pub(super) fn operands(values: &[Value]) -> Result<(&Value, &[Value]), Error> {
    values.split_first().ok_or_else(|| Error::from(ErrorKind::MissingArgument))
}

/// Joins the texts with `between`, if the result is within bounds.
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
    match (as_integer(left), as_integer(right)) {
        (Some(a), Some(b)) => a.checked_add(b).map(Value::from).ok_or_else(|| refused("+", left, right)),
        _ => floats("+", left, right).map(|(a, b)| Value::from(a + b)),
    }
}

/// Escapes the text for use next to other markup.
fn escaped(value: &Value, text: &str) -> String {
    if value.is_safe() { text.to_owned() } else { markup(text) }
}

/// Implements the filter `escape`.
pub(super) fn escape(value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    let text = markup(&python_str(value)?);
    limits::make(text.len())?;
    Ok(Value::from_safe_string(text))
}

/// Implements `markupsafe.escape`.
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

/// Returns a tuple of `items` if `model` is a tuple, else a list.
pub(super) fn like(model: &Value, items: Vec<Value>) -> Value {
    if model.is_tuple() { Value::from(Tuple::from(items)) } else { Value::from(items) }
}

/// Returns the value of an integer or a boolean.
pub(super) fn as_integer(value: &Value) -> Option<i128> {
    let integer = matches!(value.kind(), ValueKind::Number | ValueKind::Bool) && float_of(value).is_none();
    integer.then(|| i128::try_from(value.clone()).ok()).flatten()
}

pub(super) fn floats(operator: &str, left: &Value, right: &Value) -> Result<(f64, f64), Error> {
    let float = |value: &Value| float_of(value).or_else(|| as_integer(value).map(|integer| integer as f64));
    float(left).zip(float(right)).ok_or_else(|| refused(operator, left, right))
}

/// Implements `a ~ b ~ c`.
pub(super) fn concat(values: &[Value]) -> Result<Value, Error> {
    if let Some(texts) = values.iter().map(Value::as_str).collect::<Option<Vec<&str>>>() {
        return joined(&texts, "");
    }
    let texts = texts_of(values)?;
    joined(&texts.iter().map(AsRef::as_ref).collect::<Vec<_>>(), "")
}

/// Returns `str` of each value. New texts are charged one by one.
pub(super) fn texts_of(values: &[Value]) -> Result<Vec<Cow<'_, str>>, Error> {
    let text = |value| -> Result<_, Error> {
        let text = python_str(value)?;
        if let Cow::Owned(new_text) = &text {
            limits::spend(new_text.len())?;
        }
        Ok(text)
    };
    values.iter().map(text).collect()
}

/// Implements `a * b`.
pub(super) fn multiply(left: &Value, right: &Value) -> Result<Value, Error> {
    let repeatable = |value: &Value| matches!(value.kind(), ValueKind::String | ValueKind::Seq);
    let repeated =
        if repeatable(left) { as_integer(right).map(|n| (left, n)) } else { as_integer(left).map(|n| (right, n)) };
    if let Some((value, count)) = repeated.filter(|(value, _)| repeatable(value)) {
        return repeat(value, usize::try_from(count.max(0)).unwrap_or(usize::MAX));
    }
    match (as_integer(left), as_integer(right)) {
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
    let repeated = items.iter().cycle().take(items.len() * count).cloned().collect();
    Ok(like(value, repeated))
}

/// Implements `a % b`, which formats if `a` is a string.
pub(super) fn modulo(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(pattern) = left.as_str() {
        return formatted(left, pattern, right);
    }
    let error = || refused("%", left, right);
    match (as_integer(left), as_integer(right)) {
        (Some(_), Some(0)) => Err(error()),
        (Some(a), Some(b)) => {
            let remainder = a.checked_rem(b).ok_or_else(error)?;
            let needs_shift = remainder != 0 && (remainder < 0) != (b < 0);
            Ok(Value::from(if needs_shift { remainder + b } else { remainder }))
        }
        _ => {
            let (a, b) = floats("%", left, right)?;
            if b == 0.0 {
                return Err(error());
            }
            let remainder = a % b;
            let needs_shift = remainder != 0.0 && (remainder < 0.0) != (b < 0.0);
            Ok(Value::from(if needs_shift { remainder + b } else { remainder }))
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

/// Converts pattern and arguments to the engine's form: `%r` becomes text, and floats under `%d` are truncated. Also
/// returns how many arguments are used.
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

/// Implements `pattern % arguments` and `pattern.format(arguments)`, if widths and precisions are within bounds.
pub(super) fn bounded_format(style: FormatStyle, pattern: &str, arguments: &[Value]) -> Result<String, Error> {
    allow_format(style, pattern, arguments)?;
    format(style, pattern, arguments)
}

/// Charges the longest text that a format can produce.
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
        let width = as_integer(argument).filter(|_| starred).map_or(0, i128::unsigned_abs);
        let text = text.len().saturating_add(usize::try_from(width).unwrap_or(usize::MAX));
        bytes = bytes.saturating_add(text.saturating_mul(fields));
    }
    limits::make(bytes)
}

/// Returns true if `value % by` is `remainder`. The tests odd, even and divisibleby use it.
pub(super) fn has_remainder(value: &Value, by: &Value, remainder: i128) -> Result<bool, Error> {
    Ok(as_integer(&modulo(value, by)?) == Some(remainder))
}

/// Returns the value to iterate over in a loop. Python does not iterate over none.
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
        // The engine's loop only knows its last item if the value has a length.
        return Ok(Value::from(value.try_iter()?.collect::<Vec<Value>>()));
    }
    Ok(value)
}

/// Implements `value[key]`.
pub(super) fn item(value: &Value, key: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => work(1 + value.as_str().map_or(0, str::len) / 4)?,
        ValueKind::Iterable => work(4 * value.len().unwrap_or(0))?,
        ValueKind::Map => hashed(key)?,
        _ => {}
    }
    value.get_item(key)
}

/// Charges a container and checks that its contents can be walked. Containers that contain others twice would grow
/// without any text growing.
pub(super) fn sized(value: Value) -> Result<Value, Error> {
    limits::make_items(value.len().unwrap_or(0))?;
    walk(&value)?;
    Ok(value)
}

/// Charges the positional arguments that are unpacked from a list. Each becomes an argument of the call.
pub(super) fn splat(value: Value) -> Result<Value, Error> {
    limits::make_items(value.as_str().map_or_else(|| limits::items(&value), str::len))?;
    Ok(value)
}

/// Implements `a in b`.
pub(super) fn contains(item: &Value, container: &Value) -> Result<bool, Error> {
    let error = || refused("in", item, container);
    match container.kind() {
        ValueKind::Undefined => Ok(false),
        ValueKind::String => {
            let text = container.as_str().unwrap_or_default();
            work(1 + text.len() / 16)?;
            let item = item.as_str().ok_or_else(error)?;
            let result = text.contains(item);
            watch::pair(text, item, result, |text, item| text.contains(item));
            Ok(result)
        }
        ValueKind::Map
            if matches!(item.kind(), ValueKind::Map) || item.kind() == ValueKind::Seq && !item.is_tuple() =>
        {
            Err(error())
        }
        ValueKind::Map => {
            hashed(item)?;
            watch::look(std::slice::from_ref(item), DetectableMarks::All);
            Ok(container.as_object().and_then(|object: &DynObject| object.get_value(item)).is_some())
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for other in container.try_iter()? {
                if equal(item, &other)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        _ => Err(error()),
    }
}

/// Implements `a == b`.
pub(super) fn equal(left: &Value, right: &Value) -> Result<bool, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        work(1 + a.len().min(b.len()) / 64)?;
        watch::pair(a, b, a == b, |a, b| a == b);
        return Ok(a == b);
    }
    compared(left)?;
    compared(right)?;
    if left.as_object().is_some() && right.as_object().is_some() {
        watch::look(&[left.clone(), right.clone()], DetectableMarks::All);
    }
    Ok(left == right)
}

/// Implements `a < b`, `a < b <= c` and so on, including `!=` and `in`. Operators and operands alternate in `values`.
pub(super) fn compare(values: &[Value]) -> Result<bool, Error> {
    let (mut left, pairs) = operands(values)?;
    for pair in pairs.chunks_exact(2) {
        let (operator, right) = (pair[0].as_str().unwrap_or_default(), &pair[1]);
        let holds = match operator {
            "==" => equal(left, right)?,
            "!=" => !equal(left, right)?,
            "in" => contains(left, right)?,
            "not in" => !contains(left, right)?,
            "<" => order(operator, left, right)?.is_some_and(Ordering::is_lt),
            ">" => order(operator, left, right)?.is_some_and(Ordering::is_gt),
            "<=" => order(operator, left, right)?.is_some_and(Ordering::is_le),
            _ => order(operator, left, right)?.is_some_and(Ordering::is_ge),
        };
        if !holds {
            return Ok(false);
        }
        left = right;
    }
    Ok(true)
}

/// Returns the order of two values of a kind that Python orders; `None` if one is NaN.
fn order(operator: &str, left: &Value, right: &Value) -> Result<Option<Ordering>, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        work(1 + a.len().min(b.len()) / 64)?;
        watch::pair(a, b, a < b, |a, b| a < b);
        watch::pair(a, b, a == b, |a, b| a == b);
        return Ok(Some(a.cmp(b)));
    }
    if left.kind() == ValueKind::Seq && right.kind() == ValueKind::Seq && left.is_tuple() == right.is_tuple() {
        for (a, b) in left.try_iter()?.zip(right.try_iter()?) {
            if !equal(&a, &b)? {
                return order(operator, &a, &b);
            }
        }
        return Ok(left.len().partial_cmp(&right.len()));
    }
    if let Some(order) = order_of_big(left, right) {
        return Ok(order);
    }
    match (as_integer(left), as_integer(right)) {
        (Some(a), Some(b)) => Ok(Some(a.cmp(&b))),
        _ => floats(operator, left, right).map(|(a, b)| a.partial_cmp(&b)),
    }
}

/// Returns the order of two numbers, at least one of them a big integer. Returns `None` if neither is, or if the other
/// is not a number.
#[expect(clippy::option_option, reason = "NaN has no order, and other numbers have one that is found elsewhere")]
fn order_of_big(left: &Value, right: &Value) -> Option<Option<Ordering>> {
    let compare = |big: &Big, other: &Value| match (as_integer(other), float_of(other)) {
        (Some(_), _) => Some(Some(if big.is_negative() { Ordering::Less } else { Ordering::Greater })),
        (None, Some(float)) => Some(big.float().partial_cmp(&float)),
        (None, None) => None,
    };
    match (big(left), big(right)) {
        (Some(a), Some(b)) => Some(Some(a.against(b))),
        (Some(a), None) => compare(a, right),
        (None, Some(b)) => compare(b, left).map(|order| order.map(Ordering::reverse)),
        (None, None) => None,
    }
}

/// Implements `value.method(args)`.
pub(super) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    pay(value, method, args)?;
    let result = call_uncounted(state, value, method, args).and_then(limits::made)?;
    if watch::is_on() {
        look(state, value, method, args, &result)?;
    }
    Ok(result)
}

/// Has the result of a method on strings with marks compared with the result on the strings without marks.
fn look(state: &mut State, value: &Value, method: &str, args: &[Value], result: &Value) -> Result<(), Error> {
    if value.kind() != ValueKind::String {
        let keeps_values = matches!(method, "get" | "items" | "keys" | "values");
        watch::look(args, if keeps_values { DetectableMarks::Strings } else { DetectableMarks::All });
        if !keeps_values {
            watch::look(std::slice::from_ref(value), DetectableMarks::All);
        }
        return Ok(());
    }
    // Joining does not depend on the texts.
    if method == "join" && args.iter().all(|items| items.kind() != ValueKind::String) {
        return Ok(());
    }
    let operands: Vec<&Value> = std::iter::once(value).chain(args).collect();
    watch::repeat(&operands, result, |operands| match operands.split_first() {
        Some((value, args)) => call_uncounted(state, value, method, args),
        None => Err(Error::from(ErrorKind::MissingArgument)),
    })
}

/// Charges what a method reads.
fn pay(value: &Value, method: &str, args: &[Value]) -> Result<(), Error> {
    charge_method(value, args)?;
    match (method, args) {
        // Each character is searched for among the others.
        ("strip" | "lstrip" | "rstrip", [chars, ..]) => {
            work(value.as_str().map_or(0, str::len).saturating_mul(chars.as_str().map_or(0, str::len)) / 64)
        }
        // A single string is compared once.
        ("startswith" | "endswith", [affix, ..]) if affix.as_str().is_some() => Ok(()),
        ("startswith" | "endswith" | "join", _) => charge(args, Reads::Items),
        ("count", [what, ..]) if value.kind() != ValueKind::String => {
            work(text_bytes(value)?.saturating_add(text_bytes(what)?))
        }
        ("format", _) => charge(args, Reads::All),
        ("get", [key, ..]) => hashed(key),
        _ => Ok(()),
    }
}

/// Implements `value.cycle(args)` and `value.changed(args)`. The engine handles these for its loops without calling
/// [`call`].
pub(super) fn of_loop(state: &mut State, args: &[Value]) -> Result<Value, Error> {
    let [value, method, args @ ..] = args else { return Err(Error::from(ErrorKind::MissingArgument)) };
    let method = method.as_str().unwrap_or_default();
    if method == "cycle" && args.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "loop.cycle has no items to choose from"));
    }
    args.iter().try_for_each(|argument| held(argument).and_then(|()| compared(argument)))?;
    if method == "changed" {
        watch::look(args, DetectableMarks::All);
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

/// Implements `str.replace`, if the result is within bounds.
pub(super) fn replaced(text: &str, old: &str, new: &str, count: Option<usize>) -> Result<String, Error> {
    let matches = text.matches(old).take(count.unwrap_or(usize::MAX)).count();
    limits::make(text.len().saturating_add(matches.saturating_mul(new.len())))?;
    Ok(count.map_or_else(|| text.replace(old, new), |count| text.replacen(old, new, count)))
}

fn of_string(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    if method.contains("split")
        && let Err(error) = limits::make_items(text.len() / 8)
    {
        return Some(Err(error));
    }
    let arg = |args| from_args::<(Option<&str>,)>(args).map(|(argument,)| argument);
    let result = match method {
        "strip" => arg(args).map(|chars| Value::from(strip(text, chars, true, true))),
        "lstrip" => arg(args).map(|chars| Value::from(strip(text, chars, true, false))),
        "rstrip" => arg(args).map(|chars| Value::from(strip(text, chars, false, true))),
        "removeprefix" => arg(args).map(|fix| Value::from(fix.and_then(|f| text.strip_prefix(f)).unwrap_or(text))),
        "removesuffix" => arg(args).map(|fix| Value::from(fix.and_then(|f| text.strip_suffix(f)).unwrap_or(text))),
        "replace" => from_args::<(&str, &str, Option<i64>)>(args).and_then(|(old, new, count)| {
            replaced(text, old, new, count.and_then(|count| usize::try_from(count).ok())).map(Value::from)
        }),
        "join" => from_args::<(&Value,)>(args).and_then(|(items,)| join(items, text)),
        "format" => bounded_format(FormatStyle::StrFormat, text, args).map(Value::from),
        "zfill" | "ljust" | "rjust" => return Some(filled(text, method, args)),
        "splitlines" => from_args::<(Option<bool>,)>(args).map(|(keep,)| lines(text, keep.unwrap_or(false))),
        "rsplit" => from_args::<(Option<&str>, Option<i64>)>(args).map(|(by, most)| right_split(text, by, most)),
        "partition" => arg(args).map(|by| parts(text, by.and_then(|by| text.split_once(by)), by, true)),
        "rpartition" => arg(args).map(|by| parts(text, by.and_then(|by| text.rsplit_once(by)), by, false)),
        _ => return None,
    };
    Some(result)
}

/// Implements `str.zfill`, `str.ljust` and `str.rjust`.
fn filled(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (i64, Option<&str>) = from_args(args)?;
    let fill = if method == "zfill" { "0" } else { fill.unwrap_or(" ") };
    let missing = usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count());
    limits::make(text.len().saturating_add(missing.saturating_mul(fill.len())))?;
    let padding = fill.repeat(missing);
    let sign = text.len() - text.strip_prefix(['-', '+']).unwrap_or(text).len();
    Ok(Value::from(match method {
        "ljust" => format!("{text}{padding}"),
        "rjust" => format!("{padding}{text}"),
        _ => format!("{}{padding}{}", &text[..sign], &text[sign..]),
    }))
}

/// Implements `str.splitlines`, for all of Python's line ends.
fn lines(text: &str, keep: bool) -> Value {
    let ends = |c: char| matches!(c, '\n'..='\r' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        let end =
            at + if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(1, char::len_utf8) };
        lines.push(Value::from(&rest[..if keep { end } else { at }]));
        rest = &rest[end..];
    }
    if !rest.is_empty() {
        lines.push(Value::from(rest));
    }
    Value::from(lines)
}

/// Implements `text.join(items)`, for strings only.
fn join(items: &Value, text: &str) -> Result<Value, Error> {
    let items: Vec<Value> = items.try_iter()?.collect();
    let texts: Option<Vec<&str>> = items.iter().map(Value::as_str).collect();
    let texts = texts.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "str.join takes strings"))?;
    joined(&texts, text)
}

/// Implements `str.strip` and its one-sided forms.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let drops = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(drops) } else { text };
    if right { text.trim_end_matches(drops) } else { text }
}

fn right_split(text: &str, by: Option<&str>, limit: Option<i64>) -> Value {
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).map_or(usize::MAX, |limit| limit.saturating_add(1));
    let mut parts: Vec<&str> = match by {
        Some(by) => text.rsplitn(limit, by).collect(),
        None => text.split(is_space).filter(|part| !part.is_empty()).rev().collect(),
    };
    parts.reverse();
    Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>())
}

fn parts(text: &str, split: Option<(&str, &str)>, by: Option<&str>, first: bool) -> Value {
    let (before, middle, after) = match (split, first) {
        (Some((before, after)), _) => (before, by.unwrap_or_default(), after),
        (None, true) => (text, "", ""),
        (None, false) => ("", "", text),
    };
    Value::from(Tuple::from([before, middle, after].map(Value::from)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::value::value;

    #[test]
    fn integers_of_any_size_have_their_order_of_big() {
        let long = "9".repeat(60);
        let longer = format!("1{long}");
        let negative = format!("-{long}");
        // python3 -c "print(int('9'*60) < int('19'...), ...)"
        let rising = [format!("-{longer}"), negative, "-170141183460469231731687303715884105729".into()];
        let values: Vec<Value> = rising
            .iter()
            .map(|text| value(text))
            .chain([Value::from(-1), Value::from(1.5), value(&long), value(&longer)])
            .collect();
        for (n, left) in values.iter().enumerate() {
            for (m, right) in values.iter().enumerate() {
                let order = order_of_big(left, right);
                let expected = (big(left).is_some() || big(right).is_some()).then_some(Some(n.cmp(&m)));
                assert_eq!(order, expected, "{left} {right}");
            }
        }
        assert_eq!(order_of_big(&value(&long), &Value::from("1")), None);
        assert_eq!(value(&long).to_string(), long);
        assert_eq!(
            value("-170141183460469231731687303715884105728").to_string(),
            "-170141183460469231731687303715884105728"
        );
        assert_eq!(float_of(&value("-Infinity")), Some(f64::NEG_INFINITY));
    }
}
