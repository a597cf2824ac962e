//! Arrays of bool from Python. Their bytes may be anything, but Rust's `bool` allows only 0 and 1.

use crate::errors::to_python;
use numpy::{PyReadonlyArray1, PyUntypedArray};
use pyo3::prelude::*;
use pyo3::{Borrowed, intern};
use tracegrad_core::{Error, Kind};

/// An array of bool whose bytes were all checked to be 0 or 1.
pub struct Flags<'py>(PyReadonlyArray1<'py, bool>);

impl<'py> FromPyObject<'_, 'py> for Flags<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let flags = object.extract::<PyReadonlyArray1<'py, bool>>()?;
        // The bytes are checked as u8 before anything reads them as bool.
        let bytes = object.cast::<PyUntypedArray>()?.call_method1(intern!(object.py(), "view"), ("u1",))?;
        let bytes = bytes.extract::<PyReadonlyArray1<'py, u8>>()?;
        let bits = match bytes.as_slice() {
            Ok(bytes) => bytes.iter().fold(0, |bits, byte| bits | byte),
            Err(_) => bytes.as_array().iter().fold(0, |bits, byte| bits | byte),
        };
        if bits <= 1 {
            return Ok(Self(flags));
        }
        let error = Error::new(Kind::Argument, "TG-BORDER-004", "an array of bool has bytes other than 0 and 1")
            .why("It was made from other bytes, by a view or from a changed file")
            .fix("Make it again: array.view('u1') != 0");
        Err(to_python(object.py(), &error))
    }
}

impl Flags<'_> {
    pub fn as_slice(&self) -> PyResult<&[bool]> {
        Ok(self.0.as_slice()?)
    }
}
