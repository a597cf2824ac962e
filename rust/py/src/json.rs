//! Converts Python objects to JSON values: plain objects directly, all others by `json.dumps`.

use crate::errors::to_python;
use pyo3::exceptions::{PyRecursionError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use serde::de::DeserializeOwned;
use serde_json::{Map, Number, Value};
use tracegrad_core::{Error, Kind, Result, json_number};

/// Largest nesting depth that is converted directly, the same as in `serde_json`.
const DEPTH: usize = 126;

/// Converts `object` to JSON. Errors call it `name`.
pub fn read(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Value> {
    match plain(object, 0) {
        Some(value) => Ok(value),
        None => dumped(name, object),
    }
}

/// Converts a value of Python's own types with a unique JSON form. Returns `None` for any other value.
fn plain(object: &Bound<'_, PyAny>, depth: usize) -> Option<Value> {
    if depth > DEPTH {
        return None;
    }
    if let Ok(text) = object.cast_exact::<PyString>() {
        return Some(Value::String(text.to_str().ok()?.to_owned()));
    }
    if let Ok(dict) = object.cast_exact::<PyDict>() {
        let mut map = Map::with_capacity(dict.len());
        for (key, item) in dict.iter() {
            let key = key.cast_exact::<PyString>().ok()?;
            map.insert(key.to_str().ok()?.to_owned(), plain(&item, depth + 1)?);
        }
        return Some(Value::Object(map));
    }
    if let Ok(list) = object.cast_exact::<PyList>() {
        return list.iter().map(|item| plain(&item, depth + 1)).collect();
    }
    if let Ok(tuple) = object.cast_exact::<PyTuple>() {
        return tuple.iter().map(|item| plain(&item, depth + 1)).collect();
    }
    scalar(object)
}

fn scalar(object: &Bound<'_, PyAny>) -> Option<Value> {
    if object.is_none() {
        Some(Value::Null)
    } else if let Ok(flag) = object.cast_exact::<PyBool>() {
        Some(Value::Bool(flag.is_true()))
    } else if let Ok(integer) = object.cast_exact::<PyInt>() {
        let signed = integer.extract::<i64>().map(Number::from);
        let number = signed.or_else(|_| integer.extract::<u64>().map(Number::from)).ok().map(Value::Number);
        number.or_else(|| json_number::number(integer.str().ok()?.to_str().ok()?))
    } else {
        Number::from_f64(object.cast_exact::<PyFloat>().ok()?.value()).map(Value::Number)
    }
}

/// Returns whether [`read`] would return `value`, without building it.
pub fn is(object: &Bound<'_, PyAny>, value: &Value) -> bool {
    match value {
        Value::String(expected) => {
            object.cast_exact::<PyString>().is_ok_and(|text| text.to_str().is_ok_and(|t| t == expected))
        }
        Value::Object(map) => object.cast_exact::<PyDict>().is_ok_and(|dict| {
            let same_key = |key: &Bound<'_, PyAny>, expected: &str| {
                key.cast_exact::<PyString>().is_ok_and(|key| key.to_str().is_ok_and(|key| key == expected))
            };
            let mut pairs = dict.iter().zip(map);
            dict.len() == map.len()
                && pairs.all(|((key, item), (expected, value))| same_key(&key, expected) && is(&item, value))
        }),
        Value::Array(items) => object.cast_exact::<PyList>().is_ok_and(|list| {
            list.len() == items.len() && list.iter().zip(items).all(|(item, value)| is(&item, value))
        }),
        // 0.0 differs from -0.0.
        other => scalar(object).is_some_and(|value| value == *other && bits(&value) == bits(other)),
    }
}

fn bits(value: &Value) -> Option<u64> {
    value.as_f64().map(f64::to_bits)
}

/// Converts an object with Python's json module, which also accepts subclasses and explains what it rejects.
fn dumped(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Value> {
    let py = object.py();
    let text = py.import(intern!(py, "json"))?.call_method1(intern!(py, "dumps"), (object,)).map_err(|error| {
        if !error.is_instance_of::<PyTypeError>(py)
            && !error.is_instance_of::<PyValueError>(py)
            && !error.is_instance_of::<PyRecursionError>(py)
        {
            return error;
        }
        let error = Error::new(
            Kind::Argument,
            "TG-BORDER-009",
            format!("{name} cannot be written as JSON: {}", error.value(py)),
        )
        .why("Templates see plain JSON")
        .fix(format!("Pass strings, numbers, lists and dicts in {name}"));
        to_python(py, &error)
    })?;
    let text = text.cast_into::<PyString>()?;
    parsed(name, text.to_str()?).map_err(|error| to_python(py, &error))
}

/// Parses JSON text.
pub fn parsed<T: DeserializeOwned>(name: &str, json: &str) -> Result<T> {
    serde_json::from_str(&json_number::replace_big_numbers(json)).map_err(|error| refused(name, &error))
}

/// Creates the error for text that is not JSON, or does not have the required form.
pub fn refused(name: &str, error: &serde_json::Error) -> Error {
    Error::new(Kind::Argument, "TG-BORDER-010", format!("{name} cannot be written as JSON text: {error}"))
        .why("Templates see plain JSON: no NaN, no lone surrogates, no nesting deeper than 128")
        .fix(format!("Replace what is not JSON in {name}"))
}
