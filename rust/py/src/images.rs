//! Binds `tracegrad_core::images`: the images of traces, and their files by digest.

use crate::border::{attached, detached};
use crate::traces::PyTraces;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use std::collections::HashSet;
use tracegrad_core::images::{MEDIA_TYPES, Picture, digest};
use tracegrad_core::trace::Trace;
use tracegrad_core::{Error, Kind};

/// Digests end to end, widths, heights and media types of the distinct pictures of traces, in order.
type Columns<'py> = (Bound<'py, PyBytes>, Vec<u32>, Vec<u32>, Vec<&'static str>);

/// The distinct pictures of traces.
#[pyfunction]
fn pictures_of<'py>(py: Python<'py>, traces: &PyTraces) -> PyResult<Columns<'py>> {
    attached(py, Kind::Fault, "listing pictures", || Ok(columns(py, traces)))
}

fn columns<'py>(py: Python<'py>, traces: &PyTraces) -> Columns<'py> {
    let mut seen = HashSet::new();
    let all = traces.inner.iter().flat_map(|trace| &trace.pictures);
    let found: Vec<_> = all.filter(|picture| seen.insert(picture.digest)).collect();
    let digests: Vec<u8> = found.iter().flat_map(|picture| picture.digest).collect();
    let kind = |kind: u8| MEDIA_TYPES.get(usize::from(kind)).copied().unwrap_or_default();
    (
        PyBytes::new(py, &digests),
        found.iter().map(|picture| picture.width).collect(),
        found.iter().map(|picture| picture.height).collect(),
        found.iter().map(|picture| kind(picture.kind)).collect(),
    )
}

/// The file with this digest, from the record that holds it.
#[pyfunction]
fn picture_bytes<'py>(py: Python<'py>, traces: &PyTraces, digest: [u8; 32]) -> PyResult<Bound<'py, PyBytes>> {
    let found = detached(py, Kind::Fault, "reading a picture", || {
        let held = traces.inner.iter().find_map(|trace| Some((trace, picture(trace, &digest)?)));
        let (trace, picture) = held.ok_or_else(|| lost(&digest))?;
        trace.file(picture)?.ok_or_else(|| lost(&digest).at(&trace.location))
    })?;
    Ok(PyBytes::new(py, &found))
}

fn picture<'t>(trace: &'t Trace, digest: &[u8; 32]) -> Option<&'t Picture> {
    trace.pictures.iter().find(|picture| picture.digest == *digest)
}

fn lost(digest: &[u8; 32]) -> Error {
    let name = digest.iter().take(8).fold(0_u64, |name, &byte| name << 8 | u64::from(byte));
    Error::new(Kind::Io, format!("no record has the picture {name:016x}..."))
        .why("The policy cannot see it again")
        .cure("Read the records that hold it")
}

/// The name of a picture: the blake3 of its file.
#[pyfunction]
fn picture_digest(py: Python<'_>, file: PyBackedBytes) -> PyResult<Bound<'_, PyBytes>> {
    let found = detached(py, Kind::Fault, "hashing a picture", || Ok(digest(&file)))?;
    Ok(PyBytes::new(py, &found))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(pictures_of, module)?)?;
    module.add_function(wrap_pyfunction!(picture_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(picture_digest, module)?)
}
