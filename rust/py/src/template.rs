//! Python bindings of `tracegrad_core::template`: Python objects or JSON text as input, rendered text and span arrays
//! as output.

use crate::border::{with_python, without_gil};
use crate::json;
use numpy::{IntoPyArray, PyArray1, PyArray2};
use pyo3::prelude::*;
use pyo3::types::PyString;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use tracegrad_core::template::{NO_MESSAGE, Rendered, Template};
use tracegrad_core::{Kind, Result};

/// A chat template compiled from its source.
#[pyclass(frozen, module = "tracegrad._core", name = "Template")]
pub struct PyTemplate {
    inner: Template,
    tools: ToolCache,
}

#[pymethods]
impl PyTemplate {
    #[new]
    fn new(py: Python<'_>, source: &str, special_tokens: Vec<(String, String)>) -> PyResult<Self> {
        let compile = || Template::compile(source, &special_tokens);
        let inner = without_gil(py, Kind::Template, WHAT, compile)?;
        Ok(Self { inner, tools: ToolCache::default() })
    }

    #[getter]
    fn has_generation(&self) -> bool {
        self.inner.has_generation()
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
        let render = || call.parsed(&self.tools)?.rendered(&self.inner, add_generation_prompt);
        columns_of(py, without_gil(py, Kind::Template, WHAT, render)?)
    }

    fn render_text(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        add_generation_prompt: bool,
        kwargs: &Bound<'_, PyAny>,
    ) -> PyResult<String> {
        let call = Arguments::of(py, messages, tools, kwargs, &self.tools)?;
        without_gil(py, Kind::Template, WHAT, || call.parsed(&self.tools)?.text(&self.inner, add_generation_prompt))
    }
}

/// Arguments of a template. Python objects are converted; JSON text is not parsed yet.
pub struct Arguments<'a> {
    messages: Argument<'a>,
    tools: Option<ToolsArgument<'a>>,
    kwargs: Argument<'a>,
}

impl<'a> Arguments<'a> {
    pub fn of(
        py: Python<'_>,
        messages: &'a Bound<'_, PyAny>,
        tools: Option<&'a Bound<'_, PyAny>>,
        kwargs: &'a Bound<'_, PyAny>,
        cache: &ToolCache,
    ) -> PyResult<Self> {
        with_python(py, Kind::Template, "the arguments of the chat template", || {
            let tools = tools.map(|tools| cache.given(tools)).transpose()?;
            Ok(Self { messages: Argument::of("messages", messages)?, tools, kwargs: Argument::of(VARIABLES, kwargs)? })
        })
    }

    /// Parses all arguments. Tools that were parsed before come from `cache`.
    pub fn parsed(self, cache: &ToolCache) -> Result<Parsed> {
        let tools = match self.tools {
            Some(ToolsArgument::Text(text)) => Some(cache.parsed(text)?),
            Some(ToolsArgument::Read(tools)) => Some(tools),
            None => None,
        };
        let list = |value| if let Value::Array(items) = value { Ok(items) } else { Err(value) };
        let object = |value| if let Value::Object(map) = value { Ok(map) } else { Err(value) };
        let kwargs = self.kwargs.parsed(VARIABLES, object)?;
        Ok(Parsed { messages: self.messages.parsed("messages", list)?, tools, kwargs })
    }
}

/// Name of a template in errors.
pub const WHAT: &str = "the chat template";
/// Name of the template's own variables in errors.
const VARIABLES: &str = "template variables";

enum Argument<'a> {
    Text(&'a str),
    Value(Value),
}

impl<'a> Argument<'a> {
    fn of(name: &str, object: &'a Bound<'_, PyAny>) -> PyResult<Self> {
        match object.cast::<PyString>() {
            Ok(text) => Ok(Self::Text(text.to_str()?)),
            Err(_) => json::read(name, object).map(Self::Value),
        }
    }

    /// Parses the text, or converts the value with `take`. If `take` returns the value, its JSON text is parsed for the
    /// error.
    fn parsed<T: DeserializeOwned>(
        self,
        name: &str,
        convert: impl Fn(Value) -> std::result::Result<T, Value>,
    ) -> Result<T> {
        match self {
            Self::Text(text) => json::parsed(name, text),
            Self::Value(value) => convert(value).or_else(|value| json::parsed(name, &value.to_string())),
        }
    }
}

/// Parsed arguments of a template.
pub struct Parsed {
    pub messages: Vec<Value>,
    pub tools: Option<Arc<Value>>,
    pub kwargs: Map<String, Value>,
}

impl Parsed {
    /// Renders a template with these arguments.
    pub fn rendered(&self, template: &Template, add_generation_prompt: bool) -> Result<Rendered> {
        template.render(&self.messages(), self.tools.as_ref(), add_generation_prompt, &self.kwargs)
    }

    /// Renders a template to text, without provenance.
    pub fn text(&self, template: &Template, add_generation_prompt: bool) -> Result<String> {
        template.render_text(&self.messages(), self.tools.as_ref(), add_generation_prompt, &self.kwargs)
    }

    fn messages(&self) -> Vec<&Value> {
        self.messages.iter().collect()
    }
}

enum ToolsArgument<'a> {
    Text(&'a str),
    Read(Arc<Value>),
}

/// Tool schemas, with their JSON text if they were passed as text.
type ToolSet = (Option<Box<str>>, Arc<Value>);

/// Cache of tool schemas, the oldest first.
#[derive(Default)]
pub struct ToolCache(Mutex<Vec<ToolSet>>);

/// Number of cached sets.
const SETS: usize = 16;
/// Bytes of the longest text that is cached.
const TEXT_BYTES: usize = 1 << 20;

impl ToolCache {
    fn given<'a>(&self, object: &'a Bound<'_, PyAny>) -> PyResult<ToolsArgument<'a>> {
        if let Ok(text) = object.cast::<PyString>() {
            return Ok(ToolsArgument::Text(text.to_str()?));
        }
        if let Some(tools) = self.known(|(_, tools)| json::is(object, tools)) {
            return Ok(ToolsArgument::Read(tools));
        }
        let tools = Arc::new(json::read("tools", object)?);
        self.keep(None, &tools);
        Ok(ToolsArgument::Read(tools))
    }

    fn parsed(&self, text: &str) -> Result<Arc<Value>> {
        if let Some(tools) = self.known(|(cache, _)| cache.as_deref() == Some(text)) {
            return Ok(tools);
        }
        let tools = Arc::new(json::parsed("tools", text)?);
        if text.len() <= TEXT_BYTES {
            self.keep(Some(text.into()), &tools);
        }
        Ok(tools)
    }

    fn known(&self, is_it: impl Fn(&ToolSet) -> bool) -> Option<Arc<Value>> {
        self.sets()?.iter().find(|set| is_it(set)).map(|(_, tools)| Arc::clone(tools))
    }

    fn keep(&self, text: Option<Box<str>>, tools: &Arc<Value>) {
        let Some(mut sets) = self.sets() else { return };
        if sets.len() == SETS {
            sets.remove(0);
        }
        sets.push((text, Arc::clone(tools)));
    }

    /// Returns `None` while another thread has the lock: after a fork that thread may not exist.
    fn sets(&self) -> Option<MutexGuard<'_, Vec<ToolSet>>> {
        match self.0.try_lock() {
            Ok(sets) => Some(sets),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// A rendered prompt, a dict in Python: the arguments of `Rendered`.
#[derive(IntoPyObject)]
pub struct RenderedColumns<'py> {
    text: Bound<'py, PyString>,
    start: Bound<'py, PyArray1<i64>>,
    end: Bound<'py, PyArray1<i64>>,
    message: Bound<'py, PyArray1<i32>>,
    field: Bound<'py, PyArray1<u8>>,
    generation: Bound<'py, PyArray2<i64>>,
    exact_provenance: bool,
}

/// Converts a rendered prompt for Python.
pub fn columns_of(py: Python<'_>, rendered: Rendered) -> PyResult<RenderedColumns<'_>> {
    let column = |pick: fn(&tracegrad_core::template::Span) -> i64| -> Bound<'_, PyArray1<i64>> {
        rendered.spans.iter().map(pick).collect::<Vec<_>>().into_pyarray(py)
    };
    let message = |message: u32| if message == NO_MESSAGE { -1 } else { i32::try_from(message).unwrap_or(i32::MAX) };
    let messages: Vec<i32> = rendered.spans.iter().map(|span| message(span.message)).collect();
    let fields: Vec<u8> = rendered.spans.iter().map(|span| span.field as u8).collect();
    let pairs: Vec<Vec<i64>> =
        rendered.generation.iter().map(|(start, end)| vec![*start as i64, *end as i64]).collect();
    let generation = if pairs.is_empty() {
        PyArray2::<i64>::zeros(py, [0, 2], false)
    } else {
        PyArray2::from_vec2(py, &pairs).map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))?
    };
    Ok(RenderedColumns {
        text: PyString::new(py, &rendered.text),
        start: column(|span| span.start as i64),
        end: column(|span| span.end as i64),
        message: messages.into_pyarray(py),
        field: fields.into_pyarray(py),
        generation,
        exact_provenance: rendered.exact_provenance,
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTemplate>()
}
