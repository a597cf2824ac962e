//! Python bindings of `tracegrad_core::tokenizer`: text as input, int32 arrays as output. The GIL is released during
//! the work.

use crate::border::without_gil;
use crate::template::{Arguments, RenderedColumns, ToolCache, WHAT, columns_of};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyString, PyTuple};
use std::path::PathBuf;
use std::sync::Arc;
use tracegrad_core::tokenizer::{Spelling, Tokenizer};
use tracegrad_core::{Error, Kind, Result};

/// A tokenizer with its chat template.
#[pyclass(frozen, module = "tracegrad._core", name = "Tokenizer")]
pub struct PyTokenizer {
    /// The tokenizer, shared with calls of align.
    pub inner: Arc<Tokenizer>,
    /// Cache of the tool schemas of its calls.
    pub tools: ToolCache,
}

type Ids<'py> = Bound<'py, PyArray1<i32>>;

#[pymethods]
impl PyTokenizer {
    #[staticmethod]
    #[pyo3(signature = (path, vocab_size=None, cache=None))]
    fn from_dir(py: Python<'_>, path: PathBuf, vocab_size: Option<u32>, cache: Option<PathBuf>) -> PyResult<Self> {
        let load = || Tokenizer::from_dir_of(&path, vocab_size, cache.as_deref());
        without_gil(py, Kind::Tokenizer, "the tokenizer", load).map(Self::of)
    }

    /// Creates a tokenizer from the result of `source`.
    #[staticmethod]
    fn from_source(py: Python<'_>, json: &[u8], config: &[u8]) -> PyResult<Self> {
        without_gil(py, Kind::Tokenizer, "the tokenizer", || Tokenizer::from_source(json, config)).map(Self::of)
    }

    /// Returns the arguments of `from_source`, which also work in another process.
    fn source<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
        let (json, config) = without_gil(py, Kind::Tokenizer, "the tokenizer", || self.inner.source())?;
        Ok((PyBytes::new(py, json), PyBytes::new(py, &config)))
    }

    fn encode<'py>(&self, py: Python<'py>, text: Bound<'py, PyString>) -> PyResult<Ids<'py>> {
        let borrowed = text.to_str()?;
        let ids = if self.inner.is_long(borrowed) {
            let owned_text = PyBackedStr::try_from(text)?;
            without_gil(py, Kind::Tokenizer, "encoding", || self.inner.encode_shared(owned_text))?
        } else {
            without_gil(py, Kind::Tokenizer, "encoding", || self.inner.encode(borrowed))?
        };
        Ok(signed(ids).into_pyarray(py))
    }

    fn encode_with_ends<'py>(
        &self,
        py: Python<'py>,
        text: PyBackedStr,
    ) -> PyResult<(Ids<'py>, Bound<'py, PyArray1<i64>>)> {
        let encode = || self.inner.encode_with_ends_shared(text, 0);
        let (ids, ends) = without_gil(py, Kind::Tokenizer, "encoding", encode)?;
        let ends: Vec<i64> = ends.into_iter().map(i64::from).collect();
        Ok((signed(ids).into_pyarray(py), ends.into_pyarray(py)))
    }

    fn encode_batch<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<PyBackedStr>,
    ) -> PyResult<(Ids<'py>, Bound<'py, PyArray1<i64>>)> {
        let encode = || self.inner.encode_batch(texts).map(flattened);
        let (ids, offsets) = without_gil(py, Kind::Tokenizer, "encoding", encode)?;
        Ok((ids.into_pyarray(py), offsets.into_pyarray(py)))
    }

    fn decode_bytes<'py>(&self, py: Python<'py>, ids: PyReadonlyArray1<'py, i64>) -> PyResult<Bound<'py, PyBytes>> {
        let ids = ids.as_slice()?;
        let bytes = without_gil(py, Kind::Tokenizer, "decoding", || {
            let ids: Vec<u32> = ids.iter().enumerate().map(|(at, id)| unsigned(at, *id)).collect::<Result<_>>()?;
            self.inner.decode_bytes(&ids)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    #[getter]
    fn model_vocab_size(&self) -> u32 {
        self.inner.model_vocab_size()
    }

    fn token_bytes<'py>(&self, py: Python<'py>, id: u32) -> Option<Bound<'py, PyBytes>> {
        self.inner.token_bytes(id).map(|bytes| PyBytes::new(py, bytes))
    }

    fn id_of_bytes(&self, bytes: &[u8]) -> Option<u32> {
        self.inner.id_of_bytes(bytes)
    }

    fn id_of_added(&self, text: &str) -> Option<u32> {
        self.inner.id_of_added(text)
    }

    fn is_special(&self, id: u32) -> bool {
        self.inner.is_special(id)
    }

    fn is_added(&self, id: u32) -> bool {
        self.inner.is_added(id)
    }

    fn render<'py>(
        &self,
        py: Python<'py>,
        messages: &Bound<'py, PyAny>,
        tools: Option<&Bound<'py, PyAny>>,
        add_generation_prompt: bool,
        kwargs: &Bound<'py, PyAny>,
    ) -> PyResult<RenderedColumns<'py>> {
        let call = Arguments::of(py, messages, tools, kwargs, &self.tools)?;
        let render = || {
            let call = call.parsed(&self.tools)?;
            call.rendered(self.inner.template_for(call.tools.as_ref())?, add_generation_prompt)
        };
        columns_of(py, without_gil(py, Kind::Template, WHAT, render)?)
    }

    fn render_ids<'py>(
        &self,
        py: Python<'py>,
        messages: &Bound<'py, PyAny>,
        tools: Option<&Bound<'py, PyAny>>,
        add_generation_prompt: bool,
        kwargs: &Bound<'py, PyAny>,
    ) -> PyResult<Ids<'py>> {
        let call = Arguments::of(py, messages, tools, kwargs, &self.tools)?;
        let ids = without_gil(py, Kind::Template, WHAT, || {
            let call = call.parsed(&self.tools)?;
            let template = self.inner.template_for(call.tools.as_ref())?;
            self.inner.encode_shared(call.text(template, add_generation_prompt)?).map(signed)
        })?;
        Ok(ids.into_pyarray(py))
    }

    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    #[getter]
    fn eos_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.inner.eos_ids())
    }

    #[getter]
    fn spelling(&self) -> &'static str {
        match self.inner.spelling() {
            Spelling::ByteLevel => "byte-level",
            Spelling::SentencePiece => "sentencepiece",
            Spelling::Other => "other",
        }
    }

    /// Returns the arguments of `TokenizerReport`.
    #[getter]
    fn report(&self) -> Report<'_> {
        let report = self.inner.report();
        Report {
            backend: report.backend,
            reason: &report.reason,
            probes: report.probes,
            cache_disabled_reason: report.cache_disabled_reason,
        }
    }

    /// Returns a text that transformers 5 would encode otherwise, or `None`.
    #[getter]
    fn rebuilt(&self) -> Option<Rebuilt<'_>> {
        let difference = self.inner.rebuilt()?;
        Some(Rebuilt {
            class: &difference.class,
            text: &difference.text,
            ids: difference.ids.clone(),
            other: difference.other.clone(),
        })
    }

    #[getter]
    fn has_generation(&self) -> bool {
        self.inner.template().is_some_and(tracegrad_core::template::Template::has_generation)
    }

    #[getter]
    fn has_template(&self) -> bool {
        self.inner.template().is_some()
    }

    fn __len__(&self) -> usize {
        self.inner.vocab_size() as usize
    }
}

impl PyTokenizer {
    fn of(inner: Tokenizer) -> Self {
        Self { inner: Arc::new(inner), tools: ToolCache::default() }
    }
}

/// The code that computes ids, and why; a dict in Python.
#[derive(IntoPyObject)]
struct Report<'a> {
    backend: &'static str,
    reason: &'a str,
    probes: usize,
    cache_disabled_reason: Option<&'static str>,
}

/// A text whose ids are `other` by the class that transformers 5 builds; a dict in Python.
#[derive(IntoPyObject)]
struct Rebuilt<'a> {
    class: &'a str,
    text: &'a str,
    ids: Vec<u32>,
    other: Vec<u32>,
}

/// Converts ids to int32, the type in Python. Vocabularies are far smaller than 2^31.
pub fn signed(ids: Vec<u32>) -> Vec<i32> {
    ids.into_iter().map(|id| id as i32).collect()
}

/// Converts an id to the type of the core.
pub fn unsigned(index: usize, id: i64) -> Result<u32> {
    u32::try_from(id).map_err(|_| {
        let mut error = Error::new(Kind::Argument, "TG-BORDER-017", format!("id {id} is not a token id"))
            .why("Ids are between 0 and the size of the vocabulary")
            .fix("Cut padding such as -100 off before decoding");
        error.location.token = Some(index);
        error
    })
}

/// Returns the concatenated ids, and the offset at which each text starts.
fn flattened(encoded: Vec<Vec<u32>>) -> (Vec<i32>, Vec<i64>) {
    let mut offsets = Vec::with_capacity(encoded.len() + 1);
    let mut ids = Vec::with_capacity(encoded.iter().map(Vec::len).sum());
    offsets.push(0);
    for row in encoded {
        ids.extend(row.into_iter().map(|id| id as i32));
        offsets.push(ids.len() as i64);
    }
    (ids, offsets)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTokenizer>()
}
