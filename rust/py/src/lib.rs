//! The Python border: arrays in and out without copying, errors mapped once, the GIL released around pure calls.
//!
//! No decision about the domain is made here; each file binds one room of `tracegrad_core`.

#![allow(clippy::needless_pass_by_value, reason = "arguments of a Python call arrive owned")]

use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;

mod align;
mod border;
mod compose;
mod conversation;
mod errors;
mod flags;
mod json;
mod memory;
mod pack;
mod pictures;
mod ratio;
mod reader;
mod template;
mod tokenizer;
mod trace_files;
mod traces;

/// Traces are many small values that live and die together: what the system's allocator does slowest.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    load_numpy(module.py())?;
    errors::register(module)?;
    traces::register(module)?;
    trace_files::register(module)?;
    module.add_class::<reader::PyTraceReader>()?;
    template::register(module)?;
    tokenizer::register(module)?;
    align::register(module)?;
    conversation::register(module)?;
    ratio::register(module)?;
    pack::register(module)?;
    pictures::register(module)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}

/// Loads the C interface of numpy now: within a call a signal that comes meanwhile would make its loading panic.
fn load_numpy(py: Python<'_>) -> PyResult<()> {
    py.import("numpy")?;
    let _ = PyArray1::<i64>::zeros(py, 0, false).readonly();
    Ok(())
}
