//! Binds the files of `tracegrad_core::read` that grow: groups that are read frame by frame, and a file being written.

use crate::border::detached;
use crate::traces::{PyTraces, locked};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Mutex;
use tracegrad_core::read::{Frames, Writer};
use tracegrad_core::{Error, Kind, stop};

/// A file of groups that are zstd frames.
#[pyclass(frozen, module = "tracegrad._core", name = "Frames")]
pub struct PyFrames {
    inner: Mutex<Frames>,
}

#[pymethods]
impl PyFrames {
    #[new]
    fn new(py: Python<'_>, path: PathBuf, start: u64, most: usize) -> PyResult<Self> {
        let frames = detached(py, Kind::Fault, "opening a file", || Frames::open(&path, start, most))?;
        Ok(Self { inner: Mutex::new(frames) })
    }

    fn next(&self, py: Python<'_>) -> PyResult<Option<(PyTraces, u64)>> {
        let frame = detached(py, Kind::Fault, "reading a file", || locked(&self.inner).next_frame())?;
        Ok(frame.map(|frame| (PyTraces::new(frame.traces, None), frame.length)))
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
        let writer = detached(py, Kind::Fault, "writing a file", || Writer::create(&path))?;
        Ok(Self { inner: Mutex::new(Some(writer)) })
    }

    fn write(&self, py: Python<'_>, traces: &PyTraces) -> PyResult<()> {
        detached(py, Kind::Fault, "writing a file", || {
            let mut writer = locked(&self.inner);
            let writer = writer.as_mut().ok_or_else(closed)?;
            traces.inner.iter().try_for_each(|trace| {
                stop::check();
                writer.write(trace)
            })
        })
    }

    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let finish = || locked(&self.inner).take().ok_or_else(closed).and_then(Writer::finish);
        detached(py, Kind::Fault, "writing a file", finish)
    }

    fn abandon(&self) {
        locked(&self.inner).take();
    }
}

fn closed() -> Error {
    Error::new(Kind::Argument, "the writer is closed").cure("Open another one")
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyFrames>()?;
    module.add_class::<PyTraceWriter>()
}
