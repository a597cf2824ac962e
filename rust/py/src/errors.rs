//! Converts `tracegrad_core::Error` to Python: one exception class per kind, all derived from `TracegradError`.

use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tracegrad_core::{Error, Kind};

create_exception!(tracegrad, TracegradError, PyValueError, "What was found, where, why it matters, what to do.");
create_exception!(tracegrad, ReadError, TracegradError, "Bytes that cannot be read: missing file, truncated stream.");
create_exception!(tracegrad, FormatError, TracegradError, "A record that is not JSON or not a trace.");
create_exception!(tracegrad, TemplateError, TracegradError, "A chat template that does not compile, raises or loops.");
create_exception!(tracegrad, TokenizerError, TracegradError, "A tokenizer that cannot be loaded or does not fit.");
create_exception!(tracegrad, AlignmentError, TracegradError, "Recorded tokens that contradict the trainer's.");
create_exception!(tracegrad, ArgumentError, TracegradError, "Arguments of a call that contradict one another.");

/// Creates the Python exception for a core error, with its location as attributes.
pub fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let text = error.to_string();
    let exception = match error.kind {
        Kind::Io => ReadError::new_err(text),
        Kind::Format => FormatError::new_err(text),
        Kind::Template => TemplateError::new_err(text),
        Kind::Tokenizer => TokenizerError::new_err(text),
        Kind::Alignment => AlignmentError::new_err(text),
        Kind::Argument => ArgumentError::new_err(text),
        _ => TracegradError::new_err(text),
    };
    let value = exception.value(py);
    let place = &error.location;
    let _ = value.setattr("file", place.file.as_deref());
    let _ = value.setattr("line", place.line);
    let _ = value.setattr("trace", place.trace.as_deref());
    let _ = value.setattr("turn", place.turn);
    let _ = value.setattr("token", place.token);
    exception
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("TracegradError", py.get_type::<TracegradError>())?;
    module.add("ReadError", py.get_type::<ReadError>())?;
    module.add("FormatError", py.get_type::<FormatError>())?;
    module.add("TemplateError", py.get_type::<TemplateError>())?;
    module.add("TokenizerError", py.get_type::<TokenizerError>())?;
    module.add("AlignmentError", py.get_type::<AlignmentError>())?;
    module.add("ArgumentError", py.get_type::<ArgumentError>())
}
