//! slime's `Sample`: `{"tokens", "response_length", "loss_mask", "rollout_log_probs", "reward", ...}`.
//!
//! Source: slime 624b824 `utils/types.py`, `Sample.to_dict`. Mask and logprobs cover only the response. Logprobs of
//! tokens that were not sampled are 0.0.

use super::helpers::columns::Columns;
use super::helpers::conversation::messages;
use super::helpers::loss_mask::Row;
use super::interface::{Body, Decoded, Form, Header, Outline, Reason, Shape, TrajectoryFormat, reject};
use crate::trace::{Extra, ExtraStart};
use serde_json::Value;

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form { name: "slime", reason: "it has `tokens` and `response_length`" },
    signs: &["response_length"],
    recognizes: |record| record.is("tokens", Shape::List) && record.is("response_length", Shape::Number),
    decode,
};

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let columns = Columns(record);
    let mut prompt = columns.ids("tokens")?.unwrap_or_default();
    let length = record.count("response_length")?.unwrap_or_default() as usize;
    let Some(split) = prompt.len().checked_sub(length) else {
        return Err(reject(
            Reason::Contradiction,
            "TG-FORMAT-075",
            format!("response_length is {length} of {} tokens", prompt.len()),
        )
        .why("The start of the response is unknown")
        .fix("Write the sample as slime's rollout made it"));
    };
    let response = prompt.split_off(split);
    let mask = columns.mask("loss_mask")?;
    let mut row = Row::after_prompt(prompt, response, mask, columns.logprobs("rollout_log_probs")?)?;
    row.messages = messages(record, "prompt")?.unwrap_or_default();
    row.text = record.text("response")?;
    row.finish_reason = finish(record.text("status")?.as_deref()).map(str::to_owned);
    let header = columns.header(&[
        ("id", &["id", "index"]),
        ("group", &["group_index"]),
        ("template_kwargs", &["apply_chat_template_kwargs"]),
    ])?;
    let sampled = row.sampled[split..].to_vec();
    let mut body = row.decode(&header.sampling)?;
    stamp(record, &mut body)?;
    nucleus(record, &sampled, &mut body)?;
    Ok((header, body))
}

fn finish(status: Option<&str>) -> Option<&'static str> {
    match status? {
        "completed" => Some("stop"),
        "truncated" => Some("length"),
        "aborted" => Some("abort"),
        _ => None,
    }
}

/// Reads `weight_versions`, which has one entry per call of the engine. The versions are used if there is one per
/// generation, or if all are equal.
fn stamp(record: &Outline<'_>, body: &mut Body) -> Decoded<()> {
    let labels = record.typed::<Vec<Value>>("weight_versions")?.unwrap_or_default();
    let number = |value: &Value| match value {
        Value::String(digits) => digits.parse().ok(),
        value => value.as_i64(),
    };
    let versions: Vec<i32> = labels.iter().map(|value| number(value).map_or(-1, |number| number as i32)).collect();
    let alike = versions.windows(2).all(|pair| pair[0] == pair[1]);
    let one_each = versions.len() == body.generations.len();
    for (turn, generation) in body.generations.iter_mut().enumerate() {
        if generation.policy_version == -1 && !versions.is_empty() && (alike || one_each) {
            generation.policy_version = versions[if alike { 0 } else { turn }].max(-1);
        }
    }
    Ok(())
}

/// Reads the ids that passed top-p, one row for each token of the response.
fn nucleus(record: &Outline<'_>, sampled: &[bool], body: &mut Body) -> Decoded<()> {
    let columns = Columns(record);
    let ids = columns.ids("rollout_top_p_token_ids")?;
    let ends = columns.ids("rollout_top_p_token_offsets")?;
    let (Some(ids), Some(ends)) = (ids, ends) else { return Ok(()) };
    let rising = ends.windows(2).all(|pair| pair[0] <= pair[1]);
    if ends.len() != sampled.len() + 1 || !rising || ends.last().is_none_or(|&end| end as usize != ids.len()) {
        return Err(reject(
            Reason::Contradiction,
            "TG-FORMAT-076",
            "rollout_top_p_token_offsets do not fit the response",
        )
        .why("The ids that top-p kept for each token are unknown")
        .fix("Write the sample as slime's rollout made it, or leave both lists out"));
    }
    let mut at = 0;
    for generation in &mut body.generations {
        let count = generation.tokens.len();
        at += sampled[at..].iter().take_while(|&&bit| !bit).count();
        let (from, rows) = (ends[at], &ends[at + 1..=at + count]);
        let values = &ids[from as usize..ends[at + count] as usize];
        generation.extras.push(Extra {
            name: "sampling_mask",
            first: ExtraStart::Sampled,
            shape: Vec::new(),
            ends: rows.iter().map(|end| end - from).collect(),
            values: values.iter().map(|&id| id as i32).collect(),
        });
        at += count;
    }
    Ok(())
}
