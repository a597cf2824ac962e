//! Builds records from objects in Python's memory: JSON text, with lists of numbers from arrays, lists and logprob
//! objects.
//!
//! It makes one pass over the objects and creates no Python object per token. The record is decoded by the same readers
//! as records in files.

use crate::errors::to_python;
use numpy::{PyArray1, PyReadonlyArray1, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};
use pyo3::{intern, types::PyFloat};
use serde::Serialize;
use tracegrad_core::{Error, Kind};

/// Returns the JSON bytes of a record that is given as pieces: JSON text and, in between, numbers.
pub fn compose(row: &Bound<'_, PyList>) -> PyResult<Vec<u8>> {
    let mut json = Vec::new();
    for piece in row.iter() {
        row.py().check_signals()?;
        if let Ok(text) = piece.cast::<PyString>() {
            json.extend_from_slice(text.to_str()?.as_bytes());
        } else if let Ok(pair) = piece.cast::<PyTuple>() {
            chosen(&pair.get_item(0)?, &pair.get_item(1)?, &mut json)?;
        } else {
            numbers(&piece, 0, &mut json)?;
        }
    }
    Ok(json)
}

fn numbers(piece: &Bound<'_, PyAny>, depth: usize, json: &mut Vec<u8>) -> PyResult<()> {
    if depth > DEPTH {
        let error = Error::new(
            Kind::Argument,
            "TG-BORDER-005",
            format!("a list of numbers is nested deeper than {DEPTH} levels"),
        )
        .why("Numbers of tokens are lists, or lists of lists; this one may contain itself")
        .fix("Give one list with an entry per token");
        return Err(to_python(piece.py(), &error));
    }
    if let Ok(list) = piece.cast::<PyList>() {
        return items(list, depth, json);
    }
    if let Ok(array) = piece.cast::<PyUntypedArray>() {
        return array_items(array, json);
    }
    if piece.is_none() {
        json.extend_from_slice(b"null");
        return Ok(());
    }
    if piece.cast::<PyString>().is_ok() {
        return Err(no_number(piece));
    }
    let iterator = piece.call_method0(intern!(piece.py(), "__iter__")).map_err(|_| no_number(piece))?;
    items(&to_list(&iterator)?, depth, json)
}

/// Converts a sequence other than a list (vLLM's `ConstantList`, a tuple, an `array.array`) to a list.
fn to_list<'py>(iterator: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(iterator.py());
    for item in iterator.try_iter()? {
        list.append(item?)?;
    }
    Ok(list)
}

fn items(list: &Bound<'_, PyList>, depth: usize, json: &mut Vec<u8>) -> PyResult<()> {
    json.push(b'[');
    for (index, item) in list.iter().enumerate() {
        comma(index, json);
        if let Ok(float) = item.cast_exact::<PyFloat>() {
            real(float.value(), json);
        } else if let Ok(integer) = item.cast_exact::<PyInt>() {
            write(integer.extract::<i64>().map_err(|_| no_number(&item))?, json);
        } else if item.is_none() {
            json.extend_from_slice(b"null");
        } else if item.cast::<PyList>().is_ok()
            || item.cast::<PyUntypedArray>().is_ok()
            || item.cast::<PyTuple>().is_ok()
        {
            numbers(&item, depth + 1, json)?;
        } else {
            real(item.extract::<f64>().map_err(|_| no_number(&item))?, json);
        }
    }
    json.push(b']');
    Ok(())
}

/// Creates the error for a value that is not a number.
fn no_number(item: &Bound<'_, PyAny>) -> PyErr {
    let name = item.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
    let error = Error::new(Kind::Argument, "TG-BORDER-006", format!("a {name} that is not a number of 64 bits"))
        .why("It is needed for a list of numbers of a record")
        .fix("Give integers below 2^63, floats, or None where a number is not known");
    to_python(item.py(), &error)
}

/// Largest nesting depth of lists of numbers.
const DEPTH: usize = 16;

fn array_items(array: &Bound<'_, PyUntypedArray>, json: &mut Vec<u8>) -> PyResult<()> {
    macro_rules! of {
        ($($kind:ty => $put:expr),*) => {
            $(if let Ok(array) = array.extract::<PyReadonlyArray1<'_, $kind>>() {
                json.push(b'[');
                let Ok(values) = array.as_slice() else {
                    // A copy is contiguous.
                    return array_items(array.as_any().call_method0(intern!(array.py(), "copy"))?.cast()?, json);
                };
                for (index, value) in values.iter().enumerate() {
                    comma(index, json);
                    $put(*value, json);
                }
                json.push(b']');
                return Ok(());
            })*
        };
    }
    of!(
        i64 => write, i32 => write, f32 => real, f64 => real, u8 => write, u32 => write, i8 => write, i16 => write,
        u16 => write, u64 => write
    );
    if array.cast::<PyArray1<bool>>().is_ok() {
        // Bytes other than 0 and 1 become numbers, which the reader then rejects.
        return array_items(array.call_method1(intern!(array.py(), "view"), ("u1",))?.cast()?, json);
    }
    let error = Error::new(
        Kind::Argument,
        "TG-BORDER-007",
        format!("an array of {} with {} dimensions", array.dtype(), array.ndim()),
    )
    .why("It is needed for a list of numbers of a record")
    .fix("Give one dimension of integers or of float32 or float64");
    Err(to_python(array.py(), &error))
}

/// Writes a step for each sampled id: its logprob, or all ids of the step with logprob and rank if there are several.
/// The entry of a step is selected by id, never by its order.
fn chosen(ids: &Bound<'_, PyAny>, steps: &Bound<'_, PyAny>, json: &mut Vec<u8>) -> PyResult<()> {
    let py = ids.py();
    let ids = match ids.cast::<PyList>() {
        Ok(list) => list.clone(),
        Err(_) => to_list(&ids.call_method0(intern!(py, "__iter__"))?)?,
    };
    if let Ok(starts) = steps.getattr(intern!(py, "start_indices")) {
        return chosen_flat(&ids, steps, &starts.cast_into()?, json);
    }
    json.push(b'[');
    for (index, step) in steps.try_iter()?.enumerate() {
        comma(index, json);
        let step = step?;
        let Ok(step) = step.cast::<PyDict>() else {
            json.extend_from_slice(b"null");
            continue;
        };
        if step.len() > 1 {
            json.push(b'{');
            for (place, (id, entry)) in step.iter().enumerate() {
                comma(place, json);
                let rank = entry.getattr_opt(intern!(py, "rank"))?;
                listed(&id, logprob_of(&entry)?, rank.as_ref(), json)?;
            }
            json.push(b'}');
            continue;
        }
        match ids.get_item(index).ok().map(|id| step.get_item(id)).transpose()?.flatten() {
            Some(entry) => real(logprob_of(&entry)?, json),
            None => json.extend_from_slice(b"null"),
        }
    }
    json.push(b']');
    Ok(())
}

/// Returns the number of an entry: a float, or vLLM's `Logprob`.
fn logprob_of(entry: &Bound<'_, PyAny>) -> PyResult<f64> {
    match entry.cast_exact::<PyFloat>() {
        Ok(float) => Ok(float.value()),
        Err(_) => entry.getattr(intern!(entry.py(), "logprob"))?.extract(),
    }
}

/// Writes one of several ids of a step, as vLLM's `Logprob` is written.
fn listed(id: &Bound<'_, PyAny>, logprob: f64, rank: Option<&Bound<'_, PyAny>>, json: &mut Vec<u8>) -> PyResult<()> {
    json.push(b'"');
    write(id.extract::<i64>().map_err(|_| no_number(id))?, json);
    json.extend_from_slice(b"\":{\"logprob\":");
    real(logprob, json);
    if let Some(rank) = rank.and_then(|rank| rank.extract::<u32>().ok()) {
        json.extend_from_slice(b",\"rank\":");
        write(rank, json);
    }
    json.push(b'}');
    Ok(())
}

/// As `chosen`, for vLLM's `FlatLogprobs`: all entries are concatenated, with the start and end index of each step.
fn chosen_flat(
    ids: &Bound<'_, PyList>,
    flat: &Bound<'_, PyAny>,
    starts: &Bound<'_, PyList>,
    json: &mut Vec<u8>,
) -> PyResult<()> {
    let py = ids.py();
    let column = |name| -> PyResult<Bound<'_, PyList>> { Ok(flat.getattr(name)?.cast_into()?) };
    let (ends, listed_ids) = (column(intern!(py, "end_indices"))?, column(intern!(py, "token_ids"))?);
    let logprobs = column(intern!(py, "logprobs"))?;
    let ranks = column(intern!(py, "ranks")).ok();
    json.push(b'[');
    for index in 0..starts.len() {
        comma(index, json);
        let range: std::ops::Range<usize> = starts.get_item(index)?.extract()?..ends.get_item(index)?.extract()?;
        if range.len() > 1 {
            json.push(b'{');
            let first = range.start;
            for at in range {
                let id = listed_ids.get_item(at)?;
                // The sampled id is listed again if it is among the most probable ones.
                if at > first && id.eq(listed_ids.get_item(first)?)? {
                    continue;
                }
                comma(at - first, json);
                let rank = ranks.as_ref().and_then(|ranks| ranks.get_item(at).ok());
                listed(&id, logprobs.get_item(at)?.extract()?, rank.as_ref(), json)?;
            }
            json.push(b'}');
            continue;
        }
        let expected = ids.get_item(index).ok();
        let index_of_id = range.into_iter().find(|&at| match (&expected, listed_ids.get_item(at)) {
            (Some(expected), Ok(id)) => expected.eq(id).unwrap_or(false),
            _ => false,
        });
        match index_of_id {
            Some(at) => real(logprobs.get_item(at)?.extract::<f64>()?, json),
            None => json.extend_from_slice(b"null"),
        }
    }
    json.push(b']');
    Ok(())
}

fn comma(index: usize, json: &mut Vec<u8>) {
    if index > 0 {
        json.push(b',');
    }
}

fn write(value: impl Serialize, json: &mut Vec<u8>) {
    // Writing to a Vec cannot fail, and a number is always valid JSON.
    let _ = serde_json::to_writer(json, &value);
}

/// Writes a float with the shortest digits that read back as the same value. Values that JSON cannot represent become
/// the words that the readers accept.
fn real(value: impl Into<f64> + Serialize + Copy, json: &mut Vec<u8>) {
    match value.into() {
        wide if wide.is_finite() => write(value, json),
        wide if wide.is_nan() => write("NaN", json),
        wide => write(if wide > 0.0 { "Infinity" } else { "-Infinity" }, json),
    }
}
