//! Binds `tracegrad_core::template`: Python's objects or JSON text in, rendered text and span arrays out.

use crate::border::{attached, detached};
use crate::json;
use numpy::{IntoPyArray, PyArray1, PyArray2};
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use tracegrad_core::template::{NO_MESSAGE, Rendered, Template};
use tracegrad_core::{Kind, Result};

/// A chat template compiled from its source.
#[pyclass(frozen, module = "tracegrad._core", name = "Template")]
pub struct PyTemplate {
    inner: Template,
    tools: KnownTools,
}

#[pymethods]
impl PyTemplate {
    #[new]
    fn new(py: Python<'_>, source: &str, special_tokens: Vec<(String, String)>) -> PyResult<Self> {
        let compile = || Template::compile(source, &special_tokens);
        let inner = detached(py, Kind::Template, WHAT, compile)?;
        Ok(Self { inner, tools: KnownTools::default() })
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
    ) -> PyResult<Bound<'py, PyTuple>> {
        let call = Arguments::of(py, messages, tools, kwargs, &self.tools)?;
        let render = || call.parsed(&self.tools)?.rendered(&self.inner, add_generation_prompt);
        to_tuple(py, detached(py, Kind::Template, WHAT, render)?)
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
        detached(py, Kind::Template, WHAT, || call.parsed(&self.tools)?.text(&self.inner, add_generation_prompt))
    }
}

/// What a template is called with: Python's objects read, JSON text yet to be parsed.
pub struct Arguments<'a> {
    messages: Given<'a>,
    tools: Option<GivenTools<'a>>,
    kwargs: Given<'a>,
}

impl<'a> Arguments<'a> {
    pub fn of(
        py: Python<'_>,
        messages: &'a Bound<'_, PyAny>,
        tools: Option<&'a Bound<'_, PyAny>>,
        kwargs: &'a Bound<'_, PyAny>,
        known: &KnownTools,
    ) -> PyResult<Self> {
        attached(py, Kind::Template, "the arguments of the chat template", || {
            let tools = tools.map(|tools| known.given(tools)).transpose()?;
            Ok(Self { messages: Given::of("messages", messages)?, tools, kwargs: Given::of(VARIABLES, kwargs)? })
        })
    }

    /// All of it as JSON, tools from `known` where they were parsed before.
    pub fn parsed(self, known: &KnownTools) -> Result<Parsed> {
        let tools = match self.tools {
            Some(GivenTools::Text(text)) => Some(known.parsed(text)?),
            Some(GivenTools::Read(tools)) => Some(tools),
            None => None,
        };
        let list = |value| if let Value::Array(items) = value { Ok(items) } else { Err(value) };
        let object = |value| if let Value::Object(map) = value { Ok(map) } else { Err(value) };
        let kwargs = self.kwargs.parsed(VARIABLES, object)?;
        Ok(Parsed { messages: self.messages.parsed("messages", list)?, tools, kwargs })
    }
}

/// What errors call a template.
pub const WHAT: &str = "the chat template";
/// What errors call the template's own variables.
const VARIABLES: &str = "template variables";

enum Given<'a> {
    Text(&'a str),
    Value(Value),
}

impl<'a> Given<'a> {
    fn of(name: &str, object: &'a Bound<'_, PyAny>) -> PyResult<Self> {
        match object.cast::<PyString>() {
            Ok(text) => Ok(Self::Text(text.to_str()?)),
            Err(_) => json::read(name, object).map(Self::Value),
        }
    }

    /// What the text says, or what `take` gets out of the value, or leaves.
    fn parsed<T: DeserializeOwned>(
        self,
        name: &str,
        take: impl Fn(Value) -> std::result::Result<T, Value>,
    ) -> Result<T> {
        match self {
            Self::Text(text) => json::parsed(name, text),
            Self::Value(value) => take(value).or_else(|value| json::parsed(name, &value.to_string())),
        }
    }
}

/// What a template is called with.
pub struct Parsed {
    pub messages: Vec<Value>,
    pub tools: Option<Arc<Value>>,
    pub kwargs: Map<String, Value>,
}

impl Parsed {
    /// What a template makes of it.
    pub fn rendered(&self, template: &Template, add_generation_prompt: bool) -> Result<Rendered> {
        template.render(&self.messages(), self.tools.as_ref(), add_generation_prompt, &self.kwargs)
    }

    /// The text of that, without provenance.
    pub fn text(&self, template: &Template, add_generation_prompt: bool) -> Result<String> {
        template.render_text(&self.messages(), self.tools.as_ref(), add_generation_prompt, &self.kwargs)
    }

    fn messages(&self) -> Vec<&Value> {
        self.messages.iter().collect()
    }
}

enum GivenTools<'a> {
    Text(&'a str),
    Read(Arc<Value>),
}

/// A set of tool schemas, and its JSON text where it came so.
type ToolSet = (Option<Box<str>>, Arc<Value>);

/// Tool schemas that were given before, the oldest first.
#[derive(Default)]
pub struct KnownTools(Mutex<Vec<ToolSet>>);

/// Sets that are remembered.
const SETS: usize = 16;
/// Bytes of the longest text that is remembered.
const TEXT_BYTES: usize = 1 << 20;

impl KnownTools {
    fn given<'a>(&self, object: &'a Bound<'_, PyAny>) -> PyResult<GivenTools<'a>> {
        if let Ok(text) = object.cast::<PyString>() {
            return Ok(GivenTools::Text(text.to_str()?));
        }
        if let Some(tools) = self.known(|(_, tools)| json::is(object, tools)) {
            return Ok(GivenTools::Read(tools));
        }
        let tools = Arc::new(json::read("tools", object)?);
        self.keep(None, &tools);
        Ok(GivenTools::Read(tools))
    }

    fn parsed(&self, text: &str) -> Result<Arc<Value>> {
        if let Some(tools) = self.known(|(known, _)| known.as_deref() == Some(text)) {
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

    /// None while another thread holds them: after a fork that thread may not exist.
    fn sets(&self) -> Option<MutexGuard<'_, Vec<ToolSet>>> {
        match self.0.try_lock() {
            Ok(sets) => Some(sets),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// `(text, starts, ends, message, field, generation, exact)`.
pub fn to_tuple(py: Python<'_>, rendered: Rendered) -> PyResult<Bound<'_, PyTuple>> {
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
    (
        &*rendered.text,
        column(|span| span.start as i64),
        column(|span| span.end as i64),
        messages.into_pyarray(py),
        fields.into_pyarray(py),
        generation,
        rendered.exact_provenance,
    )
        .into_pyobject(py)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTemplate>()
}
