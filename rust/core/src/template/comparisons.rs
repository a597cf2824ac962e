//! Python's comparisons over template values: `in`, equality, order, and chains of them.
//!
//! What raises in Python is an error here, and what is walked is counted. `rewrite` puts these in the place of the engine's
//! own; called through `environment` as filters.

use super::charge::{compared, hashed};
use super::integers::{Big, big};
use super::json::float_of;
use super::limits::work;
use super::operators::{floats, operands, refused, whole};
use super::watch::{self, Tells};
use minijinja::Error;
use minijinja::value::{DynObject, Value, ValueKind};
use std::cmp::Ordering;

/// `a in b`.
pub(super) fn contains(item: &Value, container: &Value) -> Result<bool, Error> {
    let fails = || refused("in", item, container);
    match container.kind() {
        ValueKind::Undefined => Ok(false),
        ValueKind::String => {
            let text = container.as_str().unwrap_or_default();
            work(1 + text.len() / 16)?;
            let item = item.as_str().ok_or_else(fails)?;
            let found = text.contains(item);
            watch::pair(text, item, found, |text, item| text.contains(item));
            Ok(found)
        }
        ValueKind::Map
            if matches!(item.kind(), ValueKind::Map) || item.kind() == ValueKind::Seq && !item.is_tuple() =>
        {
            Err(fails())
        }
        ValueKind::Map => {
            hashed(item)?;
            watch::look(std::slice::from_ref(item), Tells::All);
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
        _ => Err(fails()),
    }
}

/// `a == b`.
pub(super) fn equal(left: &Value, right: &Value) -> Result<bool, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        work(1 + a.len().min(b.len()) / 64)?;
        watch::pair(a, b, a == b, |a, b| a == b);
        return Ok(a == b);
    }
    compared(left)?;
    compared(right)?;
    if left.as_object().is_some() && right.as_object().is_some() {
        watch::look(&[left.clone(), right.clone()], Tells::All);
    }
    Ok(left == right)
}

/// `a < b`, `a < b <= c` and the like, `!=` and `in` among them: operators and operands by turns.
pub(super) fn compare(values: &[Value]) -> Result<bool, Error> {
    let (mut left, rest) = operands(values)?;
    for pair in rest.chunks_exact(2) {
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

/// How two values of a kind that Python orders stand; `None` beside NaN.
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
    match (whole(left), whole(right)) {
        (Some(a), Some(b)) => Ok(Some(a.cmp(&b))),
        _ => floats(operator, left, right).map(|(a, b)| a.partial_cmp(&b)),
    }
}

/// How two numbers stand of which at least one is such an integer; `None` if none is, or the other is no number.
#[expect(clippy::option_option, reason = "NaN has no order, and other numbers have one that is found elsewhere")]
fn order_of_big(left: &Value, right: &Value) -> Option<Option<Ordering>> {
    let alone = |big: &Big, other: &Value| match (whole(other), float_of(other)) {
        (Some(_), _) => Some(Some(if big.is_negative() { Ordering::Less } else { Ordering::Greater })),
        (None, Some(float)) => Some(big.float().partial_cmp(&float)),
        (None, None) => None,
    };
    match (big(left), big(right)) {
        (Some(a), Some(b)) => Some(Some(a.against(b))),
        (Some(a), None) => alone(a, right),
        (None, Some(b)) => alone(b, left).map(|order| order.map(Ordering::reverse)),
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::integers::value;

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
                let found = order_of_big(left, right);
                let expected = (big(left).is_some() || big(right).is_some()).then_some(Some(n.cmp(&m)));
                assert_eq!(found, expected, "{left} {right}");
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
