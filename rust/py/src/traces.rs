//! Python bindings of `tracegrad_core::read` and `trace`: traces as handles, whose parts are converted to Python
//! objects on demand.

use crate::border::{Line, with_python, without_gil};
use crate::compose::compose;
use crate::errors::to_python;
use numpy::{IntoPyArray, PyArray1};
use pyo3::exceptions::PyIndexError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict, PyFloat, PyInt, PyList};
use serde_json::Value;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracegrad_core::findings::NAMES;
use tracegrad_core::format::forms;
use tracegrad_core::read::{Report, decode_all, needs_no_adapter, unanswered_traces};
use tracegrad_core::sampling::{NoEffect, OPTIONS, SPELLINGS};
use tracegrad_core::trace::{Generation, LogprobKind, Prompt, Stop, Trace};
use tracegrad_core::{Error, Kind, cancel, json_number};

/// Immutable traces in memory.
#[pyclass(frozen, module = "tracegrad._core", name = "Traces")]
pub struct PyTraces {
    /// The traces. Slices and concatenations share them.
    pub inner: Arc<Vec<Arc<Trace>>>,
    /// Format that a caller requested for all of them, so that they can be read again in it.
    format_name: Option<&'static str>,
}

impl PyTraces {
    pub(crate) fn new(traces: Vec<Arc<Trace>>, format_name: Option<&'static str>) -> Self {
        Self { inner: Arc::new(traces), format_name }
    }

    fn get(&self, index: usize) -> PyResult<&Arc<Trace>> {
        self.inner.get(index).ok_or_else(|| PyIndexError::new_err(format!("trace {index} of {}", self.inner.len())))
    }
}

#[pymethods]
impl PyTraces {
    fn __len__(&self) -> usize {
        self.inner.len()
    }

    /// Returns the records and their places, for pickle and copy.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        let row = |trace: &Arc<Trace>| -> PyResult<Kept<'py>> {
            let (place, record) = (&trace.location, record_of(py, trace)?);
            Ok((record, place.file.as_deref().unwrap_or("").to_owned(), Line::of(place).unwrap_or(Line::Only(1))))
        };
        let restore = py.import(intern!(py, "tracegrad._core"))?.getattr(intern!(py, "restore_traces"))?;
        Ok((restore, (self.inner.iter().map(row).collect::<PyResult<_>>()?, self.format())))
    }

    fn __deepcopy__<'py>(slf: Bound<'py, Self>, _memo: &Bound<'py, PyAny>) -> Bound<'py, Self> {
        slf
    }

    fn take(&self, indices: Vec<usize>) -> PyResult<Self> {
        Ok(Self::new(indices.into_iter().map(|at| self.get(at).cloned()).collect::<PyResult<_>>()?, self.format_name))
    }

    #[staticmethod]
    fn concatenate(parts: Vec<PyRef<'_, Self>>) -> Self {
        let format_name = parts.first().and_then(|part| part.format_name);
        let format_name = format_name.filter(|_| parts.iter().all(|part| part.format_name == format_name));
        Self::new(parts.iter().flat_map(|part| part.inner.iter().cloned()).collect(), format_name)
    }

    #[staticmethod]
    fn decode<'py>(
        py: Python<'py>,
        records: Vec<Vec<u8>>,
        name: &str,
        first: Line,
        format: &str,
    ) -> PyResult<(Self, Bound<'py, PyDict>)> {
        let format = form_name(py, format)?;
        let decode = || decode_all(records.into_iter().map(Into::into).collect(), name, first.into(), format);
        let (traces, report) = without_gil(py, Kind::Fault, "reading records", decode)?;
        Ok((Self::new(traces, format), report_dict(py, &report)?))
    }

    /// Returns the traces whose conversation continues after the last sampled message. With names, only those whose
    /// record may contain an answer elsewhere.
    #[pyo3(signature = (names=None))]
    fn open(&self, py: Python<'_>, names: Option<Vec<String>>) -> PyResult<Vec<usize>> {
        without_gil(py, Kind::Fault, "reading records", || unanswered_traces(&self.inner, names.as_deref()))
    }

    /// Returns for each record whether it is read completely without an adapter, and no object in it has one of the
    /// keys.
    #[staticmethod]
    fn plain(py: Python<'_>, records: Vec<PyBackedBytes>, keys: Vec<PyBackedBytes>) -> PyResult<Vec<bool>> {
        let records = records.iter().map(|bytes| (**bytes).into()).collect();
        without_gil(py, Kind::Fault, "reading records", || needs_no_adapter(records, &keys))
    }

    /// Reads records given as pieces: JSON text and, in between, lists of numbers or pairs of ids and logprob objects.
    #[staticmethod]
    fn compose<'py>(
        py: Python<'py>,
        rows: Vec<Bound<'py, PyList>>,
        name: &str,
        first: Line,
        format: &str,
    ) -> PyResult<(Self, Bound<'py, PyDict>)> {
        let records_of_rows = || rows.iter().map(compose).collect::<PyResult<_>>();
        let records = with_python(py, Kind::Fault, "reading records", records_of_rows)?;
        Self::decode(py, records, name, first, format)
    }

    #[getter]
    fn format(&self) -> &'static str {
        self.format_name.unwrap_or("auto")
    }

    fn id(&self, index: usize) -> PyResult<&str> {
        Ok(&self.get(index)?.id)
    }

    fn location(&self, index: usize) -> PyResult<(Option<&str>, Option<Line>)> {
        let location = &self.get(index)?.location;
        Ok((location.file.as_deref(), Line::of(location)))
    }

    fn group(&self, index: usize) -> PyResult<Option<&str>> {
        Ok(self.get(index)?.group.as_deref())
    }

    fn reward(&self, index: usize) -> PyResult<Option<f32>> {
        Ok(self.get(index)?.reward)
    }

    fn rewards<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyDict>> {
        let rewards = PyDict::new(py);
        for (name, reward) in &self.get(index)?.rewards {
            rewards.set_item(name, reward)?;
        }
        Ok(rewards)
    }

    fn model(&self, index: usize) -> PyResult<Option<&str>> {
        Ok(self.get(index)?.model.as_deref())
    }

    fn record<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyBytes>> {
        record_of(py, self.get(index)?)
    }

    fn record_size(&self, index: usize) -> PyResult<usize> {
        Ok(self.get(index)?.raw.len())
    }

    fn messages<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyList>> {
        let messages = PyList::empty(py);
        for message in &self.get(index)?.messages {
            messages.append(to_object(py, &message.value)?)?;
        }
        Ok(messages)
    }

    fn message_rewards(&self, index: usize) -> PyResult<Vec<Option<f32>>> {
        Ok(self.get(index)?.messages.iter().map(|message| message.reward).collect())
    }

    fn conversation(&self, index: usize) -> PyResult<Vec<u32>> {
        Ok(self.get(index)?.conversation.clone())
    }

    fn tools<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.get(index)?.tools.as_ref().map(|tools| to_object(py, tools)).transpose()
    }

    fn template_kwargs<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyDict>> {
        let kwargs = PyDict::new(py);
        for (name, value) in &self.get(index)?.template_kwargs {
            kwargs.set_item(name, to_object(py, value)?)?;
        }
        Ok(kwargs)
    }

    fn generations<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let trace = self.get(index)?;
        (0..trace.generations.len()).map(|turn| generation_dict(py, trace, turn)).collect()
    }

    fn reward_column<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f32>> {
        let rewards: Vec<f32> = self.inner.iter().map(|trace| trace.reward.unwrap_or(f32::NAN)).collect();
        rewards.into_pyarray(py)
    }

    /// Returns flat columns with one row per generation of every trace. `Traces.columns` in `_core.pyi` documents them.
    fn columns<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let rows: Vec<Row<'_>> = self
            .inner
            .iter()
            .enumerate()
            .flat_map(|(at, trace)| trace.generations.iter().enumerate().map(move |(turn, g)| (at, turn, &**trace, g)))
            .collect();
        let columns = PyDict::new(py);
        let ints = |f: &dyn Fn(&Row<'_>) -> i64| rows.iter().map(f).collect::<Vec<i64>>().into_pyarray(py);
        let floats =
            |f: &dyn Fn(&Generation) -> f64| rows.iter().map(|row| f(row.3)).collect::<Vec<f64>>().into_pyarray(py);
        columns.set_item("trace", ints(&|row| row.0 as i64))?;
        columns.set_item("turn", ints(&|row| row.1 as i64))?;
        columns.set_item("tokens", ints(&|row| row.3.tokens.len() as i64))?;
        columns.set_item("ids", ints(&|row| row.3.tokens.ids.as_ref().map_or(-1, |ids| ids.len() as i64)))?;
        columns.set_item("prompt_ids", ints(&|row| prompt_ids(row.3).map_or(-1, |ids| ids.len() as i64)))?;
        let is_spelled = |row: &Row<'_>| row.3.tokens.bytes.is_some() || row.3.tokens.texts.is_some();
        columns.set_item("spelled", ints(&|row| i64::from(is_spelled(row))))?;
        let filled_kind = |row: &Row<'_>| row.3.filled.as_ref().map_or(0, |filled| filled.kind as i64);
        columns.set_item("filled_kind", ints(&filled_kind))?;
        columns.set_item("rendered", ints(&|row| i64::from(row.3.prompt == Prompt::Rendered)))?;
        columns.set_item("missing", ints(&|row| row.3.tokens.missing.into()))?;
        columns.set_item("invalid", ints(&|row| row.3.tokens.invalid.into()))?;
        let filled =
            |row: &Row<'_>| row.3.filled.as_ref().map_or(0, |f| f.logprobs.iter().filter(|l| !l.is_nan()).count());
        columns.set_item("filled", ints(&|row| filled(row) as i64))?;
        columns.set_item("logprob_kind", ints(&|row| row.3.logprob_kind as i64))?;
        columns.set_item("version", ints(&|row| row.3.policy_version.into()))?;
        columns.set_item("context", ints(&|row| row.3.context.len() as i64))?;
        columns.set_item("content_bytes", ints(&|row| content_bytes(row.2, row.3.message)))?;
        columns.set_item("system", ints(&|row| i64::from(starts_with_system(row.2, row.3))))?;
        columns.set_item("stop_id", ints(&|row| if let Stop::Id(id) = row.3.stop { id.into() } else { -1 }))?;
        columns.set_item("stop_text", ints(&|row| i64::from(matches!(row.3.stop, Stop::Text(_)))))?;
        columns.set_item("temperature", floats(&|row| row.temperature.map_or(f64::NAN, Into::into)))?;
        columns.set_item("top_p", floats(&|row| row.top_p.map_or(f64::NAN, Into::into)))?;
        columns.set_item("left_out", ints(&|row| row.3.omitted.into()))?;
        let options =
            rows.iter().map(|row| if row.3.options.is_empty() { Ok(None) } else { options_of(py, row.3).map(Some) });
        columns.set_item("sampling", options.collect::<PyResult<Vec<_>>>()?)?;
        columns.set_item("cumulative_logprob", floats(&|row| row.cumulative_logprob.unwrap_or(f64::NAN)))?;
        let finish: Vec<&str> = rows.iter().map(|row| row.3.finish_reason.as_deref().unwrap_or("")).collect();
        columns.set_item("finish_reason", finish)?;
        let listed = |row: &Row<'_>| row.3.tokens.logprobs.as_ref().map_or(-1, |l| l.len() as i64);
        columns.set_item("logprobs", ints(&listed))?;
        let flat = rows.iter().flat_map(|row| row.3.tokens.logprobs.iter().flatten().copied());
        columns.set_item("flat_logprobs", flat.collect::<Vec<f32>>().into_pyarray(py))?;
        let head = rows.iter().flat_map(|row| {
            let ids = row.3.prompt.ids().unwrap_or_default();
            [0, 1].map(|at| ids.get(at).map_or(-1, |&id| id as i32))
        });
        columns.set_item("prompt_head", head.collect::<Vec<i32>>().into_pyarray(py))?;
        Ok(columns)
    }
}

/// Returns the bytes of a record, from memory or from its file.
fn record_of<'py>(py: Python<'py>, trace: &Trace) -> PyResult<Bound<'py, PyBytes>> {
    without_gil(py, Kind::Fault, "reading a record", || trace.record()).map(|record| PyBytes::new(py, &record))
}

/// A record, its file and its line.
type Kept<'py> = (Bound<'py, PyBytes>, String, Line);
/// The function that pickle calls, and its arguments.
type Reduced<'py> = (Bound<'py, PyAny>, (Vec<Kept<'py>>, &'static str));

/// Reads the records of pickled traces.
#[pyfunction]
fn restore_traces(py: Python<'_>, rows: Vec<(PyBackedBytes, String, Line)>, format: &str) -> PyResult<PyTraces> {
    let format = form_name(py, format)?;
    let traces = without_gil(py, Kind::Fault, "reading records", || {
        let read = |(record, name, line): &(PyBackedBytes, String, Line)| {
            cancel::check();
            decode_all(vec![Arc::from(&**record)], name, (*line).into(), format).map(|(traces, _)| traces)
        };
        Ok(rows.iter().map(read).collect::<Result<Vec<_>, _>>()?.concat())
    })?;
    Ok(PyTraces::new(traces, format))
}

/// A generation with the index of its trace, its turn, and its trace.
type Row<'a> = (usize, usize, &'a Trace, &'a Generation);

/// Returns the number of bytes of a message's content, or -1 if it is not a string. U+FFFD counts as one byte, since it
/// may stand for one.
fn content_bytes(trace: &Trace, message: u32) -> i64 {
    let content = trace.messages.get(message as usize).and_then(|message| message.value.get("content"));
    content.and_then(Value::as_str).map_or(-1, |text| (text.len() - 2 * text.matches('\u{FFFD}').count()) as i64)
}

/// Returns the recorded prompt ids of a generation: all of them, or those after an earlier turn.
fn prompt_ids(generation: &Generation) -> Option<&[u32]> {
    match &generation.prompt {
        Prompt::Ids(ids) | Prompt::Follows { ids, .. } => Some(ids),
        _ => None,
    }
}

/// Returns whether the messages before a generation start with a system or developer message.
fn starts_with_system(trace: &Trace, generation: &Generation) -> bool {
    let first = generation.context.first().and_then(|&index| trace.messages.get(index as usize));
    first.is_some_and(|message| matches!(message.role(), "system" | "developer"))
}

fn generation_dict<'py>(py: Python<'py>, trace: &Trace, turn: usize) -> PyResult<Bound<'py, PyDict>> {
    let generation: &Generation = &trace.generations[turn];
    let tokens = &generation.tokens;
    let ids = |ids: &[u32]| ids.iter().map(|id| *id as i32).collect::<Vec<_>>().into_pyarray(py);
    let fields = PyDict::new(py);
    fields.set_item("message", generation.message)?;
    fields.set_item("context", generation.context.clone())?;
    fields.set_item("tokens", tokens.len())?;
    fields.set_item("token_ids", tokens.ids.as_deref().map(ids))?;
    fields.set_item("prompt_token_ids", trace.prompt_ids(turn).as_deref().map(ids))?;
    fields.set_item("logprobs", tokens.logprobs.clone().map(|logprobs| logprobs.into_pyarray(py)))?;
    let filled = generation.filled.as_ref().map(|filled| filled.logprobs.clone().into_pyarray(py));
    fields.set_item("filled_logprobs", filled)?;
    fields.set_item("has_bytes", tokens.bytes.is_some())?;
    fields.set_item("has_texts", tokens.texts.is_some())?;
    fields.set_item("missing", tokens.missing)?;
    fields.set_item("invalid", tokens.invalid)?;
    fields.set_item("finish_reason", generation.finish_reason.as_deref())?;
    match &generation.stop {
        Stop::Unknown => fields.set_item("stop_reason", py.None())?,
        Stop::Id(id) => fields.set_item("stop_reason", id)?,
        Stop::Text(text) => fields.set_item("stop_reason", text)?,
    }
    let kind = match generation.logprob_kind {
        LogprobKind::Unknown => "unknown",
        LogprobKind::Raw => "raw",
        LogprobKind::Processed => "processed",
    };
    fields.set_item("logprob_kind", kind)?;
    fields.set_item("temperature", generation.temperature)?;
    fields.set_item("top_p", generation.top_p)?;
    fields.set_item("sampling", options_of(py, generation)?)?;
    fields.set_item("policy_version", generation.policy_version)?;
    fields.set_item("cumulative_logprob", generation.cumulative_logprob)?;
    fields.set_item("text", generation.text.as_deref())?;
    let versions = generation.versions.iter().map(|span| (span.start, span.end, span.version));
    fields.set_item("versions", versions.collect::<Vec<_>>())?;
    let notes = generation.notes.iter().map(|note| (NAMES[note.reason as usize], note.count, note.detail.as_str()));
    fields.set_item("notes", notes.collect::<Vec<_>>())?;
    Ok(fields)
}

/// Returns the recorded sampling options other than temperature and top-p.
fn options_of<'py>(py: Python<'py>, generation: &Generation) -> PyResult<Bound<'py, PyDict>> {
    let options = PyDict::new(py);
    for (name, value) in generation.options.iter() {
        options.set_item(name, to_object(py, value)?)?;
    }
    Ok(options)
}

/// A sampling option, a dict in Python; `neutral_values` are those without an effect.
#[derive(IntoPyObject)]
struct SamplingOption {
    name: &'static str,
    spellings: Vec<&'static str>,
    neutral_values: Option<Vec<f64>>,
}

/// Returns the sampling options by name, in the order of their bits. Each has its other spellings and the numbers at
/// which it has no effect; None means that false, empty and 0 have no effect.
#[pyfunction]
fn sampling_options() -> Vec<SamplingOption> {
    let row = |(name, off): &(&'static str, NoEffect)| {
        let spelled = SPELLINGS.iter().filter(|(_, option)| option == name).map(|(spelled, _)| *spelled);
        let neutral_values = if let NoEffect::At(values) = off { Some(values.to_vec()) } else { None };
        SamplingOption { name, spellings: spelled.collect(), neutral_values }
    };
    OPTIONS.iter().map(row).collect()
}

/// Returns whether a sampling option has no effect at a value, which is given as JSON.
#[pyfunction]
fn sampling_option_is_off(name: &str, value: &str) -> bool {
    let option = OPTIONS.iter().find(|(option, _)| *option == name);
    let value = serde_json::from_str(value).unwrap_or(Value::Null);
    option.is_none_or(|(name, off)| off.contains(name, &value))
}

/// Converts a JSON value to Python objects.
pub fn to_object<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(flag) => flag.into_pyobject(py)?.to_owned().into_any(),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => integer.into_pyobject(py)?.into_any(),
            (None, Some(integer)) => integer.into_pyobject(py)?.into_any(),
            (None, None) => number.as_f64().into_pyobject(py)?,
        },
        Value::String(text) => text.into_pyobject(py)?.into_any(),
        Value::Array(items) => {
            let list = PyList::empty(py);
            for item in items {
                list.append(to_object(py, item)?)?;
            }
            list.into_any()
        }
        Value::Object(fields) => {
            if let Some(text) = json_number::text_in(fields) {
                let is_integer = text.ends_with(|last: char| last.is_ascii_digit());
                let kind = if is_integer { py.get_type::<PyInt>() } else { py.get_type::<PyFloat>() };
                return kind.call1((text,));
            }
            let dict = PyDict::new(py);
            for (key, item) in fields {
                dict.set_item(key, to_object(py, item)?)?;
            }
            dict.into_any()
        }
    })
}

/// Returns the form with this name, or `None` for `auto`.
pub(crate) fn form_name(py: Python<'_>, format: &str) -> PyResult<Option<&'static str>> {
    if format == "auto" {
        return Ok(None);
    }
    let form = forms().find(|form| form.name == format);
    form.map(|form| Some(form.name)).ok_or_else(|| {
        let names: Vec<_> = forms().map(|form| form.name).collect();
        let error = Error::new(Kind::Argument, "TG-BORDER-018", format!("format is '{format}'"));
        to_python(py, &error.fix(format!("It is auto or one of {}", names.join(", "))))
    })
}

pub(crate) fn report_dict<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let reasons = PyDict::new(py);
    for (reason, count) in &report.reasons {
        reasons.set_item(reason.name(), count)?;
    }
    let fields = PyDict::new(py);
    fields.set_item("records", report.records)?;
    fields.set_item("traces", report.traces)?;
    let formats = PyDict::new(py);
    for (form, count) in &report.forms {
        formats.set_item(form.name, (count, form.reason))?;
    }
    fields.set_item("formats", formats)?;
    fields.set_item("bad", report.bad)?;
    fields.set_item("reasons", reasons)?;
    fields.set_item("errors", report.first_errors.iter().map(Error::to_string).collect::<Vec<_>>())?;
    fields.set_item("generations", report.generations)?;
    fields.set_item("tokens", report.tokens)?;
    fields.set_item("missing_logprobs", report.missing_logprobs)?;
    fields.set_item("invalid_logprobs", report.invalid_logprobs)?;
    fields.set_item("unused_choices", report.unused_choices)?;
    fields.set_item("bytes", report.bytes)?;
    Ok(fields)
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTraces>()?;
    module.add_function(wrap_pyfunction!(sampling_options, module)?)?;
    module.add_function(wrap_pyfunction!(sampling_option_is_off, module)?)?;
    module.add_function(wrap_pyfunction!(restore_traces, module)?)
}
