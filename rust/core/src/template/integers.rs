//! Integers that 128 bits do not hold: they are printed, compared and written as JSON, not calculated with.
//!
//! Made by `value`; called by `comparisons`, `json`, `predicates` and `charge`.

use super::json::float_of;
use super::operators::whole;
use minijinja::value::{DynObject, Object, ObjectRepr, Value};
use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

/// An integer as it is written.
#[derive(Debug)]
pub(super) struct Big(String);

impl Big {
    /// How many bytes its text has.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    fn is_negative(&self) -> bool {
        self.0.starts_with('-')
    }

    fn against(&self, other: &Self) -> Ordering {
        let size = self.len().cmp(&other.len()).then_with(|| self.0.cmp(&other.0));
        match (self.is_negative(), other.is_negative()) {
            (false, false) => size,
            (true, true) => size.reverse(),
            (negative, _) => {
                if negative {
                    Ordering::Less
                } else {
                    Ordering::Greater
                }
            }
        }
    }
}

impl Object for Big {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn custom_cmp(self: &Arc<Self>, other: &DynObject) -> Option<Ordering> {
        Some(self.against(other.downcast_ref::<Self>()?))
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The template's value of a number that JSON's own type does not hold, by `exact::text`.
pub(super) fn value(text: &str) -> Value {
    if let Ok(integer) = text.parse::<i128>() {
        return Value::from(integer);
    }
    if text.ends_with(|last: char| last.is_ascii_digit()) {
        return Value::from_object(Big(text.to_owned()));
    }
    Value::from(text.parse::<f64>().unwrap_or(f64::NAN))
}

/// The integer, if it is one that 128 bits do not hold.
pub(super) fn big(value: &Value) -> Option<&Big> {
    value.downcast_object_ref()
}

/// How two numbers stand of which at least one is such an integer; `None` if none is, or the other is no number.
pub(super) fn order(left: &Value, right: &Value) -> Option<Option<Ordering>> {
    let alone = |big: &Big, other: &Value| match (whole(other), float_of(other)) {
        (Some(_), _) => Some(Some(if big.is_negative() { Ordering::Less } else { Ordering::Greater })),
        (None, Some(float)) => Some(big.0.parse::<f64>().unwrap_or(f64::NAN).partial_cmp(&float)),
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

    #[test]
    fn integers_of_any_size_have_their_order() {
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
                let found = order(left, right);
                let expected = (big(left).is_some() || big(right).is_some()).then_some(Some(n.cmp(&m)));
                assert_eq!(found, expected, "{left} {right}");
            }
        }
        assert_eq!(order(&value(&long), &Value::from("1")), None);
        assert_eq!(value(&long).to_string(), long);
        assert_eq!(
            value("-170141183460469231731687303715884105728").to_string(),
            "-170141183460469231731687303715884105728"
        );
        assert_eq!(float_of(&value("-Infinity")), Some(f64::NEG_INFINITY));
    }
}
