//! A row of SkyRL's `GeneratorOutput`: `{"prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", ...}`,
//! and its evaluation dump in text.
//!
//! Source: skyrl 0.3.0 `train/generators/base.py`, `skyrl_gym_generator.py` (an observation has mask 0 and logprob 0.0;
//! a stop token that was not sampled may be appended with mask 1 and logprob 0.0), `train/utils/trainer_utils.py`.

use super::helpers::columns::Columns;
use super::helpers::conversation;
use super::helpers::loss_mask::Row;
use super::interface::{Body, Decoded, Form, Header, Outline, Shape, TrajectoryFormat, either, note};
use crate::findings;
use crate::trace::{Generation, Note, Prompt};
use serde_json::Value;

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form {
        name: "skyrl",
        reason: "it has `response_ids` and `loss_masks`, or `input_prompt` and `output_response`",
    },
    signs: &["response_ids", "output_response"],
    recognizes: |record| {
        let masked = record.has("loss_masks") || record.has("loss_mask") || record.has_key("stop_reasons");
        let prompted = record.is("prompt_token_ids", Shape::List) || record.is("prompt_ids", Shape::List);
        record.is("response_ids", Shape::List) && prompted && masked
            || record.is("input_prompt", Shape::Text) && record.is("output_response", Shape::Text)
    },
    decode,
};

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let columns = Columns(record);
    let mut header = columns.header(&[("reward", &["reward", "rewards", "score"]), ("group", &["group", "uid"])])?;
    name(&columns, &mut header)?;
    if record.has("output_response") {
        return decode_text(record, header);
    }
    let first = |keys: [&'static str; 2]| keys.into_iter().find(|key| record.has(key)).unwrap_or(keys[0]);
    let mut row = Row::after_prompt(
        columns.ids(first(["prompt_token_ids", "prompt_ids"]))?.unwrap_or_default(),
        columns.ids("response_ids")?.unwrap_or_default(),
        columns.mask(first(["loss_masks", "loss_mask"]))?,
        columns.logprobs("rollout_logprobs")?,
    )?;
    let finish = either(columns.scalar("stop_reasons")?, || columns.scalar("stop_reason"))?;
    row.finish_reason = finish.and_then(|reason| reason.as_str().map(str::to_owned));
    let ends_sampled = row.sampled.last() == Some(&true);
    let mut body = row.decode(&header.sampling)?;
    if let Some(last) = body.generations.last_mut().filter(|_| ends_sampled) {
        last.notes.extend(appended(last));
    }
    Ok((header, body))
}

/// Reads `{"instance_id", "repetition_id"}`: the id of the prompt, and the number of its sample.
fn name(columns: &Columns<'_, '_>, header: &mut Header) -> Decoded<()> {
    let id = either(columns.scalar("trajectory_ids")?, || columns.scalar("trajectory_id"))?;
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    };
    match id {
        Some(Value::Object(parts)) => {
            let part = |key: &str| parts.get(key).and_then(text);
            let (instance, repetition) = (part("instance_id"), part("repetition_id"));
            if let (None, Some(instance), Some(repetition)) = (&header.id, &instance, &repetition) {
                header.id = Some(format!("{instance}_{repetition}"));
            }
            header.group = header.group.take().or(instance);
        }
        Some(other) => header.id = header.id.take().or_else(|| text(&other)),
        None => {}
    }
    Ok(())
}

/// Reports a last token with logprob 0.0 and mask 1. SkyRL may have appended it, or it was sampled with certainty.
fn appended(generation: &Generation) -> Option<Note> {
    let last = *generation.tokens.logprobs.as_ref()?.last()?;
    let stopped = generation.finish_reason.as_deref() != Some("length");
    (last == 0.0 && stopped).then(|| {
        let detail = "the last logprob is exactly 0: SkyRL appends a stop token that was not sampled so, unless \
                      use_conversation_multi_turn is on";
        note(findings::Reason::StopTokenDiffers, 1, detail)
    })
}

fn decode_text(record: &Outline<'_>, header: Header) -> Decoded<(Header, Body)> {
    let prompt = record.text("input_prompt")?.map_or(Prompt::Unknown, Prompt::Text);
    let mut body = conversation::texts(prompt, record.text("output_response")?.unwrap_or_default(), &header.sampling);
    for generation in &mut body.generations {
        generation.finish_reason = record.text("stop_reason")?;
    }
    Ok((header, body))
}
