//! Python bindings of `tracegrad_core::images`: the images of traces, and their files by digest.

use crate::border::{attached, detached};
use crate::traces::PyTraces;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use std::collections::HashSet;
use tracegrad_core::images::{MEDIA_TYPES, Picture, digest};
use tracegrad_core::trace::Trace;
use tracegrad_core::{Error, Kind};

/// Columns of distinct images, in order: concatenated digests, widths, heights and media types.
type Columns<'py> = (Bound<'py, PyBytes>, Vec<u32>, Vec<u32>, Vec<&'static str>);

/// Returns the distinct images of traces.
#[pyfunction]
fn pictures_of<'py>(py: Python<'py>, traces: &PyTraces) -> PyResult<Columns<'py>> {
    attached(py, Kind::Fault, "listing pictures", || Ok(columns(py, traces)))
}

fn columns<'py>(py: Python<'py>, traces: &PyTraces) -> Columns<'py> {
    let mut digests_so_far = HashSet::new();
    let all = traces.inner.iter().flat_map(|trace| &trace.pictures);
    let pictures: Vec<_> = all.filter(|picture| digests_so_far.insert(picture.digest)).collect();
    let digests: Vec<u8> = pictures.iter().flat_map(|picture| picture.digest).collect();
    let kind = |kind: u8| MEDIA_TYPES.get(usize::from(kind)).copied().unwrap_or_default();
    (
        PyBytes::new(py, &digests),
        pictures.iter().map(|picture| picture.width).collect(),
        pictures.iter().map(|picture| picture.height).collect(),
        pictures.iter().map(|picture| kind(picture.kind)).collect(),
    )
}

/// Returns the file with this digest, from the record that contains it.
#[pyfunction]
fn picture_bytes<'py>(py: Python<'py>, traces: &PyTraces, digest: [u8; 32]) -> PyResult<Bound<'py, PyBytes>> {
    let bytes = detached(py, Kind::Fault, "reading a picture", || {
        let match_of_digest = traces.inner.iter().find_map(|trace| Some((trace, picture(trace, &digest)?)));
        let (trace, picture) = match_of_digest.ok_or_else(|| lost(&digest))?;
        trace.file(picture)?.ok_or_else(|| lost(&digest).at(&trace.location))
    })?;
    Ok(PyBytes::new(py, &bytes))
}

fn picture<'t>(trace: &'t Trace, digest: &[u8; 32]) -> Option<&'t Picture> {
    trace.pictures.iter().find(|picture| picture.digest == *digest)
}

fn lost(digest: &[u8; 32]) -> Error {
    let name = digest.iter().take(8).fold(0_u64, |name, &byte| name << 8 | u64::from(byte));
    Error::new(Kind::Io, "TG-BORDER-008", format!("no record has the picture {name:016x}..."))
        .why("The policy cannot see it again")
        .cure("Read the records that hold it")
}

/// Returns the digest of an image, which is the blake3 hash of its file.
#[pyfunction]
fn picture_digest(py: Python<'_>, file: PyBackedBytes) -> PyResult<Bound<'_, PyBytes>> {
    let hash = detached(py, Kind::Fault, "hashing a picture", || Ok(digest(&file)))?;
    Ok(PyBytes::new(py, &hash))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(pictures_of, module)?)?;
    module.add_function(wrap_pyfunction!(picture_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(picture_digest, module)?)
}
