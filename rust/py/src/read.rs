//! Python bindings of `tracegrad_core::read`: readers and writers of files.
//!
//! A file can be read as traces, or as records that the caller converts before they are decoded. A file of groups is
//! read frame by frame while it grows.

use crate::border::{Line, without_gil};
use crate::memory;
use crate::traces::{PyTraces, form_name, locked, report_dict};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict};
use std::path::PathBuf;
use std::sync::Mutex;
use tracegrad_core::read::{Converted, Frames, OnError, Options, RawRecord, Reader, Writer};
use tracegrad_core::{Error, Kind, cancel};

/// Reader of a stream of traces.
#[pyclass(frozen, module = "tracegrad._core", name = "TraceReader")]
pub struct PyTraceReader {
    /// `None` after a cancelled call: the traces it had read are lost, and a further read would skip them silently.
    inner: Mutex<Option<Reader>>,
    format_name: Option<&'static str>,
}

/// A record of the file (line, bytes), and the caller's conversion of it.
type MadeRow = (Line, PyBackedBytes, MadeOf);

/// Result of a caller's conversion of a record.
#[derive(FromPyObject)]
enum MadeOf {
    Record(PyBackedBytes),
    Refused((String, String, String)),
}

impl PyTraceReader {
    /// Runs `work` with the reader. Raises if an earlier call was cancelled.
    fn with<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut Reader) -> Result<T, Error> + Send) -> PyResult<T> {
        without_gil(py, Kind::Fault, "reading a file", || {
            let mut guard = locked(&self.inner);
            let mut reader = guard.take().ok_or_else(stopped)?;
            let result = work(&mut reader);
            *guard = Some(reader);
            result
        })
    }
}

#[pymethods]
impl PyTraceReader {
    #[new]
    #[pyo3(signature = (path, on_error, quarantine, limit, max_record_bytes, chunk_bytes, format, name=None))]
    #[allow(clippy::too_many_arguments, reason = "the keywords of one Python function")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        on_error: &str,
        quarantine: Option<PathBuf>,
        limit: Option<u64>,
        max_record_bytes: usize,
        chunk_bytes: usize,
        format: &str,
        name: Option<&str>,
    ) -> PyResult<Self> {
        let format = form_name(py, format)?;
        let on_error = match (on_error, quarantine) {
            ("raise", _) => OnError::Raise,
            ("quarantine", Some(path)) => OnError::Quarantine(path),
            _ => OnError::Skip,
        };
        let options = Options { on_error, limit, max_record_bytes, chunk_bytes, format };
        let reader = without_gil(py, Kind::Fault, "opening a file", || Reader::open_as(&path, name, options))?;
        Ok(Self { inner: Mutex::new(Some(reader)), format_name: format })
    }

    fn batch(&self, py: Python<'_>, count: usize) -> PyResult<PyTraces> {
        let traces = self.with(py, |reader| {
            let traces = reader.batch(count)?;
            done(reader, traces.len() < count);
            Ok(traces)
        })?;
        Ok(PyTraces::new(traces, self.format_name))
    }

    /// Reads traces up to a bad record that the caller may be able to convert. Returns the traces and that record.
    fn batch_asking<'py>(&self, py: Python<'py>, count: usize) -> PyResult<(PyTraces, Option<CutRow<'py>>)> {
        let (traces, refused) = self.with(py, |reader| {
            let (traces, refused) = reader.batch_until_unknown(count)?;
            done(reader, refused.is_none() && traces.len() < count);
            Ok((traces, refused))
        })?;
        Ok((PyTraces::new(traces, self.format_name), refused.map(|cut| row(py, &cut))))
    }

    /// Applies the error policy to that record, if the caller cannot convert it.
    fn settle_refused(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, Reader::reject_unknown)
    }

    /// Returns the lines and bytes of records without decoding them.
    fn cut<'py>(&self, py: Python<'py>, count: usize, most: usize) -> PyResult<Vec<CutRow<'py>>> {
        let records = self.with(py, |reader| reader.raw_records(count, most))?;
        Ok(records.iter().map(|cut| row(py, cut)).collect())
    }

    /// Takes back the records of the first call of `cut`, to be decoded unchanged.
    fn put_back(&self, py: Python<'_>, records: Vec<(Line, PyBackedBytes)>) -> PyResult<()> {
        let records =
            records.into_iter().map(|(line, bytes)| RawRecord { at: line.into(), bytes: (*bytes).into() }).collect();
        self.with(py, |reader| {
            reader.unread(records);
            Ok(())
        })
    }

    /// Decodes converted records. A conversion is the bytes, or what is wrong, why it matters, and what to do.
    fn decode(&self, py: Python<'_>, made: Vec<MadeRow>) -> PyResult<PyTraces> {
        let rows = made.into_iter().map(|(line, origin, made)| {
            let made = match made {
                MadeOf::Record(bytes) => Converted::Record((*bytes).into()),
                MadeOf::Refused((what, why, cure)) => Converted::Refused([what, why, cure]),
            };
            (RawRecord { at: line.into(), bytes: (*origin).into() }, made)
        });
        let rows = rows.collect();
        let traces = self.with(py, |reader| reader.decode(rows))?;
        Ok(PyTraces::new(traces, self.format_name))
    }

    /// Returns the number of bytes read from the file so far.
    fn taken(&self, py: Python<'_>) -> PyResult<u64> {
        without_gil(py, Kind::Fault, "reading a file", || {
            locked(&self.inner).as_ref().map(Reader::bytes_read).ok_or_else(stopped)
        })
    }

    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = || locked(&self.inner).as_ref().map(|reader| reader.report().clone()).ok_or_else(stopped);
        let report = without_gil(py, Kind::Fault, "reading a file", report)?;
        report_dict(py, &report)
    }
}

/// Returns memory to the system at the end of a large file.
fn done(reader: &Reader, ended: bool) {
    if ended && reader.bytes_read() > memory::MIN_FILE_BYTES {
        memory::release_to_system();
    }
}

/// A record and its place, as Python objects.
type CutRow<'py> = (Line, Bound<'py, PyBytes>);

fn row<'py>(py: Python<'py>, cut: &RawRecord) -> CutRow<'py> {
    (cut.at.into(), PyBytes::new(py, &cut.bytes))
}

fn stopped() -> Error {
    Error::new(Kind::Argument, "TG-BORDER-015", "the stream was stopped while it was read")
        .why("Traces that it had read are gone, and the next ones would follow as if there were none")
        .fix("Open the file again")
}

/// Reader of a file of groups that are zstd frames.
#[pyclass(frozen, module = "tracegrad._core", name = "Frames")]
pub struct PyFrames {
    inner: Mutex<Frames>,
}

#[pymethods]
impl PyFrames {
    #[new]
    fn new(py: Python<'_>, path: PathBuf, start: u64, most: usize) -> PyResult<Self> {
        let frames = without_gil(py, Kind::Fault, "opening a file", || Frames::open(&path, start, most))?;
        Ok(Self { inner: Mutex::new(frames) })
    }

    fn next(&self, py: Python<'_>) -> PyResult<Option<(PyTraces, u64)>> {
        let frame = without_gil(py, Kind::Fault, "reading a file", || locked(&self.inner).next_frame())?;
        Ok(frame.map(|frame| (PyTraces::new(frame.traces, None), frame.length)))
    }
}

/// Writer of a file. The file gets its name when the writer is finished.
#[pyclass(frozen, module = "tracegrad._core", name = "TraceWriter")]
pub struct PyTraceWriter {
    inner: Mutex<Option<Writer>>,
}

#[pymethods]
impl PyTraceWriter {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let writer = without_gil(py, Kind::Fault, "writing a file", || Writer::create(&path))?;
        Ok(Self { inner: Mutex::new(Some(writer)) })
    }

    fn write(&self, py: Python<'_>, traces: &PyTraces) -> PyResult<()> {
        without_gil(py, Kind::Fault, "writing a file", || {
            let mut writer = locked(&self.inner);
            let writer = writer.as_mut().ok_or_else(closed)?;
            traces.inner.iter().try_for_each(|trace| {
                cancel::check();
                writer.write(trace)
            })
        })
    }

    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let finish = || locked(&self.inner).take().ok_or_else(closed).and_then(Writer::finish);
        without_gil(py, Kind::Fault, "writing a file", finish)
    }

    fn abandon(&self) {
        locked(&self.inner).take();
    }
}

fn closed() -> Error {
    Error::new(Kind::Argument, "TG-BORDER-016", "the writer is closed").fix("Open another one")
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyFrames>()?;
    module.add_class::<PyTraceWriter>()
}
