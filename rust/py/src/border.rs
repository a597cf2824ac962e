//! What every call from Python goes through: panics become errors, signals are answered, the GIL is released.
//!
//! [`detached`] is for work that needs no Python object, [`attached`] for what handles them. A function of this crate is
//! either in one of the two or does nothing that may fail.

use crate::errors::to_python;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use std::cell::RefCell;
use tracegrad_core::{At, Kind, Location, Result, cancel, caught};

thread_local! {
    /// What the handler of a signal raised while this thread was at work.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// What `work` gives, done without the GIL. A signal's handler runs within 50 milliseconds; where it raises, the work ends.
pub fn detached<T: Send>(
    py: Python<'_>,
    kind: Kind,
    what: &str,
    work: impl FnOnce() -> Result<T> + Send,
) -> PyResult<T> {
    let found = py.detach(|| cancel::watched(signals, || caught(kind, what, work)));
    if let Some(raised) = RAISED.take() {
        return Err(raised);
    }
    match found {
        Some(found) => found.map_err(|error| to_python(py, &error)),
        None => Err(PyKeyboardInterrupt::new_err(())),
    }
}

/// Runs the handlers of signals that have come, if this is Python's main thread; whether one raised.
fn signals() -> bool {
    let raised = Python::try_attach(|py| py.check_signals().err()).flatten();
    let stops = raised.is_some();
    if stops {
        RAISED.set(raised);
    }
    stops
}

/// What `work` on Python's objects gives.
pub fn attached<T>(py: Python<'_>, kind: Kind, what: &str, work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    caught(kind, what, || Ok(work())).unwrap_or_else(|error| Err(to_python(py, &error)))
}

/// Where a record begins: its line alone, or with its number where several may stand on one line.
#[derive(Debug, Clone, Copy, FromPyObject, IntoPyObject)]
pub enum Line {
    Alone(u64),
    Shared((u64, u64)),
}

impl Line {
    /// The line of a place, where it has one.
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
