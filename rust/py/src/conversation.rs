//! Binds `tracegrad_core::align::Conversation`: messages and ids in, the ids of the next prompt out.

use crate::border::{attached, detached};
use crate::json;
use crate::template::Arguments;
use crate::tokenizer::{PyTokenizer, signed, unsigned};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use serde_json::Value;
use std::sync::{Mutex, MutexGuard};
use tracegrad_core::align::{Conversation, NAMES};
use tracegrad_core::{Error, Kind, Result};

/// Messages of which some were sampled, with the ids that were.
#[pyclass(frozen, module = "tracegrad._core", name = "Conversation")]
pub struct PyConversation(Mutex<Conversation>);

#[pymethods]
impl PyConversation {
    #[new]
    fn new(
        py: Python<'_>,
        tokenizer: &PyTokenizer,
        messages: &Bound<'_, PyAny>,
        tools: Option<&Bound<'_, PyAny>>,
        kwargs: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let call = Arguments::of(py, messages, tools, kwargs, &tokenizer.tools)?;
        let inner = detached(py, Kind::Fault, "the conversation", || {
            let call = call.parsed(&tokenizer.tools)?;
            Conversation::new(tokenizer.inner.clone(), call.messages, call.tools, call.kwargs)
        })?;
        Ok(Self(Mutex::new(inner)))
    }

    fn append(&self, py: Python<'_>, messages: &Bound<'_, PyAny>) -> PyResult<()> {
        let messages = read(py, "messages", messages)?;
        detached(py, Kind::Fault, "the conversation", || match messages {
            Value::Array(messages) => self.held()?.append(messages),
            _ => Err(Error::new(Kind::Argument, "messages is no list").cure("Pass a list of messages")),
        })
    }

    fn append_sampled(
        &self,
        py: Python<'_>,
        ids: PyReadonlyArray1<'_, i64>,
        message: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let ids = ids.as_slice()?;
        let message = read(py, "message", message)?;
        detached(py, Kind::Fault, "the conversation", || {
            let mut held = self.held()?;
            let known = ids.iter().enumerate().map(|(at, id)| unsigned(at, *id)).collect::<Result<Vec<u32>>>();
            let ids = known.map_err(|error| error.in_turn(held.turns()))?;
            held.append_sampled(&ids, message)
        })
    }

    fn prompt_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let ids = detached(py, Kind::Template, "the conversation", || {
            self.held()?.prompt_ids().map(|ids| signed(ids.to_vec()))
        })?;
        Ok(ids.into_pyarray(py))
    }

    /// `(turn, reason, detail)` of each.
    fn forks(&self, py: Python<'_>) -> PyResult<Vec<(i32, &'static str, String)>> {
        detached(py, Kind::Fault, "the conversation", || {
            let held = self.held()?;
            Ok(held.forks().map(|fork| (fork.turn, NAMES[fork.reason as usize], fork.detail.clone())).collect())
        })
    }

    fn copy(&self, py: Python<'_>) -> PyResult<Self> {
        detached(py, Kind::Fault, "the conversation", || Ok(Self(Mutex::new(self.held()?.clone()))))
    }
}

impl PyConversation {
    fn held(&self) -> Result<MutexGuard<'_, Conversation>> {
        self.0.lock().map_err(|_| {
            Error::new(Kind::Fault, "a call of this conversation failed in its midst")
                .why("What it holds may be incomplete")
                .cure("Make it anew from its messages and ids")
        })
    }
}

fn read(py: Python<'_>, name: &str, object: &Bound<'_, PyAny>) -> PyResult<Value> {
    attached(py, Kind::Fault, "the conversation", || json::read(name, object))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyConversation>()
}
