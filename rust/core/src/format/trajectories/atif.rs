//! ATIF, the Agent Trajectory Interchange Format of Harbor: `{"schema_version", "agent", "steps": [{"source", "message",
//! "tool_calls", "observation", "metrics": {"prompt_token_ids", "completion_token_ids", "logprobs"}}]}`.
//!
//! Source: ATIF 1.8 (atif 1.8.0, harbor 0.25.0 `models/trajectories`).

use super::helpers::columns::{Columns, tokens_of};
use super::helpers::conversation::{ConversationBuilder, message};
use super::helpers::function_call;
use super::helpers::loss_mask::all_zero;
use super::interface::{
    Body, Decoded, Form, Header, Outline, Reason, Rejection, Sampling, Shape, TrajectoryFormat, note, reject,
};
use crate::findings;
use crate::format::fields::schemas;
use crate::trace::{Generation, Prompt};
use serde_json::{Value, json};

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form { name: "atif", reason: "it has `schema_version` and `steps`" },
    signs: &["schema_version", "steps"],
    recognizes: |record| record.is("schema_version", Shape::Text) && record.is("steps", Shape::List),
    decode,
};

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let mut header = Columns(record).header(&[("id", &["id", "trajectory_id", "session_id"])])?;
    let agent = record.object("agent")?.unwrap_or_default();
    let model = agent.text("model_name")?;
    if let (None, Some(Value::Array(definitions))) = (&header.tools, agent.value("tool_definitions")?) {
        header.tools = schemas(definitions);
    }
    if let Some(extra) = record.object("extra")?.filter(|extra| extra.is("reward", Shape::Number)) {
        header.reward = header.reward.or(extra.number("reward")?.map(|reward| reward as f32));
    }
    let mut talk = ConversationBuilder::default();
    trajectory(record, model.as_deref(), &header.sampling, &mut talk)?;
    let mut body = talk.finish();
    body.model = model;
    Ok((header, body))
}

/// Reads one trajectory. Subagents with the same model become branches.
fn trajectory(
    record: &Outline<'_>,
    model: Option<&str>,
    sampling: &Sampling,
    talk: &mut ConversationBuilder,
) -> Decoded<()> {
    let agent = record.object("agent")?.unwrap_or_default();
    let plays = agent.text("model_name")?.as_deref() == model;
    for (position, raw) in record.objects("steps")?.iter().enumerate() {
        let place = |rejection: Rejection| rejection.inside(format!("steps[{position}]"));
        step(raw, plays, sampling, talk).map_err(place)?;
    }
    for (index, subagent) in record.objects("subagent_trajectories")?.iter().enumerate() {
        talk.end_branch();
        trajectory(subagent, model, sampling, talk)
            .map_err(|rejection| rejection.inside(format!("subagent_trajectories[{index}]")))?;
    }
    Ok(())
}

fn step(step: &Outline<'_>, plays: bool, sampling: &Sampling, talk: &mut ConversationBuilder) -> Decoded<()> {
    let source = step.text("source")?.unwrap_or_default();
    let role = match source.as_str() {
        "agent" => "assistant",
        "system" | "user" => source.as_str(),
        other => {
            return Err(reject(Reason::WrongType, "TG-FORMAT-063", format!("`source` is \"{other}\""))
                .why("The author of the message is unknown")
                .fix("Write system, user or agent"));
        }
    };
    let mut value = json!({"role": role, "content": step.value("message")?});
    for key in ["reasoning_content", "tool_calls"] {
        if let Some(field) = step.value(key)? {
            value[key] = if key == "tool_calls" { calls(field) } else { field };
        }
    }
    let step_message = message(value)?;
    let inferences = step.count("llm_call_count")?;
    let copied = step.typed::<bool>("is_copied_context")? == Some(true);
    if role == "assistant" && plays && !copied && inferences != Some(0) {
        talk.add_sampled(step_message, generation(step, sampling, inferences.unwrap_or(1))?)?;
    } else {
        talk.add_prompt(step_message);
    }
    observe(step, talk)
}

fn generation(step: &Outline<'_>, sampling: &Sampling, inferences: i32) -> Decoded<Generation> {
    let mut generation = sampling.generation();
    let Some(metrics) = step.object("metrics")? else { return Ok(generation) };
    let columns = Columns(&metrics);
    let (ids, logprobs) = (columns.ids("completion_token_ids")?, columns.logprobs("logprobs")?);
    if inferences > 1 {
        let detail = format!(
            "the step holds the numbers of {inferences} calls together: which ids answer which prompt is not known"
        );
        generation.notes.push(note(findings::Reason::CountMismatch, ids.map_or(0, |ids| ids.len()), detail));
        return Ok(generation);
    }
    generation.tokens = tokens_of(ids.filter(|ids| !ids.is_empty()), logprobs.filter(|logprobs| !logprobs.is_empty()));
    generation.notes.extend(all_zero(&generation.tokens));
    if let Some(prompt) = columns.ids("prompt_token_ids")?.filter(|ids| !ids.is_empty()) {
        generation.prompt = Prompt::Ids(prompt);
    }
    Ok(generation)
}

/// Returns tool calls in the format of the chat completions API.
fn calls(value: Value) -> Value {
    let Value::Array(calls) = value else { return value };
    calls.iter().map(|call| function_call(call, ["tool_call_id", "function_name", "arguments"])).collect()
}

/// Reads the observation of the environment: the result of a call has the role `tool`, any other the role `user`.
fn observe(step: &Outline<'_>, talk: &mut ConversationBuilder) -> Decoded<()> {
    let Some(observation) = step.object("observation")? else { return Ok(()) };
    for result in observation.objects("results")? {
        let content = result.value("content")?;
        let value = match result.text("source_call_id")? {
            Some(id) => json!({"role": "tool", "tool_call_id": id, "content": content}),
            None if content.is_none() => continue,
            None => json!({"role": "user", "content": content}),
        };
        talk.add_prompt(message(value)?);
    }
    Ok(())
}
