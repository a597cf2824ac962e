//! Python bindings of `tracegrad_core::images`: the images of traces, and their files by digest.

use crate::border::{with_python, without_gil};
use crate::traces::PyTraces;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use std::collections::HashSet;
use tracegrad_core::images::{Image, MEDIA_TYPES, digest};
use tracegrad_core::trace::Trace;
use tracegrad_core::{Error, Kind};

/// Columns of distinct images, in order; a dict in Python.
#[derive(IntoPyObject)]
struct Columns<'py> {
    /// Concatenated digests of 32 bytes.
    digests: Bound<'py, PyBytes>,
    widths: Vec<u32>,
    heights: Vec<u32>,
    media_types: Vec<&'static str>,
}

/// Returns the distinct images of traces.
#[pyfunction]
fn pictures_of<'py>(py: Python<'py>, traces: &PyTraces) -> PyResult<Columns<'py>> {
    with_python(py, Kind::Fault, "listing images", || Ok(columns(py, traces)))
}

fn columns<'py>(py: Python<'py>, traces: &PyTraces) -> Columns<'py> {
    let mut digests_so_far = HashSet::new();
    let all = traces.inner.iter().flat_map(|trace| &trace.images);
    let images: Vec<_> = all.filter(|image| digests_so_far.insert(image.digest)).collect();
    let digests: Vec<u8> = images.iter().flat_map(|image| image.digest).collect();
    let kind = |kind: u8| MEDIA_TYPES.get(usize::from(kind)).copied().unwrap_or_default();
    Columns {
        digests: PyBytes::new(py, &digests),
        widths: images.iter().map(|image| image.width).collect(),
        heights: images.iter().map(|image| image.height).collect(),
        media_types: images.iter().map(|image| kind(image.kind)).collect(),
    }
}

/// Returns the file with this digest, from the record that contains it.
#[pyfunction]
fn picture_bytes<'py>(py: Python<'py>, traces: &PyTraces, digest: [u8; 32]) -> PyResult<Bound<'py, PyBytes>> {
    let bytes = without_gil(py, Kind::Fault, "reading an image", || {
        let match_of_digest = traces.inner.iter().find_map(|trace| Some((trace, image(trace, &digest)?)));
        let (trace, image) = match_of_digest.ok_or_else(|| lost(&digest))?;
        trace.file(image)?.ok_or_else(|| lost(&digest).at(&trace.location))
    })?;
    Ok(PyBytes::new(py, &bytes))
}

fn image<'t>(trace: &'t Trace, digest: &[u8; 32]) -> Option<&'t Image> {
    trace.images.iter().find(|image| image.digest == *digest)
}

fn lost(digest: &[u8; 32]) -> Error {
    let name = digest.iter().take(8).fold(0_u64, |name, &byte| name << 8 | u64::from(byte));
    Error::new(Kind::Io, "TG-BORDER-008", format!("no record has the image {name:016x}..."))
        .why("The policy cannot see it again")
        .fix("Read the records that hold it")
}

/// Returns the digest of an image, which is the blake3 hash of its file.
#[pyfunction]
fn picture_digest(py: Python<'_>, file: PyBackedBytes) -> PyResult<Bound<'_, PyBytes>> {
    let hash = without_gil(py, Kind::Fault, "hashing an image", || Ok(digest(&file)))?;
    Ok(PyBytes::new(py, &hash))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(pictures_of, module)?)?;
    module.add_function(wrap_pyfunction!(picture_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(picture_digest, module)?)
}
