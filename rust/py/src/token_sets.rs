//! Python bindings of `tracegrad_core::token_sets`.

use crate::border::without_gil;
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use tracegrad_core::Kind;
use tracegrad_core::token_sets::{self, View};

type Column<'py, T> = Bound<'py, PyArray1<T>>;

const TASK: &str = "the sets of token ids";

/// Returns (starts, data) of rows of ids.
#[pyfunction]
fn token_sets_encode<'py>(
    py: Python<'py>,
    offsets: PyReadonlyArray1<'py, i64>,
    values: PyReadonlyArray1<'py, i32>,
) -> PyResult<(Column<'py, i64>, Column<'py, u8>)> {
    let (offsets, values) = (offsets.as_slice()?, values.as_slice()?);
    let sets = without_gil(py, Kind::Fault, TASK, || token_sets::encode(offsets, values))?;
    Ok((sets.starts.into_pyarray(py), sets.data.into_pyarray(py)))
}

/// Raises an error unless starts and data are the sets of `count` tokens.
#[pyfunction]
fn token_sets_check<'py>(
    py: Python<'py>,
    starts: PyReadonlyArray1<'py, i64>,
    data: PyReadonlyArray1<'py, u8>,
    count: usize,
) -> PyResult<()> {
    let (starts, data) = (starts.as_slice()?, data.as_slice()?);
    without_gil(py, Kind::Fault, TASK, || View::new(starts, data, count)?.check())
}

/// Returns (offsets, ids) of the sets of some tokens.
#[pyfunction]
fn token_sets_decode<'py>(
    py: Python<'py>,
    starts: PyReadonlyArray1<'py, i64>,
    data: PyReadonlyArray1<'py, u8>,
    count: usize,
    tokens: PyReadonlyArray1<'py, i64>,
) -> PyResult<(Column<'py, i64>, Column<'py, i32>)> {
    let (starts, data, tokens) = (starts.as_slice()?, data.as_slice()?, tokens.as_slice()?);
    let (offsets, ids) = without_gil(py, Kind::Fault, TASK, || View::new(starts, data, count)?.decode(tokens))?;
    Ok((offsets.into_pyarray(py), ids.into_pyarray(py)))
}

/// Returns a number for the set of each of some tokens: 0 without a set, and the same for equal sets.
#[pyfunction]
fn token_sets_keys<'py>(
    py: Python<'py>,
    starts: PyReadonlyArray1<'py, i64>,
    data: PyReadonlyArray1<'py, u8>,
    count: usize,
    tokens: PyReadonlyArray1<'py, i64>,
) -> PyResult<Column<'py, i64>> {
    let (starts, data, tokens) = (starts.as_slice()?, data.as_slice()?, tokens.as_slice()?);
    let keys = without_gil(py, Kind::Fault, TASK, || View::new(starts, data, count)?.keys(tokens))?;
    Ok(keys.into_pyarray(py))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(token_sets_encode, module)?)?;
    module.add_function(wrap_pyfunction!(token_sets_check, module)?)?;
    module.add_function(wrap_pyfunction!(token_sets_decode, module)?)?;
    module.add_function(wrap_pyfunction!(token_sets_keys, module)?)
}
