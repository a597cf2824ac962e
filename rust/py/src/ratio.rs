//! Binds `tracegrad_core::ratio`: terms and a plan in, weights, keeps and statistics out.

use numpy::{IntoPyArray, PyArray1, PyArrayMethods, PyReadonlyArray1, PyUntypedArray};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tracegrad_core::ratio::{self, Agg, Gate, Level, Missing, Over, Plan, Real, Shape, Stat, Terms, Weight, When};
use tracegrad_core::{Error, Kind};

use crate::errors::to_python;

/// (over, agg, kept)
type PlainLevel = (String, Option<String>, bool);
/// (stat, level, low, high, when, scope)
type PlainGate = (String, PlainLevel, f64, f64, String, String);
/// (level, (shape, low, high), when)
type PlainWeight = (PlainLevel, (String, f64, f64), String);
/// weight, keep, sums, maxima, unit sums
type PlainCorrected<'py> =
    (Bound<'py, PyUntypedArray>, Bound<'py, PyArray1<bool>>, Bound<'py, PyDict>, Bound<'py, PyDict>, Vec<(f64, f64)>);

#[derive(FromPyObject)]
enum Floats<'py> {
    Single(PyReadonlyArray1<'py, f32>),
    Double(PyReadonlyArray1<'py, f64>),
}

/// Weights and gates of flat terms; `rollout` says whether it is computed in f32 or f64.
#[pyfunction]
#[pyo3(signature = (old, rollout, trace, turn, advantages, gates, weights, missing))]
#[allow(clippy::too_many_arguments, clippy::needless_pass_by_value)]
fn correct_terms<'py>(
    py: Python<'py>,
    old: Option<Bound<'py, PyAny>>,
    rollout: Floats<'py>,
    trace: PyReadonlyArray1<'py, i64>,
    turn: Option<PyReadonlyArray1<'py, i64>>,
    advantages: Option<Bound<'py, PyAny>>,
    gates: Vec<PlainGate>,
    weights: Vec<PlainWeight>,
    missing: &str,
) -> PyResult<PlainCorrected<'py>> {
    let plan = Plan {
        gates: gates.iter().map(gate).collect::<Result<_, _>>().map_err(|error| to_python(py, &error))?,
        weights: weights.iter().map(weight).collect::<Result<_, _>>().map_err(|error| to_python(py, &error))?,
        missing: named("missing", missing, &MISSING).map_err(|error| to_python(py, &error))?,
    };
    let (trace, turn) = (trace.as_slice()?, turn.as_ref().map(|turn| turn.as_slice()).transpose()?);
    match rollout {
        Floats::Single(rollout) => run::<f32>(py, old, &rollout, trace, turn, advantages, &plan),
        Floats::Double(rollout) => run::<f64>(py, old, &rollout, trace, turn, advantages, &plan),
    }
}

fn run<'py, F: Real + numpy::Element>(
    py: Python<'py>,
    old: Option<Bound<'py, PyAny>>,
    rollout: &PyReadonlyArray1<'py, F>,
    trace: &[i64],
    turn: Option<&[i64]>,
    advantages: Option<Bound<'py, PyAny>>,
    plan: &Plan,
) -> PyResult<PlainCorrected<'py>> {
    let old: Option<PyReadonlyArray1<'py, F>> = old.map(|array| array.extract()).transpose()?;
    let advantages: Option<PyReadonlyArray1<'py, F>> = advantages.map(|array| array.extract()).transpose()?;
    let terms = Terms {
        old: old.as_ref().map(PyReadonlyArray1::as_slice).transpose()?,
        rollout: rollout.as_slice()?,
        trace,
        turn,
        advantages: advantages.as_ref().map(PyReadonlyArray1::as_slice).transpose()?,
    };
    let found = py.detach(|| ratio::correct(terms, plan)).map_err(|error| to_python(py, &error))?;
    let (sums, maxima) = (PyDict::new(py), PyDict::new(py));
    for (name, value) in found.stats.sums() {
        sums.set_item(name, value)?;
    }
    for (name, value) in found.stats.maxima() {
        maxima.set_item(name, value)?;
    }
    let weight = found.weight.into_pyarray(py).as_untyped().clone();
    Ok((weight, found.keep.into_pyarray(py), sums, maxima, found.unit_sums))
}

/// For each term how many (kept) terms share its id, and how many ids have one.
#[pyfunction]
#[pyo3(signature = (ids, keep=None))]
#[allow(clippy::needless_pass_by_value)]
fn count_terms<'py>(
    py: Python<'py>,
    ids: PyReadonlyArray1<'py, i64>,
    keep: Option<PyReadonlyArray1<'py, bool>>,
) -> PyResult<(Bound<'py, PyArray1<i64>>, i64)> {
    let (ids, keep) = (ids.as_slice()?, keep.as_ref().map(|keep| keep.as_slice()).transpose()?);
    let counts = py.detach(|| ratio::count(ids, keep));
    Ok((counts.terms.into_pyarray(py), counts.units))
}

const OVER: [(&str, Over); 3] = [("token", Over::Token), ("turn", Over::Turn), ("trace", Over::Trace)];
const AGG: [(&str, Agg); 3] = [("sum", Agg::Sum), ("mean", Agg::Mean), ("max", Agg::Max)];
const STAT: [(&str, Stat); 4] = [("ratio", Stat::Ratio), ("k1", Stat::K1), ("k2", Stat::K2), ("k3", Stat::K3)];
const WHEN: [(&str, When); 5] = [
    ("always", When::Always),
    ("A>0", When::Positive),
    ("A>=0", When::NonNegative),
    ("A<0", When::Negative),
    ("A<=0", When::NonPositive),
];
const MISSING: [(&str, Missing); 3] =
    [("mask", Missing::Mask), ("neutral", Missing::Neutral), ("refuse", Missing::Refuse)];

fn named<T: Copy>(what: &str, name: &str, valid: &[(&str, T)]) -> Result<T, Error> {
    valid.iter().find(|(known, _)| *known == name).map(|&(_, value)| value).ok_or_else(|| {
        let names: Vec<&str> = valid.iter().map(|(known, _)| *known).collect();
        Error::new(Kind::Argument, format!("{what} is '{name}'")).cure(format!("It is one of {}", names.join(", ")))
    })
}

fn level((over, agg, kept): &PlainLevel) -> Result<Level, Error> {
    let agg = agg.as_deref().map_or(Ok(Agg::Sum), |agg| named("agg", agg, &AGG))?;
    Ok(Level { over: named("over", over, &OVER)?, agg, kept: *kept })
}

fn gate((stat, plain, low, high, when, scope): &PlainGate) -> Result<Gate, Error> {
    Ok(Gate {
        stat: named("stat", stat, &STAT)?,
        level: level(plain)?,
        low: *low,
        high: *high,
        when: named("when", when, &WHEN)?,
        scope: named("scope", scope, &OVER)?,
    })
}

fn weight((plain, (shape, low, high), when): &PlainWeight) -> Result<Weight, Error> {
    let shapes =
        [("identity", Shape::Identity), ("clamp", Shape::Clamp(*low, *high)), ("window", Shape::Window(*low, *high))];
    Ok(Weight { level: level(plain)?, shape: named("shape", shape, &shapes)?, when: named("when", when, &WHEN)? })
}

/// Adds this file's names to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("LOG_RATIO_LIMIT", ratio::LOG_RATIO_LIMIT)?;
    module.add_function(wrap_pyfunction!(correct_terms, module)?)?;
    module.add_function(wrap_pyfunction!(count_terms, module)?)
}
