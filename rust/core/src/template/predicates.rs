//! Jinja's tests, `is string` and the like, where the engine's are another's and where they are not.
//!
//! Called by `environment`.

use super::charge::{Paid, Reads, items};
use super::generator::Generator;
use super::integers::big;
use super::limits::work;
use super::{comparisons, operators};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, tests};

pub(super) fn add(paid: &mut Paid<'_>) {
    add_kinds(paid);
    add_comparisons(paid);
    paid.test("odd", Reads::Strings, |value: &Value| operators::leaves(value, &Value::from(2), 1));
    paid.test("even", Reads::Strings, |value: &Value| operators::leaves(value, &Value::from(2), 0));
    paid.test("divisibleby", Reads::Strings, |value: &Value, by: &Value| operators::leaves(value, by, 0));
    paid.test("iterable", Reads::Strings, iterable);
    paid.test("lower", Reads::Texts, tests::is_lower);
    paid.test("upper", Reads::Texts, tests::is_upper);
    paid.test("filter", Reads::Strings, tests::is_filter);
    paid.test("test", Reads::Strings, tests::is_test);
}

fn add_kinds(paid: &mut Paid<'_>) {
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
    // What has a length and items: strings and dicts too.
    paid.kind("sequence", |value: &Value| match value.kind() {
        ValueKind::String | ValueKind::Seq | ValueKind::Map => true,
        ValueKind::Iterable => value.downcast_object_ref::<Generator>().is_none() && value.len().is_some(),
        _ => false,
    });
}

/// Whether a loop may run over it; the engine takes the items out to answer that.
fn iterable(value: &Value) -> Result<bool, Error> {
    if value.kind() == ValueKind::String {
        return Ok(true);
    }
    work(items(value))?;
    Ok(!value.is_none() && value.try_iter().is_ok())
}

fn add_comparisons(paid: &mut Paid<'_>) {
    paid.test("in", Reads::Strings, |value: &Value, container: &Value| comparisons::contains(value, container));
    paid.test("sameas", Reads::All, tests::is_sameas);
    for name in ["==", "eq", "equalto"] {
        paid.test(name, Reads::Strings, |value: &Value, other: &Value| comparisons::equal(value, other));
    }
    for name in ["!=", "ne"] {
        paid.test(name, Reads::Strings, |value: &Value, other: &Value| {
            comparisons::equal(value, other).map(|same| !same)
        });
    }
    let names = [("<", "lt", "lessthan"), (">", "gt", "greaterthan"), ("<=", "le", "<="), (">=", "ge", ">=")];
    for (operator, short, long) in names {
        for name in [operator, short, long] {
            paid.test(name, Reads::Strings, move |value: &Value, other: &Value| {
                comparisons::compare(&[value.clone(), Value::from(operator), other.clone()])
            });
        }
    }
}
