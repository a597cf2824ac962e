//! verifiers' `Trace` `{"nodes": [{"message", "sampled", "token_ids", "mask", "logprobs", "parent"}]}`, its older
//! rollouts `{"trajectory": [{"prompt", "completion", "tokens"}]}`, and the result of a renderer's call.
//!
//! Source: verifiers 0.4.0 `v1/graph.py`, `v1/trace.py` (`to_record` rounds logprobs to four decimals), verifiers
//! 0.1.14 `types.py`, renderers 0.1.12 `client.py`. prime-rl writes the same format.
//!
//! In the message graph each node contains one message and the ids that follow those of its parents. The concatenated
//! ids of a path are the input of the model. A node has several children if a history was rewritten or sampled again.
//! Each sampled node is one generation, regardless of the number of paths through it.

use super::helpers::columns::{Columns, rewards_of, tokens_of};
use super::helpers::conversation::{self, message, messages};
use super::helpers::loss_mask::{all_zero, lengths};
use super::helpers::{openai, tools};
use super::interface::{
    Body, Decoded, Form, Header, Outline, Reason, Sampling, Shape, TrajectoryFormat, either, reject,
};
use crate::format::build::calls::{Call, Log, Request};
use crate::format::build::message::{Entry, plain};
use crate::format::fields::Fields;
use crate::sampling::Options;
use crate::trace::{Generation, Message, Prompt};
use serde_json::Value;

pub(super) const DUMP: TrajectoryFormat = TrajectoryFormat {
    form: Form {
        name: "verifiers",
        reason: "it has `nodes`, or `trajectory` with tokens, or ids with `completion_logprobs`",
    },
    signs: &["nodes", "trajectory", "completion_logprobs", "example_id"],
    recognizes: |record| {
        let nodes = record.is("nodes", Shape::List) && !record.has("messages");
        let steps = record.is("trajectory", Shape::List) && record.has("reward") && !record.has("history");
        let turn = record.is("completion_ids", Shape::List) && record.is("completion_logprobs", Shape::List);
        nodes || steps || turn || record.has("example_id") && record.is("completion", Shape::List)
    },
    decode,
};

fn decode(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    if record.has("nodes") {
        return decode_graph(record);
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
        conversation::columns(record, &header.sampling)?
    } else {
        trajectory(&steps, &header)?
    };
    Ok((header, body))
}

/// Reads steps, each with its complete prompt.
fn trajectory(steps: &[Outline<'_>], header: &Header) -> Decoded<Body> {
    let call = |(turn, step)| {
        step_call(step, header).map_err(|rejection| rejection.inside(format!("trajectory[{turn}]")).in_turn(turn))
    };
    Log::of(header, steps.iter().enumerate().map(call))
}

fn step_call(step: &Outline<'_>, header: &Header) -> Decoded<Call> {
    let mut completion = messages(step, "completion")?.unwrap_or_default();
    let message = match completion.len() {
        0 => plain("assistant", Value::Null),
        1 => completion.remove(0),
        count => {
            return Err(reject(Reason::Contradiction, "TG-FORMAT-078", format!("`completion` has {count} messages"))
                .why("A step is one call of the model, and it is ambiguous which message it sampled")
                .fix("Write a step for each call"));
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

/// Reads ids and logprobs of one call, and returns its prompt ids.
fn fill(generation: &mut Generation, tokens: &Outline<'_>) -> Decoded<Option<Vec<u32>>> {
    let columns = Columns(tokens);
    let ids = columns.ids("completion_ids")?.unwrap_or_default();
    let logprobs = columns.logprobs("completion_logprobs")?.filter(|logprobs| !logprobs.is_empty() || ids.is_empty());
    if let Some(at) = columns.mask("completion_mask")?.unwrap_or_default().iter().position(|bit| !bit) {
        return Err(reject(Reason::Contradiction, "TG-FORMAT-079", format!("completion_mask is 0 at {at}"))
            .why("A token of a completion that was not sampled belongs to no call of the model")
            .fix("Write a step for each call of the model, with the ids it sampled as its completion"));
    }
    generation.tokens = tokens_of(Some(ids), logprobs);
    generation.notes.extend(all_zero(&generation.tokens));
    columns.ids("prompt_ids")
}

/// Reads one call of a renderer's client from its dict.
fn turn(record: &Outline<'_>, header: &Header) -> Decoded<Body> {
    let mut generation = header.sampling.generation();
    generation.prompt = fill(&mut generation, record)?.map_or(Prompt::Unknown, Prompt::Ids);
    generation.finish_reason = record.text("finish_reason")?;
    let mut fields = Fields::new();
    fields.insert("role".to_owned(), "assistant".into());
    for key in ["content", "reasoning_content", "tool_calls"] {
        fields.insert(key.to_owned(), record.value(key)?.unwrap_or(Value::Null));
    }
    let message = message(Value::Object(openai(fields)))?;
    let mut talk = conversation::ConversationBuilder::default();
    talk.add_sampled(message, generation)?;
    Ok(talk.finish())
}

/// The data of a node that its children need.
struct Node {
    parent: Option<usize>,
    /// Ids of this node after the last sampled id of the path.
    tail: Vec<u32>,
    /// Index of the node's generation, if the node has sampled ids.
    turn: Option<u32>,
    /// Number of messages on the path to the node, including its own.
    depth: usize,
}

pub(super) fn decode_graph(record: &Outline<'_>) -> Decoded<(Header, Body)> {
    let header = header(record)?;
    let nodes = record.objects("nodes")?;
    let calls = calls_of(record)?;
    let trains = !record.object("agent")?.is_some_and(|agent| matches!(agent.typed("trainable"), Ok(Some(false))));
    let mut graph = Graph { header: &header, calls, body: Body::default(), nodes: Vec::new() };
    for (index, node) in nodes.iter().enumerate() {
        graph.add(node, trains).map_err(|rejection| rejection.inside(format!("nodes[{index}]")))?;
    }
    if let Some(last) = graph.nodes.len().checked_sub(1) {
        graph.body.conversation = graph.path(last);
    }
    let mut body = graph.body;
    let root_tools = nodes.first().map(|root| root.value("tools")).transpose()?.flatten();
    body.tools = tools(either(root_tools, || record.value("tools"))?);
    body.model = graph.calls.iter().find_map(|(_, call)| call.get("model")?.as_str().map(str::to_owned));
    Ok((header, body))
}

struct Graph<'h> {
    header: &'h Header,
    /// Fields of `calls` about the calls that created nodes, sorted by node.
    calls: Vec<(usize, Fields)>,
    body: Body,
    nodes: Vec<Node>,
}

impl Graph<'_> {
    fn add(&mut self, node: &Outline<'_>, trains: bool) -> Decoded<()> {
        let index = self.nodes.len();
        let parent = node.count("parent")?.map(|parent| parent as usize);
        if let Some(parent) = parent.filter(|&parent| parent >= index) {
            let what = format!("its parent is node {parent}, which does not stand before it");
            return Err(reject(Reason::Contradiction, "TG-FORMAT-080", what)
                .why("The path to it cannot be walked")
                .fix("Write the trace as verifiers' to_record makes it"));
        }
        self.body.messages.push(message_of(node)?);
        let columns = Columns(node);
        let ids = columns.ids("token_ids")?.unwrap_or_default();
        let is_sampled = trains && node.typed::<bool>("sampled")? == Some(true);
        let mask = columns.mask("mask")?.unwrap_or_default();
        if (is_sampled || !mask.is_empty()) && mask.len() != ids.len() {
            return Err(lengths("mask", mask.len(), ids.len()));
        }
        let depth = parent.map_or(1, |parent| self.nodes[parent].depth + 1);
        let mut new_node = Node { parent, tail: Vec::new(), turn: None, depth };
        if is_sampled {
            self.sample(node, ids, &mask, &mut new_node)?;
        } else {
            new_node.tail = ids;
        }
        self.nodes.push(new_node);
        Ok(())
    }

    fn sample(&mut self, node: &Outline<'_>, ids: Vec<u32>, mask: &[bool], new_node: &mut Node) -> Decoded<()> {
        let index = self.nodes.len();
        let start = mask.iter().position(|&bit| bit).unwrap_or(mask.len());
        let end = start + mask[start..].iter().take_while(|&&bit| bit).count();
        if mask.get(end..).is_some_and(|rest| rest.contains(&true)) {
            return Err(reject(Reason::Contradiction, "TG-FORMAT-081", "its mask has several runs of sampled ids")
                .why("A node is one call of the model")
                .fix("Write the trace as verifiers' to_record makes it"));
        }
        let mut generation = self.header.sampling.generation();
        self.describe(index, &mut generation);
        generation.message = index as u32;
        generation.prompt = self.prompt(new_node.parent, &ids[..start])?;
        self.body.budget.spend(new_node.depth)?;
        generation.context = new_node.parent.map_or_else(Vec::new, |parent| self.path(parent));
        let logprobs = Columns(node).logprobs("logprobs")?.filter(|logprobs| !logprobs.is_empty());
        if start < end || logprobs.is_some() {
            generation.tokens = tokens_of((start < end).then(|| ids[start..end].to_vec()), logprobs);
            generation.notes.extend(all_zero(&generation.tokens));
        }
        (new_node.tail, new_node.turn) =
            if start < end { (ids[end..].to_vec(), Some(self.body.generations.len() as u32)) } else { (ids, None) };
        self.body.generations.push(generation);
        Ok(())
    }

    /// Returns the prompt of a node: all ids of its parents after the last sampled one, then `lead`.
    fn prompt(&mut self, parent: Option<usize>, lead: &[u32]) -> Decoded<Prompt> {
        let (mut at, mut parts, mut turn) = (parent, Vec::new(), None);
        while let Some(index) = at {
            let node = &self.nodes[index];
            parts.push(index);
            turn = node.turn;
            at = node.parent.filter(|_| turn.is_none());
        }
        let count = lead.len() + parts.iter().map(|&part| self.nodes[part].tail.len() + 1).sum::<usize>();
        self.body.budget.spend(count)?;
        let mut ids = Vec::with_capacity(count);
        for &part in parts.iter().rev() {
            ids.extend_from_slice(&self.nodes[part].tail);
        }
        ids.extend_from_slice(lead);
        Ok(match turn {
            Some(turn) => Prompt::Follows { turn, ids },
            None if ids.is_empty() => Prompt::Rendered,
            None => Prompt::Ids(ids),
        })
    }

    /// Returns the messages on the path to a node, including its own.
    fn path(&self, index: usize) -> Vec<u32> {
        let mut path = Vec::with_capacity(self.nodes[index].depth);
        let mut at = Some(index);
        while let Some(index) = at {
            path.push(index as u32);
            at = self.nodes[index].parent;
        }
        path.reverse();
        path
    }

    /// Reads the sampling parameters of the call that created a node.
    fn describe(&self, node: usize, generation: &mut Generation) {
        let Ok(index) = self.calls.binary_search_by_key(&node, |(node, _)| *node) else { return };
        let fields = &self.calls[index].1;
        let sampling = fields.get("sampling").and_then(Value::as_object);
        let number = |key: &str| sampling?.get(key)?.as_f64().map(|value| value as f32);
        generation.temperature = generation.temperature.or(number("temperature"));
        generation.top_p = generation.top_p.or(number("top_p"));
        generation.options = std::mem::take(&mut generation.options).or(&sampling.map_or(Options::NONE, Options::read));
        generation.finish_reason = fields.get("finish_reason").and_then(Value::as_str).map(str::to_owned);
    }
}

fn message_of(node: &Outline<'_>) -> Decoded<Message> {
    match node.value("message")? {
        Some(Value::Object(mut fields)) => {
            fields.remove("provider_state");
            message(Value::Object(openai(fields)))
        }
        _ => Err(reject(Reason::Incomplete, "TG-FORMAT-082", "no `message`")
            .why("The content of the node is unknown")
            .fix("Write the trace as verifiers' to_record makes it")),
    }
}

fn calls_of(record: &Outline<'_>) -> Decoded<Vec<(usize, Fields)>> {
    let mut calls = Vec::new();
    for (position, call) in record.objects("calls")?.iter().enumerate() {
        let node = call.count("node").map_err(|rejection| rejection.inside(format!("calls[{position}]")))?;
        if let Some(node) = node {
            calls.push((node as usize, call.fields_without(&["usage", "time", "acp"])?));
        }
    }
    calls.sort_by_key(|(node, _)| *node);
    Ok(calls)
}

/// Reads the header. The weighted rewards keep their names, their sum is the reward as in verifiers' `Trace.reward`,
/// and the task is the group.
fn header(record: &Outline<'_>) -> Decoded<Header> {
    let mut header = Columns(record).header_without(&["rewards", "tools"], &[])?;
    if let Some(rewards) = record.object("rewards")? {
        let mut sum = None;
        for name in rewards.keys() {
            let value = match rewards.get(name).map(Shape::of) {
                Some(Shape::Object) => {
                    let reward = rewards.object(name)?.unwrap_or_default();
                    let weight = reward.number("weight")?.unwrap_or(1.0);
                    reward.number("score")?.map(|score| score * weight)
                }
                _ => rewards.number(name)?,
            };
            sum = value.map(|value| sum.unwrap_or(0.0) + value).or(sum);
            header.rewards.push((name.to_owned(), value.map_or(f32::NAN, |value| value as f32)));
        }
        header.reward = header.reward.or(sum.map(|sum| sum as f32));
    }
    if let Some(task) = record.object("task")?.filter(|_| header.group.is_none()) {
        header.group = either(task.name("key")?, || task.name("hash"))?;
    }
    Ok(header)
}
