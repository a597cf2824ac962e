//! Wrappers for every call from Python: panics become errors, signals are handled, the GIL is released.
//!
//! Use [`detached`] for work without Python objects and [`attached`] for work with them. Every function of this crate
//! that may fail runs in one of the two.

use crate::errors::to_python;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use std::cell::RefCell;
use tracegrad_core::{At, Kind, Location, Result, cancel, caught};

thread_local! {
    /// Exception that a signal handler raised during this thread's work.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Runs `work` without the GIL and returns its result. A signal handler runs within 50 milliseconds. If it raises, the
/// work is cancelled.
pub fn detached<T: Send>(
    py: Python<'_>,
    kind: Kind,
    what: &str,
    work: impl FnOnce() -> Result<T> + Send,
) -> PyResult<T> {
    let result = py.detach(|| cancel::watched(signals, || caught(kind, what, work)));
    if let Some(exception) = RAISED.take() {
        return Err(exception);
    }
    match result {
        Some(result) => result.map_err(|error| to_python(py, &error)),
        None => Err(PyKeyboardInterrupt::new_err(())),
    }
}

/// Runs the handlers of pending signals, if this is Python's main thread. Returns whether one raised.
fn signals() -> bool {
    let exception = Python::try_attach(|py| py.check_signals().err()).flatten();
    let stops = exception.is_some();
    if stops {
        RAISED.set(exception);
    }
    stops
}

/// Runs `work`, which may use Python objects, and returns its result.
pub fn attached<T>(py: Python<'_>, kind: Kind, what: &str, work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    caught(kind, what, || Ok(work())).unwrap_or_else(|error| Err(to_python(py, &error)))
}

/// Place at which a record begins: its line, with its number if several may be on one line.
#[derive(Debug, Clone, Copy, FromPyObject, IntoPyObject)]
pub enum Line {
    Alone(u64),
    Shared((u64, u64)),
}

impl Line {
    /// Returns the line of a location, if it has one.
    pub fn of(place: &Location) -> Option<Self> {
        place.line.map(|line| At { line, record: place.record }.into())
    }
}

impl From<Line> for At {
    fn from(line: Line) -> Self {
        match line {
            Line::Alone(line) => Self { line, record: None },
            Line::Shared((line, record)) => Self { line, record: Some(record) },
        }
    }
}

impl From<At> for Line {
    fn from(at: At) -> Self {
        at.record.map_or(Self::Alone(at.line), |record| Self::Shared((at.line, record)))
    }
}
