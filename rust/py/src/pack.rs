//! `tracegrad_core::pack` for numpy arrays.

use crate::errors::to_python;
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use tracegrad_core::pack::{self, Branches, Tokens, TooLong};
use tracegrad_core::{Error, Kind};

type Column<'py, T> = Bound<'py, PyArray1<T>>;

fn too_long_named(name: &str) -> Result<TooLong, Error> {
    match name {
        "refuse" => Ok(TooLong::Refuse),
        "drop" => Ok(TooLong::Drop),
        "truncate" => Ok(TooLong::Truncate),
        _ => Err(Error::new(Kind::Argument, format!("too_long is '{name}'"))
            .why("It says what is done with a trace that does not fit a row")
            .cure("Pass 'refuse', 'drop' or 'truncate'")),
    }
}

/// Length and terms of each branch, terms lost by each trace, traces too long.
#[pyfunction]
#[pyo3(signature = (cu_seqlens, trace, trainable, names, token_budget, whole_traces, too_long))]
#[expect(
    clippy::too_many_arguments,
    clippy::type_complexity,
    clippy::needless_pass_by_value,
    reason = "a border of arrays"
)]
fn pack_measure<'py>(
    py: Python<'py>,
    cu_seqlens: PyReadonlyArray1<'py, i64>,
    trace: PyReadonlyArray1<'py, i32>,
    trainable: PyReadonlyArray1<'py, bool>,
    names: Vec<String>,
    token_budget: usize,
    whole_traces: bool,
    too_long: &str,
) -> PyResult<(Column<'py, i32>, Column<'py, i32>, Column<'py, i64>, Column<'py, i32>)> {
    let branches = Branches {
        cu_seqlens: cu_seqlens.as_slice()?,
        trace: trace.as_slice()?,
        trainable: trainable.as_slice()?,
        names: &names,
    };
    let out = py
        .detach(|| pack::measure(branches, token_budget, whole_traces, too_long_named(too_long)?))
        .map_err(|error| to_python(py, &error))?;
    Ok((
        out.length.into_pyarray(py),
        out.terms.into_pyarray(py),
        out.lost.into_pyarray(py),
        out.too_long.into_pyarray(py),
    ))
}

/// Rank and row of each branch, and the rows of each step and rank.
#[pyfunction]
#[pyo3(signature = (length, trace, step, ranks, token_budget, whole_traces))]
#[expect(clippy::needless_pass_by_value, reason = "a border of arrays")]
fn pack_place<'py>(
    py: Python<'py>,
    length: PyReadonlyArray1<'py, i32>,
    trace: PyReadonlyArray1<'py, i32>,
    step: PyReadonlyArray1<'py, i32>,
    ranks: usize,
    token_budget: usize,
    whole_traces: bool,
) -> PyResult<(Column<'py, i32>, Column<'py, i32>, Column<'py, i32>)> {
    let (length, trace, step) = (length.as_slice()?, trace.as_slice()?, step.as_slice()?);
    let out = py
        .detach(|| pack::place(length, trace, step, ranks, token_budget, whole_traces))
        .map_err(|error| to_python(py, &error))?;
    Ok((out.rank.into_pyarray(py), out.row.into_pyarray(py), out.rows.into_pyarray(py)))
}

/// The rows of one rank as the arrays of `tracegrad_core::pack::Layout`, in its order.
#[pyfunction]
#[pyo3(signature = (ids, trainable, inv_temperature, cu_seqlens, length, step, row, rows, multiple))]
#[expect(clippy::too_many_arguments, clippy::needless_pass_by_value, reason = "a border of arrays")]
fn pack_lay<'py>(
    py: Python<'py>,
    ids: PyReadonlyArray1<'py, i32>,
    trainable: PyReadonlyArray1<'py, bool>,
    inv_temperature: PyReadonlyArray1<'py, f32>,
    cu_seqlens: PyReadonlyArray1<'py, i64>,
    length: PyReadonlyArray1<'py, i32>,
    step: PyReadonlyArray1<'py, i32>,
    row: PyReadonlyArray1<'py, i32>,
    rows: PyReadonlyArray1<'py, i32>,
    multiple: usize,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let tokens = Tokens {
        ids: ids.as_slice()?,
        trainable: trainable.as_slice()?,
        inv_temperature: inv_temperature.as_slice()?,
        cu_seqlens: cu_seqlens.as_slice()?,
    };
    let (length, step, row, rows) = (length.as_slice()?, step.as_slice()?, row.as_slice()?, rows.as_slice()?);
    let out =
        py.detach(|| pack::lay(tokens, length, step, row, rows, multiple)).map_err(|error| to_python(py, &error))?;
    Ok(vec![
        out.ids.into_pyarray(py).into_any(),
        out.positions.into_pyarray(py).into_any(),
        out.tree_end.into_pyarray(py).into_any(),
        out.cu_tokens.into_pyarray(py).into_any(),
        out.read.into_pyarray(py).into_any(),
        out.target.into_pyarray(py).into_any(),
        out.inv_temperature.into_pyarray(py).into_any(),
        out.row.into_pyarray(py).into_any(),
        out.term.into_pyarray(py).into_any(),
        out.cu_heads.into_pyarray(py).into_any(),
        out.cu_rows.into_pyarray(py).into_any(),
        out.origin.into_pyarray(py).into_any(),
        out.branch.into_pyarray(py).into_any(),
        out.cu_terms.into_pyarray(py).into_any(),
    ])
}

/// Adds this file's names to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(pack_measure, module)?)?;
    module.add_function(wrap_pyfunction!(pack_place, module)?)?;
    module.add_function(wrap_pyfunction!(pack_lay, module)?)
}
