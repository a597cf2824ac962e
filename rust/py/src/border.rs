//! Wrappers for every call from Python: panics become errors, signals are handled, the GIL is released.
//!
//! Use [`without_gil`] for work without Python objects and [`with_python`] for work with them. Every function of this crate
//! that may fail runs in one of the two.

use crate::errors::to_python;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use std::cell::RefCell;
use tracegrad_core::{Kind, Location, RecordPlace, Result, cancel, catch_panic};

thread_local! {
    /// Exception that a signal handler raised during this thread's work.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Runs `work` without the GIL and returns its result. A signal handler runs within 50 milliseconds. If it raises, the
/// work is cancelled.
pub fn without_gil<T: Send>(
    py: Python<'_>,
    kind: Kind,
    what: &str,
    work: impl FnOnce() -> Result<T> + Send,
) -> PyResult<T> {
    let result = py.detach(|| cancel::run_cancellable(signals, || catch_panic(kind, what, work)));
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
pub fn with_python<T>(py: Python<'_>, kind: Kind, what: &str, work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_panic(kind, what, || Ok(work())).unwrap_or_else(|error| Err(to_python(py, &error)))
}

/// Place at which a record starts: its line, with its number if several may be on one line.
#[derive(Debug, Clone, Copy, FromPyObject, IntoPyObject)]
pub enum Line {
    Only(u64),
    WithRecord((u64, u64)),
}

impl Line {
    /// Returns the line of a location, if it has one.
    pub fn of(place: &Location) -> Option<Self> {
        place.line.map(|line| RecordPlace { line, record: place.record }.into())
    }
}

impl From<Line> for RecordPlace {
    fn from(line: Line) -> Self {
        match line {
            Line::Only(line) => Self { line, record: None },
            Line::WithRecord((line, record)) => Self { line, record: Some(record) },
        }
    }
}

impl From<RecordPlace> for Line {
    fn from(at: RecordPlace) -> Self {
        at.record.map_or(Self::Only(at.line), |record| Self::WithRecord((at.line, record)))
    }
}
