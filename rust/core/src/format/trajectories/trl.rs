//! TRL's rows: `{"input_ids", "completion_mask", "old_log_probs"}` of the asynchronous trainer, `{"prompt_ids",
//! "completion_ids", "logprobs"}` of a rollout function or of GRPO's inputs, and the columns `prompt` and `completion`.
//!
//! Source: trl 1.16.0 `experimental/async_grpo/async_rollout_worker.py` (logprobs 0.0 where the mask is 0),
//! `trainer/grpo_trainer.py` (prompts padded on the left, completions on the right, `tool_mask` 0 on tool results;
//! `old_per_token_logps` are the trainer's own and are not read).

use super::helpers::columns::{Columns, rewards_of};
use super::helpers::conversation::{self, messages};
use super::helpers::loss_mask::{Row, lengths};
use super::interface::{Body, Decoded, Form, Header, Outline, Shape, TrajectoryFormat};
use crate::format::fields::Fields;
use crate::format::token_list::Reading;
use serde_json::Value;

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form {
        name: "trl",
        reason: "it has `completion_mask`, or `prompt_ids` and `completion_ids`, or `prompt` and `completion`",
    },
    signs: &["completion_mask", "completion_ids", "completion"],
    recognizes: |record| {
        let is_said = |key: &str| record.is(key, Shape::Text) || record.is(key, Shape::List);
        let trained = record.is("input_ids", Shape::List) && record.is("completion_mask", Shape::List);
        let split = record.is("prompt_ids", Shape::List) && record.is("completion_ids", Shape::List);
        trained || split || is_said("prompt") && is_said("completion")
    },
    decode,
};

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let columns = Columns(record);
    let mut header = columns
        .header(&[("group", &["group", "group_id"]), ("policy_version", &["policy_version", "model_version"])])?;
    rewards(record, &mut header)?;
    let body = if record.has("input_ids") {
        let row = Row {
            ids: columns.ids("input_ids")?.unwrap_or_default(),
            sampled: columns.mask("completion_mask")?.unwrap_or_default(),
            logprobs: columns.logprobs("old_log_probs")?,
            messages: messages(record, "prompt")?.unwrap_or_default(),
            ..Row::default()
        };
        row.decode(&header.sampling)?
    } else if record.has("completion_ids") {
        split_row(record)?.decode(&header.sampling)?
    } else {
        conversation::columns(record, &header.sampling)?
    };
    Ok((header, body))
}

/// Reads the reward in the metrics, and the columns of the reward functions by their names.
fn rewards(record: &Outline<'_>, header: &mut Header) -> Decoded<()> {
    let metrics = record.object("metrics")?;
    if let (None, Some(metrics)) = (header.reward, &metrics) {
        header.reward = metrics.number("reward")?.map(|reward| reward as f32);
    }
    if !header.rewards.is_empty() {
        return Ok(());
    }
    let mut columns_by_function = Fields::new();
    for (source, prefix) in [(metrics.as_ref(), "rewards/"), (Some(record), "")] {
        let Some(source) = source else { continue };
        for key in source.keys() {
            let function = key.strip_prefix(prefix).filter(|name| !prefix.is_empty() || name.contains("reward"));
            if let (Some(function), Some(raw)) = (function.filter(|name| *name != "reward"), source.get(key))
                && matches!(Shape::of(raw), Shape::Number)
            {
                columns_by_function.insert(function.to_owned(), source.value(key)?.unwrap_or(Value::Null));
            }
        }
    }
    header.rewards = rewards_of(&columns_by_function);
    Ok(())
}

/// Reads prompt and completion as parallel columns. Masks mark the padding.
fn split_row(record: &Outline<'_>) -> Decoded<Row> {
    let columns = Columns(record);
    let prompt = columns.ids("prompt_ids")?.unwrap_or_default();
    let response = columns.ids("completion_ids")?.unwrap_or_default();
    let or_all_true = |mask: Option<Vec<bool>>, count: usize| mask.unwrap_or_else(|| vec![true; count]);
    let attended: Vec<bool> = [
        or_all_true(columns.mask("prompt_mask")?, prompt.len()),
        or_all_true(columns.mask("completion_mask")?, response.len()),
    ]
    .concat();
    let key = ["logprobs", "sampling_per_token_logps", "completion_logprobs"].into_iter().find(|key| record.has(key));
    let mut logprobs: Option<Vec<Reading>> = key.map_or(Ok(None), |key| columns.logprobs(key))?;
    let key = ["tool_mask", "env_mask"].into_iter().find(|key| record.has(key));
    let mut sampled = key.map_or(Ok(None), |key| columns.mask(key))?;
    // These columns may omit padding that the ids contain.
    let real = attended.iter().skip(prompt.len()).take_while(|bit| **bit).count();
    if let Some(column) = logprobs.as_mut().filter(|column| column.len() == real) {
        column.resize(response.len(), Reading::Missing);
    }
    if let Some(column) = sampled.as_mut().filter(|column| column.len() == real) {
        column.resize(response.len(), false);
    }
    if attended.len() != prompt.len() + response.len() {
        return Err(lengths("prompt_mask and completion_mask", attended.len(), prompt.len() + response.len()));
    }
    let mut row = Row::after_prompt(prompt, response, sampled, logprobs)?.without_padding(&attended)?;
    row.messages = messages(record, "prompt")?.unwrap_or_default();
    if record.is("completion", Shape::Text) {
        row.text = record.text("completion")?;
    }
    Ok(row)
}
