//! Token lists that client libraries and servers store under keys of their own, beside OpenAI's.
//!
//! LiteLLM moves what it does not know to `provider_specific_fields`, the OpenAI SDK to `model_extra`; SGLang has ids in `sglext` and
//! weight versions in `metadata`. Called by `message`.

use super::extras;
use crate::format::json::fields::{Fields, get};
use crate::format::json::numbers::{ID_COMPLAINT, Id};
use crate::format::json::object::{Numbers, no_id};
use crate::format::rejection::{Decoded, not_a_trace};
use crate::trace::Generation;
use serde::Deserialize;
use serde_json::Value;

fn ids(value: Option<&Value>) -> Decoded<Option<Vec<u32>>> {
    let Some(value) = value.filter(|value| value.is_array()) else { return Ok(None) };
    Vec::<Id>::deserialize(value).map(|ids| Some(Id::plain(ids))).map_err(|error| {
        let what = error.to_string();
        if what.starts_with(ID_COMPLAINT) { no_id(what) } else { not_a_trace(what) }
    })
}

/// Fills token lists that are not there from where a client library moved them.
pub fn gather(numbers: &mut Numbers, fields: &Fields) -> Decoded<()> {
    for wrapper in ["provider_specific_fields", "model_extra"] {
        let Some(Value::Object(inner)) = get(fields, wrapper) else { continue };
        if numbers.token_ids.is_none() {
            numbers.token_ids = ids(inner.get("token_ids"))?;
        }
        if numbers.prompt_token_ids.is_none() {
            numbers.prompt_token_ids = ids(inner.get("prompt_token_ids"))?;
        }
    }
    Ok(())
}

/// The same from SGLang's extension of a response, for the choice at `index`.
pub fn gather_sglext(numbers: &mut Numbers, fields: &Fields, index: usize) -> Decoded<()> {
    let Some(extension) = get(fields, "sglext") else { return Ok(()) };
    if numbers.prompt_token_ids.is_none() {
        numbers.prompt_token_ids = ids(extension.get("input_ids"))?;
    }
    if numbers.token_ids.is_none() {
        numbers.token_ids = ids(extension.get("output_ids").and_then(|lists| lists.get(index)))?;
    }
    Ok(())
}

/// The weight versions that SGLang reports in `metadata`.
pub fn versions(generation: &mut Generation, fields: &Fields) -> Decoded<()> {
    let Some(metadata) = get(fields, "metadata") else { return Ok(()) };
    if let (true, Some(label)) = (generation.policy_version < 0, metadata.get("weight_version")) {
        generation.policy_version = extras::version(label);
    }
    if let Some(spans) = metadata.get("weight_versions") {
        generation.versions = extras::spans(spans.clone())?;
    }
    Ok(())
}
