//! Token lists that client libraries and servers store under other keys, and a check whether a list covers the complete
//! text.
//!
//! LiteLLM moves unknown fields to `provider_specific_fields`, the OpenAI SDK to `model_extra`. SGLang stores ids in
//! `sglext` and weight versions in `metadata`. Recorders that keep only a stream's last chunk, or lose chunks, leave a
//! list that is shorter than the text.

use super::extras;
use crate::findings::Reason;
use crate::format::fields::{Fields, get};
use crate::format::json::object::{TokenLists, no_id};
use crate::format::rejection::{Decoded, not_a_trace};
use crate::format::token_list::{ID_COMPLAINT, Id};
use crate::server::Server;
use crate::trace::{Generation, Message, Note, Pieces};
use serde::Deserialize;
use serde_json::Value;

/// Sets a missing list of ids, if the value is a list.
fn fill(ids: &mut Option<Vec<u32>>, value: Option<&Value>) -> Decoded<()> {
    let Some(value) = value.filter(|value| ids.is_none() && value.is_array()) else { return Ok(()) };
    let listed_ids = Vec::<Id>::deserialize(value).map_err(|error| {
        let what = error.to_string();
        if what.starts_with(ID_COMPLAINT) { no_id(what) } else { not_a_trace("TG-FORMAT-016", what) }
    })?;
    *ids = Some(Id::plain(listed_ids));
    Ok(())
}

/// Fills missing token lists from the keys to which client libraries move them.
pub fn gather(numbers: &mut TokenLists, fields: &Fields) -> Decoded<()> {
    for wrapper in ["provider_specific_fields", "model_extra"] {
        let Some(Value::Object(inner)) = get(fields, wrapper) else { continue };
        fill(&mut numbers.token_ids, inner.get("token_ids"))?;
        fill(&mut numbers.prompt_token_ids, inner.get("prompt_token_ids"))?;
    }
    Ok(())
}

/// Fills missing token lists from SGLang's extension of a response, for the choice at `index`.
pub fn gather_sglext(numbers: &mut TokenLists, fields: &Fields, index: usize) -> Decoded<()> {
    let Some(extension) = get(fields, "sglext") else { return Ok(()) };
    fill(&mut numbers.prompt_token_ids, extension.get("input_ids"))?;
    fill(&mut numbers.token_ids, extension.get("output_ids").and_then(|lists| lists.get(index)))
}

/// Reads the weight versions that SGLang reports in `metadata`.
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

/// Returns the server of a chat completion, from its fingerprint or from a key that only that server has.
pub fn producer(fields: &Fields) -> Option<Server> {
    let fingerprint = get(fields, "system_fingerprint").and_then(Value::as_str).unwrap_or_default();
    let is_hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if fingerprint.starts_with("vllm") {
        return Some(Server::Vllm);
    }
    // "b6123-1a2b3c4d": number and commit of a build.
    let build = fingerprint.strip_prefix('b').and_then(|build| build.split_once('-'));
    if build.is_some_and(|(number, commit)| number.parse::<u32>().is_ok() && is_hex(commit)) {
        return Some(Server::LlamaCpp);
    }
    // "3.0.1-sha-1a2b3c4", "3.3.6-native".
    let version = fingerprint.split_once('-').filter(|(version, _)| version.split('.').count() == 3);
    if version.is_some_and(|(_, rest)| rest.ends_with("native") || rest.contains("sha-")) {
        return Some(Server::Tgi);
    }
    let weights = get(fields, "metadata").is_some_and(|metadata| metadata.get("weight_version").is_some());
    (weights || get(fields, "sglext").is_some()).then_some(Server::Sglang)
}

/// Adds a note if the token list covers only a part of the message. `before` is the previous message, which the policy
/// may have continued.
pub fn check(generation: &mut Generation, message: &Message, before: Option<&Message>) {
    let tokens = &generation.tokens;
    let Some(pieces) = tokens.bytes.as_ref().or(tokens.texts.as_ref()).filter(|_| tokens.ids.is_none()) else { return };
    let Some(text) = message.value.get("content").and_then(|content| content.as_str()) else { return };
    let prefill =
        before.filter(|before| before.role() == "assistant").and_then(|before| before.value.get("content")?.as_str());
    let sampled_text = prefill.and_then(|prefill| text.strip_prefix(prefill)).unwrap_or(text);
    if spells_part(pieces, sampled_text) {
        let detail =
            format!("the listed tokens spell {} of the message's {} bytes", pieces.data.len(), sampled_text.len());
        generation.notes.push(Note { reason: Reason::StreamIncomplete, count: pieces.len() as u32, detail });
    }
}

/// Returns whether the pieces occur in the text in order and omit more than whitespace.
fn spells_part(pieces: &Pieces, text: &str) -> bool {
    let missing = text.trim().len().saturating_sub(pieces.data.len());
    // A text with U+FFFD differs from its bytes.
    if missing == 0 || pieces.known.contains(&false) || pieces.is_empty() || text.contains('\u{FFFD}') {
        return false;
    }
    let mut rest = text.as_bytes();
    (0..pieces.len()).filter_map(|index| pieces.get(index)).filter(|piece| !piece.is_empty()).all(|piece| {
        let position = memchr::memmem::find(rest, piece);
        rest = position.map_or(rest, |at| &rest[at + piece.len()..]);
        position.is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_chunk_alone_or_a_gap_is_a_part_and_trimmed_space_is_not() {
        for (texts, said, is_part) in [
            (&[" dog"][..], "The quick brown dog", true),
            (&["The", " dog"], "The quick brown dog", true),
            (&["The", " dog"], "The dog\n", false),
            (&["The", " cat"], "The quick brown dog", false),
        ] {
            let mut pieces = Pieces::default();
            for text in texts {
                pieces.push(Some(text.as_bytes()));
            }
            assert_eq!(spells_part(&pieces, said), is_part, "{texts:?} {said}");
        }
    }
}
