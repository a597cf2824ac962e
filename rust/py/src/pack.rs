//! Python bindings of `tracegrad_core::pack`, for numpy arrays.

use crate::bool_array::Flags;
use crate::border::without_gil;
use numpy::{Element, IntoPyArray, PyArray1, PyArrayMethods, PyReadonlyArray1};
use pyo3::prelude::*;
use tracegrad_core::pack::{
    self, Branches, Cost, Gather, PackRequest, Penalized, Plan, RowUnit, Targets, Tokens, TooLong,
};
use tracegrad_core::{Error, Kind};

type Column<'py, T> = Bound<'py, PyArray1<T>>;

fn too_long_named(name: &str) -> Result<TooLong, Error> {
    match name {
        "error" => Ok(TooLong::Error),
        "drop" => Ok(TooLong::Drop),
        "truncate" => Ok(TooLong::Truncate),
        _ => Err(Error::new(Kind::Argument, "TG-BORDER-011", format!("too_long is '{name}'"))
            .why("It decides how a trace that does not fit a row is treated")
            .fix("Pass 'error', 'drop' or 'truncate'")),
    }
}

/// The sizes of branches, a dict in Python.
#[derive(IntoPyObject)]
struct BranchSizes<'py> {
    length: Column<'py, i32>,
    terms: Column<'py, i32>,
    lost: Column<'py, i64>,
    too_long: Column<'py, i32>,
}

/// Returns length and trained tokens of each branch, the trained tokens lost by each trace, and the traces that are too
/// long. `shared` matters only with `whole_traces`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "a border of arrays")]
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
) -> PyResult<BranchSizes<'py>> {
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
    Ok(BranchSizes {
        length: out.length.into_pyarray(py),
        terms: out.terms.into_pyarray(py),
        lost: out.lost.into_pyarray(py),
        too_long: out.too_long.into_pyarray(py),
    })
}

/// FLOP of a token, of a pair of tokens and of a trained token: `PlacementCost` in Python.
#[derive(FromPyObject)]
struct PlainCost {
    token: f64,
    pair: f64,
    term: f64,
}

/// The places of branches, a dict in Python.
#[derive(IntoPyObject)]
struct Placement<'py> {
    rank: Column<'py, i32>,
    row: Column<'py, i32>,
    order: Column<'py, i32>,
    rows: Column<'py, i32>,
    load: Column<'py, f64>,
    shared: Column<'py, bool>,
    needed: Column<'py, bool>,
    tokens: Column<'py, u64>,
    tree_tokens: Column<'py, u64>,
    ratio: Column<'py, f64>,
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
    cost: PlainCost,
    least_gain: Option<f64>,
) -> PyResult<Placement<'py>> {
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
        cost: Cost { token: cost.token, pair: cost.pair, term: cost.term },
        min_sharing_gain: least_gain,
    };
    let out = without_gil(py, Kind::Fault, "packing", || pack::place(request))?;
    let gain = |pick: fn(&pack::Gain) -> bool| out.gain.iter().map(pick).collect::<Vec<_>>().into_pyarray(py);
    let tokens = |pick: fn(&pack::Gain) -> u64| out.gain.iter().map(pick).collect::<Vec<_>>().into_pyarray(py);
    Ok(Placement {
        shared: gain(|gain| gain.shared),
        needed: gain(|gain| gain.needed),
        tokens: tokens(|gain| gain.tokens),
        tree_tokens: tokens(|gain| gain.tree_tokens),
        ratio: out.gain.iter().map(|gain| gain.ratio).collect::<Vec<_>>().into_pyarray(py),
        rank: out.rank.into_pyarray(py),
        row: out.row.into_pyarray(py),
        order: out.order.into_pyarray(py),
        rows: out.rows.into_pyarray(py),
        load: out.load.into_pyarray(py),
    })
}

/// The rows of one rank, a dict in Python: the arrays of `tracegrad_core::pack::Layout`.
#[derive(IntoPyObject)]
struct RowLayout<'py> {
    ids: Column<'py, i32>,
    positions: Column<'py, i32>,
    tree_end: Column<'py, i32>,
    cu_tokens: Column<'py, i64>,
    read: Column<'py, i32>,
    target: Column<'py, i32>,
    inv_temperature: Column<'py, f32>,
    row: Column<'py, i32>,
    term: Column<'py, i32>,
    cu_heads: Column<'py, i64>,
    cu_row_terms: Column<'py, i64>,
    cu_rows: Column<'py, i64>,
    origin: Column<'py, i64>,
    branch: Column<'py, i32>,
    cu_terms: Column<'py, i64>,
}

/// Returns the rows of one rank.
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
) -> PyResult<RowLayout<'py>> {
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
    Ok(RowLayout {
        ids: out.ids.into_pyarray(py),
        positions: out.positions.into_pyarray(py),
        tree_end: out.tree_end.into_pyarray(py),
        cu_tokens: out.cu_tokens.into_pyarray(py),
        read: out.predictor.into_pyarray(py),
        target: out.target.into_pyarray(py),
        inv_temperature: out.inv_temperature.into_pyarray(py),
        row: out.row.into_pyarray(py),
        term: out.term.into_pyarray(py),
        cu_heads: out.cu_logit_rows.into_pyarray(py),
        cu_row_terms: out.cu_row_terms.into_pyarray(py),
        cu_rows: out.cu_rows.into_pyarray(py),
        origin: out.origin.into_pyarray(py),
        branch: out.branch.into_pyarray(py),
        cu_terms: out.cu_terms.into_pyarray(py),
    })
}

/// The penalties of generations: `Penalties` in Python, by attribute.
#[derive(FromPyObject)]
struct PlainPenalties<'py> {
    repetition: PyReadonlyArray1<'py, f32>,
    presence: PyReadonlyArray1<'py, f32>,
    frequency: PyReadonlyArray1<'py, f32>,
    bias_ends: PyReadonlyArray1<'py, i64>,
    bias_ids: PyReadonlyArray1<'py, i32>,
    bias: PyReadonlyArray1<'py, f32>,
}

/// The changed logits of trained tokens, a dict in Python.
#[derive(IntoPyObject)]
struct LogitChanges<'py> {
    offsets: Column<'py, i64>,
    ids: Column<'py, i32>,
    before: Column<'py, f32>,
    factor: Column<'py, f32>,
    after: Column<'py, f32>,
}

/// Returns the changed logits of trained tokens, and all ids of those with support.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "a border of arrays")]
fn pack_penalties<'py>(
    py: Python<'py>,
    ids: PyReadonlyArray1<'py, i32>,
    cu_seqlens: PyReadonlyArray1<'py, i64>,
    turn: PyReadonlyArray1<'py, i32>,
    penalties: PlainPenalties<'py>,
    tokens: PyReadonlyArray1<'py, i64>,
    of_tokens: PyReadonlyArray1<'py, i32>,
    offsets: PyReadonlyArray1<'py, i64>,
    support: PyReadonlyArray1<'py, i32>,
) -> PyResult<LogitChanges<'py>> {
    let of = Penalized {
        ids: ids.as_slice()?,
        cu_seqlens: cu_seqlens.as_slice()?,
        turn: turn.as_slice()?,
        repetition: penalties.repetition.as_slice()?,
        presence: penalties.presence.as_slice()?,
        frequency: penalties.frequency.as_slice()?,
        bias_ends: penalties.bias_ends.as_slice()?,
        bias_ids: penalties.bias_ids.as_slice()?,
        bias: penalties.bias.as_slice()?,
    };
    let targets = Targets {
        tokens: tokens.as_slice()?,
        penalties: of_tokens.as_slice()?,
        offsets: offsets.as_slice()?,
        support: support.as_slice()?,
    };
    let out = without_gil(py, Kind::Fault, "packing", || pack::changes(of, targets))?;
    Ok(LogitChanges {
        offsets: out.offsets.into_pyarray(py),
        ids: out.ids.into_pyarray(py),
        before: out.before.into_pyarray(py),
        factor: out.factor.into_pyarray(py),
        after: out.after.into_pyarray(py),
    })
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
    module.add_function(wrap_pyfunction!(pack_penalties, module)?)?;
    module.add_function(wrap_pyfunction!(pack_gather, module)?)
}
