//! Names of the accepted forms, and the sign by which each is recognised.
//!
//! This file lists the OpenAI-shaped ones. The form of a producer is in its file under `servers` or `trajectories`.

/// One accepted form of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Form {
    /// Name for `format=` and for the counts in reports.
    pub name: &'static str,
    /// Property of a record that identifies the form.
    pub reason: &'static str,
}

/// `{"format": "tracegrad/1", "messages": [...]}`
pub(super) const NATIVE: Form = Form { name: "tracegrad/1", reason: "`format` is tracegrad/1" };
/// `{"messages": [...]}`
pub(super) const CHAT: Form = Form { name: "chat", reason: "it has `messages`" };
/// `{"calls": [{"request", "response"}, ...]}`
pub(super) const CALLS: Form = Form { name: "calls", reason: "it has `calls`" };
/// `{"request", "response"}`
pub(super) const CALL: Form = Form { name: "call", reason: "it has `request` and `response`" };
/// `{"choices": [...], "prompt_token_ids": [...]}`
pub(super) const RESPONSE: Form = Form { name: "response", reason: "it has `choices` with a `message`" };

/// The OpenAI-shaped forms.
pub(super) const SHAPED: [Form; 5] = [NATIVE, CHAT, CALLS, CALL, RESPONSE];
