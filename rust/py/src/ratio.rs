//! Python bindings of `tracegrad_core::ratio`: terms and a plan as input; weights, masks, scales and statistics as
//! output.

use crate::bool_array::Flags;
use crate::border::{with_python, without_gil};
use crate::errors::to_python;
use crate::traces::locked;
use numpy::{Element, IntoPyArray, PyArray1, PyArrayMethods, PyReadonlyArray1, PyUntypedArray};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Mutex;
use tracegrad_core::ratio::{
    self, Aggregation, AnyRejection, Blend, Exchange, Ids, Integers, Missing, Op, Over, Per, Plan, Policy, Ratio, Real,
    Reduce, Reduction, Rejection, RejectionBudget, Scale, Shape, Stat, Terms, Totals, Weight, When,
};
use tracegrad_core::{Error, Kind};

// The types below are read from attributes: the named tuples of `tracegrad.objective.core_forms`.

#[derive(FromPyObject)]
struct PlainRatio {
    num: String,
    den: String,
}

#[derive(FromPyObject)]
struct PlainAggregation {
    over: String,
    reduce: Option<String>,
    kept: bool,
    blend: Option<String>,
}

/// A function of a weight, with up to two parameters.
#[derive(FromPyObject)]
struct PlainShape {
    name: String,
    first: f64,
    second: f64,
}

#[derive(FromPyObject)]
struct PlainWeight {
    ratio: PlainRatio,
    level: PlainAggregation,
    shape: PlainShape,
    when: String,
    normalize: bool,
}

#[derive(FromPyObject)]
struct PlainReduction {
    per: String,
    mean: bool,
    norm: f64,
    kept: bool,
}

#[derive(FromPyObject)]
enum PlainRejection {
    Rejection {
        ratio: PlainRatio,
        stat: String,
        level: PlainAggregation,
        low: f64,
        high: f64,
        when: String,
        drops: String,
    },
    RejectionBudget {
        ratio: PlainRatio,
        stat: String,
        mean: f64,
        kept: bool,
        active: bool,
    },
}

/// Counts of a step over all ranks.
#[derive(FromPyObject)]
struct PlainTotals {
    terms: i64,
    traces: i64,
    groups: i64,
}

/// The result, a dict in Python.
#[derive(IntoPyObject)]
struct Corrected<'py> {
    weight: Bound<'py, PyUntypedArray>,
    keep: Bound<'py, PyArray1<bool>>,
    /// One number or array for each reduction.
    scales: Vec<Bound<'py, PyAny>>,
    stats: Bound<'py, PyDict>,
}

#[derive(FromPyObject)]
enum Whole<'py> {
    Narrow(PyReadonlyArray1<'py, i32>),
    Wide(PyReadonlyArray1<'py, i64>),
}

impl Whole<'_> {
    /// Returns one id per position, or one per row.
    fn ids(&self, columns: &Columns<'_>) -> PyResult<Ids<'_>> {
        let values = match self {
            Self::Narrow(values) => Integers::Narrow(values.as_slice()?),
            Self::Wide(values) => Integers::Wide(values.as_slice()?),
        };
        let each = if values.len() == columns.positions { 1 } else { columns.width };
        Ok(Ids { values, terms_per_id: each })
    }
}

/// The columns from Python. Floats are all f32 or all f64. Ids refer to one position or to a row of `width` positions.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Columns<'py> {
    old: Option<Bound<'py, PyAny>>,
    rollout: Option<Bound<'py, PyAny>>,
    #[pyo3(item("ref"))]
    reference: Option<Bound<'py, PyAny>>,
    advantages: Option<Bound<'py, PyAny>>,
    mask: Option<Flags<'py>>,
    trace: Whole<'py>,
    turn: Option<Whole<'py>>,
    group: Option<Whole<'py>>,
    group_terms: Option<Whole<'py>>,
    group_traces: Option<Whole<'py>>,
    positions: usize,
    width: usize,
    totals: Option<PlainTotals>,
}

/// All-reduce by a Python callable. The interpreter is attached only during its calls.
struct Ranks {
    all_reduce: Option<Py<PyAny>>,
    /// Exception that the callable raised.
    raised: Mutex<Option<PyErr>>,
}

impl Exchange for Ranks {
    fn all_reduce(&self, values: &mut [f64], op: Op) -> Result<(), Error> {
        let Some(all_reduce) = &self.all_reduce else { return Ok(()) };
        let call = |py: Python<'_>| -> PyResult<()> {
            let name = if op == Op::Max { "max" } else { "sum" };
            let result: PyReadonlyArray1<'_, f64> =
                all_reduce.bind(py).call1((values.to_vec().into_pyarray(py), name))?.extract()?;
            let result = result.as_slice()?;
            if result.len() != values.len() {
                let what = format!("all_reduce gave {} numbers for {}", result.len(), values.len());
                let error = Error::new(Kind::Argument, "TG-BORDER-012", what)
                    .fix("Return the reduced array, of the same shape");
                return Err(to_python(py, &error));
            }
            values.copy_from_slice(result);
            Ok(())
        };
        Python::attach(call).map_err(|error| {
            *locked(&self.raised) = Some(error);
            Error::new(Kind::Argument, "TG-BORDER-013", "all_reduce raised")
        })
    }

    fn is_single_rank(&self) -> bool {
        self.all_reduce.is_none()
    }
}

/// Computes weights, masks and scales of the terms.
#[pyfunction]
fn correct_terms<'py>(
    py: Python<'py>,
    columns: Columns<'py>,
    rejections: Vec<PlainRejection>,
    weights: Vec<PlainWeight>,
    reductions: Vec<PlainReduction>,
    missing: &str,
    all_reduce: Option<Py<PyAny>>,
) -> PyResult<Corrected<'py>> {
    let plan = || -> Result<Plan, Error> {
        Ok(Plan {
            rejections: rejections.iter().map(rejection).collect::<Result<_, _>>()?,
            weights: weights.iter().map(weight).collect::<Result<_, _>>()?,
            missing: named("missing", missing, &MISSING)?,
            reductions: reductions.iter().map(reduction).collect::<Result<_, _>>()?,
        })
    };
    let plan = plan().map_err(|error| to_python(py, &error))?;
    let ranks = Ranks { all_reduce, raised: Mutex::new(None) };
    let floats = columns.rollout.as_ref().or(columns.old.as_ref());
    let is_wide = floats.is_some_and(|array| array.extract::<PyReadonlyArray1<'_, f64>>().is_ok());
    let run = if is_wide { run::<f64> } else { run::<f32> };
    with_python(py, Kind::Fault, "correcting", || run(py, &columns, &plan, &ranks))
}

fn run<'py, F: Real + Element>(
    py: Python<'py>,
    columns: &Columns<'py>,
    plan: &Plan,
    ranks: &Ranks,
) -> PyResult<Corrected<'py>> {
    let [old, rollout, reference, advantages] =
        [&columns.old, &columns.rollout, &columns.reference, &columns.advantages]
            .map(|array| floats::<F>(array.as_ref()));
    let [old, rollout, reference, advantages] = [old?, rollout?, reference?, advantages?];
    let terms = Terms {
        old: slice(old.as_ref())?,
        rollout: slice(rollout.as_ref())?,
        reference: slice(reference.as_ref())?,
        mask: columns.mask.as_ref().map(Flags::as_slice).transpose()?,
        trace: columns.trace.ids(columns)?,
        turn: ids(columns.turn.as_ref(), columns)?,
        group: ids(columns.group.as_ref(), columns)?,
        advantages: slice(advantages.as_ref())?,
        totals: columns.totals.as_ref().map(|totals| Totals {
            terms: totals.terms,
            traces: totals.traces,
            groups: totals.groups,
        }),
        group_terms: ids(columns.group_terms.as_ref(), columns)?,
        group_traces: ids(columns.group_traces.as_ref(), columns)?,
    };
    // numpy allocates large pages, which are filled several times as fast.
    let weight = PyArray1::<F>::zeros(py, terms.len(), false);
    let keep = PyArray1::<bool>::zeros(py, terms.len(), false);
    let result = {
        let (mut weight, mut keep) = (weight.try_readwrite()?, keep.try_readwrite()?);
        let (weight, keep) = (weight.as_slice_mut()?, keep.as_slice_mut()?);
        without_gil(py, Kind::Fault, "correcting", || ratio::correct_into(&terms, plan, ranks, weight, keep))
    };
    let (scales, stats) = result.map_err(|error| locked(&ranks.raised).take().unwrap_or(error))?;
    let named = PyDict::new(py);
    for (name, value) in stats.named() {
        named.set_item(name, value)?;
    }
    let scale = |scale: Scale<F>| -> PyResult<Bound<'py, PyAny>> {
        Ok(match scale {
            Scale::All(value) => value.wide().into_pyobject(py)?.into_any(),
            Scale::Each(values) => values.into_pyarray(py).into_any(),
        })
    };
    let scales = scales.into_iter().map(scale).collect::<PyResult<_>>()?;
    Ok(Corrected { weight: weight.as_untyped().clone(), keep, scales, stats: named })
}

fn floats<'py, F: Element>(array: Option<&Bound<'py, PyAny>>) -> PyResult<Option<PyReadonlyArray1<'py, F>>> {
    array.map(PyAnyMethods::extract).transpose()
}

fn ids<'a>(whole: Option<&'a Whole<'_>>, columns: &Columns<'_>) -> PyResult<Option<Ids<'a>>> {
    whole.map(|whole| whole.ids(columns)).transpose()
}

fn slice<'a, T: Element>(array: Option<&'a PyReadonlyArray1<'_, T>>) -> PyResult<Option<&'a [T]>> {
    Ok(array.map(PyReadonlyArray1::as_slice).transpose()?)
}

const OVER: [(&str, Over); 5] = [
    ("token", Over::Token),
    ("turn", Over::Turn),
    ("trace", Over::Trace),
    ("group", Over::Group),
    ("batch", Over::Batch),
];
const REDUCE: [(&str, Reduce); 5] = [
    ("sum", Reduce::Sum),
    ("mean", Reduce::Mean),
    ("max", Reduce::Max),
    ("prefix_sum", Reduce::PrefixSum),
    ("prefix_min", Reduce::PrefixMin),
];
const BLEND: [(&str, Blend); 2] = [("arithmetic", Blend::Arithmetic), ("geometric", Blend::Geometric)];
const POLICY: [(&str, Policy); 3] = [("old", Policy::Old), ("rollout", Policy::Rollout), ("ref", Policy::Reference)];
const STAT: [(&str, Stat); 8] = [
    ("ratio", Stat::Ratio),
    ("k1", Stat::K1),
    ("k2", Stat::K2),
    ("k3", Stat::K3),
    ("abs", Stat::Abs),
    ("square", Stat::Square),
    ("dprob", Stat::Dprob),
    ("binary_kl", Stat::BinaryKl),
];
const WHEN: [(&str, When); 5] = [
    ("always", When::Always),
    ("A>0", When::Positive),
    ("A>=0", When::NonNegative),
    ("A<0", When::Negative),
    ("A<=0", When::NonPositive),
];
const MISSING: [(&str, Missing); 3] =
    [("mask", Missing::Mask), ("ratio_one", Missing::RatioOne), ("error", Missing::Error)];
const PER: [(&str, Per); 5] = [
    ("token", Per::Token),
    ("trace", Per::Trace),
    ("group", Per::Group),
    ("prompt", Per::Prompt),
    ("constant", Per::Constant),
];

fn named<T: Copy>(what: &str, name: &str, valid: &[(&str, T)]) -> Result<T, Error> {
    valid.iter().find(|(known, _)| *known == name).map(|&(_, value)| value).ok_or_else(|| {
        let names: Vec<&str> = valid.iter().map(|(known, _)| *known).collect();
        Error::new(Kind::Argument, "TG-BORDER-014", format!("{what} is '{name}'"))
            .fix(format!("It is one of {}", names.join(", ")))
    })
}

fn quotient(plain: &PlainRatio) -> Result<Ratio, Error> {
    Ok(Ratio { num: named("num", &plain.num, &POLICY)?, den: named("den", &plain.den, &POLICY)? })
}

fn aggregation(plain: &PlainAggregation) -> Result<Aggregation, Error> {
    let agg = plain.reduce.as_deref().map_or(Ok(Reduce::Sum), |reduce| named("reduce", reduce, &REDUCE))?;
    let blend = plain.blend.as_deref().map(|blend| named("blend", blend, &BLEND)).transpose()?;
    Ok(Aggregation { over: named("over", &plain.over, &OVER)?, agg, kept: plain.kept, blend })
}

fn rejection(plain: &PlainRejection) -> Result<AnyRejection, Error> {
    Ok(match plain {
        PlainRejection::Rejection { ratio, stat, level, low, high, when, drops } => {
            AnyRejection::Rejection(Rejection {
                ratio: quotient(ratio)?,
                stat: named("stat", stat, &STAT)?,
                level: aggregation(level)?,
                low: *low,
                high: *high,
                when: named("when", when, &WHEN)?,
                scope: named("drops", drops, &OVER)?,
            })
        }
        PlainRejection::RejectionBudget { ratio, stat, mean, kept, active } => {
            AnyRejection::RejectionBudget(RejectionBudget {
                ratio: quotient(ratio)?,
                stat: named("stat", stat, &STAT)?,
                mean: *mean,
                kept: *kept,
                active: *active,
            })
        }
    })
}

fn weight(plain: &PlainWeight) -> Result<Weight, Error> {
    let (first, second) = (plain.shape.first, plain.shape.second);
    let shapes = [
        ("identity", Shape::Identity),
        ("clamp", Shape::Truncate(first, second)),
        ("window", Shape::MaskOutside(first, second)),
        ("strict_window", Shape::MaskOutsideStrict(first, second)),
        ("gamma", Shape::Gamma { power: first, rate: second }),
        ("gaussian", Shape::Gaussian(first)),
    ];
    Ok(Weight {
        ratio: quotient(&plain.ratio)?,
        level: aggregation(&plain.level)?,
        shape: named("shape", &plain.shape.name, &shapes)?,
        when: named("when", &plain.when, &WHEN)?,
        normalize: plain.normalize,
    })
}

fn reduction(plain: &PlainReduction) -> Result<Reduction, Error> {
    Ok(Reduction { per: named("per", &plain.per, &PER)?, mean: plain.mean, norm: plain.norm, kept: plain.kept })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("LOG_RATIO_LIMIT", ratio::LOG_RATIO_LIMIT)?;
    module.add_function(wrap_pyfunction!(correct_terms, module)?)
}
