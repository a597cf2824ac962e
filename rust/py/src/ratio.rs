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

/// (num, den)
type PlainRatio = (String, String);
/// (over, agg, kept, blend)
type PlainLevel = (String, Option<String>, bool, Option<String>);
/// (ratio, level, (shape, first, second), when, normalize)
type PlainWeight = (PlainRatio, PlainLevel, (String, f64, f64), String, bool);
/// (per, mean, norm, kept)
type PlainReduction = (String, bool, f64, bool);
/// Weight, mask, scales, statistics.
type PlainCorrected<'py> =
    (Bound<'py, PyUntypedArray>, Bound<'py, PyArray1<bool>>, Vec<Bound<'py, PyAny>>, Bound<'py, PyDict>);

#[derive(FromPyObject)]
enum PlainRejection {
    /// (ratio, stat, level, low, high, when, scope)
    Rejection(PlainRatio, String, PlainLevel, f64, f64, String, String),
    /// (ratio, stat, mean, kept, active)
    RejectionBudget(PlainRatio, String, f64, bool, bool),
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
    totals: Option<(i64, i64, i64)>,
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
) -> PyResult<PlainCorrected<'py>> {
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
) -> PyResult<PlainCorrected<'py>> {
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
        totals: columns.totals.map(|(terms, traces, groups)| Totals { terms, traces, groups }),
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
    Ok((weight.as_untyped().clone(), keep, scales, named))
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
const AGG: [(&str, Reduce); 5] = [
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

fn quotient((num, den): &PlainRatio) -> Result<Ratio, Error> {
    Ok(Ratio { num: named("num", num, &POLICY)?, den: named("den", den, &POLICY)? })
}

fn level((over, agg, kept, blend): &PlainLevel) -> Result<Aggregation, Error> {
    let agg = agg.as_deref().map_or(Ok(Reduce::Sum), |agg| named("agg", agg, &AGG))?;
    let blend = blend.as_deref().map(|blend| named("blend", blend, &BLEND)).transpose()?;
    Ok(Aggregation { over: named("over", over, &OVER)?, agg, kept: *kept, blend })
}

fn rejection(plain: &PlainRejection) -> Result<AnyRejection, Error> {
    Ok(match plain {
        PlainRejection::Rejection(ratio, stat, plain, low, high, when, scope) => AnyRejection::Rejection(Rejection {
            ratio: quotient(ratio)?,
            stat: named("stat", stat, &STAT)?,
            level: level(plain)?,
            low: *low,
            high: *high,
            when: named("when", when, &WHEN)?,
            scope: named("scope", scope, &OVER)?,
        }),
        PlainRejection::RejectionBudget(ratio, stat, mean, kept, active) => {
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

fn weight((ratio, plain, (shape, first, second), when, normalize): &PlainWeight) -> Result<Weight, Error> {
    let (first, second) = (*first, *second);
    let shapes = [
        ("identity", Shape::Identity),
        ("clamp", Shape::Truncate(first, second)),
        ("window", Shape::MaskOutside(first, second)),
        ("strict_window", Shape::MaskOutsideStrict(first, second)),
        ("gamma", Shape::Gamma { power: first, rate: second }),
        ("gaussian", Shape::Gaussian(first)),
    ];
    Ok(Weight {
        ratio: quotient(ratio)?,
        level: level(plain)?,
        shape: named("shape", shape, &shapes)?,
        when: named("when", when, &WHEN)?,
        normalize: *normalize,
    })
}

fn reduction((per, mean, norm, kept): &PlainReduction) -> Result<Reduction, Error> {
    Ok(Reduction { per: named("per", per, &PER)?, mean: *mean, norm: *norm, kept: *kept })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("LOG_RATIO_LIMIT", ratio::LOG_RATIO_LIMIT)?;
    module.add_function(wrap_pyfunction!(correct_terms, module)?)
}
