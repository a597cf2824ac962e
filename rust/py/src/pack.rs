//! Python bindings of `tracegrad_core::pack`, for numpy arrays.

use crate::bool_array::Flags;
use crate::border::without_gil;
use numpy::{Element, IntoPyArray, PyArray1, PyArrayMethods, PyReadonlyArray1};
use pyo3::prelude::*;
use tracegrad_core::pack::{self, Branches, Cost, Gather, PackRequest, Plan, RowUnit, Tokens, TooLong};
use tracegrad_core::{Error, Kind};

type Column<'py, T> = Bound<'py, PyArray1<T>>;

fn too_long_named(name: &str) -> Result<TooLong, Error> {
    match name {
        "error" => Ok(TooLong::Error),
        "drop" => Ok(TooLong::Drop),
        "truncate" => Ok(TooLong::Truncate),
        _ => Err(Error::new(Kind::Argument, "TG-BORDER-011", format!("too_long is '{name}'"))
            .why("It says what is done with a trace that does not fit a row")
            .fix("Pass 'error', 'drop' or 'truncate'")),
    }
}

/// Returns length and terms of each branch, the terms lost by each trace, and the traces that are too long. `shared`
/// matters only with `whole_traces`.
#[pyfunction]
#[expect(clippy::too_many_arguments, clippy::type_complexity, reason = "a border of arrays")]
fn pack_measure<'py>(
    py: Python<'py>,
    cu_seqlens: PyReadonlyArray1<'py, i64>,
    trace: PyReadonlyArray1<'py, i32>,
    ids: PyReadonlyArray1<'py, i32>,
    trainable: Flags<'py>,
    names: Vec<String>,
    tokens_per_row: usize,
    whole_traces: bool,
    shared: bool,
    too_long: &str,
) -> PyResult<(Column<'py, i32>, Column<'py, i32>, Column<'py, i64>, Column<'py, i32>)> {
    let branches = Branches {
        cu_seqlens: cu_seqlens.as_slice()?,
        trace: trace.as_slice()?,
        ids: ids.as_slice()?,
        trainable: trainable.as_slice()?,
        names: &names,
    };
    let unit = match (whole_traces, shared) {
        (false, _) => RowUnit::Branch,
        (true, false) => RowUnit::Trace,
        (true, true) => RowUnit::Tree,
    };
    let measure = || pack::measure(branches, tokens_per_row, unit, too_long_named(too_long)?);
    let out = without_gil(py, Kind::Fault, "packing", measure)?;
    Ok((
        out.length.into_pyarray(py),
        out.terms.into_pyarray(py),
        out.lost.into_pyarray(py),
        out.too_long.into_pyarray(py),
    ))
}

/// Returns rank, row and order of each branch, and the rows and load of each step and rank.
///
/// The last five arrays describe prefix sharing per step: whether it is used, whether a trace needs it, the tokens
/// without it and with it, and the ratio of the costs.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "a border of arrays")]
fn pack_place<'py>(
    py: Python<'py>,
    ids: PyReadonlyArray1<'py, i32>,
    cu_seqlens: PyReadonlyArray1<'py, i64>,
    length: PyReadonlyArray1<'py, i32>,
    terms: PyReadonlyArray1<'py, i32>,
    trace: PyReadonlyArray1<'py, i32>,
    step: PyReadonlyArray1<'py, i32>,
    ranks: usize,
    tokens_per_row: usize,
    whole_traces: bool,
    cost: (f64, f64, f64),
    least_gain: Option<f64>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let request = PackRequest {
        ids: ids.as_slice()?,
        cu_seqlens: cu_seqlens.as_slice()?,
        length: length.as_slice()?,
        terms: terms.as_slice()?,
        trace: trace.as_slice()?,
        step: step.as_slice()?,
        ranks,
        tokens_per_row,
        whole_traces,
        cost: Cost { token: cost.0, pair: cost.1, term: cost.2 },
        min_sharing_gain: least_gain,
    };
    let out = without_gil(py, Kind::Fault, "packing", || pack::place(request))?;
    Ok(vec![
        out.rank.into_pyarray(py).into_any(),
        out.row.into_pyarray(py).into_any(),
        out.order.into_pyarray(py).into_any(),
        out.rows.into_pyarray(py).into_any(),
        out.load.into_pyarray(py).into_any(),
        out.gain.iter().map(|gain| gain.shared).collect::<Vec<_>>().into_pyarray(py).into_any(),
        out.gain.iter().map(|gain| gain.needed).collect::<Vec<_>>().into_pyarray(py).into_any(),
        out.gain.iter().map(|gain| gain.tokens).collect::<Vec<_>>().into_pyarray(py).into_any(),
        out.gain.iter().map(|gain| gain.tree_tokens).collect::<Vec<_>>().into_pyarray(py).into_any(),
        out.gain.iter().map(|gain| gain.ratio).collect::<Vec<_>>().into_pyarray(py).into_any(),
    ])
}

/// Returns the rows of one rank as the arrays of `tracegrad_core::pack::Layout`, in its order.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "a border of arrays")]
fn pack_lay<'py>(
    py: Python<'py>,
    ids: PyReadonlyArray1<'py, i32>,
    trainable: Flags<'py>,
    inv_temperature: PyReadonlyArray1<'py, f32>,
    cu_seqlens: PyReadonlyArray1<'py, i64>,
    length: PyReadonlyArray1<'py, i32>,
    step: PyReadonlyArray1<'py, i32>,
    row: PyReadonlyArray1<'py, i32>,
    order: PyReadonlyArray1<'py, i32>,
    rows: PyReadonlyArray1<'py, i32>,
    shared: Flags<'py>,
    multiple: usize,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let tokens = Tokens {
        ids: ids.as_slice()?,
        trainable: trainable.as_slice()?,
        inv_temperature: inv_temperature.as_slice()?,
        cu_seqlens: cu_seqlens.as_slice()?,
    };
    let plan = Plan {
        length: length.as_slice()?,
        step: step.as_slice()?,
        row: row.as_slice()?,
        order: order.as_slice()?,
        rows: rows.as_slice()?,
        shared: shared.as_slice()?,
    };
    let out = without_gil(py, Kind::Fault, "packing", || pack::write_rows(tokens, plan, multiple))?;
    Ok(vec![
        out.ids.into_pyarray(py).into_any(),
        out.positions.into_pyarray(py).into_any(),
        out.tree_end.into_pyarray(py).into_any(),
        out.cu_tokens.into_pyarray(py).into_any(),
        out.predictor.into_pyarray(py).into_any(),
        out.target.into_pyarray(py).into_any(),
        out.inv_temperature.into_pyarray(py).into_any(),
        out.row.into_pyarray(py).into_any(),
        out.term.into_pyarray(py).into_any(),
        out.cu_logit_rows.into_pyarray(py).into_any(),
        out.cu_row_terms.into_pyarray(py).into_any(),
        out.cu_rows.into_pyarray(py).into_any(),
        out.origin.into_pyarray(py).into_any(),
        out.branch.into_pyarray(py).into_any(),
        out.cu_terms.into_pyarray(py).into_any(),
    ])
}

/// A column of tokens or branches.
#[derive(FromPyObject)]
enum Values<'py> {
    Byte(PyReadonlyArray1<'py, u8>),
    Narrow(PyReadonlyArray1<'py, i32>),
    Wide(PyReadonlyArray1<'py, i64>),
    Float(PyReadonlyArray1<'py, f32>),
}

/// Returns columns for the terms of a layout: the columns of their tokens, then those of their branches.
#[pyfunction]
fn pack_gather<'py>(
    py: Python<'py>,
    origin: PyReadonlyArray1<'py, i64>,
    branch: PyReadonlyArray1<'py, i32>,
    of_tokens: Vec<Values<'py>>,
    of_branches: Vec<Values<'py>>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let (origin, branch) = (origin.as_slice()?, branch.as_slice()?);
    let gather = without_gil(py, Kind::Fault, "packing", || Ok(Gather::of(origin, branch)))?;
    let of_tokens = of_tokens.iter().map(|values| (values, true));
    let all = of_tokens.chain(of_branches.iter().map(|values| (values, false)));
    all.map(|(values, of_tokens)| match values {
        Values::Byte(values) => gathered(py, &gather, values, origin.len(), of_tokens),
        Values::Narrow(values) => gathered(py, &gather, values, origin.len(), of_tokens),
        Values::Wide(values) => gathered(py, &gather, values, origin.len(), of_tokens),
        Values::Float(values) => gathered(py, &gather, values, origin.len(), of_tokens),
    })
    .collect()
}

fn gathered<'py, T: Element + Copy + Default>(
    py: Python<'py>,
    gather: &Gather,
    values: &PyReadonlyArray1<'py, T>,
    terms: usize,
    of_tokens: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let values = values.as_slice()?;
    // numpy allocates large pages, which are filled several times as fast.
    let out = PyArray1::<T>::zeros(py, terms, false);
    {
        let mut out = out.try_readwrite()?;
        let out = out.as_slice_mut()?;
        without_gil(py, Kind::Fault, "packing", || {
            if of_tokens {
                gather.of_tokens(values, out);
            } else {
                gather.of_branches(values, out);
            }
            Ok(())
        })?;
    }
    Ok(out.into_any())
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(pack_measure, module)?)?;
    module.add_function(wrap_pyfunction!(pack_place, module)?)?;
    module.add_function(wrap_pyfunction!(pack_lay, module)?)?;
    module.add_function(wrap_pyfunction!(pack_gather, module)?)
}
