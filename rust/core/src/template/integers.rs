//! Integers that 128 bits do not hold: they are printed, compared and written as JSON, not calculated with.
//!
//! Made by `value`; called by `comparisons`, `json`, `predicates` and `charge`.

use minijinja::value::{DynObject, Object, ObjectRepr, Value};
use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

/// An integer as it is written.
#[derive(Debug)]
pub(super) struct Big(String);

impl Big {
    /// The integer nearest to it that a float is.
    pub fn float(&self) -> f64 {
        self.0.parse().unwrap_or(f64::NAN)
    }

    /// How many bytes its text has.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_negative(&self) -> bool {
        self.0.starts_with('-')
    }

    pub fn against(&self, other: &Self) -> Ordering {
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
