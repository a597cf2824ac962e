//! verl's training rows `{"prompts", "responses", "response_mask", "rollout_log_probs"}`, the agent loop's output
//! `{"prompt_ids", "response_ids", "response_mask", "response_logprobs"}`, and its rollout dump in text.
//!
//! Source: verl 0.9.1 `experimental/agent_loop/agent_loop.py` (prompts are padded on the left, everything else on the
//! right, logprobs with 0.0; `attention_mask` covers both) and `trainer/ppo/ray_trainer.py`, `_write_generations`.
//! `old_log_probs` belong to the trainer and are not read.

use super::helpers::columns::Columns;
use super::helpers::conversation;
use super::helpers::loss_mask::Row;
use super::interface::{Body, Decoded, Form, Header, Outline, Shape, TrajectoryFormat, either, note};
use crate::findings;
use crate::trace::{Note, Prompt};

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form { name: "verl", reason: "it has `response_mask` beside ids, or `input`, `output` and `step`" },
    signs: &["response_mask", "responses", "output"],
    recognizes: |record| {
        let rows = record.is("responses", Shape::List) && (record.has("prompts") || record.has("input_ids"));
        let agent = record.is("response_ids", Shape::List) && record.has("response_mask");
        let texts = record.is("input", Shape::Text) && record.is("output", Shape::Text) && record.has("score");
        rows || agent || texts && record.has("step")
    },
    decode,
};

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let columns = Columns(record);
    let mut header = columns.header(&[
        ("id", &["id", "request_id"]),
        ("group", &["group", "uid"]),
        ("reward", &["reward", "reward_score", "score", "token_level_scores", "rm_scores"]),
        ("policy_version", &["policy_version", "min_global_steps"]),
    ])?;
    if record.is("output", Shape::Text) {
        return decode_text(record, header);
    }
    let first = |keys: [&'static str; 2]| keys.into_iter().find(|key| record.has(key)).unwrap_or(keys[0]);
    let response = columns.ids(first(["responses", "response_ids"]))?.unwrap_or_default();
    // Otherwise the prompt consists of the ids before the response in `input_ids`.
    let before = || {
        let all = columns.ids("input_ids")?;
        Ok(all.map(|ids| ids[..ids.len().saturating_sub(response.len())].to_vec()))
    };
    let prompt = either(columns.ids(first(["prompts", "prompt_ids"]))?, before)?.unwrap_or_default();
    if header.sampling.policy_version.is_none()
        && let Some(extra) = record.object("extra_fields")?
    {
        header.sampling.policy_version = extra.count("min_global_steps")?;
    }
    let attended = columns.mask("attention_mask")?;
    let (given, count) = (prompt.len(), response.len());
    let full_mask = attended.as_ref().filter(|mask| mask.len() == given + count);
    let mask = columns.mask("response_mask")?.or_else(|| full_mask.map(|mask| mask[given..].to_vec()));
    let mut logprobs = columns.logprobs(first(["rollout_log_probs", "response_logprobs"]))?;
    if let Some(logprobs) = logprobs.as_mut().filter(|logprobs| logprobs.len() < count) {
        // The agent loop pads the mask but not always the logprobs. Tokens after the logprobs were not sampled.
        let rest = mask.as_ref().and_then(|mask| mask.get(logprobs.len()..));
        if rest.is_some_and(|rest| !rest.contains(&true)) {
            logprobs.resize(count, crate::format::token_list::Reading::Missing);
        }
    }
    let padded = padding(&prompt, attended.is_some());
    let mut row = Row::after_prompt(prompt, response, mask, logprobs)?;
    if let Some(attended) = attended {
        row = row.without_padding(&attended)?;
    }
    let mut body = row.decode(&header.sampling)?;
    if let Some(first) = body.generations.first_mut() {
        first.notes.extend(padded);
    }
    Ok((header, body))
}

/// Reports a prompt that starts with the same id several times: it may be padded, and there is no attention mask.
fn padding(prompt: &[u32], has_mask: bool) -> Option<Note> {
    let first = prompt.first()?;
    let count = prompt.iter().take_while(|id| *id == first).count();
    let detail =
        format!("the prompt begins with id {first} {count} times, as padding would; there is no attention_mask");
    (count > 1 && !has_mask).then(|| note(findings::Reason::PromptMismatch, count, detail))
}

/// Reads the text dump. Special tokens were removed from prompt and output, so the sent prompt is unknown.
fn decode_text(record: &Outline<'_>, header: Header) -> Decoded<(Header, Body)> {
    let mut body = conversation::texts(Prompt::Unknown, record.text("output")?.unwrap_or_default(), &header.sampling);
    let detail = "verl writes its rollout dump without special tokens: the prompt that was sent is not known";
    for generation in &mut body.generations {
        generation.notes.push(note(findings::Reason::SpecialStripped, 0, detail));
    }
    Ok((header, body))
}
