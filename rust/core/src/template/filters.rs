//! Jinja's filters where the engine's are another's: lazy ones, and those whose result has no bounds.
//!
//! What a filter means is left to the engine wherever both agree. Called by `environment`.

use super::generator::Generator;
use super::json::python_str;
use super::limits::{self, made, make_items};
use super::methods::{joined, replaced, strip};
use super::operators::{self, add as plus, allow_format};
use minijinja::formatting::FormatStyle;
use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, filters};
use std::borrow::Cow;

/// Filters that give a generator in Python.
const LAZY: [&str; 9] = ["map", "select", "reject", "selectattr", "rejectattr", "unique", "batch", "slice", "items"];
/// Filters whose result is counted and no more.
const COUNTED: [&str; 7] = ["upper", "lower", "title", "capitalize", "sort", "dictsort", "groupby"];
/// What the engine has and Jinja has not.
const UNKNOWN: [&str; 5] = ["split", "lines", "bool", "chain", "zip"];

/// Adds the filters to `env`.
pub(super) fn add(env: &mut Environment<'static>) {
    keep_engine_filters(env);
    for name in LAZY {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            lazy(state, name, &args.into_values())
        });
    }
    for name in COUNTED {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            if matches!(name, "sort" | "dictsort" | "groupby") && args.first().is_none_or(Value::is_none) {
                return Err(not_iterable());
            }
            engine(state, name, &args).and_then(made)
        });
    }
    for name in UNKNOWN {
        env.remove_filter(name);
    }
    env.add_filter("trim", trim);
    env.add_filter("replace", replace);
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("reverse", reverse);
    env.add_filter("list", list);
    env.add_filter("join", join);
    env.add_filter("sum", sum);
    env.add_filter("string", string);
    env.add_filter("indent", indent);
    env.add_filter("format", format);
    env.add_filter("escape", operators::escape);
    env.add_filter("e", operators::escape);
    env.add_filter("forceescape", |value: &Value| operators::escape(&Value::from(python_str(value)?.into_owned())));
    env.add_filter("safe", |value: &Value| python_str(value).map(|text| Value::from_safe_string(text.into_owned())));
    env.add_filter("int", |state: &mut State, args: Rest<ValueOrKwargs>| number(state, "int", &args.into_values()));
    env.add_filter("float", |state: &mut State, args: Rest<ValueOrKwargs>| number(state, "float", &args.into_values()));
    add_tests(env);
}

/// Jinja's tests where the engine's are another's.
fn add_tests(env: &mut Environment<'static>) {
    for name in ["startingwith", "endingwith", "containing", "int", "safe"] {
        env.remove_test(name);
    }
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    // What has a length and items: strings and dicts too.
    env.add_test("sequence", |value: &Value| match value.kind() {
        ValueKind::String | ValueKind::Seq | ValueKind::Map => true,
        ValueKind::Iterable => value.downcast_object_ref::<Generator>().is_none() && value.len().is_some(),
        _ => false,
    });
    env.add_test("in", |value: &Value, container: &Value| operators::contains(value, container));
    env.add_test("odd", |value: &Value| operators::leaves(value, &Value::from(2), 1));
    env.add_test("even", |value: &Value| operators::leaves(value, &Value::from(2), 0));
    env.add_test("divisibleby", |value: &Value, by: &Value| operators::leaves(value, by, 0));
    let names = [("<", "lt", "lessthan"), (">", "gt", "greaterthan"), ("<=", "le", "<="), (">=", "ge", ">=")];
    for (operator, short, long) in names {
        for name in [operator, short, long] {
            env.add_test(name, move |value: &Value, other: &Value| {
                operators::compare(&[value.clone(), Value::from(operator), other.clone()])
            });
        }
    }
}

/// `int` and `float`: what is no number is the default.
fn number(state: &mut State, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (given, kwargs): (&[Value], Kwargs) = from_args(args)?;
    if given.first().is_none_or(Value::is_undefined) {
        return Err(Error::new(ErrorKind::UndefinedError, format!("{name} of what is undefined")));
    }
    let zero = if name == "int" { Value::from(0) } else { Value::from(0.0) };
    let default = given.get(1).cloned().or(kwargs.get("default")?).unwrap_or(zero);
    Ok(engine(state, name, args).unwrap_or(default))
}

/// The engine's own filters under names of ours, for [`engine`].
fn keep_engine_filters(env: &mut Environment<'static>) {
    env.add_filter("__map", filters::map);
    env.add_filter("__select", filters::select);
    env.add_filter("__reject", filters::reject);
    env.add_filter("__selectattr", filters::selectattr);
    env.add_filter("__rejectattr", filters::rejectattr);
    env.add_filter("__unique", filters::unique);
    env.add_filter("__batch", filters::batch);
    env.add_filter("__slice_filter", filters::slice);
    env.add_filter("__items", filters::items);
    env.add_filter("__upper", filters::upper);
    env.add_filter("__lower", filters::lower);
    env.add_filter("__title", filters::title);
    env.add_filter("__capitalize", filters::capitalize);
    env.add_filter("__sort", filters::sort);
    env.add_filter("__dictsort", filters::dictsort);
    env.add_filter("__indent", filters::indent);
    env.add_filter("__format", filters::format);
    env.add_filter("__reverse", filters::reverse);
    env.add_filter("__groupby", filters::groupby);
    env.add_filter("__int", filters::int);
    env.add_filter("__float", filters::float);
}

/// The engine's own filter.
fn engine(state: &mut State, name: &str, args: &[Value]) -> Result<Value, Error> {
    let name = if name == "slice" { "__slice_filter".to_owned() } else { format!("__{name}") };
    state.apply_filter(&name, args)
}

fn not_iterable() -> Error {
    Error::new(ErrorKind::InvalidOperation, "none is not iterable")
}

fn lazy(state: &mut State, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(value) = args.first() else { return engine(state, name, args) };
    if value.is_none() {
        // Of nothing Jinja's maps and selections make nothing; the others raise.
        return match name {
            "map" | "select" | "reject" | "selectattr" | "rejectattr" => Ok(Generator::value(Vec::new())),
            _ => Err(not_iterable()),
        };
    }
    // A string is as many items as it has characters; batches are filled up to a number that the template says.
    let width = args.get(1).filter(|_| matches!(name, "batch" | "slice")).and_then(Value::as_usize);
    let count = value.as_str().map_or_else(|| value.len().unwrap_or(0), |text| text.chars().count());
    make_items(count.saturating_add(width.unwrap_or(0)))?;
    let items: Vec<Value> = engine(state, name, args)?.try_iter()?.collect();
    Ok(Generator::value(items))
}

fn text_of(value: &Value) -> Result<Cow<'_, str>, Error> {
    python_str(value)
}

fn trim(value: &Value, chars: Option<&str>) -> Result<Value, Error> {
    let text = text_of(value)?;
    made(Value::from(strip(&text, chars, true, true)))
}

fn replace(value: &Value, old: &str, new: &str, count: Option<usize>) -> Result<String, Error> {
    replaced(&text_of(value)?, old, new, count)
}

/// `len`, and 0 for what is undefined, as Jinja has it.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    let has = value.downcast_object_ref::<Generator>().is_none();
    value.len().filter(|_| has).ok_or_else(|| {
        Error::new(ErrorKind::InvalidOperation, format!("a value of type {} has no length", value.kind()))
    })
}

fn reverse(state: &mut State, value: &Value) -> Result<Value, Error> {
    if value.is_none() {
        return Err(not_iterable());
    }
    let reversed = engine(state, "reverse", std::slice::from_ref(value)).and_then(made)?;
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

/// The items of `value`, or an attribute of each.
fn items(state: &mut State, value: &Value, attribute: Option<Value>) -> Result<Vec<Value>, Error> {
    let attribute = attribute.filter(|attribute| !attribute.is_none());
    let items = list(value)?;
    let items = match attribute {
        Some(attribute) => {
            let named = Value::from(Kwargs::from_iter([("attribute", attribute)]));
            engine(state, "map", &[items, named])?
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
    let texts = items.iter().map(python_str).collect::<Result<Vec<_>, _>>()?;
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

fn indent(state: &mut State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let (given, kwargs): (&[Value], Kwargs) = from_args(&args)?;
    let width = given.get(1).cloned().or(kwargs.get("width")?);
    let width = width.map_or(4, |width| width.as_usize().or(width.as_str().map(str::len)).unwrap_or(0));
    let text = given.first().and_then(Value::as_str);
    let text = text.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "indent takes a string"))?;
    let lines = text.matches('\n').count() + 1;
    limits::make(text.len().saturating_add(lines.saturating_mul(width)))?;
    engine(state, "indent", &args)
}

fn format(state: &mut State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let pattern = args.first().and_then(Value::as_str).unwrap_or_default().to_owned();
    allow_format(FormatStyle::Printf, &pattern, args.get(1..).unwrap_or_default())?;
    engine(state, "format", &args)
}
