//! Maps and lists as template values: small maps, and containers that keep their JSON text and carry provenance marks.

use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, Value, ValueKind};
use std::sync::{Arc, OnceLock};

/// A container whose JSON is remembered, and enclosed by marks where it has some.
#[derive(Debug)]
pub(super) struct Tagged {
    pub inner: Value,
    pub marks: Option<(String, String)>,
    /// The default `tojson`, enclosed.
    pub json: OnceLock<Value>,
}

impl Tagged {
    pub fn value(inner: Value, marks: Option<(String, String)>) -> Value {
        Value::from_object(Self { inner, marks, json: OnceLock::new() })
    }

    /// `text` between the marks of this container.
    pub fn enclose(&self, text: &str) -> String {
        match &self.marks {
            Some((open, close)) => format!("{open}{text}{close}"),
            None => text.to_owned(),
        }
    }
}

impl Object for Tagged {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        if self.inner.kind() == ValueKind::Map { ObjectRepr::Map } else { ObjectRepr::Seq }
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.inner.as_object()?.get_value(key)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.inner.as_object()?.get_value_by_str(key)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.inner.as_object().map_or(Enumerator::Empty, DynObject::enumerate)
    }
}

/// Keys of a map that is searched one by one.
const FEW: usize = 16;

/// A map of few keys: found faster by comparing than by hashing, and made without either.
#[derive(Debug)]
struct Record {
    fields: Vec<(Value, Value)>,
}

/// A map of `pairs`, whose keys differ, in their order.
pub(super) fn record<'a>(pairs: impl ExactSizeIterator<Item = (&'a str, Value)>) -> Value {
    if pairs.len() > FEW {
        return Value::from_pairs(pairs);
    }
    Value::from_object(Record { fields: pairs.map(|(key, value)| (Value::from(key), value)).collect() })
}

/// As [`record`]; of a key that is there twice the last value counts.
pub(super) fn merged<'a>(pairs: impl ExactSizeIterator<Item = (&'a str, Value)>) -> Value {
    if pairs.len() > FEW {
        return Value::from_pairs(pairs);
    }
    let mut fields: Vec<(Value, Value)> = Vec::with_capacity(pairs.len());
    for (key, value) in pairs {
        match fields.iter_mut().find(|(known, _)| known.as_str() == Some(key)) {
            Some(field) => field.1 = value,
            None => fields.push((Value::from(key), value)),
        }
    }
    Value::from_object(Record { fields })
}

/// The fields of a map that was made by [`record`], with marks or without.
pub(super) fn fields(map: &Value) -> Option<&[(Value, Value)]> {
    let inner = map.downcast_object_ref::<Tagged>().map_or(map, |tagged| &tagged.inner);
    inner.downcast_object_ref::<Record>().map(|record| record.fields.as_slice())
}

impl Object for Record {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.fields.iter().find(|(known, _)| known.as_str() == Some(key)).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::RevKeyValueIter(Box::new(self.fields.clone().into_iter()))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.fields.len())
    }
}
