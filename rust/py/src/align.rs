//! Python bindings of `tracegrad_core::align`: traces and a tokenizer as input, flat arrays as output. Also
//! conversations, which compute the ids of the next prompt from messages and ids.

use crate::border::{with_python, without_gil};
use crate::errors::to_python;
use crate::json;
use crate::template::Arguments;
use crate::tokenizer::{PyTokenizer, signed, unsigned};
use crate::traces::PyTraces;
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use tracegrad_core::align::{self, Aligned, Conversation, ImageRule, Images, Merge, Mode, NAMES, Options};
use tracegrad_core::sampling::Defaults;
use tracegrad_core::server::Server;
use tracegrad_core::trace::LogprobKind;
use tracegrad_core::{Error, Kind, Result};

/// The image rule, with the ids of an image by its (width, height): `CoreImageRule` in Python.
#[derive(FromPyObject)]
struct PlainImageRule {
    pad: u32,
    frames: Vec<u32>,
    expansions: HashMap<(u32, u32), Vec<u32>>,
}

/// Aligns traces. Returns the arrays of `Sequences` by name, the `mismatch_*` columns, and `errors`.
#[pyfunction]
#[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools, reason = "keyword arguments of Python's align")]
#[pyo3(signature = (traces, tokenizer, *, allow_unknown_ids, text_only, assume_canonical, mode, merge, strict, logprob_kind, skip_errors, server=None, rule=None, sampling_defaults=None))]
fn align_traces<'py>(
    py: Python<'py>,
    traces: &PyTraces,
    tokenizer: &PyTokenizer,
    allow_unknown_ids: bool,
    text_only: bool,
    assume_canonical: bool,
    mode: &str,
    merge: &str,
    strict: bool,
    logprob_kind: Option<&str>,
    skip_errors: bool,
    server: Option<&str>,
    rule: Option<PlainImageRule>,
    sampling_defaults: Option<&str>,
) -> PyResult<Bound<'py, PyDict>> {
    let parse = |name: &str| {
        LogprobKind::parse(name).ok_or_else(|| {
            let error = Error::new(Kind::Argument, "TG-BORDER-001", format!("logprob_kind is '{name}'"));
            to_python(py, &error.fix("It is raw, processed or unknown"))
        })
    };
    let logprob_kind = logprob_kind.map(parse).transpose()?;
    let mode = if mode == "align" { Mode::Align } else { Mode::Splice };
    let merge = if merge == "sum" { Merge::Sum } else { Merge::Mask };
    let sampling_defaults =
        sampling_defaults.map(|text| Defaults::read(&serde_json::from_str(text).unwrap_or_default()));
    let options = Options {
        allow_unknown_ids,
        text_only,
        mode,
        merge,
        strict,
        assume_canonical,
        logprob_kind,
        server: server.and_then(Server::parse),
        skip_errors,
        sampling_defaults,
    };
    let (traces, tokenizer) = (traces.inner.clone(), tokenizer.inner.clone());
    let rule = rule.map(|PlainImageRule { pad, frames, expansions }| ImageRule { pad, frames, expansions });
    let aligned =
        without_gil(py, Kind::Fault, "aligning", || align::align(&traces, &tokenizer, rule.as_ref(), options))?;
    with_python(py, Kind::Fault, "aligning", || to_dict(py, aligned))
}

fn to_dict(py: Python<'_>, aligned: Aligned) -> PyResult<Bound<'_, PyDict>> {
    let arrays = PyDict::new(py);
    arrays.set_item("ids", aligned.ids.into_pyarray(py))?;
    arrays.set_item("source", aligned.source.into_pyarray(py))?;
    arrays.set_item("trainable", aligned.trainable.into_pyarray(py))?;
    arrays.set_item("rollout_logprobs", aligned.rollout_logprobs.into_pyarray(py))?;
    arrays.set_item("turn", aligned.turn.into_pyarray(py))?;
    arrays.set_item("version", aligned.version.into_pyarray(py))?;
    arrays.set_item("alignment_level", aligned.level.into_pyarray(py))?;
    arrays.set_item("inv_temperature", aligned.inv_temperature.into_pyarray(py))?;
    arrays.set_item("cu_seqlens", aligned.cu_seqlens.into_pyarray(py))?;
    arrays.set_item("trace", aligned.trace.into_pyarray(py))?;
    arrays.set_item("group", aligned.group.into_pyarray(py))?;
    arrays.set_item("rewards", aligned.rewards.into_pyarray(py))?;
    arrays.set_item("turn_rewards", aligned.turn_rewards.into_pyarray(py))?;
    arrays.set_item("cu_turns", aligned.cu_turns.into_pyarray(py))?;
    arrays.set_item("logprob_kind", aligned.logprob_kind.into_pyarray(py))?;
    arrays.set_item("temperature", aligned.temperature.into_pyarray(py))?;
    arrays.set_item("reshaped", aligned.sampling_flags.into_pyarray(py))?;
    arrays.set_item("replayed", aligned.replayed_flags.into_pyarray(py))?;
    arrays.set_item("penalties", penalties(py, aligned.penalties)?)?;
    arrays.set_item("ending", aligned.ending.into_pyarray(py))?;
    let extras = PyDict::new(py);
    for column in aligned.extras {
        let parts = PyDict::new(py);
        parts.set_item("shape", column.shape)?;
        parts.set_item("offsets", column.offsets.into_pyarray(py))?;
        parts.set_item("values", column.values.into_pyarray(py))?;
        extras.set_item(column.name, parts)?;
    }
    arrays.set_item("extras", extras)?;
    arrays.set_item("images", images(py, aligned.images)?)?;
    arrays.set_item("group_names", aligned.group_names)?;
    arrays.set_item("trace_ids", aligned.trace_ids)?;
    arrays.set_item("reward_names", aligned.reward_names)?;
    let column = |f: &dyn Fn(&align::Finding) -> i32| aligned.mismatches.iter().map(f).collect::<Vec<i32>>();
    arrays.set_item("mismatch_reason", column(&|row| row.reason as i32).into_pyarray(py))?;
    arrays.set_item("mismatch_turn", column(&|row| row.turn).into_pyarray(py))?;
    arrays.set_item("mismatch_token", column(&|row| row.token).into_pyarray(py))?;
    arrays.set_item("mismatch_count", column(&|row| row.count).into_pyarray(py))?;
    arrays.set_item("mismatch_trace", aligned.mismatch_trace.into_pyarray(py))?;
    arrays.set_item("mismatch_detail", aligned.mismatches.iter().map(|row| row.detail.as_str()).collect::<Vec<_>>())?;
    arrays.set_item("recorded", aligned.recorded)?;
    arrays.set_item("exact", aligned.exact)?;
    arrays.set_item("left_out", aligned.skipped)?;
    arrays.set_item("servers", aligned.servers)?;
    arrays.set_item("errors", aligned.errors.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    Ok(arrays)
}

/// Returns the arrays of `Penalties` by name; `None` if no generation has any.
fn penalties(py: Python<'_>, columns: align::PenaltyColumns) -> PyResult<Option<Bound<'_, PyDict>>> {
    if columns.generation.is_empty() {
        return Ok(None);
    }
    let arrays = PyDict::new(py);
    arrays.set_item("generation", columns.generation.into_pyarray(py))?;
    arrays.set_item("repetition", columns.repetition.into_pyarray(py))?;
    arrays.set_item("presence", columns.presence.into_pyarray(py))?;
    arrays.set_item("frequency", columns.frequency.into_pyarray(py))?;
    arrays.set_item("bias_ends", columns.bias_ends.into_pyarray(py))?;
    arrays.set_item("bias_ids", columns.bias_ids.into_pyarray(py))?;
    arrays.set_item("bias", columns.bias.into_pyarray(py))?;
    Ok(Some(arrays))
}

/// Returns the arrays of `Images` by name, with the digests and sizes of the images; `None` if there are no images.
fn images(py: Python<'_>, images: Images) -> PyResult<Option<Bound<'_, PyDict>>> {
    if images.image.is_empty() {
        return Ok(None);
    }
    let arrays = PyDict::new(py);
    arrays.set_item("counts", images.counts.into_pyarray(py))?;
    arrays.set_item("features", images.features.into_pyarray(py))?;
    arrays.set_item("at", images.at.into_pyarray(py))?;
    arrays.set_item("picture", images.image.into_pyarray(py))?;
    arrays.set_item("digest", images.digests.concat().into_pyarray(py))?;
    arrays.set_item("size", images.sizes.concat().into_pyarray(py))?;
    Ok(Some(arrays))
}

/// Returns the number of traces that this process has aligned so far.
#[pyfunction]
fn aligned_count() -> u64 {
    align::aligned_count()
}

/// Recovers the ids that the records determine. Returns the arrays of `RecoveredIds` by name.
#[pyfunction]
fn recover_ids<'py>(py: Python<'py>, traces: &PyTraces, tokenizer: &PyTokenizer) -> PyResult<Bound<'py, PyDict>> {
    let (traces, tokenizer) = (traces.inner.clone(), tokenizer.inner.clone());
    let recovered = without_gil(py, Kind::Fault, "recovering ids", || Ok(align::recover(&traces, &tokenizer)))?;
    let arrays = PyDict::new(py);
    arrays.set_item("ids", recovered.ids.into_pyarray(py))?;
    arrays.set_item("alignment_level", recovered.level.into_pyarray(py))?;
    arrays.set_item("logprobs", recovered.logprobs.into_pyarray(py))?;
    arrays.set_item("cu_tokens", recovered.cu_tokens.into_pyarray(py))?;
    arrays.set_item("trace", recovered.trace.into_pyarray(py))?;
    arrays.set_item("turn", recovered.turn.into_pyarray(py))?;
    arrays.set_item("reason", recovered.reason.into_pyarray(py))?;
    Ok(arrays)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(align_traces, module)?)?;
    module.add_function(wrap_pyfunction!(aligned_count, module)?)?;
    module.add_function(wrap_pyfunction!(recover_ids, module)?)?;
    module.add("USAGE_SLACK", align::USAGE_SLACK)?;
    module.add("MISMATCH_REASONS", NAMES)
}

/// Messages, some of them sampled, with the sampled ids.
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
        let inner = without_gil(py, Kind::Fault, "the conversation", || {
            let call = call.parsed(&tokenizer.tools)?;
            Conversation::new(tokenizer.inner.clone(), call.messages, call.tools, call.kwargs)
        })?;
        Ok(Self(Mutex::new(inner)))
    }

    fn append(&self, py: Python<'_>, messages: &Bound<'_, PyAny>) -> PyResult<()> {
        let messages = read(py, "messages", messages)?;
        without_gil(py, Kind::Fault, "the conversation", || match messages {
            Value::Array(messages) => self.held()?.append(messages),
            _ => {
                Err(Error::new(Kind::Argument, "TG-BORDER-002", "messages is not a list")
                    .fix("Pass a list of messages"))
            }
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
        without_gil(py, Kind::Fault, "the conversation", || {
            let mut conversation = self.held()?;
            let core_ids = ids.iter().enumerate().map(|(at, id)| unsigned(at, *id)).collect::<Result<Vec<u32>>>();
            let ids = core_ids.map_err(|error| error.in_turn(conversation.turns()))?;
            conversation.append_sampled(&ids, message)
        })
    }

    fn prompt_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let ids = without_gil(py, Kind::Template, "the conversation", || {
            self.held()?.prompt_ids().map(|ids| signed(ids.to_vec()))
        })?;
        Ok(ids.into_pyarray(py))
    }

    /// Returns `(turn, reason, detail)` of each fork.
    fn forks(&self, py: Python<'_>) -> PyResult<Vec<Fork>> {
        without_gil(py, Kind::Fault, "the conversation", || {
            let conversation = self.held()?;
            let fork = |fork: &align::Finding| Fork {
                turn: fork.turn,
                reason: NAMES[fork.reason as usize],
                detail: fork.detail.clone(),
            };
            Ok(conversation.forks().map(fork).collect())
        })
    }

    fn copy(&self, py: Python<'_>) -> PyResult<Self> {
        without_gil(py, Kind::Fault, "the conversation", || Ok(Self(Mutex::new(self.held()?.clone()))))
    }
}

/// A prompt that was tokenized from scratch, a dict in Python: the arguments of `PromptFork`.
#[derive(IntoPyObject)]
struct Fork {
    turn: i32,
    reason: &'static str,
    detail: String,
}

impl PyConversation {
    fn held(&self) -> Result<MutexGuard<'_, Conversation>> {
        self.0.lock().map_err(|_| {
            Error::new(Kind::Fault, "TG-BORDER-003", "a call of this conversation failed before its end")
                .why("The conversation may be incomplete")
                .fix("Make it again from its messages and ids")
        })
    }
}

fn read(py: Python<'_>, name: &str, object: &Bound<'_, PyAny>) -> PyResult<Value> {
    with_python(py, Kind::Fault, "the conversation", || json::read(name, object))
}

pub fn register_conversation(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyConversation>()
}
