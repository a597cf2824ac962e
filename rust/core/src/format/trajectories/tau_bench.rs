//! tau-bench's results: `{"task_id", "trial", "reward", "info", "traj": [message, ...]}`. Text only.
//!
//! Source: sierra-research/tau-bench 59a200c `tau_bench/types.py`, `historical_trajectories`.

use super::helpers::columns::Columns;
use super::helpers::conversation::{ConversationBuilder, messages};
use super::interface::{Body, Decoded, Form, Header, Outline, Shape, TrajectoryFormat};

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form { name: "tau_bench", reason: "it has `traj`" },
    signs: &["traj"],
    recognizes: |record| record.is("traj", Shape::List),
    decode,
};

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let mut header = Columns(record).header(&[("group", &["group", "task_id"])])?;
    if let (None, Some(task), Some(trial)) = (&header.id, record.name("task_id")?, record.name("trial")?) {
        header.id = Some(format!("{task}-{trial}"));
    }
    let mut talk = ConversationBuilder::default();
    for message in messages(record, "traj")?.unwrap_or_default() {
        talk.add_by_role(message, &header.sampling)?;
    }
    Ok((header, talk.finish()))
}
