//! rLLM's `Trajectory` `{"uid", "steps": [{"chat_completions", "prompt_ids", "response_ids", "logprobs", ...}]}`, an
//! `Episode` of one trajectory, or a single `Step`.
//!
//! Source: rLLM 9beb6e0 `rllm/types.py`, `engine/rollout/rollout_engine.py`, `utils/episode_logger.py` (which keeps no
//! ids).

use super::helpers::columns::{Columns, tokens_of};
use super::helpers::conversation::messages;
use super::helpers::loss_mask::all_zero;
use super::interface::{
    Body, Decoded, Form, Header, Outline, Reason, Rejection, Shape, TrajectoryFormat, either, reject,
};
use crate::format::build::calls::{Call, Log, Request};
use crate::format::build::message::Entry;
use crate::trace::Message;
use serde_json::json;

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form { name: "rllm", reason: "it has `steps` with `chat_completions`, or `model_output`" },
    signs: &["steps", "trajectories", "model_output", "chat_completions"],
    recognizes: |record| {
        let inside = |list: &str, wanted: fn(&Outline<'_>) -> bool| {
            let first = record.list(list).ok().flatten().and_then(|items| items.first().copied());
            first.and_then(|raw| Outline::of(raw, list).ok()).is_some_and(|item| wanted(&item))
        };
        is_step(record) || inside("steps", is_step) || inside("trajectories", |item| item.has_key("steps"))
    },
    decode,
};

/// Returns whether a record is a step. Other producers also write a `model_output`, such as the response of a server.
fn is_step(record: &Outline<'_>) -> bool {
    let is_output = |output: Outline<'_>| {
        !output.has_key("choices") && ["content", "text", "completion_ids"].iter().any(|key| output.has_key(key))
    };
    record.is("chat_completions", Shape::List) || record.object("model_output").ok().flatten().is_some_and(is_output)
}

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let mut trajectories = record.objects("trajectories")?;
    let inner = match trajectories.len() {
        0 => None,
        1 => Some(trajectories.remove(0)),
        count => return Err(several(count)),
    };
    let trajectory = inner.as_ref().unwrap_or(record);
    let is_single = !trajectory.has("steps");
    let steps = if is_single { vec![trajectory.clone()] } else { trajectory.objects("steps")? };
    let mut header = Columns(trajectory).header_without(&["tools"], &[("id", &["uid", "id"])])?;
    if let Some(episode) = inner.as_ref().map(|_| record) {
        let outer =
            Columns(episode).header_without(&["reward", "rewards", "tools"], &[("id", &["id", "episode_id"])])?;
        // The id of an episode is `task:rollout`.
        let task = outer.id.as_deref().and_then(|id| id.split_once(':')).map(|(task, _)| task.to_owned());
        header.group = header.group.or(outer.group).or(task);
        header.id = outer.id.or(header.id);
    }
    let process = steps.iter().any(|step| matches!(step.number("reward"), Ok(Some(reward)) if reward != 0.0));
    let call = |(turn, step)| {
        let place = |rejection: Rejection| rejection.inside(format!("steps[{turn}]")).in_turn(turn);
        let call = step_call(step, &header).map_err(place)?;
        Ok(Call { reward: call.reward.filter(|_| process && !is_single), ..call })
    };
    let body = Log::of(&header, steps.iter().enumerate().map(call))?;
    Ok((header, body))
}

fn step_call(step: &Outline<'_>, header: &Header) -> Decoded<Call> {
    let output = step.object("model_output")?.unwrap_or_default();
    let mut generation = header.sampling.generation();
    let [columns, engine] = [Columns(step), Columns(&output)];
    let filled = |ids: &Vec<u32>| !ids.is_empty();
    let ids = either(columns.ids("response_ids")?.filter(filled), || engine.ids("completion_ids"))?.filter(filled);
    let logprobs = columns.logprobs("logprobs")?.filter(|logprobs| !logprobs.is_empty());
    let logprobs = either(logprobs, || engine.logprobs("logprobs"))?.filter(|logprobs| !logprobs.is_empty());
    let prompt = either(columns.ids("prompt_ids")?.filter(filled), || engine.ids("prompt_ids"))?.filter(filled);
    generation.tokens = tokens_of(ids, logprobs);
    generation.notes.extend(all_zero(&generation.tokens));
    generation.text = output.text("text")?;
    generation.finish_reason = output.text("finish_reason")?;
    let version = either(step.count("weight_version")?, || output.count("weight_version"))?;
    generation.policy_version = header.sampling.policy_version.or(version).unwrap_or(-1);
    let mut history = messages(step, "chat_completions")?.unwrap_or_default();
    let message = match history.pop_if(|last| last.role() == "assistant") {
        Some(message) => message,
        None => spoken(step, &output)?,
    };
    let request = Request::of(history, prompt);
    let reward = step.number("reward")?.map(|reward| reward as f32);
    Ok(Call { request: Some(request), entry: Entry::sampled(message, generation, 0), model: None, reward })
}

/// Returns the sampled message of a step, if its conversation does not end with it.
fn spoken(step: &Outline<'_>, output: &Outline<'_>) -> Decoded<Message> {
    let content = either(output.text("content")?, || step.text("model_response"))?;
    let mut value = json!({"role": "assistant", "content": content});
    if let Some(thought) = output.text("reasoning")? {
        value["reasoning_content"] = thought.into();
    }
    Ok(Message::new(value, None))
}

fn several(count: usize) -> Rejection {
    reject(Reason::UnknownForm, "TG-FORMAT-074", format!("an episode of {count} trajectories"))
        .why("A record is one trace: each trajectory has its own reward")
        .fix("Write a line for each: for t in episode.trajectories: json.dumps({\"group\": episode.id, **t.to_dict()})")
}
