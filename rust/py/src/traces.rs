//! Binds `tracegrad_core::read`: traces as handles, their parts as Python objects when asked for.

use crate::errors::to_python;
use numpy::{IntoPyArray, PyArray1};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tracegrad_core::read::{OnError, Options, Reader, Report, Writer, decode_all};
use tracegrad_core::trace::{Generation, LogprobKind, Stop, Trace};
use tracegrad_core::{Error, Kind};

/// Traces in memory, shared and never changed.
#[pyclass(frozen, module = "tracegrad._core", name = "Traces")]
pub struct PyTraces {
    /// The traces; slices and concatenations share them.
    pub inner: Arc<Vec<Arc<Trace>>>,
}

impl PyTraces {
    fn new(traces: Vec<Arc<Trace>>) -> Self {
        Self { inner: Arc::new(traces) }
    }

    fn get(&self, index: usize) -> PyResult<&Trace> {
        let missing = || PyIndexError::new_err(format!("trace {index} of {}", self.inner.len()));
        self.inner.get(index).map(AsRef::as_ref).ok_or_else(missing)
    }
}

#[pymethods]
impl PyTraces {
    fn __len__(&self) -> usize {
        self.inner.len()
    }

    fn take(&self, indices: Vec<usize>) -> PyResult<Self> {
        let missing = |index| PyIndexError::new_err(format!("trace {index} of {}", self.inner.len()));
        let pick = |index: usize| self.inner.get(index).cloned().ok_or_else(|| missing(index));
        indices.into_iter().map(pick).collect::<PyResult<_>>().map(Self::new)
    }

    #[staticmethod]
    fn concatenate(parts: Vec<PyRef<'_, Self>>) -> Self {
        Self::new(parts.iter().flat_map(|part| part.inner.iter().cloned()).collect())
    }

    #[staticmethod]
    fn decode<'py>(py: Python<'py>, records: Vec<Vec<u8>>, name: &str) -> PyResult<(Self, Bound<'py, PyDict>)> {
        let decoded = py.detach(|| decode_all(records.into_iter().map(Into::into).collect(), name));
        let (traces, report) = decoded.map_err(|error| to_python(py, &error))?;
        Ok((Self::new(traces), report_dict(py, &report)?))
    }

    fn id(&self, index: usize) -> PyResult<&str> {
        Ok(&self.get(index)?.id)
    }

    fn location(&self, index: usize) -> PyResult<(Option<&str>, Option<u64>)> {
        let location = &self.get(index)?.location;
        Ok((location.file.as_deref(), location.line))
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
        Ok(PyBytes::new(py, &self.get(index)?.record))
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
        self.get(index)?.generations.iter().map(|generation| generation_dict(py, generation)).collect()
    }

    fn reward_column<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f32>> {
        let rewards: Vec<f32> = self.inner.iter().map(|trace| trace.reward.unwrap_or(f32::NAN)).collect();
        rewards.into_pyarray(py)
    }
}

fn generation_dict<'py>(py: Python<'py>, generation: &Generation) -> PyResult<Bound<'py, PyDict>> {
    let tokens = &generation.tokens;
    let ids = |ids: &Vec<u32>| ids.iter().map(|id| *id as i32).collect::<Vec<_>>().into_pyarray(py);
    let fields = PyDict::new(py);
    fields.set_item("message", generation.message)?;
    fields.set_item("context", generation.context.clone())?;
    fields.set_item("tokens", tokens.len())?;
    fields.set_item("token_ids", tokens.ids.as_ref().map(ids))?;
    fields.set_item("prompt_token_ids", generation.prompt_ids.as_ref().map(ids))?;
    fields.set_item("logprobs", tokens.logprobs.clone().map(|logprobs| logprobs.into_pyarray(py)))?;
    fields.set_item("has_bytes", tokens.bytes.is_some())?;
    fields.set_item("has_texts", tokens.texts.is_some())?;
    fields.set_item("missing", tokens.missing)?;
    fields.set_item("invalid", tokens.invalid)?;
    fields.set_item("finish_reason", generation.finish_reason.as_deref())?;
    match &generation.stop {
        Stop::Unsaid => fields.set_item("stop_reason", py.None())?,
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
    fields.set_item("policy_version", generation.policy_version)?;
    fields.set_item("cumulative_logprob", generation.cumulative_logprob)?;
    Ok(fields)
}

/// A JSON value as Python objects.
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
            let dict = PyDict::new(py);
            for (key, item) in fields {
                dict.set_item(key, to_object(py, item)?)?;
            }
            dict.into_any()
        }
    })
}

fn report_dict<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let reasons = PyDict::new(py);
    for (reason, count) in &report.reasons {
        reasons.set_item(reason.name(), count)?;
    }
    let fields = PyDict::new(py);
    fields.set_item("records", report.records)?;
    fields.set_item("traces", report.traces)?;
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

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A stream of traces.
#[pyclass(frozen, module = "tracegrad._core", name = "TraceReader")]
pub struct PyTraceReader {
    inner: Mutex<Reader>,
}

#[pymethods]
impl PyTraceReader {
    #[new]
    #[pyo3(signature = (path, on_error, quarantine, limit, max_record_bytes, chunk_bytes))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        on_error: &str,
        quarantine: Option<PathBuf>,
        limit: Option<u64>,
        max_record_bytes: usize,
        chunk_bytes: usize,
    ) -> PyResult<Self> {
        let on_error = match (on_error, quarantine) {
            ("raise", _) => OnError::Raise,
            ("quarantine", Some(path)) => OnError::Quarantine(path),
            _ => OnError::Skip,
        };
        let options = Options { on_error, limit, max_record_bytes, chunk_bytes };
        let reader = py.detach(|| Reader::open(&path, options)).map_err(|error| to_python(py, &error))?;
        Ok(Self { inner: Mutex::new(reader) })
    }

    fn batch(&self, py: Python<'_>, count: usize) -> PyResult<PyTraces> {
        let traces = py.detach(|| locked(&self.inner).batch(count)).map_err(|error| to_python(py, &error))?;
        Ok(PyTraces::new(traces))
    }

    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = py.detach(|| locked(&self.inner).report().clone());
        report_dict(py, &report)
    }
}

/// A file being written; it takes its name when it is finished.
#[pyclass(frozen, module = "tracegrad._core", name = "TraceWriter")]
pub struct PyTraceWriter {
    inner: Mutex<Option<Writer>>,
}

#[pymethods]
impl PyTraceWriter {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let writer = py.detach(|| Writer::create(&path)).map_err(|error| to_python(py, &error))?;
        Ok(Self { inner: Mutex::new(Some(writer)) })
    }

    fn write(&self, py: Python<'_>, traces: &PyTraces) -> PyResult<()> {
        let written = py.detach(|| {
            let mut writer = locked(&self.inner);
            let writer = writer.as_mut().ok_or_else(closed)?;
            traces.inner.iter().try_for_each(|trace| writer.write(trace))
        });
        written.map_err(|error| to_python(py, &error))
    }

    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let finished = py.detach(|| locked(&self.inner).take().ok_or_else(closed).and_then(Writer::finish));
        finished.map_err(|error| to_python(py, &error))
    }

    fn abandon(&self) {
        locked(&self.inner).take();
    }
}

fn closed() -> Error {
    Error::new(Kind::Argument, "the writer is closed").cure("Open another one")
}

/// Adds this file's names to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTraces>()?;
    module.add_class::<PyTraceReader>()?;
    module.add_class::<PyTraceWriter>()
}
