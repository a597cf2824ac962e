//! verifiers' `Trace` `{"nodes": [{"message", "sampled", "token_ids", "mask", "logprobs", "parent"}]}`, its older rollouts
//! `{"trajectory": [{"prompt", "completion", "tokens"}]}`, and what a renderer's call returns.
//!
//! Source: verifiers 0.4.0 `v1/graph.py`, `v1/trace.py` (`to_record` rounds logprobs to four decimals), verifiers 0.1.14
//! `types.py`, renderers 0.1.12 `client.py`. prime-rl writes the same.

use super::contract::{Body, Decoded, Dump, Form, Header, Outline, Reason, Sampling, Shape, reject};
use super::graph;
use super::kits::columns::{Columns, rewards_of, tokens_of};
use super::kits::masked::all_zero;
use super::kits::openai::{openai, tools};
use super::kits::talk::{self, messages};
use crate::format::json::fields::Fields;
use crate::format::normal::calls::{Call, Log, Request};
use crate::format::normal::message::{Entry, plain};
use crate::trace::{Generation, Prompt};
use serde_json::Value;

pub(super) const DUMP: Dump = Dump {
    form: Form {
        name: "verifiers",
        sign: "it has `nodes`, or `trajectory` with tokens, or ids with `completion_logprobs`",
    },
    signs: &["nodes", "trajectory", "completion_logprobs", "example_id"],
    knows: |record| {
        let nodes = record.is("nodes", Shape::List) && !record.has("messages");
        let steps = record.is("trajectory", Shape::List) && record.has("reward") && !record.has("history");
        let turn = record.is("completion_ids", Shape::List) && record.is("completion_logprobs", Shape::List);
        nodes || steps || turn || record.has("example_id") && record.is("completion", Shape::List)
    },
    decode,
};

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    if record.has("nodes") {
        return graph::decode(record);
    }
    let mut header = Columns(record).header(&[("id", &["id", "request_id"]), ("group", &["group", "example_id"])])?;
    header.tools = header.tools.or(tools(record.value("tool_defs")?));
    if let Some(arguments) = record.object("sampling_args")? {
        header.sampling = header.sampling.or(&Sampling::read(&arguments.fields_without(&[])?)?);
    }
    if let (true, Some(Value::Object(metrics))) = (header.rewards.is_empty(), record.value("metrics")?) {
        header.rewards = rewards_of(&metrics);
    }
    let steps = record.objects("trajectory")?;
    let body = if record.has("completion_ids") {
        turn(record, &header)?
    } else if steps.is_empty() {
        talk::columns(record, &header.sampling)?
    } else {
        trajectory(&steps, &header)?
    };
    Ok((header, body))
}

/// Steps, each with its whole prompt.
fn trajectory(steps: &[Outline<'_>], header: &Header) -> Decoded<Body> {
    let call = |(turn, step)| {
        step_call(step, header).map_err(|rejection| rejection.inside(format!("trajectory[{turn}]")).in_turn(turn))
    };
    Log::of(header, steps.iter().enumerate().map(call))
}

fn step_call(step: &Outline<'_>, header: &Header) -> Decoded<Call> {
    let mut said = messages(step, "completion")?.unwrap_or_default();
    let message = match said.len() {
        0 => plain("assistant", Value::Null),
        1 => said.remove(0),
        count => {
            return Err(reject(Reason::Contradiction, format!("`completion` holds {count} messages"))
                .why("A step is one call of the model, and which of them it sampled cannot be known")
                .cure("Write a step for each call"));
        }
    };
    let mut generation = header.sampling.generation();
    let tokens = step.object("tokens")?;
    let prompt = tokens.map_or(Ok(None), |tokens| fill(&mut generation, &tokens))?;
    if step.typed::<bool>("is_truncated")? == Some(true) {
        generation.finish_reason = Some("length".to_owned());
    }
    let request = Request::of(messages(step, "prompt")?.unwrap_or_default(), prompt);
    let reward = step.number("reward")?.map(|reward| reward as f32);
    Ok(Call { request: Some(request), entry: Entry::sampled(message, generation, 0), model: None, reward })
}

/// Ids and logprobs of one call; its prompt ids.
fn fill(generation: &mut Generation, tokens: &Outline<'_>) -> Decoded<Option<Vec<u32>>> {
    let columns = Columns(tokens);
    let ids = columns.ids("completion_ids")?.unwrap_or_default();
    let logprobs = columns.logprobs("completion_logprobs")?.filter(|logprobs| !logprobs.is_empty() || ids.is_empty());
    if let Some(at) = columns.mask("completion_mask")?.unwrap_or_default().iter().position(|bit| !bit) {
        return Err(reject(Reason::Contradiction, format!("completion_mask is 0 at {at}"))
            .why("What stands in a completion without being sampled belongs to no call of the model")
            .cure("Write a step for each call of the model, with the ids it sampled as its completion"));
    }
    generation.tokens = tokens_of(Some(ids), logprobs);
    generation.notes.extend(all_zero(&generation.tokens));
    columns.ids("prompt_ids")
}

/// One call of a renderer's client, as its dict.
fn turn(record: &Outline<'_>, header: &Header) -> Decoded<Body> {
    let mut generation = header.sampling.generation();
    generation.prompt = fill(&mut generation, record)?.map_or(Prompt::Unknown, Prompt::Ids);
    generation.finish_reason = record.text("finish_reason")?;
    let mut fields = Fields::new();
    fields.insert("role".to_owned(), "assistant".into());
    for key in ["content", "reasoning_content", "tool_calls"] {
        fields.insert(key.to_owned(), record.value(key)?.unwrap_or(Value::Null));
    }
    let message = talk::message(Value::Object(openai(fields)))?;
    let mut talk = talk::Talk::default();
    talk.said(message, generation)?;
    Ok(talk.finish())
}
