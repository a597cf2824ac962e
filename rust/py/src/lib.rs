//! The Python bindings: arrays are passed without a copy, errors are converted in one place, and the GIL is released
//! around pure Rust work.
//!
//! This crate makes no domain decisions. Each file binds one module of `tracegrad_core`.
#![allow(clippy::needless_pass_by_value, reason = "arguments of a Python call arrive owned")]

mod align;
mod bool_array;
mod border;
mod compose;
mod errors;
mod images;
mod json;
mod memory;
mod pack;
mod ratio;
mod read;
mod template;
mod token_sets;
mod tokenizer;
mod traces;

use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;

/// A trace consists of many small values that are freed together. The system's allocator is slow at that.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    load_numpy(module.py())?;
    errors::register(module)?;
    traces::register(module)?;
    read::register(module)?;
    module.add_class::<read::PyTraceReader>()?;
    template::register(module)?;
    tokenizer::register(module)?;
    align::register(module)?;
    align::register_conversation(module)?;
    ratio::register(module)?;
    pack::register(module)?;
    images::register(module)?;
    token_sets::register(module)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}

/// Loads numpy's C interface at import. If it were loaded during a call, a pending signal would make it panic.
fn load_numpy(py: Python<'_>) -> PyResult<()> {
    py.import("numpy")?;
    let _ = PyArray1::<i64>::zeros(py, 0, false).readonly();
    Ok(())
}
