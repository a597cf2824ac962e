//! AReaL's tensor dict `{"input_ids", "loss_mask", "logprobs", "versions", "rewards"}`, and its trajectory dump in
//! text.
//!
//! Source: areal 1.0.4 `workflow/multi_turn.py` (a batch with one row; logprobs 0.0 and versions -1 for tokens that
//! were not sampled; a logprob has the index of its token) and `infra/workflow_executor.py`, `_dump_trajectory`.

use super::helpers::columns::Columns;
use super::helpers::conversation;
use super::helpers::loss_mask::Row;
use super::interface::{Body, Decoded, Form, Header, Outline, Shape, TrajectoryFormat};
use crate::trace::Prompt;

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form { name: "areal", reason: "it has `input_ids` and `loss_mask`, or `prompt_len` and `head_version`" },
    signs: &["loss_mask", "head_version"],
    recognizes: |record| {
        record.is("input_ids", Shape::List) && record.is("loss_mask", Shape::List) && !record.has("messages")
            || record.has("head_version") && record.is("completion", Shape::Text)
    },
    decode,
};

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    if !record.has("input_ids") {
        return decode_text(record);
    }
    let columns = Columns(record);
    let header = columns.header(&[("group", &["group", "task_id"]), ("reward", &["reward", "rewards"])])?;
    let mut row = Row {
        ids: columns.ids("input_ids")?.unwrap_or_default(),
        sampled: columns.mask("loss_mask")?.unwrap_or_default(),
        logprobs: columns.logprobs("logprobs")?,
        versions: columns.versions("versions")?,
        ..Row::default()
    };
    if let Some(attended) = columns.mask("attention_mask")? {
        row.check()?;
        row = row.without_padding(&attended)?;
    }
    let body = row.decode(&header.sampling)?;
    Ok((header, body))
}

/// Reads the text dump, which is decoded with all special tokens: the sent text, but not its ids.
fn decode_text(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let mut header =
        Columns(record).header(&[("group", &["group", "task_id"]), ("policy_version", &["head_version"])])?;
    if let (None, Some(task), Some(sample)) = (&header.id, record.name("task_id")?, record.name("sample_idx")?) {
        header.id = Some(format!("{task}-{sample}"));
    }
    let prompt = record.text("prompt")?.map_or(Prompt::Unknown, Prompt::Text);
    let body = conversation::texts(prompt, record.text("completion")?.unwrap_or_default(), &header.sampling);
    Ok((header, body))
}
