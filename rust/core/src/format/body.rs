//! What the format files hand to `mod`: the parts of a trace that differ between forms.

use super::fields::Fields;
use crate::trace::{Generation, Message};
use serde_json::Value;

/// Messages and generations of a record.
#[derive(Debug, Default)]
pub(super) struct Body {
    pub messages: Vec<Message>,
    pub generations: Vec<Generation>,
    pub conversation: Vec<u32>,
    /// Of the requests, where the record itself does not say.
    pub model: Option<String>,
    pub tools: Option<Value>,
    pub template_kwargs: Fields,
    /// Choices beside the one that was used.
    pub unused_choices: u32,
}
